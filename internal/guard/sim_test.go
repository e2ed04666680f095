// This file is a simulator of the whole life of payments: several processes with
// an engine each on one store, a network, a provider with a ledger, people who
// resolve holds, and everything that goes wrong with them. One seed decides all of
// it. The judge is the provider's ledger; what the guard says is checked against
// it and never the other way round.
//
// In some worlds the provider can be asked what became of a payment. Its answers lag
// behind its ledger, and for once they are stale: for less than a grace.
//
// In some worlds the store's clock jumps for a while, or the store loses its memory:
// wholly, or what came after some moment. Then an operator accepts that, and imports
// what the hold objects show.
//
// Every actor is a coroutine that gives way before and after each step on the
// store and on the network, so that any other actor, a crash or a pause may come
// between.

package guard

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// worldRule takes a rule out of the world around the engine.
type worldRule string

const (
	claimAfterSend    worldRule = "the call is sent before it is claimed"
	kernelDelivers    worldRule = "the kernel delivers after the deadline"
	pauseBeforeWrite  worldRule = "a pause between the look at the clock and the write"
	clockStands       worldRule = "the sender's clock stands still while it is paused"
	slowProvider      worldRule = "the provider pays later than settleAfter says"
	ackBeforeDurable  worldRule = "a success is answered before it is durable"
	anyNonceIsOwn     worldRule = "a lost reply is read back by the state alone"
	noCompareAndSet   worldRule = "a Reserve lands although the version moved"
	marksKeepStamps   worldRule = "marks keep their first stamp"
	probeThenWrite    worldRule = "probing and writing are two steps"
	freezeLate        worldRule = "a hold freezes the watermark of its own writing"
	lookEarly         worldRule = "a person's early decision is kept until the waiting is over"
	releasesAccepted  worldRule = "an accepted payment that is not visible is released"
	resolutionIgnored worldRule = "a resolution that cannot be taken is ignored"
	retriesUnknown    worldRule = "the gateway tries again by itself after an unknown outcome"
	retryUnreserved   worldRule = "the gateway's retry is not reserved"
	anyCredential     worldRule = "what was sent with one credential is sent again with another"
)

const (
	simTimeout     = 2 * time.Second
	simSettlement  = time.Second
	simMargin      = 500 * time.Millisecond
	simGrace       = 4 * time.Second
	simSettleAfter = 3 * time.Second
	simLease       = simTimeout + simSettlement + simMargin
	simFinal       = simLease + simGrace + simSettleAfter
)

// crash unwinds an actor whose process has died.
type crash struct{}

type actor struct {
	name    string
	p       *process
	next    func() (struct{}, bool)
	stop    func()
	yield   func(struct{}) bool
	ready   func() bool // nil: always
	refused uint64      // the judge's sequence at this actor's last refused Reserve
	lost    bool        // the last reply to this actor's Reserve was lost
}

type process struct {
	id     int
	engine *Engine
	paused time.Duration // until
	stood  time.Duration // how long its clock stood still
	wall   time.Duration // how far its wall clock is off
	actors []*actor
}

// message is a request on its way.
type message struct {
	in      *simIntent
	attempt int
	key     string // that the provider received
	// credential is the one with which it came.
	credential int
	rseq       uint64          // the judge's sequence of its Reserve
	out        time.Time       // the store's time of its Reserve
	covers     uint64          // releases of its intent had been shown everything up to here
	aged       map[string]bool // which others were settled longer ago than the window when it set out
	knew       map[string]bool // of which others it was on record that they were paid
	deadline   time.Duration
	final      time.Duration
	arrives    time.Duration // not before
	commitAt   time.Duration
	commits    bool
	done       bool // arrived or dropped
	answer     *Result
}

type simIntent struct {
	call    Call
	other   Call // the same ID, another amount
	ruling  Ruling
	wrong   int // how often a person released it although it was paid
	acked   string
	objects []*object
	said    Decision // the last that somebody said in the end
	found   bool     // a check has found that it was paid, and that was written
	// stale: until then look-ups miss what was paid. That happens once.
	stale time.Duration
}

type object struct {
	id         HoldID
	state      HoldState
	reasons    []Reason
	unknown    bool
	resolution *Resolution
}

type commit struct {
	in     *simIntent
	m      *message
	at     time.Duration
	number int
}

type world struct {
	seed     uint64
	rng      *rand.Rand
	rule     worldRule
	mutation mutation
	dir      string

	t      time.Duration
	skew   time.Duration
	back   time.Duration // how far the store's clock was ever put back
	jumps  bool          // the store's clock jumps in this world
	jump   time.Duration // how far it has jumped, which nobody has accepted or set right
	accept bool          // a jump was accepted: engines are told so when they notice
	loss   loss
	money  *simMoney // the limit of the budget; nil: there is none
	dedup  *simDedup // the provider deduplicates; nil: it does not
	rules  bool      // the tools have admission rules, and holds expire
	expire time.Duration
	// releaseFor is how long a release may stay unused; 0: longer than any history.
	releaseFor time.Duration
	quiet      bool       // nothing goes wrong any more
	limits     *rand.Rand // of the world's own limits, which come and go; nil: there are none
	// local: tools run inside their agents (see sim_local_test.go); claims counts tokens.
	local  *rand.Rand
	claims int
	fences map[*Ticket]Fence
	window time.Duration
	short  bool // window and TTL end within the history
	stalls int  // how often an actor stalls, in percent
	tries  int  // how many attempts an intent has, by a retry budget; 0: there is none
	ending bool // nothing is slow any more either
	errs   bool // people make mistakes
	checks bool // the provider can be asked
	// registration is nil in a world in which nobody registers.
	registration *simRegistration
	// unbounded: what was accepted may be paid at any time, and the tool says so.
	unbounded bool
	bolt      *bolt.Store
	id        store.Identity
	procs     []*process
	ins       []*simIntent
	byKey     map[string]*simIntent
	net       []*message
	ledger    []commit
	late      []func() // writes given up for lost that land later
	nonces    int
	opens     int // how many files the store has had

	current  *actor
	engineOf map[*Ticket]*Engine

	// What the judge knows of the order of things.
	seq     uint64
	changed map[string]uint64            // when a record last changed
	at      map[string]time.Duration     // the same by the clock
	seen    map[string]map[string]bool   // what was on record of its payment
	known   map[string]bool              // that it was paid, or accepted, is on the record
	knew    map[string]map[string]bool   // at its last step into flight
	aged    map[string]map[string]bool   //
	denied  map[string]bool              // a person marked it as failed although it was paid
	state   map[string]State             //
	frozen  map[string]map[int]uint64    // what each hold had been shown
	covers  map[string]uint64            // what taken releases had been shown
	rseq    map[string]map[int][2]uint64 // of each attempt: its Reserve's sequence, and what was covered then
	out     map[string]time.Time         // the store's time of the last Reserve
	begun   map[string]int               // attempts since the last release
	made    map[string]bool              // nonces of writes that were made: a repeated one changes nothing
	marks   map[string][]store.Mark      // what each record has left

	tracing   bool
	trace     []string
	violation string
}

// loss is what becomes of a world whose store loses its memory.
type loss struct {
	loses    bool
	copied   []byte // the store's file at an earlier moment; nil: all is lost
	at       time.Duration
	seq      uint64 // the judge's sequence at the loss, 0: nothing was lost yet
	lostAt   time.Time
	forget   bool
	accepted bool // the operator is importing, or has
	served   bool
	imported map[string]bool
}

var simStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func (w *world) logf(format string, args ...any) {
	if w.tracing {
		w.trace = append(w.trace, fmt.Sprintf("%9.3fs ", w.t.Seconds())+fmt.Sprintf(format, args...))
	}
}

func (w *world) violate(format string, args ...any) {
	if w.violation == "" {
		w.violation = fmt.Sprintf(format, args...)
		w.logf("VIOLATION %s", w.violation)
	}
}

// bug: an error that a mistake in the engine makes, and nothing else.
func (w *world) bug(err error) {
	for _, expected := range []error{store.ErrUnavailable, store.ErrMemoryLost, ErrContended, ErrClockJumped} {
		if errors.Is(err, expected) {
			return
		}
	}
	if errors.Is(err, ErrNoClaim) && w.loss.seq > 0 {
		return // the claim was lost with the memory
	}
	if err != nil && w.mutation == none && w.rule == "" {
		w.violate("%v", err)
	}
}

func (w *world) chance(percent int) bool { return !w.quiet && w.rng.IntN(100) < percent }

func (w *world) storeNow() time.Time { return simStart.Add(w.t + w.skew) }

// simClock is a process's own clock.
type simClock struct {
	w *world
	p *process
}

