-- How records lie in the database, and the primitives that work on them.
--
-- A digest is the first 16 bytes of the SHA-256 of a string: an index takes no
-- strings of 4 KiB. That of an empty tag is 0. Times are microseconds, due, until and
-- untils milliseconds, since 1970.
--
-- What an index entry says follows from the record's row alone: mark is the
-- inverted index of record.strings, meter the sum of record.amounts. So a step that
-- leaves the strings of its marks as they are, and most do, stamps them anew by
-- writing one row.
--
-- A session keeps the plans that it has made, and they must do for tables of any size:
-- one that was vacuumed while it was empty is taken to be so. Where marks, records or
-- lanes are looked up for each of several others, that is a query of its own for each,
-- LATERAL or EXISTS, which LIMIT or OFFSET keeps from being merged into a join: of a
-- join the planner may as well read the whole table first.

-- +goose Up
CREATE TABLE meta (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    epoch       bytea,   -- NULL: never used
    key_domain  bytea,
    -- Transaction numbers are comparable within one incarnation of the cluster only.
    -- A promoted standby, a restored backup and a loaded dump begin a new one, and
    -- with it a new era.
    era         integer NOT NULL DEFAULT 0,
    incarnation text NOT NULL DEFAULT '',
    -- Another number at random each time that lanes are taken away or given to another
    -- kind. Counted, it could come to the same number again where a backup is restored.
    lanes       bigint NOT NULL DEFAULT 0,
    -- The last day on which was looked for what is of no more use.
    cleaned     integer NOT NULL DEFAULT 0
);
INSERT INTO meta DEFAULT VALUES;

CREATE SEQUENCE version;

CREATE TABLE record (
    digest    uuid PRIMARY KEY, -- of the key
    version   bigint  NOT NULL,
    at        bigint  NOT NULL,
    due       bigint,
    -- Marks. The stamp that all of them have, the digests of their strings, those of
    -- their tags (NULL: all empty), and the end of all of them (0: never); or their
    -- ends, if they differ.
    stamp     xid8,
    until     bigint  NOT NULL,
    era       integer,
    held      boolean NOT NULL,
    unsettled boolean NOT NULL,
    -- Whether the index knows when its marks end.
    indexed   boolean NOT NULL,
    key       bytea   NOT NULL,
    nonce     bytea   NOT NULL,
    header    bytea   NOT NULL,
    body      bytea   NOT NULL,
    strings   uuid[],
    tags      uuid[],
    untils    bigint[],
    -- Meter entries: the digests of the meters' names, and the amounts.
    meters    uuid[],
    amounts   numeric[]
) WITH (toast_tuple_target = 8160); -- what fits a page is neither compressed nor moved
-- A row of it, for functions' variables. A function looks a variable's type up by its
-- name again after every ANALYZE of the table, and then takes record for the built-in
-- type of that name, which has no columns.
CREATE VIEW record_row AS SELECT * FROM record;
CREATE INDEX record_due ON record (due, digest) WHERE due IS NOT NULL;
-- Keys can be longer than an index entry. Equal beginnings are sorted when listed.
CREATE INDEX record_held ON record (substr(key, 1, 1000)) WHERE held;

-- The order of its columns makes "is there another tag than this one" and "is there
-- one that has not ended" a step to a place in the index, however many there are.
-- until is the greatest number until a write that keeps its marks, the late ones of a
-- record's life, enters when they end: at a settlement that would cost as much as
-- all the rest.
CREATE TABLE mark (
    string uuid   NOT NULL,
    tag    uuid   NOT NULL,
    until  bigint NOT NULL,
    record uuid   NOT NULL, -- the record's digest
    PRIMARY KEY (string, tag, until, record)
);

CREATE TABLE meter (
    digest uuid PRIMARY KEY, -- of the name
    name   bytea   NOT NULL,
    sum    numeric NOT NULL  -- never 0: such a row is deleted
);

-- Strings that calls of one kind use side by side; see write.
CREATE TABLE lane (
    string uuid PRIMARY KEY,
    kind   uuid    NOT NULL,
    day    integer NOT NULL -- when it was made
);

