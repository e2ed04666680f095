package postgres_test

// What a store is opened with, how its schema comes to be, and what is said of its
// server.

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

func TestDSN(t *testing.T) {
	const good = "postgres://app:secret@db.example:5432/app?sslmode=verify-full"
	for _, c := range []struct{ dsn, says string }{
		{good, ""},
		{good + "&connect_timeout=3&target_session_attrs=read-write", ""},
		{good + "&target_session_attrs=primary&channel_binding=require", ""},
		{"host=db.example port=5432 user=app password='a secret' dbname=app sslmode=require", ""},
		{"host=/run/postgresql user=app dbname=app", "names a Unix socket"},
		{"host=db.example,/run/postgresql port=1,2 user=app dbname=app sslmode=disable", "names a Unix socket"},
		{"host=@abstract user=app dbname=app sslmode=disable", "names a Unix socket"},
		{good + "&sslrootcert=/etc/passwd", "parameter sslrootcert is not allowed"},
		{"host=a.example,b.example port=1,2 user=app dbname=app sslmode=disable", ""},
		{"", "there is no DSN"},
		{"postgres://app:secret@db.example/app", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=prefer", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=allow", "must name sslmode"},
		{"postgres://app:secret@db.example/app?sslmode=sometimes", "sslmode"},
		{good + "&options=-csearch_path%3Devil", "parameter options is not allowed"},
		{good + "&search_path=evil", "parameter search_path is not allowed"},
		{good + "&service=other", "parameter service is not allowed"},
		{good + "&servicefile=/etc/passwd", "parameter servicefile is not allowed"},
		{good + "&passfile=/etc/passwd", "parameter passfile is not allowed"},
		{good + "&sslkey=/etc/key", "parameter sslkey is not allowed"},
		{good + "&statement_timeout=0", "parameter statement_timeout is not allowed"},
		{good + "&pool_max_conns=1000", "parameter pool_max_conns is not allowed"},
		{good + "&default_query_exec_mode=simple_protocol", "parameter default_query_exec_mode is not allowed"},
		{good + "&target_session_attrs=read-only", "target_session_attrs=read-only"},
		{good + "&target_session_attrs=prefer-standby", "target_session_attrs=prefer-standby"},
		{"host=db.example user=app dbname=app sslmode=require target_session_attrs='standby'", "target_session_attrs=standby"},
		{"host=db.example user=app password=secret dbname=app sslmode=require port=none", "port"},
		{"postgres://app:sec ret@db.example:x y/app", "escape special characters"},
	} {
		s, err := postgres.Open(postgres.Options{DSN: c.dsn})
		switch {
		case err == nil && c.says == "":
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		case err == nil || c.says == "" || !strings.Contains(err.Error(), c.says):
			t.Errorf("%q: %v; want %q", c.dsn, err, c.says)
		case strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "sec ret"):
			t.Errorf("%q: the error tells the password: %v", c.dsn, err)
		}
	}
	for _, name := range []string{"PGHOST", "PGSERVICE", "PGPASSWORD", "PGOPTIONS"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "evil")
			if _, err := postgres.Open(postgres.Options{DSN: good}); err == nil || !strings.Contains(err.Error(), "unset it") {
				t.Errorf("with %s: %v", name, err)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	const dsn = "host=db.example user=app dbname=app sslmode=require"
	for _, o := range []postgres.Options{
		{Schema: "Upper"}, {Schema: `x"; DROP SCHEMA public`}, {Schema: "pg_own"}, {Schema: "information_schema"}, {Schema: "1st"}, {Schema: strings.Repeat("x", 64)},
		{MaxConns: -1}, {MaxConns: 20_000}, {Timeout: -1}, {Timeout: time.Millisecond}, {Timeout: 2 * time.Hour},
	} {
		o.DSN = dsn
		if s, err := postgres.Open(o); err == nil {
			t.Errorf("%+v was taken", o)
			_ = s.Close()
		}
	}
}

