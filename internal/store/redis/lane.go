package redis

// How steps travel: Reserves and Updates, and Gets, that come while the server is busy with
// others of their kind are asked for together, by one script. What each question costs the
// server and this process besides the step itself is then paid once for all of them. One
// that comes alone goes at once. Others wait for its answer, because the more go together the
// less each costs; but a second question goes while the first is on its way if it is full, and
// cannot become any cheaper.
//
// A caller waits no longer than it allows. Until its step goes, that is twice patience at
// most; from then on it waits for the whole script, so that a step which takes the server
// long keeps those beside it waiting, as it would those behind it, and one that takes longer
// than the timeout leaves all of them without an answer.
//
// What must hold: each step has its own outcome. Whoever leaves voids the ticket that its
// step travels under, if it is on its way; else the step is taken out, and never asked for.
// So a step changes nothing once its caller was told that it is not known what became of it,
// and has asked again.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// mostTogether and mostBytes bound what one script is asked for, and with it how long
	// others wait for the server.
	mostTogether = 32
	mostBytes    = 256 << 10
	// patience is how long steps wait for those before them to be answered, or up to twice
	// as long. Then they go behind them on the same connection.
	patience = 5 * time.Millisecond
)

const (
	doingWrite = "write a record"
	doingRead  = "read a record"
)

// step is one Reserve, Update or Get.
type step struct {
	// id is its record's, epoch what it writes under: none for a Get.
	id, epoch string
	args      []string
	size      int

	// What is told, and that it is.
	outcome outcome
	done    chan struct{}

	// Of the lane, under its lock: the ticket that it travels under, and whether its
	// caller has left, or is told the outcome.
	ticket     uint64
	left, told bool
}

// outcome is what the server says of a step: at what time, and the parts of the script's
// answer that are for it.
type outcome struct {
	now   time.Time
	parts []valkey.ValkeyMessage
	err   error
}

// lane has the steps of one kind on one link.
type lane struct {
	s      *Store
	link   *link
	doing  string
	script *valkey.Lua
	// keys come before those of the steps: of each its record and its body. parts are what is
	// answered of each.
	keys  []string
	parts int

	mu      sync.Mutex
	waiting []*step
	// under is how many questions are on their way or about to go, and taken how many of these
	// have their steps; sent is how many questions there have been.
	under, taken, sent int
	// impatient runs while armed: since so many questions had been sent.
	impatient *time.Timer
	armed     bool
	since     int
}

func newLane(s *Store, l *link, doing string, script *valkey.Lua, keys ...string) *lane {
	n := &lane{s: s, link: l, doing: doing, script: script, keys: keys, parts: 1}
	if doing == doingRead {
		n.parts = 2
	}
	n.impatient = time.AfterFunc(time.Hour, n.hurry)
	n.impatient.Stop()
	return n
}

// dones are used again.
var dones = sync.Pool{New: func() any { return make(chan struct{}, 1) }}

// ask asks for a step, and waits no longer than the caller allows. The timeout is that of the
// question which the step goes with, and patience bounds how long it waits for that.
func (n *lane) ask(ctx context.Context, doing string, st *step) (outcome, error) {
	if err := n.s.refused(ctx); err != nil {
		return outcome{}, n.s.unavailable(doing, err)
	}
	for _, a := range st.args {
		st.size += len(a)
	}
	st.done = dones.Get().(chan struct{})
	n.mu.Lock()
	n.waiting = append(n.waiting, st)
	goes := n.goes()
	if goes {
		n.under++
	} else if !n.armed {
		n.arm()
	}
	n.mu.Unlock()
	if goes {
		go n.carry()
	}
	if gone := ctx.Done(); gone == nil {
		<-st.done
	} else {
		select {
		case <-st.done:
		case <-gone:
			if n.leave(st) {
				return outcome{}, n.s.explain(doing, context.Cause(ctx))
			}
			<-st.done
		}
	}
	dones.Put(st.done)
	return st.outcome, st.outcome.err
}

// leave sees to it that a step is not asked for, or comes too late if it comes from now on.
// It does neither if the step is just told its outcome.
func (n *lane) leave(st *step) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if st.told {
		return false
	}
	st.left = true
	if st.ticket > 0 {
		raise(&n.s.processes.void, st.ticket)
	}
	return true
}

// goes says whether what waits need not wait any longer. The first question may not have
// taken yet what goes with it: then this does, too. The lock is held.
func (n *lane) goes() bool {
	return n.under == 0 || n.under == 1 && n.taken > 0 && len(n.waiting) >= mostTogether
}