-- What processes hold against a store that forgot. A beat is a process's count of its
-- own writes; a grave is the version that a record's removal had.
CREATE TABLE beat (
    process uuid PRIMARY KEY,
    writes  bigint  NOT NULL,
    day     integer NOT NULL -- when it was last written
);
CREATE TABLE grave (
    digest  uuid PRIMARY KEY,
    version bigint  NOT NULL,
    day     integer NOT NULL
);

-- +goose StatementBegin
CREATE FUNCTION clock() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION sequence() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM version $$;
-- +goose StatementEnd

-- incarnation is that of the cluster: which one, and on which timeline. A session
-- does not outlive it, and is told at its start.
--
-- +goose StatementBegin
CREATE FUNCTION incarnation() RETURNS text LANGUAGE sql VOLATILE AS
$$ SELECT system_identifier || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) FROM pg_control_system() $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION initialise(p_epoch bytea, p_key_domain bytea, OUT o_epoch bytea, OUT o_key_domain bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE meta SET epoch = p_epoch, key_domain = p_key_domain WHERE epoch IS NULL;
    SELECT epoch, key_domain INTO STRICT o_epoch, o_key_domain FROM meta;
END $$;
-- +goose StatementEnd

-- A disowning is one of its process's writes, and is counted at once.
--
-- +goose StatementBegin
CREATE FUNCTION disown(p_epoch bytea, p_next bytea, p_process uuid, p_writes bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE meta SET epoch = p_next WHERE epoch = p_epoch;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO beat (process, writes, day) VALUES (p_process, p_writes, clock() / 86400000000)
    ON CONFLICT (process) DO UPDATE SET writes = p_writes, day = excluded.day;
    RETURN true;
END $$;
-- +goose StatementEnd

-- disown_forgetful is for a process that has found its writes missing. If this is none of
-- the epochs that it wrote under, others have found the loss, and perhaps a person has
-- accepted it since.
--
-- +goose StatementBegin
CREATE FUNCTION disown_forgetful(p_known bytea[], p_next bytea) RETURNS void LANGUAGE sql VOLATILE AS
$$ UPDATE meta SET epoch = p_next WHERE epoch = ANY (p_known) $$;
-- +goose StatementEnd

-- lacks says what the store lacks of a process's acknowledged writes; NULL: nothing.
-- Whatever survives of the store is what was committed up to some moment. So if the
-- process's last beat survived, everything before it did; and of its last writes, each
-- left its version or a later one, or was removed by a later one.
--
-- +goose StatementBegin
CREATE FUNCTION lacks(p_process uuid, p_beat bigint, p_highest bigint, p_digests uuid[], p_versions bigint[]) RETURNS text
LANGUAGE sql VOLATILE AS $$
    SELECT CASE
        WHEN sequence() < p_highest THEN
            format('its last version is %s, %s was given', sequence(), p_highest)
        WHEN p_beat > 0 AND coalesce((SELECT b.writes FROM beat b WHERE b.process = p_process), 0) < p_beat THEN
            format('it counts %s writes of this process, %s were acknowledged', coalesce((SELECT b.writes FROM beat b WHERE b.process = p_process), 0), p_beat)
        ELSE (
            SELECT format('the write with version %s is not there', w.version)
            FROM unnest(p_digests, p_versions) AS w (digest, version)
            WHERE NOT EXISTS (SELECT FROM record r WHERE r.digest = w.digest AND r.version >= w.version OFFSET 0)
              AND NOT EXISTS (SELECT FROM grave g WHERE g.digest = w.digest AND g.version >= w.version OFFSET 0)
            LIMIT 1)
        END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION another_number() RETURNS bigint LANGUAGE sql VOLATILE AS
$$ SELECT ('x' || left(replace(gen_random_uuid()::text, '-', ''), 16))::bit(64)::bigint $$;
-- +goose StatementEnd

-- standing also raises the process's beat to p_writes, and takes away, once a day, what
-- is of no more use. After a leap of the clock nothing is taken away before all that
-- live had a day to show it.
--
-- +goose StatementBegin
CREATE FUNCTION standing(
    p_process uuid, p_writes bigint, p_beat bigint, p_highest bigint, p_digests uuid[], p_versions bigint[],
    OUT o_epoch bytea, OUT o_key_domain bytea, OUT o_sequence bigint, OUT o_now bigint, OUT o_lacks text
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_day     integer;
    v_cleaned integer;
BEGIN
    o_now := clock();
    v_day := o_now / 86400000000;
    SELECT m.epoch, m.key_domain, m.cleaned INTO STRICT o_epoch, o_key_domain, v_cleaned FROM meta m;
    o_sequence := sequence();
    IF p_writes > 0 THEN
        o_lacks := lacks(p_process, p_beat, p_highest, p_digests, p_versions);
        IF o_lacks IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    -- Always a write: the sequence counts versions, too, whose writes were not committed,
    -- and its answer must be as durable as this commit. A standby that takes over has come
    -- as far.
    INSERT INTO beat AS b (process, writes, day) VALUES (p_process, p_writes, v_day)
    ON CONFLICT (process) DO UPDATE SET writes = greatest(b.writes, p_writes), day = v_day;
    IF v_cleaned <> v_day THEN
        UPDATE meta SET cleaned = v_day WHERE cleaned = v_cleaned;
        IF FOUND AND v_day = v_cleaned + 1 THEN
            DELETE FROM beat WHERE day < v_day - 30;
            DELETE FROM grave WHERE day < v_day - 30;
            DELETE FROM lane WHERE day < v_day - 7;
            IF FOUND THEN
                UPDATE meta SET lanes = another_number();
            END IF;
        END IF;
    END IF;
END $$;
-- +goose StatementEnd

-- write is Reserve and Update, where the shorter ones below leave it to it. It is VOLATILE
-- and runs under READ COMMITTED: each of its statements sees what was committed before
-- that statement began. p_highest is the highest version that its process was answered
-- with: a store that has not come so far has forgotten.
--
-- Locks. Each is a number: the digest's first 8 bytes, mixed with the schema's seed,
-- its two lowest bits replaced by what it is: 0 a record, 1 a string, 3 a meter; in
-- p_locks, 3 is a string's that is taken shared. They are taken before any row is
-- locked, in one order, the record's, then the strings' by number, then the meters' by
-- number, and kept to the end. So there is no deadlock.
--
--   * A record's and a meter's lock are exclusive.
--   * Of a string, two calls of one kind are not in each other's way: two that only mark
--     it, two that only probe it, and two that mark it with a tag and except that tag.
--     All others must exclude each other. A lock alone cannot tell kinds apart, so one
--     kind at a time has the right to take it shared: the string's lane says which. All
--     others take it exclusively, and so does everybody where there is no lane.
--   * A lane is made, and given to another kind, only by who has the string's lock
--     exclusively, and is committed with it. Whoever takes it shared knows of the lane
--     from an earlier transaction, and the number that meta.lanes was then (p_lanes); if
--     it is another one by now, read under the lock, nothing is done ('Again'). So what
--     it knows of the lane is true as long as it has the lock: two that have it shared at
--     the same time are of one kind.
--   * A lane is taken away at any time: those that have the lock keep it, and whoever
--     comes finds another number.
--
-- Only a Reserve locks strings. That suffices: an Update is refused by nobody's
-- marks, so a Reserve that runs at the same time and does not see its marks comes
-- before it in the order of writes, and one that does comes after it. What is probed is
-- one snapshot, taken after all locks (where meters change a second look is taken, after
-- theirs): a write that this Reserve sees elsewhere, its own record's or a meter's, was
-- committed before its lock was taken, and is seen by the probes as well.
--
-- Watermarks. A mark's stamp is its writer's transaction number and the era; a
-- watermark is the snapshot of the statement that probed, and the era. It covers what
-- that snapshot could see, and all of earlier eras.
--
-- +goose StatementBegin
CREATE FUNCTION write(
    p_highest bigint, p_locks bigint[], p_lanes bigint, p_make_strings uuid[], p_make_kinds uuid[],
    p_epoch bytea, p_digest uuid, p_key bytea, p_expected bigint, p_nonce bytea,
    p_remove boolean, p_due bigint, p_held boolean, p_unsettled boolean, p_header bytea, p_body bytea,
    p_keep boolean, p_strings uuid[], p_tags uuid[], p_until bigint, p_untils bigint[],
    p_seed bigint, p_meters uuid[], p_names bytea[], p_amounts numeric[], p_limits numeric[],
    -- Probes are counted from 1: those without a tag to except, then those with one.
    p_probes uuid[], p_probes_except uuid[], p_excepts uuid[], p_firsts integer[],
    p_over_eras integer[], p_over_snapshots pg_snapshot[],
    OUT o_outcome text, OUT o_now bigint, OUT o_version bigint, OUT o_epoch bytea, OUT o_lanes bigint, OUT o_full integer,
    OUT o_nonce bytea, OUT o_at bigint, OUT o_due bigint, OUT o_held boolean, OUT o_unsettled boolean, OUT o_header bytea, OUT o_body bytea,
    OUT o_watermark text, OUT o_hit_count bigint, OUT o_probe_hits integer[],
    OUT o_hit_keys bytea[], OUT o_hit_versions bigint[], OUT o_hit_nonces bytea[], OUT o_hit_ats bigint[], OUT o_hit_dues bigint[],
    OUT o_hit_helds boolean[], OUT o_hit_unsettleds boolean[], OUT o_hit_headers bytea[],
    OUT o_pair_hits integer[], OUT o_pair_probes integer[]
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c_never constant bigint := 9223372036854775807;
    c_none  constant uuid := '00000000-0000-0000-0000-000000000000';
    v_void        text;
    v_incarnation text := current_setting('holdfast.incarnation', true);
    v_known       text;
    v_era         integer;
    v_version     bigint;
    v_nonce       bytea;
    v_hit         boolean;
    v_ms          bigint;
    have          record_row%ROWTYPE;
    v_lock        bigint;
    i             integer;
    j             integer;
    d             numeric;
    c_meters      uuid[] := p_meters;
    c_amounts     numeric[] := p_amounts;
    v_changed     integer[];
    v_deltas      numeric[];
    v_meter_locks bigint[];
BEGIN
    FOREACH v_lock IN ARRAY p_locks LOOP
        IF v_lock & 3 = 3 THEN
            v_void := pg_advisory_xact_lock_shared(v_lock - 2);
        ELSE
            v_void := pg_advisory_xact_lock(v_lock);
        END IF;
    END LOOP;

    -- The first look asks whether there may be a hit: mostly there is not, and then it
    -- is one step in the index for each probe.
    SELECT m.epoch, m.era, m.incarnation, m.lanes, r.version, r.nonce,
           EXISTS (SELECT FROM mark k WHERE k.string = ANY (p_probes) AND k.record <> p_digest)
           OR EXISTS (SELECT FROM unnest(p_probes_except, p_excepts) AS x (string, tag),
                LATERAL (SELECT FROM mark k WHERE k.string = x.string AND k.tag < x.tag AND k.record <> p_digest LIMIT 1) AS k)
           OR EXISTS (SELECT FROM unnest(p_probes_except, p_excepts) AS x (string, tag),
                LATERAL (SELECT FROM mark k WHERE k.string = x.string AND k.tag > x.tag AND k.record <> p_digest LIMIT 1) AS k)
    INTO STRICT o_epoch, v_era, v_known, o_lanes, v_version, v_nonce, v_hit
    FROM meta m LEFT JOIN record r ON r.digest = p_digest;

    IF o_epoch IS DISTINCT FROM p_epoch THEN
        o_outcome := 'Lost';
        RETURN;
    END IF;
    IF sequence() < p_highest THEN
        o_outcome := 'Forgot';
        RETURN;
    END IF;
    IF v_version IS NOT NULL THEN
        SELECT * INTO STRICT have FROM record r WHERE r.digest = p_digest;
        IF have.key <> p_key THEN
            RAISE EXCEPTION 'two keys have the digest %', p_digest;
        END IF;
        IF have.nonce = p_nonce THEN
            -- Where an administrator has cut short the wait for a standby, the earlier
            -- write may not be there yet. This commit comes after it in the log.
            UPDATE record r SET nonce = r.nonce WHERE r.digest = p_digest;
            o_outcome := 'Repeated';
            o_version := have.version;
            o_now := clock();
            RETURN;
        END IF;
    END IF;
    IF coalesce(v_version, 0) <> p_expected THEN
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
    IF o_lanes <> p_lanes THEN
        o_outcome := 'Again';
        o_now := clock();
        RETURN;
    END IF;

    -- Entries that stay as they are lock nothing.
    IF p_remove AND have.meters IS NOT NULL THEN
        c_meters := have.meters;
        c_amounts := array_fill(0::numeric, ARRAY[cardinality(have.meters)]);
    END IF;
    IF c_meters IS NOT NULL THEN
        FOR i IN 1..cardinality(c_meters) LOOP
            j := array_position(have.meters, c_meters[i]);
            d := c_amounts[i] - coalesce(have.amounts[j], 0);
            IF d <> 0 THEN
                v_changed := v_changed || i;
                v_deltas := v_deltas || d;
                v_meter_locks := v_meter_locks || ((('x' || left(replace(c_meters[i]::text, '-', ''), 16))::bit(64)::bigint # p_seed) | 3::bigint);
            END IF;
        END LOOP;
        IF v_changed IS NOT NULL THEN
            FOR v_lock IN SELECT DISTINCT l FROM unnest(v_meter_locks) AS l ORDER BY l LOOP
                v_void := pg_advisory_xact_lock(v_lock);
            END LOOP;
            -- Whoever changed a meter while it was waited for may have left marks.
            v_hit := true;
        END IF;
    END IF;

    -- All locks are taken: what is read from here on stays so until the end.
    IF v_incarnation IS NULL OR v_incarnation = '' THEN
        v_incarnation := incarnation();
    END IF;
    IF v_known <> v_incarnation THEN
        UPDATE meta m SET era = m.era + 1, incarnation = v_incarnation WHERE m.incarnation <> v_incarnation;
        SELECT m.era INTO STRICT v_era FROM meta m;
    END IF;
    o_now := clock();
    v_ms := o_now / 1000;

    IF p_over_eras IS NOT NULL THEN
        IF EXISTS (
            SELECT FROM unnest(p_over_eras, p_over_snapshots) AS w (era, snapshot)
            WHERE w.era > v_era OR (w.era = v_era AND pg_snapshot_xmax(w.snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
        ) THEN
            o_outcome := 'Beyond';
            RETURN;
        END IF;
    END IF;

    IF v_hit AND (p_probes IS NOT NULL OR p_probes_except IS NOT NULL) THEN
        -- Of each string, from one tag to the next; of each tag, what has not ended.
        WITH RECURSIVE probe (n, string, besides) AS MATERIALIZED (
            SELECT p.n, p.string, p.besides
            FROM unnest(p_probes || p_probes_except, array_fill(NULL::uuid, ARRAY[coalesce(cardinality(p_probes), 0)]) || p_excepts)
                WITH ORDINALITY AS p (string, besides, n)
        ), tagged (n, string, besides, tag) AS (
            SELECT p.n, p.string, p.besides, (SELECT k.tag FROM mark k WHERE k.string = p.string ORDER BY k.tag LIMIT 1)
            FROM probe p
            UNION ALL
            SELECT t.n, t.string, t.besides, (SELECT k.tag FROM mark k WHERE k.string = t.string AND k.tag > t.tag ORDER BY k.tag LIMIT 1)
            FROM tagged t WHERE t.tag IS NOT NULL
        ), hit AS MATERIALIZED (
            SELECT t.n, t.n = ANY (p_firsts) AS top, h.digest, h.unsettled, h.version
            FROM tagged t,
                LATERAL (
                    SELECT k.record FROM mark k
                    WHERE k.string = t.string AND k.tag = t.tag AND k.until > v_ms AND k.record <> p_digest OFFSET 0
                ) AS k,
                LATERAL (
                    SELECT h.digest, h.unsettled, h.version, h.era, h.stamp, h.until, h.strings, h.tags, h.untils
                    FROM record h WHERE h.digest = k.record OFFSET 0
                ) AS h
            WHERE t.tag IS DISTINCT FROM t.besides
              AND CASE
                  WHEN h.untils IS NULL THEN h.until = 0 OR h.until > v_ms
                  ELSE EXISTS (
                      SELECT FROM unnest(h.strings, h.tags, h.untils) AS s (string, tag, until)
                      WHERE s.string = t.string AND coalesce(s.tag, c_none) = t.tag AND (s.until = 0 OR s.until > v_ms))
                  END
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
            FROM best b,
                LATERAL (
                    SELECT h.key, h.version, h.nonce, h.at, h.due, h.held, h.unsettled, h.header
                    FROM record h WHERE h.digest = b.digest OFFSET 0
                ) AS h
        ) AS told;
        IF o_hit_count > 0 THEN
            o_outcome := 'Blocked';
            RETURN;
        END IF;
    END IF;

    IF v_changed IS NOT NULL THEN
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
    END IF;
    o_outcome := 'Written';

    IF p_make_strings IS NOT NULL THEN
        IF EXISTS (SELECT FROM unnest(p_make_strings, p_make_kinds) AS n (string, kind),
            LATERAL (SELECT FROM lane l WHERE l.string = n.string AND l.kind <> n.kind LIMIT 1) AS l) THEN
            UPDATE meta m SET lanes = another_number() RETURNING m.lanes INTO STRICT o_lanes;
            UPDATE lane l SET kind = n.kind, day = o_now / 86400000000
            FROM unnest(p_make_strings, p_make_kinds) AS n (string, kind) WHERE l.string = n.string AND l.kind <> n.kind;
        END IF;
        INSERT INTO lane (string, kind, day)
        SELECT n.string, n.kind, o_now / 86400000000 FROM unnest(p_make_strings, p_make_kinds) AS n (string, kind)
        ON CONFLICT (string) DO NOTHING;
    END IF;

    IF v_version IS NULL THEN
        IF p_strings IS NOT NULL THEN
            INSERT INTO mark (string, tag, until, record)
            SELECT s.string, coalesce(s.tag, c_none), c_never, p_digest FROM unnest(p_strings, p_tags) AS s (string, tag);
            have.era := v_era;
            have.stamp := pg_current_xact_id();
        END IF;
        INSERT INTO record (digest, key, version, nonce, at, due, held, unsettled, header, body,
                            era, stamp, strings, tags, until, untils, indexed, meters, amounts)
        VALUES (p_digest, p_key, nextval('version'), p_nonce, o_now, p_due, p_held, p_unsettled, p_header, p_body,
                have.era, have.stamp, p_strings, p_tags, p_until, p_untils, false, have.meters, have.amounts)
        RETURNING version INTO o_version;
        RETURN;
    END IF;

    IF p_remove OR (NOT p_keep AND (have.indexed OR have.strings IS DISTINCT FROM p_strings OR have.tags IS DISTINCT FROM p_tags)) THEN
        IF have.strings IS NOT NULL THEN
            DELETE FROM mark WHERE ctid = ANY (ARRAY(
                SELECT k.ctid FROM unnest(have.strings, have.tags, have.untils) AS s (string, tag, until),
                    LATERAL (
                        SELECT k.ctid FROM mark k
                        WHERE k.string = s.string AND k.tag = coalesce(s.tag, c_none) AND k.record = p_digest
                          AND k.until = CASE WHEN have.indexed THEN coalesce(nullif(coalesce(s.until, have.until), 0), c_never) ELSE c_never END
                        LIMIT 1
                    ) AS k));
        END IF;
        IF NOT p_remove AND p_strings IS NOT NULL THEN
            INSERT INTO mark (string, tag, until, record)
            SELECT s.string, coalesce(s.tag, c_none), c_never, p_digest FROM unnest(p_strings, p_tags) AS s (string, tag);
        END IF;
        have.indexed := false;
    ELSIF p_keep AND NOT have.indexed AND have.strings IS NOT NULL AND (have.untils IS NOT NULL OR have.until <> 0) THEN
        UPDATE mark k SET until = coalesce(nullif(coalesce((
                SELECT s.until FROM unnest(have.strings, have.tags, have.untils) AS s (string, tag, until)
                WHERE s.string = k.string AND coalesce(s.tag, c_none) = k.tag
            ), have.until), 0), c_never)
        WHERE k.ctid = ANY (ARRAY(
            SELECT k.ctid FROM unnest(have.strings, have.tags) AS s (string, tag),
                LATERAL (
                    SELECT k.ctid FROM mark k
                    WHERE k.string = s.string AND k.tag = coalesce(s.tag, c_none) AND k.until = c_never AND k.record = p_digest
                    LIMIT 1
                ) AS k));
        have.indexed := true;
    END IF;

    IF p_remove THEN
        DELETE FROM record r WHERE r.digest = p_digest;
        o_version := nextval('version');
        INSERT INTO grave (digest, version, day) VALUES (p_digest, o_version, o_now / 86400000000)
        ON CONFLICT (digest) DO UPDATE SET version = excluded.version, day = excluded.day;
        RETURN;
    END IF;
    IF NOT p_keep THEN
        have.strings := p_strings;
        have.tags := p_tags;
        have.until := p_until;
        have.untils := p_untils;
        have.era := v_era;
        have.stamp := pg_current_xact_id();
    END IF;
    UPDATE record r
    SET version = nextval('version'), nonce = p_nonce, at = o_now, due = p_due, held = p_held, unsettled = p_unsettled, header = p_header, body = p_body,
        era = have.era, stamp = have.stamp, strings = have.strings, tags = have.tags, until = have.until, untils = have.untils, indexed = have.indexed,
        meters = have.meters, amounts = have.amounts
    WHERE r.digest = p_digest
    RETURNING r.version INTO o_version;
END $$;
-- +goose StatementEnd

-- reserve and settle are what most calls come to: the Reserve of a new record that
-- nothing is in the way of, and the Update that leaves strings and meters as they are.
-- After the locks each is one statement, which has all its conditions in it. Where they do
-- not hold nothing is done, the answer is NULL, and the same is asked of write.
-- Otherwise the answer is the version and the time, as text: that costs the least.
--
-- +goose StatementBegin
CREATE FUNCTION reserve(
    p_highest bigint, p_locks bigint[], p_lanes bigint, p_epoch bytea, p_digest uuid, p_key bytea, p_nonce bytea,
    p_due bigint, p_held boolean, p_unsettled boolean, p_header bytea, p_body bytea,
    p_strings uuid[], p_tags uuid[], p_until bigint,
    -- Strings with no tag to except; and, of the others, the tags before and after it.
    p_probes uuid[], p_ranges uuid[], p_from uuid[], p_to uuid[]
) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock bigint;
    v_void text;
    v_done text;
BEGIN
    FOREACH v_lock IN ARRAY p_locks LOOP
        IF v_lock & 3 = 3 THEN
            v_void := pg_advisory_xact_lock_shared(v_lock - 2);
        ELSE
            v_void := pg_advisory_xact_lock(v_lock);
        END IF;
    END LOOP;
    WITH free AS MATERIALIZED (
        SELECT m.era FROM meta m
        WHERE (SELECT v.last_value FROM version v) >= p_highest AND m.epoch = p_epoch AND m.incarnation = current_setting('holdfast.incarnation', true) AND (p_lanes IS NULL OR m.lanes = p_lanes)
          AND NOT EXISTS (SELECT FROM record r WHERE r.digest = p_digest)
          AND NOT EXISTS (SELECT FROM mark k WHERE k.string = ANY (p_probes))
          AND NOT EXISTS (SELECT FROM unnest(p_ranges, p_from, p_to) AS x (string, first, last),
            LATERAL (SELECT FROM mark k WHERE k.string = x.string AND k.tag BETWEEN x.first AND x.last LIMIT 1) AS k)
    ), marked AS (
        INSERT INTO mark (string, tag, until, record)
        SELECT s.string, coalesce(s.tag, '00000000-0000-0000-0000-000000000000'), 9223372036854775807, p_digest
        FROM free, unnest(p_strings, p_tags) AS s (string, tag)
    )
    INSERT INTO record AS r (digest, version, at, due, stamp, until, era, held, unsettled, indexed, key, nonce, header, body, strings, tags)
    SELECT p_digest, nextval('version'), clock(), p_due, CASE WHEN p_strings IS NOT NULL THEN pg_current_xact_id() END, p_until, CASE WHEN p_strings IS NOT NULL THEN free.era END,
           p_held, p_unsettled, false, p_key, p_nonce, p_header, p_body, p_strings, p_tags
    FROM free
    RETURNING r.version || ' ' || r.at INTO v_done;
    RETURN v_done;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION settle(
    p_highest bigint, p_lock bigint, p_epoch bytea, p_digest uuid, p_key bytea, p_expected bigint, p_nonce bytea,
    p_due bigint, p_held boolean, p_unsettled boolean, p_header bytea, p_body bytea,
    p_strings uuid[], p_tags uuid[], p_until bigint
) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_void text;
    v_done text;
BEGIN
    v_void := pg_advisory_xact_lock(p_lock);
    UPDATE record r
    SET version = nextval('version'), nonce = p_nonce, at = clock(), due = p_due, held = p_held, unsettled = p_unsettled, header = p_header, body = p_body,
        era = CASE WHEN p_strings IS NOT NULL THEN m.era END, stamp = CASE WHEN p_strings IS NOT NULL THEN pg_current_xact_id() END, until = p_until
    FROM meta m
    WHERE (SELECT v.last_value FROM version v) >= p_highest AND m.epoch = p_epoch AND m.incarnation = current_setting('holdfast.incarnation', true)
      AND r.digest = p_digest AND r.version = p_expected AND r.key = p_key AND r.nonce <> p_nonce
      AND r.strings IS NOT DISTINCT FROM p_strings AND r.tags IS NOT DISTINCT FROM p_tags AND r.untils IS NULL AND NOT r.indexed
    RETURNING r.version || ' ' || r.at INTO v_done;
    RETURN v_done;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION get(
    p_digest uuid, p_key bytea,
    OUT o_now bigint, OUT o_sequence bigint, OUT o_version bigint, OUT o_nonce bytea, OUT o_at bigint, OUT o_due bigint,
    OUT o_held boolean, OUT o_unsettled boolean, OUT o_header bytea, OUT o_body bytea
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    o_sequence := sequence();
    SELECT r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header, r.body
    INTO o_version, o_nonce, o_at, o_due, o_held, o_unsettled, o_header, o_body
    FROM record r WHERE r.digest = p_digest AND r.key = p_key;
END $$;
-- +goose StatementEnd

-- list_due and list_held return one more than a page, to say whether there is another.
-- The clock's row, with the last version, comes first, so that an empty page has its time as well.
--
-- +goose StatementBegin
CREATE FUNCTION list_due(p_before bigint, p_after_due bigint, p_after_digest uuid, p_limit bigint)
RETURNS TABLE (o_now bigint, o_sequence bigint, o_digest uuid, o_key bytea, o_version bigint, o_nonce bytea, o_at bigint, o_due bigint,
               o_held boolean, o_unsettled boolean, o_header bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    o_sequence := sequence();
    RETURN NEXT;
    RETURN QUERY
        SELECT NULL::bigint, NULL::bigint, r.digest, r.key, r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header
        FROM record r
        WHERE r.due IS NOT NULL AND r.due <= p_before AND (r.due, r.digest) > (p_after_due, p_after_digest)
        ORDER BY r.due, r.digest LIMIT p_limit + 1;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION list_held(p_after bytea, p_limit bigint)
RETURNS TABLE (o_now bigint, o_sequence bigint, o_digest uuid, o_key bytea, o_version bigint, o_nonce bytea, o_at bigint, o_due bigint,
               o_held boolean, o_unsettled boolean, o_header bytea)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_now := clock();
    o_sequence := sequence();
    RETURN NEXT;
    RETURN QUERY
        SELECT NULL::bigint, NULL::bigint, r.digest, r.key, r.version, r.nonce, r.at, r.due, r.held, r.unsettled, r.header
        FROM record r
        WHERE r.held AND substr(r.key, 1, 1000) >= substr(p_after, 1, 1000) AND r.key > p_after
        ORDER BY substr(r.key, 1, 1000), r.key LIMIT p_limit + 1;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION meter_sum(p_digest uuid, OUT o_sequence bigint, OUT o_sum numeric) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    o_sequence := sequence();
    SELECT t.sum INTO o_sum FROM meter t WHERE t.digest = p_digest;
    o_sum := coalesce(o_sum, 0);
END $$;
-- +goose StatementEnd
