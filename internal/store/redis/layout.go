package redis

// How records lie in the server. All keys begin with the namespace as hash tag.
// Strings that may be long or hold any byte are hashed to 12 bytes: a key (its hash is
// the record's id), a mark's string, a tag and a meter. A key is kept whole in its
// record, and held against what is asked for.
//
//	meta            hash: format, epoch, domain, sequence; of each process its name →
//	                count of its writes, day, void tickets; the day of the last sweep of those
//	r<id>           string: the record without its body
//	b<id>           string: the body, if there is one
//	marks           hash: string → its marks if they are few, or else their tags
//	m<mark>[<tag>]  sorted set: of many marks of one string and tag, of each twice the id:
//	                by its rank and by its end
//	due             sorted set: id → milliseconds
//	held            sorted set in the order of bytes: key and id
//	sums            hash: meter → decimal, never 0
//
// A record's rank is its version, and higher by 2^47 if it is unsettled: many marks
// read from their top give the most telling records first. Few marks are one value
// because most strings have a single one, and a key of its own would be most of what it
// costs; and because a value says only whose they are, so that a record whose state
// changes, which most do soon after they are made, leaves it alone. Epoch, sequence and
// counts lie in one key, so that none can be lost without the others. No key expires.
//
// The record: format, version, time in microseconds, due, flags, stamp of its marks,
// the end that most of them have, and the lengths of nonce, key, marks, what says of each
// mark whether it lies in a sorted set, and meter entries; then these five, and the header
// as it was given. Marks: of each a byte (1: it has a tag; 2: it has another end), the hash,
// the tag, the end. Entries: hash, length, decimal.

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/apd/v3"
	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

const (
	// format1 is that of the namespace, recordFormat that of a record's value; they
	// change with every change to this layout, here and in lua/prelude.lua.
	format1      = "1"
	recordFormat = 1

	// A collision of two marks' hashes makes a probe hit too much, of two keys' or
	// meters' is an error or a sum too high.
	hashSize = 12
	endSize  = 6
	// entrySize is that of what is kept of a process.
	entrySize = 6 + 3 + 6
	// mostVersions and unsettledRank are MOST and UNSETTLED of lua/prelude.lua, mostFew,
	// endsBelow and endsNever are LARGE, BELOW and NEVER of lua/marks.lua.
	mostVersions  = 1 << 46
	unsettledRank = 1 << 47
	mostFew       = 64
	endsBelow     = 1 << 52
	endsNever     = -1

	// The flags of a record, and those of each of its marks.
	flagHeld      = 1
	flagUnsettled = 2
	flagOwnEnds   = 4

	markTagged = 1
	markOwnEnd = 2

	// groupTagged is added to the number of a group's few marks, if they have a tag.
	groupTagged = 128
	// manyTagged and manyUntagged begin the value of a string with many marks; with the
	// latter some of those have no tag.
	manyTagged   = 254
	manyUntagged = 255

	// recordFixed is the length of what comes before the nonce.
	recordFixed = 1 + 6 + 7 + 6 + 1 + 6 + 6 + 2 + 2 + 3 + 2 + 3
)

var (
	//go:embed lua/clock.lua
	luaClock string
	//go:embed lua/prelude.lua
	luaPrelude string
	//go:embed lua/decimal.lua
	luaDecimal string
	//go:embed lua/marks.lua
	luaMarks string
	//go:embed lua/change.lua
	luaChange string
	//go:embed lua/hits.lua
	luaHits string
	//go:embed lua/write.lua
	luaWrite string
	//go:embed lua/initialise.lua
	luaInitialise string
	//go:embed lua/disown.lua
	luaDisown string
	//go:embed lua/standing.lua
	luaStanding string
	//go:embed lua/get.lua
	luaGet string
	//go:embed lua/list.lua
	luaList string
	//go:embed lua/meter.lua
	luaMeter string
)

// scripts are the store's primitives.
type scripts struct {
	write, initialise, disown, standing, get, list, meter *valkey.Lua
}

// newScripts puts the scripts together. Those that write are refused before they
// begin if memory is full. Those that read are not, but they count as writing: a
// replica, which may lag behind, refuses them.
func newScripts(clock, marks string) scripts {
	script := func(flags string, parts ...string) *valkey.Lua {
		return valkey.NewLuaScript("#!lua" + flags + "\n" + clock + luaPrelude + strings.Join(parts, ""))
	}
	const reads = " flags=allow-oom"
	return scripts{
		write:      script("", luaDecimal, marks, luaHits, luaChange, luaWrite),
		initialise: script("", luaInitialise),
		disown:     script(reads, luaDisown),
		standing:   script(reads, luaStanding),
		get:        script(reads, luaGet),
		list:       script(reads, luaList),
		meter:      script(reads, luaMeter),
	}
}

// keys are the names that all steps use, whole.
type keys struct{ meta, due, held, sums, marks string }

func (s *Store) key(name string) string { return s.prefix + name }

// keysOf are those of a record and of its body, in one piece of memory.
func (s *Store) keysOf(id string) (record, body string) {
	both := s.prefix + "r" + id + s.prefix + "b" + id
	return both[:len(both)/2], both[len(both)/2:]
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return string(sum[:hashSize])
}

