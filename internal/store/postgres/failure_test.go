package postgres_test

// A server that cannot be asked is an ErrUnavailable that says what to look at, in
// bounded time; and the same store goes on once it can.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

// fails asserts that everything is unavailable, within the time, and says why.
func fails(t testing.TB, s store.Store, within time.Duration, says string) {
	t.Helper()
	start := time.Now()
	_, err := s.Update(context.Background(), store.Write{Epoch: identity.Epoch, Key: "k", Nonce: "n", Expected: 7, Record: &store.Record{}})
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), says) {
		t.Errorf("Update: %v; want one that says %q", err, says)
	}
	_, _, err = s.Get(context.Background(), "k")
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), says) {
		t.Errorf("Get: %v; want one that says %q", err, says)
	}
	if took := time.Since(start); took > within {
		t.Errorf("two calls took %s", took)
	}
}

// recovers asserts that the same store works again.
func recovers(t testing.TB, s store.Store) {
	t.Helper()
	eventually(t, "the store recovers", func() error {
		_, err := s.Reserve(context.Background(), store.Reserve{Write: store.Write{Epoch: identity.Epoch, Key: "again", Nonce: "n", Record: &store.Record{}}})
		return err
	})
}

func TestServerStopped(t *testing.T) {
	server := newServer(t, "fsync=off")
	s := open(t, postgres.Options{DSN: server.dsn("postgres")})
	initialise(t, s)
	server.stop(t)
	// On a connection that stood it is not known how far the server came.
	fails(t, s, 10*time.Second, "")
	fails(t, s, 10*time.Second, "connection refused")
	server.start(t)
	recovers(t, s)
	// Before its first call as well.
	server.stop(t)
	late := open(t, postgres.Options{DSN: server.dsn("postgres")})
	fails(t, late, 10*time.Second, "connection refused")
	server.start(t)
	recovers(t, late)
}

func TestSessionsTerminated(t *testing.T) {
	server := newServer(t, "fsync=off")
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), MaxConns: 4})
	initialise(t, s)
	admin := server.admin(t, "postgres")
	for i := range 20 {
		if _, err := admin.Exec(context.Background(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast'"); err != nil {
			t.Fatal(err)
		}
		// A read is made again, on a new connection.
		if _, _, err := s.Get(context.Background(), "k"); err != nil {
			t.Errorf("Get: %v", err)
		}
		// A write is its writer's to repeat, if it met a session that was ended just then.
		w := store.Write{Epoch: identity.Epoch, Key: fmt.Sprint(i), Nonce: "n", Record: &store.Record{}}
		write(t, s, w)
		if r, _, err := s.Get(context.Background(), w.Key); err != nil || r == nil || r.Nonce != w.Nonce {
			t.Errorf("what was written is %+v, %v", r, err)
		}
	}
}

func TestReadOnly(t *testing.T) {
	server := newServer(t, "fsync=off")
	s := open(t, postgres.Options{DSN: server.dsn("postgres")})
	initialise(t, s)
	server.exec(t, "postgres", "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
	eventually(t, "the store notices", func() error {
		_, err := s.Update(context.Background(), store.Write{Epoch: identity.Epoch, Key: "k", Nonce: "n", Record: &store.Record{}})
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "DSN at the primary") {
			return fmt.Errorf("Update: %w", err)
		}
		return nil
	})
	// Each session notices for itself.
	eventually(t, "Durability notices", func() error {
		if findings, err := s.Durability(context.Background()); !errors.Is(err, store.ErrUnavailable) {
			return fmt.Errorf("%v, %w", findings, err)
		}
		return nil
	})
	admin := server.admin(t, "postgres")
	for _, statement := range []string{"SET default_transaction_read_only = off", "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"} {
		if _, err := admin.Exec(context.Background(), statement); err != nil {
			t.Fatal(err)
		}
	}
	recovers(t, s)
}

// Sessions go on when the server has looked at the tables anew, as it does by itself.
func TestAnalyzed(t *testing.T) {
	server := sharedServer(t)
	schema := newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema, MaxConns: 1})
	initialise(t, s)
	for i := range 3 {
		for _, scope := range []string{"a", "b"} {
			r := reserve(fmt.Sprint(scope, " ", i), fmt.Sprintf("%s/%d", scope, i), fmt.Sprintf("lineage %s %d", scope, i))
			if result, err := s.Reserve(t.Context(), r); err != nil || result.Outcome != store.Written {
				t.Fatalf("round %d: %+v, %v", i, result, err)
			}
			r.Nonce = "another"
			if result, err := s.Reserve(t.Context(), r); err != nil || result.Outcome != store.Mismatch {
				t.Fatalf("round %d, again: %+v, %v", i, result, err)
			}
		}
		server.exec(t, "postgres", "VACUUM ANALYZE "+schema+".record", "VACUUM ANALYZE "+schema+".mark", "ALTER TABLE "+schema+".record SET (fillfactor = 90)")
	}
}

