package postgres

// Initialise, Reserve and Update.

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// mark is one of a record's, without its string.
type mark struct {
	digest digest
	tag    string
	// until is 0 if it does not end.
	until int64
}

// marksOf sorts the marks, so that equal ones make equal rows. Of two that differ in
// their end only, the later end is what probes see.
func marksOf(given []store.Mark) []mark {
	marks := make([]mark, 0, len(given))
	for _, m := range given {
		marks = append(marks, mark{digestOf(m.String), m.Tag, millis(m.Until, true)})
	}
	slices.SortFunc(marks, func(a, b mark) int {
		return cmp.Or(bytes.Compare(a.digest[:], b.digest[:]), cmp.Compare(a.tag, b.tag), -cmp.Compare(uint64(a.until-1), uint64(b.until-1)))
	})
	return slices.CompactFunc(marks, func(a, b mark) bool { return a.digest == b.digest && a.tag == b.tag })
}

// millis is a time as it is kept; 0: none.
func millis(t time.Time, up bool) int64 {
	if t.IsZero() {
		return 0
	}
	ms := t.UnixMilli()
	if up && t.Nanosecond()%int(time.Millisecond) != 0 {
		ms++
	}
	return ms
}

// version is one as the database has it: a bigint. None is as high as the rest.
func version(v uint64) int64 {
	if v > math.MaxInt64 {
		return -1
	}
	return int64(v)
}

// Initialise gives the store this identity if it has none.
func (s *Store) Initialise(ctx context.Context, id store.Identity) (store.Identity, error) {
	if err := id.Validate(); err != nil {
		return store.Identity{}, err
	}
	// It can be repeated: whoever comes second is told what is there.
	return call(ctx, s, "initialise", writeID{}, func(ctx context.Context, c *pgx.Conn) (store.Identity, error) {
		return identity(c.QueryRow(ctx, "SELECT * FROM initialise($1, $2)", []byte(id.Epoch), []byte(id.KeyDomain)))
	})
}

// Disown gives the store another epoch if it carries this one.
func (s *Store) Disown(ctx context.Context, epoch, next string) error {
	if err := store.ValidateDisown(epoch, next); err != nil {
		return err
	}
	// It can be repeated: the epoch is then another one.
	_, err := call(ctx, s, "disown", writeID{}, func(ctx context.Context, c *pgx.Conn) (struct{}, error) {
		_, err := c.Exec(ctx, "SELECT disown($1, $2)", []byte(epoch), []byte(next))
		return struct{}{}, err
	})
	return err
}

// Reserve writes the record only if the version is as expected, no probe hits and
// no meter overflows.
func (s *Store) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	if err := r.Validate(); err != nil {
		return store.Result{}, err
	}
	return s.write(ctx, "Reserve", r, true)
}

// Update writes or deletes the record if the version is as expected and no meter overflows.
func (s *Store) Update(ctx context.Context, w store.Write) (store.Result, error) {
	if err := w.Validate(); err != nil {
		return store.Result{}, err
	}
	return s.write(ctx, "Update", store.Reserve{Write: w}, false)
}

const (
	outcomeLost   = "Lost"
	outcomeBeyond = "Beyond"
)

const writeCall = `SELECT * FROM write($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14,
	$15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)`

func (s *Store) write(ctx context.Context, doing string, r store.Reserve, locksStrings bool) (store.Result, error) {
	args, err := s.writeArguments(r, locksStrings)
	if err != nil {
		return store.Result{}, err
	}
	key, epoch, meters, probes := r.Key, r.Epoch, meterNames(r.Meters), len(r.Probes)
	return call(ctx, s, doing, writeID{s.place, r.Key, r.Nonce}, func(ctx context.Context, c *pgx.Conn) (store.Result, error) {
		var a writeAnswer
		if err := c.QueryRow(ctx, writeCall, args...).Scan(a.columns()...); err != nil {
			return store.Result{}, err
		}
		switch a.outcome {
		case outcomeLost:
			return store.Result{}, fmt.Errorf("%w: the store has epoch %q, the writer knows %q", store.ErrMemoryLost, a.epoch, epoch)
		case outcomeBeyond:
			return store.Result{}, fmt.Errorf("%w: a watermark is beyond what this store has written", store.ErrInvalid)
		}
		return a.result(key, meters, probes)
	})
}

func meterNames(entries []store.MeterEntry) []string {
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Meter)
	}
	return names
}

