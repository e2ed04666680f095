// This file is the stage for the tests that read as stories: one bolt store with a
// clock of its own, any number of processes on it, agents that call, people who
// resolve, and a network that can be told to lose replies. Time moves only when a
// story says so. Whatever a story does, in the end every record keeps the rules,
// the held-count meter agrees with the list of holds, the meters of slots with what
// is in flight, and the store's indexes agree with its records.

package guard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

const (
	storyTimeout     = 5 * time.Second
	storySettle      = time.Minute
	storyLease       = storyTimeout + 2*time.Second + time.Second // the defaults of settlement and margin
	storyGrace       = 2 * time.Second
	storyWait        = storyLease + storyGrace + storySettle
	storyTTL         = 48 * time.Hour
	storyWindow      = 72 * time.Hour
	storyTool        = "issue-refund"
	storyCaller      = "system:serviceaccount:support:agent"
	storyFingerprint = "sha256:one"
)

var storyStart = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// storyTime is all the clocks there are.
type storyTime struct {
	mu    sync.Mutex
	t     time.Duration // since the story began
	skew  time.Duration // how far the store's clock was stepped
	lapse time.Duration // how far the processes' wall clock was stepped
}

func (c *storyTime) Now() Reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Reading{Boot: time.Hour + c.t, Wall: storyStart.Add(c.t + c.lapse)}
}

func (c *storyTime) store() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return storyStart.Add(c.t + c.skew)
}

func (c *storyTime) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t += d
}

func (c *storyTime) stepStore(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.skew += d
}

func (c *storyTime) stepWall(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lapse += d
}

// network is the store as processes see it. A hook that returns an error stands for
// a request or a reply that is lost.
type network struct {
	store.Store
	mu     sync.Mutex
	before func(what string) error // the request does not arrive
	after  func(what string) error // the reply does not arrive
	update func(store.Write)       // sees an Update before it arrives
	asked  map[string]int
}

var errStoryLost = fmt.Errorf("%w: lost in the story", store.ErrUnavailable)

func (n *network) ask(what string, run func() error) error {
	n.mu.Lock()
	before, after := n.before, n.after
	n.asked[what]++
	n.mu.Unlock()
	if before != nil {
		if err := before(what); err != nil {
			return err
		}
	}
	if err := run(); err != nil {
		return err
	}
	if after != nil {
		return after(what)
	}
	return nil
}

func (n *network) hook(before, after func(string) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.before, n.after = before, after
}

func (n *network) count(what string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked[what]
}

func (n *network) Reserve(ctx context.Context, r store.Reserve) (res store.Result, err error) {
	lost := n.ask("Reserve", func() error { res, err = n.Store.Reserve(ctx, r); return err })
	if lost != nil {
		return store.Result{}, lost
	}
	return res, nil
}

func (n *network) Update(ctx context.Context, w store.Write) (res store.Result, err error) {
	n.mu.Lock()
	see := n.update
	n.mu.Unlock()
	if see != nil {
		see(w)
	}
	lost := n.ask("Update", func() error { res, err = n.Store.Update(ctx, w); return err })
	if lost != nil {
		return store.Result{}, lost
	}
	return res, nil
}

func (n *network) Get(ctx context.Context, key string) (rec *store.Record, now time.Time, err error) {
	lost := n.ask("Get", func() error { rec, now, err = n.Store.Get(ctx, key); return err })
	if lost != nil {
		return nil, time.Time{}, lost
	}
	return rec, now, nil
}

func (n *network) List(ctx context.Context, l store.List) (page store.Page, err error) {
	lost := n.ask("List", func() error { page, err = n.Store.List(ctx, l); return err })
	if lost != nil {
		return store.Page{}, lost
	}
	return page, nil
}

func (n *network) Meter(ctx context.Context, meter string) (sum string, err error) {
	lost := n.ask("Meter", func() error { sum, err = n.Store.Meter(ctx, meter); return err })
	if lost != nil {
		return "", lost
	}
	return sum, nil
}

// story is one test's stage.
type story struct {
	t       *testing.T
	ctx     context.Context
	time    *storyTime
	bolt    *bolt.Store
	net     *network
	id      store.Identity
	opts    Options
	*Engine // the process that acts

	mu      sync.Mutex
	changes []Change
	later   []func()
	keys    map[Key]bool
}

