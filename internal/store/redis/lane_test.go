package redis_test

// Steps that travel together.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// TestSecondQuestion: a second question goes once it has half as many steps as the first, and
// a third one waits.
func TestSecondQuestion(t *testing.T) {
	for _, row := range []struct {
		questions, steps, waiting int
		goes                      bool
	}{
		{0, 0, 1, true},
		{1, 0, 20, false}, {1, 1, 1, false}, {1, 1, 3, false}, {1, 1, 4, true},
		{1, 8, 3, false}, {1, 8, 4, true},
		{1, 32, 15, false}, {1, 32, 16, true}, {1, 31, 15, false}, {1, 31, 16, true},
		{2, 48, 32, false}, {3, 1, 32, false},
	} {
		if goes := redis.Goes(row.questions, row.steps, row.waiting); goes != row.goes {
			t.Errorf("%+v: %t", row, goes)
		}
	}
}

// TestTogether: each of many steps that come at once has its own outcome, whatever becomes
// of the others.
func TestTogether(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	client := s.client(t)
	spoilt := st.Prefix() + "r" + redis.Hash("k7")
	if err := client.Do(background, client.B().Lpush().Key(spoilt).Element("x").Build()).Error(); err != nil {
		t.Fatal(err)
	}
	const writers = 60
	before := s.calls(t)
	s.signal(t, syscall.SIGSTOP)
	results, errs := make([]store.Result, writers), make([]error, writers)
	var group sync.WaitGroup
	for i := range writers {
		group.Go(func() {
			switch i % 10 {
			case 3: // taken by "present"
				results[i], errs[i] = st.Reserve(background, store.Reserve{
					Write: plain(fmt.Sprint("k", i), 0), Probes: []store.Probe{{String: "mark of present"}},
				})
			case 4: // no such version
				results[i], errs[i] = st.Update(background, plain("present", 99))
			case 5: // no room
				w := plain(fmt.Sprint("k", i), 0)
				w.Meters = []store.MeterEntry{{Meter: "small", Amount: "2", Limit: "1"}}
				results[i], errs[i] = st.Update(background, w)
			case 6: // nobody gave this watermark
				_, errs[i] = st.Reserve(background, store.Reserve{Write: plain(fmt.Sprint("k", i), 0), PassedOver: []store.Watermark{"1000000"}})
			default:
				results[i], errs[i] = st.Update(background, plain(fmt.Sprint("k", i), 0))
			}
		})
	}
	s.signal(t, syscall.SIGCONT)
	group.Wait()
	versions := map[uint64]bool{}
	for i := range writers {
		r, err := results[i], errs[i]
		switch {
		case i == 7:
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "another program") {
				t.Errorf("%d: %+v, %v, of a key of another type", i, r, err)
			}
			continue
		case i%10 == 6:
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%d: %v, of a watermark from nowhere", i, err)
			}
			continue
		case err != nil:
			t.Errorf("%d: %v", i, err)
			continue
		}
		want := store.Written
		switch i % 10 {
		case 3:
			want = store.Blocked
			if r.HitCount != 1 || r.Hits[0].Record.Key != "present" {
				t.Errorf("%d hits %+v", i, r.Hits)
			}
		case 4:
			want = store.Mismatch
			if r.Record == nil || r.Record.Key != "present" {
				t.Errorf("%d meets %+v", i, r.Record)
			}
		case 5:
			want = store.OverLimit
			if r.Meter != "small" {
				t.Errorf("%d: the meter %q is full", i, r.Meter)
			}
		default:
			if versions[r.Version] {
				t.Errorf("%d: version %d was given twice", i, r.Version)
			}
			versions[r.Version] = true
		}
		if r.Outcome != want {
			t.Errorf("%d: %v, want %v", i, r.Outcome, want)
		}
	}
	if n := s.calls(t) - before; n > writers/2 {
		t.Errorf("%d steps took %d scripts", writers, n)
	}
	if err := client.Do(background, client.B().Del().Key(spoilt).Build()).Error(); err != nil {
		t.Fatal(err)
	}
	// Reads, too, of what was written and what was not.
	for i := range writers {
		group.Go(func() {
			record, _, err := st.Get(background, fmt.Sprint("k", i))
			written := i != 7 && (i%10 < 3 || i%10 > 6)
			if err != nil || (record != nil) != written {
				t.Errorf("k%d: %+v, %v", i, record, err)
			} else if written && (string(record.Body) != "body" || record.Key != fmt.Sprint("k", i) || record.Version != results[i].Version) {
				t.Errorf("k%d: %+v", i, record)
			}
		})
	}
	group.Wait()
	if err := st.Check(background); err != nil {
		t.Errorf("check: %v", err)
	}
}

// TestOneReadOfMany: what is wrong with one record is not told to those who read others.
func TestOneReadOfMany(t *testing.T) {
	s := newServer(t)
	st := s.used(t)
	s.do(t, "LPUSH", st.Prefix()+"r"+redis.Hash("spoilt"), "x")
	s.signal(t, syscall.SIGSTOP)
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			if i == 10 {
				if _, _, err := st.Get(background, "spoilt"); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "another program") {
					t.Errorf("a key of another type: %v", err)
				}
			} else if r, _, err := st.Get(background, "present"); err != nil || r == nil || string(r.Body) != "body" {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	s.signal(t, syscall.SIGCONT)
	group.Wait()
}

// TestLeftBehind: a step whose caller has left is not asked for again with those beside it
// that came too late.
func TestLeftBehind(t *testing.T) {
	s := newServer(t)
	s.used(t)
	h := newHolder(t, s)
	st := s.open(t, h.pair)
	for range 2 {
		if _, err := st.Standing(background); err != nil {
			t.Fatal(err)
		}
	}
	bytes, release := h.hold(1)
	var group, leaving sync.WaitGroup
	var left sync.Map
	for i := range 40 {
		key := fmt.Sprint("k", i)
		if i%4 < 2 {
			group.Go(func() {
				if r, err := st.Update(background, plain(key, 0)); err != nil || r.Outcome != store.Written {
					t.Errorf("%+v, %v", r, err)
				}
			})
			continue
		}
		leaving.Go(func() {
			// In less than this the other connection's answers are there.
			short, cancel := context.WithTimeout(background, 2*time.Second)
			defer cancel()
			if _, err := st.Update(short, plain(key, 0)); err != nil {
				left.Store(key, true)
			}
		})
	}
	s.eventually(t, "some are under way", func() error {
		if bytes() == 0 {
			return errors.New("nothing was sent")
		}
		return nil
	})
	leaving.Wait()
	answered := make(chan error, 2)
	for range 2 {
		group.Go(func() { _, err := st.Standing(background); answered <- err })
	}
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	release()
	group.Wait()
	n := 0
	left.Range(func(key, _ any) bool {
		n++
		if r, _, err := st.Get(background, key.(string)); err != nil || r != nil {
			t.Errorf("%s was written after its caller had left: %+v, %v", key, r, err)
		}
		return true
	})
	if n == 0 {
		t.Error("nobody has left")
	}
	s.works(t, st)
}
