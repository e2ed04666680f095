// Money (K05): units, exponents, token assets, and everything that is refused.

package intent

import (
	"encoding/json"
	"math/big"
	"strings"
	"testing"
)

func TestNewMoney(t *testing.T) {
	usdc := "eip155:8453/erc20:0x833589fcd6edb6e08f4c7c32d4f71b54bda02913/6"
	for _, c := range []struct {
		value, currency string
		unit            Unit
		want, minor     string
	}{
		{"10000", "JPY", UnitMajor, "10000", "10000"},
		{"10000", "JPY", UnitMinor, "10000", "10000"},
		{"705.00", "JPY", UnitMajor, "705", "705"},
		{"1.234", "KWD", UnitMajor, "1.234", "1234"},
		{"1234", "KWD", UnitMinor, "1.234", "1234"},
		{"1.2340", "KWD", UnitMajor, "1.234", "1234"},
		{"49.99", "USD", UnitMajor, "49.99", "4999"},
		{"4999", "USD", UnitMinor, "49.99", "4999"},
		{"4990.0", "USD", UnitMinor, "49.9", "4990"},
		{"5", "USD", UnitMinor, "0.05", "5"},
		{"1e1", "USD", UnitMajor, "10", "1000"},
		{"12.50E-1", "USD", UnitMajor, "1.25", "125"},
		{"0", "USD", UnitMajor, "0", "0"},
		{"-0.00", "USD", UnitMinor, "0", "0"},
		{"9007199254740993", "USD", UnitMajor, "9007199254740993", "900719925474099300"},
		{"1000000000000000001", "ETH/18", UnitMinor, "1.000000000000000001", "1000000000000000001"},
		{"1", "USDC/6", UnitMinor, "0.000001", "1"},
		{"0.5", usdc, UnitMajor, "0.5", "500000"},
		{"1", "eip155:1/slip44:60/18", UnitMajor, "1", "1000000000000000000"},
		{"3", "POINTS/0", UnitMajor, "3", "3"},
		{"1", "X/36", UnitMinor, "0." + strings.Repeat("0", 35) + "1", "1"},
		{"0.0001", "CLF", UnitMajor, "0.0001", "1"},
		{"2.5", "0X/18", UnitMajor, "2.5", "2500000000000000000"},
		{strings.Repeat("9", 38) + ".99", "USD", UnitMajor, strings.Repeat("9", 38) + ".99", strings.Repeat("9", 40)},
		{"1e39", "X/36", UnitMajor, "1" + strings.Repeat("0", 39), "1" + strings.Repeat("0", 75)},
	} {
		t.Run(c.value+" "+c.currency+" "+string(c.unit), func(t *testing.T) {
			m, err := NewMoney(c.value, c.currency, c.unit)
			if err != nil || m.Value != c.want || m.Currency != c.currency || m.Minor() != c.minor {
				t.Fatalf("%+v (minor %s), %v; want %s (minor %s)", m, m.Minor(), err, c.want, c.minor)
			}
			if again, err := NewMoney(m.Value, m.Currency, UnitMajor); err != nil || again != m {
				t.Errorf("again: %+v, %v", again, err)
			}
			if again, err := NewMoney(m.Minor(), m.Currency, UnitMinor); err == nil && again != m {
				t.Errorf("from minor units: %+v", again)
			}
		})
	}
}

