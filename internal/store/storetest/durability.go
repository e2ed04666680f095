package storetest

// For tests that kill the process or the server which holds a store. A Scribe
// writes without end and says what it tries and what was acknowledged; a Journal
// reads that and holds what is found afterwards against it.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	scribes     = 8
	scribedKeys = 5
)

// entry is a line of the journal. The n-th write of a key decides all that is
// written, so that a half one shows.
type entry struct {
	Acknowledged bool
	Key          string
	N            int
	Version      uint64
}

// removes says that the n-th write of a key deletes it.
func removes(n int) bool { return n%7 == 0 }

func scribed(key string, n int) store.Write {
	w := store.Write{Epoch: identity.Epoch, Key: key, Nonce: fmt.Sprint("write ", n)}
	if removes(n) {
		return w
	}
	w.Record = &store.Record{
		Header: []byte(strconv.Itoa(n)),
		Body:   bytes.Repeat([]byte(fmt.Sprint(key, " ", n, "\n")), n%50*20),
		Held:   n%2 == 0, Unsettled: n%3 == 0,
	}
	if n%5 != 0 {
		w.Record.Due = time.Unix(1e9+int64(n), 0)
	}
	for i := range 4 {
		w.Marks = append(w.Marks, store.Mark{String: fmt.Sprint(key, "/", n+i)})
	}
	w.Meters = []store.MeterEntry{{Meter: "sum", Amount: fmt.Sprint(n, ".5")}, {Meter: key, Amount: strconv.Itoa(n)}}
	return w
}

// Scribe writes until the context ends or a write fails, and writes the journal
// to out, a line at a time.
func Scribe(ctx context.Context, s store.Store, out io.Writer) error {
	if _, err := s.Initialise(ctx, identity); err != nil {
		return err
	}
	var mu sync.Mutex
	note := func(e entry) error {
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		_, err = out.Write(append(line, '\n'))
		return err
	}
	errs := make([]error, scribes)
	each(scribes, func(i int) {
		errs[i] = scribe(ctx, s, i, note)
	})
	return errors.Join(errs...)
}

func scribe(ctx context.Context, s store.Store, i int, note func(entry) error) error {
	var versions [scribedKeys]uint64
	var last [scribedKeys]int
	for k := range scribedKeys {
		r, _, err := s.Get(ctx, scribedKey(i, k))
		if err != nil {
			return err
		}
		if r == nil {
			// The number of a deleted one is not known: it starts over.
			continue
		}
		versions[k] = r.Version
		if last[k], err = strconv.Atoi(string(r.Header)); err != nil {
			return err
		}
	}
	for n := 0; ; n++ {
		k := n % scribedKeys
		key := scribedKey(i, k)
		last[k]++
		w := scribed(key, last[k])
		w.Expected = versions[k]
		if err := note(entry{Key: key, N: last[k]}); err != nil {
			return err
		}
		result, err := s.Update(ctx, w)
		if err != nil {
			return err
		}
		if result.Outcome != store.Written {
			return fmt.Errorf("write %d of %q: %+v", last[k], key, result)
		}
		versions[k] = result.Version
		if err := note(entry{Acknowledged: true, Key: key, N: last[k], Version: result.Version}); err != nil {
			return err
		}
	}
}

func scribedKey(i, k int) string { return fmt.Sprintf("scribe %d key %d", i, k) }

// Journal is what is known of the writes of all Scribes on one store.
type Journal struct {
	mu    sync.Mutex
	tried map[string]int
	acked map[string]int
	// versions is the highest acknowledged one.
	versions uint64
	acks     int
}

// NewJournal is that of an empty store.
func NewJournal() *Journal {
	return &Journal{tried: map[string]int{}, acked: map[string]int{}}
}

// Read takes in what a Scribe writes, until its end; a line cut short is not taken.
func (j *Journal) Read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("journal line %q: %w", line, err)
		}
		j.mu.Lock()
		j.tried[e.Key] = e.N
		if e.Acknowledged {
			j.acked[e.Key] = e.N
			j.versions = max(j.versions, e.Version)
			j.acks++
		}
		j.mu.Unlock()
	}
}

// Acknowledged counts the writes that were, in all.
func (j *Journal) Acknowledged() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.acks
}

// Verify holds the store against the journal: every key is as its last
// acknowledged write made it, or as the one after it would have, and whole.
func (j *Journal) Verify(t testing.TB, s store.Store) {
	t.Helper()
	f := &fixture{TB: t, s: s}
	sum := rat(f, "0")
	held, due := 0, 0
	highest := j.versions
	for i := range scribes {
		for k := range scribedKeys {
			key := scribedKey(i, k)
			r, _ := f.get(key)
			acked, tried := j.acked[key], j.tried[key]
			n := -1
			for _, candidate := range []int{acked, tried} {
				absent := candidate == 0 || removes(candidate)
				if r == nil && absent || r != nil && !absent && string(r.Header) == strconv.Itoa(candidate) {
					n = candidate
				}
			}
			if n < 0 {
				t.Errorf("%q: write %d was acknowledged, %d tried; there is %+v", key, acked, tried, r)
				continue
			}
			for _, other := range []int{acked, tried} {
				w := scribed(key, other)
				for _, m := range w.Marks {
					result := f.probe(nil, store.Probe{String: m.String})
					want := false
					if r != nil {
						for _, own := range scribed(key, n).Marks {
							want = want || own.String == m.String
						}
					}
					if hit := result.HitCount > 0; hit != want {
						t.Errorf("%q is as of write %d: mark %q is hit: %t", key, n, m.String, hit)
					}
				}
			}
			if r == nil {
				f.sum(key, "0")
				// The next Scribe cannot tell how far an absent key had come.
				j.acked[key], j.tried[key] = 0, 0
				continue
			}
			j.acked[key], j.tried[key] = n, n
			w := scribed(key, n)
			want := *w.Record
			want.Key, want.Nonce, want.Version, want.At = key, w.Nonce, r.Version, r.At
			if err := sameRecord(&want, r); err != nil {
				t.Error(err)
			}
			f.sum(key, strconv.Itoa(n))
			sum.Add(sum, rat(f, fmt.Sprint(n, ".5")))
			if r.Held {
				held++
			}
			if !r.Due.IsZero() {
				due++
			}
			highest = max(highest, r.Version)
		}
	}
	if have := f.meter("sum"); have.Cmp(sum) != 0 {
		t.Errorf("the meter of all is %s, the records come to %s", have.RatString(), sum.RatString())
	}
	if n := len(f.list(store.List{What: store.ListHeld, Limit: 9})); n != held {
		t.Errorf("%d are listed as held, %d are", n, held)
	}
	if n := len(f.list(store.List{What: store.ListDue, Before: time.Unix(2e9, 0), Limit: 9})); n != due {
		t.Errorf("%d are listed as due, %d are", n, due)
	}
	w := f.write("after the crash", 0)
	w.Nonce = fmt.Sprint("after version ", highest)
	result := f.update(w)
	f.outcome(result, store.Written)
	if result.Version <= highest {
		t.Errorf("version %d after the crash, %d was given before it", result.Version, highest)
	}
	f.remove(w.Key, result.Version)
	j.versions = max(j.versions, result.Version)
}
