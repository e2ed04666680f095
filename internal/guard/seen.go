// This file remembers of which intents this process has seen a record. A call of one
// of these is most likely a retry, so the record is read first, which costs far less
// than to offer a Reserve that is refused. It is a guess and decides nothing: without
// a record the Reserve follows, and says what it always says.

package guard

import (
	"hash/maphash"
	"sync/atomic"
)

// At most seenPages times seenPage intents are remembered; a newer one takes the place
// of an older one, so there are far more places than intents that are retried. A page is
// made when it is needed; all of them are 4 MiB.
const (
	seenPages = 1024
	seenPage  = 512
)

var seenSeed = maphash.MakeSeed()

// seen is a set of keys. What it names was put in, but for a collision of 64 bits.
type seen [seenPages]atomic.Pointer[[seenPage]atomic.Uint64]

func (s *seen) add(key string) {
	h := maphash.String(seenSeed, key)
	page := s[h%seenPages].Load()
	if page == nil {
		s[h%seenPages].CompareAndSwap(nil, new([seenPage]atomic.Uint64))
		page = s[h%seenPages].Load()
	}
	page[h/seenPages%seenPage].Store(h)
}

func (s *seen) has(key string) bool {
	h := maphash.String(seenSeed, key)
	page := s[h%seenPages].Load()
	return page != nil && page[h/seenPages%seenPage].Load() == h
}
