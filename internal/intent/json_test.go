// JSON: what is refused (K07), what is kept exactly (K06), and that the
// canonical form is injective and reads back. encoding/json is the second
// opinion.

package intent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func number(t testing.TB, s string) Number {
	t.Helper()
	n, err := ParseNumber(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestParseJSONAndCanonical(t *testing.T) {
	deep := strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth)
	for _, c := range []struct {
		name, in  string
		want      any
		canonical string
	}{
		{"null", "null", nil, "null"},
		{"booleans", "[true,false]", []any{true, false}, "[true,false]"},
		{"spaces", " \t\r\n[ 1 , 2 ]\n", []any{number(t, "1"), number(t, "2")}, "[1,2]"},
		{"empty ones", `[{},[],""]`, []any{map[string]any{}, []any{}, ""}, `[{},[],""]`},
		{"keys sorted by bytes", `{"b":1,"a":2,"B":3,"é":4,"":5,"aa":6}`,
			map[string]any{"b": number(t, "1"), "a": number(t, "2"), "B": number(t, "3"), "é": number(t, "4"), "": number(t, "5"), "aa": number(t, "6")},
			`{"":5,"B":3,"a":2,"aa":6,"b":1,"é":4}`},
		{"null is kept", `{"a":null}`, map[string]any{"a": nil}, `{"a":null}`},
		{"numbers", "[10,10.0,1e1,-0,9007199254740993]",
			[]any{number(t, "10"), number(t, "10"), number(t, "10"), Number{}, number(t, "9007199254740993")},
			"[10,10,10,0,9007199254740993]"},
		{"escapes", `"\"\\\/\b\f\n\r\t\u0000\u00e9\u20AC\ud83d\ude00"`, "\"\\/\b\f\n\r\t\x00é€😀",
			`"\"\\/\u0008\u000c\u000a\u000d\u0009\u0000é€😀"`},
		{"no normalisation", `["é","e\u0301"]`, []any{"é", "e\u0301"}, "[\"é\",\"e\u0301\"]"},
		{"replacement character itself", `"\ufffd�"`, "\ufffd\ufffd", "\"\ufffd\ufffd\""},
		{"html is not escaped", `"<&>\u2028"`, "<&>\u2028", "\"<&>\u2028\""},
		{"delete is no control of JSON", "\"\x7f\"", "\x7f", "\"\x7f\""},
		{"equal keys in different objects", `[{"a":1},{"a":1,"b":{"a":1}}]`,
			[]any{map[string]any{"a": number(t, "1")}, map[string]any{"a": number(t, "1"), "b": map[string]any{"a": number(t, "1")}}},
			`[{"a":1},{"a":1,"b":{"a":1}}]`},
		{"normal forms are different keys", `{"é":1,"e\u0301":2}`, map[string]any{"é": number(t, "1"), "e\u0301": number(t, "2")},
			"{\"e\u0301\":2,\"é\":1}"},
		{"depth", deep, nil, deep},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseJSON([]byte(c.in))
			if err != nil {
				t.Fatal(err)
			}
			if c.name != "depth" && !reflect.DeepEqual(got, c.want) {
				t.Errorf("read as %#v, want %#v", got, c.want)
			}
			canonical := Canonical(got)
			if string(canonical) != c.canonical {
				t.Errorf("canonical form %s, want %s", canonical, c.canonical)
			}
			again, err := ParseJSON(canonical)
			if err != nil || !reflect.DeepEqual(again, got) {
				t.Errorf("reads back as %#v, %v", again, err)
			}
		})
	}
}

