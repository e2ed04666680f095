// Numbers: one text for each value (K06), bounds, and order against math/big.

package intent

import (
	"encoding/json"
	"math/big"
	"strings"
	"testing"
	"time"
)

func TestParseNumber(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"0", "0"}, {"-0", "0"}, {"0.0", "0"}, {"-0.00e5", "0"}, {"0e9999", "0"},
		{"10", "10"}, {"10.0", "10"}, {"1e1", "10"}, {"1E+1", "10"}, {"100e-1", "10"}, {"0.1e2", "10"}, {"1e0000001", "10"},
		{"-1.50", "-1.5"}, {"0.1", "0.1"}, {"1e-7", "0.0000001"}, {"123.456e1", "1234.56"}, {"100", "100"},
		{"9007199254740993", "9007199254740993"}, {"9007199254740992", "9007199254740992"},
		{"1000000000000000001", "1000000000000000001"}, {"1000000000000000000", "1000000000000000000"},
		{"0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"},
		{"1e79", "1" + strings.Repeat("0", 79)}, {"1e80", "1e80"}, {"12e79", "1.2e80"}, {"-1e9999", "-1e9999"},
		{"1e-81", "0." + strings.Repeat("0", 80) + "1"}, {"1e-82", "1e-82"}, {"1.5e-9999", "1.5e-9999"},
		{"1" + strings.Repeat("0", 600), "1e600"}, {"0." + strings.Repeat("0", 600) + "1", "1e-601"},
	} {
		n, err := ParseNumber(c.in)
		if err != nil || n.String() != c.want {
			t.Errorf("ParseNumber(%q) = %s, %v; want %s", c.in, n, err, c.want)
			continue
		}
		again, err := ParseNumber(n.String())
		if err != nil || again != n {
			t.Errorf("%s reads back as %s, %v", n, again, err)
		}
		if text, err := json.Marshal(n); err != nil || string(text) != c.want {
			t.Errorf("marshals as %s, %v", text, err)
		}
	}
}

func TestParseNumberRefuses(t *testing.T) {
	for _, c := range []struct{ in, wrong string }{
		{"", "not a decimal"}, {"-", "not a decimal"}, {"+1", "not a decimal"}, {"01", "not a decimal"}, {"-01", "not a decimal"},
		{".5", "not a decimal"}, {"5.", "not a decimal"}, {"1e", "not a decimal"}, {"1e+", "not a decimal"}, {"1.e1", "not a decimal"},
		{"0x10", "not a decimal"}, {"NaN", "not a decimal"}, {"Infinity", "not a decimal"}, {"-inf", "not a decimal"},
		{" 1", "not a decimal"}, {"1 ", "not a decimal"}, {"1_000", "not a decimal"}, {"1,000", "not a decimal"}, {"١", "not a decimal"}, {"1 2", "not a decimal"},
		{"1e10000", "exponent"}, {"1e-10000", "exponent"}, {"12e9999", "exponent"}, {"1e999999", "exponent"}, {"1e-999999999999999999999", "exponent"}, {"0e999999", "exponent"},
		{strings.Repeat("7", 513), "512 significant digits"}, {strings.Repeat("7", 5000), "1024 bytes"}, {strings.Repeat("\x00", 1000), "not a decimal"},
	} {
		if n, err := ParseNumber(c.in); err == nil {
			t.Errorf("ParseNumber(%.40q) = %s", c.in, n)
		} else {
			wantInvalid(t, err, "number", c.wrong)
		}
	}
}

func TestNumberInt64(t *testing.T) {
	for _, c := range []struct {
		in   string
		want int64
		ok   bool
	}{
		{"0", 0, true}, {"-0", 0, true}, {"10", 10, true}, {"1e1", 10, true}, {"-7.0", -7, true}, {"0.5", 0, false},
		{"9223372036854775807", 9223372036854775807, true}, {"9223372036854775808", 0, false},
		{"-9223372036854775808", -9223372036854775808, true}, {"1e18", 1e18, true}, {"1e19", 0, false}, {"1e9999", 0, false},
	} {
		n, err := ParseNumber(c.in)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := n.Int64(); ok != c.ok || ok && got != c.want {
			t.Errorf("%s: %d, %v; want %d, %v", c.in, got, ok, c.want, c.ok)
		}
	}
	if got, ok := (Number{}).Int64(); got != 0 || !ok {
		t.Errorf("the zero Number: %d, %v", got, ok)
	}
}

