-- How records lie in the database, and the primitives that work on them.
--
-- A digest is the first 16 bytes of the SHA-256 of a string: an index takes no
-- strings of 4 KiB. Times are microseconds, due and until milliseconds, since 1970.
--
-- What an index entry says follows from the record's row alone: mark is the
-- inverted index of record.strings, meter the sum of record.amounts. So a step that
-- leaves the strings of its marks as they are, and most do, stamps them anew by
-- writing one row.

-- +goose Up
CREATE TABLE meta (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch       bytea,   -- NULL: never used
    key_domain  bytea,
    -- Transaction numbers are comparable within one incarnation of the cluster only.
    -- A promoted standby, a restored backup and a loaded dump begin a new one, and
    -- with it a new era.
    era         integer NOT NULL DEFAULT 0,
    incarnation text NOT NULL DEFAULT ''
);
INSERT INTO meta DEFAULT VALUES;

CREATE SEQUENCE version;

CREATE TABLE record (
    digest    uuid PRIMARY KEY, -- of the key
    key       bytea   NOT NULL,
    version   bigint  NOT NULL,
    nonce     bytea   NOT NULL,
    at        bigint  NOT NULL,
    due       bigint,
    held      boolean NOT NULL,
    unsettled boolean NOT NULL,
    header    bytea   NOT NULL,
    body      bytea   NOT NULL,
    -- Marks. The stamp that all of them have, the digests of their strings, their
    -- tags (NULL: all empty) and their ends (NULL: none ends; 0: that one does not).
    era       integer,
    stamp     xid8,
    strings   uuid[],
    tags      bytea[],
    untils    bigint[],
    -- Meter entries: the digests of the meters' names, and the amounts.
    meters    uuid[],
    amounts   numeric[]
);
CREATE INDEX record_due ON record (due, digest) WHERE due IS NOT NULL;
-- Keys can be longer than an index entry. Equal beginnings are sorted when listed.
CREATE INDEX record_held ON record (substr(key, 1, 1000)) WHERE held;

CREATE TABLE mark (
    string uuid    NOT NULL,
    record uuid    NOT NULL, -- the record's digest
    n      integer NOT NULL, -- where it is in the record's arrays, from 1
    PRIMARY KEY (string, record, n)
);

CREATE TABLE meter (
    digest uuid PRIMARY KEY, -- of the name
    name   bytea   NOT NULL,
    sum    numeric NOT NULL  -- never 0: such a row is deleted
);

