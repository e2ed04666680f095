// This file puts the provider's key into a JSON body. All else in the body keeps
// its text: a number is never read, so it cannot be rounded.

package gateway

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// withArgument gives the body with value at the pointer (RFC 6901). Objects that are
// missing on the way are made; a value that is there is replaced. Object keys may
// change their order, which means nothing in JSON.
func withArgument(body []byte, pointer, value string) ([]byte, error) {
	// Duplicate keys and bytes that are not UTF-8 would not survive; they are refused here.
	if _, err := intent.ParseJSON(body); err != nil {
		return nil, err
	}
	segments := strings.Split(strings.TrimPrefix(pointer, "/"), "/")
	for i, s := range segments {
		segments[i] = strings.ReplaceAll(strings.ReplaceAll(s, "~1", "/"), "~0", "~")
	}
	return set(body, pointer, segments, value)
}

func set(body []byte, pointer string, segments []string, value string) ([]byte, error) {
	if len(segments) == 0 {
		return encode(value)
	}
	members := map[string]json.RawMessage{}
	if len(body) > 0 {
		if trimmed := bytes.TrimLeft(body, " \t\r\n"); len(trimmed) == 0 || trimmed[0] != '{' {
			return nil, &intent.InvalidError{Field: "body", Reason: "must be a JSON object at every step of " + pointer +
				", where the provider's key is written: send an object"}
		}
		if err := json.Unmarshal(body, &members); err != nil {
			return nil, &intent.InvalidError{Field: "body", Reason: "is not a JSON object: send valid JSON"}
		}
	}
	inner, err := set(members[segments[0]], pointer, segments[1:], value)
	if err != nil {
		return nil, err
	}
	members[segments[0]] = inner
	return encode(members)
}

// encode writes JSON without Go's escapes for HTML, so that strings keep their text.
func encode(v any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}
