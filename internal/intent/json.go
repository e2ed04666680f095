// This file is about JSON: read strictly, and written in one canonical form.
// Whatever two readers could understand differently is refused: a duplicate
// key, trailing data, bytes that are not UTF-8, half of a surrogate pair. Go's
// encoding/json accepts all but the second, and goes through floats unless told
// otherwise, so the reader is our own.

package intent

import (
	"fmt"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// MaxDepth is how deep arrays and objects may nest.
const MaxDepth = 64

// ParseJSON reads one JSON text (RFC 8259) into map[string]any, []any, string,
// bool, Number and nil. Keys are compared after their escapes are read, so
// "a" and "\u0061" are the same key. No string is normalised.
func ParseJSON(body []byte) (any, error) {
	if !utf8.Valid(body) {
		return nil, invalid("body", "is not valid UTF-8: send UTF-8")
	}
	r := jsonReader{in: body, text: string(body)}
	r.space()
	v, err := r.value(0)
	if err != nil {
		return nil, err
	}
	r.space()
	if r.at < len(r.in) {
		return nil, r.fail("there is data after the JSON value: send one value")
	}
	return v, nil
}

// jsonReader reads in from at on. It only ever moves forward.
type jsonReader struct {
	in []byte
	// text is in once more, of which strings without escapes are parts.
	text string
	at   int
}

func (r *jsonReader) fail(format string, args ...any) error {
	return invalid("body", "at byte %d: %s", r.at, fmt.Sprintf(format, args...))
}

func (r *jsonReader) space() {
	for r.at < len(r.in) {
		switch r.in[r.at] {
		case ' ', '\t', '\n', '\r':
			r.at++
		default:
			return
		}
	}
}

// accept moves over c if it is next.
func (r *jsonReader) accept(c byte) bool {
	if r.at < len(r.in) && r.in[r.at] == c {
		r.at++
		return true
	}
	return false
}

// value reads a value that lies in depth arrays and objects.
func (r *jsonReader) value(depth int) (any, error) {
	if r.at >= len(r.in) {
		return nil, r.fail("the JSON ends too early: send it whole")
	}
	c := r.in[r.at]
	if (c == '{' || c == '[') && depth == MaxDepth {
		return nil, r.fail("nests deeper than %d: flatten it", MaxDepth)
	}
	switch c {
	case '{':
		return r.object(depth + 1)
	case '[':
		return r.array(depth + 1)
	case '"':
		return r.str()
	case 't':
		return true, r.literal("true")
	case 'f':
		return false, r.literal("false")
	case 'n':
		return nil, r.literal("null")
	default:
		return r.number()
	}
}

func (r *jsonReader) literal(word string) error {
	if rest := r.in[r.at:]; len(rest) < len(word) || string(rest[:len(word)]) != word {
		return r.fail("is not JSON: send valid JSON")
	}
	r.at += len(word)
	return nil
}

func (r *jsonReader) number() (any, error) {
	length := scanNumber(r.in[r.at:])
	if length == 0 {
		return nil, r.fail("is not JSON: send valid JSON")
	}
	if length > maxNumberText {
		return nil, r.fail("a number is written with more than %d bytes: shorten it, or send it as a string", maxNumberText)
	}
	n, err := makeNumber(r.text[r.at : r.at+length])
	if err != nil {
		return nil, r.fail("%v", err)
	}
	r.at += length
	return n, nil
}

func (r *jsonReader) object(depth int) (any, error) {
	r.at++
	out := map[string]any{}
	r.space()
	if r.accept('}') {
		return out, nil
	}
	for {
		r.space()
		if r.at >= len(r.in) || r.in[r.at] != '"' {
			return nil, r.fail("an object's key must be a string: send valid JSON")
		}
		start := r.at
		key, err := r.str()
		if err != nil {
			return nil, err
		}
		if _, twice := out[key]; twice {
			r.at = start
			return nil, r.fail("the key %.80q appears twice in one object: send it once", key)
		}
		r.space()
		if !r.accept(':') {
			return nil, r.fail(`a ":" is missing after a key: send valid JSON`)
		}
		r.space()
		if out[key], err = r.value(depth); err != nil {
			return nil, err
		}
		r.space()
		if r.accept('}') {
			return out, nil
		}
		if !r.accept(',') {
			return nil, r.fail(`a "," or "}" is missing: send valid JSON`)
		}
	}
}

func (r *jsonReader) array(depth int) (any, error) {
	r.at++
	out := []any{}
	r.space()
	if r.accept(']') {
		return out, nil
	}
	for {
		r.space()
		v, err := r.value(depth)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
		r.space()
		if r.accept(']') {
			return out, nil
		}
		if !r.accept(',') {
			return nil, r.fail(`a "," or "]" is missing: send valid JSON`)
		}
	}
}

// str reads a string. The input as a whole is known to be valid UTF-8.
func (r *jsonReader) str() (string, error) {
	r.at++
	start := r.at
	for r.at < len(r.in) && r.in[r.at] != '"' && r.in[r.at] != '\\' && r.in[r.at] >= 0x20 {
		r.at++
	}
	if r.at < len(r.in) && r.in[r.at] == '"' {
		r.at++
		return r.text[start : r.at-1], nil
	}
	out := r.in[start:r.at:r.at] // the first append copies
	for r.at < len(r.in) {
		switch c := r.in[r.at]; {
		case c == '"':
			r.at++
			return string(out), nil
		case c == '\\':
			char, err := r.escape()
			if err != nil {
				return "", err
			}
			out = utf8.AppendRune(out, char)
		case c < 0x20:
			return "", r.fail("a control character in a string: escape it")
		default:
			out = append(out, c)
			r.at++
		}
	}
	return "", r.fail("a string has no end: send valid JSON")
}

func (r *jsonReader) escape() (rune, error) {
	if r.at+1 >= len(r.in) {
		return 0, r.fail("a string has no end: send valid JSON")
	}
	switch c := r.in[r.at+1]; c {
	case '"', '\\', '/':
		r.at += 2
		return rune(c), nil
	case 'b':
		r.at += 2
		return '\b', nil
	case 'f':
		r.at += 2
		return '\f', nil
	case 'n':
		r.at += 2
		return '\n', nil
	case 'r':
		r.at += 2
		return '\r', nil
	case 't':
		r.at += 2
		return '\t', nil
	case 'u':
	default:
		return 0, r.fail("an unknown escape in a string: send valid JSON")
	}
	char, ok := r.hex(r.at)
	if !ok {
		return 0, r.fail(`a \u without four hex digits: send valid JSON`)
	}
	if !utf16.IsSurrogate(char) {
		r.at += 6
		return char, nil
	}
	low, _ := r.hex(r.at + 6)
	if char = utf16.DecodeRune(char, low); char == utf8.RuneError {
		return 0, r.fail("half of a surrogate pair: send valid Unicode")
	}
	r.at += 12
	return char, nil
}

// hex reads \uXXXX at a position.
func (r *jsonReader) hex(at int) (rune, bool) {
	if at+6 > len(r.in) || r.in[at] != '\\' || r.in[at+1] != 'u' {
		return 0, false
	}
	var out rune
	for _, c := range r.in[at+2 : at+6] {
		switch {
		case '0' <= c && c <= '9':
			out = out<<4 | rune(c-'0')
		case 'a' <= c && c <= 'f':
			out = out<<4 | rune(c-'a'+10)
		case 'A' <= c && c <= 'F':
			out = out<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return out, true
}

// Canonical writes a value in its canonical form: JSON without spaces, object
// keys sorted by bytes, numbers in their canonical text, strings with the
// fewest escapes and as they are otherwise. Two values have the same canonical
// form only if they are equal, and ParseJSON reads it back.
//
// It takes what ParseJSON and ReadBody give. Another type is a mistake in the
// calling code, not in a caller's input, and panics: a canonical form that
// leaves something out would take two payments for one.
func Canonical(v any) []byte { return appendCanonical(nil, v, nil) }

// appendCanonical appends the canonical form of what t's apply gives of v.
func appendCanonical(out []byte, v any, t *pointerTree) []byte {
	if t.isAddress() {
		v = lowerAddress(v)
	}
	switch v := v.(type) {
	case nil:
		return append(out, "null"...)
	case bool:
		return strconv.AppendBool(out, v)
	case Number:
		return append(out, v.String()...)
	case string:
		return appendString(out, v)
	case []any:
		out = append(out, '[')
		first := true
		for i, element := range v {
			child := t.at(i)
			if child.ignores() {
				continue
			}
			if !first {
				out = append(out, ',')
			}
			first = false
			out = appendCanonical(out, element, child)
		}
		return append(out, ']')
	case map[string]any:
		out = append(out, '{')
		first := true
		var few [16]string
		for _, key := range sortedKeys(few[:0], v) {
			child := t.under(key)
			if child.ignores() {
				continue
			}
			if !first {
				out = append(out, ',')
			}
			first = false
			out = appendString(out, key)
			out = append(out, ':')
			out = appendCanonical(out, v[key], child)
		}
		return append(out, '}')
	default:
		panic(fmt.Sprintf("intent.Canonical: a value of type %T", v))
	}
}

// sortedKeys appends the keys of m, in order, to none.
func sortedKeys[V any](none []string, m map[string]V) []string {
	for key := range m {
		none = append(none, key)
	}
	slices.Sort(none)
	return none
}

func appendString(out []byte, s string) []byte {
	const digits = "0123456789abcdef"
	out = append(out, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			out = append(out, '\\', c)
		case c < 0x20:
			out = append(out, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		default:
			out = append(out, c)
		}
	}
	return append(out, '"')
}