func (c simClock) Now() Reading {
	return Reading{Boot: c.w.t - c.p.stood, Wall: simStart.Add(c.w.t + c.p.wall - c.p.stood)}
}

// giveWay lets others act; it does not return if the process dies meanwhile.
func (w *world) giveWay(ready func() bool) {
	a := w.current
	if a == nil {
		return
	}
	a.ready = ready
	if !a.yield(struct{}{}) {
		panic(crash{})
	}
	a.ready = nil
}

// stall gives way, at times for longer than any lease.
func (w *world) stall() {
	if w.ending || w.rng.IntN(100) >= w.stalls {
		w.giveWay(nil)
		return
	}
	longest := []time.Duration{2 * simLease, 3 * time.Minute}[w.rng.IntN(2)]
	until := w.t + time.Duration(w.rng.Int64N(int64(longest)))
	w.logf("%s stalls until %.3fs", w.current.name, until.Seconds())
	w.giveWay(func() bool { return w.t >= until })
}

func (w *world) start(p *process, name string, run func()) {
	a := &actor{name: name, p: p}
	seq := func(yield func(struct{}) bool) {
		a.yield = yield
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(crash); !ok {
					panic(r)
				}
			}
		}()
		if !yield(struct{}{}) {
			return
		}
		run()
	}
	a.next, a.stop = iter.Pull(iter.Seq[struct{}](seq))
	p.actors = append(p.actors, a)
	w.resume(a) // up to its first giving way
}

func (w *world) resume(a *actor) {
	before := w.current
	w.current = a
	_, ok := a.next()
	w.current = before
	if !ok {
		a.stop()
		for i, b := range a.p.actors {
			if b == a {
				a.p.actors = append(a.p.actors[:i:i], a.p.actors[i+1:]...)
				break
			}
		}
	}
}

func (w *world) boot(p *process) {
	for _, a := range p.actors {
		a.stop()
	}
	p.actors, p.paused = nil, 0
	if w.loss.seq == 0 || w.loss.served {
		p.engine = w.newEngine(p)
	} else if w.loss.accepted && p == w.procs[0] {
		w.start(p, "operator", func() { w.importAll(p) })
	}
}

// newEngine is one of the present memory.
func (w *world) newEngine(p *process) *Engine {
	return New(&simStore{w: w, epoch: w.id.Epoch}, w.id, Options{
		LostAt: w.loss.lostAt, ForgetLost: w.loss.forget, StoreClock: w.storeNow().Add(-w.jump),
		Clock: simClock{w, p}, Settlement: simSettlement, Margin: simMargin, Grace: simGrace,
		Backoff: time.Second, Repeat: 1500 * time.Millisecond, ReleaseFor: w.releaseFor,
		Random: func(most time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(most) + 1)) },
		Sleep: func(_ context.Context, d time.Duration) {
			until := w.t + d
			w.giveWay(func() bool { return w.t >= until })
		},
		Await: func(_ context.Context, done <-chan struct{}) {
			w.giveWay(func() bool {
				select {
				case <-done:
					return true
				default:
					return false
				}
			})
		},
		Later:    func(f func()) { w.start(p, "later", f) },
		Nonce:    func() string { w.nonces++; return fmt.Sprintf("n%d", w.nonces) },
		mutation: w.mutation,
	})
}

// simStore is the store as one process sees it: replies get lost, and so do requests.
// Whoever opened it before it lost its memory is told so, always.
type simStore struct {
	w     *world
	epoch string
}

var (
	errLost   = fmt.Errorf("%w: simulated", store.ErrUnavailable)
	errForgot = fmt.Errorf("%w: simulated", store.ErrMemoryLost)
)

func (s *simStore) do(what string, run func()) error {
	w := s.w
	w.giveWay(nil)
	if s.epoch != w.id.Epoch {
		return errForgot
	}
	switch {
	case w.chance(2):
		w.logf("%s: %s: the request is lost", w.current.name, what)
		return errLost
	case w.chance(2):
		w.logf("%s: %s: the request is slow, given up for lost", w.current.name, what)
		w.late = append(w.late, run)
		return errLost
	case w.chance(3):
		run()
		w.logf("%s: %s: the reply is lost", w.current.name, what)
		w.giveWay(nil)
		return errLost
	}
	run()
	w.giveWay(nil)
	if s.epoch != w.id.Epoch {
		return errForgot // while the reply was on its way: it is lost with the memory
	}
	return nil
}

func (s *simStore) Standing(ctx context.Context) (store.Standing, error) {
	return s.w.bolt.Standing(ctx)
}
func (s *simStore) Disown(ctx context.Context, epoch, next string) error {
	return s.w.bolt.Disown(ctx, epoch, next)
}
func (s *simStore) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	return s.w.bolt.Initialise(ctx, id)
}
func (s *simStore) Close() error { return nil }
func (s *simStore) Meter(ctx context.Context, m string) (string, error) {
	return s.w.bolt.Meter(ctx, m)
}

func (s *simStore) Get(ctx context.Context, key string) (r *store.Record, now time.Time, err error) {
	lost := s.do("Get", func() { r, now, err = s.w.bolt.Get(ctx, key) })
	if lost != nil {
		return nil, time.Time{}, lost
	}
	return r, now, err
}

func (s *simStore) List(ctx context.Context, l store.List) (page store.Page, err error) {
	lost := s.do("List", func() { page, err = s.w.bolt.List(ctx, l) })
	if lost != nil {
		return store.Page{}, lost
	}
	return page, err
}

func (s *simStore) Reserve(ctx context.Context, r store.Reserve) (res store.Result, err error) {
	w := s.w
	a := w.current
	run := func() {
		if w.rule == noCompareAndSet && r.Expected != 0 {
			if cur, _, _ := w.bolt.Get(ctx, r.Key); cur != nil {
				r.Expected = cur.Version
			}
		}
		if w.rule == probeThenWrite {
			if res, err = w.bolt.Reserve(ctx, r); err == nil && res.Outcome == store.Blocked {
				w.judgeReserve(a, r, res)
				return
			}
		} else {
			res, err = w.bolt.Reserve(ctx, r)
		}
		w.judgeReserve(a, r, res)
	}
	if w.rule == probeThenWrite {
		// The probes are asked first, and the write comes later without them.
		probe := r
		probe.Key, probe.Expected, probe.Nonce = "probe", 1, "probe"
		blocked := false
		if err := s.do("probe", func() { blocked = w.wouldBlock(ctx, r) }); err != nil {
			return store.Result{}, err
		}
		if !blocked {
			r.Probes = nil
		}
	}
	wasLost := a != nil && a.lost
	lost := s.do("Reserve", run)
	if a != nil {
		a.lost = lost != nil
	}
	if lost != nil {
		return store.Result{}, lost
	}
	if w.rule == anyNonceIsOwn && wasLost && err == nil && res.Outcome == store.Mismatch && res.Record != nil {
		if h, _ := decodeHeader(res.Record); h.State == InFlight {
			res.Outcome, res.Version = store.Written, res.Record.Version
		}
	}
	return res, err
}

// wouldBlock asks the probes alone.
func (w *world) wouldBlock(ctx context.Context, r store.Reserve) bool {
	r.Write.Nonce = "probe-" + r.Write.Nonce
	cur, _, _ := w.bolt.Get(ctx, r.Key)
	if cur != nil {
		r.Expected = cur.Version
	} else {
		r.Expected = 0
	}
	// A limit that is over already refuses the write after the probes have passed.
	r.Meters = []store.MeterEntry{{Meter: "never", Amount: "1", Limit: "0"}}
	res, err := w.bolt.Reserve(ctx, r)
	return err == nil && res.Outcome == store.Blocked
}

func (s *simStore) Update(ctx context.Context, u store.Write) (res store.Result, err error) {
	w := s.w
	a := w.current
	refused := uint64(0)
	if a != nil {
		refused = a.refused
	}
	run := func() {
		asked := u
		if w.rule == marksKeepStamps && w.standsAlready(u) {
			asked.KeepMarks, asked.Marks, asked.RenewMarks, asked.Until = true, nil, false, time.Time{}
		}
		if w.rule == freezeLate {
			refused = w.refreeze(ctx, &asked, refused)
		}
		res, err = w.bolt.Update(ctx, asked)
		if err == nil && res.Outcome == store.Written {
			w.judgeUpdate(u, refused)
		}
	}
	if lost := s.do("Update", run); lost != nil {
		return store.Result{}, lost
	}
	return res, err
}

// standsAlready: the record has marks of an earlier state.
func (w *world) standsAlready(u store.Write) bool {
	s := w.state[u.Key]
	return (len(u.Marks) > 0 || u.RenewMarks) && (s == InFlight || s == Held)
}

