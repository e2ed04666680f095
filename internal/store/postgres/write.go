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
	digest, tag digest
	// until is 0 if it does not end.
	until int64
}

// marksOf sorts the marks, so that equal ones make equal rows. Of two that differ in
// their end only, the later end is what probes see.
func marksOf(given []store.Mark) []mark {
	marks := make([]mark, 0, len(given))
	for _, m := range given {
		marks = append(marks, mark{digestOf(m.String), digestOfTag(m.Tag), millis(m.Until, true)})
	}
	slices.SortFunc(marks, func(a, b mark) int {
		return cmp.Or(bytes.Compare(a.digest[:], b.digest[:]), bytes.Compare(a.tag[:], b.tag[:]), -cmp.Compare(uint64(a.until-1), uint64(b.until-1)))
	})
	return slices.CompactFunc(marks, func(a, b mark) bool { return a.digest == b.digest && a.tag == b.tag })
}

// probe is one of a Reserve's; its place in what was asked is i.
type probe struct {
	digest, except digest
	first          bool
	i              int
}

// probesOf are those that except no tag, then those that do: so the functions count them.
func probesOf(given []store.Probe) []probe {
	probes := make([]probe, 0, len(given))
	for i, p := range given {
		probes = append(probes, probe{digestOf(p.String), digestOfTag(p.Except), p.First, i})
	}
	slices.SortStableFunc(probes, func(a, b probe) int {
		return cmp.Compare(min(1, len(given[a.i].Except)), min(1, len(given[b.i].Except)))
	})
	return probes
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
	number := s.memory.writes() + 1
	done, err := call(ctx, s, "disown", writeID{}, func(ctx context.Context, c *pgx.Conn) (done bool, err error) {
		err = c.QueryRow(ctx, "SELECT disown($1, $2, $3, $4)", []byte(epoch), []byte(next), s.memory.process, number).Scan(&done)
		return done, err
	})
	if err == nil && done {
		s.memory.disowned(epoch, next, number)
	}
	return err
}

// Reserve writes the record only if the version is as expected, no probe hits and
// no meter overflows.
func (s *Store) Reserve(ctx context.Context, r store.Reserve) (store.Result, error) {
	if err := r.Validate(); err != nil {
		return store.Result{}, err
	}
	over, err := passedOver(r.PassedOver)
	if err != nil {
		return store.Result{}, err
	}
	a := newArguments(r.Write)
	a.reserves, a.over = true, over
	a.probes = probesOf(r.Probes)
	const tries = 4
	for try := 1; ; try++ {
		// Before the last try nothing is assumed of lanes, so that it is the last.
		plan := s.begin(a.digest, a.marks, a.probes, try < tries)
		answer, err := s.write(ctx, a, plan)
		s.end(plan, err == nil && answer.outcome == outcomeWritten, answer.lanes)
		if err != nil || answer.outcome != outcomeAgain {
			return answer.result, err
		}
		if err := s.loadLanes(ctx); err != nil {
			return store.Result{}, unavailable("Reserve: read the lanes", err)
		}
	}
}

// Update is compare-and-set for every other step.
func (s *Store) Update(ctx context.Context, w store.Write) (store.Result, error) {
	if err := w.Validate(); err != nil {
		return store.Result{}, err
	}
	a := newArguments(w)
	answer, err := s.write(ctx, a, plan{locks: []int64{s.number(a.digest)}})
	return answer.result, err
}

// Outcomes of the function write beside those of the contract.
const (
	outcomeWritten  = string(store.Written)
	outcomeRepeated = "Repeated" // Written, but before
	outcomeLost     = "Lost"
	outcomeForgot   = "Forgot"
	outcomeBeyond   = "Beyond"
	outcomeAgain    = "Again"
)

// arguments are those of a write, of which nothing is shared with the caller: who may
// be gone, and use its memory again, when they are sent.
type arguments struct {
	epoch, key, nonce string
	digest            digest
	expected          int64
	remove, keep      bool
	// reserves: it is a Reserve, and no Update.
	reserves bool
	// renew: the marks are those that the record has, but for their end, which is until.
	renew           bool
	due             *int64
	held, unsettled bool
	header, body    []byte

	marks         []mark
	strings, tags []digest // tags are nil if all are empty
	until         int64
	untils        []int64 // nil if all are until

	meters          []digest
	names           [][]byte
	meterNames      []string
	amounts, limits *string

	probes []probe
	over   over
}