func TestTooManyConnections(t *testing.T) {
	server := newServer(t, "fsync=off", "max_connections=5", "superuser_reserved_connections=0", "max_wal_senders=0")
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), MaxConns: 2})
	taken := []*pgx.Conn{server.admin(t, "postgres")}
	// That of a session that has just ended may be taken a moment longer.
	eventually(t, "the others are free", func() error {
		if n := ask[int](t, taken[0], "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"); n != 1 {
			return fmt.Errorf("%d are taken", n)
		}
		return nil
	})
	for {
		c, err := pgx.Connect(context.Background(), server.dsn("postgres"))
		if err != nil {
			break
		}
		taken = append(taken, c)
	}
	fails(t, s, 10*time.Second, "raise max_connections")
	for _, c := range taken {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "there are connections again", func() error {
		_, err := s.Initialise(context.Background(), identity)
		return err
	})
	recovers(t, s)
}

func TestPasswordChanged(t *testing.T) {
	server := newServer(t, "fsync=off")
	server.exec(t, "postgres", "CREATE ROLE app LOGIN PASSWORD 'one'", "GRANT CREATE ON DATABASE postgres TO app")
	dsn := strings.NewReplacer("user=holdfast", "user=app", "password=first", "password=one").Replace(server.dsn("postgres"))
	s := open(t, postgres.Options{DSN: dsn, MaxConns: 2})
	initialise(t, s)
	server.exec(t, "postgres", "ALTER ROLE app PASSWORD 'two'")
	// Sessions that stand go on.
	recovers(t, s)
	server.exec(t, "postgres", "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = 'app'")
	fails(t, s, 10*time.Second, "")
	fails(t, s, 10*time.Second, "does not accept this role or password")
	if _, _, err := s.Get(context.Background(), "k"); strings.Contains(err.Error(), "one") {
		t.Errorf("the error tells the password: %v", err)
	}
	server.exec(t, "postgres", "ALTER ROLE app PASSWORD 'one'")
	recovers(t, s)
}

// A password that is asked for can change without a restart.
func TestPasswordRotated(t *testing.T) {
	server := newServer(t, "fsync=off")
	server.exec(t, "postgres", "CREATE ROLE app LOGIN PASSWORD 'one'", "GRANT CREATE ON DATABASE postgres TO app")
	var password atomic.Pointer[string]
	set := func(s string) { password.Store(&s) }
	set("one")
	dsn := strings.NewReplacer("user=holdfast", "user=app", " password=first", "").Replace(server.dsn("postgres"))
	s := open(t, postgres.Options{DSN: dsn, MaxConns: 2, Password: func(context.Context) (string, error) {
		if p := *password.Load(); p != "" {
			return p, nil
		}
		return "", errors.New("no Secret there")
	}})
	initialise(t, s)
	recovers(t, s)
	end := func() {
		t.Helper()
		server.exec(t, "postgres", "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'app'")
	}
	set("two")
	end()
	fails(t, s, 10*time.Second, "")
	fails(t, s, 10*time.Second, "does not accept this role or password")
	server.exec(t, "postgres", "ALTER ROLE app PASSWORD 'two'")
	recovers(t, s)
	set("")
	end()
	fails(t, s, 10*time.Second, "")
	fails(t, s, 10*time.Second, "the password cannot be had: no Secret there")
	set("two")
	recovers(t, s)
}