// refreeze puts the watermark of this very moment into a new hold.
func (w *world) refreeze(ctx context.Context, u *store.Write, refused uint64) uint64 {
	if u.Record == nil || !u.Record.Held {
		return refused
	}
	var b body
	if unpack(u.Record.Body, &b, (*body).fields) != nil || b.Current == nil || b.Current.Watermark == "" {
		return refused
	}
	probe := store.Reserve{
		Write:  store.Write{Epoch: u.Epoch, Key: "watermark", Nonce: "watermark", Record: &store.Record{Header: []byte("{}"), Body: []byte("{}")}},
		Probes: []store.Probe{{String: "a mark of somebody else"}},
	}
	_, _ = w.bolt.Update(ctx, store.Write{Epoch: u.Epoch, Key: fmt.Sprint("other", w.seq), Nonce: "other", Record: probe.Record, Marks: []store.Mark{{String: "a mark of somebody else"}}})
	if res, err := w.bolt.Reserve(ctx, probe); err == nil && res.Outcome == store.Blocked {
		b.Current.Watermark = res.Watermark
		rec := *u.Record
		rec.Body = b.pack()
		u.Record = &rec
	}
	return refused
}

// judgeReserve notes the order of steps into flight, and what refused ones saw.
func (w *world) judgeReserve(a *actor, r store.Reserve, res store.Result) {
	w.seq++
	w.judgeSlots(r, res)
	switch res.Outcome {
	case store.Blocked:
		if a != nil {
			a.refused = w.seq
		}
		w.logf("judge: Reserve of %s refused, %d in the way", w.name(r.Key), res.HitCount)
	case store.Written:
		if w.made[r.Nonce] {
			return
		}
		w.made[r.Nonce], w.marks[r.Key] = true, r.Marks
		var h header
		var b body
		if unpack(r.Record.Header, &h, (*header).fields) != nil || unpack(r.Record.Body, &b, (*body).fields) != nil {
			w.violate("unreadable record")
			return
		}
		if w.judgeRegistered(r.Key, &h, &b) {
			return
		}
		n := len(b.Attempts)
		if w.rseq[r.Key] == nil {
			w.rseq[r.Key] = map[int][2]uint64{}
		}
		w.rseq[r.Key][n] = [2]uint64{w.seq, w.covers[r.Key]}
		w.out[r.Key] = w.storeNow()
		// Where another rule is out, its loss must show in the ledger.
		judged := w.rule == "" && (w.mutation == none || w.mutation == noBudget)
		if w.begun[r.Key]++; judged && w.begun[r.Key] > w.attempts() && w.loss.seq == 0 {
			w.violate("%s has had %d attempts, and its budget is %d", w.name(r.Key), w.begun[r.Key], w.attempts())
		}
		w.state[r.Key], w.changed[r.Key], w.at[r.Key] = InFlight, w.seq, w.t
		w.aged[r.Key], w.knew[r.Key] = w.agedNow(), maps.Clone(w.known)
		w.logf("judge: %s is InFlight(%d)", w.name(r.Key), n)
	}
}

// judgeSlots compares the meters with what is in flight, at every step.
func (w *world) judgeSlots(r store.Reserve, res store.Result) {
	if w.limits == nil || res.Outcome != store.Written || w.made[r.Nonce] || w.mutation == slotsStay {
		return
	}
	for meter, want := range w.slots() {
		sum, err := w.bolt.Meter(context.Background(), meter)
		if err != nil || sum != fmt.Sprint(want) {
			w.violate("the meter %s says that %s slots are taken, and %d are (%v)", meter, sum, want, err)
		}
	}
	for _, m := range r.Meters {
		if n := w.slots()[m.Meter]; m.Limit != "" && fmt.Sprint(n) > m.Limit { // both have one digit
			w.violate("%d slots of %s are taken, and the limit is %s", n, m.Meter, m.Limit)
		}
	}
}

// slots counts what is in flight, by the records alone.
func (w *world) slots() map[string]int {
	out := map[string]int{}
	for key := range w.byKey {
		sr, _, err := w.bolt.Get(context.Background(), key)
		if err != nil {
			w.violate("the store cannot be read: %v", err)
			return nil
		}
		r, err := decode(sr)
		if err != nil || r == nil {
			continue
		}
		for _, entry := range r.slots(true) {
			out[entry.Meter] += 0
			if r.State == InFlight {
				out[entry.Meter]++
			}
		}
	}
	return out
}

// judgeMarks: marks that are renewed are what would have been given.
func (w *world) judgeMarks(u store.Write) {
	switch {
	case u.KeepMarks:
	case !u.RenewMarks:
		w.marks[u.Key] = u.Marks
	default:
		sr := *u.Record
		sr.Key = u.Key
		r, err := decode(&sr)
		if err != nil {
			w.violate("unreadable record: %v", err)
			return
		}
		marks := map[[2]string]bool{}
		for _, m := range w.marks[u.Key] {
			marks[[2]string{m.String, m.Tag}] = true
		}
		given := r.marks(u.Until.Add(-r.Policy.Window))
		for _, m := range given {
			if until := m.Until; !marks[[2]string{m.String, m.Tag}] || !until.Equal(u.Until) {
				w.violate("%s renews its marks until %s, and would have given another: %+v", w.name(u.Key), u.Until, m)
			}
		}
		if len(given) != len(w.marks[u.Key]) {
			w.violate("%s renews %d marks, and would have given %d", w.name(u.Key), len(w.marks[u.Key]), len(given))
		}
	}
}

func (w *world) judgeUpdate(u store.Write, refused uint64) {
	if isRate(u.Key) {
		return
	}
	if w.made[u.Nonce] {
		return
	}
	w.made[u.Nonce] = true
	w.seq++
	var h header
	var b body
	if u.Record == nil || unpack(u.Record.Header, &h, (*header).fields) != nil || unpack(u.Record.Body, &b, (*body).fields) != nil {
		return
	}
	was := w.state[u.Key]
	w.state[u.Key] = h.State
	w.judgeMarks(u)
	if !u.KeepMarks {
		w.changed[u.Key], w.at[u.Key] = w.seq, w.t
	}
	w.learns(u.Key, &b, h.State == Failed && was == Held)
	if h.State == Tombstone || h.State == Held && b.Current.has(KeyExpired) {
		w.byKey[u.Key].acked = "" // the answer is gone; that it was paid is not
	}
	w.logf("judge: %s is %s(hold %d)", w.name(u.Key), h.State, h.Hold)
	for _, a := range b.Attempts {
		if h.State == Held && a.Outcome == AttemptSucceeded && a.Generation == b.Generation && !b.Current.has(KeyExpired) {
			w.violate("%s is held although a success is on its record", w.name(u.Key))
		}
	}
	f := w.frozen[u.Key]
	if f == nil {
		f = map[int]uint64{}
		w.frozen[u.Key] = f
	}
	switch h.State {
	case Held:
		if _, known := f[h.Hold]; known {
			return
		}
		switch {
		case strings.HasPrefix(b.Current.Cause, causeLost) && was == None:
			f[h.Hold] = max(refused, w.loss.seq)
		case strings.HasPrefix(b.Current.Cause, causeLost):
			f[h.Hold] = w.loss.seq // it says that anything may have been paid before
		case was == Held:
			f[h.Hold] = f[h.Hold-1] // spent: it shows what it had shown
		case h.Lineage == "" && w.byKey[u.Key].call.Lineage != "":
			f[h.Hold] = 0 // it was registered without, so nobody was shown what that meets
		case was != InFlight && (b.Current.has(ScopeOverlap) || b.Current.has(LineageOverlap) || b.Current.has(ExactMatch)):
			f[h.Hold] = refused
		default:
			f[h.Hold] = 0
		}
	case Released:
		w.begun[u.Key] = 0
		if was == Held {
			w.covers[u.Key] = max(w.covers[u.Key], f[h.Hold])
		}
	}
}

// agedNow are the intents that were settled longer ago than the window, give or take
// the store's clock.
func (w *world) agedNow() map[string]bool {
	out := map[string]bool{}
	for key, at := range w.at {
		out[key] = w.short && w.state[key].Settled() && w.t-at > w.window-10*time.Second
	}
	return out
}

// learns notes what is on record of a payment. A person who marks it as failed has
// seen what was there by then; only what comes after contradicts that.
func (w *world) learns(key string, b *body, denied bool) {
	seen := w.seen[key]
	if seen == nil {
		seen = map[string]bool{}
		w.seen[key] = seen
	}
	for _, a := range b.Attempts {
		if a.Outcome != AttemptSucceeded && !a.Accepted {
			continue
		}
		if news := fmt.Sprint(a.Number, a.Outcome, a.Accepted); !seen[news] {
			seen[news] = true
			w.known[key] = true
		}
	}
	if denied {
		w.known[key] = false
	}
}

