package bolt

// Which records a Reserve's probes hit. The numbers of all hits are read, which are
// few unless the Reserve is refused, in runs that are sorted; then the runs are merged:
// each record comes up once, with all probes that hit it. Memory is eight bytes for
// each hit, and what is told of store.MaxHits records.

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// maxRun is how many numbers are sorted at a time.
const maxRun = 1024

// run is a part of what one probe hits: numbers of records, ascending.
type run struct {
	ids   []uint64
	probe int
}

// runs are a heap, the lowest number first and of equal ones the lowest probe.
type runs []run

func (r runs) Len() int { return len(r) }

func (r runs) Less(i, j int) bool {
	if a, b := r[i].ids[0], r[j].ids[0]; a != b {
		return a < b
	}
	return r[i].probe < r[j].probe
}

func (r runs) Swap(i, j int) { r[i], r[j] = r[j], r[i] }

func (r *runs) Push(x any) { *r = append(*r, x.(run)) }

func (r *runs) Pop() any {
	last := (*r)[len(*r)-1]
	*r = (*r)[:len(*r)-1]
	return last
}

// next takes the lowest number off.
func (r *runs) next() {
	top := &(*r)[0]
	if top.ids = top.ids[1:]; len(top.ids) == 0 {
		heap.Pop(r)
		return
	}
	heap.Fix(r, 0)
}

// read appends runs of the records other than own that the probe hits: which have a
// mark that is not excepted, not over and not covered.
func (t *txn) read(found runs, probe int, p store.Probe, own, covered uint64, now int64) (runs, error) {
	text := appendHash(nil, p.String)
	var except []byte
	if p.Except != "" {
		except = appendGroup(nil, p.String, p.Except)
	}
	var ids []uint64
	end := func() {
		if len(ids) > 0 {
			slices.Sort(ids)
			found = append(found, run{ids, probe})
			ids = nil
		}
	}
	var c *bbolt.Cursor
	seek := func(key []byte) (k, v []byte) {
		t.steps++
		return c.Seek(key)
	}
	for _, b := range []*bbolt.Bucket{t.endless(), t.marks()} {
		c = b.Cursor()
		for k, v := seek(text); bytes.HasPrefix(k, text); {
			n := groupSize(k)
			if n == 0 {
				return nil, fmt.Errorf("%w: mark", errDamaged)
			}
			group := clone(k[:n])
			if bytes.Equal(group, except) {
				// Nothing of the group lies behind this, which is longer than any key of it.
				k, v = seek(append(group, bytes.Repeat([]byte{0xff}, endSize+8+1)...))
				continue
			}
			if first := appendEnd(group, now+1); bytes.Compare(k, first) < 0 {
				k, v = seek(first)
			}
			for bytes.HasPrefix(k, group) {
				if len(k) != n+endSize+8 || len(v) != 8 {
					return nil, fmt.Errorf("%w: mark", errDamaged)
				}
				id := binary.BigEndian.Uint64(k[n+endSize:])
				if id != own && binary.BigEndian.Uint64(v) > covered {
					if ids = append(ids, id); len(ids) == maxRun {
						end()
						ids = make([]uint64, 0, maxRun)
					}
				}
				t.steps++
				k, v = c.Next()
			}
		}
	}
	end()
	return found, nil
}

// candidate is a hit that may be among those returned.
type candidate struct {
	id        uint64
	first     bool
	unsettled bool
	version   uint64
	probes    []int
}

// compare orders the most telling hit first.
func compare(a, b candidate) int {
	switch {
	case a.first != b.first:
		return order(a.first)
	case a.unsettled != b.unsettled:
		return order(a.unsettled)
	case a.version > b.version:
		return -1
	case a.version < b.version:
		return 1
	}
	return 0
}

func order(before bool) int {
	if before {
		return -1
	}
	return 1
}

// hits fills Hits, HitCount and ProbeHits.
func (t *txn) hits(probes []store.Probe, own, covered uint64, now time.Time) (store.Result, error) {
	ms := now.UnixMilli()
	var found runs
	for i, p := range probes {
		var err error
		if found, err = t.read(found, i, p, own, covered, ms); err != nil {
			return store.Result{}, err
		}
	}
	heap.Init(&found)
	result := store.Result{ProbeHits: make([]bool, len(probes))}
	best := make([]candidate, 0, store.MaxHits)
	ranks, key := t.facts().Cursor(), make([]byte, 8)
	var next candidate
	for len(found) > 0 {
		next.id, next.first, next.probes = found[0].ids[0], false, next.probes[:0]
		for ; len(found) > 0 && found[0].ids[0] == next.id; found.next() {
			i := found[0].probe
			// A record may have marks of one string in several groups.
			if n := len(next.probes); n > 0 && next.probes[n-1] == i {
				continue
			}
			result.ProbeHits[i] = true
			next.first = next.first || probes[i].First
			next.probes = append(next.probes, i)
		}
		result.HitCount++
		binary.BigEndian.PutUint64(key, next.id)
		k, f := ranks.Seek(key)
		if !bytes.Equal(k, key) || len(f) < factsFixed {
			return store.Result{}, fmt.Errorf("%w: mark of a record that is not there", errDamaged)
		}
		next.version, next.unsettled = rankOf(f)
		at, _ := slices.BinarySearchFunc(best, next, compare)
		switch {
		case len(best) < store.MaxHits:
			best = slices.Insert(best, at, next)
			next.probes = nil
		case at < store.MaxHits:
			dropped := best[store.MaxHits-1].probes
			copy(best[at+1:], best[at:])
			best[at] = next
			next.probes = dropped
		}
	}
	for _, c := range best {
		f, err := decodeFacts(t.facts().Get(number(c.id)))
		if err != nil {
			return store.Result{}, err
		}
		result.Hits = append(result.Hits, store.Hit{Record: *t.record(c.id, f, false), Probes: c.probes})
	}
	return result, nil
}
