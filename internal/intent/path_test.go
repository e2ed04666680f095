// Paths: escaping, bounds, and containment by segment, also against a second,
// slower way to say the same.

package intent

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// wantInvalid fails unless err is an InvalidError that speaks of all words.
func wantInvalid(t *testing.T, err error, words ...string) {
	t.Helper()
	var invalid *InvalidError
	if !errors.As(err, &invalid) {
		t.Fatalf("got error %v, want an *InvalidError", err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
	if len(err.Error()) > 600 {
		t.Errorf("the error has %d bytes", len(err.Error()))
	}
}

func repeat(s string, n int) []string { return slices.Repeat([]string{s}, n) }

func TestNewPath(t *testing.T) {
	for _, c := range []struct {
		name     string
		segments []string
		want     Path
		wrong    string
	}{
		{name: "one", segments: []string{"a"}, want: "a"},
		{name: "order", segments: []string{"customer", "c1", "order", "9"}, want: "customer/c1/order/9"},
		{name: "slash", segments: []string{"a/b", "c"}, want: "a%2Fb/c"},
		{name: "percent", segments: []string{"100%", "%2F"}, want: "100%25/%252F"},
		{name: "dots are segments like others", segments: []string{"..", "."}, want: "../."},
		{name: "case is kept", segments: []string{"A", "a"}, want: "A/a"},
		{name: "no normalisation", segments: []string{"e\u0301", "\u00e9"}, want: "e\u0301/\u00e9"},
		{name: "eight deep", segments: repeat("x", 8), want: "x/x/x/x/x/x/x/x"},
		{name: "longest segment", segments: []string{strings.Repeat("x", 253)}, want: Path(strings.Repeat("x", 253))},
		{name: "none", wrong: "no segment"},
		{name: "empty", segments: []string{""}, wrong: "segment 1 is empty"},
		{name: "empty in the middle", segments: []string{"a", "", "b"}, wrong: "segment 2 is empty"},
		{name: "nine deep", segments: repeat("x", 9), wrong: "at most 8"},
		{name: "segment too long", segments: []string{strings.Repeat("x", 254)}, wrong: "more than 253 bytes"},
		{name: "too long once escaped", segments: []string{strings.Repeat("/", 85)}, wrong: "more than 253 bytes"},
		{name: "line feed", segments: []string{"a\nb"}, wrong: "control character"},
		{name: "nul", segments: []string{"\x00"}, wrong: "control character"},
		{name: "delete", segments: []string{"\x7f"}, wrong: "control character"},
		{name: "C1 control", segments: []string{"a\u0085"}, wrong: "control character"},
		{name: "not UTF-8", segments: []string{"a\xff"}, wrong: "UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := NewPath(c.segments...)
			if c.wrong != "" {
				wantInvalid(t, err, "path", c.wrong)
				return
			}
			if err != nil || got != c.want {
				t.Fatalf("NewPath(%q) = %q, %v; want %q", c.segments, got, err, c.want)
			}
			if again, err := ParsePath(string(got)); err != nil || again != got {
				t.Errorf("ParsePath(%q) = %q, %v", got, again, err)
			}
			if back := got.Segments(); !slices.Equal(back, c.segments) {
				t.Errorf("Segments() = %q, want %q", back, c.segments)
			}
		})
	}
}

func TestParsePathRefuses(t *testing.T) {
	for _, c := range []struct{ name, text, wrong string }{
		{"empty", "", "no segment"},
		{"leading slash", "/a", "segment 1 is empty"},
		{"trailing slash", "a/", "segment 2 is empty"},
		{"double slash", "a//b", "segment 2 is empty"},
		{"bare percent", "a%", "%25"},
		{"lower-case escape", "a%2fb", "%25"},
		{"needless escape", "%41", "%25"},
		{"half an escape", "a%2", "%25"},
		{"nine deep", "1/2/3/4/5/6/7/8/9", "at most 8"},
		{"long", strings.Repeat("x", 254), "253 bytes"},
		{"very long", strings.Repeat("x/", 1<<20), "more than 2031 bytes"},
		{"control", "a\tb", "control character"},
		{"not UTF-8", "\xc0\xaf", "UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParsePath(c.text)
			wantInvalid(t, err, "path", c.wrong)
		})
	}
}

func TestLongestPathIsWithinMaxPathBytes(t *testing.T) {
	p, err := NewPath(repeat(strings.Repeat("x", MaxSegmentBytes), MaxSegments)...)
	if err != nil || len(p) != MaxPathBytes {
		t.Fatalf("%d bytes, %v; want %d", len(p), err, MaxPathBytes)
	}
	if _, err := ParsePath(string(p)); err != nil {
		t.Error(err)
	}
}

func TestAncestors(t *testing.T) {
	for _, c := range []struct {
		path Path
		want []Path
	}{
		{"", nil},
		{"a", nil},
		{"a/b", []Path{"a"}},
		{"customer/c1/order/9", []Path{"customer", "customer/c1", "customer/c1/order"}},
		{"a%2Fb/c", []Path{"a%2Fb"}},
	} {
		if got := c.path.Ancestors(); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.path, got, c.want)
		}
	}
}

func TestContains(t *testing.T) {
	for _, c := range []struct {
		p, q Path
		want bool
	}{
		{"customer/c1", "customer/c1", true},
		{"customer/c1", "customer/c1/order/9", true},
		{"customer", "customer/c1/order/9", true},
		{"customer/c1/order/9", "customer/c1", false},
		{"customer/c1", "customer/c10", false},
		{"customer/c1", "customer/c10/order/9", false},
		{"customer/c1/order/8", "customer/c1/order/9", false},
		{"a", "a%2Fb", false},
		{"a%2Fb", "a%2Fb/c", true},
		{"A", "a", false},
		{"", "a", false},
		{"a", "", false},
		{"", "", false},
	} {
		if got := c.p.Contains(c.q); got != c.want {
			t.Errorf("%q contains %q: %v, want %v", c.p, c.q, got, c.want)
		}
	}
}

func FuzzPath(f *testing.F) {
	for _, seed := range [][2]string{
		{"customer\x1fc1", "customer\x1fc1\x1forder\x1f9"}, {"a/b", "a\x1fb"}, {"%2F", "/"}, {"a", "ab"},
		{"", "x"}, {"%", "%25"}, {"\xff", "é"}, {"a\x1f\x1fb", "a\nb"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		as, bs := strings.Split(one, "\x1f"), strings.Split(other, "\x1f")
		a, errA := NewPath(as...)
		b, errB := NewPath(bs...)
		if errA == nil {
			if parsed, err := ParsePath(string(a)); err != nil || parsed != a {
				t.Fatalf("ParsePath(%q) = %q, %v", a, parsed, err)
			}
			if !slices.Equal(a.Segments(), as) {
				t.Fatalf("%q has the segments %q, want %q", a, a.Segments(), as)
			}
		}
		if p, err := ParsePath(one); err == nil {
			if again, err := NewPath(p.Segments()...); err != nil || again != p {
				t.Fatalf("%q is not canonical: %q, %v", p, again, err)
			}
		}
		if errA != nil || errB != nil {
			return
		}
		if want := len(as) <= len(bs) && slices.Equal(as, bs[:len(as)]); a.Contains(b) != want {
			t.Fatalf("%q contains %q: %v, want %v", a, b, !want, want)
		}
		if want := a.Contains(b) && a != b; slices.Contains(b.Ancestors(), a) != want {
			t.Fatalf("%q among the ancestors of %q: %v, want %v", a, b, !want, want)
		}
	})
}
