package bolt

// Standing, Get and List: reads of a durable snapshot, beside the writer.

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// defaultPage is what List.Limit 0 stands for.
const defaultPage = 256

// Standing returns who the store is and how far it has come. Writes are not counted
// by process: the file has one, and is set back behind its back by nobody while it
// holds the lock. One that is opened on an older file shows a lower Sequence.
func (s *Store) Standing(ctx context.Context) (store.Standing, error) {
	var standing store.Standing
	err := s.view(ctx, func(t *txn) error {
		sequence, err := t.sequence()
		if err != nil {
			return unavailable("read", err)
		}
		standing = store.Standing{Identity: t.identity(), Sequence: sequence, Now: t.now()}
		return nil
	})
	if err != nil {
		return store.Standing{}, err
	}
	return standing, nil
}

// Get returns the record with its body, nil if absent, and the store's time.
func (s *Store) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	if err := store.ValidateName(key); err != nil {
		return nil, time.Time{}, err
	}
	var record *store.Record
	var now time.Time
	err := s.view(ctx, func(t *txn) error {
		now = t.now()
		id, f, err := t.find(key)
		if err != nil {
			return unavailable("read", err)
		}
		if id != 0 {
			record = t.record(id, f, true)
		}
		return nil
	})
	if err != nil {
		return nil, time.Time{}, err
	}
	return record, now, nil
}

// List pages through what is due or held.
func (s *Store) List(ctx context.Context, l store.List) (store.Page, error) {
	if err := l.Validate(); err != nil {
		return store.Page{}, err
	}
	if l.Limit == 0 {
		l.Limit = defaultPage
	}
	after, err := position(l.What, l.Cursor)
	if err != nil {
		return store.Page{}, err
	}
	var page store.Page
	err = s.view(ctx, func(t *txn) error {
		page.Now = t.now()
		bucket, end := t.held(), []byte(nil)
		if l.What == store.ListDue {
			bucket, end = t.due(), number(uint64(max(l.Before.UnixMilli(), 0)))
		}
		c := bucket.Cursor()
		k, v := c.Seek(after)
		if k != nil && after != nil && bytes.Equal(k, after) {
			k, v = c.Next()
		}
		var last []byte
		for ; k != nil; k, v = c.Next() {
			number := v
			if l.What == store.ListDue {
				if len(k) != 16 {
					return unavailable("read", fmt.Errorf("%w: due entry", errDamaged))
				}
				if bytes.Compare(k[:8], end) > 0 {
					return nil
				}
				number = k[8:]
			}
			if len(page.Records) == l.Limit {
				page.Cursor = cursor(l.What, last)
				return nil
			}
			f, err := decodeFacts(t.facts().Get(number))
			if err != nil {
				return unavailable("read", err)
			}
			page.Records = append(page.Records, *t.record(binary.BigEndian.Uint64(number), f, false))
			last = k
		}
		return nil
	})
	if err != nil {
		return store.Page{}, err
	}
	return page, nil
}

// cursor says where a page ended. It names its list, so that it is of no use in another.
func cursor(what store.Listing, last []byte) string {
	return string(what) + "." + base64.RawURLEncoding.EncodeToString(last)
}

func position(what store.Listing, c string) ([]byte, error) {
	if c == "" {
		return nil, nil
	}
	prefix := string(what) + "."
	if len(c) > len(prefix) && c[:len(prefix)] == prefix {
		if after, err := base64.RawURLEncoding.Strict().DecodeString(c[len(prefix):]); err == nil && (what != store.ListDue || len(after) == 16) {
			return after, nil
		}
	}
	return nil, fmt.Errorf("%w: cursor of another list", store.ErrInvalid)
}
