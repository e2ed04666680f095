package store

import "github.com/cockroachdb/apd/v3"

// PlainDecimal is a decimal's shortest form without an exponent, as amounts, limits and
// sums of meters are written; empty for 0.
func PlainDecimal(d *apd.Decimal) string {
	if d.IsZero() {
		return ""
	}
	var short apd.Decimal
	short.Reduce(d)
	return short.Text('f')
}