func TestParseJSONRefuses(t *testing.T) {
	for _, c := range []struct{ name, in, wrong string }{
		{"K07", `{"amount":1,"amount":999}`, `the key "amount" appears twice`},
		{"the same value twice", `{"a":1,"a":1}`, "appears twice"},
		{"escaped differently", `{"a":1,"\u0061":2}`, "appears twice"},
		{"escaped pair", `{"😀":1,"\ud83d\ude00":2}`, "appears twice"},
		{"nested", `[{"x":{"a":1,"b":2,"a":3}}]`, "appears twice"},
		{"long key", `{"` + strings.Repeat("k", 5000) + `":1,"` + strings.Repeat("k", 5000) + `":1}`, "appears twice"},
		{"trailing value", `{} {}`, "after the JSON value"},
		{"trailing bracket", `[]]`, "after the JSON value"},
		{"trailing nul", "1\x00", "after the JSON value"},
		{"empty", "", "ends too early"},
		{"spaces only", " \n", "ends too early"},
		{"too deep in arrays", strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1), "deeper than 64"},
		{"too deep in objects", strings.Repeat(`{"a":`, MaxDepth+1) + "1" + strings.Repeat("}", MaxDepth+1), "deeper than 64"},
		{"very deep", strings.Repeat("[", 1<<20), "deeper than 64"},
		{"not UTF-8", "\"\xff\"", "UTF-8"},
		{"overlong", "\"\xc0\xaf\"", "UTF-8"},
		{"surrogate in UTF-8", "\"\xed\xa0\x80\"", "UTF-8"},
		{"not UTF-8 in a key", "{\"\xff\":1}", "UTF-8"},
		{"byte order mark", "\ufeff{}", "not JSON"},
		{"lone high surrogate", `"\ud83d"`, "surrogate"},
		{"lone low surrogate", `"\ude00"`, "surrogate"},
		{"reversed pair", `"\ude00\ud83d"`, "surrogate"},
		{"high and a letter", `"\ud83dx"`, "surrogate"},
		{"high and another escape", `"\ud83d\n"`, "surrogate"},
		{"two highs", `"\ud83d\ud83d\ude00"`, "surrogate"},
		{"lone surrogate in a key", `{"\ud800":1}`, "surrogate"},
		{"line feed in a string", "\"a\nb\"", "control character"},
		{"nul in a string", "\"\x00\"", "control character"},
		{"control after an escape", "\"\\n\x01\"", "control character"},
		{"no end of string", `"abc`, "no end"},
		{"no end after backslash", `"abc\`, "no end"},
		{"short \\u", `"\u12"`, "four hex digits"},
		{"bad \\u", `"\u12g4"`, "four hex digits"},
		{"unknown escape", `"\x41"`, "unknown escape"},
		{"single quotes", `{'a':1}`, "must be a string"},
		{"bare key", `{a:1}`, "must be a string"},
		{"number as a key", `{1:1}`, "must be a string"},
		{"trailing comma in an object", `{"a":1,}`, "must be a string"},
		{"trailing comma in an array", `[1,]`, "not JSON"},
		{"no colon", `{"a" 1}`, `":"`},
		{"no comma in an object", `{"a":1 "b":2}`, `","`},
		{"no comma in an array", `[1 2]`, `","`},
		{"open object", `{"a":1`, "is missing"},
		{"open array", `[1`, "is missing"},
		{"comment", `[1/**/]`, `","`},
		{"word", "nul", "not JSON"},
		{"word in capitals", "True", "not JSON"},
		{"NaN", "NaN", "not JSON"},
		{"Infinity", "-Infinity", "not JSON"},
		{"hex", "0x10", "after the JSON value"},
		{"leading zero", "[007]", `","`},
		{"plus", "[+1]", "not JSON"},
		{"bare point", "[.5]", "not JSON"},
		{"point without digits", "[5.]", "not JSON"},
		{"exponent without digits", "[5e]", "not JSON"},
		{"huge exponent", "1e999999", "exponent"},
		{"huge number", strings.Repeat("9", 1<<20), "1024 bytes"},
		{"many digits", strings.Repeat("9", 600), "512 significant digits"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseJSON([]byte(c.in))
			if err == nil {
				t.Fatalf("read as %#v", got)
			}
			wantInvalid(t, err, "body", c.wrong)
			if got != nil {
				t.Errorf("with the error came %#v", got)
			}
		})
	}
}

func TestCanonicalRefusesForeignTypes(t *testing.T) {
	for _, v := range []any{1.5, 1, []string{"a"}, map[string]string{}, json.Number("1"), map[string]any{"a": []any{float64(1)}}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%T was written", v)
				}
			}()
			Canonical(v)
		}()
	}
}

// randomValue gives a value from a small alphabet, so that equal and nearly
// equal ones come up often.
func randomValue(rng *rand.Rand, depth int) any {
	words := []string{"", "a", "b", `"`, `\`, "1", "null", "\x00", "é", "e\u0301", ",", "a\":1,\"b"}
	numbers := []Number{{}, {digits: "1"}, {digits: "1", exp: 1}, {digits: "1", negative: true}, {digits: "1", exp: -1}}
	kinds := 6
	if depth == 0 {
		kinds = 4
	}
	switch rng.IntN(kinds) {
	case 0:
		return nil
	case 1:
		return rng.IntN(2) == 0
	case 2:
		return words[rng.IntN(len(words))]
	case 3:
		return numbers[rng.IntN(len(numbers))]
	case 4:
		out := []any{}
		for range rng.IntN(3) {
			out = append(out, randomValue(rng, depth-1))
		}
		return out
	default:
		out := map[string]any{}
		for range rng.IntN(3) {
			out[words[rng.IntN(len(words))]] = randomValue(rng, depth-1)
		}
		return out
	}
}

func TestCanonicalIsInjective(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	seen := map[string]any{}
	met := 0
	for range 100_000 {
		v := randomValue(rng, 2)
		text := string(Canonical(v))
		if other, ok := seen[text]; ok {
			met++
			if !reflect.DeepEqual(v, other) {
				t.Fatalf("%#v and %#v are both %s", v, other, text)
			}
		}
		seen[text] = v
		back, err := ParseJSON([]byte(text))
		if err != nil || !reflect.DeepEqual(back, v) {
			t.Fatalf("%s reads back as %#v, %v; want %#v", text, back, err, v)
		}
	}
	if met < 1000 || len(seen) < 1000 {
		t.Errorf("%d texts, %d met again: too few to say anything", len(seen), met)
	}
}

// loose writes a value in a random way: keys in any order, spaces, escapes,
// numbers in other spellings.
func loose(rng *rand.Rand, v any) string {
	space := func() string { return strings.Repeat(" ", rng.IntN(2)) + strings.Repeat("\n", rng.IntN(2)) }
	switch v := v.(type) {
	case string:
		var out strings.Builder
		for _, r := range v {
			if rng.IntN(2) == 0 && r < 0x10000 || r < 0x20 || r == '"' || r == '\\' {
				fmt.Fprintf(&out, `\u%04X`, r)
			} else {
				out.WriteRune(r)
			}
		}
		return `"` + out.String() + `"`
	case Number:
		text := v.digits
		if text == "" {
			text = "0"
		}
		if v.negative {
			text = "-" + text
		}
		return fmt.Sprintf("%s.%sE%+d", text, strings.Repeat("0", 1+rng.IntN(3)), v.exp)
	case []any:
		var parts []string
		for _, element := range v {
			parts = append(parts, space()+loose(rng, element)+space())
		}
		return "[" + strings.Join(parts, ",") + "]"
	case map[string]any:
		var parts []string
		for key, value := range v {
			parts = append(parts, space()+loose(rng, key)+space()+":"+space()+loose(rng, value)+space())
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		return "{" + strings.Join(parts, ",") + "}"
	}
	return string(Canonical(v))
}

func TestSpellingDoesNotMatter(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20_000 {
		v := randomValue(rng, 3)
		text := loose(rng, v)
		got, err := ParseJSON([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if !bytes.Equal(Canonical(got), Canonical(v)) {
			t.Fatalf("%s is %s, want %s", text, Canonical(got), Canonical(v))
		}
	}
}

// sameAsStd compares a value with what encoding/json made of the same text.
func sameAsStd(v, std any) bool {
	switch v := v.(type) {
	case Number:
		n, ok := std.(json.Number)
		if !ok {
			return false
		}
		a, okA := new(big.Rat).SetString(v.String())
		b, okB := new(big.Rat).SetString(n.String())
		return okA && okB && a.Cmp(b) == 0
	case []any:
		other, ok := std.([]any)
		return ok && slices.EqualFunc(v, other, sameAsStd)
	case map[string]any:
		other, ok := std.(map[string]any)
		if !ok || len(v) != len(other) {
			return false
		}
		for key, value := range v {
			o, ok := other[key]
			if !ok || !sameAsStd(value, o) {
				return false
			}
		}
		return true
	}
	return reflect.DeepEqual(v, std)
}

func FuzzParseJSON(f *testing.F) {
	for _, seed := range []string{
		`{"amount":1,"amount":999}`, `{"a":1,"\u0061":2}`, `[10,10.0,1e1,-0,9007199254740993]`, `{"b":[null,true,"x"],"a":{}}`,
		`"\ud83d\ude00"`, `"\ud83d"`, "\"\xff\"", `[[[[]]]]`, `1e999999`, `{} x`, "\ufeff1", `"\u12`, `{"a":`, "\"\x00\"", `[1,]`, `-`, `"\`,
		strings.Repeat("[", 65) + strings.Repeat("]", 65), ` {"é" : "e\u0301" } `,
	} {
		f.Add([]byte(seed))
	}
	// All that may be refused although encoding/json accepts it.
	stricter := []string{"appears twice", "surrogate", "UTF-8", "deeper than 64", "exponent", "1024 bytes", "significant digits"}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := ParseJSON(body)
		if err != nil {
			wantInvalid(t, err, "body")
			if json.Valid(body) && !slices.ContainsFunc(stricter, func(s string) bool { return strings.Contains(err.Error(), s) }) {
				t.Fatalf("%q is JSON: %v", body, err)
			}
			return
		}
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		var std any
		if err := d.Decode(&std); err != nil || !json.Valid(body) {
			t.Fatalf("%q is no JSON: %v", body, err)
		}
		if !sameAsStd(v, std) {
			t.Fatalf("%q is read as %#v, by encoding/json as %#v", body, v, std)
		}
		canonical := Canonical(v)
		again, err := ParseJSON(canonical)
		if err != nil || !reflect.DeepEqual(again, v) || !bytes.Equal(Canonical(again), canonical) {
			t.Fatalf("%q is %s, which reads back as %#v, %v", body, canonical, again, err)
		}
	})
}
