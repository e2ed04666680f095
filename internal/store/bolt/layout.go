package bolt

// How records lie in the file.
//
// Every record has a number, the sequence at its creation, which is never used
// again; the indexes name it instead of the key. Strings are opaque and may hold
// any byte. Those of marks and their tags are hashed. Numbers are big-endian, so that
// they sort.
//
//	meta     format, epoch, key domain, sequence
//	keys     key → number
//	facts    number → version, times, flags, nonce, key
//	headers  number → header
//	bodies   number → body
//	marks    string, tag, end, number → stamp
//	endless  string, tag, end, number → stamp: of the marks that have no end
//	owned    number → string, tag, end of each of its marks, ascending
//	due      milliseconds, number → nothing
//	held     key → number
//	sums     meter → decimal, never 0
//	entries  number, meter → decimal, never 0
//
// Facts, header and body lie apart: thousands of hits are ranked by their facts
// alone, and a list never touches a body.
//
// The marks of one string and tag are a group, and lie in it by their ends. A probe
// jumps over the group that it excepts and over the marks whose time is over, however
// many they are. Those without an end are mostly of payments in flight and so few: they
// lie apart, so that a payment changes pages all over the many only once, when it settles.

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// format changes with every change to this layout.
const format = "2"

// The buckets' places in buckets.
const (
	inMeta = iota
	inKeys
	inFacts
	inHeaders
	inBodies
	inMarks
	inEndless
	inOwned
	inDue
	inHeld
	inSums
	inEntries
	bucketCount
)

var (
	buckets = [bucketCount][]byte{
		inMeta:    []byte("meta"),
		inKeys:    []byte("keys"),
		inFacts:   []byte("facts"),
		inHeaders: []byte("headers"),
		inBodies:  []byte("bodies"),
		inMarks:   []byte("marks"),
		inEndless: []byte("endless"),
		inOwned:   []byte("owned"),
		inDue:     []byte("due"),
		inHeld:    []byte("held"),
		inSums:    []byte("sums"),
		inEntries: []byte("entries"),
	}

	metaFormat    = []byte("format")
	metaEpoch     = []byte("epoch")
	metaKeyDomain = []byte("keyDomain")
	metaSequence  = []byte("sequence")
)

var errDamaged = errors.New("the store's file is damaged")

// txn is a bolt transaction with its buckets. All changes go through put and
// remove, so that it is known whether a step has begun to write.
type txn struct {
	btx     *bbolt.Tx
	now     func() time.Time
	changes int
	// steps counts how often a probe's cursor was moved.
	steps int

	// opened are the buckets that were asked for: to look one up costs about as much as to
	// read from it, and most steps need a few of them only.
	opened [bucketCount]*bbolt.Bucket
}

func newTxn(btx *bbolt.Tx, now func() time.Time) *txn { return &txn{btx: btx, now: now} }

func (t *txn) bucket(i int) *bbolt.Bucket {
	if t.opened[i] == nil {
		t.opened[i] = t.btx.Bucket(buckets[i])
	}
	return t.opened[i]
}

func (t *txn) meta() *bbolt.Bucket    { return t.bucket(inMeta) }
func (t *txn) keys() *bbolt.Bucket    { return t.bucket(inKeys) }
func (t *txn) facts() *bbolt.Bucket   { return t.bucket(inFacts) }
func (t *txn) headers() *bbolt.Bucket { return t.bucket(inHeaders) }
func (t *txn) bodies() *bbolt.Bucket  { return t.bucket(inBodies) }
func (t *txn) marks() *bbolt.Bucket   { return t.bucket(inMarks) }
func (t *txn) endless() *bbolt.Bucket { return t.bucket(inEndless) }
func (t *txn) owned() *bbolt.Bucket   { return t.bucket(inOwned) }
func (t *txn) due() *bbolt.Bucket     { return t.bucket(inDue) }
func (t *txn) held() *bbolt.Bucket    { return t.bucket(inHeld) }
func (t *txn) sums() *bbolt.Bucket    { return t.bucket(inSums) }
func (t *txn) entries() *bbolt.Bucket { return t.bucket(inEntries) }

func (t *txn) put(b *bbolt.Bucket, key, value []byte) error {
	t.changes++
	return b.Put(key, value)
}

func (t *txn) remove(b *bbolt.Bucket, key []byte) error {
	t.changes++
	return b.Delete(key)
}

// putOrRemove leaves no empty values behind.
func (t *txn) putOrRemove(b *bbolt.Bucket, key, value []byte) error {
	if len(value) == 0 {
		if b.Get(key) == nil {
			return nil
		}
		return t.remove(b, key)
	}
	return t.put(b, key, value)
}

func (t *txn) identity() store.Identity {
	return store.Identity{Epoch: string(t.meta().Get(metaEpoch)), KeyDomain: string(t.meta().Get(metaKeyDomain))}
}

// sequence is the number of the last write.
func (t *txn) sequence() (uint64, error) {
	v := t.meta().Get(metaSequence)
	switch len(v) {
	case 0:
		return 0, nil
	case 8:
		return binary.BigEndian.Uint64(v), nil
	}
	return 0, fmt.Errorf("%w: sequence of %d bytes", errDamaged, len(v))
}

func number(n uint64) []byte {
	return binary.BigEndian.AppendUint64(nil, n)
}

// sized appends a string with its length before it.
func sized(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}

// cutSized takes a string with its length off the front.
func cutSized(b []byte) (s, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	n := int(binary.BigEndian.Uint16(b))
	if len(b) < 2+n {
		return nil, nil, false
	}
	return b[2 : 2+n], b[2+n:], true
}

const (
	// A collision of two strings' hashes makes a probe hit too much, and one of two
	// tags' too little: neither is found in the age of the universe.
	hashSize = 16
	endSize  = 8

	markUntagged = 0
	markTagged   = 1
)

