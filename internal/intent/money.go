// This file is about money: an exact decimal and a currency, with one spelling
// for each amount, so that equal amounts are equal structs.

package intent

import (
	"strconv"
	"strings"

	"github.com/bojanz/currency"
)

// Unit says what a value counts.
type Unit string

const (
	// UnitMajor: the value counts whole currency units, 49.99 USD.
	UnitMajor Unit = "Major"
	// UnitMinor: the value counts the smallest units, 4999 cents.
	UnitMinor Unit = "Minor"
)

// Bounds of money. 40 digits hold any amount of an 18-decimal token; no asset
// in use has more than 36 decimals.
const (
	maxMoneyDigits   = 40
	maxMoneyText     = 64
	maxAssetExponent = 36
	maxCurrencyText  = 128
)

// Money is an amount that is not negative. Value is its canonical decimal in
// major units: no exponent, no superfluous zeros, no more digits after the
// point than the currency has. Currency is an upper-case ISO 4217 code, or a
// token asset that names its own exponent, ASSET/exponent:
//
//	USDC/6
//	eip155:8453/erc20:0x833589fcd6edb6e08f4c7c32d4f71b54bda02913/6
//
// ASSET is a symbol of upper-case letters, digits, "." and "-", or a qualified
// name with ":" in it, such as a CAIP-19 asset. The text after the last "/" is
// the number of decimals, 0 to 36. There is one spelling for each asset: a hex
// address is in lower case, and an ISO 4217 code takes no exponent.
type Money struct {
	Value    string `json:"value"`
	Currency string `json:"currency"`
}

// NewMoney reads an amount as JSON or a user writes it: "705.00", "1e1". With
// UnitMinor the value counts the currency's smallest units. Negative amounts,
// more than 40 digits, and digits beyond the currency's exponent that are not
// zero are refused: an amount is never rounded.
func NewMoney(value string, currency string, unit Unit) (Money, error) {
	exponent, err := exponentOf(currency)
	if err != nil {
		return Money{}, err
	}
	n, err := parseAmount(value)
	if err != nil {
		return Money{}, err
	}
	switch unit {
	case UnitMajor:
	case UnitMinor:
		n = n.shift(-exponent)
	default:
		return Money{}, invalid("amount", "unit %.40q is not known: use %s or %s", string(unit), UnitMajor, UnitMinor)
	}
	if n.exp < -exponent {
		smallest := "a whole number"
		if exponent > 0 {
			smallest = strconv.Itoa(exponent) + " digits after the point"
		}
		if unit == UnitMinor {
			return Money{}, invalid("amount", "counts parts of the smallest unit of %s: give a whole number of them", currency)
		}
		return Money{}, invalid("amount", "is finer than %s allows: round it to %s", currency, smallest)
	}
	if max(n.point(), 1)+max(-n.exp, 0) > maxMoneyDigits {
		return Money{}, tooManyDigits()
	}
	return Money{Value: n.String(), Currency: currency}, nil
}

func parseAmount(value string) (Number, error) {
	// The text is measured before it is read, so that a bad one is refused
	// cheaply.
	mantissa := value
	if i := strings.IndexAny(value, "eE"); i >= 0 {
		mantissa = value[:i]
	}
	digits := len(mantissa) - strings.Count(mantissa, ".") - strings.Count(mantissa, "-")
	if len(value) > maxMoneyText || digits > maxMoneyDigits {
		return Number{}, tooManyDigits()
	}
	n, err := ParseNumber(value)
	if err != nil {
		return Number{}, invalid("amount", `%q is not a decimal number of sensible size: write it like 10 or 49.99`, value)
	}
	if n.sign() < 0 {
		return Number{}, invalid("amount", "is negative: give what is to be moved, without a sign")
	}
	return n, nil
}

func tooManyDigits() error {
	return invalid("amount", "has more than %d digits: give the exact amount without superfluous zeros", maxMoneyDigits)
}