// tell begins a story with one process.
func tell(t *testing.T) *story {
	t.Helper()
	s := &story{t: t, ctx: context.Background(), time: &storyTime{}, keys: map[Key]bool{}}
	st, err := bolt.Open(filepath.Join(memory(t), "records.db"), bolt.Options{NoSync: true, Clock: s.time.store})
	if err != nil {
		t.Fatal(err)
	}
	s.bolt = st
	s.net = &network{Store: st, asked: map[string]int{}}
	s.id, err = st.Initialise(s.ctx, store.Identity{Epoch: "epoch-1", KeyDomain: "domain-1"})
	if err != nil {
		t.Fatal(err)
	}
	s.opts = Options{
		Clock: s.time,
		Sleep: func(_ context.Context, d time.Duration) { s.time.pass(d) },
		Later: func(f func()) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.later = append(s.later, f)
		},
		Observe: func(c Change) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.changes = append(s.changes, c)
		},
	}
	s.Engine = s.process()
	t.Cleanup(s.end)
	return s
}

// memory is a directory in memory, where there is such a thing: these tests are not about the disk.
func memory(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "holdfast-guard")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// process starts another process on the same store.
func (s *story) process() *Engine { return New(s.net, s.id, s.opts) }

// restart kills the process and starts it anew.
func (s *story) restart() { s.Engine = s.process() }

// end looks at what the story has left.
func (s *story) end() {
	s.net.hook(nil, nil)
	if err := s.bolt.Check(s.ctx); err != nil {
		s.t.Errorf("the store's indexes: %v", err)
	}
	held, slots := map[string]int{}, map[string]int{}
	for k := range s.keys {
		r := s.record(k)
		if r == nil {
			continue
		}
		for _, entry := range r.slots(true) {
			slots[entry.Meter] += 0
			if r.State == InFlight {
				slots[entry.Meter]++
			}
		}
		if err := r.check(); err != nil {
			s.t.Errorf("record %s: %v", k.IntentID, err)
		}
		if r.State == Held && r.unsent() {
			held[r.Policy.Budget]++
		}
		held[r.Policy.Budget] += 0
	}
	for budget, want := range held {
		if got, err := s.HeldCount(s.ctx, budget); err != nil || got != want {
			s.t.Errorf("the meter of budget %s says that %d intents are held and were never sent, the records say %d (%v)", budget, got, want, err)
		}
	}
	for meter, want := range slots {
		if got, err := s.bolt.Meter(s.ctx, meter); err != nil || got != strconv.Itoa(want) {
			s.t.Errorf("the meter %s says that %s slots are taken, the records say %d (%v)", meter, got, want, err)
		}
	}
	if err := s.bolt.Close(); err != nil {
		s.t.Error(err)
	}
}