func (w *world) name(key string) string {
	if in := w.byKey[key]; in != nil {
		return in.call.IntentID
	}
	return key
}

// overlap says that two intents are for the same thing.
func overlap(a, b *simIntent) bool {
	return intent.Relate(a.call.Scope, a.call.Lineage, b.call.Scope, b.call.Lineage) != intent.OverlapNone
}

// pay is the provider moving money. Here every rule is judged.
func (w *world) pay(m *message) {
	c := commit{in: m.in, m: m, at: w.t, number: len(w.ledger) + 1}
	w.logf("PROVIDER PAYS %s(attempt %d) as payment %d", m.in.call.IntentID, m.attempt, c.number)
	for _, o := range w.ledger {
		if w.forgiven(o.m, m) {
			continue
		}
		if o.in == m.in {
			if m.in.wrong == 0 {
				w.violate("%s was paid twice", m.in.call.IntentID)
			}
			continue
		}
		if !overlap(o.in, m.in) {
			continue
		}
		earlier, later := o, c
		if later.m.rseq < earlier.m.rseq {
			earlier, later = later, earlier
		}
		key := earlier.in.call.Key.String()
		if w.denied[key] && !later.m.knew[key] {
			continue // a person said that nothing had moved, and nobody knew better
		}
		if later.m.aged[key] {
			continue // it was settled long ago when the later one set out
		}
		// The later one must have been released by somebody who was shown the
		// earlier one as it was when the later one set out.
		if at := w.changedBefore(earlier.in, later.m.rseq); later.m.covers < at {
			w.violate("%s and %s are for the same thing and both were paid; nobody allowed the second",
				earlier.in.call.IntentID, later.in.call.IntentID)
		}
	}
	w.ledger = append(w.ledger, c)
	w.judgeSpend(c)
	w.judgeRules(c)
}

// forgiven says that one of two payments was forgotten by the store, and that whoever
// accepted it has said that the other need not fear it: at once, or once the window was
// over. What a hold's object had shown is never forgotten.
func (w *world) forgiven(a, b *message) bool {
	earlier, later := a, b
	if later.rseq < earlier.rseq {
		earlier, later = later, earlier
	}
	if w.loss.seq == 0 || earlier.rseq > w.loss.seq || later.rseq <= w.loss.seq {
		return false
	}
	return !w.loss.imported[earlier.in.call.Key.String()] &&
		(w.loss.forget || !later.out.Before(w.loss.lostAt.Add(w.window-5*time.Second)))
}

// changedBefore is when the intent had last changed at that moment. The judge keeps
// only the last change; one that came after the step does not count against it.
func (w *world) changedBefore(in *simIntent, rseq uint64) uint64 {
	at := w.changed[in.call.Key.String()]
	if at > rseq {
		// It changed since (it settled, say); its own step into flight came before.
		at = 0
		for _, r := range w.rseq[in.call.Key.String()] {
			if r[0] < rseq {
				at = max(at, r[0])
			}
		}
	}
	return at
}

// transfer moves the network and the provider on to the present.
func (w *world) transfer() {
	for _, m := range w.net {
		if m.commits && m.commitAt <= w.t {
			m.commits = false
			w.processed(m)
		}
		if !m.done && w.t > m.deadline && w.rule != kernelDelivers && w.rule != pauseBeforeWrite {
			m.done = true // the connection was closed with linger 0
			w.logf("the network drops %s(attempt %d)", m.in.call.IntentID, m.attempt)
		}
	}
}

// deliver hands a request to the provider, which does as it pleases.
func (w *world) deliver(m *message) {
	m.done = true
	w.dedup.arrivesAt(m, w.t)
	latest := m.final
	if w.rule == slowProvider {
		latest += 4 * time.Minute
	}
	if w.rule == kernelDelivers || w.rule == pauseBeforeWrite {
		latest = max(latest, w.t)
	}
	soonish := func() time.Duration {
		if w.rng.IntN(2) == 0 || latest <= w.t {
			return w.t
		}
		if w.rng.IntN(3) == 0 {
			return latest
		}
		return w.t + time.Duration(w.rng.Int64N(int64(latest-w.t)+1))
	}
	kind := w.rng.IntN(9)
	if w.quiet {
		kind = []int{0, 0, 0, 3, 5, 6, 7}[w.rng.IntN(7)]
	}
	if w.ending {
		kind = 0
	}
	w.logf("%s(attempt %d) arrives at the provider, which does %d", m.in.call.IntentID, m.attempt, kind)
	switch kind {
	case 0, 1, 2: // pays and says so
		m.commits, m.commitAt = true, w.t
		if w.rng.IntN(2) == 0 {
			m.commitAt = min(w.t+time.Duration(w.rng.Int64N(int64(simTimeout))), max(m.deadline, w.t))
		}
		m.answer = &Result{Outcome: AttemptSucceeded}
	case 3: // pays, perhaps later, and answers 500
		m.commits, m.commitAt = true, soonish()
		m.answer = &Result{Outcome: AttemptUnknown, Detail: "500"}
	case 4: // pays, perhaps later, and says nothing
		m.commits, m.commitAt = true, soonish()
	case 5: // declines
		m.answer = &Result{Outcome: AttemptFailed, Response: &Response{Status: 402}}
	case 6: // too many requests
		m.answer = &Result{Outcome: AttemptRetryable, Response: &Response{Status: 429}}
	case 7: // accepts, and pays at any time or never
		m.answer = &Result{Outcome: AttemptPending, Response: &Response{Status: 202}}
		if w.accepts(m) && w.rng.IntN(2) == 0 {
			m.commits, m.commitAt = true, soonish()
			if w.unbounded {
				m.commitAt = w.t + time.Duration(w.rng.Int64N(int64(9*time.Minute)))
			}
		}
	case 8: // says nothing, does nothing
	}
}

func (w *world) tellsSuccess(in *simIntent, a Answer, who string) {
	if a.Response == nil || a.Response.Status != 200 {
		return
	}
	about := w.byKey[a.Intent.Key.String()]
	got := string(a.Response.Body)
	w.logf("%s is told %s %s for %s", who, a.Verdict, got, about.call.IntentID)
	if strings.HasPrefix(got, "payment-") {
		found := false
		for _, c := range w.ledger {
			if c.in == about && fmt.Sprintf("payment-%d", c.number) == got {
				found = true
			}
		}
		if !found {
			w.violate("%s was told that %s was paid as %s, which the ledger does not know", in.call.IntentID, about.call.IntentID, got)
		}
	}
	if about.acked != "" && about.acked != got {
		w.violate("%s was acknowledged as %s and now as %s", about.call.IntentID, about.acked, got)
	}
	about.acked = got
}

// call is an agent's call through one process.
func (w *world) call(p *process, in *simIntent, c Call) {
	ctx := context.Background()
	pol := w.ruled(w.limited(w.policy(), in), in)
	c = w.keeps(c)
	who := fmt.Sprintf("p%d call %s", p.id, c.IntentID)
	if w.rule == claimAfterSend {
		m := w.send(p, in, 1, nil)
		w.giveWay(nil)
		a, err := p.engine.Admit(ctx, c, pol)
		if err == nil && a.Ticket != nil {
			w.engineOf[a.Ticket] = p.engine
			w.await(p, a.Ticket, m, who, in)
		}
		return
	}
	engine := p.engine
	for {
		startT := w.t
		var a Answer
		var err error
		if w.local != nil {
			a, err = w.claim(p, engine, c, pol)
		} else {
			a, err = engine.Admit(ctx, c, pol)
		}
		if err != nil {
			w.logf("%s: %v", who, err)
			w.bug(err)
			return
		}
		w.logf("%s: %s %s %s", who, a.Verdict, a.Reason, a.Hold)
		w.tellsSuccess(in, a, who)
		t := a.Ticket
		if a.Reason == ReasonNotRegistered {
			w.register(p, in) // its next call finds it so
		}
		if t == nil {
			return
		}
		w.engineOf[t] = engine
		if startT+simFinal < w.t {
			w.logf("%s: very late", who)
		}
		w.stall()
		a = w.attempt(p, in, t, who)
		if w.tries == 0 || !a.Again || engine != p.engine {
			return
		}
		until := w.t + a.RetryAfter
		w.giveWay(func() bool { return w.t >= until })
		if w.rule == retryUnreserved {
			w.attempt(p, in, t, who)
			return
		}
	}
}

// attempt uses a ticket.
func (w *world) attempt(p *process, in *simIntent, t *Ticket, who string) Answer {
	if _, handedOver := w.fences[t]; handedOver { // and is not one that a gateway resumes
		t = w.renew(p, t, who)
	}
	switch {
	case w.chance(8):
		a, _ := w.finish(p, t, Result{Outcome: AttemptRetryable, Detail: "refused to connect"}, who, in)
		return a
	case !t.InTime():
		a, _ := w.finish(p, t, Result{Outcome: AttemptRetryable, Detail: "the deadline was over"}, who, in)
		return a
	}
	if w.rule == pauseBeforeWrite {
		w.giveWay(nil)
	}
	m := w.send(p, in, t.Attempt, t)
	return w.await(p, t, m, who, in)
}