// exponentOf gives a currency's number of digits after the point.
func exponentOf(code string) (int, error) {
	if code == "" {
		return 0, invalid("currency", "is empty: use an ISO 4217 code such as USD, or ASSET/exponent")
	}
	if len(code) > maxCurrencyText {
		return 0, invalid("currency", "has more than %d bytes: use an ISO 4217 code such as USD, or ASSET/exponent", maxCurrencyText)
	}
	if digits, ok := currency.GetDigits(code); ok {
		return int(digits), nil
	}
	slash := strings.LastIndexByte(code, '/')
	if slash < 0 {
		if upper := strings.ToUpper(code); currency.IsValid(upper) {
			return 0, invalid("currency", "%q is in lower case: write %s", code, upper)
		}
		return 0, invalid("currency", "%.40q is not an ISO 4217 code: use one such as USD, or ASSET/exponent for a token, such as USDC/6", code)
	}
	asset := code[:slash]
	exponent, err := strconv.Atoi(code[slash+1:])
	if err != nil || strconv.Itoa(exponent) != code[slash+1:] || exponent < 0 || exponent > maxAssetExponent {
		return 0, invalid("currency", "%.40q names no exponent of 0 to %d after the last slash: write it like USDC/6", code, maxAssetExponent)
	}
	return exponent, checkAsset(asset)
}

func checkAsset(asset string) error {
	if asset == "" {
		return invalid("currency", "no asset before the slash: write it like USDC/6")
	}
	if upper := strings.ToUpper(asset); currency.IsValid(upper) {
		return invalid("currency", "%s has the exponent of ISO 4217: write %s alone", upper, upper)
	}
	qualified := strings.Contains(asset, ":")
	for i := range len(asset) {
		c := asset[i]
		switch {
		case '0' <= c && c <= '9', 'A' <= c && c <= 'Z':
		case i > 0 && (c == '.' || c == '-'):
		case qualified && i > 0 && ('a' <= c && c <= 'z' || strings.IndexByte(":/_%", c) >= 0):
		case qualified && 'a' <= c && c <= 'z':
		default:
			return invalid("currency", `the asset %.40q is not a symbol of upper-case letters, digits, "." and "-", nor a qualified name such as eip155:1/slip44:60`, asset)
		}
	}
	for part := range strings.FieldsFuncSeq(asset, func(r rune) bool { return r == ':' || r == '/' }) {
		hex, found := strings.CutPrefix(strings.ToLower(part), "0x")
		if qualified && found && hex != "" && strings.Trim(hex, "0123456789abcdef") == "" && part != strings.ToLower(part) {
			return invalid("currency", "a hex address has one spelling: write it in lower case")
		}
	}
	return nil
}

// number reads a Money that may have been made by hand or read from a record.
func (m Money) number() (n Number, exponent int, err error) {
	canonical, err := NewMoney(m.Value, m.Currency, UnitMajor)
	if err != nil {
		return Number{}, 0, err
	}
	if canonical != m {
		return Number{}, 0, invalid("amount", "%q is not canonical: write %s", m.Value, canonical.Value)
	}
	if exponent, err = exponentOf(m.Currency); err != nil {
		return Number{}, 0, err
	}
	n, err = ParseNumber(m.Value)
	return n, exponent, err
}

// Minor gives the amount as a whole number of the currency's smallest units:
// "4999" for 49.99 USD. It is empty for a Money that NewMoney would not make.
func (m Money) Minor() string {
	n, exponent, err := m.number()
	if err != nil {
		return ""
	}
	return n.shift(exponent).String()
}

// Display gives the value as people write it: with all digits that an ISO 4217
// currency has, 49.90 USD. A token's value stays as it is.
func (m Money) Display() string {
	digits, ok := currency.GetDigits(m.Currency)
	if !ok || digits == 0 {
		return m.Value
	}
	whole, fraction, _ := strings.Cut(m.Value, ".")
	return whole + "." + fraction + strings.Repeat("0", max(int(digits)-len(fraction), 0))
}

// Cmp is -1, 0 or 1 as m is less than, equal to or greater than o. Amounts of
// different currencies, and those that NewMoney would not make, are an error.
func (m Money) Cmp(o Money) (int, error) {
	a, _, err := m.number()
	if err != nil {
		return 0, err
	}
	b, _, err := o.number()
	if err != nil {
		return 0, err
	}
	if m.Currency != o.Currency {
		return 0, invalid("currency", "%s and %s cannot be compared: give amounts of one currency", m.Currency, o.Currency)
	}
	return a.Cmp(b), nil
}

// String is the amount for people: "49.99 USD".
func (m Money) String() string { return m.Value + " " + m.Currency }