// The function that reads the clock is in every call; here it fails as a server may.
func TestServerErrors(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	initialise(t, s)
	server.exec(t, "postgres", fmt.Sprintf("CREATE SEQUENCE %s.calls", schema))
	admin := server.admin(t, "postgres")
	fail := func(code string, times int) {
		t.Helper()
		// A sequence counts what a transaction undoes.
		_, err := admin.Exec(context.Background(), fmt.Sprintf(`CREATE OR REPLACE FUNCTION %[1]s.clock() RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
			BEGIN
				IF nextval('%[1]s.calls') <= %[3]d THEN RAISE EXCEPTION 'made up' USING ERRCODE = '%[2]s'; END IF;
				RETURN (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
			END $$`, schema, code, times))
		if err == nil {
			_, err = admin.Exec(context.Background(), fmt.Sprintf("ALTER SEQUENCE %s.calls RESTART", schema))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(key string) (store.Result, error) {
		return s.Update(context.Background(), store.Write{Epoch: identity.Epoch, Key: key, Nonce: "n", Record: &store.Record{}})
	}
	calls := func() int {
		return ask[int](t, admin, fmt.Sprintf("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM %s.calls", schema))
	}
	for _, code := range []string{"40001", "40P01", "23505", "0A000", "26000", "42P01", "25006"} {
		fail(code, 3)
		if result, err := write(code); err != nil || result.Outcome != store.Written {
			t.Errorf("%s three times: %+v, %v", code, result, err)
		}
		if n := calls(); n != 4 {
			t.Errorf("%s: %d calls, want 4", code, n)
		}
		fail(code, 1000)
		if result, err := write(code + " for ever"); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%s for ever: %+v, %v", code, result, err)
		}
		if n := calls(); n > 10 {
			t.Errorf("%s: %d calls", code, n)
		}
	}
	for code, says := range map[string]string{
		"53100": "disk is full", "53200": "max_locks_per_transaction", "53300": "max_connections", "53400": "limit",
		"55P03": "in the way", "57014": "did not finish in time", "42501": "lacks a right", "XX001": "made up", "P0001": "made up", "22003": "made up",
	} {
		fail(code, 1)
		result, err := write(code)
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v; want one that says %q", code, result, err, says)
		}
		if n := calls(); n != 1 {
			t.Errorf("%s: %d calls, want 1", code, n)
		}
		if result, err := write(code); err != nil || result.Outcome != store.Written {
			t.Errorf("after %s: %+v, %v", code, result, err)
		}
	}
	noLocksLeft(t, server)
}

// A lock that is not given, and a server that does not finish, end in their time; and
// what was locked up to there is free again.
func TestSlow(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	s := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema, Timeout: time.Second})
	patient := open(t, postgres.Options{DSN: server.patient(), Schema: schema, Timeout: patience})
	initialise(t, s)
	done, letGo := stuck(t, patient, server, schema, "first", "customer/c1/order/9")
	for _, paths := range [][]string{{"customer/c1"}, {"customer/c0", "customer/c1/order/9"}, {"customer/c1/order/9/item"}} {
		start := time.Now()
		_, err := s.Reserve(context.Background(), reserve("second", paths...))
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "in the way") {
			t.Errorf("%q: %v", paths, err)
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("it took %s", took)
		}
	}
	letGo()
	await(t, done, store.Written)
	noLocksLeft(t, server)
	await(t, inBackground(s, reserve("third", "customer/c0")), store.Written)

	server.exec(t, "postgres", fmt.Sprintf("CREATE OR REPLACE FUNCTION %s.clock() RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint FROM pg_sleep(60)'", schema))
	fails(t, s, 20*time.Second, "did not finish in time")
}

// proxy stands between a store and its server.
type proxy struct {
	net.Listener
	mu     sync.Mutex
	server string
	// swallow forwards nothing more, in the directions that it names, and closes nothing.
	swallowUp, swallowDown bool
	// held is what goes to the server only once it is closed.
	held chan struct{}
	// waiting counts what was held, given what was let go of it.
	waiting, given atomic.Int64
	conns, clients []net.Conn
}

func newProxy(t testing.TB, s *server) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, server: fmt.Sprintf("127.0.0.1:%d", s.port)}
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
	})
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", p.server)
			if err != nil {
				_ = client.Close()
				continue
			}
			p.mu.Lock()
			p.conns, p.clients = append(p.conns, client, server), append(p.clients, client)
			p.mu.Unlock()
			go p.pump(server, client, &p.swallowUp)
			go p.pump(client, server, &p.swallowDown)
		}
	}()
	return p
}

func (p *proxy) pump(to io.WriteCloser, from io.Reader, swallow *bool) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		p.mu.Lock()
		drop, held := *swallow, p.held
		p.mu.Unlock()
		if held != nil && swallow == &p.swallowUp && n > 0 {
			p.waiting.Add(1)
			<-held
			_, err := to.Write(buffer[:n])
			p.given.Add(1)
			if err != nil {
				return
			}
			continue
		}
		if drop {
			continue
		}
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			_ = to.Close()
			return
		}
	}
}

func (p *proxy) swallow(up, down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallowUp, p.swallowDown = up, down
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *proxy) dsn(s *server) string {
	return strings.Replace(s.dsn("postgres"), fmt.Sprintf("port=%d", s.port), fmt.Sprintf("port=%d", p.Addr().(*net.TCPAddr).Port), 1)
}

func TestBlackHole(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	p := newProxy(t, server)
	s := open(t, postgres.Options{DSN: p.dsn(server), Schema: schema, Timeout: time.Second})
	initialise(t, s)
	p.swallow(true, true)
	// A caller that is in a hurry is answered in its own time.
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, _, err := s.Get(ctx, "k"); !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Get: %v", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	fails(t, s, 45*time.Second, "")
	p.swallow(false, false)
	p.cut()
	recovers(t, s)
}

