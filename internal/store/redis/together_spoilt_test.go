package redis_test

// Random steps, many to a script, on a server that is not as it should be: without a right, with
// a key of another type, without a sorted set of marks, full, or as a node of a cluster whose
// slot is just moving. Each step is whole or not at all, as it is answered, and nothing is half.

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// truth makes a batch by one script, and holds the answers and what is there against the
// model, which takes those steps that were not refused.
func (g *together) truth(seed uint64, spoil string, batch []store.Reserve, mend func()) (refused int) {
	t := g.t
	t.Helper()
	results, errs := g.have.ReserveTogether(batch...)
	mend()
	for i, r := range batch {
		if errs[i] != nil {
			refused++
			if !errors.Is(errs[i], store.ErrUnavailable) || strings.Contains(errs[i].Error(), "half") {
				t.Fatalf("seed %d, %s: step %d of\n%s", seed, spoil, i, describeAll(batch, results, errs))
			}
			continue
		}
		if want := g.ask(r); !reflect.DeepEqual(results[i], want) {
			t.Fatalf("seed %d, %s: step %d of\n%swant %+v", seed, spoil, i, describeAll(batch, results, errs), want)
		}
	}
	// A client of a cluster may just be leaving a node that has no slot any more.
	var err error
	g.s.eventually(t, fmt.Sprintf("seed %d, %s: all that is there can be read", seed, spoil), func() error {
		if err = errors.Join(g.same(), g.check()); errors.Is(err, store.ErrUnavailable) {
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatalf("seed %d, %s: %v\nthe last were\n%s", seed, spoil, err, describeAll(batch, results, errs))
	}
	return refused
}

func (g *together) batch(most int) (batch []store.Reserve) {
	for range 1 + g.IntN(most) {
		batch = append(batch, g.draw())
	}
	return batch
}

// names are all keys of the store, without the prefix.
func (g *together) names() []string {
	g.t.Helper()
	m := g.s.do(g.t, "KEYS", g.have.Prefix()+"*")
	all, err := m.AsStrSlice()
	if err != nil {
		g.t.Fatal(err)
	}
	slices.Sort(all)
	for i := range all {
		all[i] = strings.TrimPrefix(all[i], g.have.Prefix())
	}
	return all
}

func (g *together) command(args ...string) string {
	g.t.Helper()
	m, err := g.client.Do(background, g.client.B().Arbitrary(args...).Build()).ToMessage()
	if err != nil {
		g.t.Fatalf("%q: %v", args, err)
	}
	text, _ := m.ToString()
	return text
}

func TestTogetherWhereSpoilt(t *testing.T) {
	steps, seed := togetherSteps(t, 900)
	for _, few := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("few=%d", few), func(t *testing.T) {
			for done := 0; done < steps/3; {
				seed, n := seed(), min(1500, steps/3-done)
				done += n
				togetherWhereSpoilt(newTogether(t, seed, few), seed, few, n)
				if t.Failed() {
					return
				}
			}
		})
	}
}

