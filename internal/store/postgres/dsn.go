package postgres

// What a DSN may say. Whoever writes one chooses a server and who asks it, and
// nothing else: no files, no sockets, no session settings, no services.

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var allowedParameters = []string{
	"host", "port", "user", "password", "dbname", "database",
	"sslmode", "sslnegotiation", "channel_binding", "require_auth",
	"target_session_attrs", "connect_timeout",
}

// environment is what a PostgreSQL client would read beside its DSN.
var environment = []string{
	"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE",
	"PGSSLMODE", "PGSSLCERT", "PGSSLKEY", "PGSSLCERTMODE", "PGSSLROOTCERT", "PGSSLPASSWORD", "PGSSLSNI", "PGSSLNEGOTIATION",
	"PGOPTIONS", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGTARGETSESSIONATTRS", "PGTZ",
	"PGMINPROTOCOLVERSION", "PGMAXPROTOCOLVERSION", "PGREQUIREAUTH", "PGCHANNELBINDING",
}

var sessionAttributes = regexp.MustCompile(`(?i)\btarget_session_attrs\s*=\s*'?([a-z%0-9-]*)`)

func parseDSN(dsn string) (*pgx.ConnConfig, error) {
	if strings.TrimSpace(dsn) == "" {
		return nil, errors.New("there is no DSN: name host, user, dbname and sslmode")
	}
	for _, name := range environment {
		if os.Getenv(name) != "" {
			return nil, fmt.Errorf("the environment sets %s: unset it, the DSN alone says where the store is", name)
		}
	}
	config, err := pgx.ParseConfigWithOptions(dsn, pgx.ParseConfigOptions{
		ParseConfigOptions: pgconn.ParseConfigOptions{ConnStringAllowedKeys: allowedParameters},
	})
	if err != nil {
		// The parser's message may quote the DSN, and with it the password.
		return nil, errors.New("the DSN cannot be used: " + dsnComplaint(err))
	}
	for _, m := range sessionAttributes.FindAllStringSubmatch(dsn, -1) {
		if !slices.Contains([]string{"any", "read-write", "primary"}, m[1]) {
			return nil, fmt.Errorf("the DSN has target_session_attrs=%s: a store is written to, name read-write or leave it out", m[1])
		}
	}
	// Of several hosts, the one that can be written to.
	config.ValidateConnect = validateWritable
	if err := refuseFallbackToPlain(config); err != nil {
		return nil, err
	}
	if config.Host == "" || config.User == "" || config.Database == "" {
		return nil, errors.New("the DSN lacks a host, user or dbname")
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	return config, nil
}

// PasswordOf is the password in a DSN; "": there is none.
func PasswordOf(dsn string) (string, error) {
	config, err := parseDSN(dsn)
	if err != nil {
		return "", err
	}
	return config.Password, nil
}

var errReadOnly = errors.New("the server takes no writes: it is a standby, or set to be read-only; point the DSN at the primary, or name all servers in it")

func validateWritable(ctx context.Context, c *pgconn.PgConn) error {
	result := c.ExecParams(ctx, "SHOW transaction_read_only", nil, nil, nil, nil).Read()
	if result.Err != nil {
		return result.Err
	}
	if string(result.Rows[0][0]) != "off" {
		return errReadOnly
	}
	return nil
}

// refuseFallbackToPlain refuses sslmode prefer and allow, and prefer is what none
// means: whoever is in between could have the password sent in the clear.
func refuseFallbackToPlain(config *pgx.ConnConfig) error {
	ways := map[string]bool{fmt.Sprint(config.Host, ":", config.Port): config.TLSConfig != nil}
	for _, f := range config.Fallbacks {
		at := fmt.Sprint(f.Host, ":", f.Port)
		if encrypted, known := ways[at]; known && encrypted != (f.TLSConfig != nil) {
			return errors.New("the DSN must name sslmode: verify-full, verify-ca or require, or disable where the way to the server is safe")
		}
		ways[at] = f.TLSConfig != nil
	}
	return nil
}

var refusedParameter = regexp.MustCompile(`connection string key "([a-z_A-Z0-9.]{1,64})" is not in ConnStringAllowedKeys`)

// dsnComplaint says what is wrong without saying what is there.
func dsnComplaint(err error) string {
	if m := refusedParameter.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Sprintf("parameter %s is not allowed; allowed are %s", m[1], strings.Join(allowedParameters, ", "))
	}
	for _, part := range []string{"sslmode", "port", "connect_timeout", "target_session_attrs", "sslnegotiation", "channel_binding", "require_auth"} {
		if strings.Contains(err.Error(), part+" is invalid") || strings.Contains(err.Error(), "invalid "+part) {
			return "the value of " + part + " is not valid"
		}
	}
	return "write postgres://user:password@host:port/dbname?sslmode=verify-full, or the same as keyword=value pairs; escape special characters"
}

// servers calls fn with each server of the DSN.
func servers(config *pgx.ConnConfig, fn func(host string, tls *tls.Config) error) error {
	if err := fn(config.Host, config.TLSConfig); err != nil {
		return err
	}
	for _, f := range config.Fallbacks {
		if err := fn(f.Host, f.TLSConfig); err != nil {
			return err
		}
	}
	return nil
}

// verifyBy has the servers verified by these authorities.
func verifyBy(config *pgx.ConnConfig, rootCA []byte) error {
	if rootCA == nil {
		return nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(rootCA) {
		return errors.New("there is no certificate in PEM to verify the server by")
	}
	return servers(config, func(_ string, c *tls.Config) error {
		if c == nil || c.InsecureSkipVerify && c.VerifyPeerCertificate == nil {
			return errors.New("there are authorities to verify the server by, and the DSN's sslmode verifies nothing: name verify-full or verify-ca")
		}
		c.RootCAs = pool
		return nil
	})
}

// dialBy has every connection made by dial, which resolves the names, too. Sockets
// are of this machine.
func dialBy(config *pgx.ConnConfig, dial pgconn.DialFunc) {
	plain := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if network == "unix" {
			return plain(ctx, network, address)
		}
		return dial(ctx, network, address)
	}
	config.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
}

func refuseSockets(config *pgx.ConnConfig) error {
	return servers(config, func(host string, _ *tls.Config) error {
		if strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") {
			return errors.New("the DSN names a Unix socket: name a host")
		}
		return nil
	})
}
