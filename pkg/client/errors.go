// This file is the errors: those that a function returns to say what it knows, and those
// that a caller gets.

package client

import (
	"errors"
	"fmt"
	"time"
)

// What Holdfast said to a call. A *Refusal is one of them.
var (
	// ErrHeld: a person must decide. The payment may have been made, or it looks like one
	// that was: it must not be made in another way. Do it again, under the same ID, later.
	ErrHeld = errors.New("held: a person must decide")
	// ErrConflict: the intent ID belongs to another request.
	ErrConflict = errors.New("the intent ID belongs to another request")
	// ErrDenied: it may not be made.
	ErrDenied = errors.New("denied")
	// ErrPaid: it was paid, and nobody can tell any more whose the answer is. It must not be
	// paid again. It is not one of ErrDenied.
	ErrPaid = errors.New("it was paid, and its result cannot be told any more")
	// ErrRefused: the request itself was refused, or may not be sent by this caller.
	ErrRefused = errors.New("refused")
)

// ErrForgotten: the intent has run, was never settled, and was taken out of the outbox by
// ForgetUnsettled. It is not run again. A purchase that is known not to have been made, and
// is still wanted, needs a new ID.
var ErrForgotten = errors.New("it has run and was forgotten unsettled, so it is not run again under this ID")

// ErrLeaseOver is the cause of the context of a function whose time is over.
var ErrLeaseOver = errors.New("the attempt's lease is over")

// Refusal is a call that was not made now, in Holdfast's words. It may have been made
// before: see ErrHeld and ErrPaid.
type Refusal struct {
	// HTTP status, verdict and reason; the verdict may be empty.
	Status          int
	Verdict, Reason string
	Title, Detail   string
	// Hold is the PaymentHold in which a person decides.
	Hold string
	// Poll is where to ask what became of the intent.
	Poll            string
	SuggestedAction string
	RetryAfter      time.Duration

	// problem: it was read from a problem document.
	problem bool
}

func (r *Refusal) Error() string {
	text := fmt.Sprintf("%s (%d %s)", r.Title, r.Status, r.Reason)
	if r.Detail != "" {
		text += ": " + r.Detail
	}
	return text
}

// Is says which of the errors above it is.
func (r *Refusal) Is(target error) bool {
	switch target {
	case ErrHeld:
		return r.Verdict == verdictHold
	case ErrConflict:
		return r.Verdict == verdictConflict
	case ErrDenied:
		return r.Verdict == verdictDeny && r.Reason != reasonMarkedPaid
	case ErrPaid:
		return r.Verdict == verdictDeny && r.Reason == reasonMarkedPaid
	case ErrRefused:
		return r.Verdict == ""
	}
	return false
}

// FailedError is a payment of which every attempt is known to have moved nothing. It will
// not be tried again under this ID.
type FailedError struct{ Result Result }

func (e *FailedError) Error() string {
	return fmt.Sprintf("it failed, and nothing was paid: %d %.200s", e.Result.Status, e.Result.Body)
}

// UnsettledError is a function that has run, whose result could not be brought to Holdfast
// yet. It is in the outbox, unless NotWritten says otherwise; Do or Recover brings it.
type UnsettledError struct {
	// Paid: the function said that it was paid; then Result is what it returned.
	Paid   bool
	Result Result
	// Answered is what Holdfast says where it will say so every time, as when it no longer
	// knows the claim: a person must look at it. It stays in the outbox until
	// ForgetUnsettled is given these words. Empty: it may be settled yet.
	Answered string
	// NotWritten is why the outbox does not have the result. Nothing but this error knows
	// it: keep it. What goes on with the intent will say that its outcome is unknown.
	NotWritten error
	Err        error
}

func (e *UnsettledError) Error() string {
	what := "the function has run"
	if e.Paid {
		what = "it was paid"
	}
	switch {
	case e.NotWritten != nil:
		what += fmt.Sprintf(", and what it came to is neither settled nor in the outbox (%v), so nothing remembers it but this error", e.NotWritten)
	case e.Answered != "":
		what += ", and what it came to is in the outbox and cannot be settled: a person must look at it; ForgetUnsettled takes it out"
	default:
		what += ", and what it came to is in the outbox and not settled yet"
	}
	return fmt.Sprintf("%s: %v", what, e.Err)
}

func (e *UnsettledError) Unwrap() error { return e.Err }

// NothingMoved is returned by a function that knows that it has moved nothing: it was
// refused, or it never sent. Whoever does not know must return another error.
type NothingMoved struct {
	// Reason says why, for people; it is written down.
	Reason string
	// Again: it may be tried again, not before After. Otherwise it has failed for good.
	Again bool
	After time.Duration
	// Result is what whoever repeats the call gets once it has failed, with a status of
	// 400 to 599; nil: a plain one.
	Result *Result
	Err    error
}

func (e *NothingMoved) Error() string {
	if e.Err != nil {
		return "nothing was moved: " + e.Reason + ": " + e.Err.Error()
	}
	return "nothing was moved: " + e.Reason
}

func (e *NothingMoved) Unwrap() error { return e.Err }

// Accepted is returned by a function whose payment was accepted and is not final. A person
// decides how it ended.
type Accepted struct {
	// Reference is the provider's own name of the payment.
	Reference string
}

func (e *Accepted) Error() string { return "accepted, and not final: " + e.Reference }