// record reads a record past the engine.
func (s *story) record(k Key) *record {
	s.t.Helper()
	sr, _, err := s.bolt.Get(s.ctx, k.String())
	if err != nil {
		s.t.Fatal(err)
	}
	r, err := decode(sr)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

func (s *story) state(c Call) State {
	s.t.Helper()
	if r := s.record(c.Key); r != nil {
		return r.State
	}
	return None
}

func (s *story) inState(c Call, want State) *record {
	s.t.Helper()
	if got := s.state(c); got != want {
		s.t.Fatalf("%s is %q, want %q", c.IntentID, got, want)
	}
	return s.record(c.Key)
}

func scopeOf(t testing.TB, paths ...string) intent.Scope {
	t.Helper()
	var ps []intent.Path
	for _, p := range paths {
		ps = append(ps, intent.Path(p))
	}
	sc, err := intent.NewScope(ps...)
	if err != nil {
		t.Fatal(err)
	}
	return sc
}

// call is a refund of 49.99 for what its scope says, without lineage. Everything that
// could make two calls meet by accident is its own.
func (s *story) call(id string, scope ...string) Call {
	s.t.Helper()
	return Call{
		Key:       Key{Namespace: "support", Tool: storyTool, Caller: storyCaller, IntentID: id},
		CallerUID: "uid-1", Scope: scopeOf(s.t, scope...),
		Amount: &intent.Money{Value: "49.99", Currency: "USD"}, Recipient: "c1",
		Fingerprint: storyFingerprint, IdentityHash: "identity-1",
	}
}

// on is the call with another lineage.
func (c Call) on(lineage string) Call { c.Lineage = intent.Path(lineage); return c }

// under is the same call under another intent ID.
func (c Call) under(id string) Call { c.IntentID = id; return c }

// with is the call, changed.
func (c Call) with(change func(*Call)) Call {
	if c.Amount != nil {
		m := *c.Amount
		c.Amount = &m
	}
	change(&c)
	return c
}

func storyPolicy() Policy {
	return Policy{Budget: "refunds", Window: storyWindow, TTL: storyTTL, Timeout: storyTimeout, SettleAfter: storySettle}
}

// admit asks what becomes of a call.
func (s *story) admit(c Call) Answer { s.t.Helper(); return s.admitUnder(c, storyPolicy()) }

func (s *story) admitUnder(c Call, p Policy) Answer {
	s.t.Helper()
	s.mu.Lock()
	s.keys[c.Key] = true
	s.mu.Unlock()
	a, err := s.Admit(s.ctx, c, p)
	if err != nil {
		s.t.Fatalf("admit %s: %v", c.IntentID, err)
	}
	if (a.Verdict == Allow) != (a.Ticket != nil) {
		s.t.Fatalf("admit %s: %s with ticket %v", c.IntentID, a.Verdict, a.Ticket)
	}
	return a
}

// send begins an attempt: it must be allowed.
func (s *story) send(c Call) *Ticket { s.t.Helper(); return s.sendUnder(c, storyPolicy()) }

func (s *story) sendUnder(c Call, p Policy) *Ticket {
	s.t.Helper()
	a := s.admitUnder(c, p)
	if a.Verdict != Allow {
		s.t.Fatalf("%s: %s %v, want ALLOW; %s", c.IntentID, a.Verdict, a.Reasons, s.tellMatches(a))
	}
	return a.Ticket
}

func (s *story) tellMatches(a Answer) string {
	return fmt.Sprintf("%d in the way: %+v", a.MatchCount, a.Matches)
}

// settle hands in a result.
func (s *story) settle(t *Ticket, res Result) Answer {
	s.t.Helper()
	a, err := s.Settle(s.ctx, t, res)
	if err != nil {
		s.t.Fatalf("settle %s (attempt %d, %s): %v", t.IntentID, t.Attempt, res.Outcome, err)
	}
	return a
}

// pay sends a call and has it succeed.
func (s *story) pay(c Call, reference string) {
	s.t.Helper()
	s.want(s.settle(s.send(c), paid(reference)), Allow, "")
}

// lose sends a call and has its outcome unknown.
func (s *story) lose(c Call) *Ticket {
	s.t.Helper()
	t := s.send(c)
	s.want(s.settle(t, lost()), UnknownHold, OutcomeUnknown)
	return t
}

// loseAndWait loses a call and lets the time pass until a person may release it.
func (s *story) loseAndWait(c Call) *Ticket {
	s.t.Helper()
	t := s.lose(c)
	s.pass(storyWait)
	s.sweep()
	if h := s.hold(c); h.State != HoldHeld {
		s.t.Fatalf("hold of %s is %s after its time", c.IntentID, h.State)
	}
	return t
}

func paid(reference string) Result {
	return Result{
		Outcome: AttemptSucceeded, ProviderReference: reference,
		Response: &Response{Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}}, Body: []byte(`{"id":"` + reference + `"}`)},
	}
}

func declined() Result {
	return Result{Outcome: AttemptFailed, Response: &Response{Status: 402, Body: []byte(`{"error":"declined"}`)}}
}

func lost() Result { return Result{Outcome: AttemptUnknown, Detail: "timeout after the first byte"} }

func accepted() Result { return Result{Outcome: AttemptPending, Response: &Response{Status: 202}} }

func unreachable() Result {
	return Result{Outcome: AttemptRetryable, Detail: "connection refused"}
}

func (s *story) pass(d time.Duration) { s.time.pass(d) }

func (s *story) sweep() {
	s.t.Helper()
	if err := s.Sweep(s.ctx); err != nil {
		s.t.Fatalf("sweep: %v", err)
	}
}

// runLater does what was put off until its caller was answered.
func (s *story) runLater() {
	s.mu.Lock()
	fs := s.later
	s.later = nil
	s.mu.Unlock()
	for _, f := range fs {
		f()
	}
}

func (s *story) want(a Answer, v Verdict, reason Reason) {
	s.t.Helper()
	if a.Verdict != v || a.Reason != reason {
		s.t.Fatalf("%s: %s %q %v, want %s %q; %s", a.Intent.IntentID, a.Verdict, a.Reason, a.Reasons, v, reason, s.tellMatches(a))
	}
}