func newArguments(w store.Write) *arguments {
	a := &arguments{
		epoch: w.Epoch, key: w.Key, nonce: w.Nonce, digest: digestOf(w.Key), expected: version(w.Expected),
		remove: w.Record == nil, keep: w.KeepMarks, header: []byte{}, body: []byte{},
	}
	if r := w.Record; r != nil {
		if ms := millis(r.Due, false); ms != 0 {
			a.due = &ms
		}
		a.held, a.unsettled = r.Held, r.Unsettled
		a.header, a.body = append(a.header, r.Header...), append(a.body, r.Body...)
	}
	if a.renew = w.RenewMarks; a.renew {
		a.until = millis(w.Until, true)
	}
	a.setMarks(marksOf(w.Marks))
	if len(w.Meters) > 0 {
		amounts, limits := make([]string, 0, len(w.Meters)), make([]string, 0, len(w.Meters))
		for _, e := range w.Meters {
			a.meters = append(a.meters, digestOf(e.Meter))
			a.names = append(a.names, []byte(e.Meter))
			a.meterNames = append(a.meterNames, e.Meter)
			amounts = append(amounts, cmp.Or(e.Amount, "0"))
			limits = append(limits, cmp.Or(e.Limit, "NULL"))
		}
		a.amounts, a.limits = array(amounts), array(limits)
	}
	return a
}

func (a *arguments) setMarks(marks []mark) {
	a.marks = marks
	if len(marks) == 0 {
		return
	}
	a.strings = make([]digest, len(marks))
	a.until = marks[0].until
	tagged, differ := false, false
	for i, m := range marks {
		a.strings[i] = m.digest
		tagged, differ = tagged || m.tag != (digest{}), differ || m.until != a.until
	}
	if tagged {
		a.tags = make([]digest, len(marks))
		for i, m := range marks {
			a.tags[i] = m.tag
		}
	}
	if differ {
		a.until, a.untils = 0, make([]int64, len(marks))
		for i, m := range marks {
			a.untils[i] = m.until
		}
	}
}

// array is one of numbers or snapshots as text: exact, and of no type that the client
// would have to know.
func array(elements []string) *string {
	text := "{" + strings.Join(elements, ",") + "}"
	return &text
}

// over are the watermarks of a Reserve; nil: none.
type over struct {
	eras      []int32
	snapshots *string
}

func passedOver(watermarks []store.Watermark) (over, error) {
	if len(watermarks) == 0 {
		return over{}, nil
	}
	var o over
	snapshots := make([]string, 0, len(watermarks))
	for _, w := range watermarks {
		p, err := parseWatermark(w)
		if err != nil {
			return over{}, err
		}
		o.eras = append(o.eras, p.era)
		snapshots = append(snapshots, `"`+p.snapshot+`"`)
	}
	o.snapshots = array(snapshots)
	return o, nil
}

const (
	writeBegins = `write($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, `
	writeEnds   = `, $21, $22, $23, $24, $25::text::numeric[], $26::text::numeric[], $27, $28, $29, $30, $31, $32::text::pg_snapshot[])`

	writeCall = `SELECT * FROM ` + writeBegins + `$18, $19, $20` + writeEnds
	// Marks that are renewed are read from the record before the function takes its lock. The
	// version that is expected was there already; if it is another one by then, nothing is written.
	renewCall = `SELECT w.* FROM (VALUES (0)) AS one LEFT JOIN record r ON r.digest = $7 AND r.key = $8 CROSS JOIN LATERAL ` + writeBegins +
		`coalesce($18, r.strings), coalesce($19, r.tags), CASE WHEN r.strings IS NULL THEN 0 ELSE $20::bigint END` + writeEnds + ` AS w`
)

// answered is what became of a write.
type answered struct {
	outcome string
	result  store.Result
	// version is that of the write, a removal's too.
	version uint64
	lanes   int64
}

func (s *Store) write(ctx context.Context, a *arguments, p plan) (answered, error) {
	doing := "Update"
	if a.reserves {
		doing = "Reserve"
	}
	id := writeID{place: s.place, key: a.key, nonce: a.nonce}
	highest := s.memory.highest()
	answer, err := call(ctx, s, doing, id, func(ctx context.Context, c *pgx.Conn) (answered, error) {
		return s.ask(ctx, c, a, highest, p)
	})
	if err != nil {
		return answered{}, err
	}
	switch answer.outcome {
	case outcomeForgot:
		return answered{}, s.lose("its versions have not come as far as they had")
	case outcomeWritten, outcomeRepeated:
		if answer.outcome == outcomeWritten && answer.version <= highest {
			return answered{}, s.lose(fmt.Sprintf("it gave version %d again", answer.version))
		}
		s.memory.acknowledge(a.digest, answer.version, a.epoch)
	}
	return answer, nil
}

