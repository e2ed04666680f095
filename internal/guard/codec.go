// This file writes and reads records as encoding/json does, without reflection: every
// call of an intent writes or reads one, and nothing else of the engine costs as much.
//
// What must hold: what is written is byte for byte what encoding/json writes, and what
// is read is what encoding/json reads. Whatever is not as this writer writes it, is left
// to encoding/json. A test fills every field, so that none can be forgotten here.

package guard

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/holdfast-dev/holdfast/internal/intent"
)

// writer appends the members of one object after the other; err is the first error.
type writer struct {
	b   []byte
	err error
}

func (w *writer) open() { w.b = append(w.b, '{') }

func (w *writer) end() { w.b = append(w.b, '}') }

// name begins a member.
func (w *writer) name(name string) {
	if w.b[len(w.b)-1] != '{' {
		w.b = append(w.b, ',')
	}
	w.b = append(append(append(w.b, '"'), name...), '"', ':')
}

func (w *writer) value(v any) {
	b, err := json.Marshal(v)
	if err != nil && w.err == nil {
		w.err = err
	}
	w.b = append(w.b, b...)
}

func (w *writer) string(s string) {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			w.value(s)
			return
		}
	}
	w.b = append(append(append(w.b, '"'), s...), '"')
}

func (w *writer) text(name, s string) {
	w.name(name)
	w.string(s)
}

// The others leave out what is empty.
func (w *writer) someText(name, s string) {
	if s != "" {
		w.text(name, s)
	}
}

func (w *writer) number(name string, n int64) {
	w.name(name)
	w.b = strconv.AppendInt(w.b, n, 10)
}

func (w *writer) someNumber(name string, n int64) {
	if n != 0 {
		w.number(name, n)
	}
}

func (w *writer) flag(name string, set bool) {
	if set {
		w.name(name)
		w.b = append(w.b, "true"...)
	}
}

func (w *writer) time(name string, t time.Time) {
	w.name(name)
	// What RFC 3339 cannot say is refused there.
	if _, offset := t.Zone(); offset != 0 || t.Year() < 0 || t.Year() > 9999 {
		w.value(t)
		return
	}
	w.b = append(t.AppendFormat(append(w.b, '"'), time.RFC3339Nano), '"')
}

func (w *writer) someTime(name string, t time.Time) {
	if !t.IsZero() {
		w.time(name, t)
	}
}

func (w *writer) texts(list []string) {
	if list == nil {
		w.b = append(w.b, "null"...)
		return
	}
	w.b = append(w.b, '[')
	for i, s := range list {
		if i > 0 {
			w.b = append(w.b, ',')
		}
		w.string(s)
	}
	w.b = append(w.b, ']')
}

func (w *writer) someBytes(name string, b []byte) {
	if len(b) > 0 {
		w.name(name)
		w.b = append(base64.StdEncoding.AppendEncode(append(w.b, '"'), b), '"')
	}
}

func (h *header) encode() ([]byte, error) {
	w := writer{b: make([]byte, 0, 768)}
	w.open()
	w.someText("namespace", h.Namespace)
	w.someText("tool", h.Tool)
	w.someText("caller", h.Caller)
	w.text("callerUID", h.CallerUID)
	w.someText("intentID", h.IntentID)
	w.text("state", string(h.State))
	w.name("scope")
	var scope []string
	if h.Scope != nil {
		scope = make([]string, len(h.Scope))
		for i, p := range h.Scope {
			scope[i] = string(p)
		}
	}
	w.texts(scope)
	w.someText("lineage", string(h.Lineage))
	if h.Amount != nil {
		w.name("amount")
		w.open()
		w.text("value", h.Amount.Value)
		w.text("currency", h.Amount.Currency)
		w.end()
	}
	w.someText("recipient", h.Recipient)
	w.text("fingerprint", h.Fingerprint)
	w.text("identityHash", h.IdentityHash)
	w.someText("amountHash", h.AmountHash)
	w.someText("recipientHash", h.RecipientHash)
	w.someNumber("hold", int64(h.Hold))
	w.someText("providerReference", h.ProviderReference)
	w.flag("refundOwed", h.RefundOwed)
	w.flag("disputed", h.Disputed)
	w.time("created", h.Created)
	w.time("changed", h.Changed)
	w.end()
	return w.b, w.err
}

