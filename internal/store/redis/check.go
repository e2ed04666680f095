package redis

// Check holds the indexes against the records, for tests and for whoever doubts a server.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/cockroachdb/apd/v3"
	"github.com/valkey-io/valkey-go"
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
		hashes: map[string]map[string]string{}, tags: map[string]map[string]bool{},
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
	tags    map[string]map[string]bool

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
	case "set":
		var members []string
		members, err = client.Do(ctx, client.B().Smembers().Key(key).Build()).AsStrSlice()
		c.tags[name] = map[string]bool{}
		for _, m := range members {
			c.tags[name][m] = true
		}
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
	if len(meta) > 0 && (err != nil || meta["format"] != format1 || meta["epoch"] == "" || meta["domain"] == "" || len(meta) != 4) {
		c.add("the identity is %q", meta)
	}
	sets := map[string]map[string]float64{}
	put := func(set, member string, score float64) {
		if sets[set] == nil {
			sets[set] = map[string]float64{}
		}
		sets[set][member] = score
	}
	ends := map[string]map[string]float64{}
	tags := map[string]map[string]bool{}
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
		marks, err := unpackMarks(d.marks)
		if err != nil {
			c.add("record %q: %w", r.Key, err)
		}
		for name, end := range marks {
			put("m"+name, id+string(append48(nil, end)), rank)
			if ends[name] == nil {
				ends[name] = map[string]float64{}
			}
			ends[name][id] = float64(end)
			if end == 0 {
				ends[name][id] = math.Inf(1)
			}
			if len(name) > hashSize {
				of := "t" + name[:hashSize]
				if tags[of] == nil {
					tags[of] = map[string]bool{}
				}
				tags[of][name[hashSize:]] = true
			}
		}
		if err := addEntries(sums, d.entries); err != nil {
			c.add("record %q: %w", r.Key, err)
		}
	}
	for name, members := range ends {
		if len(members) > smallGroup {
			sets["e"+name] = members
		}
	}
	compare(c, "sorted set", sets, c.sets)
	compare(c, "tags", tags, c.tags)
	want := map[string]map[string]string{}
	for meter, sum := range sums {
		if want["sums"] == nil {
			want["sums"] = map[string]string{}
		}
		var short apd.Decimal
		short.Reduce(sum)
		want["sums"][meter] = short.Text('f')
	}
	delete(c.hashes, "meta")
	compare(c, "hash", want, c.hashes)
	if c.more > 0 {
		c.errs = append(c.errs, fmt.Errorf("and %d more", c.more))
	}
	return errors.Join(c.errs...)
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

// unpackMarks reads a record's marks: names and when each ends.
func unpackMarks(b string) (map[string]int64, error) {
	marks := map[string]int64{}
	if b == "" {
		return marks, nil
	}
	cut := fmt.Errorf("%w: marks are cut short", errDamaged)
	if len(b) < 6 {
		return nil, cut
	}
	common, rest := read48(b), b[6:]
	for rest != "" {
		kind, n := rest[0], hashSize
		if kind&markTagged != 0 {
			n = 2 * hashSize
		}
		if len(rest) < 1+n {
			return nil, cut
		}
		name, end := rest[1:1+n], common
		rest = rest[1+n:]
		if kind&markOwnEnd != 0 {
			if len(rest) < 6 {
				return nil, cut
			}
			end, rest = read48(rest), rest[6:]
		}
		if _, twice := marks[name]; twice {
			return nil, fmt.Errorf("%w: mark %x comes twice", errDamaged, name)
		}
		marks[name] = end
	}
	return marks, nil
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
