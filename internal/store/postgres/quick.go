package postgres

// The two functions that most calls come to, reserve and settle, are asked on the wire
// and without the client's types: where both share a machine, encoding and scanning
// costs as much as what is asked.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// statement is prepared once on each connection that asks it.
type statement struct{ name, text string }

var (
	reserveStatement = statement{"holdfast.reserve", "SELECT reserve($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)"}
	settleStatement  = statement{"holdfast.settle", "SELECT settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)"}
	// What is read of the record may be older than what settle finds there: it compares.
	renewStatement = statement{"holdfast.renew", `SELECT (SELECT settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12,
		r.strings, r.tags, CASE WHEN r.strings IS NULL THEN 0 ELSE $13::bigint END) FROM record r WHERE r.digest = $4 AND r.key = $5)`}
)

// values are those of a statement in binary form, one after the other in memory; nil
// is NULL.
type values struct {
	memory []byte
	values [][]byte
}

// add takes what was appended to memory since from.
func (v *values) add(from int) {
	v.values = append(v.values, v.memory[from:len(v.memory):len(v.memory)])
}

func (v *values) null() { v.values = append(v.values, nil) }

func (v *values) bytes(b []byte) {
	if b == nil {
		b = []byte{}
	}
	v.values = append(v.values, b)
}

func (v *values) text(s string) {
	from := len(v.memory)
	v.memory = append(v.memory, s...)
	v.add(from)
}

func (v *values) number(n int64) {
	from := len(v.memory)
	v.memory = binary.BigEndian.AppendUint64(v.memory, uint64(n))
	v.add(from)
}

func (v *values) numberOrNull(n *int64) {
	if n == nil {
		v.null()
		return
	}
	v.number(*n)
}

func (v *values) truth(b bool) {
	from := len(v.memory)
	v.memory = append(v.memory, 0)
	if b {
		v.memory[from] = 1
	}
	v.add(from)
}

func (v *values) digest(d digest) {
	from := len(v.memory)
	v.memory = append(v.memory, d[:]...)
	v.add(from)
}

// head is that of an array of one dimension, without NULLs.
func (v *values) head(oid uint32, n int) {
	v.memory = binary.BigEndian.AppendUint32(v.memory, 1)
	v.memory = binary.BigEndian.AppendUint32(v.memory, 0)
	v.memory = binary.BigEndian.AppendUint32(v.memory, oid)
	v.memory = binary.BigEndian.AppendUint32(v.memory, uint32(n))
	v.memory = binary.BigEndian.AppendUint32(v.memory, 1)
}

func (v *values) numbers(ns []int64) {
	from := len(v.memory)
	v.head(pgtype.Int8OID, len(ns))
	for _, n := range ns {
		v.memory = binary.BigEndian.AppendUint32(v.memory, 8)
		v.memory = binary.BigEndian.AppendUint64(v.memory, uint64(n))
	}
	v.add(from)
}

// digests are an array; none are NULL.
func (v *values) digests(ds []digest) {
	if len(ds) == 0 {
		v.null()
		return
	}
	from := len(v.memory)
	v.head(pgtype.UUIDOID, len(ds))
	for _, d := range ds {
		v.memory = binary.BigEndian.AppendUint32(v.memory, uint32(len(d)))
		v.memory = append(v.memory, d[:]...)
	}
	v.add(from)
}

// newValues has memory for all but header and body.
func newValues(a *arguments, locks int) *values {
	return &values{
		memory: make([]byte, 0, 512+len(a.epoch)+len(a.key)+len(a.nonce)+12*locks+20*(2*len(a.marks)+6*len(a.probes))),
		values: make([][]byte, 0, 19),
	}
}

// record are the new record's values, from its nonce on.
func (v *values) record(a *arguments) {
	v.text(a.nonce)
	v.numberOrNull(a.due)
	v.truth(a.held)
	v.truth(a.unsettled)
	v.bytes(a.header)
	v.bytes(a.body)
}

// marks are the new record's.
func (v *values) marks(a *arguments) {
	v.digests(a.strings)
	v.digests(a.tags)
	v.number(a.until)
}

var binaryFormat = []int16{pgtype.BinaryFormatCode}