// The reply is lost on the way: the writer is told that it is not known, and is
// answered as written when it repeats.
func TestReplyLost(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	p := newProxy(t, server)
	s := open(t, postgres.Options{DSN: p.dsn(server), Schema: schema, MaxConns: 1})
	initialise(t, s)
	direct := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	for i := range 10 {
		r := reserve(fmt.Sprint(i), fmt.Sprint("order/", i))
		// The connection knows the statement already: nothing else needs an answer.
		await(t, inBackground(s, reserve(fmt.Sprint("before ", i))), store.Written)
		p.swallow(false, true)
		done := inBackground(s, r)
		var version uint64
		eventually(t, "the write is made", func() error {
			record, _, err := direct.Get(context.Background(), r.Key)
			if err == nil && record == nil {
				err = errors.New("it is not there")
			}
			if err == nil {
				version = record.Version
			}
			return err
		})
		p.cut()
		p.swallow(false, false)
		if a := <-done; !errors.Is(a.err, store.ErrUnavailable) {
			t.Fatalf("%+v, %v", a.result, a.err)
		}
		var result store.Result
		eventually(t, "the write is repeated", func() (err error) {
			result, err = s.Reserve(context.Background(), r)
			return err
		})
		if result.Outcome != store.Written || result.Version != version {
			t.Errorf("%+v; there is version %d", result, version)
		}
	}
}

// hold keeps what is sent to the server from now on, until it is let go.
func (p *proxy) hold() (letGo func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	held := make(chan struct{})
	p.held = held
	return func() { close(held) }
}

// forget lets what is sent on new connections pass.
func (p *proxy) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = nil
}

// cutClients leaves the server's side standing, with what is held for it.
func (p *proxy) cutClients() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.clients {
		_ = c.Close()
	}
	p.clients = nil
}

// A repeated write is not answered while an earlier copy of it may still begin.
func TestLateCopies(t *testing.T) {
	server, schema := sharedServer(t), newSchema()
	p := newProxy(t, server)
	options := postgres.Options{DSN: p.dsn(server), Schema: schema, MaxConns: 4}
	s := open(t, options)
	initialise(t, s)
	direct := open(t, postgres.Options{DSN: server.dsn("postgres"), Schema: schema})
	leaves := func(s store.Store, r store.Reserve) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		if result, err := s.Reserve(ctx, r); !errors.Is(err, store.ErrUnavailable) {
			t.Fatalf("%+v, %v", result, err)
		}
	}

	// The caller leaves; the copy is on its way, on a connection that stands.
	await(t, inBackground(s, reserve("before")), store.Written)
	letGo := p.hold()
	first := reserve("first", "customer/c1")
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := s.Reserve(ctx, first)
		left <- err
	}()
	onItsWay := func() error {
		if p.waiting.Load() == p.given.Load() {
			return errors.New("nothing is held")
		}
		return nil
	}
	eventually(t, "the first copy is on its way", onItsWay)
	leave()
	if err := <-left; !errors.Is(err, store.ErrUnavailable) {
		t.Fatal(err)
	}
	p.forget()
	leaves(s, first)
	leaves(open(t, options), first)
	if record, _, err := direct.Get(context.Background(), "first"); err != nil || record != nil {
		t.Fatalf("a later copy was sent before the earlier one had ended: %+v, %v", record, err)
	}
	letGo()
	await(t, inBackground(s, first), store.Written)

	// The connection is lost, the server's side of it stands.
	await(t, inBackground(s, reserve("before too")), store.Written)
	letGo = p.hold()
	second := reserve("second", "customer/c2")
	done := inBackground(s, second)
	eventually(t, "the write is on its way", onItsWay)
	p.forget()
	p.cutClients()
	if a := <-done; !errors.Is(a.err, store.ErrUnavailable) {
		t.Fatalf("%+v, %v", a.result, a.err)
	}
	result := await(t, inBackground(s, second), store.Written)
	gone := store.Write{Epoch: identity.Epoch, Key: "second", Nonce: "gone", Expected: result.Version}
	if result, err := s.Update(context.Background(), gone); err != nil || result.Outcome != store.Written {
		t.Fatalf("%+v, %v", result, err)
	}
	letGo()
	eventually(t, "what was held is given", func() error {
		if p.given.Load() < p.waiting.Load() {
			return errors.New("not all of it")
		}
		return nil
	})
	// Were its session alive, it would begin at once.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 100 {
		<-tick.C
		if record, _, err := direct.Get(context.Background(), "second"); err != nil || record != nil {
			t.Fatalf("the copy that came late was taken: %+v, %v", record, err)
		}
	}
}
