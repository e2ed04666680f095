// This file is about fingerprints: one hash for one call, whichever way it is
// written. Every part goes into the hash with its length before it, so no two
// lists of parts are the same bytes. The upstream's host is never a part, nor
// are headers.

package intent

import (
	"crypto/sha256"
	"encoding/hex"
	"mime"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Request is a call as it came.
type Request struct {
	Method string
	// Suffix is the path below the tool, as the gateway will send it.
	Suffix string
	Query  url.Values
	Body   Body
}

// Body is a body that was read once. Expressions look into its Value and the
// fingerprint is made of the same one, so neither can take two bodies for one
// payment that are two for the other.
type Body struct {
	kind  string // "": bodyNone
	value any
	bytes []byte
}

// Value is the decoded body, or nil: see ReadBody. It is not to be changed.
func (b Body) Value() any { return b.value }

// Volatile names the parts of a body that do not tell one call from another,
// as JSON pointers (RFC 6901). Into an array a pointer goes by index, counted
// before anything is left out; of a form it names a field, /memo. A pointer to
// something that is not there means nothing, and neither do pointers into a
// body that is not decoded.
type Volatile struct {
	// Ignore: left out, with all that is in them.
	Ignore []string
	// Addresses: strings, or arrays of strings, in which the case of the letters
	// A to Z means nothing.
	Addresses []string

	// ready is set by Ready.
	ready *ready
}

// ready is what the pointers say, read once.
type ready struct{ all, addresses *pointerTree }

// Ready gives v with its pointers read, for use again and again. They must not change
// afterwards. It fails as Check does.
func (v Volatile) Ready() (Volatile, error) {
	v.ready = nil
	r := ready{}
	var err error
	if r.all, err = v.tree(); err != nil {
		return v, err
	}
	if r.addresses, err = v.addressTree(); err != nil {
		return v, err
	}
	v.ready = &r
	return v, nil
}

// Check says whether every pointer is one. The empty pointer, which means the
// whole body, is refused.
func (v Volatile) Check() error {
	_, err := v.tree()
	return err
}

// The kinds of body. They are part of the fingerprint, so that no body, null,
// and the four bytes "null" of another type are three different calls.
const (
	bodyNone  = "none"
	bodyJSON  = "json"
	bodyForm  = "form"
	bodyBytes = "bytes"
)

// bodyKind says how a body is read.
func bodyKind(contentType string, body []byte) (string, error) {
	if len(body) == 0 {
		return bodyNone, nil
	}
	switch contentType {
	case "":
		return bodyBytes, nil
	case "application/json": // as nearly all are
		return bodyJSON, nil
	}
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return "", invalid("content type", "%.80q is not a media type: send one such as application/json", contentType)
	}
	kind := bodyBytes
	switch {
	case media == "application/json" || strings.HasSuffix(media, "+json"):
		kind = bodyJSON
	case media == "application/x-www-form-urlencoded":
		kind = bodyForm
	}
	if charset := params["charset"]; kind != bodyBytes && charset != "" && !strings.EqualFold(charset, "utf-8") && !strings.EqualFold(charset, "us-ascii") {
		return "", invalid("content type", "the charset %.40q is not supported: send UTF-8", charset)
	}
	return kind, nil
}

// ReadBody reads a body, without any content coding, by its media type. JSON
// (application/json, and any type that ends in +json) as ParseJSON does; a form
// (application/x-www-form-urlencoded) as a map[string]any in which a field is a
// string, or an []any of strings if it came more than once. In both, the letters
// of v's addresses are lower case. The value of an empty body, and of a body of
// any other type, also multipart, is nil: of these only the bytes count, and no
// expression can look into them.
func ReadBody(contentType string, body []byte, v Volatile) (Body, error) {
	tree, err := v.addressTree()
	if err != nil {
		return Body{}, err
	}
	kind, err := bodyKind(contentType, body)
	if err != nil {
		return Body{}, err
	}
	out := Body{kind: kind, bytes: body}
	switch kind {
	case bodyJSON:
		out.value, err = ParseJSON(body)
	case bodyForm:
		out.value, err = parseForm(body)
	}
	if err != nil {
		return Body{}, err
	}
	out.value = tree.apply(out.value)
	return out, nil
}

func parseForm(body []byte) (any, error) {
	fields, err := url.ParseQuery(string(body))
	if err != nil {
		return nil, invalid("body", "is not a form: escape each field as application/x-www-form-urlencoded wants it")
	}
	out := make(map[string]any, len(fields))
	for name, values := range fields {
		list := make([]any, len(values))
		for i, value := range values {
			if !utf8.ValidString(name) || !utf8.ValidString(value) {
				return nil, invalid("body", "a form field is not valid UTF-8: send UTF-8")
			}
			list[i] = value
		}
		if len(list) == 1 {
			out[name] = list[0]
		} else {
			out[name] = list
		}
	}
	return out, nil
}