-- +goose StatementBegin
CREATE FUNCTION clock() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION standing(OUT o_epoch bytea, OUT o_key_domain bytea, OUT o_sequence bigint, OUT o_now bigint) LANGUAGE sql VOLATILE AS
$$ SELECT m.epoch, m.key_domain, CASE WHEN v.is_called THEN v.last_value ELSE 0 END, clock() FROM meta m, version v $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION initialise(p_epoch bytea, p_key_domain bytea, OUT o_epoch bytea, OUT o_key_domain bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE meta SET epoch = p_epoch, key_domain = p_key_domain WHERE epoch IS NULL;
    SELECT epoch, key_domain INTO STRICT o_epoch, o_key_domain FROM meta;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION disown(p_epoch bytea, p_next bytea) RETURNS void LANGUAGE sql VOLATILE AS
$$ UPDATE meta SET epoch = p_next WHERE epoch = p_epoch $$;
-- +goose StatementEnd

-- write is Reserve and Update. It is VOLATILE and runs under READ COMMITTED: each
-- of its statements sees what was committed before that statement began.
--
-- Locks. Each is a number: the digest's first 8 bytes, mixed with the schema's seed,
-- its two lowest bits replaced by what it is: 0 a record, 1 and 2 a string's two
-- locks A and B, 3 a meter. They are taken before any row is locked, in one order:
-- the record's, then the strings' by number, A before B, then the meters' by number.
--
--   * A record's and a meter's lock are exclusive and kept to the end.
--   * Of a string, two that mark must not wait for each other, nor two that probe;
--     one that marks and one that probes must exclude each other. No set of shared
--     and exclusive locks kept to the end does that (either side would have to be
--     exclusive to be in the other's way, and then is in its own), so one lock of
--     each step is let go at once, and is a session's lock for that reason:
--         mark:  A shared, kept; B exclusive, let go
--         probe: A exclusive; B shared, kept; A let go
--         both:  A and B exclusive, kept
--     A marker (or both) that comes while a prober is there waits at B. A prober that
--     comes while a marker is there waits at A. Neither can slip in between: a prober
--     holds A alone until it holds B, so a marker that found B free holds A since
--     before that prober came, and the prober waits at A. Two markers share A and
--     pass B one after the other; two probers pass A one after the other and share B.
--   * No deadlock: whoever waits for a lock has not taken any later one in the order.
--     Whoever is waited for, as its holder or because it waits there before, has it
--     or waits for it; and it has yet to wait for later ones only. So along a
--     chain of waiting the locks waited for never fall, and rise at each holder;
--     those that wait at one lock stand in one queue. A chain never closes. The
--     only early return of a lock makes others wait less.
--     A session's lock that is left by an error is let go by the handler.
--
-- Only a Reserve locks strings. That suffices: an Update is refused by nobody's
-- marks, so a Reserve that runs at the same time and does not see its marks comes
-- before it in the order of writes, and one that does comes after it. The probing
-- statement is one snapshot, taken after all locks: a write that this Reserve sees
-- elsewhere (its own record, a meter) was committed before its locks were taken, and
-- is seen by the probes as well.
--
-- Watermarks. A mark's stamp is its writer's transaction number and the era; a
-- watermark is the snapshot of the statement that probed, and the era. It covers what
-- that snapshot could see, and all of earlier eras.
--
-- +goose StatementBegin
CREATE FUNCTION write(
    p_seed bigint, p_epoch bytea, p_digest uuid, p_key bytea, p_expected bigint, p_nonce bytea,
    p_remove boolean, p_due bigint, p_held boolean, p_unsettled boolean, p_header bytea, p_body bytea,
    p_keep boolean, p_strings uuid[], p_tags bytea[], p_untils bigint[],
    p_meters uuid[], p_names bytea[], p_amounts numeric[], p_limits numeric[],
    p_locks bigint[], p_modes integer[],
    p_probes uuid[], p_excepts bytea[], p_firsts boolean[],
    p_over_eras integer[], p_over_snapshots pg_snapshot[],
    OUT o_outcome text, OUT o_now bigint, OUT o_epoch bytea, OUT o_version bigint, OUT o_full integer,
    OUT o_nonce bytea, OUT o_at bigint, OUT o_due bigint, OUT o_held boolean, OUT o_unsettled boolean, OUT o_header bytea, OUT o_body bytea,
    OUT o_watermark text, OUT o_hit_count bigint, OUT o_probe_hits integer[],
    OUT o_hit_keys bytea[], OUT o_hit_versions bigint[], OUT o_hit_nonces bytea[], OUT o_hit_ats bigint[], OUT o_hit_dues bigint[],
    OUT o_hit_helds boolean[], OUT o_hit_unsettleds boolean[], OUT o_hit_headers bytea[],
    OUT o_pair_hits integer[], OUT o_pair_probes integer[]
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_void        text;
    v_system      text := current_setting('holdfast.system', true);
    v_incarnation text;
    v_era         integer;
    v_known       text;
    v_ms          bigint;
    v_next        bigint;
    v_hit         boolean := false;
    have          record%ROWTYPE;
    k             bigint;
    i             integer;
    j             integer;
    d             numeric;
    c_meters      uuid[] := p_meters;
    c_amounts     numeric[] := p_amounts;
    v_changed     integer[] := '{}';
    v_deltas      numeric[] := '{}';
    v_meter_locks bigint[] := '{}';
BEGIN
    v_void := pg_advisory_xact_lock(((('x' || left(replace(p_digest::text, '-', ''), 16))::bit(64)::bigint # p_seed) & ~3::bigint));

    IF v_system IS NULL OR v_system = '' THEN
        SELECT system_identifier::text INTO STRICT v_system FROM pg_control_system();
    END IF;
    v_incarnation := v_system || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
    SELECT m.epoch, m.era, m.incarnation INTO STRICT o_epoch, v_era, v_known FROM meta m;
    IF o_epoch IS DISTINCT FROM p_epoch THEN
        o_outcome := 'Lost';
        RETURN;
    END IF;
    SELECT * INTO have FROM record r WHERE r.digest = p_digest;
    IF have.key <> p_key THEN
        RAISE EXCEPTION 'two keys have the digest %', p_digest;
    END IF;
    IF have.nonce = p_nonce THEN
        -- Where an administrator has cut short the wait for a standby, the earlier
        -- write may not be there yet. This commit comes after it in the log.
        UPDATE record r SET nonce = r.nonce WHERE r.digest = p_digest;
        o_outcome := 'Written';
        o_version := have.version;
        o_now := clock();
        RETURN;
    END IF;
    IF coalesce(have.version, 0) <> p_expected THEN
        o_outcome := 'Mismatch';
        o_version := have.version;
        o_nonce := have.nonce;
        o_at := have.at;
        o_due := have.due;
        o_held := have.held;
        o_unsettled := have.unsettled;
        o_header := have.header;
        o_body := have.body;
        o_now := clock();
        RETURN;
    END IF;

    IF cardinality(p_locks) > 0 THEN
        BEGIN
            FOR i IN 1..cardinality(p_locks) LOOP
                k := p_locks[i];
                IF p_modes[i] = 1 THEN -- mark
                    v_void := pg_advisory_xact_lock_shared(k | 1);
                    v_void := pg_advisory_lock(k | 2);
                    v_void := pg_advisory_unlock(k | 2);
                ELSIF p_modes[i] = 2 THEN -- probe
                    v_void := pg_advisory_lock(k | 1);
                    v_void := pg_advisory_xact_lock_shared(k | 2);
                    v_void := pg_advisory_unlock(k | 1);
                ELSE -- both
                    v_void := pg_advisory_xact_lock(k | 1);
                    v_void := pg_advisory_xact_lock(k | 2);
                END IF;
            END LOOP;
        EXCEPTION WHEN query_canceled OR OTHERS THEN
            PERFORM pg_advisory_unlock_all();
            RAISE;
        END;
    END IF;

    -- Entries that stay as they are lock nothing.
    IF p_remove THEN
        c_meters := have.meters;
        c_amounts := array_fill(0::numeric, ARRAY[coalesce(cardinality(have.meters), 0)]);
    END IF;
    FOR i IN 1..coalesce(cardinality(c_meters), 0) LOOP
        j := array_position(have.meters, c_meters[i]);
        d := c_amounts[i] - coalesce(have.amounts[j], 0);
        IF d <> 0 THEN
            v_changed := v_changed || i;
            v_deltas := v_deltas || d;
            v_meter_locks := v_meter_locks || ((('x' || left(replace(c_meters[i]::text, '-', ''), 16))::bit(64)::bigint # p_seed) | 3::bigint);
        END IF;
    END LOOP;
    IF cardinality(v_changed) > 0 THEN
        FOR k IN SELECT DISTINCT l FROM unnest(v_meter_locks) AS l ORDER BY l LOOP
            v_void := pg_advisory_xact_lock(k);
        END LOOP;
    END IF;

    -- All locks are taken: what is read from here on stays so until the end.
    IF v_known <> v_incarnation THEN
        UPDATE meta SET era = meta.era + 1, incarnation = v_incarnation WHERE incarnation <> v_incarnation;
        SELECT m.era INTO STRICT v_era FROM meta m;
    END IF;
    o_now := clock();
    v_ms := o_now / 1000;

    -- Conditions are nested so that PL/pgSQL tests the cheap one without a query.
    IF cardinality(p_over_eras) > 0 THEN
        IF EXISTS (
            SELECT FROM unnest(p_over_eras, p_over_snapshots) AS w (era, snapshot)
            WHERE w.era > v_era OR (w.era = v_era AND pg_snapshot_xmax(w.snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
        ) THEN
            o_outcome := 'Beyond';
            RETURN;
        END IF;
    END IF;

    IF cardinality(p_probes) > 0 THEN
        -- Mostly nobody is in the way: a first look, by what needs the least to ask.
        IF cardinality(p_over_eras) = 0 THEN
            v_hit := EXISTS (
                SELECT
                FROM unnest(p_probes, p_excepts) AS p (string, besides)
                JOIN mark m ON m.string = p.string
                JOIN record h ON h.digest = m.record
                WHERE m.record <> p_digest
                  AND (p.besides IS NULL OR coalesce(h.tags[m.n], '') <> p.besides)
                  AND (h.untils IS NULL OR h.untils[m.n] = 0 OR h.untils[m.n] > v_ms));
        ELSE
            v_hit := EXISTS (
                SELECT
                FROM unnest(p_probes, p_excepts) AS p (string, besides)
                JOIN mark m ON m.string = p.string
                JOIN record h ON h.digest = m.record
                WHERE m.record <> p_digest
                  AND (p.besides IS NULL OR coalesce(h.tags[m.n], '') <> p.besides)
                  AND (h.untils IS NULL OR h.untils[m.n] = 0 OR h.untils[m.n] > v_ms)
                  AND NOT EXISTS (
                      SELECT FROM unnest(p_over_eras, p_over_snapshots) AS w (era, snapshot)
                      WHERE h.era < w.era OR (h.era = w.era AND pg_visible_in_snapshot(h.stamp, w.snapshot))));
        END IF;
    END IF;
    IF v_hit THEN
        WITH hit AS MATERIALIZED (
            SELECT p.n, p.top, h.digest, h.unsettled, h.version
            FROM unnest(p_probes, p_excepts, p_firsts) WITH ORDINALITY AS p (string, besides, top, n)
            JOIN mark m ON m.string = p.string
            JOIN record h ON h.digest = m.record
            WHERE m.record <> p_digest
              AND (p.besides IS NULL OR coalesce(h.tags[m.n], '') <> p.besides)
              AND (h.untils IS NULL OR h.untils[m.n] = 0 OR h.untils[m.n] > v_ms)
              AND NOT EXISTS (
                  SELECT FROM unnest(p_over_eras, p_over_snapshots) AS w (era, snapshot)
                  WHERE h.era < w.era OR (h.era = w.era AND pg_visible_in_snapshot(h.stamp, w.snapshot)))
        ), one AS MATERIALIZED (
            SELECT digest, bool_or(top) AS top, unsettled, version, array_agg(n) AS ns
            FROM hit GROUP BY digest, unsettled, version
        ), best AS MATERIALIZED (
            SELECT digest, ns, row_number() OVER (ORDER BY top DESC, unsettled DESC, version DESC) AS rank
            FROM one ORDER BY top DESC, unsettled DESC, version DESC LIMIT 64
        ), pair AS MATERIALIZED (
            SELECT DISTINCT rank, n FROM best, unnest(ns) AS n
        )
        SELECT v_era || '.' || pg_current_snapshot()::text,
               (SELECT count(*) FROM one),
               ARRAY(SELECT DISTINCT n FROM hit ORDER BY n),
               told.keys, told.versions, told.nonces, told.ats, told.dues, told.helds, told.unsettleds, told.headers,
               ARRAY(SELECT rank FROM pair ORDER BY rank, n),
               ARRAY(SELECT n FROM pair ORDER BY rank, n)
        INTO STRICT o_watermark, o_hit_count, o_probe_hits,
             o_hit_keys, o_hit_versions, o_hit_nonces, o_hit_ats, o_hit_dues, o_hit_helds, o_hit_unsettleds, o_hit_headers,
             o_pair_hits, o_pair_probes
        FROM (
            SELECT array_agg(h.key ORDER BY rank) AS keys, array_agg(h.version ORDER BY rank) AS versions,
                   array_agg(h.nonce ORDER BY rank) AS nonces, array_agg(h.at ORDER BY rank) AS ats, array_agg(h.due ORDER BY rank) AS dues,
                   array_agg(h.held ORDER BY rank) AS helds, array_agg(h.unsettled ORDER BY rank) AS unsettleds, array_agg(h.header ORDER BY rank) AS headers
            FROM best JOIN record h USING (digest)
        ) AS told;
        -- An Update may have taken away what the first look saw.
        IF o_hit_count > 0 THEN
            o_outcome := 'Blocked';
            RETURN;
        END IF;
    END IF;

    FOR j IN 1..cardinality(v_changed) LOOP
        i := v_changed[j];
        IF NOT p_remove AND v_deltas[j] > 0 AND p_limits[i] IS NOT NULL THEN
            SELECT t.sum INTO d FROM meter t WHERE t.digest = p_meters[i];
            IF coalesce(d, 0) + v_deltas[j] > p_limits[i] THEN
                o_outcome := 'OverLimit';
                o_full := i;
                RETURN;
            END IF;
        END IF;
    END LOOP;

    -- Nothing is in the way. Only now something is written.
    o_outcome := 'Written';
    v_next := nextval('version');

    FOR j IN 1..cardinality(v_changed) LOOP
        i := v_changed[j];
        d := v_deltas[j];
        IF d > 0 THEN
            INSERT INTO meter AS t (digest, name, sum) VALUES (c_meters[i], p_names[i], trim_scale(d))
            ON CONFLICT (digest) DO UPDATE SET sum = trim_scale(t.sum + d);
        ELSE
            UPDATE meter t SET sum = trim_scale(t.sum + d) WHERE t.digest = c_meters[i];
            DELETE FROM meter t WHERE t.digest = c_meters[i] AND t.sum = 0;
        END IF;
        IF NOT p_remove THEN
            i := array_position(have.meters, c_meters[i]);
            IF i IS NULL THEN
                have.meters := have.meters || c_meters[v_changed[j]];
                have.amounts := have.amounts || trim_scale(c_amounts[v_changed[j]]);
            ELSIF c_amounts[v_changed[j]] = 0 THEN
                have.meters := nullif(have.meters[:i - 1] || have.meters[i + 1:], '{}');
                have.amounts := nullif(have.amounts[:i - 1] || have.amounts[i + 1:], '{}');
            ELSE
                have.amounts[i] := trim_scale(c_amounts[v_changed[j]]);
            END IF;
        END IF;
    END LOOP;

    IF p_remove OR (NOT p_keep AND have.strings IS DISTINCT FROM p_strings) THEN
        IF have.strings IS NOT NULL THEN
            DELETE FROM mark m USING unnest(have.strings) AS s (string) WHERE m.string = s.string AND m.record = p_digest;
        END IF;
        IF NOT p_remove AND p_strings IS NOT NULL THEN
            INSERT INTO mark (string, record, n) SELECT s.string, p_digest, s.n FROM unnest(p_strings) WITH ORDINALITY AS s (string, n);
        END IF;
    END IF;

    IF p_remove THEN
        DELETE FROM record r WHERE r.digest = p_digest;
        o_version := 0;
        RETURN;
    END IF;
    IF NOT p_keep THEN
        have.strings := p_strings;
        have.tags := p_tags;
        have.untils := p_untils;
        have.era := v_era;
        have.stamp := pg_current_xact_id();
    END IF;
    o_version := v_next;
    IF have.key IS NULL THEN
        INSERT INTO record (digest, key, version, nonce, at, due, held, unsettled, header, body, era, stamp, strings, tags, untils, meters, amounts)
        VALUES (p_digest, p_key, v_next, p_nonce, o_now, p_due, p_held, p_unsettled, p_header, p_body,
                have.era, have.stamp, have.strings, have.tags, have.untils, have.meters, have.amounts);
    ELSE
        UPDATE record r
        SET version = v_next, nonce = p_nonce, at = o_now, due = p_due, held = p_held, unsettled = p_unsettled, header = p_header, body = p_body,
            era = have.era, stamp = have.stamp, strings = have.strings, tags = have.tags, untils = have.untils, meters = have.meters, amounts = have.amounts
        WHERE r.digest = p_digest;
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION get(
    p_digest uuid, p_key bytea,
    OUT o_now bigint, OUT o_version bigint, OUT o_nonce bytea, OUT o_at bigint, OUT o_due bigint,
    OUT o_held boolean, OUT o_unsettled boolean, OUT o_header bytea, OUT o_body bytea
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    SELECT r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header, r.body
    INTO o_version, o_nonce, o_at, o_due, o_held, o_unsettled, o_header, o_body
    FROM record r WHERE r.digest = p_digest AND r.key = p_key;
END $$;
-- +goose StatementEnd

-- list_due and list_held return one more than a page, to say whether there is another.
-- The clock's row comes first, so that an empty page has its time as well.
--
-- +goose StatementBegin
CREATE FUNCTION list_due(p_before bigint, p_after_due bigint, p_after_digest uuid, p_limit bigint)
RETURNS TABLE (o_now bigint, o_digest uuid, o_key bytea, o_version bigint, o_nonce bytea, o_at bigint, o_due bigint,
               o_held boolean, o_unsettled boolean, o_header bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    RETURN NEXT;
    RETURN QUERY
        SELECT NULL::bigint, r.digest, r.key, r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header
        FROM record r
        WHERE r.due IS NOT NULL AND r.due <= p_before AND (r.due, r.digest) > (p_after_due, p_after_digest)
        ORDER BY r.due, r.digest LIMIT p_limit + 1;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION list_held(p_after bytea, p_limit bigint)
RETURNS TABLE (o_now bigint, o_digest uuid, o_key bytea, o_version bigint, o_nonce bytea, o_at bigint, o_due bigint,
               o_held boolean, o_unsettled boolean, o_header bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    RETURN NEXT;
    RETURN QUERY
        SELECT NULL::bigint, r.digest, r.key, r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header
        FROM record r
        WHERE r.held AND substr(r.key, 1, 1000) >= substr(p_after, 1, 1000) AND r.key > p_after
        ORDER BY substr(r.key, 1, 1000), r.key LIMIT p_limit + 1;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION meter_sum(p_digest uuid, OUT o_sum numeric) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT t.sum INTO o_sum FROM meter t WHERE t.digest = p_digest;
    o_sum := coalesce(o_sum, 0);
END $$;
-- +goose StatementEnd
