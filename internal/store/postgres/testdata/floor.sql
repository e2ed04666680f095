-- The floor of the store: a call's two durable writes and nothing else, for pgbench:
--
--   pgbench -n -M prepared -c 64 -j 2 -f floor.sql
--
-- It runs in the store's own schema (PGOPTIONS='-c search_path=holdfast'), after the store
-- has made it, so that its rows are the store's rows: one record with as many bytes, and
-- as many marks, of which as many are new strings, strings of one of a thousand
-- accounts, and strings that all have, as those of a call with a scope of four
-- segments and a lineage of two. There are no functions, no locks, no probes; nothing is
-- compared, and nobody learns a version.
\set id random(1, 9000000000000000)
\set account random(1, 1000)
BEGIN;
INSERT INTO record (digest, version, at, due, stamp, until, era, held, unsettled, indexed, key, nonce, header, body, strings, tags)
VALUES (lpad(to_hex(:id::bigint), 32, '0')::uuid, :id::bigint, 1893553445678901, :id::bigint, '1000', 0, 1, false, true, false,
    repeat('k', 87)::bytea, repeat('n', 32)::bytea, repeat('h', 560)::bytea, repeat('b', 480)::bytea,
    ARRAY[lpad(to_hex(:id::bigint), 32, '1'), lpad(to_hex(:id::bigint), 32, '2'), lpad(to_hex(:id::bigint), 32, '3'), lpad(to_hex(:id::bigint), 32, '4'),
          lpad(to_hex(:account::bigint), 32, '5'), lpad(to_hex(:account::bigint), 32, '6'), lpad(to_hex(:account::bigint), 32, '7'), lpad(to_hex(:account::bigint), 32, '8'),
          lpad('', 32, '9'), lpad('', 32, 'a')]::uuid[],
    ARRAY[lpad('', 32, '0'), lpad('', 32, '0'), lpad('', 32, '0'), lpad('', 32, '0'), lpad('', 32, '0'), lpad('', 32, '0'), lpad('', 32, '0'),
          lpad('', 32, 'd'), lpad('', 32, 'e'), lpad('', 32, 'f')]::uuid[]);
INSERT INTO mark (string, tag, until, record)
SELECT s.string, s.tag, 9223372036854775807, lpad(to_hex(:id::bigint), 32, '0')::uuid
FROM (VALUES
    (lpad(to_hex(:id::bigint), 32, '1')::uuid, '00000000-0000-0000-0000-000000000000'::uuid),
    (lpad(to_hex(:id::bigint), 32, '2')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad(to_hex(:id::bigint), 32, '3')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad(to_hex(:id::bigint), 32, '4')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad(to_hex(:account::bigint), 32, '5')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad(to_hex(:account::bigint), 32, '6')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad(to_hex(:account::bigint), 32, '7')::uuid, 'dddddddd-dddd-dddd-dddd-dddddddddddd'),
    (lpad(to_hex(:account::bigint), 32, '8')::uuid, 'eeeeeeee-eeee-eeee-eeee-eeeeeeeeeeee'),
    (lpad('', 32, '9')::uuid, '00000000-0000-0000-0000-000000000000'),
    (lpad('', 32, 'a')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
) AS s (string, tag);
COMMIT;
UPDATE record SET version = :id::bigint, at = 1893553445678901, due = :id::bigint + 1, stamp = '1001', until = :id::bigint, era = 1, held = false, unsettled = false,
    nonce = repeat('m', 32)::bytea, header = repeat('h', 600)::bytea, body = repeat('c', 1210)::bytea
WHERE digest = lpad(to_hex(:id::bigint), 32, '0')::uuid;
