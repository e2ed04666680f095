package redis

// Standing, Get, List and Meter. The server runs them between writes and answers
// after the earlier ones are as durable as it makes them.

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// defaultPage is what List.Limit 0 stands for.
const defaultPage = 256

// Standing returns who the store is and how far it has come.
func (s *Store) Standing(ctx context.Context) (store.Standing, error) {
	const doing = "read the standing"
	a, err := s.run(ctx, doing, s.scripts.standing, true, []string{s.keys.meta}, []string{"", ""})
	if err != nil {
		return store.Standing{}, err
	}
	r := reader{answer: a}
	standing := store.Standing{
		Identity: store.Identity{Epoch: r.text(), KeyDomain: r.text()}, Sequence: r.number(), Now: r.time(),
	}
	if r.err != nil {
		return store.Standing{}, s.damaged(doing, r.err.Error())
	}
	return standing, nil
}

func (s *Store) identity(doing string, a []valkey.ValkeyMessage) (store.Identity, error) {
	r := reader{answer: a}
	id := store.Identity{Epoch: r.text(), KeyDomain: r.text()}
	if r.err != nil {
		return store.Identity{}, s.damaged(doing, r.err.Error())
	}
	return id, nil
}

// Get returns the record with its body, nil if absent, and the store's time.
func (s *Store) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	if err := store.ValidateName(key); err != nil {
		return nil, time.Time{}, err
	}
	const doing = doingRead
	o, err := s.link().reads.ask(ctx, doing, &step{id: hash(key)})
	if err != nil {
		return nil, time.Time{}, err
	}
	for _, part := range o.parts {
		if err := part.Error(); err != nil && !part.IsNil() {
			return nil, time.Time{}, s.explain(doing, err)
		}
	}
	r := reader{answer: o.parts}
	now, record := o.now, r.record(true)
	if r.err != nil {
		return nil, time.Time{}, s.damaged(doing, r.err.Error())
	}
	if record != nil && record.Key != key {
		return nil, time.Time{}, s.damaged(doing, fmt.Sprintf("record %q lies under the hash of %q", record.Key, key))
	}
	return record, now, nil
}

// Meter returns the sum of a meter in its shortest plain form.
func (s *Store) Meter(ctx context.Context, meter string) (string, error) {
	if err := store.ValidateName(meter); err != nil {
		return "", err
	}
	const doing = "read a meter"
	a, err := s.run(ctx, doing, s.scripts.meter, false, []string{s.keys.meta, s.keys.sums}, []string{"", "", hash(meter)})
	if err != nil {
		return "", err
	}
	r := reader{answer: a}
	sum := r.text()
	if r.err != nil {
		return "", s.damaged(doing, r.err.Error())
	}
	return sum, nil
}

// List pages through what is due or held.
func (s *Store) List(ctx context.Context, l store.List) (store.Page, error) {
	if err := l.Validate(); err != nil {
		return store.Page{}, err
	}
	if l.Limit == 0 {
		l.Limit = defaultPage
	}
	after, afterDue, err := position(l.What, l.Cursor)
	if err != nil {
		return store.Page{}, err
	}
	doing := "list what is held"
	args := []string{"", "", strconv.Itoa(l.Limit), "held", "", after, ""}
	key := s.keys.held
	if l.What == store.ListDue {
		doing, key = "list what is due", s.keys.due
		args = []string{"", "", strconv.Itoa(l.Limit), "due", strconv.FormatInt(l.Before.UnixMilli(), 10), after, strconv.FormatInt(afterDue, 10)}
	}
	a, err := s.run(ctx, doing, s.scripts.list, false, []string{s.keys.meta, key}, args)
	if err != nil {
		return store.Page{}, err
	}
	r := reader{answer: a}
	page := store.Page{Now: r.time()}
	more := r.text() == "1"
	var last string
	for r.more() {
		last = r.text()
		if record := r.record(false); record != nil {
			page.Records = append(page.Records, *record)
		}
	}
	if r.err != nil {
		return store.Page{}, s.damaged(doing, r.err.Error())
	}
	if more {
		page.Cursor = cursor(l.What, last, page.Records[len(page.Records)-1].Due)
	}
	return page, nil
}

// cursor says where a page ended: with which entry and, if due, when that was. It
// names its list, so that it is of no use in another.
func cursor(what store.Listing, last string, due time.Time) string {
	b := []byte(last)
	if what == store.ListDue {
		b = binary.BigEndian.AppendUint64(b, uint64(due.UnixMilli()))
	}
	return string(what) + "." + base64.RawURLEncoding.EncodeToString(b)
}

func position(what store.Listing, c string) (after string, due int64, err error) {
	if c == "" {
		return "", 0, nil
	}
	prefix := string(what) + "."
	if len(c) > len(prefix) && c[:len(prefix)] == prefix {
		b, err := base64.RawURLEncoding.Strict().DecodeString(c[len(prefix):])
		switch {
		case err != nil:
		case what == store.ListDue && len(b) == hashSize+8:
			return string(b[:hashSize]), int64(binary.BigEndian.Uint64(b[hashSize:])), nil
		case what == store.ListHeld && len(b) > hashSize:
			return string(b), 0, nil
		}
	}
	return "", 0, fmt.Errorf("%w: cursor of another list", store.ErrInvalid)
}
