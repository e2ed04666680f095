// Intent IDs (K02): one text for one ID, whichever way it came.

package intent

import (
	"strings"
	"testing"
)

func TestParseIntentID(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"abc", "abc"},
		{`"abc"`, "abc"},
		{"ABC", "ABC"},
		{`"ABC"`, "ABC"},
		{"  abc\t", "abc"},
		{` "abc" `, "abc"},
		{"a b", "a b"},
		{`"a b"`, "a b"},
		{`a"b\c`, `a"b\c`},
		{`"a\"b\\c"`, `a"b\c`},
		{`abc"`, `abc"`},
		{`"abc\""`, `abc"`},
		{`\`, `\`},
		{"sess_abc/plan-2/call-4", "sess_abc/plan-2/call-4"},
		{"a, b; c=1", "a, b; c=1"},
		{"clé", "clé"},
		{"cle\u0301", "cle\u0301"},
		{strings.Repeat("x", 255), strings.Repeat("x", 255)},
		{`"` + strings.Repeat(`\\`, 255) + `"`, strings.Repeat(`\`, 255)},
	} {
		if got, err := ParseIntentID(c.in); err != nil || got != c.want {
			t.Errorf("ParseIntentID(%q) = %q, %v; want %q", c.in, got, err, c.want)
		}
	}
}

func TestParseIntentIDRefuses(t *testing.T) {
	for _, c := range []struct{ in, wrong string }{
		{"", "is empty"}, {"  ", "is empty"}, {`""`, "is empty"},
		{`"abc`, "no closing quote"}, {`"`, "no closing quote"}, {`"abc\"`, "no closing quote"},
		{`"abc"; p=1`, "after its closing quote"}, {`"abc", "def"`, "after its closing quote"}, {`""abc""`, "after its closing quote"},
		{`"a\bc"`, "escapes neither"}, {`"abc\`, "escapes neither"}, {`"a\u0062"`, "escapes neither"},
		{`"clé"`, "printable ASCII"}, {"\"a\tb\"", "printable ASCII"}, {"\"a\x7f\"", "printable ASCII"}, {"\"a\xff\"", "printable ASCII"},
		{`"\"abc\""`, "begins with a quote"}, {`" abc"`, "ends with a space"}, {`"abc "`, "ends with a space"}, {`" "`, "ends with a space"},
		{"a\tb", "control character"}, {"a\nb", "control character"}, {"\x00", "control character"}, {"a\u0085", "control character"}, {"a\x7f", "control character"},
		{"a\xff", "UTF-8"}, {"\xed\xa0\x80", "UTF-8"},
		{strings.Repeat("x", 256), "255 bytes"}, {`"` + strings.Repeat("x", 256) + `"`, "255 bytes"}, {strings.Repeat("é", 128), "255 bytes"}, {strings.Repeat("x", 1<<20), "255 bytes"},
	} {
		if got, err := ParseIntentID(c.in); err == nil {
			t.Errorf("ParseIntentID(%.40q) = %q", c.in, got)
		} else {
			wantInvalid(t, err, "intent ID: ", c.wrong)
		}
	}
}

func FuzzParseIntentID(f *testing.F) {
	for _, seed := range []string{"abc", `"abc"`, `"a\"b"`, `"`, "", " x ", "clé", "\xff", `"\"x"`, `" x"`, "a\x00", `"a";p`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseIntentID(s)
		if err != nil {
			wantInvalid(t, err, "intent ID")
			return
		}
		if again, err := ParseIntentID(id); err != nil || again != id {
			t.Fatalf("%q is %q, which is %q, %v", s, id, again, err)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(id) + `"`
		if same, err := ParseIntentID(quoted); err == nil && same != id {
			t.Fatalf("%q quoted is %q", id, same)
		}
	})
}
