package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

func TestOutcomes(t *testing.T) {
	for status, want := range map[int]guard.Outcome{
		200: guard.AttemptSucceeded, 201: guard.AttemptSucceeded, 204: guard.AttemptSucceeded, 299: guard.AttemptSucceeded,
		202: guard.AttemptPending,
		301: guard.AttemptUnknown, 302: guard.AttemptUnknown, 304: guard.AttemptUnknown, 307: guard.AttemptUnknown,
		400: guard.AttemptFailed, 401: guard.AttemptFailed, 402: guard.AttemptFailed, 404: guard.AttemptFailed, 422: guard.AttemptFailed,
		408: guard.AttemptUnknown, 409: guard.AttemptUnknown, 425: guard.AttemptUnknown,
		429: guard.AttemptRetryable,
		500: guard.AttemptUnknown, 502: guard.AttemptUnknown, 503: guard.AttemptUnknown, 504: guard.AttemptUnknown, 999: guard.AttemptUnknown,
	} {
		if got := outcomeOf(status); got != want {
			t.Errorf("%d is %s, want %s", status, got, want)
		}
	}
}

func TestResultWithoutAnAnswer(t *testing.T) {
	now := time.Now()
	for _, tc := range []struct {
		name string
		x    exchange
		want guard.Outcome
	}{
		{"nothing sent", exchange{err: errors.New("x")}, guard.AttemptRetryable},
		{"late, nothing sent", exchange{err: errLate}, guard.AttemptRetryable},
		{"timeout before the first byte", exchange{err: context.DeadlineExceeded}, guard.AttemptRetryable},
		{"a byte sent", exchange{sent: true, err: errors.New("x")}, guard.AttemptUnknown},
		{"a success that was cut", exchange{sent: true, status: 200, err: io.ErrUnexpectedEOF}, guard.AttemptUnknown},
		{"a failure that was cut", exchange{sent: true, status: 402, err: io.ErrUnexpectedEOF}, guard.AttemptUnknown},
	} {
		if got := result(tc.x, &policy.Tool{MaxBodyBytes: 10}, now); got.Outcome != tc.want || got.Detail == "" {
			t.Errorf("%s: %+v, want %s", tc.name, got, tc.want)
		}
	}
}

func TestResultKeepsTheStart(t *testing.T) {
	a := &answer{status: 200, header: http.Header{"Content-Type": {"application/json"}}, body: []byte(`{"id":"ch_1"}`), size: 13, digest: "sha256:x"}
	if got := result(exchange{sent: true, answer: a}, &policy.Tool{MaxBodyBytes: 13}, time.Now()); got.Response.Truncated || got.ProviderReference != "ch_1" {
		t.Errorf("whole: %+v %+v", got, got.Response)
	}
	if got := result(exchange{sent: true, answer: a}, &policy.Tool{MaxBodyBytes: 5}, time.Now()); !got.Response.Truncated || string(got.Response.Body) != `{"id"` || got.Response.Size != 13 {
		t.Errorf("start: %+v", got.Response)
	}
}

func TestReference(t *testing.T) {
	for body, want := range map[string]string{
		`{"id":"ch_1"}`: "ch_1", `{"id":7}`: "", `{"id":""}`: "", `{"id":"a b"}`: "", `[1]`: "", `{}`: "", `x`: "", `{"id":"é"}`: "",
		`{"id":"c\u0068_1"}`: "ch_1", `{"id":"a\u0020b"}`: "", `{"id": "ch_1" }`: "ch_1", `{"id":null}`: "",
		`{"id":"` + strings.Repeat("x", 129) + `"}`: "", `{"id":"` + strings.Repeat("x", 128) + `"}`: strings.Repeat("x", 128),
	} {
		a := &answer{header: http.Header{"Content-Type": {"application/json; charset=utf-8"}}, body: []byte(body)}
		if got := reference(a); got != want {
			t.Errorf("%s gives %q, want %q", body, got, want)
		}
		a.header.Set("Content-Type", "text/plain")
		if got := reference(a); got != "" {
			t.Errorf("text gives %q", got)
		}
	}
}

