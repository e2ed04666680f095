// This file is the record as the guard keeps it: a header that hits and lists
// show, and a body with everything else. What follows from a record alone (is an
// attempt unknown, what is the join, does it stand in the way) is computed here.

package guard

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// maxHoldHistory is how many ended holds a record remembers.
	maxHoldHistory = 64
	// maxDetail bounds a text that comes from outside.
	maxDetail = 512
)

// header is what hits and lists show. Each record has one in the store's memory, so what
// the key says is not said again (see encoding.go).
type header struct {
	Namespace         string
	Tool              string
	Caller            string
	CallerUID         string
	IntentID          string
	State             State
	Scope             intent.Scope
	Lineage           intent.Path
	Amount            *intent.Money
	Recipient         string
	Fingerprint       string
	IdentityHash      string
	AmountHash        string
	RecipientHash     string
	Hold              int
	ProviderReference string
	RefundOwed        bool
	Disputed          bool
	Created           time.Time
	Changed           time.Time
}

type attempt struct {
	Number     int
	Generation int
	Nonce      string // of the Reserve that made it
	Outcome    Outcome
	Started    time.Time
	LeaseEnd   time.Time
	// Lease, Grace and SettleAfter are lengths: what a judge must have watched for.
	Lease       time.Duration
	Grace       time.Duration
	SettleAfter time.Duration
	Ended       time.Time
	// Excused: a release counts it as nothing moved for the join.
	Excused bool
	// Denied: a person's word (MarkFailed) that it moved nothing.
	Denied bool
	// Counted: a success that became known while an attempt under a later key of the
	// provider was in flight. It counts in the join though its own key is an earlier one.
	Counted  bool
	Accepted bool // the upstream answered 202
	// Resumed: it sent what an earlier attempt had sent, whose outcome is unknown.
	Resumed bool
	// Wall is the beginning by the own clock of the process that made it; zero: it is not known.
	Wall time.Time
	// Lost stands for all attempts that the store may have forgotten. Whoever accepted
	// the loss has waited until what they moved would be visible.
	Lost     bool
	Late     bool
	SentLate bool
	// LateUntil is by when a byte that was sent late had been written.
	LateUntil time.Time
	Reference string
	Response  *Response // of a success that has not been joined yet
	Status    int
	Detail    string
	// Claim is the token under which a local tool's agent claimed it.
	Claim string
	// Renewals is how often its lease was renewed. Each is watched anew.
	Renewals int
}

// unknown: not known to have moved nothing, and not known to have succeeded.
func (a *attempt) unknown() bool {
	return a.Outcome != AttemptSucceeded && !a.Outcome.movedNothing()
}

// mayHaveMoved: not known to have moved nothing.
func (a *attempt) mayHaveMoved() bool {
	return a.Outcome == AttemptSucceeded || !a.Outcome.movedNothing() && !a.Denied
}

type hold struct {
	Number       int
	Nonce        string // of the write that made it
	Reasons      []Reason
	Matches      []Match
	MatchCount   int
	Watermark    store.Watermark // frozen by an overlap hold alone
	Lineage      bool            // lineages were compared under that watermark
	Lookalike    bool            // recipients and amounts were
	At           time.Time
	Waiting      bool
	WaitingUntil time.Time
	Cause        string
	// What became of it.
	End      HoldState
	Decision Decision
	By       string
	Words    string
	Effect   string
	EndedAt  time.Time
}

func (h *hold) has(r Reason) bool {
	for _, x := range h.Reasons {
		if x == r {
			return true
		}
	}
	return false
}

// anew is the hold that takes this one's place: it shows the same, and a release of it
// covers the same.
func (h *hold) anew(cause string) *hold {
	return &hold{
		Reasons: h.Reasons, Matches: h.Matches, MatchCount: h.MatchCount,
		Watermark: h.Watermark, Lineage: h.Lineage, Lookalike: h.Lookalike, Cause: cause,
	}
}

// passed is what a taken release passes over.
type passed struct {
	Watermark store.Watermark
	Lineage   bool
	Lookalike bool
	// Budget is the domain that the refused Reserve had looked at.
	Budget string
}