func TestNewMoneyRefuses(t *testing.T) {
	for _, c := range []struct {
		value, currency string
		unit            Unit
		wrong           string
	}{
		{"10.5", "JPY", UnitMajor, "whole number"},
		{"1.2345", "KWD", UnitMajor, "3 digits after the point"},
		{"49.999", "USD", UnitMajor, "2 digits after the point"},
		{"0.5", "USD", UnitMinor, "parts of the smallest unit"},
		{"0.5", "JPY", UnitMinor, "parts of the smallest unit"},
		{"1e-7", "USDC/6", UnitMajor, "6 digits after the point"},
		{"-1", "USD", UnitMajor, "negative"},
		{"-0.01", "USD", UnitMajor, "negative"},
		{"", "USD", UnitMajor, "not a decimal"},
		{"NaN", "USD", UnitMajor, "not a decimal"},
		{"Infinity", "USD", UnitMajor, "not a decimal"},
		{"0x10", "USD", UnitMajor, "not a decimal"},
		{"1,5", "USD", UnitMajor, "not a decimal"},
		{"$5", "USD", UnitMajor, "not a decimal"},
		{"+5", "USD", UnitMajor, "not a decimal"},
		{"007", "USD", UnitMajor, "not a decimal"},
		{" 5", "USD", UnitMajor, "not a decimal"},
		{strings.Repeat("9", 41), "USD", UnitMajor, "more than 40 digits"},
		{"1." + strings.Repeat("0", 40), "USD", UnitMajor, "more than 40 digits"},
		{"1e40", "USD", UnitMajor, "more than 40 digits"},
		{"1e9999", "USD", UnitMajor, "more than 40 digits"},
		{"1e999999", "USD", UnitMajor, "not a decimal number of sensible size"},
		{"1e-999999", "USD", UnitMinor, "not a decimal number of sensible size"},
		{strings.Repeat("9", 1<<20), "USD", UnitMajor, "more than 40 digits"},
		{"1e" + strings.Repeat("0", 1<<20), "USD", UnitMajor, "more than 40 digits"},
		{"5", "usd", UnitMajor, "write USD"},
		{"5", "Usd", UnitMajor, "write USD"},
		{"5", "ABC", UnitMajor, "ISO 4217"},
		{"5", "US", UnitMajor, "ISO 4217"},
		{"5", " USD", UnitMajor, "ISO 4217"},
		{"5", "", UnitMajor, "is empty"},
		{"5", "USDC", UnitMajor, "USDC/6"},
		{"5", "USDC/", UnitMajor, "exponent"},
		{"5", "USDC/06", UnitMajor, "exponent"},
		{"5", "USDC/+6", UnitMajor, "exponent"},
		{"5", "USDC/-6", UnitMajor, "exponent"},
		{"5", "USDC/37", UnitMajor, "exponent"},
		{"5", "USDC/six", UnitMajor, "exponent"},
		{"5", "/6", UnitMajor, "no asset"},
		{"5", "usdc/6", UnitMajor, "upper-case"},
		{"5", "US DC/6", UnitMajor, "upper-case"},
		{"5", "ÜSD/6", UnitMajor, "upper-case"},
		{"5", "-A/6", UnitMajor, "upper-case"},
		{"5", "A\n/6", UnitMajor, "upper-case"},
		{"5", ":a/6", UnitMajor, "qualified name"},
		{"5", "a:\x00/6", UnitMajor, "qualified name"},
		{"5", "USD/2", UnitMajor, "write USD alone"},
		{"5", "USD/4", UnitMajor, "write USD alone"},
		{"5", "usd/2", UnitMajor, "write USD alone"},
		{"5", "eip155:1/erc20:0xA0b8/6", UnitMajor, "lower case"},
		{"5", "eip155:1/erc20:0Xa0b8/6", UnitMajor, "lower case"},
		{"5", strings.Repeat("A", 200) + "/6", UnitMajor, "128 bytes"},
		{"5", "USD", "", "use Major or Minor"},
		{"5", "USD", "major", "use Major or Minor"},
	} {
		if m, err := NewMoney(c.value, c.currency, c.unit); err == nil {
			t.Errorf("%.40q %.40q %s: %+v", c.value, c.currency, c.unit, m)
		} else {
			wantInvalid(t, err, c.wrong)
		}
	}
}