func TestReadAll(t *testing.T) {
	for _, n := range []int{0, 1, 510, 511, 512, 513, 5000} {
		want := bytes.Repeat([]byte("x"), n)
		for _, length := range []int64{-1, int64(n)} {
			for name, r := range map[string]io.Reader{
				"whole": bytes.NewReader(want), "pieces": iotest.OneByteReader(bytes.NewReader(want)), "with its end": iotest.DataErrReader(bytes.NewReader(want)),
			} {
				if got, err := readAll(r, length); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s, %d of %d: %d bytes, %v", name, n, length, len(got), err)
				}
			}
			if got, err := readAll(iotest.TimeoutReader(iotest.OneByteReader(bytes.NewReader(want))), length); n > 1 && (!errors.Is(err, iotest.ErrTimeout) || len(got) != 1) {
				t.Errorf("%d of %d, cut short: %d bytes, %v", n, length, len(got), err)
			}
		}
		if _, err := readAll(iotest.ErrReader(fmt.Errorf("framing: %w", io.EOF)), int64(n)); err == nil {
			t.Error("a body that ended too early was taken for whole")
		}
	}
}

// A member is the one that encoding/json takes, whatever stands around it.
func TestMember(t *testing.T) {
	pieces := []string{
		`{`, `}`, `[`, `]`, `,`, `:`, ` `, "\n", `"id"`, `"i\u0064"`, `"ID"`, `"x"`, `"a\"id\":{}"`, `"\\"`, `"id\\"`, `null`, `1.5e3`, `true`,
		`"id":"re_1"`, `"id" : "re_2",`, `"x":{"id":"in"},`, `"id":{"id":[1,{"id":2}]}`, `[{"id":"in"}]`, `,"y":["id",{"id":"in"}]`, "\"bad\xff\":1,",
	}
	random := rand.New(rand.NewPCG(5, 6))
	found := 0
	for range 300_000 {
		text := []byte("{")
		for range random.IntN(8) {
			text = append(text, pieces[random.IntN(len(pieces))]...)
		}
		if text = append(text, '}'); !json.Valid(text) {
			continue
		}
		var members map[string]json.RawMessage
		if err := json.Unmarshal(text, &members); err != nil {
			t.Fatal(err)
		}
		got := bytes.TrimSpace(member(text, "id"))
		if !bytes.Equal(got, members["id"]) {
			t.Fatalf("of %s: %q, want %q", text, got, members["id"])
		}
		if got != nil {
			found++
		}
	}
	if found < 1000 {
		t.Errorf("only %d were found", found)
	}
	for _, text := range []string{`null`, ` "id" `, `1`, `["id",{"id":"re_1"}]`, "\t[]"} {
		if got := member([]byte(text), "id"); got != nil {
			t.Errorf("of %s: %q", text, got)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, "-1": 0, "soon": 0, "1.5": 0, "99999999": maxRetryAfter,
		now.Add(time.Minute).Format(http.TimeFormat): time.Minute, now.Add(-time.Minute).Format(http.TimeFormat): 0,
	} {
		if got := retryAfter(value, now); got != want {
			t.Errorf("%q is %s, want %s", value, got, want)
		}
	}
	for d, want := range map[time.Duration]int{0: 0, -1: 0, 1: 1, time.Second: 1, 1001 * time.Millisecond: 2} {
		if got := seconds(d); got != want {
			t.Errorf("%s is %d seconds, want %d", d, got, want)
		}
	}
}

// What a person has counted as not paid is not told as a fact.
func TestAReleasedAttemptIsNotToldAsNotPaid(t *testing.T) {
	who := access.Caller{Username: "agent", UID: "1"}
	v := guard.View{Key: guard.Key{Caller: "agent", IntentID: "k1"}, CallerUID: "1", Exists: true, Attempts: []guard.AttemptView{
		{Number: 1, Outcome: guard.AttemptUnknown, Status: 500}, {Number: 2, Outcome: guard.AttemptRetryable, Detail: "nothing was sent"},
	}}
	for _, a := range []guard.Answer{
		{Verdict: guard.Deny, Reason: guard.ReasonUnreachable, Intent: v},
		{Verdict: guard.Replay, Reason: guard.ReasonUnreachable, Intent: v},
		{Verdict: guard.Replay, Reason: guard.ReasonExpired, Intent: v},
	} {
		p := fromGuard(a, who)
		if strings.Contains(p.Detail, "Nothing was paid") || !strings.Contains(p.Detail, "How an earlier attempt ended is not known") {
			t.Errorf("%s %s: %s", a.Verdict, a.Reason, p.Detail)
		}
		if want := a.Reason == guard.ReasonExpired; (p.Status == http.StatusConflict) != want {
			t.Errorf("%s %s: status %d", a.Verdict, a.Reason, p.Status)
		}
	}
}

// What is left is told where it is the caller's own, and nothing of what others spent.
func TestASpentBudgetIsToldInWords(t *testing.T) {
	limit := guard.SpendLimit{Name: "daily", Amount: intent.Money{Value: "500", Currency: "USD"}, Window: 24 * time.Hour}
	for _, tc := range []struct {
		spend      *guard.SpendExceeded
		says, omit string
	}{
		{&guard.SpendExceeded{Limit: limit, Left: "20"}, `the limit "daily" of the budget: 500.00 USD within 24h. You have 20.00 USD left.`, "cannot be counted"},
		{&guard.SpendExceeded{Limit: limit}, "There is room again when", " left"},
		{&guard.SpendExceeded{Limit: limit, Uncounted: "the tool declares no amount"}, "the tool declares no amount", "There is room"},
	} {
		p := fromGuard(guard.Answer{
			Verdict: guard.Deny, Reason: guard.ReasonSpendExceeded, Intent: guard.View{Key: guard.Key{Caller: "agent", IntentID: "k1"}}, Spend: tc.spend,
		}, access.Caller{Username: "agent", UID: "1"})
		if p.Status != http.StatusForbidden || p.Reason != "spend_exceeded" || p.Type != problemBase+"spend-exceeded" || p.Intent != "k1" || p.Poll != "" {
			t.Errorf("problem %+v", p)
		}
		if !strings.Contains(p.Detail, "Nothing was sent.") || !strings.Contains(p.Detail, tc.says) || strings.Contains(p.Detail, tc.omit) {
			t.Errorf("it says %q", p.Detail)
		}
	}
	for _, reason := range []guard.Reason{guard.BudgetExceeded, guard.Lookalike} {
		p := fromGuard(guard.Answer{Verdict: guard.UnknownHold, Reason: reason, Reasons: []guard.Reason{reason}, Hold: "h-1"}, access.Caller{})
		if !strings.Contains(p.Detail, map[guard.Reason]string{guard.BudgetExceeded: "exceed what may be spent", guard.Lookalike: "the same recipient"}[reason]) {
			t.Errorf("%s: %s", reason, p.Detail)
		}
	}
}

// A machine that is too slow is not taken for a store that is away.
func TestABusyGatewaySaysSo(t *testing.T) {
	p := (&call{}).failure(fmt.Errorf("spec.identity.scope[0]: %w", policy.ErrBusy), &policy.Tool{Store: "payments"})
	if p.Status != http.StatusServiceUnavailable || p.Reason != "busy" || p.Verdict != guard.Deny || p.RetryAfter != 1 || strings.Contains(p.Detail, "IdempotencyStore") {
		t.Errorf("problem %+v", p)
	}
}

func TestWithArgument(t *testing.T) {
	for _, tc := range []struct{ body, pointer, want string }{
		{`{"a":1.10}`, "/key", `{"a":1.10,"key":"K"}`},
		{`{"key":"mine","n":9007199254740993}`, "/key", `{"key":"K","n":9007199254740993}`},
		{` { "a" : "<é\u00e9>" } `, "/meta/key", `{"a":"<é\u00e9>","meta":{"key":"K"}}`},
		{`{"meta":{"x":1e400}}`, "/meta/key", `{"meta":{"key":"K","x":1e400}}`},
		{`{}`, "/a~1b/c~0d", `{"a/b":{"c~d":"K"}}`},
	} {
		got, err := withArgument([]byte(tc.body), tc.pointer, "K")
		if err != nil || string(got) != tc.want {
			t.Errorf("%s at %s: %s, %v; want %s", tc.body, tc.pointer, got, err, tc.want)
		}
	}
	for _, bad := range []string{``, `[]`, `"x"`, `null`, `{"meta":1}`, `{"meta":[]}`, `{"meta":null}`, `{"a":1,"a":2}`, `{"a":1}x`, "{\"a\":\"\xff\"}"} {
		var invalid *intent.InvalidError
		if got, err := withArgument([]byte(bad), "/meta/key", "K"); !errors.As(err, &invalid) {
			t.Errorf("%s: %s, %v; want it refused", bad, got, err)
		}
	}
}

func TestHeaders(t *testing.T) {
	call := http.Header{
		"Authorization": {"x"}, "Cookie": {"x"}, "Idempotency-Key": {"x"}, "Accept": {"a", "b"}, "X-Hop": {"x"}, "Connection": {"close, X-Hop"},
		"Holdfast-Session": {"x"}, "X-Other": {"x"}, "Te": {"trailers"},
	}
	got := forwarded(call, []string{"Authorization", "Cookie", "Idempotency-Key", "Accept", "X-Hop", "Connection", "Holdfast-Session", "Te", "Absent"})
	if len(got) != 1 || !slices.Equal(got["Accept"], []string{"a", "b"}) {
		t.Errorf("forwarded %v", got)
	}
	back := endToEnd(http.Header{
		"Content-Length": {"3"}, "Transfer-Encoding": {"chunked"}, "Set-Cookie": {"x"}, "Holdfast-Verdict": {"ALLOW"}, "holdfast-Intent": {"x"},
		"Idempotent-Replayed": {"true"}, "Connection": {"x-hop"}, "X-Hop": {"x"}, "Keep-Alive": {"x"}, "Content-Type": {"text/plain"}, "X-Bad": {"a\r\nb"}, "Etag": {"1"},
	})
	if len(back) != 2 || back.Get("Content-Type") != "text/plain" || back.Get("Etag") != "1" {
		t.Errorf("end to end %v", back)
	}
}

func TestRoutes(t *testing.T) {
	for path, want := range map[string]route{
		"/v1/namespaces/n/tools/t":                  {namespace: "n", tool: "t"},
		"/v1/namespaces/n/tools/t/a/b":              {namespace: "n", tool: "t", suffix: "/a/b"},
		"/v1/namespaces/n/tools/t/":                 {namespace: "n", tool: "t", suffix: "/"},
		"/v1/namespaces/n/tools/t/intentsx":         {namespace: "n", tool: "t", suffix: "/intentsx"},
		"/v1/namespaces/n/tools/t/intents/k":        {namespace: "n", tool: "t", poll: true, intentID: "k"},
		"/v1/namespaces/n/tools/t/intents/s%2F1":    {namespace: "n", tool: "t", poll: true, intentID: "s/1"},
		"/v1/namespaces/n/tools/t/intents/s/1":      {namespace: "n", tool: "t", poll: true, intentID: "s/1"},
		"/v1/namespaces/n/tools/t/intents/%22k%22":  {namespace: "n", tool: "t", poll: true, intentID: "k"},
		"/v1/namespaces/n/tools/t/intents/a%20%25b": {namespace: "n", tool: "t", poll: true, intentID: "a %b"},
	} {
		if got, ok, err := parseRoute(path); !ok || err != nil || got != want {
			t.Errorf("%s: %+v, %t, %v", path, got, ok, err)
		}
	}
	for _, path := range []string{"/", "*", "", "/v1/namespaces//tools/t", "/v1/namespaces/n/tools/", "/v1/namespaces/N/tools/t", "/v1/namespaces/n/m/tools/t",
		"/v1/namespaces/n/tools/..", "/v1/namespaces/n%2F/tools/t", "/v2/namespaces/n/tools/t", "/v1/namespaces/n/tools/T"} {
		if got, ok, _ := parseRoute(path); ok {
			t.Errorf("%s: %+v", path, got)
		}
	}
	for _, path := range []string{"/v1/namespaces/n/tools/t/intents", "/v1/namespaces/n/tools/t/intents/", "/v1/namespaces/n/tools/t/intents/%zz", "/v1/namespaces/n/tools/t/intents/a%00"} {
		if _, ok, err := parseRoute(path); !ok || err == nil {
			t.Errorf("%s: %t, %v", path, ok, err)
		}
	}
	// What the gateway writes, it reads.
	for _, id := range []string{"k", "s/1", "a b", "50%", "é", "?x#y", "a;b", "..", "a+b"} {
		if got, ok, err := parseRoute(pollPath("n", "t", id)); !ok || err != nil || got.intentID != id {
			t.Errorf("%q comes back as %+v, %t, %v", id, got, ok, err)
		}
	}
}

func TestUpstreamURL(t *testing.T) {
	for _, tc := range []struct{ base, suffix, query, want string }{
		{"http://h/a", "", "", "http://h/a"},
		{"http://h", "/x", "", "http://h/x"},
		{"http://h/a/", "/x", "b=2&a=1", "http://h/a/x?a=1&b=2"},
		{"http://h/a%2Fb", "/x", "", "http://h/a%2Fb/x"},
		{"http://h/a?mode=test", "", "q=%26", "http://h/a?mode=test&q=%26"},
	} {
		base, err := url.Parse(tc.base)
		if err != nil {
			t.Fatal(err)
		}
		query, err := url.ParseQuery(tc.query)
		if err != nil {
			t.Fatal(err)
		}
		got, err := upstreamURL(base, tc.suffix, query)
		if err != nil || got.String() != tc.want {
			t.Errorf("%+v: %v, %v", tc, got, err)
		}
	}
	base, err := url.Parse("http://h/a?mode=test")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := upstreamURL(base, "", url.Values{"mode": {"live"}}); err == nil {
		t.Errorf("the tool's own parameter was given again: %s", got)
	}
}

func TestMayCache(t *testing.T) {
	for name, tc := range map[string]struct {
		status int
		header http.Header
		want   bool
	}{
		"plain":        {200, http.Header{}, true},
		"not found":    {404, http.Header{}, false},
		"no-store":     {200, http.Header{"Cache-Control": {"private, No-Store"}}, false},
		"cookie":       {200, http.Header{"Set-Cookie": {"x"}}, false},
		"vary":         {200, http.Header{"Vary": {"*"}}, false},
		"event stream": {200, http.Header{"Content-Type": {"text/event-stream"}}, false},
	} {
		if got := mayCache(&http.Response{StatusCode: tc.status, Header: tc.header}); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestIsLabel(t *testing.T) {
	for _, name := range []string{
		"", "a", "-", "a-", "-a", "a-b", "a--b", "0", "A", "a.b", "a_b", "ä", "a b", "a/b", strings.Repeat("a", 63), strings.Repeat("a", 64),
	} {
		if got, want := isLabel(name), len(validation.IsDNS1123Label(name)) == 0; got != want {
			t.Errorf("%q: %t, want %t", name, got, want)
		}
	}
}

func TestHeadValues(t *testing.T) {
	for head, want := range map[string][]string{
		"HTTP/1.1 200 OK\r\n\r\n": nil,
		"HTTP/1.1 200 OK\r\nconnection: close\r\nX-Connection: no\r\nConnection:X-A,  X-B \r\n\r\n": {"close", "X-A,  X-B"},
		"HTTP/1.1 200 OK\nConnection: X-A,\n\tX-B\nA: b\n c: d\n\n":                                 {"X-A, X-B"},
	} {
		if got := headValues([]byte(head), "Connection"); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", head, got, want)
		}
	}
}

// left is a deadline that is so far away.
type left time.Duration

func (l left) Left() time.Duration { return time.Duration(l) }

// The kernel gives up before the time of the attempt is over, and not much before, whatever
// it was told for the attempt before on the same connection.
func TestKernelGivesUpInTime(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFence(conn.(*net.TCPConn), left(0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	for _, ms := range []int64{10_000, 9_990, 10_010, 9_400, 9_300, 9_000, 20_000, 500, 499, 1, 2, 5_000, 4_688, 4_687, 4_600} {
		f.again(left(time.Duration(ms) * time.Millisecond))
		f.begin()
		if _, err := f.Write([]byte("a")); err != nil {
			t.Fatal(err)
		}
		var is int
		ctl := f.raw.Control(func(fd uintptr) { is, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
		if ctl != nil || err != nil {
			t.Fatal(ctl, err)
		}
		if got := int64(is); got < 1 || got > ms || got < ms-ms/8 {
			t.Errorf("with %d ms left the kernel gives up after %d ms", ms, got)
		}
	}
}