// packer is the memory in which the arguments of a write are put together, and used again.
// What is sent does not lie in it.
type packer struct {
	// texts are what was hashed, each once, because probes and marks name much alike; sums are
	// their hashes.
	texts places[string]
	sums  [][hashSize]byte
	bytes []byte // of the last text
	// If there are probes, of each string of strings whether one asks for it: 0 if not, 1 if no tag
	// is excepted, or the place of that tag and 1. Of each probe which is its string, and tagAt the
	// place of its tag, counted from 1, 0 for none.
	kinds        []int
	tags         places[[hashSize]byte]
	which, tagAt []int

	// The marks, when each ends, and what is kept of them; their strings, and then others of
	// probes; the first mark of each; how many strings have one mark without a tag and come before
	// all others; and of those the value as long as nobody else has marks of it.
	marks   places[mark]
	ends    []int64
	kept    []byte
	strings places[[hashSize]byte]
	first   []int
	plain   int
	alone   []byte
}

// packers are used again, but for those that had to do with very many probes or marks.
var packers = sync.Pool{New: func() any { return new(packer) }}

const mostKept = 256

func (p *packer) free() {
	if len(p.texts.all) > mostKept || len(p.strings.all) > mostKept || len(p.marks.all) > mostKept || len(p.which) > mostKept {
		return
	}
	p.texts.reset()
	p.tags.reset()
	p.marks.reset()
	p.strings.reset()
	p.sums, p.ends, p.first = p.sums[:0], p.ends[:0], p.first[:0]
	p.kinds, p.which, p.tagAt, p.kept, p.alone, p.plain = p.kinds[:0], p.which[:0], p.tagAt[:0], p.kept[:0], p.alone[:0], 0
	packers.Put(p)
}

func (p *packer) hash(text string) [hashSize]byte {
	i, known := p.texts.of(text, hintOf(text))
	if !known {
		p.bytes = append(p.bytes[:0], text...)
		sum := sha256.Sum256(p.bytes)
		p.sums = append(p.sums, [hashSize]byte(sum[:]))
	}
	return p.sums[i]
}

// hintOf tells most names of probes and marks apart: they end with a hash, or with the last
// segment of a path.
func hintOf(text string) byte {
	n := len(text)
	if n < 2 {
		return byte(n)
	}
	return byte(n) ^ text[n-1]<<4 ^ text[n-2]
}

// heldEntry is how lua/write.lua lists a record as held: it sorts by key, byte for byte,
// and ends with the id; a zero byte of the key is followed by 255, and the key ends with 0, 1.
func heldEntry(key, id string) string {
	return strings.ReplaceAll(key, "\x00", "\x00\xff") + "\x00\x01" + id
}

// mark tells a record's marks apart; what is kept of each is its end.
type mark struct {
	text, tag [hashSize]byte
	tagged    bool
}

// places says where things were first seen, counted from 0. Few are looked through, and only
// where something was seen that gives the same hint.
type places[T comparable] struct {
	all   []T
	hints [4]uint64 // one bit for each hint
	at    map[T]int
}

const fewPlaces = 32

// of is the place of a thing, and whether it was there before. Equal things have one hint.
func (p *places[T]) of(thing T, hint byte) (int, bool) {
	if p.at == nil {
		if p.hints[hint>>6]&(1<<(hint&63)) != 0 {
			if i := slices.Index(p.all, thing); i >= 0 {
				return i, true
			}
		}
	} else if i, ok := p.at[thing]; ok {
		return i, true
	}
	p.add(thing, hint)
	if p.at != nil {
		p.at[thing] = len(p.all) - 1
	} else {
		p.index()
	}
	return len(p.all) - 1, false
}

// add puts a thing behind the others, be it there or not.
func (p *places[T]) add(thing T, hint byte) {
	p.all = append(p.all, thing)
	p.hints[hint>>6] |= 1 << (hint & 63)
}

func (p *places[T]) reset() {
	clear(p.all) // of what it names nothing stays
	p.all, p.hints, p.at = p.all[:0], [4]uint64{}, nil
}

// index is needed once there are more than few.
func (p *places[T]) index() {
	if len(p.all) <= fewPlaces {
		return
	}
	p.at = make(map[T]int, 2*len(p.all))
	for i, t := range slices.Backward(p.all) {
		p.at[t] = i
	}
}