// Fingerprint is the SHA-256 of the canonical call without what v ignores, as
// "sha256:" and hex: method, suffix, query (keys sorted, the values of a key in
// order) and body. A body that ReadBody decodes counts in its canonical form,
// any other one in its bytes.
func Fingerprint(r Request, v Volatile) (string, error) {
	tree, err := v.tree()
	if err != nil {
		return "", err
	}
	// Most calls are short: their texts need no memory of their own.
	var short, shorter [1024]byte
	kind, body := r.Body.kind, r.Body.bytes
	switch kind {
	case "":
		kind = bodyNone
	case bodyJSON, bodyForm:
		body = appendCanonical(shorter[:0], r.Body.value, tree)
	}
	h := parts(short[:0])
	h = h.add("holdfast.dev/fingerprint/v1").add(r.Method).add(r.Suffix)
	h = h.add(strconv.Itoa(len(r.Query)))
	var few [16]string
	for _, key := range sortedKeys(few[:0], r.Query) {
		h = h.add(key).add(strconv.Itoa(len(r.Query[key])))
		for _, value := range r.Query[key] {
			h = h.add(value)
		}
	}
	h = append(h.add(kind).length(len(body)), body...)
	return DigestText(sha256.Sum256(h)), nil
}

// DigestText is a digest as it is written everywhere: "sha256:" and hex.
func DigestText(sum [sha256.Size]byte) string {
	const algorithm = "sha256:"
	var text [len(algorithm) + 2*sha256.Size]byte
	hex.Encode(text[copy(text[:], algorithm):], sum[:])
	return string(text[:])
}

// parts is a list of texts, each with its length before it.
type parts []byte

func (p parts) add(text string) parts {
	return append(p.length(len(text)), text...)
}

func (p parts) length(n int) parts { return append(strconv.AppendInt(p, int64(n), 10), ':') }

// pointerTree is a set of pointers, as the tree of their tokens.
type pointerTree struct {
	ignore  bool
	address bool
	next    map[string]*pointerTree
}

// addressTree is that of the addresses alone.
func (v Volatile) addressTree() (*pointerTree, error) {
	if v.ready != nil {
		return v.ready.addresses, nil
	}
	return Volatile{Addresses: v.Addresses}.tree()
}

func (v Volatile) tree() (*pointerTree, error) {
	if v.ready != nil {
		return v.ready.all, nil
	}
	root := &pointerTree{}
	for _, pointer := range v.Ignore {
		node, err := root.insert(pointer)
		if err != nil {
			return nil, err
		}
		node.ignore = true
	}
	for _, pointer := range v.Addresses {
		node, err := root.insert(pointer)
		if err != nil {
			return nil, err
		}
		node.address = true
	}
	return root, nil
}

var unescapePointer = strings.NewReplacer("~1", "/", "~0", "~")

func (t *pointerTree) insert(pointer string) (*pointerTree, error) {
	switch {
	case pointer == "":
		return nil, invalid("volatile", "the empty JSON pointer means the whole body: name fields, such as /memo")
	case pointer[0] != '/':
		return nil, invalid("volatile", `%.80q is not a JSON pointer: begin it with "/", such as /memo`, pointer)
	}
	node := t
	for token := range strings.SplitSeq(pointer[1:], "/") {
		if strings.Count(token, "~") != strings.Count(token, "~0")+strings.Count(token, "~1") {
			return nil, invalid("volatile", `%.80q is not a JSON pointer: write "~" as ~0 and "/" as ~1`, pointer)
		}
		token = unescapePointer.Replace(token)
		child := node.next[token]
		if child == nil {
			child = &pointerTree{}
			if node.next == nil {
				node.next = map[string]*pointerTree{}
			}
			node.next[token] = child
		}
		node = child
	}
	return node, nil
}

// Of a nil tree there are no pointers, and none below it.
func (t *pointerTree) isAddress() bool { return t != nil && t.address }

func (t *pointerTree) ignores() bool { return t != nil && t.ignore }

// under is the tree below a member of an object, at below an element of an array.
func (t *pointerTree) under(key string) *pointerTree {
	if t == nil {
		return nil
	}
	return t.next[key]
}

func (t *pointerTree) at(i int) *pointerTree {
	if t == nil || len(t.next) == 0 {
		return nil
	}
	return t.next[strconv.Itoa(i)]
}

// apply gives v as it counts. v itself is left as it is; what no pointer
// touches is shared.
func (t *pointerTree) apply(v any) any {
	if t.isAddress() {
		v = lowerAddress(v)
	}
	if t == nil || len(t.next) == 0 {
		return v
	}
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, value := range v {
			if child := t.under(key); !child.ignores() {
				out[key] = child.apply(value)
			}
		}
		return out
	case []any:
		out := make([]any, 0, len(v))
		for i, value := range v {
			if child := t.at(i); !child.ignores() {
				out = append(out, child.apply(value))
			}
		}
		return out
	}
	return v
}

func lowerAddress(v any) any {
	switch v := v.(type) {
	case string:
		return strings.Map(func(r rune) rune {
			if 'A' <= r && r <= 'Z' {
				return r + 'a' - 'A'
			}
			return r
		}, v)
	case []any:
		out := slices.Clone(v)
		for i := range out {
			if s, ok := out[i].(string); ok {
				out[i] = lowerAddress(s)
			}
		}
		return out
	}
	return v
}