func (b *body) encode() ([]byte, error) {
	w := writer{b: make([]byte, 0, 1280)}
	w.open()
	w.name("policy")
	w.policy(&b.Policy)
	w.number("generation", int64(b.Generation))
	w.text("providerKey", b.ProviderKey)
	if len(b.Attempts) > 0 {
		w.name("attempts")
		w.b = append(w.b, '[')
		for i := range b.Attempts {
			if i > 0 {
				w.b = append(w.b, ',')
			}
			w.attempt(&b.Attempts[i])
		}
		w.b = append(w.b, ']')
	}
	w.someNumber("budgetFrom", int64(b.BudgetFrom))
	if b.Current != nil {
		w.name("current")
		w.value(b.Current)
	}
	if len(b.Ended) > 0 {
		w.name("ended")
		w.value(b.Ended)
	}
	if len(b.Passed) > 0 {
		w.name("passed")
		w.value(b.Passed)
	}
	if b.Response != nil {
		w.name("response")
		w.response(b.Response)
	}
	w.someTime("retryAt", b.RetryAt)
	w.someTime("releasedAt", b.ReleasedAt)
	w.someTime("settledAt", b.SettledAt)
	w.someText("settledAs", string(b.SettledAs))
	w.someNumber("winner", int64(b.Winner))
	w.flag("markedPaid", b.MarkedPaid)
	w.flag("markedFailed", b.MarkedFailed)
	w.flag("expired", b.Expired)
	w.someText("memory", b.Memory)
	w.flag("imported", b.Imported)
	w.flag("paidByHand", b.PaidByHand)
	w.end()
	return w.b, w.err
}

func (w *writer) policy(p *Policy) {
	w.open()
	w.text("budget", p.Budget)
	w.number("window", int64(p.Window))
	w.flag("holdExactMatch", p.HoldExactMatch)
	w.flag("ignoreLineage", p.IgnoreLineage)
	w.number("ttl", int64(p.TTL))
	w.number("timeout", int64(p.Timeout))
	w.number("settleAfter", int64(p.SettleAfter))
	w.someNumber("maxHeld", int64(p.MaxHeld))
	w.someNumber("maxHeldPerCaller", int64(p.MaxHeldPerCaller))
	w.end()
}

func (w *writer) attempt(a *attempt) {
	w.open()
	w.number("n", int64(a.Number))
	w.number("generation", int64(a.Generation))
	w.text("nonce", a.Nonce)
	w.someText("outcome", string(a.Outcome))
	w.time("started", a.Started)
	w.time("leaseEnd", a.LeaseEnd)
	w.number("lease", int64(a.Lease))
	w.number("grace", int64(a.Grace))
	w.number("settleAfter", int64(a.SettleAfter))
	w.someTime("ended", a.Ended)
	w.flag("excused", a.Excused)
	w.flag("denied", a.Denied)
	w.flag("counted", a.Counted)
	w.flag("accepted", a.Accepted)
	w.flag("lost", a.Lost)
	w.flag("late", a.Late)
	w.flag("sentLate", a.SentLate)
	w.someTime("lateUntil", a.LateUntil)
	w.someText("reference", a.Reference)
	if a.Response != nil {
		w.name("response")
		w.response(a.Response)
	}
	w.someNumber("status", int64(a.Status))
	w.someText("detail", a.Detail)
	w.end()
}

func (w *writer) response(r *Response) {
	w.open()
	w.number("status", int64(r.Status))
	if len(r.Header) > 0 {
		w.name("header")
		w.open()
		for _, name := range slices.Sorted(maps.Keys(r.Header)) {
			if w.b[len(w.b)-1] != '{' {
				w.b = append(w.b, ',')
			}
			w.string(name)
			w.b = append(w.b, ':')
			w.texts(r.Header[name])
		}
		w.end()
	}
	w.someBytes("body", r.Body)
	w.someNumber("size", r.Size)
	w.someText("digest", r.Digest)
	w.flag("truncated", r.Truncated)
	w.end()
}

// errOther is what this reader does not know.
var errOther = errors.New("not as it is written here")

// reader moves over a text; err is the first error, after which nothing is read.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail() {
	if r.err == nil {
		r.err = errOther
	}
	r.b = nil
}

// take moves over c if it is next.
func (r *reader) take(c byte) bool {
	if len(r.b) > 0 && r.b[0] == c {
		r.b = r.b[1:]
		return true
	}
	return false
}

func (r *reader) must(c byte) {
	if !r.take(c) {
		r.fail()
	}
}

// word moves over a word if it is next.
func (r *reader) word(word string) bool {
	if len(r.b) >= len(word) && string(r.b[:len(word)]) == word {
		r.b = r.b[len(word):]
		return true
	}
	return false
}

// quoted gives a string with its quotes, and whether it says what it is as it stands.
func (r *reader) quoted() (text []byte, plain bool) {
	if len(r.b) == 0 || r.b[0] != '"' {
		r.fail()
		return nil, false
	}
	plain = true
	for i := 1; i < len(r.b); i++ {
		switch c := r.b[i]; {
		case c == '"':
			text, r.b = r.b[:i+1], r.b[i+1:]
			return text, plain
		case c == '\\':
			plain = false
			i++
		case c < ' ':
			r.fail()
			return nil, false
		case c >= utf8.RuneSelf:
			plain = false
		}
	}
	r.fail()
	return nil, false
}