func (w *world) send(p *process, in *simIntent, n int, t *Ticket) *message {
	m := &message{in: in, attempt: n, deadline: w.t + simTimeout, final: w.t + simFinal}
	if t != nil {
		if !t.lenient { // else nobody tells the kernel either
			m.deadline = w.t + t.deadline.Boot - t.clock.Now().Boot
		}
		m.key = t.ProviderKey
		if w.dedup != nil {
			m.credential = w.dedup.credential
		}
		w.judgeSent(t)
		m.final = m.deadline + simMargin + simGrace + simSettleAfter
		r := w.rseq[in.call.Key.String()][n]
		m.rseq, m.covers, m.out = r[0], r[1], w.out[in.call.Key.String()]
		m.aged, m.knew = w.aged[in.call.Key.String()], w.knew[in.call.Key.String()]
	}
	m.arrives = w.t
	if w.rng.IntN(3) == 0 {
		// A slow network: most of these are dropped at the deadline.
		m.arrives += time.Duration(w.rng.Int64N(int64(5 * time.Minute)))
	}
	w.net = append(w.net, m)
	w.logf("p%d sends %s(attempt %d)", p.id, in.call.IntentID, n)
	return m
}

func (w *world) await(p *process, t *Ticket, m *message, who string, in *simIntent) Answer {
	until := w.t + simTimeout
	w.giveWay(func() bool { return m.answer != nil && !m.commits || w.t >= until || !t.InTime() })
	res := Result{Outcome: AttemptUnknown, Detail: "no answer"}
	if m.answer != nil && (!m.commits || m.answer.Outcome != AttemptSucceeded) && !w.chance(15) {
		res = *m.answer
	}
	if w.rule == ackBeforeDurable && res.Outcome == AttemptSucceeded {
		w.tellsSuccess(in, Answer{Verdict: Allow, Response: res.Response, Intent: View{Key: t.Key}}, who)
		w.giveWay(nil)
	}
	if w.rule == retriesUnknown && res.Outcome == AttemptUnknown && t.InTime() {
		w.send(p, in, t.Attempt, t)
	}
	a, written := w.finish(p, t, res, who, in)
	if written && res.Outcome == AttemptPending && m.commits && (!w.checks || w.unbounded) {
		// What is known to be accepted may take longer than settleAfter.
		m.commitAt = w.t + time.Duration(w.rng.Int64N(int64(9*time.Minute)))
	}
	return a
}

func (w *world) finish(p *process, t *Ticket, res Result, who string, in *simIntent) (a Answer, written bool) {
	w.stall()
	a, err := w.settleFor(t, res)
	if err != nil {
		w.logf("%s: settle %s: %v", who, res.Outcome, err)
		w.bug(err)
		return Answer{}, false
	}
	w.logf("%s: settles %s: %s %s %s", who, res.Outcome, a.Verdict, a.Reason, a.Hold)
	w.tellsSuccess(in, a, who)
	return a, a.Hold != "" || a.Verdict != UnknownHold
}

// check does what the sweep has found: it sends again, and asks the provider.
func (w *world) check(p *process) {
	w.sendAgain(p)
	engine := p.engine
	for _, k := range engine.DueChecks() {
		c, err := engine.BeginCheck(context.Background(), k)
		w.bug(err)
		if err != nil || c == nil {
			continue
		}
		w.stall()
		res := w.lookUp(c)
		w.logf("p%d asks about %s(attempt %d): %s", p.id, k.IntentID, c.Attempt, res.Outcome)
		w.stall()
		err = engine.EndCheck(context.Background(), c, res)
		w.bug(err)
		if err == nil && res.Outcome == AttemptSucceeded {
			w.byKey[k.String()].found = true
		}
	}
}

// lookUp is the provider's answer about a key. It never denies what has been visible,
// but for one short time.
func (w *world) lookUp(c *Check) CheckResult {
	in := w.byKey[c.Key.String()]
	if w.chance(15) {
		return CheckResult{Outcome: AttemptUnknown, Status: 500}
	}
	for _, paid := range w.ledger {
		if paid.m.key != c.ProviderKey || w.t < paid.m.final && w.rng.IntN(4) > 0 {
			continue
		}
		if in.stale == 0 && !w.ending && w.t >= paid.m.final && w.rng.IntN(2) == 0 {
			in.stale = w.t + time.Duration(w.rng.Int64N(int64(simGrace)))
		}
		if w.t < in.stale {
			break
		}
		id := fmt.Sprintf("payment-%d", paid.number)
		return CheckResult{Outcome: AttemptSucceeded, ProviderReference: id, Response: &Response{Status: 200, Body: []byte(id)}}
	}
	if w.working(in) && w.rng.IntN(2) == 0 {
		return CheckResult{Outcome: AttemptPending}
	}
	return CheckResult{Outcome: AttemptFailed}
}