// wantHeld: the call is held, for these reasons and no others.
func (s *story) wantHeld(a Answer, reasons ...Reason) {
	s.t.Helper()
	if a.Verdict != UnknownHold || !slices.Equal(a.Reasons, reasons) {
		s.t.Fatalf("%s: %s %q %v, want UNKNOWN_HOLD %v; %s", a.Intent.IntentID, a.Verdict, a.Reason, a.Reasons, reasons, s.tellMatches(a))
	}
	if a.Hold == "" || a.Intent.Hold == nil || a.Intent.Hold.Name != a.Hold {
		s.t.Fatalf("%s: UNKNOWN_HOLD names hold %q, its view says %+v", a.Intent.IntentID, a.Hold, a.Intent.Hold)
	}
}

// wantReplay: the call is answered with what was stored for that payment.
func (s *story) wantReplay(a Answer, id, reference string) {
	s.t.Helper()
	s.want(a, Replay, "")
	if a.Intent.IntentID != id || a.Response == nil || string(a.Response.Body) != `{"id":"`+reference+`"}` || a.Response.Status != 201 {
		s.t.Fatalf("replay of %s: %+v, want that of %s with %s", a.Intent.IntentID, a.Response, id, reference)
	}
}

// hold is the intent's newest hold.
func (s *story) hold(c Call) HoldView {
	s.t.Helper()
	r := s.record(c.Key)
	if r == nil || r.Current == nil {
		s.t.Fatalf("%s has no hold", c.IntentID)
	}
	v, err := s.Hold(s.ctx, HoldID{Key: c.Key, Number: r.Current.Number, Epoch: s.id.Epoch, Nonce: r.Current.Nonce})
	if err != nil {
		s.t.Fatal(err)
	}
	return v
}

func (s *story) resolve(h HoldView, d Decision) HoldView {
	s.t.Helper()
	return s.resolveWith(h, Resolution{Decision: d})
}

func (s *story) resolveWith(h HoldView, res Resolution) HoldView {
	s.t.Helper()
	res.HoldID = h.HoldID
	if res.By == "" {
		res.By = "alice"
	}
	if res.Reason == "" {
		res.Reason = "looked at the provider's ledger"
	}
	v, err := s.Resolve(s.ctx, res)
	if err != nil {
		s.t.Fatalf("%s of %s: %v", res.Decision, h.Name, err)
	}
	return v
}

// take resolves the intent's newest hold: it must be taken.
func (s *story) take(c Call, d Decision) HoldView {
	s.t.Helper()
	res := Resolution{Decision: d}
	if d == MarkPaid {
		res.ProviderReference = "by-hand"
	}
	v := s.resolveWith(s.hold(c), res)
	if v.State != HoldResolved || v.Decision != d {
		s.t.Fatalf("%s of %s: %s, %q", d, c.IntentID, v.State, v.Effect)
	}
	return v
}

// spent: the decision was not taken, and the hold stands anew with a cause.
func (s *story) spent(c Call, before, after HoldView) HoldView {
	s.t.Helper()
	if after.State != HoldVoid || after.Number != before.Number || after.Effect == "" {
		s.t.Fatalf("hold %d of %s is %s, %q; it should be spent", before.Number, c.IntentID, after.State, after.Effect)
	}
	anew := s.hold(c)
	if anew.Number != before.Number+1 || anew.Cause == "" || (anew.State != HoldHeld && anew.State != HoldWaiting) {
		s.t.Fatalf("hold of %s does not stand anew: %+v", c.IntentID, anew)
	}
	if !slices.Equal(anew.Reasons, before.Reasons) || anew.MatchCount != before.MatchCount {
		s.t.Fatalf("hold of %s forgot why: %v, was %v", c.IntentID, anew.Reasons, before.Reasons)
	}
	return anew
}

// heldIntents are the IDs of all that is held, from the store's list.
func (s *story) heldIntents() []string {
	s.t.Helper()
	var out []string
	cursor := ""
	for {
		page, next, err := s.Holds(s.ctx, cursor)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, v := range page {
			out = append(out, v.IntentID)
		}
		if cursor = next; cursor == "" {
			slices.Sort(out)
			return out
		}
	}
}

// unavailable: the store could not be asked, and the error says so.
func (s *story) unavailable(err error) {
	s.t.Helper()
	if !errors.Is(err, store.ErrUnavailable) {
		s.t.Fatalf("got %v, want that the store is unavailable", err)
	}
}

// drop loses what is named, the first n times.
func drop(what string, n int) func(string) error {
	var mu sync.Mutex
	return func(w string) error {
		mu.Lock()
		defer mu.Unlock()
		if w != what || n == 0 {
			return nil
		}
		n--
		return errStoryLost
	}
}

func dropAll(string) error { return errStoryLost }

func ids(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = prefix + strconv.Itoa(i+1)
	}
	return out
}
