package bolt

// Which records a Reserve's probes hit. The marks of one string lie in the order
// of their records' numbers, so the probes' cursors are merged: each record comes
// up once, with all probes that hit it, and memory is bounded by the probes and by
// store.MaxHits however many records there are.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// stream walks the records that one probe hits, by ascending number.
type stream struct {
	cursor *bbolt.Cursor
	prefix []byte
	except []byte
	// k and v are the entry that comes next.
	k, v []byte
	// id is the record hit; 0 at the end.
	id uint64
}

// advance goes to the next record other than own that has a mark which is not
// excepted, not over and not covered.
func (s *stream) advance(own, covered uint64, now int64) error {
	last := s.id
	s.id = 0
	for ; s.k != nil && bytes.HasPrefix(s.k, s.prefix); s.k, s.v = s.cursor.Next() {
		rest := s.k[len(s.prefix):]
		if len(rest) < 8 || len(s.v) != 16 {
			return fmt.Errorf("%w: mark", errDamaged)
		}
		id, tag := binary.BigEndian.Uint64(rest), rest[8:]
		stamp, until := binary.BigEndian.Uint64(s.v), int64(binary.BigEndian.Uint64(s.v[8:]))
		switch {
		case id == own, id == last:
		case len(s.except) > 0 && bytes.Equal(tag, s.except):
		case until != 0 && now >= until:
		case stamp <= covered:
		default:
			s.id = id
			return nil
		}
	}
	return nil
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
	streams := make([]stream, len(probes))
	for i, p := range probes {
		s := &streams[i]
		*s = stream{cursor: t.marks.Cursor(), prefix: sized(nil, p.String), except: []byte(p.Except)}
		s.k, s.v = s.cursor.Seek(s.prefix)
		if err := s.advance(own, covered, ms); err != nil {
			return store.Result{}, err
		}
	}
	result := store.Result{ProbeHits: make([]bool, len(probes))}
	best := make([]candidate, 0, store.MaxHits)
	ranks, key := t.facts.Cursor(), make([]byte, 8)
	var next candidate
	for {
		next.id, next.first, next.probes = 0, false, next.probes[:0]
		for i := range streams {
			if id := streams[i].id; id != 0 && (next.id == 0 || id < next.id) {
				next.id = id
			}
		}
		if next.id == 0 {
			break
		}
		for i := range streams {
			if streams[i].id != next.id {
				continue
			}
			result.ProbeHits[i] = true
			next.first = next.first || probes[i].First
			next.probes = append(next.probes, i)
			if err := streams[i].advance(own, covered, ms); err != nil {
				return store.Result{}, err
			}
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
		f, err := decodeFacts(t.facts.Get(number(c.id)))
		if err != nil {
			return store.Result{}, err
		}
		result.Hits = append(result.Hits, store.Hit{Record: *t.record(c.id, f, false), Probes: c.probes})
	}
	return result, nil
}