type body struct {
	Policy      Policy
	Generation  int // of the provider's key; rises when a KeyExpired hold is released
	ProviderKey string
	Attempts    []attempt
	// BudgetFrom is the number of attempts before the last release: the retry budget counts from there.
	BudgetFrom int
	Current    *hold  // the newest hold, ended or not
	Ended      []hold // earlier ones
	Passed     []passed
	Response   *Response
	// RetryAt is when a retryable intent may be tried again.
	RetryAt    time.Time
	ReleasedAt time.Time
	SettledAt  time.Time
	SettledAs  State
	// Winner is the number of the attempt whose success settled the record.
	Winner       int
	MarkedPaid   bool
	MarkedFailed bool
	Expired      bool
	// Memory is the epoch of the write, where the store had lost its memory before: of
	// what was written earlier, later steps may be missing.
	Memory string
	// Imported: it was made of what a hold's object had shown, and not sent since.
	Imported bool
	// PaidByHand outlives MarkedPaid: a person has said once that it was paid.
	PaidByHand bool
	// Checks are those of the attempt whose outcome is unknown; nil: there are none.
	Checks *checks
	// Kept is the request of the last call, sealed, while it could be sent again; NotKept says
	// why there is none.
	Kept    []byte
	NotKept string
	// ResumeAt is when it is sent again; zero: it is not, and ResumesOver says why.
	ResumeAt    time.Time
	ResumesOver string
	// PaidAttempts is how many attempts there were then.
	PaidAttempts int
	// Charges are what it counts for in the limits of its budget.
	Charges []charge
	// SpendPass is the number of the first attempt that a person has let pass the limits; 0: none.
	SpendPass int
	// Registration is what was said of it before it was called; nil: nothing.
	Registration *Registration
	// RulePass is the number of the first attempt that a person has let pass the rules that
	// hold; 0: none.
	RulePass int
	// KeyWindow is how long the provider knows the present key, by the least that earlier
	// policies have said since an attempt under it may have been paid; 0: none has.
	KeyWindow time.Duration
}

type record struct {
	header
	body
	key     string
	version uint64
	named   *markNames // of its marks and probes; nil: not made yet
}

func (k Key) String() string { return lengthPrefixed(k.Namespace, k.Tool, k.Caller, k.IntentID) }

// lengthPrefixed joins parts so that no two lists give the same text.
func lengthPrefixed(parts ...string) string {
	var b [256]byte // enough for most, so that the text needs no other memory
	return string(appendPrefixed(b[:0], parts...))
}

func appendPrefixed(b []byte, parts ...string) []byte {
	for _, p := range parts {
		b = append(strconv.AppendInt(b, int64(len(p)), 10), ':')
		b = append(b, p...)
	}
	return b
}

// splitPrefixed is the reverse of lengthPrefixed for so many parts.
func splitPrefixed(s string, parts []string) bool {
	for i := range parts {
		digits, rest, ok := strings.Cut(s, ":")
		n, err := strconv.Atoi(digits)
		if !ok || err != nil || n < 0 || n > len(rest) {
			return false
		}
		parts[i], s = rest[:n], rest[n:]
	}
	return s == ""
}

// HoldName is the name of the PaymentHold that shows hold number k of this record.
func HoldName(k Key, number int) string {
	sum := sha256.Sum256([]byte(k.String()))
	digits := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
	return fmt.Sprintf("%s-%s-%d", k.Tool, strings.ToLower(digits[:26]), number)
}

// IntentName is a name for a PaymentIntent that shows this record.
func IntentName(k Key) string { return strings.TrimSuffix(HoldName(k, 0), "-0") }

// providerKey is the stable key that the provider sees.
func providerKey(domain string, k Key, generation int) string {
	var text [512]byte
	b := text[:0]
	for _, p := range [...]string{domain, k.Namespace, k.Tool, k.Caller, k.IntentID, strconv.Itoa(generation)} {
		b = append(binary.BigEndian.AppendUint64(b, uint64(len(p))), p...)
	}
	sum := sha256.Sum256(b)
	const prefix, kept = "hf_", 24
	var key [len(prefix) + 2*kept]byte
	hex.Encode(key[copy(key[:], prefix):], sum[:kept])
	return string(key[:])
}

func (r *record) id() Key {
	return Key{Namespace: r.Namespace, Tool: r.Tool, Caller: r.Caller, IntentID: r.IntentID}
}

// clone gives a copy that can be changed without touching r.
func (r *record) clone() *record {
	c := *r
	c.Attempts = append([]attempt(nil), r.Attempts...)
	c.Ended = append([]hold(nil), r.Ended...)
	c.Passed = append([]passed(nil), r.Passed...)
	if r.Current != nil {
		h := *r.Current
		c.Current = &h
	}
	c.Checks = r.Checks.clone()
	return &c
}

// last is the newest attempt; nil if nothing was ever tried.
func (r *record) last() *attempt {
	if len(r.Attempts) == 0 {
		return nil
	}
	return &r.Attempts[len(r.Attempts)-1]
}

// attemptWith finds an attempt by its fence: number and nonce.
func (r *record) attemptWith(n int, nonce string) *attempt {
	if n < 1 || n > len(r.Attempts) || r.Attempts[n-1].Nonce != nonce {
		return nil
	}
	return &r.Attempts[n-1]
}