// ask makes the write by the function that can.
func (s *Store) ask(ctx context.Context, c *pgx.Conn, a *arguments, highest uint64, p plan) (answered, error) {
	quickly := a.settleQuickly
	switch {
	case a.reserves:
		quickly = a.reserveQuickly
	case a.renew:
		quickly = a.renewQuickly
	}
	if answer, done, err := quickly(ctx, c, highest, p); done || err != nil {
		return answer, err
	}
	if a.reserves && a.plain() {
		if answer, there, err := a.there(ctx, c, highest); there || err != nil {
			return answer, err
		}
	}
	var plainly, except []digest
	var excepts []digest
	var firsts []int32
	for i, p := range a.probes {
		if p.except == (digest{}) {
			plainly = append(plainly, p.digest)
		} else {
			except, excepts = append(except, p.digest), append(excepts, p.except)
		}
		if p.first {
			firsts = append(firsts, int32(i+1))
		}
	}
	text := writeCall
	if a.renew {
		text = renewCall
	}
	var row writeRow
	err := c.QueryRow(ctx, text,
		int64(highest), p.locks, p.generation, p.makeStrings, p.makeKinds,
		[]byte(a.epoch), a.digest, []byte(a.key), a.expected, []byte(a.nonce),
		a.remove, a.due, a.held, a.unsettled, a.header, a.body,
		a.keep, a.strings, a.tags, a.until, a.untils,
		s.seed, a.meters, a.names, a.amounts, a.limits,
		plainly, except, excepts, firsts,
		a.over.eras, a.over.snapshots,
	).Scan(row.columns()...)
	if err != nil {
		return answered{}, err
	}
	return row.answer(a)
}

// writeRow is the row that the function write returns.
type writeRow struct {
	outcome string
	now     *int64
	version *int64
	epoch   []byte
	lanes   *int64
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

func (w *writeRow) columns() []any {
	return []any{
		&w.outcome, &w.now, &w.version, &w.epoch, &w.lanes, &w.full,
		&w.record.nonce, &w.record.at, &w.record.due, &w.record.held, &w.record.unsettled, &w.record.header, &w.record.body,
		&w.watermark, &w.hitCount, &w.probeHits,
		&w.hitKeys, &w.hitVersions, &w.hitNonces, &w.hitAts, &w.hitDues, &w.hitHelds, &w.hitUnsettleds, &w.hitHeaders,
		&w.pairHits, &w.pairProbes,
	}
}

func (w *writeRow) answer(a *arguments) (answered, error) {
	switch w.outcome {
	case outcomeLost:
		return answered{}, fmt.Errorf("%w: the store has epoch %q, the writer knows %q", store.ErrMemoryLost, w.epoch, a.epoch)
	case outcomeBeyond:
		return answered{}, fmt.Errorf("%w: a watermark is beyond what this store has written", store.ErrInvalid)
	}
	if w.outcome == outcomeForgot {
		return answered{outcome: w.outcome}, nil
	}
	if w.now == nil {
		return answered{}, fmt.Errorf("the function write answered %q without a time", w.outcome)
	}
	answer := answered{outcome: w.outcome}
	if w.lanes != nil {
		answer.lanes = *w.lanes
	}
	result := &answer.result
	result.Outcome, result.Now = store.Outcome(w.outcome), time.UnixMicro(*w.now).UTC()
	switch w.outcome {
	case outcomeWritten, outcomeRepeated:
		result.Outcome = store.Written
		answer.version = uint64(*w.version)
		if !a.remove {
			result.Version = answer.version
		}
	case string(store.Mismatch):
		if w.version != nil {
			w.record.version = w.version
			result.Record = w.record.record([]byte(a.key))
		}
	case string(store.OverLimit):
		result.Meter = a.meterNames[*w.full-1]
	case string(store.Blocked):
		w.hits(result, a.probes)
	case outcomeAgain:
	default:
		return answered{}, fmt.Errorf("the function write answered %q", w.outcome)
	}
	return answer, nil
}

func (w *writeRow) hits(result *store.Result, probes []probe) {
	result.Watermark, result.HitCount = store.Watermark(*w.watermark), int(*w.hitCount)
	result.ProbeHits = make([]bool, len(probes))
	for _, n := range w.probeHits {
		result.ProbeHits[probes[n-1].i] = true
	}
	for i, key := range w.hitKeys {
		row := recordRow{
			version: &w.hitVersions[i], nonce: w.hitNonces[i], at: &w.hitAts[i], due: w.hitDues[i],
			held: &w.hitHelds[i], unsettled: &w.hitUnsettleds[i], header: w.hitHeaders[i],
		}
		result.Hits = append(result.Hits, store.Hit{Record: *row.record(key)})
	}
	for i, hit := range w.pairHits {
		h := &result.Hits[hit-1]
		h.Probes = append(h.Probes, probes[w.pairProbes[i]-1].i)
	}
	for _, h := range result.Hits {
		slices.Sort(h.Probes)
	}
}