// sync is the controller's look at the holds: objects are made and their state shown.
func (w *world) sync(p *process) {
	cursor := ""
	for {
		views, next, err := p.engine.Holds(context.Background(), cursor)
		if err != nil {
			return
		}
		for _, v := range views {
			in := w.byKey[v.Key.String()]
			var o *object
			for _, x := range in.objects {
				if x.id == v.Hold.HoldID {
					o = x
				} else if x.id.Epoch == v.Hold.Epoch && x.state != HoldResolved {
					x.state = HoldVoid // a newer one stands
				}
			}
			if o == nil {
				o = &object{id: v.Hold.HoldID, reasons: v.Hold.Reasons}
				in.objects = append(in.objects, o)
			}
			o.state, o.unknown = v.Hold.State, false
			for _, a := range v.Attempts {
				if a.Outcome == AttemptUnknown || a.Outcome == AttemptOpen {
					o.unknown = true
				}
			}
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	if w.expire == 0 {
		return
	}
	for _, in := range w.ins {
		for _, o := range in.objects {
			if o.resolution == nil && o.state == HoldHeld {
				w.expires(p, o)
			}
		}
	}
}

// person looks at one hold and the provider's ledger, and decides honestly.
func (w *world) person(p *process, in *simIntent, o *object) {
	if o.resolution != nil || w.loss.seq > 0 && w.working(in) {
		return // the store has perhaps forgotten that it was accepted: the provider knows
	}
	paid := false
	for _, c := range w.ledger {
		// A payment may become visible only at the end of its settling time.
		if c.in == in && (w.t >= c.m.final || w.rng.IntN(2) == 0) {
			paid = true
		}
	}
	early := o.state == HoldWaiting
	d := Reject
	roll := w.rng.IntN(100)
	switch {
	case paid && w.errs && !early && roll < 40:
		d = Release // a mistake: it may be paid twice, but nothing may be forgotten
		in.wrong++
	case paid && w.errs && !early && o.unknown && roll < 60:
		d = MarkFailed // another one
		in.wrong++
		w.denied[in.call.Key.String()] = true
	case paid && roll < 80:
		d = MarkPaid
	case paid:
	case early && w.mutation != noWaiting && w.mutation != earlyMarkFailed && w.rule != lookEarly && roll < 96:
		return // the API server would refuse it
	case o.unknown && roll%4 == 0 && !w.working(in):
		d = MarkFailed
	case roll < 80:
		d = Release
	}
	o.resolution = &Resolution{HoldID: o.id, Decision: d, Reason: "I looked", By: "a person", ProviderReference: "by-hand"}
	w.logf("a person says %s of %s hold %d (%s)", d, in.call.IntentID, o.id.Number, o.state)
	if early && w.rule != lookEarly {
		w.take(p, o) // it slipped past the API server and is read at once
	}
}

// working: the provider says that it has accepted the payment and is still at work on it.
func (w *world) working(in *simIntent) bool {
	for _, m := range w.net {
		if m.in == in && m.commits && m.answer != nil && m.answer.Outcome == AttemptPending {
			return true
		}
	}
	return false
}

// take is a controller reading a resolution; it may do so at any time and again. Where there
// is none, it ends what nobody has decided about in time.
func (w *world) take(p *process, o *object) {
	if o.resolution == nil {
		w.expires(p, o)
		return
	}
	if w.rule == resolutionIgnored || w.rule == releasesAccepted {
		w.takeWrongly(p, o)
		return
	}
	v, err := p.engine.Resolve(context.Background(), w.asked(*o.resolution))
	if err != nil {
		w.bug(err)
		return
	}
	w.logf("p%d takes %s: %s %s", p.id, o.resolution.Decision, v.State, v.Effect)
	if v.State == HoldResolved && o.id.Epoch != w.id.Epoch {
		w.violate("%s was taken of %s hold %d, of a memory that is lost", o.resolution.Decision, o.id.Key.IntentID, o.id.Number)
	}
}

// expires is the end of a hold that was overdue before it was seen that nobody has decided.
func (w *world) expires(p *process, o *object) {
	v, err := p.engine.Hold(context.Background(), o.id)
	w.bug(err)
	if err != nil || !v.Overdue || o.resolution != nil {
		return
	}
	if v, err = p.engine.Undecided(context.Background(), o.id); err != nil {
		w.bug(err)
		return
	}
	w.logf("nobody has decided about %s hold %d: %s %s", o.id.Key.IntentID, o.id.Number, v.State, v.Effect)
}

// clockEvent has the store's clock jump, or ends that.
func (w *world) clockEvent() {
	switch {
	case w.jump == 0:
		w.jump = jumpLimit + time.Minute + time.Duration(w.rng.Int64N(int64(9*time.Hour)))
		if w.rng.IntN(3) == 0 {
			w.jump = -w.jump
		}
		w.skew += w.jump
		w.logf("the store's clock jumps by %s", w.jump)
	case w.rng.IntN(2) == 0: // it lasts
	case w.short || w.rng.IntN(3) > 0: // windows are short, and end by this clock
		w.setRight()
	default:
		w.logf("the jump is accepted")
		w.back += max(-w.jump, 0)
		w.jump, w.accept = 0, true
	}
}

func (w *world) setRight() {
	if w.jump != 0 {
		w.logf("the store's clock is set right")
	}
	if w.jump > 0 && w.jump-w.back <= jumpLimit {
		// Steps back had brought it so near to where it should be that leases were made by it.
		w.back += w.jump
	}
	w.skew -= w.jump
	w.jump = 0
}

// acceptClocks has every engine that has noticed an accepted jump go on.
func (w *world) acceptClocks() {
	if w.jump != 0 || !w.accept && !w.quiet {
		return
	}
	for _, p := range w.procs {
		// Nobody accepts but what the clock shows, as the controller sees to.
		if _, to, jumped := p.engine.ClockJump(); jumped && to.Sub(w.storeNow()).Abs() <= jumpLimit {
			p.engine.AcceptClock()
		}
	}
}

// lossEvent goes one step on with the loss of the store's memory.
func (w *world) lossEvent() {
	l := &w.loss
	switch {
	case l.seq == 0 && l.copied == nil && w.rng.IntN(3) == 0:
		copied, err := os.ReadFile(w.path())
		if err != nil {
			w.violate("%v", err)
			return
		}
		l.copied = copied
		w.logf("somebody keeps a copy of the store")
	case l.seq == 0:
		w.lose()
	case !l.accepted && w.t >= l.at+simFinal:
		l.accepted, l.lostAt, l.forget = true, w.storeNow().Add(-w.jump), w.rng.IntN(5) == 0
		w.logf("the loss is accepted; forget: %v", l.forget)
		p := w.procs[0]
		p.paused = 0
		w.start(p, "operator", func() { w.importAll(p) })
	}
}

// lose replaces the store by an empty one, or by the copy.
func (w *world) lose() {
	if err := w.bolt.Close(); err != nil {
		w.violate("%v", err)
		return
	}
	_ = os.Remove(w.path())
	w.opens++
	l := &w.loss
	if l.copied != nil {
		if err := os.WriteFile(w.path(), l.copied, 0o600); err != nil {
			w.violate("%v", err)
			return
		}
	}
	w.logf("THE STORE LOSES ITS MEMORY; a copy is left: %v", l.copied != nil)
	w.seq++
	l.seq, l.at, l.imported = w.seq, w.t, map[string]bool{}
	if err := w.open("e2"); err != nil {
		w.violate("%v", err)
		return
	}
	for k, in := range w.byKey {
		w.frozen[k], w.covers[k] = map[int]uint64{}, 0
		sr, _, err := w.bolt.Get(context.Background(), k)
		if err != nil {
			w.violate("%v", err)
			return
		}
		delete(w.state, k)
		if sr != nil {
			h, err := decodeHeader(sr)
			if err != nil {
				w.violate("%v", err)
				return
			}
			w.state[k] = h.State
		}
		if w.state[k] != Succeeded {
			in.acked = "" // the answer is lost; that it was paid is not
		}
	}
}

// open opens the store's file under this epoch.
func (w *world) open(epoch string) error {
	st, err := bolt.Open(w.path(), bolt.Options{NoSync: true, Clock: w.storeNow})
	if err != nil {
		return err
	}
	w.bolt = st
	id, err := st.Initialise(context.Background(), store.Identity{Epoch: epoch, KeyDomain: "d1"})
	if err == nil && id.Epoch != epoch {
		err = st.Disown(context.Background(), id.Epoch, epoch)
		id.Epoch = epoch
	}
	w.id = id
	return err
}

// importAll is the operator after a loss was accepted: first the objects, then what is
// left in the store, then the gateways.
func (w *world) importAll(p *process) {
	ctx := context.Background()
	engine := w.newEngine(p)
	until := func(what string, do func() error) {
		for {
			err := do()
			if err == nil {
				return
			}
			w.logf("operator: %s: %v", what, err)
			w.bug(err)
			if w.violation != "" {
				return
			}
			w.giveWay(nil)
		}
	}
	for _, in := range w.ins {
		highest, open := 0, (*object)(nil)
		for _, o := range in.objects {
			highest = max(highest, o.id.Number)
			if o.state == HoldHeld || o.state == HoldWaiting {
				open = o
			}
		}
		if open == nil {
			continue
		}
		w.loss.imported[in.call.Key.String()] = true
		h := ImportedHold{
			Key: in.call.Key, Scope: in.call.Scope, Lineage: in.call.Lineage, Amount: in.call.Amount, Recipient: in.call.Recipient,
			Fingerprint: in.call.Fingerprint, Reasons: open.reasons, Number: highest, Policy: w.policy(),
		}
		if w.rng.IntN(2) == 0 {
			h.CallerUID = in.call.CallerUID
		}
		until("import of "+h.IntentID, func() error { return engine.Import(ctx, h) })
	}
	until("rehold", func() error { return engine.Rehold(ctx) })
	w.loss.served = true
	for _, p := range w.procs {
		p.engine = w.newEngine(p)
	}
	w.logf("the gateways are served again")
}

func (w *world) takeWrongly(p *process, o *object) {
	r, _, err := p.engine.get(context.Background(), o.id.Key.String())
	if err != nil || r == nil || r.State != Held || !p.engine.isCurrent(r, o.id) {
		return
	}
	if w.rule == resolutionIgnored && p.engine.cannot(r, *o.resolution) != "" {
		return
	}
	if w.rule == releasesAccepted && o.resolution.Decision == Release && r.accepted() && !r.Current.Waiting {
		for i := range r.Attempts {
			r.Attempts[i].Accepted = false
		}
		pend, err := p.engine.take(r, *o.resolution, p.engine.cannot(r, *o.resolution), "", w.storeNow())
		if err == nil {
			_, _, _ = p.engine.update(context.Background(), pend, p.engine.soon())
		}
		return
	}
	_, _ = p.engine.Resolve(context.Background(), *o.resolution)
}

// policy lets answers and windows end within the history, in some worlds.
func (w *world) policy() Policy {
	p := Policy{Budget: "b", Window: w.window, TTL: w.window / 2, Timeout: simTimeout, SettleAfter: simSettleAfter, MaxHeld: 50, MaxHeldPerCaller: 50, HoldFor: w.expire}
	if w.local != nil {
		p.RenewFor = simRenewFor
	}
	if w.tries > 0 {
		p.Retry = &RetryBudget{Attempts: w.tries, Initial: 500 * time.Millisecond, Factor: 3, Max: 5 * time.Second}
	}
	p.RegisteredOnly = w.registration != nil && w.registration.required
	if w.checks {
		p.Check = &CheckPolicy{
			Upstream: "u", Timeout: simTimeout, Initial: 500 * time.Millisecond, Max: 5 * time.Second, Factor: 2,
			Deadline: 2 * time.Minute, Unbounded: w.unbounded,
		}
	}
	if w.dedup != nil && !w.dedup.silent {
		p.Resume = &ResumePolicy{Upstream: "u", Window: w.dedup.window}
	}
	if w.limits != nil {
		p.MaxInFlight, p.MaxInFlightPerScope = w.limits.IntN(4), w.limits.IntN(3)
		if w.limits.IntN(2) == 0 {
			p.Rate = Rate{Every: 10 * time.Second, Burst: 1 + w.limits.IntN(3)}
		}
		if w.limits.IntN(2) == 0 {
			p.RatePerCaller = Rate{Every: 5 * time.Second, Burst: 1 + w.limits.IntN(3)}
		}
	}
	return p
}

// attempts is how many an intent has from its last release.
func (w *world) attempts() int {
	if w.tries > 0 {
		return w.tries
	}
	return 5
}

func mustPath(segments ...string) intent.Path {
	p, err := intent.NewPath(segments...)
	if err != nil {
		panic(err)
	}
	return p
}

func newWorld(seed uint64, rule worldRule, m mutation, dir string, tracing bool) (*world, error) {
	w := &world{
		seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), rule: rule, mutation: m, dir: dir, tracing: tracing,
		byKey: map[string]*simIntent{}, changed: map[string]uint64{}, state: map[string]State{},
		engineOf: map[*Ticket]*Engine{}, out: map[string]time.Time{}, begun: map[string]int{}, tries: []int{0, 2, 4}[seed%3],
		frozen: map[string]map[int]uint64{}, covers: map[string]uint64{}, rseq: map[string]map[int][2]uint64{},
		made: map[string]bool{}, marks: map[string][]store.Mark{}, at: map[string]time.Duration{}, aged: map[string]map[string]bool{}, knew: map[string]map[string]bool{}, known: map[string]bool{}, seen: map[string]map[string]bool{}, denied: map[string]bool{},
	}
	// The dice of the limits are their own, so that a world without them is as it was.
	if limits := rand.New(rand.NewPCG(seed, 2)); limits.IntN(6) == 0 {
		w.limits = limits
	}
	if local := rand.New(rand.NewPCG(seed, 3)); (local.IntN(5) == 0 || m == renewsOver || m == renewsUnwritten) && rule == "" {
		w.local, w.fences = local, map[*Ticket]Fence{}
	}
	if err := w.open("e1"); err != nil {
		return nil, err
	}
	w.makeIntents()
	w.jumps, w.loss.loses = w.rng.IntN(4) == 0, w.rng.IntN(4) == 0
	w.errs = w.rng.IntN(5) == 0
	w.checks = w.rng.IntN(2) == 0
	w.unbounded = w.checks && w.rng.IntN(3) == 0
	w.window = 400 * time.Hour
	if w.short = w.rng.IntN(3) == 0; w.short {
		w.window = 3 * time.Minute
	}
	w.stalls = []int{8, 8, 55}[w.rng.IntN(3)]
	w.registration = w.newRegistration()
	w.money = w.newMoney()
	w.dedup = w.newDedup()
	w.makeRules()
	for i := range 2 + w.rng.IntN(2) {
		p := &process{id: i}
		w.procs = append(w.procs, p)
		w.boot(p)
	}
	return w, nil
}

// makeIntents makes one to four intents, most of them for the same few things.
func (w *world) makeIntents() {
	scopes := []intent.Scope{
		{mustPath("o", "9")},
		{mustPath("o", "9"), mustPath("o", "10")},
		{mustPath("o", "10")},
		{mustPath("o")},
		{mustPath("o", "9", "item")},
	}
	lineages := []intent.Path{"", "", mustPath("s", "1"), mustPath("s", "2"), mustPath("s")}
	for i := range 1 + w.rng.IntN(4) {
		scope, err := intent.NewScope(scopes[w.rng.IntN(len(scopes))]...)
		if err != nil {
			panic(err)
		}
		amount := &intent.Money{Value: "10", Currency: "USD"}
		in := &simIntent{call: Call{
			Key:       Key{Namespace: "ns", Tool: fmt.Sprint("t", w.rng.IntN(2)), Caller: fmt.Sprint("c", w.rng.IntN(2)), IntentID: fmt.Sprint("i", i)},
			CallerUID: "u", Scope: scope, Lineage: lineages[w.rng.IntN(len(lineages))], Amount: amount, Recipient: "r",
			Fingerprint: fmt.Sprint("f", w.rng.IntN(2)), IdentityHash: "h",
		}}
		in.other = in.call
		in.other.Amount, in.other.Fingerprint = &intent.Money{Value: "11", Currency: "USD"}, "f9"
		w.ins = append(w.ins, in)
		w.byKey[in.call.Key.String()] = in
	}
}

func (w *world) runnable(p *process) []*actor {
	var out []*actor
	if p.paused > w.t {
		return nil
	}
	for _, a := range p.actors {
		if a.ready == nil || a.ready() {
			out = append(out, a)
		}
	}
	return out
}

func (w *world) pass(d time.Duration) {
	// Payments that fall due on the way are made at their own time, in order.
	end := w.t + d
	for {
		at := end
		for _, m := range w.net {
			if m.commits && m.commitAt > w.t && m.commitAt < at {
				at = m.commitAt
			}
		}
		if w.rule == clockStands {
			for _, p := range w.procs {
				if p.paused > w.t {
					p.stood += min(at, p.paused) - w.t
				}
			}
		}
		w.t = at
		w.transfer()
		if at == end {
			return
		}
	}
}

// someObject picks one of all hold objects.
func (w *world) someObject() (*simIntent, *object) {
	var n int
	for _, in := range w.ins {
		n += len(in.objects)
	}
	if n == 0 {
		return nil, nil
	}
	i := w.rng.IntN(n)
	for _, in := range w.ins {
		if i < len(in.objects) {
			return in, in.objects[i]
		}
		i -= len(in.objects)
	}
	return nil, nil
}

// history is one life of the world.
func (w *world) history() {
	steps := 60 + w.rng.IntN(140)
	for i := 0; i < steps && w.violation == ""; i++ {
		w.one()
	}
	w.settle()
	w.judgeEnd()
	for _, p := range w.procs {
		for _, a := range p.actors {
			a.stop()
		}
	}
	_ = w.bolt.Close()
}

func (w *world) one() {
	w.transfer()
	w.acceptClocks()
	w.resumeWorldEvent()
	if w.jumps && w.rng.IntN(30) == 0 {
		w.clockEvent()
	}
	if w.loss.loses && w.rng.IntN(40) == 0 {
		w.lossEvent()
	}
	w.registerSome()
	p := w.procs[w.rng.IntN(len(w.procs))]
	alive := p.paused <= w.t
	switch roll := w.rng.IntN(100); {
	case roll < 9 && alive && len(p.actors) < 6:
		in := w.ins[w.rng.IntN(len(w.ins))]
		c := in.call
		if w.rng.IntN(12) == 0 {
			c = in.other
		}
		w.start(p, fmt.Sprintf("p%d call %s", p.id, c.IntentID), func() { w.call(p, in, c) })
	case roll < 58:
		if r := w.runnable(p); len(r) > 0 {
			w.resume(r[w.rng.IntN(len(r))])
		}
	case roll < 66:
		var waiting []*message
		for _, m := range w.net {
			if !m.done && m.arrives <= w.t {
				waiting = append(waiting, m)
			}
		}
		if len(waiting) > 0 {
			m := waiting[w.rng.IntN(len(waiting))]
			if w.chance(15) {
				m.done = true
				w.logf("the network loses %s(attempt %d)", m.in.call.IntentID, m.attempt)
			} else {
				w.deliver(m)
			}
			w.transfer()
		}
	case roll < 75:
		d := []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, time.Second, simLease, simFinal}[w.rng.IntN(5)]
		w.pass(time.Duration(w.rng.Int64N(int64(d)) + 1))
	case roll < 80 && alive:
		w.start(p, fmt.Sprintf("p%d sweep", p.id), func() {
			w.bug(p.engine.Sweep(context.Background()))
			w.check(p)
		})
	case roll < 85 && alive:
		w.start(p, fmt.Sprintf("p%d sync", p.id), func() { w.sync(p) })
	case roll < 89 && alive:
		if in, o := w.someObject(); o != nil {
			w.start(p, "person", func() { w.person(p, in, o) })
		}
	case roll < 93 && alive:
		if _, o := w.someObject(); o != nil {
			w.start(p, fmt.Sprintf("p%d take", p.id), func() { w.take(p, o) })
		}
	case roll < 95:
		w.logf("p%d is killed", p.id)
		w.boot(p)
	case roll < 97 && alive:
		p.paused = w.t + time.Duration(w.rng.Int64N(int64(2*simFinal)))
		w.logf("p%d stops until %.3fs", p.id, p.paused.Seconds())
	case roll < 98:
		step := []time.Duration{20 * time.Minute, -20 * time.Minute, 2 * time.Second, -2 * time.Second}[w.rng.IntN(4)]
		if w.short {
			step = min(max(step, -time.Second), time.Second) // windows are short, and end by this clock
		}
		if w.dedup != nil && w.dedup.walls {
			step = 0
		}
		w.skew += step
		w.back += max(-step, 0)
		w.logf("the store's clock steps by %s", step)
	case roll < 99:
		if len(w.late) > 0 {
			i := w.rng.IntN(len(w.late))
			run := w.late[i]
			w.late = append(w.late[:i:i], w.late[i+1:]...)
			w.logf("a slow request lands")
			run()
		}
	default:
		if w.rng.IntN(3) == 0 && !w.short {
			w.pass(25 * time.Hour)
		} else {
			drift := time.Duration(w.rng.Int64N(int64(4*time.Second))) - 2*time.Second
			if w.dedup == nil || w.dedup.walls {
				p.wall += drift
			}
		}
	}
}