// anyUnknown: an attempt's outcome is not known, in any generation.
func (r *record) anyUnknown() bool {
	for i := range r.Attempts {
		if r.Attempts[i].unknown() && !r.Attempts[i].Denied {
			return true
		}
	}
	return false
}

// releasedUnknown: an attempt under this key of the provider was released without its
// outcome ever becoming known.
func (r *record) releasedUnknown() bool {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Generation == r.Generation && a.unknown() && a.Excused && !a.Denied {
			return true
		}
	}
	return false
}

// anySucceeded: an attempt has succeeded, in any generation.
func (r *record) anySucceeded() bool {
	for i := range r.Attempts {
		if r.Attempts[i].Outcome == AttemptSucceeded {
			return true
		}
	}
	return false
}

// mayHaveMoved: an attempt is not known to have moved nothing, in any generation.
func (r *record) mayHaveMoved() bool {
	for i := range r.Attempts {
		if r.Attempts[i].mayHaveMoved() {
			return true
		}
	}
	return false
}

// accepted: an attempt was accepted but is not final, so its absence in a ledger proves
// nothing; unless a person has since said that it moved nothing.
func (r *record) accepted() bool {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Accepted && a.unknown() && !a.Denied {
			return true
		}
	}
	return false
}

// neverFinal: an attempt's outcome is unknown, and no time says that it moved nothing.
func (r *record) neverFinal() bool {
	return r.Policy.Check != nil && r.Policy.Check.Unbounded && r.anyUnknown()
}

// join is the intent's outcome: of the attempts of this generation of the
// provider's key, succeeded if any did, unknown if any is, else nothing moved
// (AttemptFailed). The success that decided comes with it. A success of an earlier
// key counts if it came as news while this one's attempt was in flight.
func (r *record) join() (Outcome, *attempt) {
	unknown := false
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Generation != r.Generation && !a.Counted {
			continue
		}
		if a.Outcome == AttemptSucceeded {
			return AttemptSucceeded, a
		}
		if a.unknown() && !a.Excused {
			unknown = true
		}
	}
	if unknown {
		return AttemptUnknown, nil
	}
	return AttemptFailed, nil
}

// standing says whether the record stands in the way of others, and whether that ends with the window.
func (r *record) standing() (stands, ends bool) {
	moved := r.mayHaveMoved() || r.PaidByHand
	state := r.State
	if state == Tombstone {
		state = r.SettledAs
	}
	switch state {
	case InFlight, Pending:
		return true, false
	case Held, Released, Retryable:
		return moved, false
	case Succeeded:
		return true, true
	case Failed:
		// An attempt that was released without being known to have moved nothing does not age.
		return moved, !r.anyUnknown()
	case Rejected:
		return moved, true
	}
	return false, false
}

// neverSent: no attempt was ever begun.
func (r *record) neverSent() bool { return len(r.Attempts) == 0 }

// unsent: no attempt is known to have been begun.
func (r *record) unsent() bool {
	for i := range r.Attempts {
		if !r.Attempts[i].Lost {
			return false
		}
	}
	return true
}

// watched names what a judge watches: the last attempt, and anew once it is known that
// a byte was sent late.
func (r *record) watched() string {
	name := ""
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.SentLate {
			name += a.LateUntil.String()
		}
	}
	if a := r.last(); a != nil {
		name += a.Nonce
		if a.Renewals > 0 {
			name += " " + strconv.Itoa(a.Renewals)
		}
	}
	return name + r.watchedCheck()
}

// waitOver is when a payment of the attempts that are unknown would be visible, or never
// will be; zero if there is none for which somebody has to wait. A release was taken only
// after that time, so what it counts as nothing moved was waited for: under an earlier key
// that is all, but for what late word has reopened.
func (r *record) waitOver() (at time.Time, watch time.Duration) {
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if !a.unknown() || a.Excused || a.Lost {
			continue
		}
		end := a.LeaseEnd
		if a.LateUntil.After(end) {
			end = a.LateUntil
		}
		if end = end.Add(a.Grace + a.SettleAfter); end.After(at) {
			at = end
		}
		watch = max(watch, a.Lease+a.Grace+a.SettleAfter)
	}
	return at, watch
}