func TestMoneyCmp(t *testing.T) {
	money := func(value, currency string) Money {
		m, err := NewMoney(value, currency, UnitMajor)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for _, c := range []struct {
		a, b Money
		want int
	}{
		{money("9", "USD"), money("10", "USD"), -1},
		{money("10.00", "USD"), money("1e1", "USD"), 0},
		{money("0.1", "USD"), money("0.09", "USD"), 1},
		{money("9007199254740993", "USD"), money("9007199254740992", "USD"), 1},
	} {
		if got, err := c.a.Cmp(c.b); err != nil || got != c.want {
			t.Errorf("%s against %s: %d, %v; want %d", c.a, c.b, got, err, c.want)
		}
	}
	for _, c := range []struct {
		a, b  Money
		wrong string
	}{
		{money("1", "USD"), money("1", "EUR"), "one currency"},
		{money("1", "USDC/6"), money("1", "USDC/18"), "one currency"},
		{money("1", "USD"), Money{}, "currency"},
		{Money{"1.0", "USD"}, money("1", "USD"), "not canonical"},
		{money("1", "USD"), Money{"-1", "USD"}, "negative"},
	} {
		_, err := c.a.Cmp(c.b)
		wantInvalid(t, err, c.wrong)
	}
	for _, m := range []Money{{}, {"1.0", "USD"}, {"1.001", "USD"}, {"x", "USD"}, {"1", "usd"}} {
		if got := m.Minor(); got != "" {
			t.Errorf("%+v has %q minor units", m, got)
		}
	}
}

func TestMoneyIsJSONOfTwoStrings(t *testing.T) {
	text, err := json.Marshal(Money{"49.99", "USD"})
	if want := `{"value":"49.99","currency":"USD"}`; err != nil || string(text) != want {
		t.Errorf("%s, %v; want %s", text, err, want)
	}
}

func FuzzNewMoney(f *testing.F) {
	for _, seed := range [][3]string{
		{"705.00", "JPY", "Major"}, {"1.2345", "KWD", "Major"}, {"1e1", "USD", "Minor"}, {"1000000000000000001", "ETH/18", "Minor"},
		{"-0", "USD", "Major"}, {"5", "eip155:1/slip44:60/18", "Major"}, {"1e999999", "usd", ""}, {"5", "a:%/0", "Major"},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, value, currency, unit string) {
		m, err := NewMoney(value, currency, Unit(unit))
		if err != nil {
			wantInvalid(t, err)
			return
		}
		given, _ := new(big.Rat).SetString(value)
		kept := m.Value
		if Unit(unit) == UnitMinor {
			kept = m.Minor()
		}
		if got, ok := new(big.Rat).SetString(kept); !ok || got.Cmp(given) != 0 || got.Sign() < 0 {
			t.Fatalf("%s %s %s became %+v", value, currency, unit, m)
		}
		if again, err := NewMoney(m.Value, m.Currency, UnitMajor); err != nil || again != m {
			t.Fatalf("%+v is not canonical: %+v, %v", m, again, err)
		}
		if strings.ContainsAny(m.Value, "eE+-") || strings.ContainsAny(m.Minor(), ".eE+-") || m.Minor() == "" {
			t.Fatalf("%+v, minor %q", m, m.Minor())
		}
		if c, err := m.Cmp(m); c != 0 || err != nil {
			t.Fatalf("%+v against itself: %d, %v", m, c, err)
		}
	})
}

func TestMoneyDisplay(t *testing.T) {
	for _, c := range []struct{ value, currency, want string }{
		{"49.9", "USD", "49.90"},
		{"50", "USD", "50.00"},
		{"0.01", "USD", "0.01"},
		{"705", "JPY", "705"},
		{"1.2", "KWD", "1.200"},
		{"1.5", "USDC/6", "1.5"},
	} {
		m, err := NewMoney(c.value, c.currency, UnitMajor)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Display(); got != c.want {
			t.Errorf("%s is displayed as %s, want %s", m, got, c.want)
		}
	}
}