// settle lets everything come to rest: nothing fails any more, and people decide.
func (w *world) settle() {
	w.quiet = true
	w.setRight()
	if w.loss.seq > 0 && !w.loss.accepted {
		w.pass(simFinal)
		w.lossEvent()
	}
	passed := w.back
	w.pass(passed) // a lease ends by the store's clock
	for i, p := range w.procs {
		p.paused, p.wall = 0, 0
		if i > 0 && w.rng.IntN(2) == 0 {
			// It stands still while the others and the people go on, and comes back to a world that has moved.
			p.paused = w.t + time.Duration(w.rng.Int64N(int64(10*time.Minute)))
		}
	}
	for round := 0; round < 18 && w.violation == ""; round++ {
		if w.jumps && round < 9 && w.rng.IntN(2) == 0 {
			w.clockEvent()
		}
		if round == 9 {
			w.ending = true
			w.setRight()
			w.pass(w.back - passed)
			for _, p := range w.procs {
				p.paused = 0
			}
		}
		w.landLate(round)
		w.drain()
		w.round(round)
	}
}

// landLate lets some of the requests that were given up for lost arrive.
func (w *world) landLate(round int) {
	var left []func()
	for _, run := range w.late {
		switch {
		case round < 9 && w.rng.IntN(3) > 0:
			left = append(left, run)
		case w.rng.IntN(2) == 0:
			run()
		}
	}
	w.late = left
}