func (r *reader) text() string {
	q, plain := r.quoted()
	if r.err != nil {
		return ""
	}
	if plain {
		return string(q[1 : len(q)-1])
	}
	var s string
	if json.Unmarshal(q, &s) != nil {
		r.fail()
	}
	return s
}

func (r *reader) number() int64 {
	i := 0
	for i < len(r.b) && (r.b[i] == '-' || r.b[i] >= '0' && r.b[i] <= '9') {
		i++
	}
	n, err := strconv.ParseInt(string(r.b[:i]), 10, 64)
	// Neither a fraction nor an exponent; -0 and leading zeros are no JSON of ours.
	if err != nil || i > 1 && (r.b[0] == '0' || r.b[0] == '-' && r.b[1] == '0') {
		r.fail()
		return 0
	}
	r.b = r.b[i:]
	return n
}

func (r *reader) integer() int { return int(r.number()) }

func (r *reader) duration() time.Duration { return time.Duration(r.number()) }

func (r *reader) flag() bool {
	switch {
	case r.word("true"):
		return true
	case r.word("false"):
	default:
		r.fail()
	}
	return false
}

func (r *reader) time() (t time.Time) {
	q, plain := r.quoted()
	if r.err == nil && (!plain || t.UnmarshalJSON(q) != nil) {
		r.fail()
	}
	return t
}

func (r *reader) bytes() []byte {
	q, plain := r.quoted()
	if r.err != nil {
		return nil
	}
	if !plain {
		r.fail()
		return nil
	}
	b, err := base64.StdEncoding.AppendDecode(make([]byte, 0, base64.StdEncoding.DecodedLen(len(q)-2)), q[1:len(q)-1])
	if err != nil {
		r.fail()
	}
	return b
}

// object gives the name of each member to read, which moves over its value.
func (r *reader) object(read func(name string)) {
	r.must('{')
	if r.take('}') {
		return
	}
	for r.err == nil {
		q, plain := r.quoted()
		r.must(':')
		if r.err != nil || !plain {
			r.fail()
			return
		}
		read(string(q[1 : len(q)-1]))
		if r.err == nil && r.take('}') {
			return
		}
		r.must(',')
	}
}

// array calls read for each element.
func (r *reader) array(read func()) {
	r.must('[')
	if r.take(']') {
		return
	}
	for r.err == nil {
		read()
		if r.err == nil && r.take(']') {
			return
		}
		r.must(',')
	}
}

func (r *reader) texts() []string {
	if r.word("null") {
		return nil
	}
	out := make([]string, 0, 1)
	r.array(func() { out = append(out, r.text()) })
	return out
}

