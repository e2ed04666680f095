// This file is about the variable `call`, as expressions see it. Its fields are
// declared, so that a field that does not exist is a mistake in the spec and not a
// value that never comes. What must never be part of an identity cannot be seen:
// credentials, trace headers, MCP session ids, JSON-RPC ids.

package policy

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// The headers that carry lineage.
const (
	sessionHeader = "Holdfast-Session"
	indexHeader   = "Holdfast-Call"
)

// maxText bounds a string that an expression may look into. No intent ID, path,
// amount or recipient is longer, and nothing that an expression does with a short
// text takes long.
const maxText = 4096

// call is one call, decoded.
type call struct {
	method, path string
	// query: a string, or a list of strings if the parameter came more than once.
	query map[string]any
	// sent are the headers as they came, and of header those of which expressions see
	// something: strings by lower-case name; values of a repeated one joined by ", ", of one
	// that has one meaning only taken once. It is made when it is asked for: see headers.
	sent       http.Header
	keyHeaders []string
	header     map[string]any
	// body is the decoded body, with the case of the tool's addresses folded.
	body                  any
	session, index, agent string

	// read is the body as the fingerprint takes it; rpc: it is a JSON-RPC request.
	read intent.Body
	rpc  bool
}

// errAbsent is a field that this call does not have.
var errAbsent = errors.New("it is absent")

const callTypeName = "holdfast.Call"

// callField is one field of call.
type callField struct {
	kind *cel.Type
	// get gives the value, and whether this call has one.
	get func(*call) (any, bool)
}

func text(get func(*call) string) callField {
	return callField{cel.StringType, func(c *call) (any, bool) { return get(c), get(c) != "" }}
}

var callFields = map[string]callField{
	"method":  {cel.StringType, func(c *call) (any, bool) { return c.method, true }},
	"path":    {cel.StringType, func(c *call) (any, bool) { return c.path, true }},
	"query":   {cel.MapType(cel.StringType, cel.DynType), func(c *call) (any, bool) { return c.query, true }},
	"header":  {cel.MapType(cel.StringType, cel.StringType), func(c *call) (any, bool) { return c.headers(), true }},
	"body":    {cel.DynType, func(c *call) (any, bool) { return c.body, c.body != nil }},
	"session": text(func(c *call) string { return c.session }),
	"index":   text(func(c *call) string { return c.index }),
	"agent":   text(func(c *call) string { return c.agent }),
}

// celTypes knows the types of call, response and intent, and how decoded values become CEL values.
type celTypes struct{ *types.Registry }

func (t celTypes) FindStructType(name string) (*types.Type, bool) {
	if name == callTypeName || name == responseTypeName || name == intentTypeName {
		return types.NewTypeTypeWithParam(types.NewObjectType(name)), true
	}
	return nil, false
}

func (t celTypes) FindStructFieldNames(name string) ([]string, bool) {
	switch name {
	case callTypeName:
		return slices.Sorted(maps.Keys(callFields)), true
	case responseTypeName:
		return slices.Sorted(maps.Keys(responseFields)), true
	case intentTypeName:
		return slices.Sorted(maps.Keys(intentFields)), true
	}
	return nil, false
}

func (t celTypes) FindStructFieldType(name, field string) (*types.FieldType, bool) {
	if name == responseTypeName {
		return responseField(field)
	}
	if name == intentTypeName {
		return intentField(field)
	}
	f, ok := callFields[field]
	if name != callTypeName || !ok {
		return nil, false
	}
	return &types.FieldType{
		Type: f.kind,
		IsSet: func(target any) bool {
			c, ok := target.(*call)
			if !ok {
				return false
			}
			_, set := f.get(c)
			return set
		},
		GetFrom: func(target any) (any, error) {
			c, ok := target.(*call)
			if !ok {
				return nil, errAbsent
			}
			v, set := f.get(c)
			if !set {
				return nil, errAbsent
			}
			return v, nil
		},
	}, true
}

// NativeToValue keeps numbers exact and texts short.
func (t celTypes) NativeToValue(v any) ref.Val {
	switch v := v.(type) {
	case intent.Number:
		return numberValue(v)
	case string:
		if len(v) > maxText {
			return types.NewErr("a text of more than %d bytes cannot be used", maxText)
		}
		return types.String(v)
	case map[string]any:
		return types.NewStringInterfaceMap(t, v)
	case []any:
		return types.NewDynamicList(t, v)
	}
	return t.Registry.NativeToValue(v)
}