// writeArguments copies what it is given: the caller may be gone, and use its memory
// again, when they are sent.
func (s *Store) writeArguments(r store.Reserve, locksStrings bool) ([]any, error) {
	marks := marksOf(r.Marks)
	var due *int64
	record := store.Record{}
	if r.Record != nil {
		record = *r.Record
		if ms := millis(record.Due, false); ms != 0 {
			due = &ms
		}
	}
	// Absent arrays are NULL, so that a row holds none.
	var strs []digest
	var tags [][]byte
	var untils []int64
	for _, m := range marks {
		strs = append(strs, m.digest)
		if m.tag != "" && tags == nil {
			tags = make([][]byte, 0, len(marks))
		}
		if m.until != 0 && untils == nil {
			untils = make([]int64, 0, len(marks))
		}
	}
	for _, m := range marks {
		if tags != nil {
			tags = append(tags, []byte(m.tag))
		}
		if untils != nil {
			untils = append(untils, m.until)
		}
	}

	meters := make([]digest, 0, len(r.Meters))
	names := make([][]byte, 0, len(r.Meters))
	amounts := make([]string, 0, len(r.Meters))
	limits := make([]string, 0, len(r.Meters))
	for _, e := range r.Meters {
		meters = append(meters, digestOf(e.Meter))
		names = append(names, []byte(e.Meter))
		amounts = append(amounts, cmp.Or(e.Amount, "0"))
		limits = append(limits, cmp.Or(e.Limit, "NULL"))
	}

	probes := make([]digest, 0, len(r.Probes))
	excepts := make([][]byte, 0, len(r.Probes))
	firsts := make([]bool, 0, len(r.Probes))
	for _, p := range r.Probes {
		probes = append(probes, digestOf(p.String))
		var except []byte
		if p.Except != "" {
			except = []byte(p.Except)
		}
		excepts = append(excepts, except)
		firsts = append(firsts, p.First)
	}
	eras := make([]int32, 0, len(r.PassedOver))
	snapshots := make([]string, 0, len(r.PassedOver))
	for _, w := range r.PassedOver {
		p, err := parseWatermark(w)
		if err != nil {
			return nil, err
		}
		eras = append(eras, p.era)
		snapshots = append(snapshots, `"`+p.snapshot+`"`)
	}
	plan := lockPlan{numbers: []int64{}, modes: []int32{}}
	if locksStrings {
		plan = s.lockPlan(marks, r.Probes)
	}
	// Arrays of numbers and of snapshots go as text: exact, and of no type that the
	// client would have to know.
	array := func(elements []string) string { return "{" + strings.Join(elements, ",") + "}" }
	return []any{
		s.seed, []byte(r.Epoch), digestOf(r.Key), []byte(r.Key), version(r.Expected), []byte(r.Nonce),
		r.Record == nil, due, record.Held, record.Unsettled, append([]byte{}, record.Header...), append([]byte{}, record.Body...),
		r.KeepMarks, strs, tags, untils,
		meters, names, array(amounts), array(limits),
		plan.numbers, plan.modes,
		probes, excepts, firsts,
		eras, array(snapshots),
	}, nil
}

// writeAnswer is the row that the function write returns.
type writeAnswer struct {
	outcome string
	now     *int64
	epoch   []byte
	version *int64
	full    *int32

	record recordRow

	watermark     *string
	hitCount      *int64
	probeHits     []int32
	hitKeys       [][]byte
	hitVersions   []int64
	hitNonces     [][]byte
	hitAts        []int64
	hitDues       []*int64
	hitHelds      []bool
	hitUnsettleds []bool
	hitHeaders    [][]byte
	pairHits      []int32
	pairProbes    []int32
}

func (a *writeAnswer) columns() []any {
	return []any{
		&a.outcome, &a.now, &a.epoch, &a.version, &a.full,
		&a.record.nonce, &a.record.at, &a.record.due, &a.record.held, &a.record.unsettled, &a.record.header, &a.record.body,
		&a.watermark, &a.hitCount, &a.probeHits,
		&a.hitKeys, &a.hitVersions, &a.hitNonces, &a.hitAts, &a.hitDues, &a.hitHelds, &a.hitUnsettleds, &a.hitHeaders,
		&a.pairHits, &a.pairProbes,
	}
}

func (a *writeAnswer) result(key string, meters []string, probes int) (store.Result, error) {
	result := store.Result{Outcome: store.Outcome(a.outcome)}
	if a.now == nil {
		return store.Result{}, fmt.Errorf("the function write answered %q without a time", a.outcome)
	}
	result.Now = time.UnixMicro(*a.now).UTC()
	switch result.Outcome {
	case store.Written:
		result.Version = uint64(*a.version)
	case store.Mismatch:
		if a.version != nil {
			a.record.version = a.version
			result.Record = a.record.record([]byte(key))
		}
	case store.OverLimit:
		result.Meter = meters[*a.full-1]
	case store.Blocked:
		result.Watermark, result.HitCount = store.Watermark(*a.watermark), int(*a.hitCount)
		result.ProbeHits = make([]bool, probes)
		for _, n := range a.probeHits {
			result.ProbeHits[n-1] = true
		}
		for i, key := range a.hitKeys {
			row := recordRow{
				version: &a.hitVersions[i], nonce: a.hitNonces[i], at: &a.hitAts[i], due: a.hitDues[i],
				held: &a.hitHelds[i], unsettled: &a.hitUnsettleds[i], header: a.hitHeaders[i],
			}
			result.Hits = append(result.Hits, store.Hit{Record: *row.record(key)})
		}
		for i, hit := range a.pairHits {
			h := &result.Hits[hit-1]
			h.Probes = append(h.Probes, int(a.pairProbes[i]-1))
		}
	default:
		return store.Result{}, fmt.Errorf("the function write answered %q", a.outcome)
	}
	return result, nil
}
