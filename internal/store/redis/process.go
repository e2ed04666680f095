package redis

// What a process keeps in the store of itself, in its first question on and with each
// one after it:
//
//   - How many writes it has made there. The count that was answered last is told with
//     every question, and the epochs they were made under; a store that shows a lower
//     count under one of these has been set back, and its script gives it another epoch,
//     in the same step, so that all others are told too. Under an epoch that the process
//     never wrote under the loss was found before, and may have been accepted. In either
//     case this process is answered with ErrMemoryLost from then on.
//   - Which of its questions come too late. Each has a ticket. After a question without
//     an answer, those that follow say that tickets up to that one are void: a copy
//     that lies in some buffer on the way, and arrives after the write was repeated or
//     read back, then changes nothing.
//
// Each opened store is a process in this sense.

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// ownArgs are the arguments that each question begins with: prefix and process.
const ownArgs = 2

const (
	// nameSize is that of lua/prelude.lua.
	nameSize = 26
	// renewal is how long a process may do nothing until it takes another name: what
	// the store knows of one that was not seen for 30 days is taken away.
	renewal = 20 * 24 * time.Hour
)

// process is a name that the store counts writes under.
type process struct {
	name string
	// acked is the highest count that was answered.
	acked  atomic.Uint64
	epochs atomic.Pointer[epochs]
	// seen is when the store last noted that the process lives, by this machine's clock.
	seen atomic.Int64
}

// processes are the names of an opened store, one after the other, and its tickets.
type processes struct {
	now     func() time.Time
	current atomic.Pointer[process]
	tickets atomic.Uint64
	// void is the highest ticket of a write that was not answered.
	void atomic.Uint64
	// lost says that writes were lost; it stays.
	lost atomic.Pointer[error]
}

func (ps *processes) take() *process {
	p := ps.current.Load()
	if p != nil && (p.acked.Load() == 0 || ps.now().Sub(time.Unix(0, p.seen.Load())) < renewal) {
		return p
	}
	next := &process{name: rand.Text()}
	next.seen.Store(ps.now().UnixNano())
	if !ps.current.CompareAndSwap(p, next) {
		return ps.current.Load()
	}
	return next
}

// epochs are those that a process has written under: names, and the same packed as
// lua/prelude.lua reads them.
type epochs struct {
	names  []string
	packed string
}

// writes notes that writes may be made under these epochs.
func (p *process) writes(under ...string) {
	for _, name := range under {
		for {
			have, next := p.epochs.Load(), epochs{}
			if have != nil {
				next = *have
			}
			if slices.Contains(next.names, name) {
				break
			}
			next.names = append(slices.Clone(next.names), name)
			next.packed += string(binary.BigEndian.AppendUint32(nil, uint32(len(name)))) + name
			if p.epochs.CompareAndSwap(have, &next) {
				break
			}
		}
	}
}

// question is what the script is told of the process that asks.
func (ps *processes) question(p *process) (text string, ticket uint64) {
	// What is void was so before this ticket was drawn.
	known, void := p.acked.Load(), ps.void.Load()
	ticket = ps.tickets.Add(1)
	under := ""
	if e := p.epochs.Load(); e != nil {
		under = e.packed
	}
	b := make([]byte, 0, nameSize+18+len(under))
	b = append(b, p.name...)
	for _, n := range []uint64{known, ticket, void} {
		b = append48(b, int64(n))
	}
	return string(append(b, under...)), ticket
}

// raise sets n to at least this, and says whether it was less.
func raise(n *atomic.Uint64, least uint64) bool {
	for {
		have := n.Load()
		if have >= least {
			return false
		}
		if n.CompareAndSwap(have, least) {
			return true
		}
	}
}

// run runs a script and returns its answer, an array, without the count at its head.
// The first ownArgs of its arguments are filled in here. living says that the script notes
// that the process lives, as each write does. under are the epochs of what it may write.
func (s *Store) run(ctx context.Context, doing string, script *valkey.Lua, living bool, keys, args []string, under ...string) ([]valkey.ValkeyMessage, error) {
	return s.runOn(ctx, s.link(), doing, script, living, func(draw func() (string, uint64)) ([]string, []string) {
		args[0] = s.prefix
		args[1], _ = draw()
		return keys, args
	}, under...)
}

// runOn is run on one link, with keys and arguments that are put together each time that
// the question is asked, for the ticket that is drawn then; without keys it is not asked.
func (s *Store) runOn(ctx context.Context, l *link, doing string, script *valkey.Lua, living bool,
	words func(draw func() (string, uint64)) (keys, args []string), under ...string) ([]valkey.ValkeyMessage, error) {
	for {
		if err := s.processes.lost.Load(); err != nil {
			return nil, fmt.Errorf("%s: %w", doing, *err)
		}
		p := s.processes.take()
		// Also what is not answered may be counted.
		p.writes(under...)
		var ticket uint64
		keys, args := words(func() (question string, drawn uint64) {
			question, ticket = s.processes.question(p)
			return question, ticket
		})
		if len(keys) == 0 {
			return nil, nil
		}
		var answered atomic.Bool
		var answer []valkey.ValkeyMessage
		err := s.ask(ctx, l, doing, func(ctx context.Context, client valkey.Client) error {
			// A server that does not know the script has not run it; it is sent whole then.
			a, err := script.Exec(ctx, client, keys, args).ToArray()
			if _, refused := valkey.IsValkeyErr(err); err == nil || refused {
				answered.Store(true)
			}
			if err == nil {
				answer = a
			}
			return err
		})
		switch {
		case errors.Is(err, errLate):
			// A question that was asked after this one has overtaken it.
			continue
		case errors.Is(err, store.ErrMemoryLost):
			s.processes.lost.CompareAndSwap(nil, &err)
			return nil, err
		case err != nil:
			if !answered.Load() {
				raise(&s.processes.void, ticket)
			}
			return nil, err
		}
		r := reader{answer: answer}
		count := r.number()
		if r.err != nil {
			return nil, s.damaged(doing, r.err.Error())
		}
		if raise(&p.acked, count) || living {
			p.seen.Store(s.processes.now().UnixNano())
		}
		return answer[1:], nil
	}
}
