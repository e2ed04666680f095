// Fingerprints: which calls are one (K04, K06, K08, A14) and which are not.

package intent

import (
	"bytes"
	"fmt"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

const (
	jsonType = "application/json"
	formType = "application/x-www-form-urlencoded"
)

// request is a call whose body was not read yet.
type request struct {
	Method, Suffix string
	Query          url.Values
	ContentType    string
	Body           []byte
}

func (r request) fingerprint(v Volatile) (string, error) {
	body, err := ReadBody(r.ContentType, r.Body, v)
	if err != nil {
		return "", err
	}
	return Fingerprint(Request{Method: r.Method, Suffix: r.Suffix, Query: r.Query, Body: body}, v)
}

func call(body string) request {
	return request{Method: "POST", ContentType: jsonType, Body: []byte(body)}
}

func mustFingerprint(t testing.TB, r request, v Volatile) string {
	t.Helper()
	f, err := r.fingerprint(v)
	if err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	return f
}

func TestFingerprintsThatAreEqual(t *testing.T) {
	k04 := Volatile{Ignore: []string{"/createdAt", "/attempt/id", "/card/encrypted"}}
	rpc := Volatile{Ignore: []string{"/id", "/params/_meta"}}
	for _, c := range []struct {
		name     string
		volatile Volatile
		calls    []request
	}{
		{"order of keys, spaces, escapes", Volatile{}, []request{call(`{"a":1,"b":"é"}`), call("{ \"b\" : \"\\u00e9\",\n\"a\":1}")}},
		{"K06 10, 10.0, 1e1", Volatile{}, []request{call(`{"n":10}`), call(`{"n":10.0}`), call(`{"n":1e1}`), call(`{"n":1.0E+1}`)}},
		{"K06 -0", Volatile{}, []request{call(`[0]`), call(`[-0]`), call(`[-0.0e3]`)}},
		{"K04 volatile fields", k04, []request{
			call(`{"amount":5,"createdAt":"2026-01-01","attempt":{"id":"a1","n":1},"card":{"encrypted":"xyz","last4":"4242"}}`),
			call(`{"amount":5,"createdAt":"2026-01-02","attempt":{"id":"a2","n":1},"card":{"encrypted":"qrs","last4":"4242"}}`),
			call(`{"amount":5.00,"attempt":{"n":1},"card":{"last4":"4242","encrypted":null}}`),
		}},
		{"A14 JSON-RPC ids and _meta", rpc, []request{
			call(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"refund","arguments":{"order":9},"_meta":{"traceparent":"00-a","progressToken":1}}}`),
			call(`{"jsonrpc":"2.0","id":"two","method":"tools/call","params":{"name":"refund","arguments":{"order":9},"_meta":{"traceparent":"00-b","progressToken":"p","io.client":{"name":"x"}}}}`),
			call(`{"jsonrpc":"2.0","method":"tools/call","params":{"arguments":{"order":9.0},"name":"refund"}}`),
		}},
		{"K08 addresses", Volatile{Addresses: []string{"/to", "/splits/0/to", "/cc"}}, []request{
			call(`{"to":"0xAbCdEF","splits":[{"to":"0xFF"}],"cc":["0xA","0xB"]}`),
			call(`{"to":"0xabcdef","splits":[{"to":"0xff"}],"cc":["0xa","0xB"]}`),
			call(`{"to":"0XABCDEF","splits":[{"to":"0xFf"}],"cc":["0XA","0xb"]}`),
		}},
		{"a volatile address", Volatile{Ignore: []string{"/to"}, Addresses: []string{"/to"}}, []request{call(`{"to":"a"}`), call(`{"to":"b"}`), call(`{}`)}},
		{"a volatile element", Volatile{Ignore: []string{"/0", "/1/x"}}, []request{call(`[1,{"x":1,"y":2}]`), call(`[2,{"x":2,"y":2}]`)}},
		{"escaped pointers", Volatile{Ignore: []string{"/a~1b", "/m~0n", "/~01", "/"}}, []request{
			call(`{"a/b":1,"m~n":1,"~1":1,"":1,"k":1}`), call(`{"a/b":2,"m~n":2,"~1":2,"":2,"k":1}`), call(`{"k":1}`),
		}},
		{"pointers that lead nowhere", Volatile{Ignore: []string{"/x/y/z", "/k/0", "/l/-", "/l/00", "/l/7"}}, []request{call(`{"k":1,"l":[1]}`), call(`{"l":[1],"k":1}`)}},
		{"media types of JSON", Volatile{}, []request{
			{Body: []byte(`{"a":1}`), ContentType: "application/json"}, {Body: []byte(`{"a":1.0}`), ContentType: "Application/JSON; charset=UTF-8"},
			{Body: []byte(`{"a":1}`), ContentType: "application/vnd.api+json"},
		}},
		{"form", Volatile{Ignore: []string{"/memo"}, Addresses: []string{"/to"}}, []request{
			{ContentType: formType, Body: []byte("amount=5&to=0xAB&x=a+b")}, {ContentType: formType + "; charset=utf-8", Body: []byte("x=a%20b&to=0xab&memo=hi&amount=%35")},
		}},
		{"query", Volatile{}, []request{
			{Query: url.Values{"a": {"1", "2"}, "b": {""}}}, {Query: url.Values{"b": {""}, "a": {"1", "2"}}},
		}},
		{"no query", Volatile{}, []request{{}, {Query: url.Values{}}}},
		{"no body", Volatile{}, []request{{}, {ContentType: jsonType}, {ContentType: formType, Body: []byte{}}}},
		{"bytes do not depend on the type's name", Volatile{}, []request{{Body: []byte("x")}, {Body: []byte("x"), ContentType: "text/plain"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := mustFingerprint(t, c.calls[0], c.volatile)
			if !strings.HasPrefix(want, "sha256:") || len(want) != len("sha256:")+64 {
				t.Errorf("%s is no SHA-256", want)
			}
			for _, r := range c.calls[1:] {
				before := string(r.Body)
				if got := mustFingerprint(t, r, c.volatile); got != want {
					t.Errorf("%+v differs from %+v", r, c.calls[0])
				}
				if string(r.Body) != before {
					t.Error("the body was changed")
				}
			}
		})
	}
}

func TestFingerprintsThatDiffer(t *testing.T) {
	for _, c := range []struct {
		name     string
		volatile Volatile
		calls    []request
	}{
		{"method, suffix, query, body", Volatile{}, []request{
			{}, {Method: "POST"}, {Method: "post"}, {Suffix: "POST"}, {Suffix: "/a"}, {Suffix: "/a/"}, {Query: url.Values{"POST": nil}}, {Query: url.Values{"POST": {""}}},
			{Query: url.Values{"a": {"1"}}}, {Query: url.Values{"a1": {""}}}, {Query: url.Values{"a": {"1", ""}}}, {Query: url.Values{"a": {"1"}, "": {""}}},
			{Query: url.Values{"a": {"1", "2"}}}, {Query: url.Values{"a": {"2", "1"}}}, {Query: url.Values{"a": {"1"}, "2": nil}},
			{Body: []byte("POST")},
		}},
		{"K06 large numbers", Volatile{}, []request{call(`{"n":1000000000000000001}`), call(`{"n":1000000000000000000}`), call(`{"n":9007199254740993}`), call(`{"n":9007199254740992}`)}},
		{"null, absent, false, empty, zero", Volatile{}, []request{call(`{"a":null}`), call(`{}`), call(`{"a":false}`), call(`{"a":""}`), call(`{"a":0}`), call(`{"a":[]}`), call(`{"a":{}}`)}},
		{"kinds of body", Volatile{}, []request{
			call(""), call("null"), call(`""`), {Method: "POST", Body: []byte("null")}, {Method: "POST", ContentType: formType, Body: []byte("null")},
			{Method: "POST", ContentType: formType, Body: []byte("a=1")}, {Method: "POST", Body: []byte("a=1")}, call(`{"a":"1"}`), call(`{"a":1}`),
			{Method: "POST", Body: []byte(`{"a":"1"}`)}, {Method: "POST", ContentType: formType, Body: []byte("&")},
		}},
		{"arrays are ordered", Volatile{}, []request{call(`[1,2]`), call(`[2,1]`), call(`[1,2,2]`), call(`[[1,2]]`)}},
		{"strings are not numbers, case, normal forms", Volatile{}, []request{call(`"1"`), call(`1`), call(`"a"`), call(`"A"`), call(`"é"`), call(`"e\u0301"`), call(`" a"`)}},
		{"form fields are ordered lists", Volatile{}, []request{
			{ContentType: formType, Body: []byte("a=1&a=2")}, {ContentType: formType, Body: []byte("a=2&a=1")}, {ContentType: formType, Body: []byte("a=1")}, {ContentType: formType, Body: []byte("a=1%262")},
		}},
		{"what is not volatile counts", Volatile{Ignore: []string{"/memo", "/items/0/note"}}, []request{
			call(`{"memo":"x","amount":1}`), call(`{"memo":"x","amount":2}`), call(`{"a":{"memo":1},"amount":1}`), call(`{"a":{"memo":2},"amount":1}`),
			call(`{"items":[{"note":1},{"note":1}]}`), call(`{"items":[{"note":1},{"note":2}]}`), call(`{"items":{"1":{"note":2}}}`),
		}},
		{"indexes are those of the whole array", Volatile{Ignore: []string{"/0", "/1"}}, []request{call(`[1,2,3]`), call(`[1,2,4]`), call(`[1,2]`)}},
		{"case counts outside of addresses", Volatile{Addresses: []string{"/to", "/n"}}, []request{
			call(`{"to":"0xA","from":"0xA"}`), call(`{"to":"0xA","from":"0xa"}`), call(`{"to":["É"]}`), call(`{"to":["é"]}`), call(`{"to":{"x":"A"}}`), call(`{"to":{"x":"a"}}`), call(`{"n":1}`), call(`{"n":"1"}`),
			call(`{"to":"\u212a"}`), call(`{"to":"k"}`), // the Kelvin sign, whose lower case is k
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[string]request{}
			for _, r := range c.calls {
				f := mustFingerprint(t, r, c.volatile)
				if other, met := seen[f]; met {
					t.Errorf("%+v and %+v are one", r, other)
				}
				seen[f] = r
			}
		})
	}
}

// The fingerprint of a record must mean the same after an upgrade. These were computed
// apart from this code, over the parts that Fingerprint documents.
func TestFingerprintStaysTheSame(t *testing.T) {
	many := url.Values{}
	for i := range 40 {
		many.Set(fmt.Sprintf("k%02d", i), strconv.Itoa(i))
	}
	v := Volatile{Ignore: []string{"/memo"}, Addresses: []string{"/to"}}
	for _, c := range []struct {
		name    string
		request request
		want    string
	}{
		{"all of it", request{Method: "POST", Suffix: "/a", Query: url.Values{"k": {"2", "1"}}, ContentType: jsonType, Body: []byte(`{"b":[1.50,null],"a":"é","memo":1}`)},
			"sha256:b293e248fde6fae0f53a5760d9993fdeae95891271434535e4c74273a9a867f9"},
		{"no body", request{Method: "POST"}, "sha256:957a0897ad44a4ce3cfe8dc1fbf3bcaf25a4384e4ef4f8376b54d639f6504c3d"},
		{"bytes", request{Method: "PUT", Suffix: "/x", ContentType: "text/plain", Body: []byte("a=1")}, "sha256:b23d7ddab477474602b3d82184298931efacf059021a3ac35d405c10173116cc"},
		{"form", request{Method: "POST", ContentType: formType, Body: []byte("to=0xAB&a=2&a=1&memo=x&b=x+y")}, "sha256:42526517fd969cfd615d281484b9f13b64d059e55106dcac64d7756346c87ee9"},
		{"numbers", call(`{"n":[10.0,1e1,-0,1e80,12e79,9007199254740993,1e-7]}`), "sha256:7921f3dc49e881328cd040b57d1b0565a3ed8bae54562af1961714ec0e778394"},
		{"texts", call(`"\"\\\/\b\u00e9\u20AC\ud83d\ude00<&>\u007f"`), "sha256:aa200235ea25ebbf07bba32ab0494e825223e2b8f878afa802c031fa0c5f56bd"},
		{"addresses", call(`{"to":"0xAbC","memo":{"a":1},"é":{},"z":[],"from":"0xAbC"}`), "sha256:92440f5d9461bc84a7e4c971876292b3e87f003930e91fc5b2a57a4691b33f36"},
		{"queries", request{Method: "GET", Suffix: "/é", Query: url.Values{"b": {""}, "a": nil, "é": {"ü", "1"}}}, "sha256:7535c999c0e94a513752402436b36fa11ac0fc910d0a5a05e89f75e0be3bc9e5"},
		{"longer than any memory kept for it", call(`["` + strings.Repeat("é", 2000) + `"]`), "sha256:8763df652dc81659c369c944229cc77def883f9b1bb28b04f71f597024e3a2e5"},
		{"more fields than any memory kept for them", request{Method: "POST", Query: many}, "sha256:4d14f5d9d9b041078f413e0fbd64645e3de9ee83d198a4316c39d386eff8848a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := mustFingerprint(t, c.request, v); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

func TestFingerprintRefuses(t *testing.T) {
	for _, c := range []struct {
		name     string
		request  request
		volatile Volatile
		field    string
		wrong    string
	}{
		{"K07", call(`{"amount":1,"amount":999}`), Volatile{}, "body", "appears twice"},
		{"duplicate key in a volatile field", call(`{"memo":{"a":1,"a":2}}`), Volatile{Ignore: []string{"/memo"}}, "body", "appears twice"},
		{"not JSON", call(`{`), Volatile{}, "body", "JSON"},
		{"bad form escape", request{ContentType: formType, Body: []byte("a=%zz")}, Volatile{}, "body", "form"},
		{"semicolon in a form", request{ContentType: formType, Body: []byte("a=1;b=2")}, Volatile{}, "body", "form"},
		{"form not in UTF-8", request{ContentType: formType, Body: []byte("a=%ff")}, Volatile{}, "body", "UTF-8"},
		{"form name not in UTF-8", request{ContentType: formType, Body: []byte("%ff=a")}, Volatile{}, "body", "UTF-8"},
		{"bad media type", request{ContentType: "application/json; charset", Body: []byte("{}")}, Volatile{}, "content type", "media type"},
		{"two media types", request{ContentType: "application/json, text/plain", Body: []byte("{}")}, Volatile{}, "content type", "media type"},
		{"another charset", request{ContentType: "application/json; charset=utf-16", Body: []byte("{}")}, Volatile{}, "content type", "UTF-8"},
		{"empty pointer", call(`{}`), Volatile{Ignore: []string{""}}, "volatile", "whole body"},
		{"empty address pointer", call(`{}`), Volatile{Addresses: []string{""}}, "volatile", "whole body"},
		{"no slash", call(`{}`), Volatile{Ignore: []string{"memo"}}, "volatile", "begin it with"},
		{"URI fragment", call(`{}`), Volatile{Ignore: []string{"#/memo"}}, "volatile", "begin it with"},
		{"bad escape", call(`{}`), Volatile{Ignore: []string{"/a~2"}}, "volatile", "~0"},
		{"tilde at the end", call(`{}`), Volatile{Addresses: []string{"/a~"}}, "volatile", "~0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := c.request.fingerprint(c.volatile)
			wantInvalid(t, err, c.field+": ", c.wrong)
			if f != "" {
				t.Errorf("with the error came %s", f)
			}
			if bad := c.field == "volatile"; bad != (c.volatile.Check() != nil) {
				t.Errorf("Check says %v", c.volatile.Check())
			}
		})
	}
}

func TestReadBody(t *testing.T) {
	for _, c := range []struct {
		name, contentType, body string
		want                    any
	}{
		{"json", jsonType, `{"a":1}`, map[string]any{"a": number(t, "1")}},
		{"json null", jsonType, `null`, nil},
		{"form", formType, "a=1&b=x+y&b=&c", map[string]any{"a": "1", "b": []any{"x y", ""}, "c": ""}},
		{"K08 addresses in JSON", jsonType, `{"to":["0xA","0xB"],"x":[{"to":"0xC","y":"D"}],"from":"0xE"}`, map[string]any{
			"to": []any{"0xa", "0xb"}, "x": []any{map[string]any{"to": "0xc", "y": "D"}}, "from": "0xE",
		}},
		{"K08 addresses in a form", formType, "to=0xA&to=0xB&from=0xE", map[string]any{"to": []any{"0xa", "0xb"}, "from": "0xE"}},
		{"empty", jsonType, "", nil},
		{"empty without type", "", "", nil},
		{"no type", "", `{"a":1}`, nil},
		{"text", "text/plain", `{"a":1}`, nil},
		{"multipart", "multipart/form-data; boundary=x", "--x--", nil},
		{"text in another charset", "text/plain; charset=latin1", "\xe9", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ReadBody(c.contentType, []byte(c.body), Volatile{Ignore: []string{"/a"}, Addresses: []string{"/to", "/x/0/to"}})
			if err != nil || !reflect.DeepEqual(got.Value(), c.want) {
				t.Errorf("%#v, %v; want %#v", got.Value(), err, c.want)
			}
		})
	}
	_, err := ReadBody(jsonType, []byte(`{"amount":1,"amount":999}`), Volatile{})
	wantInvalid(t, err, "body", "appears twice")
}

// The value also feeds the identity's expressions: what is volatile is left out
// of a copy.
func TestVolatileLeavesTheValueAlone(t *testing.T) {
	const text = `{"a":[{"to":"0xA","x":1},"0xB"],"to":["0xC"],"x":1}`
	v, err := ParseJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	tree, err := Volatile{Ignore: []string{"/x", "/a/0/x"}, Addresses: []string{"/to", "/a/0/to", "/a/1"}}.tree()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(Canonical(tree.apply(v))), `{"a":[{"to":"0xa"},"0xb"],"to":["0xc"]}`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := string(appendCanonical(nil, v, tree)), string(Canonical(tree.apply(v))); got != want {
		t.Errorf("written at once it is %s, want %s", got, want)
	}
	if got := string(Canonical(v)); got != text {
		t.Errorf("the value became %s", got)
	}
}

func FuzzFingerprint(f *testing.F) {
	f.Add("POST", "/a", "k=1&k=2", jsonType, []byte(`{"memo":1,"to":"0xA"}`), "/memo", "/to")
	f.Add("POST", "", "", formType, []byte("memo=1&a=%zz"), "/memo/0", "/a~")
	f.Add("PUT", "x", ";", "multipart/form-data; boundary", []byte("\xff"), "", "x")
	f.Add("", "", "", "", []byte{}, "/0/1", "/~01")
	f.Add("POST", "", "", jsonType, []byte(`[["0xA",1,["0xB"],2],{"a":1,"b":[3]}]`), "/0/1", "/0/2")
	f.Add("POST", "", "", jsonType, []byte(`{"b":{"c":"0xA","d":[1]},"a":0}`), "/a", "/b/c")
	f.Fuzz(func(t *testing.T, method, suffix, query, contentType string, body []byte, ignore, address string) {
		values, _ := url.ParseQuery(query)
		r := request{Method: method, Suffix: suffix, Query: values, ContentType: contentType, Body: body}
		got, err := r.fingerprint(Volatile{Ignore: []string{ignore}, Addresses: []string{address}})
		if err != nil {
			wantInvalid(t, err)
			return
		}
		if v, err := ReadBody(contentType, body, Volatile{}); err == nil {
			tree, err := Volatile{Ignore: []string{ignore}, Addresses: []string{address}}.tree()
			if once, want := appendCanonical(nil, v.Value(), tree), Canonical(tree.apply(v.Value())); err != nil || !bytes.Equal(once, want) {
				t.Fatalf("%s, want %s (%v)", once, want, err)
			}
		}
		// The canonical form of a JSON body is the same call.
		if v, err := ReadBody(contentType, body, Volatile{}); err == nil && v.Value() != nil && strings.Contains(strings.ToLower(contentType), "json") {
			r.Body = Canonical(v.Value())
		}
		if again := mustFingerprint(t, r, Volatile{Ignore: []string{ignore}, Addresses: []string{address}}); again != got {
			t.Fatalf("%s, then %s", got, again)
		}
		r.Suffix += "x"
		if other := mustFingerprint(t, r, Volatile{Ignore: []string{ignore}, Addresses: []string{address}}); other == got {
			t.Fatal("the suffix does not count")
		}
	})
}
