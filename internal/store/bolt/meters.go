package bolt

// Meters: exact decimals, as text in the file. Nothing is ever rounded; a context
// of precision 0 computes to the last digit.

import (
	"context"
	"fmt"

	"github.com/cockroachdb/apd/v3"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var exact = apd.BaseContext

// change is what one meter entry comes to; empty texts remove.
type change struct {
	meter  string
	amount string
	sum    string
}

// decimal reads one of the file's or a request's; none is 0.
func decimal(text string) (*apd.Decimal, error) {
	if text == "" {
		return apd.New(0, 0), nil
	}
	d, _, err := apd.NewFromString(text)
	if err != nil {
		return nil, fmt.Errorf("%w: meter with %q: %w", errDamaged, text, err)
	}
	return d, nil
}

// meter computes what the entries come to, and names the first meter that would be
// raised above its limit. It writes nothing.
func (t *txn) meter(id uint64, entries []store.MeterEntry) (changes []change, full string, err error) {
	for _, e := range entries {
		before, err := decimal(string(t.entries().Get(entryKey(id, e.Meter))))
		if err != nil {
			return nil, "", err
		}
		after, err := decimal(e.Amount)
		if err != nil {
			return nil, "", err
		}
		sum, err := decimal(string(t.sums().Get([]byte(e.Meter))))
		if err != nil {
			return nil, "", err
		}
		if _, err := exact.Sub(sum, sum, before); err != nil {
			return nil, "", fmt.Errorf("meter: %w", err)
		}
		if _, err := exact.Add(sum, sum, after); err != nil {
			return nil, "", fmt.Errorf("meter: %w", err)
		}
		if sum.Negative && !sum.IsZero() {
			return nil, "", fmt.Errorf("%w: meter below 0", errDamaged)
		}
		if e.Limit != "" && after.Cmp(before) > 0 {
			limit, err := decimal(e.Limit)
			if err != nil {
				return nil, "", err
			}
			if sum.Cmp(limit) > 0 {
				return nil, e.Meter, nil
			}
		}
		changes = append(changes, change{meter: e.Meter, amount: store.PlainDecimal(after), sum: store.PlainDecimal(sum)})
	}
	return changes, "", nil
}

func (t *txn) writeMeters(id uint64, changes []change) error {
	for _, c := range changes {
		if err := t.putOrRemove(t.entries(), entryKey(id, c.meter), []byte(c.amount)); err != nil {
			return err
		}
		if err := t.putOrRemove(t.sums(), []byte(c.meter), []byte(c.sum)); err != nil {
			return err
		}
	}
	return nil
}

// Meter returns the sum of a meter in its shortest plain form.
func (s *Store) Meter(ctx context.Context, meter string) (string, error) {
	if err := store.ValidateName(meter); err != nil {
		return "", err
	}
	sum := "0"
	err := s.view(ctx, func(t *txn) error {
		if v := t.sums().Get([]byte(meter)); v != nil {
			sum = string(v)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	return sum, nil
}