func TestNumberCmp(t *testing.T) {
	rising := []string{
		"-1e9999", "-1000", "-999.9", "-10", "-1.01", "-1", "-0.1", "-1e-9999", "0", "1e-9999", "0.099", "0.1", "0.11", "0.9",
		"1", "1.01", "9", "10", "99", "100", "101", "9007199254740992", "9007199254740993", "1e9999",
	}
	for i, a := range rising {
		for j, b := range rising {
			x, errX := ParseNumber(a)
			y, errY := ParseNumber(b)
			if errX != nil || errY != nil {
				t.Fatal(errX, errY)
			}
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := x.Cmp(y); got != want {
				t.Errorf("%s against %s: %d, want %d", a, b, got, want)
			}
		}
	}
}

func FuzzParseNumber(f *testing.F) {
	for _, seed := range [][2]string{
		{"10", "1e1"}, {"-0", "0"}, {"9007199254740993", "9007199254740992"}, {"1.10", "1.1"}, {"1e-3", "0.01"},
		{"1e999999", "1"}, {"NaN", "0x1"}, {"-5", "-50"}, {"0.00e-3", "12345.6789e4"}, {"1e200", "1e-200"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		a, errA := ParseNumber(one)
		b, errB := ParseNumber(other)
		if (errA == nil) && !json.Valid([]byte(one)) {
			t.Fatalf("%q is not a JSON number", one)
		}
		if errA != nil || errB != nil {
			return
		}
		x, _ := new(big.Rat).SetString(one)
		y, _ := new(big.Rat).SetString(other)
		if a.Cmp(b) != x.Cmp(y) || (a == b) != (x.Cmp(y) == 0) || (a.String() == b.String()) != (a == b) {
			t.Fatalf("%s against %s: %d (%s and %s), want %d", one, other, a.Cmp(b), a, b, x.Cmp(y))
		}
		text, err := ParseNumber(a.String())
		if err != nil || text != a {
			t.Fatalf("%s reads back as %s, %v", a, text, err)
		}
		i, ok := a.Int64()
		if fits := x.IsInt() && x.Num().IsInt64(); ok != fits || ok && i != x.Num().Int64() {
			t.Fatalf("%s as an integer: %d, %v", one, i, ok)
		}
	})
}

func TestSegmentText(t *testing.T) {
	n, err := ParseNumber("9.00")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		in   any
		want string
	}{{"9", "9"}, {n, "9"}, {int(9), "9"}, {int64(-9), "-9"}, {uint64(1 << 63), "9223372036854775808"}, {"9.00", "9.00"}, {"a/b", "a/b"}, {"", ""}} {
		if got, err := SegmentText(c.in); err != nil || got != c.want {
			t.Errorf("%T %v: %q, %v; want %q", c.in, c.in, got, err, c.want)
		}
	}
	for _, v := range []any{nil, true, 9.0, []any{"a"}, map[string]any{}} {
		if got, err := SegmentText(v); err == nil {
			t.Errorf("%T %v: %q", v, v, got)
		} else {
			wantInvalid(t, err, "path", "give a string or a number")
		}
	}
}

// A few bytes of input must not buy much work. The bound is far
// above what it takes, and far below what one expanded exponent would.
func TestHostileNumbersAreCheap(t *testing.T) {
	start := time.Now()
	for _, s := range []string{"1e999999999", "1e-999999999", "1e9999", "1e-9999", strings.Repeat("9", 1<<20), "1e" + strings.Repeat("9", 1<<20)} {
		if n, err := ParseNumber(s); err == nil && len(n.String()) > 10 {
			t.Errorf("%.20q has a text of %d bytes", s, len(n.String()))
		}
		if m, err := NewMoney(s, "USD", UnitMinor); err == nil {
			t.Errorf("%.20q is %s", s, m)
		}
		if _, err := ParseJSON([]byte(s)); err == nil && len(s) > 100 {
			t.Errorf("%.20q is accepted", s)
		}
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}