var noEnd = appendEnd(nil, 0)

// appendHash appends what a string is known by in the file.
func appendHash(b []byte, text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return append(b, sum[:hashSize]...)
}

// appendGroup appends what the marks of one string and tag have in common.
func appendGroup(b []byte, text, tag string) []byte {
	b = appendHash(b, text)
	if tag == "" {
		return append(b, markUntagged)
	}
	return appendHash(append(b, markTagged), tag)
}

// groupSize is the length of the group at the front of b; 0 if there is none.
func groupSize(b []byte) int {
	n := hashSize + 1
	if len(b) < n {
		return 0
	}
	switch b[hashSize] {
	case markUntagged:
		return n
	case markTagged:
		if n += hashSize; len(b) >= n {
			return n
		}
	}
	return 0
}

// appendEnd appends the millisecond at which a mark is over; 0, never, sorts last.
func appendEnd(b []byte, until int64) []byte {
	if until == 0 {
		return binary.BigEndian.AppendUint64(b, math.MaxUint64)
	}
	// Also one before 1970 comes before all later ones.
	return binary.BigEndian.AppendUint64(b, uint64(until)^1<<63)
}

// cutMark takes a mark, its group and end, off the front of those of a record.
func cutMark(b []byte) (mark, rest []byte, ok bool) {
	n := groupSize(b)
	if n == 0 || len(b) < n+endSize {
		return nil, nil, false
	}
	n += endSize
	return b[:n], b[n:], true
}

// bucketOf is where a mark lies: group and end, and maybe more of its key.
func (t *txn) bucketOf(mark []byte) *bbolt.Bucket {
	if n := groupSize(mark); bytes.Equal(mark[n:n+endSize], noEnd) {
		return t.endless()
	}
	return t.marks()
}

func markKey(mark []byte, id uint64) []byte {
	b := append(make([]byte, 0, len(mark)+8), mark...)
	return binary.BigEndian.AppendUint64(b, id)
}

func entryKey(id uint64, meter string) []byte {
	return append(number(id), meter...)
}

func dueKey(due int64, id uint64) []byte {
	return binary.BigEndian.AppendUint64(number(uint64(due)), id)
}

// facts is what is kept of a record apart from header and body. At is in
// microseconds and due in milliseconds since 1970; due is 0 for none.
type facts struct {
	version   uint64
	at        int64
	due       int64
	held      bool
	unsettled bool
	nonce     string
	key       string
}

const (
	flagHeld = 1 << iota
	flagUnsettled

	// factsFixed is the length of what comes before the nonce: version, at, due, flags.
	factsFixed = 8 + 8 + 8 + 1
)

func (f facts) encode() []byte {
	b := make([]byte, 0, factsFixed+2+len(f.nonce)+len(f.key))
	b = binary.BigEndian.AppendUint64(b, f.version)
	b = binary.BigEndian.AppendUint64(b, uint64(f.at))
	b = binary.BigEndian.AppendUint64(b, uint64(f.due))
	var flags byte
	if f.held {
		flags |= flagHeld
	}
	if f.unsettled {
		flags |= flagUnsettled
	}
	return append(sized(append(b, flags), f.nonce), f.key...)
}

func decodeFacts(b []byte) (facts, error) {
	if len(b) < factsFixed {
		return facts{}, fmt.Errorf("%w: facts of %d bytes", errDamaged, len(b))
	}
	nonce, key, ok := cutSized(b[factsFixed:])
	if !ok {
		return facts{}, fmt.Errorf("%w: facts without nonce", errDamaged)
	}
	version, unsettled := rankOf(b)
	return facts{
		version:   version,
		at:        int64(binary.BigEndian.Uint64(b[8:])),
		due:       int64(binary.BigEndian.Uint64(b[16:])),
		held:      b[24]&flagHeld != 0,
		unsettled: unsettled,
		nonce:     string(nonce),
		key:       string(key),
	}, nil
}

// rankOf reads what hits are ordered by out of encoded facts.
func rankOf(b []byte) (version uint64, unsettled bool) {
	return binary.BigEndian.Uint64(b), b[24]&flagUnsettled != 0
}

// find returns a record's number and facts; 0 if it is absent.
func (t *txn) find(key string) (uint64, facts, error) {
	v := t.keys().Get([]byte(key))
	if v == nil {
		return 0, facts{}, nil
	}
	if len(v) != 8 {
		return 0, facts{}, fmt.Errorf("%w: record number of %d bytes", errDamaged, len(v))
	}
	id := binary.BigEndian.Uint64(v)
	f, err := decodeFacts(t.facts().Get(v))
	return id, f, err
}

// record builds a record out of the file, with copies of its own.
func (t *txn) record(id uint64, f facts, body bool) *store.Record {
	r := &store.Record{
		Key: f.key, Version: f.version, Nonce: f.nonce, At: time.UnixMicro(f.at).UTC(),
		Held: f.held, Unsettled: f.unsettled,
		Header: clone(t.headers().Get(number(id))),
	}
	if f.due != 0 {
		r.Due = time.UnixMilli(f.due).UTC()
	}
	if body {
		r.Body = clone(t.bodies().Get(number(id)))
	}
	return r
}

// clone copies what must outlive its transaction or its caller; empty is nil.
func clone(b []byte) []byte {
	return append([]byte(nil), b...)
}

// milliseconds is a time as it is kept, rounded down, or up if ceil; 0: none.
func milliseconds(t time.Time, ceil bool) int64 {
	if t.IsZero() {
		return 0
	}
	ms := t.UnixMilli()
	if ceil && t.After(time.UnixMilli(ms)) {
		ms++
	}
	return ms
}
