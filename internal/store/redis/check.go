package redis

// Check holds the indexes against the records, for tests and for whoever doubts a server.

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/cockroachdb/apd/v3"
	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// maxFindings bounds what Check reports of a store that is damaged all over.
const maxFindings = 50

// Check reads all keys of the store and reports every index entry that does not
// follow from the records, and every one that is missing. It takes memory for all
// records, and time; nothing may write meanwhile.
func (s *Store) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return s.unavailable("check", err)
	}
	client, err := s.links[0].get(ctx)
	if err != nil {
		return s.explain("check", err)
	}
	c := &checker{
		prefix: s.prefix, strings: map[string]string{}, sets: map[string]map[string]float64{},
		hashes: map[string]map[string]string{},
	}
	for _, node := range client.Nodes() {
		if err := c.load(ctx, node); err != nil {
			return s.explain("check", err)
		}
	}
	return c.run()
}

// checker has the whole store in memory; keys are without the prefix.
type checker struct {
	prefix  string
	strings map[string]string
	sets    map[string]map[string]float64
	hashes  map[string]map[string]string

	errs []error
	more int
}

func (c *checker) add(format string, args ...any) {
	if len(c.errs) == maxFindings {
		c.more++
		return
	}
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

func (c *checker) load(ctx context.Context, client valkey.Client) error {
	var cursor uint64
	for {
		page, err := client.Do(ctx, client.B().Scan().Cursor(cursor).Match(c.prefix+"*").Count(1000).Build()).AsScanEntry()
		if err != nil {
			return err
		}
		for _, key := range page.Elements {
			if err := c.read(ctx, client, key); err != nil {
				return err
			}
		}
		if cursor = page.Cursor; cursor == 0 {
			return nil
		}
	}
}

func (c *checker) read(ctx context.Context, client valkey.Client, key string) error {
	name := strings.TrimPrefix(key, c.prefix)
	kind, err := client.Do(ctx, client.B().Type().Key(key).Build()).ToString()
	if err != nil {
		return err
	}
	ttl, err := client.Do(ctx, client.B().Pttl().Key(key).Build()).AsInt64()
	if err != nil {
		return err
	}
	if ttl >= 0 {
		c.add("key %q expires in %d ms", name, ttl)
	}
	switch kind {
	case "none":
		// On another node, or already read and gone.
	case "string":
		c.strings[name], err = client.Do(ctx, client.B().Get().Key(key).Build()).ToString()
	case "hash":
		c.hashes[name], err = client.Do(ctx, client.B().Hgetall().Key(key).Build()).AsStrMap()
	case "zset":
		var members []valkey.ZScore
		members, err = client.Do(ctx, client.B().Zrange().Key(key).Min("0").Max("-1").Withscores().Build()).AsZScores()
		c.sets[name] = map[string]float64{}
		for _, m := range members {
			c.sets[name][m.Member] = m.Score
		}
	default:
		c.add("key %q is a %s", name, kind)
	}
	return err
}

// run builds what the indexes must be from the records alone, and compares.
func (c *checker) run() error {
	meta := c.hashes["meta"]
	sequence, err := strconv.ParseUint(meta["sequence"], 10, 64)
	known := map[string]bool{"format": true, "epoch": true, "domain": true, "sequence": true, "swept": true}
	for name, value := range meta {
		if !known[name] && (len(name) != nameSize || len(value) != entrySize) {
			c.add("in the identity there is %q: %q", name, value)
		}
	}
	if len(meta) > 0 && (err != nil || meta["format"] != format1 || meta["epoch"] == "" || meta["domain"] == "") {
		c.add("the identity is %q", meta)
	}
	sets := map[string]map[string]float64{}
	put := func(set, member string, score float64) {
		if sets[set] == nil {
			sets[set] = map[string]float64{}
		}
		sets[set][member] = score
	}
	groups := map[string]map[placed]placedMark{}
	places := map[string]map[string]bool{}
	sums := map[string]*apd.Decimal{}
	versions := map[uint64]string{}
	for name, value := range c.strings {
		id := name[1:]
		switch {
		case name[0] == 'b' && len(id) == hashSize:
			if _, ok := c.strings["r"+id]; !ok || value == "" {
				c.add("body %x of %d bytes: record there: %t", id, len(value), ok)
			}
			continue
		case name[0] != 'r' || len(id) != hashSize:
			continue
		}
		d, err := decode(value)
		if err != nil {
			c.add("record %x: %w", id, err)
			continue
		}
		r := d.record
		if hash(r.Key) != id {
			c.add("record %q does not lie under its hash", r.Key)
		}
		if r.Version == 0 || r.Version > sequence || d.stamp > r.Version || d.stamp == 0 {
			c.add("record %q has version %d, stamp %d, the sequence is %d", r.Key, r.Version, d.stamp, sequence)
		}
		if other, taken := versions[r.Version]; taken {
			c.add("version %d belongs to %q and %q", r.Version, other, r.Key)
		}
		versions[r.Version] = r.Key
		if !r.Due.IsZero() {
			put("due", id, float64(r.Due.UnixMilli()))
		}
		if r.Held {
			put("held", heldEntry(r.Key, id), 0)
		}
		rank := float64(r.Version)
		if r.Unsettled {
			rank += unsettledRank
		}
		marks, elsewhere, err := unpackMarks(d)
		if err != nil {
			c.add("record %q: %w", r.Key, err)
		}
		places[id] = elsewhere
		for name, end := range marks {
			text := name[:hashSize]
			if groups[text] == nil {
				groups[text] = map[placed]placedMark{}
			}
			groups[text][placed{id, name[hashSize:]}] = placedMark{end, rank}
		}
		if err := addEntries(sums, d.entries); err != nil {
			c.add("record %q: %w", r.Key, err)
		}
	}
	for text, marks := range groups {
		latest := c.value(text, c.hashes["marks"][text], marks)
		for p, m := range marks {
			if places[p.id][text+p.tag] == latest[p] {
				c.add("record %x says that its mark %x with tag %x lies elsewhere: %t", p.id, text, p.tag, latest[p])
			}
			if latest[p] {
				continue
			}
			put("m"+text+p.tag, "r"+p.id, m.rank)
			end := float64(m.end - endsBelow)
			if m.end == 0 {
				end = endsNever
			}
			put("m"+text+p.tag, "e"+p.id, end)
		}
	}
	for text := range c.hashes["marks"] {
		if groups[text] == nil {
			c.add("marks %x belong to no record", text)
		}
	}
	delete(c.hashes, "marks")
	compare(c, "sorted set", sets, c.sets)
	want := map[string]map[string]string{}
	for meter, sum := range sums {
		if want["sums"] == nil {
			want["sums"] = map[string]string{}
		}
		want["sums"][meter] = store.PlainDecimal(sum)
	}
	delete(c.hashes, "meta")
	compare(c, "hash", want, c.hashes)
	if c.more > 0 {
		c.errs = append(c.errs, fmt.Errorf("and %d more", c.more))
	}
	return errors.Join(c.errs...)
}

// placed says which record's mark of a string it is.
type placed struct{ id, tag string }

type placedMark struct {
	end  int64
	rank float64
}

// value holds a string's value against its marks, and returns those that lie in it.
func (c *checker) value(text, value string, want map[placed]placedMark) map[placed]bool {
	latest, tags := map[placed]bool{}, map[string]bool{}
	rest := value
	if rest != "" && rest[0] >= manyTagged {
		n := 0
		if len(rest) >= 3 {
			n = int(bigEndian(rest[1:3]))
		}
		if len(rest) < 3+n*hashSize {
			c.add("the tags of marks %x are cut short", text)
			return latest
		}
		tags[""] = rest[0] == manyUntagged
		for rest = rest[3:]; n > 0; n-- {
			tags[rest[:hashSize]], rest = true, rest[hashSize:]
		}
		if rest != "" {
			c.add("the tags of marks %x are followed by %x", text, rest)
		}
		rest = ""
	}
	seen := map[string]bool{}
	for rest != "" {
		n, tag := int(rest[0]), ""
		rest = rest[1:]
		if n >= groupTagged && len(rest) >= hashSize {
			n, tag, rest = n-groupTagged, rest[:hashSize], rest[hashSize:]
		}
		if n == 0 || len(rest) < n*hashSize || seen[tag] {
			c.add("marks %x are cut short, or a tag comes twice: %x", text, value)
			return latest
		}
		seen[tag] = true
		for range n {
			p := placed{rest[:hashSize], tag}
			rest = rest[hashSize:]
			if _, ok := want[p]; !ok || latest[p] {
				c.add("mark %x with tag %x of record %x is not one of its marks, or comes twice", text, tag, p.id)
			}
			latest[p] = true
		}
	}
	if len(latest) > mostFew {
		c.add("%d marks %x lie in one value", len(latest), text)
	}
	wanted := map[string]bool{}
	for p := range want {
		if !latest[p] {
			wanted[p.tag] = true
		}
	}
	for tag := range wanted {
		if !tags[tag] {
			c.add("marks %x do not name tag %x", text, tag)
		}
	}
	for tag, named := range tags {
		if named && !wanted[tag] {
			c.add("marks %x name tag %x, and have none with it", text, tag)
		}
	}
	return latest
}

// compare reports each way in which the keys of one type differ from what they must be.
func compare[V comparable](c *checker, kind string, want, have map[string]map[string]V) {
	for key, members := range want {
		for m, v := range members {
			if h, ok := have[key][m]; !ok || h != v {
				c.add("%s %q: %q is %v (there: %t), must be %v", kind, key, m, h, ok, v)
			}
		}
	}
	for key, members := range have {
		for m, v := range members {
			if _, ok := want[key][m]; !ok {
				c.add("%s %q: %q is %v and follows from no record", kind, key, m, v)
			}
		}
	}
}

// unpackMarks reads a record's marks: names and when each ends, and which lie in sorted sets.
func unpackMarks(d stored) (marks map[string]int64, elsewhere map[string]bool, err error) {
	marks, elsewhere = map[string]int64{}, map[string]bool{}
	cut := fmt.Errorf("%w: marks are cut short", errDamaged)
	owns := false
	for rest := d.marks; rest != ""; {
		kind, n := rest[0], hashSize
		if kind&markTagged != 0 {
			n += hashSize
		}
		if len(rest) < 1+n {
			return nil, nil, cut
		}
		name, end := rest[1:1+n], d.end
		rest = rest[1+n:]
		if kind&markOwnEnd != 0 {
			if len(rest) < endSize {
				return nil, nil, cut
			}
			end, rest, owns = bigEndian(rest[:endSize]), rest[endSize:], true
		}
		if _, twice := marks[name]; twice {
			return nil, nil, fmt.Errorf("%w: mark %x comes twice", errDamaged, name)
		}
		elsewhere[name] = len(marks) < len(d.elsewhere) && d.elsewhere[len(marks)] == 1
		marks[name] = end
	}
	if d.elsewhere != "" && len(d.elsewhere) != len(marks) {
		return nil, nil, fmt.Errorf("%w: %d marks, and where %d of them lie", errDamaged, len(marks), len(d.elsewhere))
	}
	if owns != d.ownEnds {
		return nil, nil, fmt.Errorf("%w: some marks have ends of their own: %t, the record says %t", errDamaged, owns, d.ownEnds)
	}
	return marks, elsewhere, nil
}

// addEntries adds a record's meter entries to the sums.
func addEntries(sums map[string]*apd.Decimal, b string) error {
	for b != "" {
		if len(b) <= hashSize || len(b) < hashSize+1+int(b[hashSize]) {
			return fmt.Errorf("%w: meter entries are cut short", errDamaged)
		}
		n := hashSize + 1 + int(b[hashSize])
		meter, text := b[:hashSize], b[hashSize+1:n]
		b = b[n:]
		amount, _, err := apd.NewFromString(text)
		if err != nil || amount.Sign() <= 0 {
			return fmt.Errorf("%w: meter entry %q", errDamaged, text)
		}
		if sums[meter] == nil {
			sums[meter] = apd.New(0, 0)
		}
		if _, err := apd.BaseContext.Add(sums[meter], sums[meter], amount); err != nil {
			return err
		}
	}
	return nil
}