// pack hashes the marks of a record, and gives the end that most of them have, and whether
// some have another one. Of two that differ in their end only, the later end is what probes see.
func (p *packer) pack(id string, marks []store.Mark) (end int64, ownEnds bool) {
	if len(marks) == 0 {
		return 0, false
	}
	for _, m := range marks {
		name, end := mark{text: p.hash(m.String), tagged: m.Tag != ""}, milliseconds(m.Until, true)
		if name.tagged {
			name.tag = p.hash(m.Tag)
		}
		i, twice := p.marks.of(name, name.text[0]^name.tag[0])
		switch {
		case !twice:
			p.ends = append(p.ends, end)
		case end == 0 || p.ends[i] != 0 && end > p.ends[i]:
			p.ends[i] = end
		}
	}
	end = p.ends[0]
	// of are the marks of each string that has several, by the string's place.
	var of map[int][]mark
	for i, m := range p.marks.all {
		kind := byte(0)
		if m.tagged {
			kind |= markTagged
		}
		if p.ends[i] != end {
			kind |= markOwnEnd
			ownEnds = true
		}
		p.kept = append(append(p.kept, kind), m.text[:]...)
		if m.tagged {
			p.kept = append(p.kept, m.tag[:]...)
		}
		if p.ends[i] != end {
			p.kept = append48(p.kept, p.ends[i])
		}
		k, known := p.strings.of(m.text, m.text[0])
		switch {
		case !known:
			p.first = append(p.first, i)
		case of == nil:
			of = map[int][]mark{}
			fallthrough
		default:
			of[k] = append(of[k], m)
		}
	}
	for k, i := range p.first {
		if k == p.plain && !p.marks.all[i].tagged && of[k] == nil {
			p.plain++
			continue
		}
		at := len(p.alone)
		p.alone = appendGroup(append(p.alone, 0, 0, 0, 0), p.marks.all[i], id)
		for _, m := range of[k] {
			p.alone = appendGroup(p.alone, m, id)
		}
		binary.BigEndian.PutUint32(p.alone[at:], uint32(len(p.alone)-at-4))
	}
	return end, ownEnds
}

// probe puts the strings of the probes with those of the marks. One that is probed for with
// several tags excepted is there so many times.
func (p *packer) probe(probes []store.Probe) {
	if len(probes) == 0 {
		return
	}
	p.kinds = append(p.kinds, make([]int, len(p.strings.all))...)
	for _, probe := range probes {
		sum, tagAt := p.hash(probe.String), 0
		if probe.Except != "" {
			tag := p.hash(probe.Except)
			tagAt, _ = p.tags.of(tag, tag[0])
			tagAt++
		}
		kind := tagAt + 1
		i, known := p.strings.of(sum, sum[0])
		if known && p.kinds[i] != 0 && p.kinds[i] != kind {
			i, known = len(p.strings.all), false
			p.strings.add(sum, sum[0])
		}
		if known {
			p.kinds[i] = kind
		} else {
			p.kinds = append(p.kinds, kind)
		}
		p.which, p.tagAt = append(p.which, i), append(p.tagAt, tagAt)
	}
}

// appendGroup appends the group of a single record.
func appendGroup(b []byte, m mark, id string) []byte {
	if m.tagged {
		b = append(append(b, groupTagged+1), m.tag[:]...)
	} else {
		b = append(b, 1)
	}
	return append(b, id...)
}

// append48 appends a time in milliseconds; 48 bits reach far beyond the year 9998.
func append48(b []byte, n int64) []byte {
	return append(b, byte(n>>40), byte(n>>32), byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

func bigEndian(b string) int64 {
	var n int64
	for i := range len(b) {
		n = n<<8 | int64(b[i])
	}
	return n
}

// stored is a record's value taken apart.
type stored struct {
	record  store.Record
	stamp   uint64
	end     int64
	ownEnds bool
	marks   string
	// elsewhere has a byte for each mark: 1 for one in a sorted set; it is empty if none are.
	elsewhere string
	entries   string
}

// decode reads a record's value, with copies of its own.
func decode(value string) (stored, error) {
	if len(value) < recordFixed || value[0] != recordFormat {
		return stored{}, fmt.Errorf("%w: value of a record: %d bytes", errDamaged, len(value))
	}
	fixed, rest := value[1:recordFixed], value[recordFixed:]
	number := func(size int) int64 {
		n := bigEndian(fixed[:size])
		fixed = fixed[size:]
		return n
	}
	version, at, due, flags, stamp, end := number(6), number(7), number(6), number(1), number(6), number(6)
	var parts [5]string
	for i, size := range []int{2, 2, 3, 2, 3} {
		n := int(number(size))
		if n > len(rest) {
			return stored{}, fmt.Errorf("%w: value of a record is cut short", errDamaged)
		}
		parts[i], rest = rest[:n], rest[n:]
	}
	d := stored{
		record: store.Record{
			Key: parts[1], Version: uint64(version), Nonce: parts[0], At: time.UnixMicro(at).UTC(),
			Held: flags&flagHeld != 0, Unsettled: flags&flagUnsettled != 0,
		},
		stamp: uint64(stamp), end: end, ownEnds: flags&flagOwnEnds != 0, marks: parts[2],
		elsewhere: parts[3], entries: parts[4],
	}
	if due != 0 {
		d.record.Due = time.UnixMilli(due).UTC()
	}
	if rest != "" {
		d.record.Header = []byte(rest)
	}
	return d, nil
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

// canonical is the shortest plain form of a decimal; "0" for none.
func canonical(text string) (string, error) {
	if text == "" {
		return "0", nil
	}
	d, _, err := apd.NewFromString(text)
	if err != nil {
		return "", fmt.Errorf("%w: decimal %q", store.ErrInvalid, text)
	}
	return cmp.Or(store.PlainDecimal(d), "0"), nil
}
