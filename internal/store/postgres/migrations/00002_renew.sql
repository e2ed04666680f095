-- An Update whose marks stay as they are but for their end sends none of them.

-- +goose Up

-- renew is as settle, where the record keeps its strings and tags whatever they are. Ends
-- that the index knows are the function write's to take out.
--
-- +goose StatementBegin
CREATE FUNCTION renew(
    p_highest bigint, p_lock bigint, p_epoch bytea, p_digest uuid, p_key bytea, p_expected bigint, p_nonce bytea,
    p_due bigint, p_held boolean, p_unsettled boolean, p_header bytea, p_body bytea, p_until bigint
) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_void text;
    v_done text;
BEGIN
    v_void := pg_advisory_xact_lock(p_lock);
    UPDATE record r
    SET version = nextval('version'), nonce = p_nonce, at = clock(), due = p_due, held = p_held, unsettled = p_unsettled, header = p_header, body = p_body,
        era = CASE WHEN r.strings IS NOT NULL THEN m.era END, stamp = CASE WHEN r.strings IS NOT NULL THEN pg_current_xact_id() END,
        until = CASE WHEN r.strings IS NOT NULL THEN p_until ELSE 0 END, untils = NULL
    FROM meta m
    WHERE (SELECT v.last_value FROM version v) >= p_highest AND m.epoch = p_epoch AND m.incarnation = current_setting('holdfast.incarnation', true)
      AND r.digest = p_digest AND r.version = p_expected AND r.key = p_key AND r.nonce <> p_nonce AND NOT r.indexed
    RETURNING r.version || ' ' || r.at INTO v_done;
    RETURN v_done;
END $$;
-- +goose StatementEnd
