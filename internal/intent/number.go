// This file is about numbers: exact decimals of bounded size. A Number has one
// representation for each value, so == is equality and the text is canonical.
// All that is done to a number here is shifting its point and comparing it, so
// it is kept as text and no arithmetic can round it.

package intent

import (
	"cmp"
	"encoding/json"
	"strconv"
	"strings"
)

// Bounds of a number. Beyond them it is refused, so that a few bytes of input
// ("1e999999999") never cost more than a few bytes of work.
const (
	maxNumberText     = 1024 // bytes as written
	maxNumberDigits   = 512  // significant digits
	maxNumberExponent = 9999 // of the leading digit, either sign
	maxPlainZeros     = 80   // point positions that String writes without an exponent
)

// Number is an exact decimal, digits × 10^exp. The zero Number is 0.
type Number struct {
	negative bool   // never of zero
	digits   string // no leading and no trailing zero; empty: 0
	exp      int    // 0 of zero
}

// ParseNumber reads a number as JSON writes it (RFC 8259, section 6): an
// optional minus, digits without leading zeros, a fraction, an exponent. A
// plus, spaces, hex, "NaN", ".5" and "5." are refused.
func ParseNumber(s string) (Number, error) {
	if len(s) > maxNumberText {
		return Number{}, invalid("number", "is written with more than %d bytes: shorten it", maxNumberText)
	}
	end := scanNumber(s)
	if end == 0 || end != len(s) {
		return Number{}, invalid("number", `%.40q is not a decimal number: write it like 10, 49.99 or 1e3`, s)
	}
	return makeNumber(s)
}

// scanNumber gives the length of the JSON number that s begins with, or 0.
func scanNumber[T string | []byte](s T) int {
	i := 0
	digits := func() bool {
		start := i
		for i < len(s) && '0' <= s[i] && s[i] <= '9' {
			i++
		}
		return i > start
	}
	if i < len(s) && s[i] == '-' {
		i++
	}
	if i < len(s) && s[i] == '0' {
		i++
	} else if !digits() {
		return 0
	}
	if i < len(s) && s[i] == '.' {
		i++
		if !digits() {
			return 0
		}
	}
	if i < len(s) && (s[i] == 'e' || s[i] == 'E') {
		i++
		if i < len(s) && (s[i] == '+' || s[i] == '-') {
			i++
		}
		if !digits() {
			return 0
		}
	}
	return i
}

// makeNumber reads a text of the right grammar and bounded length.
func makeNumber(s string) (Number, error) {
	var n Number
	s, n.negative = strings.CutPrefix(s, "-")
	if i := strings.IndexAny(s, "eE"); i >= 0 {
		exp, err := strconv.Atoi(s[i+1:])
		if err != nil || exp > 2*maxNumberExponent || exp < -2*maxNumberExponent {
			return Number{}, exponentTooLarge()
		}
		s, n.exp = s[:i], exp
	}
	whole, fraction, _ := strings.Cut(s, ".")
	n.exp -= len(fraction)
	digits := strings.TrimLeft(whole+fraction, "0")
	n.digits = strings.TrimRight(digits, "0")
	n.exp += len(digits) - len(n.digits)
	switch leading := n.point() - 1; {
	case n.digits == "":
		return Number{}, nil
	case len(n.digits) > maxNumberDigits:
		return Number{}, invalid("number", "has more than %d significant digits: shorten it", maxNumberDigits)
	case leading > maxNumberExponent || leading < -maxNumberExponent:
		return Number{}, exponentTooLarge()
	}
	return n, nil
}

func exponentTooLarge() error {
	return invalid("number", "has an exponent beyond ±%d: use a number of sensible size", maxNumberExponent)
}

// point is the position of the decimal point, counted from the first digit.
func (n Number) point() int { return len(n.digits) + n.exp }

// String is the number's canonical text, itself a JSON number. It has no
// exponent if the point is at most 80 places from the first digit, and no
// superfluous zeros.
func (n Number) String() string {
	if n.digits == "" {
		return "0"
	}
	sign := ""
	if n.negative {
		sign = "-"
	}
	switch point := n.point(); {
	case point > maxPlainZeros || point < -maxPlainZeros:
		text := sign + n.digits[:1]
		if len(n.digits) > 1 {
			text += "." + n.digits[1:]
		}
		return text + "e" + strconv.Itoa(point-1)
	case point <= 0:
		return sign + "0." + strings.Repeat("0", -point) + n.digits
	case n.exp >= 0:
		return sign + n.digits + strings.Repeat("0", n.exp)
	default:
		return sign + n.digits[:point] + "." + n.digits[point:]
	}
}

// Int64 gives the number as an integer, if it is one and fits.
func (n Number) Int64() (int64, bool) {
	// Checked first, so that only what may fit is written out.
	if n.exp < 0 || n.point() > 19 {
		return 0, false
	}
	i, err := strconv.ParseInt(n.String(), 10, 64)
	return i, err == nil
}

// Cmp is -1, 0 or 1 as n is less than, equal to or greater than o.
func (n Number) Cmp(o Number) int {
	if n.sign() != o.sign() {
		return cmp.Compare(n.sign(), o.sign())
	}
	c := cmp.Compare(n.point(), o.point())
	if c == 0 {
		// Both begin at the same place and neither ends in zeros, so the order of
		// the texts is the order of the values.
		c = strings.Compare(n.digits, o.digits)
	}
	return c * n.sign()
}

func (n Number) sign() int {
	switch {
	case n.digits == "":
		return 0
	case n.negative:
		return -1
	}
	return 1
}

// shift gives n × 10^by, which may leave the bounds of ParseNumber.
func (n Number) shift(by int) Number {
	if n.digits != "" {
		n.exp += by
	}
	return n
}

// MarshalJSON writes the canonical text, so that a decoded body can be written
// again without loss.
func (n Number) MarshalJSON() ([]byte, error) { return []byte(n.String()), nil }

var _ json.Marshaler = Number{}

// SegmentText gives a value's text as a segment of a path: a string as it is,
// a number in its canonical text, so that 9, 9.0 and "9" are one segment. Any
// other value is an error; a float is, because it may already have been
// rounded.
func SegmentText(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case Number:
		return v.String(), nil
	case int:
		return strconv.Itoa(v), nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	case uint64:
		return strconv.FormatUint(v, 10), nil
	case nil:
		return "", invalid("path", "a segment is null: give a string or a number")
	default:
		return "", invalid("path", "a segment is of type %T: give a string or a number", v)
	}
}
