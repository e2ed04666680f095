// One payment request: read, deduplicated, committed, answered.
//
// Invariants: money moves at one place, the ledger's commit, once a request at
// the most. Under deduplication a key is claimed before anything is waited for
// and until its entry is committed, so two requests with one key cannot both
// commit within the window.

package provider

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/apd/v3"
)

// HeaderKey is the idempotency key's header. Its value is taken as it is: an
// opaque string of which quotes are a part.
const HeaderKey = "Idempotency-Key"

// HeaderReplayed marks an answer to a request that moved no money because an
// earlier one with its key did.
const HeaderReplayed = "Idempotent-Replayed"

const (
	argumentKey = "idempotencyKey"

	// defaultCurrency stands in where a request names none.
	defaultCurrency = "USD"

	maxText = 255
)

var (
	amountSyntax   = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$`)
	currencySyntax = regexp.MustCompile(`^[A-Za-z0-9]{1,16}$`)
)

// refusal is an error with the answer that it deserves.
type refusal struct {
	status  int
	code    string
	message string
}

func (r refusal) Error() string { return r.message }

func refused(status int, code, format string, arguments ...any) error {
	return refusal{status: status, code: code, message: fmt.Sprintf(format, arguments...)}
}

func (p *Provider) pay(kind Kind) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		working := p.work(w)
		defer working.end()
		w = working
		body, err := p.readBody(w, r)
		if err != nil {
			p.fail(w, err)
			return
		}
		p.note(r, body)
		entry, err := readPayment(r, body, kind)
		if err != nil {
			p.fail(w, err)
			return
		}
		fault, err := p.choose(r, entry)
		if err != nil {
			writeError(w, http.StatusBadRequest, "unknown_fault", err.Error())
			return
		}
		if fault.refuse != nil {
			fault.refuse(w, r)
			return
		}
		p.process(w, r, entry, fault)
	}
}

// worker is the answer of a request that counts as in flight until it begins.
type worker struct {
	http.ResponseWriter
	end func()
}

func (p *Provider) work(w http.ResponseWriter) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight.Now++
	p.inFlight.Most = max(p.inFlight.Most, p.inFlight.Now)
	return &worker{ResponseWriter: w, end: sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.inFlight.Now--
	})}
}

func (w *worker) WriteHeader(status int) {
	w.end()
	w.ResponseWriter.WriteHeader(status)
}

func (w *worker) Write(b []byte) (int, error) {
	w.end()
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *worker) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// process takes a request that no fault refuses to its commit and its answer.
func (p *Provider) process(w http.ResponseWriter, r *http.Request, entry Entry, fault chosen) {
	mine, earlier, err := p.claim(entry)
	if err != nil {
		p.fail(w, err)
		return
	}
	// A panic that drops the connection must free the key, too.
	defer p.unclaim(mine)

	switch fault.name {
	case delayBefore:
		if !p.delay(fault.wait) {
			drop()
		}
	case holdBefore:
		if !p.hold(fault.name, entry, nil) {
			drop()
		}
	case accepted:
		if earlier == nil {
			earlier = p.accept(mine, entry, fault)
		}
		p.answerAccepted(w, *earlier, earlier.ID != entry.ID)
		return
	}

	replayed := earlier != nil
	if !replayed {
		committed, err := p.ledger.commit(entry, p.options.Now)
		if err != nil {
			p.fail(w, err)
			return
		}
		earlier = &committed
		p.unclaim(mine)
	} else if earlier.Created.IsZero() {
		p.answerAccepted(w, *earlier, true)
		return
	}
	p.answer(w, r, *earlier, replayed, fault)
}

// claim is a key whose request is in progress.
type claim struct {
	entry Entry
	// accepted: the request was answered with a 202, its commit comes later
	// or never; the key stays claimed until then.
	accepted bool
	never    bool
}

// claim takes the key of a request. It returns the earlier entry if there is
// one to replay; that entry has no Created if it is accepted and not yet
// committed. Without deduplication or without a key there is nothing to take.
func (p *Provider) claim(e Entry) (*claim, *Entry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.window <= 0 || e.Key == "" {
		return nil, nil, nil
	}
	if other := p.claims[e.Key]; other != nil {
		if err := sameUnderKey(other.entry, e); err != nil {
			return nil, nil, err
		}
		if other.accepted {
			earlier := other.entry
			return nil, &earlier, nil
		}
		return nil, nil, refused(http.StatusConflict, "key_in_use", "a request with this key is in progress")
	}
	earlier, ok, err := p.ledger.newest(e.Key)
	if err != nil {
		return nil, nil, err
	}
	if ok && p.options.Now().Before(earlier.Created.Add(p.window)) {
		if err := sameUnderKey(earlier, e); err != nil {
			return nil, nil, err
		}
		return nil, &earlier, nil
	}
	mine := &claim{entry: e}
	p.claims[e.Key] = mine
	return mine, nil, nil
}

func sameUnderKey(earlier, e Entry) error {
	same, err := earlier.sameRequest(e)
	if err != nil {
		return fmt.Errorf("compare with the earlier request: %w", err)
	}
	if !same {
		return refused(http.StatusUnprocessableEntity, "key_reused", "this key came with another request before")
	}
	return nil
}

// unclaim frees a claim that is still held; nil and freed ones are left alone.
func (p *Provider) unclaim(c *claim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c != nil && !c.accepted && p.claims[c.entry.Key] == c {
		delete(p.claims, c.entry.Key)
	}
}

// accept promises a payment and sees to its commit, if there is to be one.
func (p *Provider) accept(mine *claim, e Entry, fault chosen) *Entry {
	if mine != nil {
		p.mu.Lock()
		mine.accepted, mine.never = true, fault.never
		p.mu.Unlock()
	}
	p.promise(e)
	if !fault.never {
		go p.commitLater(mine, e, fault.wait)
	}
	return &e
}

func (p *Provider) commitLater(mine *claim, e Entry, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.ending:
		return
	}
	if _, err := p.ledger.commit(e, p.options.Now); err != nil {
		if !errors.Is(err, errClosed) {
			p.options.Log.Error("an accepted payment was not committed", "id", e.ID, "error", err)
		}
		return
	}
	if mine != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.claims[e.Key] == mine {
			delete(p.claims, e.Key)
		}
	}
}

// delay waits whether the client stays or not. False: the provider stops.
func (p *Provider) delay(wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.stopped:
		return false
	}
}

func (p *Provider) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.options.MaxBodyBytes))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return nil, refused(http.StatusRequestEntityTooLarge, "too_large", "the body is larger than %d bytes", tooLarge.Limit)
	}
	if err != nil {
		return nil, refused(http.StatusBadRequest, "bad_request", "the body could not be read: %v", err)
	}
	return body, nil
}

// readPayment reads a request's arguments. Numbers stay the text they were.
func readPayment(r *http.Request, body []byte, kind Kind) (Entry, error) {
	arguments, err := readArguments(r.Header.Get("Content-Type"), body)
	if err != nil {
		return Entry{}, err
	}
	e := Entry{Kind: kind}
	var key string
	for _, field := range []struct {
		name string
		into *string
	}{
		{"accountId", &e.AccountID}, {"orderId", &e.OrderID}, {"amount", &e.Amount},
		{"currency", &e.Currency}, {"memo", &e.Memo}, {argumentKey, &key},
	} {
		raw, ok := arguments[field.name]
		if !ok {
			continue
		}
		delete(arguments, field.name)
		text, err := scalar(raw)
		if err != nil {
			return Entry{}, refused(http.StatusBadRequest, "bad_argument", "%s: %v", field.name, err)
		}
		if len(text) > maxText && field.name != "memo" {
			return Entry{}, refused(http.StatusBadRequest, "bad_argument", "%s is longer than %d bytes", field.name, maxText)
		}
		*field.into = text
	}
	if len(arguments) > 0 {
		e.Extra = arguments
	}
	if e.AccountID == "" {
		return Entry{}, refused(http.StatusBadRequest, "bad_argument", "accountId is missing")
	}
	if err := checkAmount(e.Amount); err != nil {
		return Entry{}, err
	}
	if e.Currency == "" {
		e.Currency = defaultCurrency
	}
	if !currencySyntax.MatchString(e.Currency) {
		return Entry{}, refused(http.StatusBadRequest, "bad_argument", "currency must be 1 to 16 letters and digits")
	}
	if e.Key, err = readKey(r.Header, key); err != nil {
		return Entry{}, err
	}
	if e.ID, err = newID(kind); err != nil {
		return Entry{}, err
	}
	return e, nil
}

func readArguments(contentType string, body []byte) (map[string]json.RawMessage, error) {
	media := "application/json"
	if contentType != "" {
		parsed, _, err := mime.ParseMediaType(contentType)
		if err != nil {
			return nil, refused(http.StatusUnsupportedMediaType, "bad_content_type", "Content-Type: %v", err)
		}
		media = parsed
	}
	switch {
	case media == "application/x-www-form-urlencoded":
		return readForm(body)
	case media == "application/json" || strings.HasSuffix(media, "+json"):
		return readObject(body)
	default:
		return nil, refused(http.StatusUnsupportedMediaType, "bad_content_type", "send application/json or application/x-www-form-urlencoded")
	}
}

// readObject refuses an argument that comes twice: which of the two was meant
// is not for the provider to guess.
func readObject(body []byte) (map[string]json.RawMessage, error) {
	bad := func(why any) (map[string]json.RawMessage, error) {
		return nil, refused(http.StatusBadRequest, "bad_json", "the body must be one JSON object: %v", why)
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	if open, err := decoder.Token(); err != nil {
		return bad(err)
	} else if open != json.Delim('{') {
		return bad(fmt.Sprintf("it begins with %v", open))
	}
	arguments := map[string]json.RawMessage{}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return bad(err)
		}
		name, ok := token.(string)
		if !ok {
			return bad(fmt.Sprintf("%v is not an argument's name", token))
		}
		if _, twice := arguments[name]; twice {
			return bad(fmt.Sprintf("argument %q comes twice", name))
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return bad(err)
		}
		// Without white space it is the same text in memory and in the file.
		var compact bytes.Buffer
		if err := json.Compact(&compact, value); err != nil {
			return bad(err)
		}
		arguments[name] = compact.Bytes()
	}
	if _, err := decoder.Token(); err != nil {
		return bad(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return bad("something follows it")
	}
	return arguments, nil
}

func readForm(body []byte) (map[string]json.RawMessage, error) {
	values, err := url.ParseQuery(string(body))
	if err != nil {
		return nil, refused(http.StatusBadRequest, "bad_form", "the body must be a form: %v", err)
	}
	arguments := map[string]json.RawMessage{}
	for name, all := range values {
		if len(all) > 1 {
			return nil, refused(http.StatusBadRequest, "bad_form", "argument %q comes twice", name)
		}
		text, err := json.Marshal(all[0])
		if err != nil {
			return nil, fmt.Errorf("encode argument %q: %w", name, err)
		}
		arguments[name] = text
	}
	return arguments, nil
}

// scalar is the text of a JSON string or number.
func scalar(raw json.RawMessage) (string, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return "", err
	}
	switch v := value.(type) {
	case string:
		return v, nil
	case json.Number:
		return v.String(), nil
	default:
		return "", errors.New("must be a string or a number")
	}
}

func checkAmount(text string) error {
	bad := func(why string) error {
		return refused(http.StatusBadRequest, "bad_amount", "amount %s: send a decimal such as 49.99, as a number or a string", why)
	}
	if text == "" {
		return bad("is missing")
	}
	// The syntax also bounds the exponent: a total written out stays short.
	if !amountSyntax.MatchString(text) {
		return bad("is not a decimal")
	}
	amount, _, err := apd.NewFromString(text)
	if err != nil {
		return bad("is not a decimal")
	}
	if amount.Sign() < 0 {
		return bad("is negative")
	}
	return nil
}

// readKey takes the key from the header or from the argument.
func readKey(header http.Header, argument string) (string, error) {
	values := header.Values(HeaderKey)
	if len(values) > 1 {
		return "", refused(http.StatusBadRequest, "bad_key", "%s comes twice", HeaderKey)
	}
	key := argument
	if len(values) == 1 {
		if argument != "" && argument != values[0] {
			return "", refused(http.StatusBadRequest, "bad_key", "%s and the argument %s differ", HeaderKey, argumentKey)
		}
		key = values[0]
	}
	if len(key) > maxText {
		return "", refused(http.StatusBadRequest, "bad_key", "the key is longer than %d bytes", maxText)
	}
	return key, nil
}

func newID(kind Kind) (string, error) {
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return "", fmt.Errorf("make an id: %w", err)
	}
	prefix := "ch_"
	if kind == Refund {
		prefix = "re_"
	}
	return prefix + hex.EncodeToString(random[:]), nil
}