// rare leaves a value to encoding/json: it is seldom there.
func (r *reader) rare(v any) {
	depth := 0
	for i := 0; i < len(r.b); i++ {
		switch r.b[i] {
		case '"':
			in := reader{b: r.b[i:]}
			q, _ := in.quoted()
			if in.err != nil {
				r.fail()
				return
			}
			i += len(q) - 1
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		if depth == 0 {
			if json.Unmarshal(r.b[:i+1], v) != nil {
				r.fail()
				return
			}
			r.b = r.b[i+1:]
			return
		}
	}
	r.fail()
}

// decodeJSON reads with quick, or else with encoding/json.
func decodeJSON[T any](text []byte, v *T, quick func(*reader, *T)) error {
	r := reader{b: text}
	var out T
	quick(&r, &out)
	if r.err == nil && len(r.b) == 0 {
		*v = out
		return nil
	}
	return json.Unmarshal(text, v)
}

func (r *reader) header(h *header) {
	r.object(func(name string) {
		switch name {
		case "namespace":
			h.Namespace = r.text()
		case "tool":
			h.Tool = r.text()
		case "caller":
			h.Caller = r.text()
		case "callerUID":
			h.CallerUID = r.text()
		case "intentID":
			h.IntentID = r.text()
		case "state":
			h.State = State(r.text())
		case "scope":
			if texts := r.texts(); texts != nil {
				h.Scope = make(intent.Scope, len(texts))
				for i, s := range texts {
					h.Scope[i] = intent.Path(s)
				}
			}
		case "lineage":
			h.Lineage = intent.Path(r.text())
		case "amount":
			h.Amount = &intent.Money{}
			r.object(func(name string) {
				switch name {
				case "value":
					h.Amount.Value = r.text()
				case "currency":
					h.Amount.Currency = r.text()
				default:
					r.fail()
				}
			})
		case "recipient":
			h.Recipient = r.text()
		case "fingerprint":
			h.Fingerprint = r.text()
		case "identityHash":
			h.IdentityHash = r.text()
		case "amountHash":
			h.AmountHash = r.text()
		case "recipientHash":
			h.RecipientHash = r.text()
		case "hold":
			h.Hold = r.integer()
		case "providerReference":
			h.ProviderReference = r.text()
		case "refundOwed":
			h.RefundOwed = r.flag()
		case "disputed":
			h.Disputed = r.flag()
		case "created":
			h.Created = r.time()
		case "changed":
			h.Changed = r.time()
		default:
			r.fail()
		}
	})
}

func (r *reader) body(b *body) {
	r.object(func(name string) {
		switch name {
		case "policy":
			r.policy(&b.Policy)
		case "generation":
			b.Generation = r.integer()
		case "providerKey":
			b.ProviderKey = r.text()
		case "attempts":
			b.Attempts = make([]attempt, 0, 1)
			r.array(func() {
				var a attempt
				r.attempt(&a)
				b.Attempts = append(b.Attempts, a)
			})
		case "budgetFrom":
			b.BudgetFrom = r.integer()
		case "current":
			r.rare(&b.Current)
		case "ended":
			r.rare(&b.Ended)
		case "passed":
			r.rare(&b.Passed)
		case "response":
			b.Response = &Response{}
			r.response(b.Response)
		case "retryAt":
			b.RetryAt = r.time()
		case "releasedAt":
			b.ReleasedAt = r.time()
		case "settledAt":
			b.SettledAt = r.time()
		case "settledAs":
			b.SettledAs = State(r.text())
		case "winner":
			b.Winner = r.integer()
		case "markedPaid":
			b.MarkedPaid = r.flag()
		case "markedFailed":
			b.MarkedFailed = r.flag()
		case "expired":
			b.Expired = r.flag()
		case "memory":
			b.Memory = r.text()
		case "imported":
			b.Imported = r.flag()
		case "paidByHand":
			b.PaidByHand = r.flag()
		default:
			r.fail()
		}
	})
}

func (r *reader) policy(p *Policy) {
	r.object(func(name string) {
		switch name {
		case "budget":
			p.Budget = r.text()
		case "window":
			p.Window = r.duration()
		case "holdExactMatch":
			p.HoldExactMatch = r.flag()
		case "ignoreLineage":
			p.IgnoreLineage = r.flag()
		case "ttl":
			p.TTL = r.duration()
		case "timeout":
			p.Timeout = r.duration()
		case "settleAfter":
			p.SettleAfter = r.duration()
		case "maxHeld":
			p.MaxHeld = r.integer()
		case "maxHeldPerCaller":
			p.MaxHeldPerCaller = r.integer()
		default:
			r.fail()
		}
	})
}

func (r *reader) attempt(a *attempt) {
	r.object(func(name string) {
		switch name {
		case "n":
			a.Number = r.integer()
		case "generation":
			a.Generation = r.integer()
		case "nonce":
			a.Nonce = r.text()
		case "outcome":
			a.Outcome = Outcome(r.text())
		case "started":
			a.Started = r.time()
		case "leaseEnd":
			a.LeaseEnd = r.time()
		case "lease":
			a.Lease = r.duration()
		case "grace":
			a.Grace = r.duration()
		case "settleAfter":
			a.SettleAfter = r.duration()
		case "ended":
			a.Ended = r.time()
		case "excused":
			a.Excused = r.flag()
		case "denied":
			a.Denied = r.flag()
		case "counted":
			a.Counted = r.flag()
		case "accepted":
			a.Accepted = r.flag()
		case "lost":
			a.Lost = r.flag()
		case "late":
			a.Late = r.flag()
		case "sentLate":
			a.SentLate = r.flag()
		case "lateUntil":
			a.LateUntil = r.time()
		case "reference":
			a.Reference = r.text()
		case "response":
			a.Response = &Response{}
			r.response(a.Response)
		case "status":
			a.Status = r.integer()
		case "detail":
			a.Detail = r.text()
		default:
			r.fail()
		}
	})
}

func (r *reader) response(v *Response) {
	r.object(func(name string) {
		switch name {
		case "status":
			v.Status = r.integer()
		case "header":
			v.Header = map[string][]string{}
			r.object(func(name string) { v.Header[name] = r.texts() })
		case "body":
			v.Body = r.bytes()
		case "size":
			v.Size = r.number()
		case "digest":
			v.Digest = r.text()
		case "truncated":
			v.Truncated = r.flag()
		default:
			r.fail()
		}
	})
}