// arm lets patience begin. The lock is held.
func (n *lane) arm() {
	n.armed, n.since = true, n.sent
	n.impatient.Reset(patience)
}

// hurry sends all that waits, if nothing was sent all the time.
func (n *lane) hurry() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.armed = false
	if n.under == 0 || len(n.waiting) == 0 {
		return
	}
	if n.sent == n.since {
		for i := 0; i < len(n.waiting); i += mostTogether {
			n.under++
			go n.carry()
		}
	}
	// Of what is long not all goes at once.
	n.arm()
}

// carry asks for what waits, and then for what has come meanwhile.
func (n *lane) carry() {
	for {
		// Whoever could come at this moment comes first: on an idle machine that is nobody.
		runtime.Gosched()
		n.mu.Lock()
		steps := n.take()
		if len(steps) == 0 {
			n.under--
			n.mu.Unlock()
			return
		}
		n.sent++
		n.taken++
		n.mu.Unlock()
		n.deliver(steps)
		n.mu.Lock()
		n.taken--
		n.under--
		// What comes while others are on their way goes together.
		goes := n.goes()
		if goes {
			n.under++
		}
		n.mu.Unlock()
		if !goes {
			return
		}
	}
}

// take takes as many of those that wait as may go together, but for those whose callers have
// left: they are of one epoch, because the store has one. The lock is held.
func (n *lane) take() (steps []*step) {
	size, k := 0, 0
	for ; k < len(n.waiting) && len(steps) < mostTogether; k++ {
		st := n.waiting[k]
		if st.left {
			continue
		}
		if len(steps) > 0 && (size+st.size > mostBytes || st.epoch != steps[0].epoch) {
			break
		}
		size += st.size
		steps = append(steps, st)
	}
	n.waiting = slices.Delete(n.waiting, 0, k)
	return steps
}

// deliver asks for these steps and tells each its outcome.
func (n *lane) deliver(steps []*step) {
	epoch := steps[0].epoch
	var under []string
	if epoch != "" {
		under = []string{epoch}
	}
	a, err := n.s.runOn(context.Background(), n.link, n.doing, n.script, false, func(draw func() (string, uint64)) (keys, args []string) {
		n.mu.Lock()
		defer n.mu.Unlock()
		// Whoever has left may have asked again.
		steps = slices.DeleteFunc(steps, func(st *step) bool { return st.left })
		if len(steps) == 0 {
			return nil, nil
		}
		question, ticket := draw()
		keys = append(make([]string, 0, len(n.keys)+2*len(steps)), n.keys...)
		args = append(make([]string, 0, ownArgs+1+len(steps)*len(steps[0].args)), n.s.prefix, question)
		if epoch != "" {
			args = append(args, epoch)
		}
		for _, st := range steps {
			st.ticket = ticket
			record, body := n.s.keysOf(st.id)
			keys = append(keys, record, body)
			args = append(args, st.args...)
		}
		return keys, args
	}, under...)
	o := outcome{err: err}
	if err == nil && len(steps) > 0 {
		o, a = n.head(a, epoch, len(steps))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, st := range steps {
		if st.left {
			continue
		}
		if o.err == nil {
			o.parts = a[i*n.parts : (i+1)*n.parts]
		}
		st.outcome, st.told = o, true
		st.done <- struct{}{}
	}
}

// head reads what is said of all steps, and gives what is said of each.
func (n *lane) head(a []valkey.ValkeyMessage, epoch string, steps int) (outcome, []valkey.ValkeyMessage) {
	r := reader{answer: a}
	if len(a) == 2 && a[0].IsString() {
		if word, have := r.text(), r.text(); r.err == nil && word == "epoch" {
			return outcome{err: fmt.Errorf("%w: the store has epoch %q, the writer knows %q", store.ErrMemoryLost, have, epoch)}, nil
		}
		return outcome{err: n.s.damaged(n.doing, "an answer that is no epoch")}, nil
	}
	o := outcome{now: r.time()}
	switch {
	case r.err != nil:
		o.err = n.s.damaged(n.doing, r.err.Error())
	case len(a) != 1+steps*n.parts:
		o.err = n.s.damaged(n.doing, fmt.Sprintf("an answer of %d parts to %d steps", len(a), steps))
	}
	return o, a[min(1, len(a)):]
}
