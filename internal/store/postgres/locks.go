package postgres

// Which locks a write takes, in which order, and which of them it shares. What the
// kinds are, and why that is enough and cannot deadlock, is said at the function write.
//
// A lane, the right of one kind to share a string's lock, is made for a string at which
// calls of this process were often seen to meet.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// digest is how a string is known in an index.
type digest = [16]byte

func digestOf(s string) digest {
	sum := sha256.Sum256([]byte(s))
	return digest(sum[:16])
}

// digestOfTag keeps the empty tag apart.
func digestOfTag(s string) digest {
	if s == "" {
		return digest{}
	}
	return digestOf(s)
}

// kind is how a call uses a string. Two calls of one kind are not in each other's way.
// That of a string which is marked with a tag, and probed except that tag, is the
// tag's digest. Those below are no digest's value that anybody could find.
type kind = digest

var (
	kindAlone = kind{}      // in the way of everybody
	kindMark  = kind{15: 1} // marks only
	kindProbe = kind{15: 2} // probes only
)

// use is a string of a call.
type use struct {
	string digest
	kind   kind
}

// usesOf are sorted by string, each of which comes once.
func usesOf(marks []mark, probes []probe) []use {
	uses := make([]use, 0, len(marks)+len(probes))
	for _, m := range marks {
		uses = append(uses, use{m.digest, kindMark})
	}
	for _, p := range probes {
		uses = append(uses, use{p.digest, kindProbe})
	}
	slices.SortFunc(uses, func(a, b use) int { return bytes.Compare(a.string[:], b.string[:]) })
	out := uses[:0]
	for from := 0; from < len(uses); {
		to := from
		marked, probed := false, false
		for ; to < len(uses) && uses[to].string == uses[from].string; to++ {
			marked, probed = marked || uses[to].kind == kindMark, probed || uses[to].kind == kindProbe
		}
		u := use{uses[from].string, kindMark}
		switch {
		case marked && probed:
			u.kind = ownTag(u.string, marks, probes)
		case probed:
			u.kind = kindProbe
		}
		out = append(out, u)
		from = to
	}
	return out
}

// ownTag is the one tag that the string is marked with and that all its probes except.
func ownTag(s digest, marks []mark, probes []probe) kind {
	var tag digest
	for _, m := range marks {
		if m.digest != s {
			continue
		}
		if m.tag == (digest{}) || (tag != (digest{}) && tag != m.tag) {
			return kindAlone
		}
		tag = m.tag
	}
	for _, p := range probes {
		if p.digest == s && p.except != tag {
			return kindAlone
		}
	}
	return tag
}

// Bits of a lock's number that say what is locked; the function write reads them.
const (
	lockString       = 1
	lockStringShared = 3
)

// number is what all processes must come to: it is part of the format.
func (s *Store) number(d digest) int64 {
	return (int64(binary.BigEndian.Uint64(d[:8])) ^ s.seed) &^ 3
}

// plan is what a write locks, and what it knows and makes of lanes.
type plan struct {
	locks []int64
	// generation is the number under which it knows of the lanes that it relies on; nil:
	// it relies on none.
	generation  *int64
	makeStrings []digest
	makeKinds   []kind
	uses        []use
}

// maxLanes bounds what a process keeps of them; beyond, strings are locked exclusively.
const maxLanes = 100_000

// lanes are those that the process knows, all of one generation.
type lanes struct {
	mu         sync.Mutex
	generation int64
	known      map[digest]kind
	makeAfter  time.Time
	// busy counts the calls of this process that use a string, of one kind; met counts
	// how often one more came while there were others.
	busy map[use]int
	met  map[use]int
	// often is that below.
	often int
}

// begin plans a Reserve; end must follow.
func (s *Store) begin(key digest, marks []mark, probes []probe, share bool) plan {
	p := plan{uses: usesOf(marks, probes), locks: make([]int64, 1, 1+len(marks)+len(probes))}
	l := &s.lanes
	l.mu.Lock()
	for _, u := range p.uses {
		number := s.number(u.string) | lockString
		if u.kind != kindAlone {
			switch {
			case share && l.known[u.string] == u.kind:
				number |= lockStringShared
				if p.generation == nil {
					generation := l.generation
					p.generation = &generation
				}
			case share && l.busy[u] > 0 && l.worthwhile(u):
				p.makeStrings, p.makeKinds = append(p.makeStrings, u.string), append(p.makeKinds, u.kind)
			}
			l.busy[u]++
		}
		p.locks = append(p.locks, number)
	}
	l.mu.Unlock()
	// Two strings may have one number: the stronger lock comes first, and is enough.
	strings := p.locks[1:]
	slices.SortFunc(strings, func(a, b int64) int { return cmp.Or(cmp.Compare(a&^3, b&^3), cmp.Compare(a, b)) })
	strings = slices.CompactFunc(strings, func(a, b int64) bool { return a&^3 == b&^3 })
	p.locks = p.locks[:1+len(strings)]
	p.locks[0] = s.number(key)
	return p
}

// often is how many calls of a process have to meet at a string before a lane is made
// for it: not for the few calls of a session.
const often = 8

// maxMet bounds of how many strings it is known how often calls met there.
const maxMet = 10_000

func (l *lanes) worthwhile(u use) bool {
	if len(l.known) >= maxLanes || time.Now().Before(l.makeAfter) {
		return false
	}
	if len(l.met) >= maxMet {
		clear(l.met)
	}
	l.met[u]++
	return l.met[u] >= l.often
}

// end forgets that a call uses its strings. What it made, if it was written, is known
// from now on, as of the generation that it found.
func (s *Store) end(p plan, made bool, generation int64) {
	l := &s.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range p.uses {
		if u.kind == kindAlone {
			continue
		}
		if l.busy[u]--; l.busy[u] == 0 {
			delete(l.busy, u)
		}
	}
	if !made || len(p.makeStrings) == 0 {
		return
	}
	// If this answer was overtaken by news, the next call that relies on it will say so.
	l.become(generation)
	for i, string := range p.makeStrings {
		l.known[string] = p.makeKinds[i]
	}
}

// quiet is how long no lanes are made after some were taken away, so that two kinds
// that both want one do not spend their time on it.
const quiet = 5 * time.Second

// become forgets the lanes of another generation.
func (l *lanes) become(generation int64) {
	if generation != l.generation {
		l.known, l.generation, l.makeAfter = map[digest]kind{}, generation, time.Now().Add(quiet)
	}
}

// loadLanes reads all lanes, in one snapshot with their generation.
func (s *Store) loadLanes(ctx context.Context) error {
	type found struct {
		generation int64
		known      map[digest]kind
	}
	f, _, err := once(ctx, s, writeID{}, func(ctx context.Context, c *pgx.Conn) (found, error) {
		f := found{known: map[digest]kind{}}
		rows, err := c.Query(ctx, "SELECT m.lanes, l.string, l.kind FROM meta m LEFT JOIN lane l ON true LIMIT $1", maxLanes)
		if err != nil {
			return found{}, err
		}
		var string, of *digest
		_, err = pgx.ForEachRow(rows, []any{&f.generation, &string, &of}, func() error {
			if string != nil {
				f.known[*string] = *of
			}
			return nil
		})
		return f, err
	})
	if err != nil {
		return err
	}
	l := &s.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	l.become(f.generation)
	for string, of := range f.known {
		l.known[string] = of
	}
	return nil
}