// The certificates that a server is verified by are the store's to name.
func TestRootCA(t *testing.T) {
	server := newServer(t, "fsync=off")
	ours, other := newAuthority(t), newAuthority(t)
	certificate, key := ours.issue(t, "127.0.0.1")
	for name, text := range map[string][]byte{"server.crt": certificate, "server.key": key} {
		path := filepath.Join(server.data(), name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if server.cred != nil {
			if err := os.Chown(path, int(server.cred.Uid), int(server.cred.Gid)); err != nil {
				t.Fatal(err)
			}
		}
	}
	server.exec(t, "postgres", "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
	admin := server.admin(t, "postgres")
	eventually(t, "the server has TLS", func() error {
		if on := ask[string](t, admin, "SELECT setting FROM pg_settings WHERE name = 'ssl'"); on != "on" {
			return errors.New(on)
		}
		return nil
	})
	for _, mode := range []string{"verify-full", "verify-ca"} {
		dsn := strings.Replace(server.dsn("postgres"), "sslmode=disable", "sslmode="+mode, 1)
		if _, err := open(t, postgres.Options{DSN: dsn, RootCA: ours.pem}).Standing(context.Background()); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
		for name, ca := range map[string][]byte{"another's": other.pem, "the machine's": nil} {
			_, err := open(t, postgres.Options{DSN: dsn, RootCA: ca}).Standing(context.Background())
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
				t.Errorf("%s by %s: %v", mode, name, err)
			}
		}
	}
	byName := strings.NewReplacer("sslmode=disable", "sslmode=verify-full", "host=127.0.0.1", "host=localhost").Replace(server.dsn("postgres"))
	if _, err := open(t, postgres.Options{DSN: byName, RootCA: ours.pem}).Standing(context.Background()); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a name that is not in the certificate: %v", err)
	}
	for _, o := range []postgres.Options{{DSN: byName, RootCA: []byte("no certificate")}, {DSN: strings.Replace(byName, "verify-full", "require", 1), RootCA: ours.pem}} {
		if s, err := postgres.Open(o); err == nil {
			t.Errorf("%q was taken with %q", o.DSN, o.RootCA)
			_ = s.Close()
		}
	}
}

type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.certificate, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

// issue makes a certificate for an address.
func (a *authority) issue(t testing.TB, address string) (certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "a server"}, IPAddresses: []net.IP{net.ParseIP(address)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, private.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text})
}

// Every connection is made by who is given for it, that of a migration, too; and none
// without.
func TestDial(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	var refuse atomic.Bool
	var dialled atomic.Int64
	address := fmt.Sprintf("store.example:%d", server.port)
	s := open(t, postgres.Options{
		DSN: strings.Replace(server.dsn("postgres"), "host=127.0.0.1", "host=store.example", 1), Schema: schema,
		Dial: func(ctx context.Context, network, to string) (net.Conn, error) {
			if to != address || network != "tcp" {
				t.Errorf("dialled %s %s", network, to)
			}
			if refuse.Load() {
				return nil, errors.New("not to this address")
			}
			dialled.Add(1)
			var d net.Dialer
			return d.DialContext(ctx, network, fmt.Sprintf("127.0.0.1:%d", server.port))
		},
	})
	initialise(t, s)
	if dialled.Load() == 0 {
		t.Error("nothing was dialled")
	}
	refuse.Store(true)
	server.exec(t, "postgres", "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'holdfast'")
	fails(t, s, 20*time.Second, "")
	fails(t, s, 20*time.Second, "not to this address")
	refuse.Store(false)
	recovers(t, s)

	socket := strings.Replace(server.dsn("postgres"), "host=127.0.0.1", "host="+server.dir, 1)
	local := open(t, postgres.Options{DSN: socket, Schema: newSchema(), AllowSockets: true})
	initialise(t, local)
	recovers(t, local)
}

// Many processes start at once on an empty database.
func TestMigrateTogether(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	const n = 12
	var group sync.WaitGroup
	ids := make([]store.Identity, n)
	for i := range n {
		s := open(t, postgres.Options{DSN: server.patient(), Schema: schema, MaxConns: 2, Timeout: patience})
		group.Go(func() {
			var err error
			if ids[i], err = s.Initialise(context.Background(), store.Identity{Epoch: fmt.Sprint(i), KeyDomain: "d"}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("%+v and %+v", id, ids[0])
		}
	}
	c := server.admin(t, "postgres")
	if n := ask[int](t, c, fmt.Sprintf("SELECT count(*) FROM %s.goose_db_version WHERE version_id = 1", schema)); n != 1 {
		t.Errorf("the migration was made %d times", n)
	}
	noLocksLeft(t, server)
}

func TestNewerFormat(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	initialise(t, open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema}))
	server.exec(t, "postgres", fmt.Sprintf("INSERT INTO %s.goose_db_version (version_id, is_applied) VALUES (99, true)", schema))
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	if _, err := s.Standing(context.Background()); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "format 99") {
		t.Errorf("Standing: %v", err)
	}
}

// A role that may do nothing else can be given a schema of its own.
func TestRoleWithFewRights(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	server.exec(t, "postgres", fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'first'", schema), fmt.Sprintf("ALTER ROLE %s SET synchronous_commit = off", schema),
		fmt.Sprintf("ALTER ROLE %s SET default_transaction_isolation = 'serializable'", schema))
	s := open(t, postgres.Options{DSN: strings.Replace(server.dsn("postgres"), "user=holdfast", "user="+schema, 1), Schema: schema})
	if _, err := s.Initialise(context.Background(), identity); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "lacks a right") {
		t.Errorf("without a schema: %v", err)
	}
	server.exec(t, "postgres", fmt.Sprintf("CREATE SCHEMA %[1]s AUTHORIZATION %[1]s", schema))
	initialise(t, s)
	await(t, inBackground(s, reserve("a", "customer/c1")), store.Written)
	await(t, inBackground(s, reserve("b", "customer/c1/order/1")), store.Blocked)
	if err := s.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// Neither of the role's settings got through.
	d, err := s.Durability(context.Background())
	findings := d.Findings
	if err != nil || slices.ContainsFunc(findings, func(f store.Finding) bool { return strings.Contains(f.Text, "synchronous_commit") }) {
		t.Errorf("Durability: %v, %v", findings, err)
	}
}

