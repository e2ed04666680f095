package bolt

// Check holds the indexes against the records, for tests and for whoever doubts a file.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/apd/v3"
	"go.etcd.io/bbolt"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// maxFindings bounds what Check reports of a file that is damaged all over.
const maxFindings = 50

// findings collects what is wrong.
type findings struct {
	errs []error
	more int
}

func (f *findings) add(format string, args ...any) {
	if len(f.errs) == maxFindings {
		f.more++
		return
	}
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}

func (f *findings) err() error {
	if f.more > 0 {
		f.errs = append(f.errs, fmt.Errorf("and %d more", f.more))
	}
	return errors.Join(f.errs...)
}

// Check reads the whole file and reports every index entry that does not follow
// from the records, every one that is missing, and every damaged page. Nothing is
// written while it runs, and it takes memory for all records.
func (s *Store) Check(ctx context.Context) error {
	_, err := s.submit(ctx, 0, func(t *txn) (answer, error) {
		var found findings
		for err := range t.meta().Tx().Check() {
			found.add("page: %w", err)
		}
		c := &checker{txn: t, findings: &found}
		return answer{}, errors.Join(c.run(), found.err())
	})
	return err
}

type checker struct {
	*txn
	*findings
	records map[uint64]facts
}

func (c *checker) run() error {
	sequence, err := c.sequence()
	if err != nil {
		return err
	}
	err = c.checkRecords(sequence)
	c.checkListings()
	return errors.Join(err, c.checkParts(), c.checkMarks(sequence), c.checkMeters())
}

func (c *checker) checkRecords(sequence uint64) error {
	c.records = make(map[uint64]facts)
	versions := make(map[uint64]string)
	err := c.facts().ForEach(func(k, v []byte) error {
		f, err := decodeFacts(v)
		if err != nil || len(k) != 8 {
			c.add("facts of record %x: %v", k, err)
			return nil
		}
		id := binary.BigEndian.Uint64(k)
		c.records[id] = f
		if !bytes.Equal(c.keys().Get([]byte(f.key)), k) {
			c.add("record %d is not found under its key %q", id, f.key)
		}
		if id == 0 || id > f.version || f.version > sequence {
			c.add("record %d has version %d, the sequence is %d", id, f.version, sequence)
		}
		if other, taken := versions[f.version]; taken {
			c.add("version %d belongs to %q and %q", f.version, other, f.key)
		}
		versions[f.version] = f.key
		return nil
	})
	if n := count(c.keys()); n != len(c.records) {
		c.add("%d keys for %d records", n, len(c.records))
	}
	return err
}

// checkParts finds headers and bodies of records that are not there.
func (c *checker) checkParts() error {
	var errs []error
	for _, b := range []*bbolt.Bucket{c.headers(), c.bodies()} {
		errs = append(errs, b.ForEach(func(k, v []byte) error {
			if len(k) != 8 || len(v) == 0 {
				c.add("header or body %x of %d bytes", k, len(v))
				return nil
			}
			if _, ok := c.records[binary.BigEndian.Uint64(k)]; !ok {
				c.add("header or body of record %x, which is not there", k)
			}
			return nil
		}))
	}
	return errors.Join(errs...)
}

// checkMarks holds the two orders of marks against each other.
func (c *checker) checkMarks(sequence uint64) error {
	owned := map[string]bool{}
	err := c.owned().ForEach(func(k, v []byte) error {
		if len(k) != 8 || len(v) == 0 {
			c.add("marks of record %x: %d bytes", k, len(v))
			return nil
		}
		id := binary.BigEndian.Uint64(k)
		f, there := c.records[id]
		if !there {
			c.add("marks of record %d, which is not there", id)
		}
		var last, stamp []byte
		for rest := v; len(rest) > 0; {
			m, next, ok := cutMark(rest)
			if !ok || bytes.Compare(last, m) >= 0 {
				c.add("marks of record %d: cut short, or not ascending", id)
				return nil
			}
			last, rest = m, next
			owned[string(markKey(m, id))] = true
			at := c.bucketOf(m).Get(markKey(m, id))
			if len(at) != 8 || stamp != nil && !bytes.Equal(at, stamp) {
				c.add("mark %x of record %d is not in its group with the stamp %x, but %x", m, id, stamp, at)
				continue
			}
			stamp = at
			if n := binary.BigEndian.Uint64(at); there && (n < id || n > f.version || n > sequence) {
				c.add("mark %x of record %d has stamp %d, the record version %d", m, id, n, f.version)
			}
		}
		return nil
	})
	listed := func(b *bbolt.Bucket) error {
		return b.ForEach(func(k, _ []byte) error {
			if !owned[string(k)] || c.bucketOf(k) != b {
				c.add("mark %x is not listed with its record, or lies in the wrong place", k)
			}
			return nil
		})
	}
	return errors.Join(err, listed(c.marks()), listed(c.endless()))
}

// checkListings holds the lists of due and held records against the records.
func (c *checker) checkListings() {
	due, held := 0, 0
	for id, f := range c.records {
		if f.due != 0 {
			due++
			if c.due().Get(dueKey(f.due, id)) == nil {
				c.add("record %d is not listed as due", id)
			}
		}
		if f.held {
			held++
			if !bytes.Equal(c.held().Get([]byte(f.key)), number(id)) {
				c.add("record %d is not listed as held", id)
			}
		}
	}
	if n := count(c.due()); n != due {
		c.add("%d records are due, %d are listed", due, n)
	}
	if n := count(c.held()); n != held {
		c.add("%d records are held, %d are listed", held, n)
	}
}

// checkMeters adds up all entries.
func (c *checker) checkMeters() error {
	sums := make(map[string]*apd.Decimal)
	err := c.entries().ForEach(func(k, v []byte) error {
		if len(k) < 9 {
			c.add("meter entry %x", k)
			return nil
		}
		id, meter := binary.BigEndian.Uint64(k), string(k[8:])
		if _, ok := c.records[id]; !ok {
			c.add("entry in meter %q of record %d, which is not there", meter, id)
		}
		amount, err := decimal(string(v))
		if err != nil || amount.Sign() <= 0 {
			c.add("entry %q in meter %q of record %d", v, meter, id)
			return nil
		}
		if sums[meter] == nil {
			sums[meter] = apd.New(0, 0)
		}
		_, err = exact.Add(sums[meter], sums[meter], amount)
		return err
	})
	for meter, sum := range sums {
		if have := string(c.sums().Get([]byte(meter))); have != store.PlainDecimal(sum) {
			c.add("meter %q says %q, its entries come to %s", meter, have, store.PlainDecimal(sum))
		}
	}
	if n := count(c.sums()); n != len(sums) {
		c.add("%d meters, %d have entries", n, len(sums))
	}
	return err
}

func count(b *bbolt.Bucket) int {
	n := 0
	c := b.Cursor()
	for k, _ := c.First(); k != nil; k, _ = c.Next() {
		n++
	}
	return n
}
