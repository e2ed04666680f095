package bolt

// What a Reserve costs that is not in anybody's way, counted in moves of cursors: the
// same however many marks lie beside it.

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// steps are the moves of cursors that the probes of a Reserve take.
func steps(t *testing.T, s *Store, r store.Reserve, want store.Outcome) int {
	t.Helper()
	moved := 0
	a, err := s.submit(context.Background(), 0, func(tx *txn) (answer, error) {
		st := newStep(r.Write)
		st.probes, st.passedOver = r.Probes, r.PassedOver
		result, err := tx.apply(st)
		moved = tx.steps
		return answer{result: result}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if a.result.Outcome != want {
		t.Fatalf("%+v, want %s", a.result, want)
	}
	return moved
}

func TestProbesJump(t *testing.T) {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	past, future := start.Add(time.Hour), start.Add(72*time.Hour)
	for name, c := range map[string]struct {
		// marks of the i-th record that lies there, and what is asked.
		marks func(i int) []store.Mark
		probe store.Probe
		// most moves: to the string, with an end and without, past each of its groups.
		most int
	}{
		"excepted tag": {
			func(i int) []store.Mark { return []store.Mark{{String: "tool", Tag: "same", Until: future}} },
			store.Probe{String: "tool", Except: "same"}, 3,
		},
		"time over": {
			func(i int) []store.Mark { return []store.Mark{{String: "customer", Until: past}} },
			store.Probe{String: "customer"}, 3,
		},
		"time over, and an excepted tag": {
			func(i int) []store.Mark {
				return []store.Mark{
					{String: "tool", Until: past.Add(time.Duration(-i) * time.Second)},
					{String: "tool", Tag: "same"}, {String: "tool", Tag: "other", Until: past},
				}
			},
			store.Probe{String: "tool", Except: "same"}, 5,
		},
		"other strings": {
			func(i int) []store.Mark { return []store.Mark{{String: fmt.Sprint("customer", i)}, {String: "c"}} },
			store.Probe{String: "customer"}, 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var micros atomic.Int64
			micros.Store(start.UnixMicro())
			s, err := Open(filepath.Join(t.TempDir(), "store.db"), Options{
				Clock: func() time.Time { return time.UnixMicro(micros.Load()) }, NoSync: true,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			ctx := context.Background()
			if _, err := s.Initialise(ctx, testIdentity); err != nil {
				t.Fatal(err)
			}
			const n = 2000
			if _, err := s.submit(ctx, 0, func(tx *txn) (answer, error) {
				for i := range n {
					w := testWrite(fmt.Sprint(i))
					w.Marks = c.marks(i)
					if _, err := tx.apply(newStep(w)); err != nil {
						return answer{}, err
					}
				}
				return answer{}, nil
			}); err != nil {
				t.Fatal(err)
			}
			micros.Add(2 * time.Hour.Microseconds())
			r := store.Reserve{Write: testWrite("new"), Probes: []store.Probe{c.probe}}
			if moved := steps(t, s, r, store.Written); moved > c.most {
				t.Errorf("%d moves past %d records, want %d at most", moved, n, c.most)
			}

			// Nothing is jumped over that is hit: one mark of another tag, between all others.
			w := testWrite("in the way")
			w.Marks = []store.Mark{{String: c.probe.String, Tag: "hit", Until: future}}
			if _, err := s.Update(ctx, w); err != nil {
				t.Fatal(err)
			}
			r.Write = testWrite("newer")
			if moved := steps(t, s, r, store.Blocked); moved > c.most+2 {
				t.Errorf("%d moves with one hit, want %d at most", moved, c.most+2)
			}
			// One of the jumped over groups is hit as soon as a mark of it stands.
			w = testWrite("standing")
			w.Marks = []store.Mark{c.marks(0)[0]}
			w.Marks[0].Until = future
			if _, err := s.Update(ctx, w); err != nil {
				t.Fatal(err)
			}
			want := 1
			if m := w.Marks[0]; m.String == c.probe.String && (c.probe.Except == "" || m.Tag != c.probe.Except) {
				want = 2
			}
			result, err := s.Reserve(ctx, r)
			if err != nil || result.HitCount != want {
				t.Errorf("%d hits, want %d: %v", result.HitCount, want, err)
			}
			if err := s.Check(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}