func TestDurability(t *testing.T) {
	findings := func(s *postgres.Store) []string {
		t.Helper()
		found, err := s.Durability(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, f := range found.Findings {
			if !f.Loses || f.Reason == "" {
				t.Errorf("%+v loses nothing, or has no reason", f)
			}
			texts = append(texts, f.Text)
		}
		return texts
	}
	is := func(found []string, begins ...string) {
		t.Helper()
		if len(found) != len(begins) {
			t.Errorf("%q, want %q", found, begins)
			return
		}
		for i, f := range found {
			if !strings.HasPrefix(f, begins[i]) {
				t.Errorf("%q, want one that begins with %q", f, begins[i])
			}
		}
	}
	primary := newServer(t)
	s := open(t, postgres.Options{DSN: primary.dsn("postgres")})
	initialise(t, s)
	is(findings(s))
	primary.exec(t, "postgres", "ALTER TABLE holdfast.mark SET UNLOGGED")
	is(findings(s), "not durable after a crash, because they are unlogged: mark;")
	primary.exec(t, "postgres", "ALTER TABLE holdfast.mark SET LOGGED")

	follower := primary.standby(t, "second")
	admin := primary.admin(t, "postgres")
	eventually(t, "the standby follows", func() error {
		if n := ask[int](t, admin, "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"); n != 1 {
			return fmt.Errorf("%d do", n)
		}
		return nil
	})
	is(findings(s), "1 replicas are attached, and synchronous_standby_names is empty")
	if d, err := s.Durability(context.Background()); err != nil || d.Replicated {
		t.Errorf("replicated: %t, %v", d.Replicated, err)
	}
	is(findings(open(t, postgres.Options{DSN: follower.dsn("postgres")})), "the server is a standby")
	primary.exec(t, "postgres", "ALTER SYSTEM SET synchronous_standby_names = 'second'", "SELECT pg_reload_conf()")
	eventually(t, "the standby is synchronous", func() error {
		if found := findings(s); len(found) > 0 {
			return fmt.Errorf("%q", found)
		}
		return nil
	})

	if d, err := s.Durability(context.Background()); err != nil || !d.Replicated {
		t.Errorf("replicated: %t, %v", d.Replicated, err)
	}

	primary.exec(t, "postgres", "ALTER SYSTEM SET full_page_writes = off", "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
	eventually(t, "both are found", func() error {
		if found := findings(s); len(found) != 2 {
			return fmt.Errorf("%q", found)
		}
		return nil
	})
	is(findings(s), "fsync is off", "full_page_writes is off")
}

// Check must see what it is there for.
func TestCheckFinds(t *testing.T) {
	server := sharedServer(t)
	for damage, says := range map[string]string{
		"DELETE FROM mark WHERE ctid = (SELECT min(ctid) FROM mark)":                                                                                          "is not in the index",
		"INSERT INTO mark VALUES ('00000000-0000-0000-0000-000000000001', '00000000-0000-0000-0000-000000000002', 1, '00000000-0000-0000-0000-000000000003')": "is of no record",
		"DELETE FROM record":                                          "is of no record",
		"UPDATE meter SET sum = sum + 1":                              "its entries come to",
		"DELETE FROM meter":                                           "its entries come to",
		"UPDATE record SET version = 1":                               "belongs to 2 records",
		"UPDATE record SET version = 1000000 WHERE key = 'a'":         "the sequence is at",
		"UPDATE record SET key = 'c' WHERE key = 'a'":                 "is not found under its key",
		"UPDATE record SET untils = '{1}' WHERE key = 'a'":            "ends, end 0, era",
		"UPDATE record SET until = 5, indexed = true WHERE key = 'a'": "is not in the index",
		"UPDATE record SET stamp = '9999999' WHERE key = 'a'":         "still to come",
		"UPDATE record SET amounts = '{0}' WHERE key = 'a'":           "or one of 0",
		"UPDATE meter SET name = 'n'":                                 "is not found under its name",
		"DELETE FROM meta":                                            "rows of meta",
	} {
		t.Run(damage, func(t *testing.T) {
			schema := newSchema()
			s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
			initialise(t, s)
			for _, key := range []string{"a", "b"} {
				r := reserve(key, "order/"+key)
				r.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
				await(t, inBackground(s, r), store.Written)
			}
			if err := s.Check(context.Background()); err != nil {
				t.Fatalf("a store that was not damaged: %v", err)
			}
			server.exec(t, "postgres", "SET search_path = "+schema, damage)
			if err := s.Check(context.Background()); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%v; want one that says %q", err, says)
			}
		})
	}
}