// round is a minute in which everybody does what is theirs: sweep, show, decide, take, call.
func (w *world) round(round int) {
	p := w.procs[0]
	sweep := func() {
		w.start(p, "sweep", func() {
			w.bug(p.engine.Sweep(context.Background()))
			w.check(p)
		})
	}
	for range 4 {
		w.acceptClocks()
		w.pass(time.Duration(w.rng.Int64N(int64(simFinal)) + 1))
		sweep()
		w.drain()
		w.start(p, "sync", func() { w.sync(p) })
		if in, o := w.someObject(); o != nil {
			w.start(p, "person", func() { w.person(p, in, o) })
		}
		w.drain()
	}
	w.pass(time.Minute)
	sweep()
	w.start(p, "sync", func() { w.sync(p) })
	w.drain()
	for _, in := range w.ins {
		for _, o := range in.objects {
			if !w.rests(in) || round < 2 {
				w.start(p, "person", func() { w.finalPerson(p, in, o) })
				w.drain()
			}
		}
		if round > 0 && !w.rests(in) {
			w.start(p, "call", func() { w.call(p, in, in.call) })
			w.drain()
		}
	}
}

func (w *world) rests(in *simIntent) bool { return w.state[in.call.Key.String()].Settled() }

// finalPerson decides every hold that stands: the ledger is whole by now.
func (w *world) finalPerson(p *process, in *simIntent, o *object) {
	if o.resolution == nil && o.state == HoldHeld {
		paid := false
		for _, c := range w.ledger {
			paid = paid || c.in == in
		}
		if w.working(in) && w.rule != releasesAccepted {
			return
		}
		d := Reject
		switch {
		case paid && w.errs && in.wrong < 2 && !w.ending && w.rng.IntN(2) == 0:
			d = Release
			in.wrong++
		case paid:
			d = MarkPaid
		case o.unknown && in.said != MarkFailed && w.rng.IntN(2) == 0: // where it was not taken the hold says why
			d = MarkFailed
		case w.rng.IntN(2) == 0 && !(w.rules && in.said == Release): // it may have been refused
			d = Release
		}
		in.said = d
		o.resolution = &Resolution{HoldID: o.id, Decision: d, By: "a person", ProviderReference: "by-hand"}
		w.logf("a person says %s of %s hold %d in the end", d, in.call.IntentID, o.id.Number)
	}
	w.take(p, o)
}

// drain runs all actors to their end, or until they all stall.
func (w *world) drain() {
	enough := w.t + 3*time.Second // others go on although somebody stalls
	for range 100_000 {
		w.transfer()
		busy := false
		for _, m := range w.net {
			if !m.done && m.arrives <= w.t {
				w.deliver(m)
				w.transfer()
			}
		}
		for _, p := range w.procs {
			for _, a := range w.runnable(p) {
				w.resume(a)
				busy = true
			}
		}
		if busy {
			continue
		}
		waiting := false
		for _, p := range w.procs {
			waiting = waiting || len(p.actors) > 0 && p.paused <= w.t
		}
		if !waiting || !w.ending && w.t >= enough {
			return
		}
		w.pass(200 * time.Millisecond)
	}
	w.violate("the actors do not come to an end")
}

// judgeEnd compares what the guard says in the end with the ledger.
func (w *world) judgeEnd() {
	if w.violation != "" {
		return
	}
	w.current = nil
	if err := w.bolt.Check(context.Background()); err != nil {
		w.violate("the store's indexes: %v", err)
	}
	for meter, want := range w.slots() {
		if sum, err := w.bolt.Meter(context.Background(), meter); err != nil || sum != fmt.Sprint(want) || want != 0 {
			w.violate("in the end the meter %s says that %s slots are taken, and %d are (%v)", meter, sum, want, err)
		}
	}
	paid := map[*simIntent]int{}
	for _, c := range w.ledger {
		paid[c.in]++
	}
	keys := make([]string, 0, len(w.byKey))
	for k := range w.byKey {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var records []*record
	for _, k := range keys {
		in := w.byKey[k]
		sr, _, err := w.bolt.Get(context.Background(), k)
		if err != nil {
			w.violate("the store cannot be read: %v", err)
			return
		}
		r, err := decode(sr)
		if err != nil {
			w.violate("%v", err)
			return
		}
		if r == nil {
			if paid[in] > 0 && !w.forgotten(in) {
				w.violate("%s was paid and there is no record", in.call.IntentID)
			}
			continue
		}
		w.judgeSpendAtTheEnd(in, r)
		if r.State == Rejected && r.Expired && paid[in] > 0 && in.wrong == 0 && !w.denied[k] && !w.forgotten(in) {
			w.violate("%s was paid, and it was rejected without a person", in.call.IntentID)
		}
		records = append(records, r)
		if !r.State.Settled() && w.called(in, r) {
			w.violate("%s is left undecided: %s, hold %d", in.call.IntentID, r.State, r.Hold)
		}
		if in.acked != "" && (r.State != Tombstone || r.SettledAs != Succeeded) && (r.State != Succeeded || r.Response == nil || string(r.Response.Body) != in.acked) {
			w.violate("%s was acknowledged as %s and is %s in the end", in.call.IntentID, in.acked, r.State)
		}
		if in.found && !w.forgotten(in) && (r.State == Rejected || r.State == Failed) {
			w.violate("a check has found the payment of %s, and it is %s in the end", in.call.IntentID, r.State)
		}
		known := false // that it was paid
		for i := range r.Attempts {
			known = known || r.Attempts[i].Outcome == AttemptSucceeded
		}
		if paid[in] > 0 && !w.forgotten(in) && r.State == Failed && !r.Disputed && (!r.MarkedFailed || in.wrong == 0 || known) {
			w.violate("%s was paid and is Failed in the end", in.call.IntentID)
		}
	}
	w.judgeMeters(records)
}

// forgotten: all that was paid of it was before the loss, and no object shows it.
func (w *world) forgotten(in *simIntent) bool {
	if w.loss.seq == 0 || w.loss.imported[in.call.Key.String()] {
		return false
	}
	for _, c := range w.ledger {
		if c.in == in && c.m.rseq > w.loss.seq {
			return false
		}
	}
	return true
}

// called: the record was given every chance to be decided.
func (w *world) called(in *simIntent, r *record) bool {
	// A retryable or released intent waits for its agent, who may have been told of
	// an exact match instead: nothing is in flight and nothing is unknown.
	if w.mutation == jumpIgnored {
		return false // leases that were made by a wrong clock end late; it is the money that is looked for
	}
	return r.State == InFlight || r.State == Pending || r.State == Held
}

func (w *world) path() string {
	return filepath.Join(w.dir, fmt.Sprintf("sim-%d-%d.db", w.seed, w.opens))
}
