package redis_test

// A cluster's slot that is just moving: keys of the store lie on two nodes. Each step is
// whole or not at all, on whichever node it is asked for.

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// move is a slot with all of a store that goes from one node to another.
type move struct {
	from, to     *server
	toPort, slot string
	st           *redis.Store
}

// newMove makes a cluster of two nodes, and a store on the first that fill has filled. Then
// the slot begins to move.
func newMove(t *testing.T, fill func(st *redis.Store)) *move {
	t.Helper()
	m := &move{toPort: freePort(t)}
	port, bus, toBus := freePort(t), freePort(t), freePort(t)
	node := func(port, bus string) *server {
		return newServer(t, "--port", port, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port", bus,
			"--cluster-announce-ip", "127.0.0.1")
	}
	m.from, m.to = node(port, bus), node(m.toPort, toBus)
	m.from.do(t, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
	m.from.do(t, "CLUSTER", "MEET", "127.0.0.1", m.toPort, toBus)
	m.st = m.from.open(t, func(o *redis.Options) { o.Addresses = []string{"127.0.0.1:" + port} })
	m.from.eventually(t, "the cluster is up", func() error { _, err := m.st.Initialise(background, costID); return err })
	for _, s := range []*server{m.from, m.to} {
		s.eventually(t, "the nodes know each other", func() error {
			known, err := s.plain("CLUSTER INFO")
			if err == nil && (!strings.Contains(known, "cluster_state:ok") || !strings.Contains(known, "cluster_known_nodes:2")) {
				err = errors.New(known)
			}
			return err
		})
	}
	fill(m.st)
	slot := m.from.do(t, "CLUSTER", "KEYSLOT", m.st.Prefix())
	n, err := slot.AsInt64()
	if err != nil {
		t.Fatal(err)
	}
	m.slot = strconv.FormatInt(n, 10)
	m.begin(t)
	return m
}

func (m *move) begin(t testing.TB) {
	t.Helper()
	m.to.do(t, "CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.from.id(t))
	m.from.do(t, "CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.to.id(t))
}

// still stops the moving, before anything has moved.
func (m *move) still(t testing.TB) {
	t.Helper()
	for _, s := range []*server{m.from, m.to} {
		s.do(t, "CLUSTER", "SETSLOT", m.slot, "STABLE")
	}
	if err := m.st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

func (s *server) id(t testing.TB) string {
	t.Helper()
	m := s.do(t, "CLUSTER", "MYID")
	id, err := m.ToString()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// keys are all that are on the first node, without the prefix.
func (m *move) keys(t *testing.T) []string {
	t.Helper()
	all := m.from.do(t, "CLUSTER", "GETKEYSINSLOT", m.slot, "100000")
	names, err := all.AsStrSlice()
	if err != nil {
		t.Fatal(err)
	}
	for i := range names {
		names[i] = strings.TrimPrefix(names[i], m.st.Prefix())
	}
	return names
}

func (m *move) move(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		answer := m.from.do(t, "MIGRATE", "127.0.0.1", m.toPort, m.st.Prefix()+name, "0", "5000")
		if text, err := answer.ToString(); err != nil || text != "OK" && text != "NOKEY" {
			t.Fatalf("%q: %q, %v", name, text, err)
		}
	}
}

// end moves what is left and gives the slot to the second node, whose store it returns:
// nothing must be damaged.
func (m *move) end(t *testing.T) *redis.Store {
	t.Helper()
	m.move(t, m.keys(t)...)
	for _, s := range []*server{m.to, m.from} {
		s.do(t, "CLUSTER", "SETSLOT", m.slot, "NODE", m.to.id(t))
	}
	st := m.to.open(t, func(o *redis.Options) { o.Addresses = []string{"127.0.0.1:" + m.toPort} })
	m.to.eventually(t, "the slot has moved", func() error { _, err := st.Standing(background); return err })
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
	return st
}

func written(t *testing.T, st *redis.Store, w store.Write) uint64 {
	t.Helper()
	r, err := st.Update(background, w)
	if err != nil || r.Outcome != store.Written {
		t.Fatalf("%s: %+v, %v", w.Key, r, err)
	}
	return r.Version
}

func unavailable(t *testing.T, what string, r store.Result, err error) {
	t.Helper()
	if !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("%s: %+v, %v", what, r, err)
	}
}

// crowd has more marks of a string than its value holds.
func crowd(t *testing.T, st *redis.Store, tag string) (last store.Write) {
	t.Helper()
	for i := range 66 {
		last = plain(fmt.Sprint(tag, i), 0)
		last.Marks = []store.Mark{{String: "crowd", Tag: tag}}
		last.Expected = 0
		version := written(t, st, last)
		last.Expected = version
	}
	return last
}

// TestSlotMoves: the bodies have moved, and what they belong to has not.
func TestSlotMoves(t *testing.T) {
	var paid, gone uint64
	m := newMove(t, func(st *redis.Store) {
		written(t, st, plain("other", 0))
		paid, gone = written(t, st, plain("pay", 0)), written(t, st, plain("gone", 0))
	})
	m.move(t, "b"+redis.Hash("pay"), "b"+redis.Hash("gone"))
	settle := plain("pay", paid)
	settle.Record.Body, settle.Record.Due = []byte("the receipt"), time.Time{}
	remove := store.Write{Epoch: costID.Epoch, Key: "gone", Expected: gone, Nonce: "remove"}
	for range 2 {
		r, err := m.st.Update(background, settle)
		unavailable(t, "settle", r, err)
		r, err = m.st.Update(background, remove)
		unavailable(t, "remove", r, err)
	}
	st := m.end(t)
	for key, version := range map[string]uint64{"pay": paid, "gone": gone} {
		if r, _, err := st.Get(background, key); err != nil || r == nil || r.Version != version || string(r.Body) != "body" {
			t.Errorf("%s: %+v, %v", key, r, err)
		}
	}
	written(t, st, settle)
	written(t, st, remove)
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

// TestSlotMovesOneByOne: whichever keys have moved before the others, a step is whole or not
// at all.
func TestSlotMovesOneByOne(t *testing.T) {
	steps := func(version map[string]uint64, crowded store.Write) []store.Write {
		settle := plain("pay", version["pay"])
		settle.Marks = append(settle.Marks, store.Mark{String: "crowd", Tag: "a"})
		settle.Meters = []store.MeterEntry{{Meter: "meter 2", Amount: "2"}}
		settle.Record.Due, settle.Record.Held = time.Time{}, false
		again := crowded
		again.Nonce = "again"
		// Another meter than before: the one sum goes, and the other comes.
		other := plain("other", version["other"])
		other.Marks, other.Record.Body = nil, nil
		return []store.Write{settle, again, other, {Epoch: costID.Epoch, Key: "gone", Expected: version["gone"], Nonce: "remove"}}
	}
	for _, order := range []string{"forwards", "backwards", "sorted sets last", "bodies last"} {
		t.Run(order, func(t *testing.T) {
			version := map[string]uint64{}
			var crowded store.Write
			m := newMove(t, func(st *redis.Store) {
				crowded = crowd(t, st, "a")
				for _, key := range []string{"pay", "other", "gone"} {
					version[key] = written(t, st, plain(key, 0))
				}
			})
			writes := steps(version, crowded)
			done := map[int]bool{}
			names := m.keys(t)
			var front, back []string
			for _, name := range names {
				late := order == "sorted sets last" && len(name) == 25 && name[0] == 'm' || order == "bodies last" && name[0] == 'b' && len(name) == 13
				if late {
					back = append(back, name)
				} else {
					front = append(front, name)
				}
			}
			names = append(front, back...)
			if order == "backwards" {
				for i, j := 0, len(names)-1; i < j; i, j = i+1, j-1 {
					names[i], names[j] = names[j], names[i]
				}
			}
			refused := 0
			for _, name := range names {
				m.move(t, name)
				for i, w := range writes {
					if done[i] {
						continue
					}
					r, err := m.st.Update(background, w)
					if err == nil && r.Outcome == store.Written {
						done[i] = true
					} else if refused++; !errors.Is(err, store.ErrUnavailable) {
						t.Fatalf("%s, after %q: %+v, %v", w.Key, name, r, err)
					}
				}
			}
			if refused == 0 {
				t.Error("nothing was refused")
			}
			st := m.end(t)
			for i, w := range writes {
				if !done[i] {
					written(t, st, w)
				}
			}
			if err := st.Check(background); err != nil {
				t.Errorf("check: %v", err)
			}
		})
	}
}

// TestSortedSetsMoveLast: all that a step is asked for with is on the other node already, and
// a sorted set of marks is not. It is not taken for one that has nobody's.
func TestSortedSetsMoveLast(t *testing.T) {
	var version, other uint64
	var again store.Write
	m := newMove(t, func(st *redis.Store) {
		again = crowd(t, st, "a")
		version, other = written(t, st, plain("pay", 0)), written(t, st, plain("other", 0))
	})
	for _, name := range m.keys(t) {
		if len(name) != 25 || name[0] != 'm' {
			m.move(t, name)
		}
	}
	// One whose marks stay as they are, one that gets such a mark, with others of that string
	// or not, and one that loses it.
	again.Nonce = "again"
	joins := plain("pay", version)
	joins.Marks = []store.Mark{{String: "crowd", Tag: "a"}}
	joinsTwice := plain("other", other)
	joinsTwice.Marks = []store.Mark{{String: "crowd", Tag: "a"}, {String: "crowd", Tag: "b"}}
	leaves := plain("a0", 0)
	leaves.Marks, leaves.Expected = nil, version-66
	all := []store.Write{again, joins, joinsTwice, leaves}
	for _, w := range all {
		r, err := m.st.Update(background, w)
		unavailable(t, w.Key, r, err)
		if err != nil && !strings.Contains(err.Error(), "HOLDFASTABSENT") {
			t.Errorf("%s: %v", w.Key, err)
		}
	}
	r, err := m.st.Reserve(background, store.Reserve{Write: plain("pay", version), Probes: []store.Probe{{String: "crowd"}}})
	unavailable(t, "reserve", r, err)
	st := m.end(t)
	for _, w := range all {
		written(t, st, w)
	}
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

// strip takes all from a record that lies in keys which it shares, and its body.
func strip(key string, expected uint64) store.Write {
	w := plain(key, expected)
	w.Record, w.Marks, w.Meters = &store.Record{Header: []byte("header")}, nil, []store.MeterEntry{{Meter: "meter"}, {Meter: "meter 2"}}
	return w
}

// afterwards is what a step may write that one before it has taken away, by its kind.
var afterwards = map[string]func(w *store.Write){
	"all":  func(w *store.Write) { *w = plain(w.Key, w.Expected) },
	"body": func(w *store.Write) { w.Record.Body = []byte("new") },
	"body, and what comes before it": func(w *store.Write) {
		w.Record.Body, w.Marks = []byte("new"), []store.Mark{{String: "crowd", Tag: "b"}}
	},
	"due":    func(w *store.Write) { w.Record.Due = time.Unix(2e9, 0) },
	"held":   func(w *store.Write) { w.Record.Held = true },
	"marks":  func(w *store.Write) { w.Marks = []store.Mark{{String: "mark"}, {String: "mark 2"}} },
	"meters": func(w *store.Write) { w.Meters = []store.MeterEntry{{Meter: "meter", Amount: "3"}} },
	"sorted set of marks": func(w *store.Write) {
		w.Meters, w.Marks = nil, []store.Mark{{String: "new"}, {String: "crowd", Tag: "b"}}
	},
	"record": func(w *store.Write) { w.Record, w.Meters = nil, nil },
}

// TestStepsWhileSlotMoves: what an earlier step of the same script has emptied counts as
// moved for a later one, which is refused before it writes anything.
func TestStepsWhileSlotMoves(t *testing.T) {
	for _, crowded := range []bool{false, true} {
		t.Run(fmt.Sprintf("crowded=%t", crowded), func(t *testing.T) {
			m := newMove(t, func(st *redis.Store) {
				if crowded {
					// Its members share nothing with others but their marks.
					for i := range 66 {
						written(t, st, store.Write{
							Epoch: costID.Epoch, Key: fmt.Sprint("k", i), Nonce: fmt.Sprint("k", i), Record: &store.Record{},
							Marks: []store.Mark{{String: "crowd", Tag: "a"}},
						})
					}
				}
			})
			refused := 0
			for kind, change := range afterwards {
				m.still(t)
				full := plain(kind, 0)
				full.Meters = append(full.Meters, store.MeterEntry{Meter: "meter 2", Amount: "2"})
				if crowded {
					full.Marks = append(full.Marks, store.Mark{String: "crowd", Tag: "b"})
				}
				version := written(t, m.st, full)
				m.begin(t)
				next := strip(kind, version+1)
				change(&next)
				results, errs := m.st.UpdateTogether(strip(kind, version), next)
				if errs[0] != nil || results[0].Outcome != store.Written {
					t.Errorf("%s: strip: %+v, %v", kind, results[0], errs[0])
				}
				if errs[1] != nil {
					refused++
					unavailable(t, kind, results[1], errs[1])
				}
				m.still(t)
				r, _, err := m.st.Get(background, kind)
				whole := next.Record == nil && r == nil || next.Record != nil && r != nil && r.Version == version+2 &&
					string(r.Body) == string(next.Record.Body) && r.Held == next.Record.Held && r.Due.Equal(next.Record.Due)
				none := r != nil && r.Version == version+1 && r.Body == nil && !r.Held && r.Due.IsZero()
				if err != nil || errs[1] == nil && !whole || errs[1] != nil && !none {
					t.Errorf("%s: %v, then %+v, %v", kind, errs[1], r, err)
				}
				if r != nil {
					written(t, m.st, store.Write{Epoch: costID.Epoch, Key: kind, Expected: r.Version, Nonce: "away"})
				}
				m.begin(t)
			}
			if refused < 5 {
				t.Errorf("only %d were refused", refused)
			}
		})
	}
}

// TestStepWhileSlotMoves: a step that takes the last of something and brings the first of
// its kind is no more than one that changes it.
func TestStepWhileSlotMoves(t *testing.T) {
	var version uint64
	m := newMove(t, func(st *redis.Store) { version = written(t, st, plain("one", 0)) })
	w := plain("one", version)
	w.Marks = []store.Mark{{String: "other mark"}}
	w.Meters = []store.MeterEntry{{Meter: "meter"}, {Meter: "meter 2", Amount: "5"}}
	written(t, m.st, w)
	m.end(t)
}

// TestStepsWhereSlotMovesTo: the same on the other node, which has all that was asked for.
func TestStepsWhereSlotMovesTo(t *testing.T) {
	var version uint64
	m := newMove(t, func(st *redis.Store) { version = written(t, st, plain("one", 0)) })
	m.move(t, m.keys(t)...)
	next := plain("one", version+1)
	results, errs := m.st.UpdateTogether(strip("one", version), next)
	if errs[0] != nil || results[0].Outcome != store.Written {
		t.Errorf("strip: %+v, %v", results[0], errs[0])
	}
	if errs[1] != nil {
		unavailable(t, "then", results[1], errs[1])
	}
	r, _, err := m.end(t).Get(background, "one")
	if err != nil || r == nil || (r.Version == version+2) != (errs[1] == nil) || (string(r.Body) == "body") != (errs[1] == nil) {
		t.Errorf("%v, then %+v, %v", errs[1], r, err)
	}
}

// plainName is a hash that stands for itself alone in a pattern.
var plainName = regexp.MustCompile(`^[0-9A-Za-z\x80-\xff!#-&+-.:-@{-~]+$`)

// TestHalfAStep: should a write of a step be refused after others were made, by rights here
// that differ from key to key, then nothing is asked of the store any more.
func TestHalfAStep(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	// The record of one of those whose marks move to a sorted set may be read only.
	last := ""
	for i := 0; ; i++ {
		if key := fmt.Sprint("last", i); plainName.MatchString(redis.Hash(key)) {
			last = key
			break
		}
	}
	for i := range 64 {
		w := plain(fmt.Sprint("k", i), 0)
		w.Marks = []store.Mark{{String: "crowd"}}
		written(t, st, w)
	}
	s.do(t, "ACL", "SETUSER", "limited", "on", ">pw", "+@all", "%R~"+st.Prefix()+"*", "~"+st.Prefix()+"[^r]*", "~"+st.Prefix()+"r"+redis.Hash(last))
	limited := s.open(t, func(o *redis.Options) {
		o.Credentials = func() (string, string, error) { return "limited", "pw", nil }
	})
	w := plain(last, 0)
	w.Marks = []store.Mark{{String: "crowd"}}
	for range 2 {
		r, err := limited.Update(background, w)
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "written by half") {
			t.Errorf("%+v, %v", r, err)
		}
	}
	refuses(t, st, "written by half")
	if err := st.Check(background); err == nil {
		t.Error("check finds nothing")
	}
}