// quickly asks one of the statements; nothing was done if the answer is not done.
func (st statement) quickly(ctx context.Context, c *pgx.Conn, v *values) (answer answered, done bool, err error) {
	pg := c.PgConn()
	prepared, known := pg.CustomData()[st.name].(*pgconn.StatementDescription)
	if !known {
		if prepared, err = pg.Prepare(ctx, st.name, st.text, nil); err != nil {
			return answered{}, false, err
		}
		pg.CustomData()[st.name] = prepared
	}
	result := pg.ExecStatement(ctx, prepared, v.values, binaryFormat, binaryFormat).Read()
	if result.Err != nil {
		return answered{}, false, result.Err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 {
		return answered{}, false, fmt.Errorf("%s answered %d rows", st.name, len(result.Rows))
	}
	text := result.Rows[0][0]
	if text == nil {
		return answered{}, false, nil
	}
	first, second, _ := strings.Cut(string(text), " ")
	version, errVersion := strconv.ParseUint(first, 10, 63)
	now, errNow := strconv.ParseInt(second, 10, 64)
	if errVersion != nil || errNow != nil {
		return answered{}, false, fmt.Errorf("%s answered %q", st.name, text)
	}
	return answered{
		outcome: outcomeWritten, version: version,
		result: store.Result{Outcome: store.Written, Version: version, Now: time.UnixMicro(now).UTC()},
	}, true, nil
}

// plain: the Reserve is one that the function reserve can make, but for the lanes that it
// is to make.
func (a *arguments) plain() bool {
	return a.expected == 0 && a.meters == nil && a.untils == nil && a.over.eras == nil
}

// reserveQuickly makes a Reserve of a new record, if nothing at all is in its way.
func (a *arguments) reserveQuickly(ctx context.Context, c *pgx.Conn, highest uint64, p plan) (answered, bool, error) {
	if !a.plain() || p.makeStrings != nil {
		return answered{}, false, nil
	}
	v := newValues(a, len(p.locks))
	v.number(int64(highest))
	v.numbers(p.locks)
	v.numberOrNull(p.generation)
	v.text(a.epoch)
	v.digest(a.digest)
	v.text(a.key)
	v.record(a)
	v.marks(a)
	var probes, ranges, from, to []digest
	for _, p := range a.probes {
		if p.except == (digest{}) {
			probes = append(probes, p.digest)
			continue
		}
		ranges = append(ranges, p.digest, p.digest)
		from = append(from, digest{}, after(p.except))
		to = append(to, before(p.except), lastDigest)
	}
	v.digests(probes)
	v.digests(ranges)
	v.digests(from)
	v.digests(to)
	return reserveStatement.quickly(ctx, c, v)
}

// thereCall reads a record that is there already. It needs no lock: that the record was
// there at some moment of a Reserve that expects none is all that its answer says.
const thereCall = `SELECT clock(), r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header, r.body
	FROM meta m, record r, version v
	WHERE m.epoch = $1 AND v.last_value >= $2 AND r.digest = $3 AND r.key = $4 AND r.nonce <> $5`

// there answers a Reserve of a new record whose key has one: a retry that comes to another
// process than the payment did. One of this very write, of another memory or of another
// key is the function write's to tell.
func (a *arguments) there(ctx context.Context, c *pgx.Conn, highest uint64) (answered, bool, error) {
	var now int64
	var r recordRow
	err := c.QueryRow(ctx, thereCall, []byte(a.epoch), int64(highest), a.digest, []byte(a.key), []byte(a.nonce)).Scan(
		&now, &r.version, &r.nonce, &r.at, &r.due, &r.held, &r.unsettled, &r.header, &r.body)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return answered{}, false, nil
	case err != nil:
		return answered{}, false, err
	}
	return answered{
		outcome: string(store.Mismatch),
		result:  store.Result{Outcome: store.Mismatch, Now: time.UnixMicro(now).UTC(), Record: r.record([]byte(a.key))},
	}, true, nil
}

var lastDigest = digest(bytes.Repeat([]byte{0xff}, 16))

// before and after are the neighbours of a digest. That of a tag is neither the first
// nor the last.
func before(d digest) digest {
	for i := len(d) - 1; i >= 0; i-- {
		if d[i]--; d[i] != 0xff {
			break
		}
	}
	return d
}

func after(d digest) digest {
	for i := len(d) - 1; i >= 0; i-- {
		if d[i]++; d[i] != 0 {
			break
		}
	}
	return d
}

// settleQuickly makes an Update that leaves strings and meters as they are.
func (a *arguments) settleQuickly(ctx context.Context, c *pgx.Conn, highest uint64, p plan) (answered, bool, error) {
	if a.expected == 0 || a.remove || a.keep || a.meters != nil || a.untils != nil {
		return answered{}, false, nil
	}
	v := a.updated(highest, p)
	v.marks(a)
	return settleStatement.quickly(ctx, c, v)
}

// renewQuickly makes an Update that renews the marks and leaves meters as they are.
func (a *arguments) renewQuickly(ctx context.Context, c *pgx.Conn, highest uint64, p plan) (answered, bool, error) {
	if a.expected == 0 || a.meters != nil {
		return answered{}, false, nil
	}
	v := a.updated(highest, p)
	v.number(a.until)
	return renewStatement.quickly(ctx, c, v)
}

// updated are the values of an Update but for its marks.
func (a *arguments) updated(highest uint64, p plan) *values {
	v := newValues(a, 1)
	v.number(int64(highest))
	v.number(p.locks[0])
	v.text(a.epoch)
	v.digest(a.digest)
	v.text(a.key)
	v.number(a.expected)
	v.record(a)
	return v
}