// ResolveName and Parent make a call what expressions are evaluated over.
func (c *call) ResolveName(name string) (any, bool) {
	if name == "call" {
		return c, true
	}
	return nil, false
}

func (c *call) Parent() cel.Activation { return nil }

// hiddenHeaders tell who calls or how the call travelled, never what it is for.
var hiddenHeaders = []string{
	"authorization", "proxy-authorization", "cookie",
	"traceparent", "tracestate", "baggage", "b3", "mcp-session-id", "last-event-id",
}

func hiddenHeader(name string) bool {
	return slices.Contains(hiddenHeaders, name) || strings.HasPrefix(name, "x-b3-")
}

// newCall decodes a call. keyHeaders have one meaning only, as session and index have; their
// names are canonical, as servers give those of headers.
func newCall(in CallInput, volatile intent.Volatile, keyHeaders []string) (*call, error) {
	c := &call{method: in.Method, path: in.Suffix, agent: in.Agent}
	if coding := strings.TrimSpace(in.Header.Get("Content-Encoding")); coding != "" && !strings.EqualFold(coding, "identity") {
		return nil, invalid("body", "has the content coding %q, which cannot be read: send it without Content-Encoding", clip(coding))
	}
	contentType, err := single(in.Header, "Content-Type")
	if err != nil {
		return nil, err
	}
	if c.session, err = single(in.Header, sessionHeader); err != nil {
		return nil, err
	}
	if c.index, err = single(in.Header, indexHeader); err != nil {
		return nil, err
	}
	if c.read, err = intent.ReadBody(contentType, in.Body, volatile); err != nil {
		return nil, err
	}
	c.body = c.read.Value()
	if body, ok := c.body.(map[string]any); ok && body["jsonrpc"] == "2.0" {
		c.rpc = true
		c.body = maps.Clone(body)
		delete(c.body.(map[string]any), "id")
	}
	c.query = queryValues(in.Query)
	c.sent, c.keyHeaders = in.Header, keyHeaders
	for _, name := range keyHeaders {
		if _, err := only(name, in.Header[name]); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// once says whether a header has one meaning only: a client or proxy that sends a key
// twice on a retry means the same intent.
func (c *call) once(name string) bool {
	return name == sessionHeader || name == indexHeader || slices.ContainsFunc(c.keyHeaders, func(key string) bool { return strings.EqualFold(key, name) })
}

func (c *call) headers() map[string]any {
	if c.header != nil {
		return c.header
	}
	c.header = make(map[string]any, len(c.sent))
	for name, values := range c.sent {
		lower := strings.ToLower(name)
		switch {
		case hiddenHeader(lower):
		case c.once(name):
			c.header[lower], _ = only(name, values) // newCall has refused those that differ
		default:
			c.header[lower] = strings.Join(values, ", ")
		}
	}
	return c.header
}

// oneHeader is what headers has of a name, which is in lower case and not hidden. The
// others are not looked at if it came as servers give it.
func (c *call) oneHeader(name, canonical string) (any, bool) {
	if values := c.sent[canonical]; len(values) == 1 && c.header == nil {
		return values[0], true
	}
	v, ok := c.headers()[name]
	return v, ok
}

func queryValues(query url.Values) map[string]any {
	if len(query) == 0 {
		return nil
	}
	out := make(map[string]any, len(query))
	for name, values := range query {
		if len(values) == 1 {
			out[name] = values[0]
			continue
		}
		list := make([]any, len(values))
		for i, v := range values {
			list[i] = v
		}
		out[name] = list
	}
	return out
}

// single gives a header that has one meaning only, "" if it did not come. The name is canonical.
func single(header http.Header, name string) (string, error) {
	value, err := only(name, header[name])
	return strings.TrimSpace(value), err
}

// only gives the one value that a header came with, however often it came.
func only(name string, values []string) (string, error) {
	for _, v := range values {
		if v != values[0] {
			return "", invalid("header", "%s came more than once with different values: send it once", name)
		}
	}
	if len(values) == 0 {
		return "", nil
	}
	return values[0], nil
}

func invalid(field, format string, args ...any) *intent.InvalidError {
	e := specError(field, format, args...)
	return &intent.InvalidError{Field: e.Field, Reason: e.Message}
}

// clip keeps what is quoted short.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