func togetherWhereSpoilt(g *together, seed uint64, few, steps int) {
	t := g.t
	t.Helper()
	grant := func(rules ...string) {
		g.command(append([]string{"ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "+@all"}, rules...)...)
	}
	grant()
	opts := g.s.options()
	opts.Credentials = func() (string, string, error) { return "limited", "pw", nil }
	limited, err := redis.OpenFailing(opts, few)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = limited.Close() })
	g.have = limited
	refused := map[string]int{}
	for made := 0; made < steps; {
		spoil, mend := "nothing", func() {}
		switch g.IntN(4) {
		case 0:
			rights := []string{"mset", "set", "hset", "zadd", "zrem", "hdel", "del", "get", "hmget", "hget", "zcard", "exists", "zcount", "getrange", "zmscore", "zrange"}
			spoil = "-" + rights[g.IntN(len(rights))]
			grant(spoil)
			mend = func() { grant() }
		case 1:
			spoil = "maxmemory"
			if g.chance(20) {
				g.command("CONFIG", "SET", "maxmemory", "1")
				mend = func() { g.command("CONFIG", "SET", "maxmemory", "0") }
			}
		default:
			var names []string
			all := append(g.names(), "due", "held", "sums", "marks", "r"+redis.Hash(g.key()))
			if of := "m" + redis.Hash(common); slices.Contains(all, of) {
				all = append(all, slices.Repeat([]string{of}, 8)...)
			}
			for _, name := range all {
				// A body may be of any type as long as nobody reads it.
				if name != "meta" && name != redis.TestClockKey && (name[0] != 'b' || len(name) != 13) {
					names = append(names, name)
				}
			}
			name := names[g.IntN(len(names))]
			whole, saved := g.have.Prefix()+name, "saved"
			there := g.command("TYPE", whole) != "none"
			if there {
				g.command("RENAME", whole, saved)
			}
			missing := there && name[0] == 'm' && name != "marks" && g.chance(50)
			if spoil = fmt.Sprintf("%q", name); !missing {
				g.command("LPUSH", whole, "x")
			}
			mend = func() {
				want := "list"
				if missing {
					want = "none"
				}
				if kind := g.command("TYPE", whole); kind != want {
					t.Fatalf("seed %d: %s has become a %s", seed, spoil, kind)
				}
				g.command("DEL", whole)
				if there {
					g.command("RENAME", saved, whole)
				}
			}
		}
		batch := g.batch(12)
		made += len(batch)
		refused[spoil[:2]] += g.truth(seed, spoil, batch, mend)
	}
	t.Logf("seed %d: refused %v, %v", seed, refused, g.outcomes)
}

// anchor is mostly there: a record that keeps what all share from becoming empty.
func (g *together) anchor() []store.Reserve {
	w := plain("anchor", g.versions["anchor"])
	w.Nonce = fmt.Sprint("anchor ", g.nonce)
	if away := g.chance(20); away && w.Expected == 0 {
		return nil
	} else if away {
		w.Record, w.Marks, w.Meters = nil, nil, nil
	}
	return []store.Reserve{{Write: w}}
}

// TestTogetherWhileSlotMoves: what lies where the slot moves from, and all of it then where it
// moves to.
func TestTogetherWhileSlotMoves(t *testing.T) {
	steps, seed := togetherSteps(t, 80)
	for _, few := range []int{1, 3} {
		t.Run(fmt.Sprintf("few=%d", few), func(t *testing.T) {
			seed := seed()
			g := newTogether(t, seed, few)
			m := newMove(t, func(*redis.Store) {})
			m.still(t)
			for _, s := range []*server{m.from, m.to} {
				// A node stays what it is when it has no slot any more.
				s.do(t, "CONFIG", "SET", "cluster-allow-replica-migration", "no")
			}
			opts := g.s.options()
			opts.Addresses = []string{"127.0.0.1:" + m.from.args[1]}
			var err error
			if g.have, err = redis.OpenFailing(opts, few); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = g.have.Close() })
			g.s, g.client = m.from, m.from.client(t)
			g.setClock()
			refused, fromTo := 0, [2]int{}
			for made := 0; made < steps/2; {
				g.set(redis.TestFailKey, "none 0") // there, so that it can be asked for
				g.setClock()
				g.truth(seed, "at rest", append(g.batch(12), g.anchor()...), func() {})
				// What a script is asked for with must be there as a whole.
				g.only = nil
				for i := range g.keys {
					key := fmt.Sprint("key ", i)
					r, _, err := g.want.Get(background, key)
					if err != nil {
						t.Fatal(err)
					}
					if r != nil && r.Body != nil {
						g.only = append(g.only, key)
					}
				}
				if len(g.only) == 0 {
					continue
				}
				g.recent = nil
				batch := g.batch(12)
				g.only = nil
				made += len(batch)
				m.begin(t)
				to := g.chance(50)
				if to {
					m.move(t, m.keys(t)...)
				}
				n := g.truth(seed, fmt.Sprintf("the slot moves, moved %t", to), batch, func() {
					for _, s := range []*server{m.to, m.from} {
						if !to {
							s.do(t, "CLUSTER", "SETSLOT", m.slot, "STABLE")
						} else {
							s.do(t, "CLUSTER", "SETSLOT", m.slot, "NODE", m.to.id(t))
						}
					}
					if to {
						port := m.from.args[1]
						m.from, m.to, m.toPort = m.to, m.from, port
						g.s, g.client = m.from, m.from.client(t)
					}
					m.from.eventually(t, "the slot is at rest", func() error { _, err := g.have.Standing(background); return err })
				})
				refused += n
				if n < len(batch) {
					fromTo[map[bool]int{true: 1}[to]]++
				}
			}
			t.Logf("seed %d: %d refused, answered %v, %v", seed, refused, fromTo, g.outcomes)
		})
	}
}

// TestTogetherKilled: a script that takes long is ended by whoever asks the server for it, before
// it writes. It then has written nothing.
func TestTogetherKilled(t *testing.T) {
	const batches = 15
	_, seed := togetherSteps(t, 0)
	of := seed()
	g := newTogether(t, of, 2)
	g.calm = true
	g.command("CONFIG", "SET", "lua-time-limit", "1")
	stop, stopped := make(chan struct{}), make(chan struct{})
	killed := 0
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if answer, err := g.s.plain("SCRIPT KILL"); err == nil && strings.HasPrefix(answer, "+OK") {
				killed++
			}
		}
	}()
	refused := 0
	for range batches {
		batch := g.batch(6)
		for i := range batch {
			r := &batch[i]
			if r.Record == nil || r.KeepMarks || r.RenewMarks || slices.ContainsFunc(g.recent, func(o store.Reserve) bool { return o.Nonce == r.Nonce }) {
				continue
			}
			r.Marks = slices.Clone(r.Marks)
			for k := range 1500 {
				r.Marks = append(r.Marks, store.Mark{String: fmt.Sprintf("of %s: %d", r.Nonce, k)})
			}
		}
		results, errs := g.have.ReserveTogether(batch...)
		g.s.eventually(t, "the script has ended", func() error { _, err := g.have.Standing(background); return err })
		if errors.Join(errs...) != nil {
			refused++
		}
		for i, r := range batch {
			if errs[i] == nil {
				if want := g.ask(r); !reflect.DeepEqual(results[i], want) {
					t.Fatalf("seed %d: step %d is %+v, want %+v", of, i, results[i], want)
				}
			} else if !strings.Contains(errs[i].Error(), "killed") {
				t.Fatalf("seed %d: step %d: %v", of, i, errs[i])
			}
		}
	}
	close(stop)
	<-stopped
	if err := errors.Join(g.same(), g.check()); err != nil {
		t.Fatalf("seed %d: %v", of, err)
	}
	t.Logf("seed %d: %d killed, %d scripts refused, %v", of, killed, refused, g.outcomes)
}
