// Package intent knows what a payment is: its identity, its canonical form,
// its money, its scope and its lineage. All of it is pure functions: no clock,
// no I/O, no state, and no import of another package of this project.
//
// Two calls are told apart, or taken for one, by what this package says, so
// three things hold everywhere in it. A number never passes through a float.
// Every canonical text is injective: two values share one only if they are
// equal. Input that is not understood in full is an *InvalidError, never a
// guess and never a panic.
package intent

import "fmt"

// InvalidError is input that cannot be accepted. The caller can mend it, so
// the gateway answers it with 400 and shows the text as it is. It never quotes
// more than a short, bounded piece of the input.
type InvalidError struct {
	// Field names what was read: "body", "amount", "intent ID", "path", …
	Field string
	// Reason says what is wrong and what to do.
	Reason string
}

func (e *InvalidError) Error() string { return e.Field + ": " + e.Reason }

func invalid(field, format string, args ...any) error {
	return &InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
}
