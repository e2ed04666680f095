// This file is about intent IDs: the durable name that an agent gave an intent.
// One name has one text, however it came: what ParseIntentID gives, it gives
// again for its own output.

package intent

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxIntentIDBytes bounds an intent ID.
const MaxIntentIDBytes = 255

// ParseIntentID reads an intent ID as a header, a JSON field or a URL carries
// it: bare, or as a quoted string (RFC 8941, section 3.3.3), which is how the
// IETF draft for Idempotency-Key has it. "abc" and abc are one ID; abc and ABC
// are two. Spaces and tabs around it mean nothing.
func ParseIntentID(s string) (string, error) {
	// A quoted string can be twice as long as what it says.
	if len(s) > 4*MaxIntentIDBytes {
		return "", intentIDTooLong()
	}
	id := strings.Trim(s, " \t")
	if strings.HasPrefix(id, `"`) {
		var err error
		if id, err = unquote(id); err != nil {
			return "", err
		}
		// Both would read as another ID if they came back bare.
		if strings.HasPrefix(id, `"`) || strings.Trim(id, " ") != id {
			return "", invalid("intent ID", "begins with a quote, or begins or ends with a space: leave those out")
		}
	}
	switch {
	case id == "":
		return "", invalid("intent ID", "is empty: name the intent, with the same name on every retry")
	case len(id) > MaxIntentIDBytes:
		return "", intentIDTooLong()
	case !utf8.ValidString(id):
		return "", invalid("intent ID", "is not valid UTF-8: send UTF-8")
	case strings.ContainsFunc(id, unicode.IsControl):
		return "", invalid("intent ID", "holds a control character: remove it")
	}
	return id, nil
}

func intentIDTooLong() error {
	return invalid("intent ID", "has more than %d bytes: use a shorter one", MaxIntentIDBytes)
}

// unquote reads a quoted string from its opening quote to its end.
func unquote(s string) (string, error) {
	var out strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			if i != len(s)-1 {
				return "", invalid("intent ID", "goes on after its closing quote: send one string, without parameters")
			}
			return out.String(), nil
		case c == '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", invalid("intent ID", `has a \ that escapes neither " nor \: write \\ for it`)
			}
			out.WriteByte(s[i])
		case c < 0x20 || c > 0x7e:
			return "", invalid("intent ID", "is quoted and holds more than printable ASCII: send it without quotes, or use ASCII")
		default:
			out.WriteByte(c)
		}
	}
	return "", invalid("intent ID", "has no closing quote: add it, or leave out the opening one")
}
