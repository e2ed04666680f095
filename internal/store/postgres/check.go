package postgres

// Check holds the indexes against the records, for tests and for whoever doubts a database.

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// maxFindings bounds what Check reports of each kind.
const maxFindings = 20

// marksOfRecords are the index entries as the records have them.
const marksOfRecords = `SELECT s.string, coalesce(s.tag, '00000000-0000-0000-0000-000000000000') AS tag, r.digest AS record,
	CASE WHEN r.indexed THEN coalesce(nullif(coalesce(s.until, r.until), 0), 9223372036854775807) ELSE 9223372036854775807 END AS until
	FROM record r, unnest(r.strings, r.tags, r.untils) AS s (string, tag, until)`

// rules are what must hold. Each query returns what breaks one, as text.
var rules = []string{
	`SELECT format('%s rows of meta', count(*)) FROM meta HAVING count(*) <> 1`,
	`SELECT format('record %s is not found under its key', digest) FROM record
	 WHERE digest <> encode(substr(sha256(key), 1, 16), 'hex')::uuid`,
	`SELECT format('version %s belongs to %s records', version, count(*)) FROM record GROUP BY version HAVING count(*) > 1`,
	`SELECT format('record %s has version %s, the sequence is at %s', digest, version, last_value) FROM record, version
	 WHERE record.version < 1 OR record.version > last_value`,
	`SELECT format('record %s has %s strings, %s tags, %s ends, end %s, era %s, stamp %s', digest, cardinality(strings), cardinality(tags), cardinality(untils), until, era, stamp)
	 FROM record
	 WHERE cardinality(strings) = 0 OR cardinality(tags) <> cardinality(strings) OR cardinality(untils) <> cardinality(strings)
	    OR (strings IS NULL AND (tags IS NOT NULL OR untils IS NOT NULL OR until <> 0 OR indexed))
	    OR (untils IS NOT NULL AND until <> 0)
	    OR (strings IS NOT NULL AND (era IS NULL OR stamp IS NULL))`,
	`SELECT format('record %s is stamped in era %s by transaction %s, which is still to come', digest, record.era, stamp)
	 FROM record, meta WHERE record.era > meta.era OR (record.era = meta.era AND stamp >= pg_snapshot_xmax(pg_current_snapshot()))`,
	`SELECT format('mark %s, %s of record %s is not in the index', e.string, e.tag, e.record)
	 FROM (` + marksOfRecords + `) AS e
	 WHERE NOT EXISTS (SELECT FROM mark m WHERE m.string = e.string AND m.tag = e.tag AND m.until = e.until AND m.record = e.record)`,
	`SELECT format('index entry %s, %s, %s, %s is of no record', m.string, m.tag, m.until, m.record)
	 FROM mark m WHERE NOT EXISTS (
		SELECT FROM (` + marksOfRecords + `) AS e WHERE m.string = e.string AND m.tag = e.tag AND m.until = e.until AND m.record = e.record)`,
	`SELECT format('record %s has %s meters and %s amounts, or one of 0', digest, cardinality(meters), cardinality(amounts)) FROM record
	 WHERE cardinality(meters) = 0 OR cardinality(meters) IS DISTINCT FROM cardinality(amounts)
	    OR EXISTS (SELECT FROM unnest(amounts) a WHERE a <= 0 OR a IS NULL)
	    OR (SELECT count(DISTINCT m) FROM unnest(meters) m) <> coalesce(cardinality(meters), 0)`,
	`SELECT format('meter %s says %s, its entries come to %s', coalesce(t.digest, e.digest), t.sum, e.sum)
	 FROM meter t FULL JOIN (
		SELECT m.digest, sum(m.amount) AS sum FROM record, unnest(meters, amounts) AS m (digest, amount) GROUP BY m.digest
	 ) e ON e.digest = t.digest
	 WHERE t.sum IS DISTINCT FROM e.sum`,
	`SELECT format('meter %s is not found under its name', digest) FROM meter
	 WHERE digest <> encode(substr(sha256(name), 1, 16), 'hex')::uuid`,
}

// Check reads the whole store in one snapshot and reports every index entry that does
// not follow from the records, and every one that is missing. It is bound by the
// context and not by the store's timeout.
func (s *Store) Check(ctx context.Context) error {
	if err := s.usable(ctx); err != nil {
		return unavailable("check", err)
	}
	if err := s.prepare(ctx); err != nil {
		return unavailable("check: prepare the schema", err)
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return unavailable("check", err)
	}
	defer conn.Release()
	var found []error
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		// Here whole tables are read.
		_, err := tx.Exec(ctx, `SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on; SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on`)
		if err != nil {
			return err
		}
		for _, rule := range rules {
			rows, err := tx.Query(ctx, rule)
			if err != nil {
				return err
			}
			n := 0
			var text string
			if _, err := pgx.ForEachRow(rows, []any{&text}, func() error {
				if n++; n <= maxFindings {
					found = append(found, errors.New(text))
				}
				return nil
			}); err != nil {
				return fmt.Errorf("%s: %w", rule, err)
			}
			if n > maxFindings {
				found = append(found, fmt.Errorf("and %d more like this", n-maxFindings))
			}
		}
		return nil
	})
	if err != nil {
		return unavailable("check", err)
	}
	return errors.Join(found...)
}
