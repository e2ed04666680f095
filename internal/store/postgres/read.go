package postgres

// Standing, Get, List and Meter. What they can see was committed, and so is durable.

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// defaultPage is what List.Limit 0 stands for.
const defaultPage = 256

// recordRow is a record as the functions return it; version NULL: there is none.
type recordRow struct {
	version   *int64
	nonce     []byte
	at        *int64
	due       *int64
	held      *bool
	unsettled *bool
	header    []byte
	body      []byte
}

func (r *recordRow) record(key []byte) *store.Record {
	record := &store.Record{
		Key: string(key), Version: uint64(*r.version), Nonce: string(r.nonce), At: time.UnixMicro(*r.at).UTC(),
		Held: *r.held, Unsettled: *r.unsettled, Header: r.header, Body: r.body,
	}
	if r.due != nil {
		record.Due = time.UnixMilli(*r.due).UTC()
	}
	return record
}

func identity(row pgx.Row) (store.Identity, error) {
	var epoch, domain []byte
	if err := row.Scan(&epoch, &domain); err != nil {
		return store.Identity{}, err
	}
	return store.Identity{Epoch: string(epoch), KeyDomain: string(domain)}, nil
}

// Standing returns who the store is and how far it has come.
func (s *Store) Standing(ctx context.Context) (store.Standing, error) {
	type found struct {
		store.Standing
		lacks *string
	}
	m := s.memory.recall()
	f, err := call(ctx, s, "read the standing", writeID{}, func(ctx context.Context, c *pgx.Conn) (found, error) {
		var f found
		var epoch, domain []byte
		var sequence, now int64
		err := c.QueryRow(ctx, "SELECT * FROM standing($1, $2, $3, $4, $5, $6)",
			s.memory.process, m.writes, m.beat, m.highest, m.digests, m.versions).Scan(&epoch, &domain, &sequence, &now, &f.lacks)
		f.Identity = store.Identity{Epoch: string(epoch), KeyDomain: string(domain)}
		f.Sequence, f.Now = uint64(sequence), time.UnixMicro(now).UTC()
		return f, err
	})
	if err != nil {
		return store.Standing{}, err
	}
	if f.lacks != nil {
		return store.Standing{}, s.lose(*f.lacks)
	}
	s.memory.beaten(m.writes)
	return f.Standing, nil
}

// show asks something that says how far the store has come, by its last version.
func show[T any](ctx context.Context, s *Store, doing string, do func(context.Context, *pgx.Conn, *int64) (T, error)) (T, error) {
	type shown struct {
		value    T
		sequence int64
	}
	highest := s.memory.highest()
	a, err := call(ctx, s, doing, writeID{}, func(ctx context.Context, c *pgx.Conn) (a shown, err error) {
		a.value, err = do(ctx, c, &a.sequence)
		return a, err
	})
	if err == nil && uint64(a.sequence) < highest {
		err = s.lose(fmt.Sprintf("its last version is %d, %d was given", a.sequence, highest))
	}
	if err != nil {
		var none T
		return none, err
	}
	return a.value, nil
}

// Get returns the record with its body, nil if absent, and the store's time.
func (s *Store) Get(ctx context.Context, key string) (*store.Record, time.Time, error) {
	if err := store.ValidateName(key); err != nil {
		return nil, time.Time{}, err
	}
	type found struct {
		record *store.Record
		now    time.Time
	}
	f, err := show(ctx, s, "Get", func(ctx context.Context, c *pgx.Conn, sequence *int64) (found, error) {
		var now int64
		var r recordRow
		err := c.QueryRow(ctx, "SELECT * FROM get($1, $2)", digestOf(key), []byte(key)).Scan(
			&now, sequence, &r.version, &r.nonce, &r.at, &r.due, &r.held, &r.unsettled, &r.header, &r.body)
		if err != nil {
			return found{}, err
		}
		f := found{now: time.UnixMicro(now).UTC()}
		if r.version != nil {
			f.record = r.record([]byte(key))
		}
		return f, nil
	})
	return f.record, f.now, err
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
	query, args := "SELECT * FROM list_held($1, $2)", []any{after, int64(l.Limit)}
	if l.What == store.ListDue {
		due, last := int64(math.MinInt64), digest{}
		if after != nil {
			due, last = int64(binary.BigEndian.Uint64(after)), digest(after[8:])
		}
		query, args = "SELECT * FROM list_due($1, $2, $3, $4)", []any{l.Before.UnixMilli(), due, last, int64(l.Limit)}
	} else if after == nil {
		args[0] = []byte{}
	}
	return show(ctx, s, "List", func(ctx context.Context, c *pgx.Conn, sequence *int64) (store.Page, error) {
		return page(ctx, c, l, sequence, query, args)
	})
}

func page(ctx context.Context, c *pgx.Conn, l store.List, sequence *int64, query string, args []any) (store.Page, error) {
	rows, err := c.Query(ctx, query, args...)
	if err != nil {
		return store.Page{}, err
	}
	defer rows.Close()
	var page store.Page
	var last []byte
	for rows.Next() {
		var now, come *int64
		var d *digest
		var key []byte
		var r recordRow
		if err := rows.Scan(&now, &come, &d, &key, &r.version, &r.nonce, &r.at, &r.due, &r.held, &r.unsettled, &r.header); err != nil {
			return store.Page{}, err
		}
		if now != nil {
			*sequence = *come
			page.Now = time.UnixMicro(*now).UTC()
			continue
		}
		if len(page.Records) == l.Limit {
			page.Cursor = cursor(l.What, last)
			continue
		}
		page.Records = append(page.Records, *r.record(key))
		if last = key; l.What == store.ListDue {
			last = append(binary.BigEndian.AppendUint64(nil, uint64(*r.due)), d[:]...)
		}
	}
	if err := rows.Err(); err != nil {
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
	if text, ok := strings.CutPrefix(c, string(what)+"."); ok && text != "" {
		after, err := base64.RawURLEncoding.Strict().DecodeString(text)
		if err == nil && (what != store.ListDue || len(after) == 24) {
			return after, nil
		}
	}
	return nil, fmt.Errorf("%w: cursor of another list", store.ErrInvalid)
}

// Meter returns the sum of a meter in its shortest plain form.
func (s *Store) Meter(ctx context.Context, meter string) (string, error) {
	if err := store.ValidateName(meter); err != nil {
		return "", err
	}
	return show(ctx, s, "read a meter", func(ctx context.Context, c *pgx.Conn, sequence *int64) (string, error) {
		var sum string
		err := c.QueryRow(ctx, "SELECT o_sequence, o_sum::text FROM meter_sum($1)", digestOf(meter)).Scan(sequence, &sum)
		return sum, err
	})
}
