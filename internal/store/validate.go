package store

// What a request must be before any store looks at it. It is here, and not in
// the stores, so that they all refuse the same.

import (
	"fmt"
	"time"
)

const (
	// MaxString is the most bytes of a key, a nonce, a mark, a probe, a tag and a meter.
	MaxString = 4096
	// MaxDecimal is the most characters of an amount or a limit.
	MaxDecimal = 100
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// Validate refuses an identity with a missing part.
func (id Identity) Validate() error {
	if err := validString("epoch", id.Epoch); err != nil {
		return err
	}
	return validString("key domain", id.KeyDomain)
}

// ValidateDisown refuses to replace an epoch by itself, or one of them that is none.
func ValidateDisown(epoch, next string) error {
	if err := validString("epoch", epoch); err != nil {
		return err
	}
	if next == epoch {
		return invalid("the next epoch is the present one")
	}
	return validString("next epoch", next)
}

// Validate refuses what breaks the contract for a Reserve. It does not know the
// store's watermarks.
func (r Reserve) Validate() error {
	if r.Record == nil {
		return invalid("Reserve without a record; Update deletes")
	}
	if r.KeepMarks || r.RenewMarks {
		return invalid("KeepMarks or RenewMarks in a Reserve")
	}
	for i, p := range r.Probes {
		if err := validString("probe", p.String); err != nil {
			return fmt.Errorf("probe %d: %w", i, err)
		}
		if len(p.Except) > MaxString {
			return invalid("probe %d: tag longer than %d bytes", i, MaxString)
		}
	}
	return r.Write.Validate()
}

// Validate refuses what breaks the contract for an Update.
func (w Write) Validate() error {
	for _, s := range []struct{ what, value string }{{"epoch", w.Epoch}, {"key", w.Key}, {"nonce", w.Nonce}} {
		if err := validString(s.what, s.value); err != nil {
			return err
		}
	}
	if w.Record == nil {
		switch {
		case w.Expected == 0:
			return invalid("delete without the version to delete")
		case len(w.Marks) > 0 || w.KeepMarks || w.RenewMarks || !w.Until.IsZero() || len(w.Meters) > 0:
			return invalid("delete with marks or meters")
		}
		return nil
	}
	if err := validTime("due", w.Record.Due); err != nil {
		return err
	}
	switch {
	case w.KeepMarks && w.RenewMarks:
		return invalid("both KeepMarks and RenewMarks")
	case (w.KeepMarks || w.RenewMarks) && len(w.Marks) > 0:
		return invalid("marks, and KeepMarks or RenewMarks")
	case !w.RenewMarks && !w.Until.IsZero():
		return invalid("Until without RenewMarks")
	}
	if err := validTime("until", w.Until); err != nil {
		return err
	}
	for i, m := range w.Marks {
		if err := validString("mark", m.String); err != nil {
			return fmt.Errorf("mark %d: %w", i, err)
		}
		if len(m.Tag) > MaxString {
			return invalid("mark %d: tag longer than %d bytes", i, MaxString)
		}
		if err := validTime("until", m.Until); err != nil {
			return fmt.Errorf("mark %d: %w", i, err)
		}
	}
	seen := make(map[string]bool, len(w.Meters))
	for i, m := range w.Meters {
		if err := validString("meter", m.Meter); err != nil {
			return fmt.Errorf("meter entry %d: %w", i, err)
		}
		if seen[m.Meter] {
			return invalid("meter entry %d: the meter is set twice", i)
		}
		seen[m.Meter] = true
		if m.Amount != "" && !validDecimal(m.Amount) {
			return invalid("meter entry %d: amount is not a plain decimal of 0 or more", i)
		}
		if m.Limit != "" && !validDecimal(m.Limit) {
			return invalid("meter entry %d: limit is not a plain decimal of 0 or more", i)
		}
	}
	return nil
}

// Validate refuses a list that selects nothing sensible. It does not know the
// store's cursors.
func (l List) Validate() error {
	switch l.What {
	case ListDue:
		if l.Before.IsZero() {
			return invalid("list of due records without Before")
		}
	case ListHeld:
		if !l.Before.IsZero() {
			return invalid("list of held records with Before")
		}
	default:
		return invalid("unknown listing %q", l.What)
	}
	if l.Limit < 0 {
		return invalid("limit %d", l.Limit)
	}
	return nil
}

// ValidateName refuses a key to get, or a meter to read, that no write could have set.
func ValidateName(name string) error {
	return validString("name", name)
}

func validString(what, s string) error {
	if s == "" {
		return invalid("empty %s", what)
	}
	if len(s) > MaxString {
		return invalid("%s longer than %d bytes", what, MaxString)
	}
	return nil
}

// validTime keeps times within what every store can hold: years 1971 to 9998, or none.
func validTime(what string, t time.Time) error {
	if t.IsZero() {
		return nil
	}
	if y := t.UTC().Year(); y < 1971 || y > 9998 {
		return invalid("%s in the year %d", what, y)
	}
	return nil
}

// validDecimal accepts digits with at most one point between them: no sign, no
// exponent, no NaN.
func validDecimal(s string) bool {
	if len(s) > MaxDecimal {
		return false
	}
	points := 0
	for i, c := range []byte(s) {
		switch {
		case c >= '0' && c <= '9':
		case c == '.' && i > 0 && i < len(s)-1:
			points++
		default:
			return false
		}
	}
	return s != "" && points <= 1
}