// check asserts what must hold of every record that is written.
func (r *record) check() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s: %s", ErrInvariant, r.State, fmt.Sprintf(format, args...))
	}
	outcome, _ := r.join()
	switch r.State {
	case InFlight:
		a := r.last()
		if a == nil || a.Outcome != AttemptOpen {
			return fail("the last attempt is not open")
		}
		for i := range r.Attempts[:len(r.Attempts)-1] {
			b := &r.Attempts[i]
			// What is known late (Late) was counted as nothing moved when this attempt began.
			if b.unknown() && !b.Excused && !b.Late && b.Generation == r.Generation && !a.Resumed {
				return fail("attempt %d is unknown and nobody released it", b.Number)
			}
		}
		if a.Resumed && (r.Policy.Resume == nil || len(r.Kept) == 0) {
			return fail("the request of resumed attempt %d was not kept", a.Number)
		}
	case Registered:
		if r.Registration == nil || len(r.Attempts) > 0 {
			return fail("it was not registered, or was sent")
		}
	case Held:
		if r.Current == nil || r.Current.End != "" || r.Current.Number != r.Hold || r.Current.Nonce == "" || len(r.Current.Reasons) == 0 {
			return fail("no current hold")
		}
		if outcome == AttemptSucceeded && !r.Current.has(KeyExpired) {
			return fail("a success is on the record")
		}
	case Pending:
		if outcome != AttemptUnknown || r.Checks == nil || r.Policy.Check == nil {
			return fail("the join is %s, and nobody may ask", outcome)
		}
	case Retryable:
		if outcome != AttemptFailed {
			return fail("the join is %s", outcome)
		}
	case Released:
		if outcome != AttemptFailed {
			return fail("the join is %s", outcome)
		}
	case Failed:
		if outcome != AttemptFailed && !r.MarkedFailed {
			return fail("the join is %s", outcome)
		}
	case Succeeded:
		if !r.anySucceeded() && !r.MarkedPaid {
			return fail("the join is %s", outcome)
		}
	}
	if len(r.Kept) > 0 && (r.State.Settled() || r.State == Retryable) {
		return fail("the request is still kept")
	}
	if r.State != Held && r.Current != nil && r.Current.End == "" {
		return fail("hold %d has no end", r.Current.Number)
	}
	// Without a fingerprint it waits for its first call to say it, so none can have been made.
	if len(r.Scope) == 0 || r.Fingerprint == "" && !r.unsent() || r.Caller == "" || r.IntentID == "" {
		return fail("the identity is incomplete")
	}
	return nil
}

func clip(s string) string {
	if len(s) > maxDetail {
		return strings.ToValidUTF8(s[:maxDetail], "") + "…"
	}
	return s
}

// refund is what is known of a refund that is owed; nil: none is.
func (r *record) refund() *Refund {
	if !r.RefundOwed {
		return nil
	}
	out := &Refund{Amount: r.Amount}
	add := func(reference string) {
		if reference != "" && !slices.Contains(out.References, reference) {
			out.References = append(out.References, reference)
		}
	}
	add(r.ProviderReference)
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.Outcome == AttemptSucceeded {
			add(a.Reference)
		}
	}
	return out
}

func (h *hold) view(r *record, epoch string) HoldView {
	v := HoldView{
		HoldID:  HoldID{Key: r.id(), Number: h.Number, Epoch: epoch, Nonce: h.Nonce},
		Name:    HoldName(r.id(), h.Number),
		Reasons: h.Reasons, Matches: h.Matches, MatchCount: h.MatchCount,
		WaitingUntil: h.WaitingUntil, Cause: h.Cause, Effect: h.Effect,
		Decision: h.Decision, By: h.By, At: h.At,
	}
	if h.Number == r.Hold {
		v.Refund = r.refund()
	}
	switch {
	case h.End != "":
		v.State = h.End
	case h.Waiting:
		v.State = HoldWaiting
	default:
		v.State = HoldHeld
	}
	return v
}

func (a *attempt) view() AttemptView {
	return AttemptView{
		Number: a.Number, Outcome: a.Outcome, Started: a.Started, Ended: a.Ended, Status: a.Status,
		ProviderReference: a.Reference, Late: a.Late, SentLate: a.SentLate, Lost: a.Lost, Resumed: a.Resumed, Detail: a.Detail,
	}
}

func (r *record) view(epoch string) View {
	v := View{
		Key: r.id(), CallerUID: r.CallerUID, Exists: true, State: r.State, Scope: r.Scope, Lineage: r.Lineage,
		Amount: r.Amount, Recipient: r.Recipient, Fingerprint: r.Fingerprint,
		ProviderKey: r.ProviderKey, ProviderReference: r.ProviderReference, RefundOwed: r.RefundOwed, Disputed: r.Disputed,
		SettledAs: r.SettledAs, Created: r.Created, Changed: r.Changed, HoldCount: r.Hold, Checks: r.checksView(), Resumes: r.resumesView(), Refund: r.refund(),
		Registration: r.Registration,
	}
	if r.State == Registered {
		v.Expires = r.registeredUntil()
	}
	if n := len(r.Attempts); n > 0 {
		v.Attempts = make([]AttemptView, 0, n)
	}
	for i := range r.Attempts {
		v.Attempts = append(v.Attempts, r.Attempts[i].view())
	}
	if r.Current != nil {
		h := r.Current.view(r, epoch)
		v.Hold = &h
	}
	return v
}
