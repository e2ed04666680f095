// The servers of deployed stores, as they are rendered: real ones of this machine, started
// with the configuration, arguments, passwords and probes that a pod would have.

package controller

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/valkey-io/valkey-go"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// node runs the server of one store where a pod would.
type node struct {
	*world
	s   *v1alpha1.IdempotencyStore
	dir string
	// data is where its volume is: its own, or another node's.
	data string
	port int
	// as runs a program as the server's user.
	as  []string
	cmd *exec.Cmd
	log lockedBuffer
	end chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (w *world) node(s *v1alpha1.IdempotencyStore) *node {
	w.Helper()
	dir, err := os.MkdirTemp("", "node")
	must(w.T, err)
	free, err := ports.Free(1)
	must(w.T, err)
	// A copy: clients read it while the store is read anew.
	n := &node{world: w, s: s.DeepCopy(), dir: dir, data: filepath.Join(dir, "data"), port: free[0]}
	for _, sub := range []string{"data", "secret", "tls", "run", "bin"} {
		must(w.T, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	if s.Spec.Postgres != nil {
		entry, err := os.ReadFile("../../hack/images/maker/files/docker-entrypoint.sh")
		must(w.T, err)
		must(w.T, os.WriteFile(filepath.Join(dir, "bin", "docker-entrypoint.sh"), entry, 0o700))
	}
	if os.Geteuid() == 0 && s.Spec.Postgres != nil {
		u, err := user.Lookup("postgres")
		if err != nil {
			w.Fatalf("the tests run as root, and there is no user postgres to run the server as: install the package postgresql-15: %v", err)
		}
		n.as = []string{"setpriv", "--reuid=" + u.Uid, "--regid=" + u.Gid, "--clear-groups"}
	}
	w.Cleanup(func() {
		n.kill()
		if w.Failed() {
			w.Logf("the server's log:\n%s", n.log.String())
		}
		if err := os.RemoveAll(dir); err != nil {
			w.Error(err)
		}
	})
	return n
}

// here puts this machine's places in those of the pod.
func (n *node) here(text string) string {
	return strings.NewReplacer(
		"/etc/holdfast-secret", n.dir+"/secret", "/etc/holdfast-tls", n.dir+"/tls", "/etc/holdfast", n.dir, "/var/lib/postgresql/data", n.data, "/var/run/postgresql", n.dir+"/run", "dir /data", "dir "+n.data, "volume=/data", "volume="+n.data,
		"6379", strconv.Itoa(n.port), "5432", strconv.Itoa(n.port),
	).Replace(text)
}

// mounts writes what the pod would see now.
func (n *node) mounts() {
	n.Helper()
	write := func(name string, content []byte) {
		must(n.T, os.WriteFile(filepath.Join(n.dir, name), content, 0o600))
	}
	var cm corev1.ConfigMap
	must(n.T, n.get(workload.Name(n.s), &cm))
	for name, content := range cm.Data {
		write(name, []byte(n.here(content)))
	}
	var secret corev1.Secret
	must(n.T, n.get(workload.SecretName(n.s), &secret))
	set := n.set()
	for _, v := range set.Spec.Template.Spec.Volumes {
		if v.Secret == nil {
			continue
		}
		from := secret
		if v.Secret.SecretName != secret.Name {
			must(n.T, n.get(v.Secret.SecretName, &from))
		}
		for _, item := range v.Secret.Items {
			write(filepath.Join(v.Name, item.Path), from.Data[item.Key])
		}
	}
	if len(n.as) > 0 {
		must(n.T, exec.Command("chown", "-R", "postgres:", n.dir).Run())
	}
}

func (n *node) set() *appsv1.StatefulSet {
	n.Helper()
	set := &appsv1.StatefulSet{}
	must(n.T, n.get(workload.Name(n.s), set))
	return set
}

func (n *node) container() *corev1.Container { return &n.set().Spec.Template.Spec.Containers[0] }

// env is that of the container.
func (n *node) env() []string {
	out := []string{"PATH=" + n.dir + "/bin:" + os.Getenv("PATH") + ":/usr/lib/postgresql/15/bin", "PGHOST=" + n.dir + "/run", "PGPORT=" + strconv.Itoa(n.port)}
	for _, e := range n.container().Env {
		out = append(out, e.Name+"="+n.here(e.Value))
	}
	return out
}

func (n *node) run(argv ...string) ([]byte, error) {
	argv = append(slices.Clone(n.as), argv...)
	ctx, cancel := context.WithTimeout(n.ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = n.env(), n.dir
	return cmd.CombinedOutput()
}

// start starts the container's process, and waits until it is ready.
func (n *node) start() {
	n.Helper()
	n.mounts()
	n.launch()
	eventually(n.T, func() error { return n.probe("ready") })
}

// configure adds lines to the configuration that was mounted for Redis.
func (n *node) configure(lines ...string) {
	n.Helper()
	conf := filepath.Join(n.dir, "redis.conf")
	text, err := os.ReadFile(conf)
	must(n.T, err)
	must(n.T, os.WriteFile(conf, append(text, "\n"+strings.Join(lines, "\n")+"\n"...), 0o600))
}

// launch starts the container's process, with what was mounted before.
func (n *node) launch() {
	n.Helper()
	c := n.container()
	// As in a container, no signal is ignored: a shell cannot handle one that was when it began.
	argv := slices.Concat(n.as, []string{"env", "--default-signal"}, c.Command, c.Args)
	for i := range argv {
		argv[i] = n.here(argv[i])
	}
	if n.s.Spec.Postgres != nil {
		argv = append(argv, "-c", "unix_socket_directories="+n.dir+"/run", "-c", "port="+strconv.Itoa(n.port), "-c", "log_statement=all")
	}
	n.cmd = exec.Command(argv[0], argv[1:]...)
	n.cmd.Env, n.cmd.Dir, n.cmd.Stdout, n.cmd.Stderr = n.env(), n.dir, &n.log, &n.log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	must(n.T, n.cmd.Start())
	n.end = make(chan struct{})
	go func() {
		_ = n.cmd.Wait() // killed, as a rule
		close(n.end)
	}()
}

// kill ends the server and its processes.
func (n *node) kill() {
	if n.cmd == nil || n.cmd.Process == nil {
		return
	}
	_ = syscall.Kill(-n.cmd.Process.Pid, syscall.SIGKILL)
	<-n.end
	n.cmd = nil
}

// probe runs one of the container's probes, as long as the kubelet would let it.
func (n *node) probe(what string) error {
	argv := append([]string{"timeout", "-s", "KILL", "3", "sh"}, n.dir+"/probe.sh", what)
	if out, err := n.run(argv...); err != nil {
		return fmt.Errorf("probe %s: %w: %s", what, err, out)
	}
	return nil
}

func (n *node) dial(ctx context.Context, namespace, network, address string) (net.Conn, error) {
	if namespace != n.ns || address != workload.Endpoint(n.s) {
		return nil, fmt.Errorf("%s in namespace %s is nobody's", address, namespace)
	}
	var d net.Dialer
	return d.DialContext(ctx, network, "127.0.0.1:"+strconv.Itoa(n.port))
}

// accepting leads to a Redis that lets any operator in.
func accepting(t *testing.T) Dial {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	cmd := exec.Command("redis-server", "--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--user", "operator", "on", "nopass", "+@all")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start redis-server, of the package redis-server: %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	dial := func(ctx context.Context, _, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	eventually(t, func() error {
		c, err := dial(context.Background(), "", "", "")
		if err == nil {
			err = c.Close()
		}
		return err
	})
	return dial
}

func (n *node) secret() *corev1.Secret {
	n.Helper()
	s := &corev1.Secret{}
	must(n.T, n.get(workload.SecretName(n.s), s))
	return s
}

// connect connects anew with a password, and asks one thing.
func (n *node) connect(password string) error {
	if n.s.Spec.Postgres != nil {
		ctx, cancel := context.WithTimeout(n.ctx, patience)
		defer cancel()
		c, err := pgx.Connect(ctx, fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d/%s?sslmode=disable", workload.StoreUser, password, n.port, workload.StoreUser))
		if err != nil {
			return err
		}
		_, err = c.Exec(ctx, "SELECT 1")
		return errors.Join(err, c.Close(ctx))
	}
	c, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{"127.0.0.1:" + strconv.Itoa(n.port)}, Username: workload.StoreUser, Password: password, TLSConfig: n.clientTLS(),
		ForceSingleClient: true, DisableCache: true, DisableRetry: true,
	})
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Do(n.ctx, c.B().Get().Key("k").Build()).Error()
}

func (n *node) clientTLS() *tls.Config {
	if n.s.Spec.Redis == nil || n.s.Spec.Redis.Deploy.TLS == nil {
		return nil
	}
	var secret corev1.Secret
	must(n.T, n.get("certificate", &secret))
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(secret.Data["ca.crt"])
	return &tls.Config{RootCAs: roots, ServerName: workload.Host(n.s), MinVersion: tls.VersionTLS12}
}

func accepted(err error) bool { return err == nil || valkey.IsValkeyNil(err) }

// open opens the store as the operator and the gateways do: the password is read at each connection.
func (n *node) open() store.Store {
	n.Helper()
	var st store.Store
	var err error
	if n.s.Spec.Postgres != nil {
		dsn := strings.Replace(string(n.secret().Data[workload.DSNKey]), workload.Endpoint(n.s), "127.0.0.1:"+strconv.Itoa(n.port), 1)
		// As the controllers open it: a connection that is made later reads the Secret of then.
		st, err = postgres.Open(postgres.Options{DSN: dsn, Password: func(context.Context) (string, error) {
			s := &corev1.Secret{}
			err := n.get(workload.SecretName(n.s), s)
			return string(s.Data[workload.KeyPassword]), err
		}})
	} else {
		st, err = redis.Open(redis.Options{
			Addresses: []string{"127.0.0.1:" + strconv.Itoa(n.port)}, Namespace: "n", TLS: n.clientTLS(),
			Credentials: func() (string, string, error) {
				s := &corev1.Secret{}
				err := n.get(workload.SecretName(n.s), s)
				return string(s.Data[workload.KeyUsername]), string(s.Data[workload.KeyPassword]), err
			},
		})
	}
	must(n.T, err)
	n.Cleanup(func() { _ = st.Close() })
	return st
}

// use has the store do what a store does.
func (n *node) use(st store.Store) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, patience)
	defer cancel()
	_, err := st.Initialise(ctx, store.Identity{Epoch: "e", KeyDomain: "d"})
	must(n.T, err)
	_, err = st.Standing(ctx)
	must(n.T, err)
	_, _, err = st.Get(ctx, "none")
	must(n.T, err)
}

type selfJudging interface {
	Durability(context.Context) (store.Durability, error)
}

// servers are the stores whose server is started.
func servers(t *testing.T, test func(t *testing.T, w *world, s *v1alpha1.IdempotencyStore)) {
	for name, make := range map[string]func(*world) *v1alpha1.IdempotencyStore{
		"redis":    func(w *world) *v1alpha1.IdempotencyStore { return w.redisStore("payments") },
		"tls":      func(w *world) *v1alpha1.IdempotencyStore { return w.redisStore("payments", withTLS) },
		"postgres": func(w *world) *v1alpha1.IdempotencyStore { return w.postgresStore("payments") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.permit()
			s := make(w)
			w.create(w.certificate(workload.Host(s), time.Now().Add(time.Hour)), s)
			test(t, w, s)
		})
	}
}

// The server as it is rendered is durable, lets the store do all it does, and the probes tell how it is.
func TestRenderedServer(t *testing.T) {
	servers(t, func(t *testing.T, w *world, s *v1alpha1.IdempotencyStore) {
		n := w.node(s)
		d := deployer(n.dial)
		w.applied(d, s, reasonStarting)
		w.claim(s, "any")
		n.start()
		w.kubelet(s, "one")
		w.applied(d, s, reasonRunning)
		c, written := counted(t)
		d.live = c
		w.applied(d, s, reasonRunning)
		if list := written.take(); len(list) > 0 {
			t.Errorf("at rest it was written: %q", list)
		}
		st := n.open()
		n.use(st)
		found, err := st.(selfJudging).Durability(w.ctx)
		if must(t, err); len(found.Findings) > 0 {
			t.Errorf("what the operator deploys should be durable: %s", asJSON(found))
		}
		must(t, n.probe("alive"))
		must(t, n.probe("ready"))
		if err := n.connect("wrong"); accepted(err) {
			t.Error("any password is accepted")
		}

		// A record with what goes with it, as every step of a payment writes it.
		wrote, err := st.Update(w.ctx, store.Write{Epoch: "e", Key: "paid", Nonce: "n", Record: &store.Record{Header: []byte("h"), Body: []byte("b")},
			Marks: []store.Mark{{String: "m"}}, Meters: []store.MeterEntry{{Meter: "spent", Amount: "5"}}})
		if must(t, err); wrote.Outcome != store.Written {
			t.Fatalf("a record was not written: %+v", wrote)
		}

		// A server that says nothing is neither.
		must(t, syscall.Kill(-n.cmd.Process.Pid, syscall.SIGSTOP))
		for _, what := range []string{"alive", "ready"} {
			if n.probe(what) == nil {
				t.Errorf("a server that stands still is %s", what)
			}
		}
		must(t, syscall.Kill(-n.cmd.Process.Pid, syscall.SIGCONT))
		eventually(t, func() error { return n.probe("ready") })
		n.kill()
		for _, what := range []string{"alive", "ready"} {
			if n.probe(what) == nil {
				t.Errorf("a server that is gone is %s", what)
			}
		}
		// After its restart it has what it had, and the passwords of now.
		n.start()
		w.kubelet(s, "two")
		w.applied(d, s, reasonRunning)
		again := n.open()
		is, err := again.Standing(w.ctx)
		if must(t, err); is.Epoch != "e" || is.KeyDomain != "d" {
			t.Errorf("after its restart the server knows of %+v, and it was told of epoch e and key domain d", is)
		}
		rec, _, err := again.Get(w.ctx, "paid")
		if must(t, err); rec == nil || string(rec.Body) != "b" {
			t.Errorf("after its restart the server has %+v of a record that it has acknowledged", rec)
		}
		if spent, err := again.Meter(w.ctx, "spent"); err != nil || spent != "5" {
			t.Errorf("after its restart the server has %q of a meter of 5: %v", spent, err)
		}
		n.use(again)

		// One that begins on an emptied volume, of the same claim, can be asked, and has nothing.
		n.kill()
		must(t, os.RemoveAll(filepath.Join(n.dir, "data")))
		must(t, os.Mkdir(filepath.Join(n.dir, "data"), 0o700))
		n.start()
		w.kubelet(s, "three")
		w.applied(d, s, reasonRunning)
		if is, err := n.open().Standing(w.ctx); err != nil || is.Epoch != "" {
			t.Errorf("a server on an emptied volume knows of %+v: %v", is, err)
		}
	})
}

// A server that loads a long log is alive and not ready.
func TestLoadingServerIsNotKilled(t *testing.T) {
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	w.create(s)
	n := w.node(s)
	d := deployer(n.dial)
	w.applied(d, s, reasonStarting)
	n.start()
	w.kubelet(s, "one")
	w.applied(d, s, reasonRunning)
	c, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{"127.0.0.1:" + strconv.Itoa(n.port)}, Username: workload.StoreUser, Password: string(n.secret().Data[workload.KeyPassword]),
		ForceSingleClient: true, DisableCache: true,
	})
	must(t, err)
	must(t, ignoreNil(c.Do(w.ctx, c.B().Eval().Script("for i = 1, 60000 do redis.call('SET', i, 'v') end").Numkeys(0).Build()).Error()))
	c.Close()
	n.kill()
	// As slow as a very long log.
	n.configure("key-load-delay 300")
	n.launch()
	eventually(t, func() error { return n.probe("alive") })
	if err := n.probe("ready"); err == nil || !strings.Contains(err.Error(), "loading:1") {
		t.Errorf("while it loads: %v", err)
	}
	must(t, n.probe("alive"))
}

// S05: a rotated password. Whoever connects with what the Secret shows is let in at every moment, connections that
// stand stay, and the old password ends.
func TestPasswordIsRotated(t *testing.T) {
	servers(t, func(t *testing.T, w *world, s *v1alpha1.IdempotencyStore) {
		n := w.node(s)
		d := deployer(n.dial)
		now := time.Now()
		d.now = func() time.Time { return now }
		w.applied(d, s, reasonStarting)
		w.claim(s, "any")
		n.start()
		w.kubelet(s, "one")
		w.applied(d, s, reasonRunning)
		st := n.open()
		n.use(st)
		first := string(n.secret().Data[workload.KeyPassword])

		// Clients come and go all the time, and read the Secret as they come.
		stop, refused := make(chan struct{}), make(chan error, 100)
		var tries atomic.Int64
		var group sync.WaitGroup
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				// A PostgreSQL role has one password: until the Secret shows the next one, which the server has been told a
				// moment ago, nobody can come. A Redis accepts both.
				limit := time.Now()
				if n.s.Spec.Postgres != nil {
					limit = limit.Add(5 * time.Second)
				}
				err := poll(time.Until(limit), func() error {
					secret := &corev1.Secret{}
					if err := n.get(workload.SecretName(n.s), secret); err != nil {
						return err
					}
					return ignoreNil(n.connect(string(secret.Data[workload.KeyPassword])))
				})
				if err != nil {
					refused <- fmt.Errorf("after %d others: %w", tries.Load(), err)
					return
				}
				tries.Add(1)
			}
		})
		for _, value := range []string{"one", "two"} {
			must(t, w.get(s.Name, s))
			s.Annotations = map[string]string{v1alpha1.RotatePasswordAnnotation: value}
			must(t, admin.Update(w.ctx, s))
			before := string(n.secret().Data[workload.KeyPassword])
			w.applied(d, s, reasonRunning)
			secret := n.secret()
			after := string(secret.Data[workload.KeyPassword])
			if after == before || string(secret.Data[workload.KeyPreviousPassword]) != before {
				t.Fatalf("after %s the Secret's keys are %q", value, slices.Sorted(maps.Keys(secret.Data)))
			}
			must(t, ignoreNil(n.connect(after)))
			if err := n.connect(before); accepted(err) != (s.Spec.Redis != nil) {
				t.Errorf("%s: the previous password: %v", value, err)
			}
			n.use(st)
			// Nothing more until the time is over.
			w.applied(d, s, reasonRunning)
			if got := n.secret(); got.ResourceVersion != secret.ResourceVersion {
				t.Error("the Secret was written again")
			}
			was := tries.Load()
			eventually(t, func() error {
				select {
				case err := <-refused:
					t.Fatalf("a client was refused: %v", err)
				default:
				}
				if tries.Load() < was+3 {
					return errors.New("clients do not get through")
				}
				return nil
			})
			now = now.Add(workload.PreviousFor)
			w.applied(d, s, reasonRunning)
			secret = n.secret()
			if _, there := secret.Data[workload.KeyPreviousPassword]; there {
				t.Error("the previous password is still in the Secret")
			}
			must(t, ignoreNil(n.connect(after)))
			if err := n.connect(before); accepted(err) {
				t.Errorf("%s: the previous password is accepted for ever", value)
			}
			w.applied(d, s, reasonRunning)
			if got := n.secret(); got.ResourceVersion != secret.ResourceVersion {
				t.Error("at rest the Secret was written")
			}
		}
		close(stop)
		group.Wait()
		select {
		case err := <-refused:
			t.Errorf("a client was refused: %v", err)
		default:
		}
		n.use(st)
		n.use(n.open())
		if log := n.log.String(); strings.Contains(log, first) || strings.Contains(log, string(n.secret().Data[workload.KeyPassword])) {
			t.Error("the server's log tells a password")
		}
	})
}

func ignoreNil(err error) error {
	if accepted(err) {
		return nil
	}
	return err
}

// dying is a client whose process ends at its nth write of a Secret, before it or after it.
type dying struct {
	client.Client
	left  *int
	after bool
}

var errDied = errors.New("the process has died")

func (c dying) Update(ctx context.Context, o client.Object, opts ...client.UpdateOption) error {
	*c.left--
	if *c.left != 0 {
		return c.Client.Update(ctx, o, opts...)
	}
	if c.after {
		if err := c.Client.Update(ctx, o, opts...); err != nil {
			return err
		}
	}
	return errDied
}

// A process that dies in a rotation leaves a Secret whose password is accepted, and the next process ends the rotation.
func TestRotationSurvivesCrashes(t *testing.T) {
	servers(t, func(t *testing.T, w *world, s *v1alpha1.IdempotencyStore) {
		n := w.node(s)
		now := time.Now()
		clock := func() time.Time { return now }
		d := deployer(n.dial)
		d.now = clock
		w.applied(d, s, reasonStarting)
		w.claim(s, "any")
		n.start()
		w.kubelet(s, "one")
		w.applied(d, s, reasonRunning)
		deaths := 0
		for i := range 8 {
			must(t, w.get(s.Name, s))
			s.Annotations = map[string]string{v1alpha1.RotatePasswordAnnotation: fmt.Sprint(i)}
			must(t, admin.Update(w.ctx, s))
			before := string(n.secret().Data[workload.KeyPassword])
			left := i/2 + 1
			mortal := deployer(n.dial)
			mortal.now, mortal.live = clock, dying{mortal.live, &left, i%2 == 1}
			for range 2 {
				must(t, w.get(s.Name, s))
				if _, err := mortal.Apply(w.ctx, s); errors.Is(err, errDied) {
					deaths++
					break
				} else if err != nil {
					t.Fatal(err)
				}
				now = now.Add(workload.PreviousFor)
			}
			secret := n.secret()
			if s.Spec.Redis != nil {
				// At every moment.
				must(t, ignoreNil(n.connect(string(secret.Data[workload.KeyPassword]))))
			}
			if i == 3 && s.Spec.Redis != nil {
				// The server dies too, and what it reads at its start is what the Secret has.
				n.kill()
				n.start()
				w.kubelet(s, "other")
				must(t, ignoreNil(n.connect(string(secret.Data[workload.KeyPassword]))))
			}
			for range 3 {
				w.applied(d, s, reasonRunning)
				now = now.Add(workload.PreviousFor)
			}
			secret = n.secret()
			after := string(secret.Data[workload.KeyPassword])
			must(t, ignoreNil(n.connect(after)))
			if after == before || accepted(n.connect(before)) || len(secret.Data["next-password"])+len(secret.Data[workload.KeyPreviousPassword]) > 0 {
				t.Errorf("%d: the rotation did not come to its end: %q", i, slices.Sorted(maps.Keys(secret.Data)))
			}
		}
		if deaths < 4 {
			t.Errorf("only %d processes died", deaths)
		}
	})
}

// A Secret that is not the one with which the volume was made: the condition says what to do.
func TestSecretLost(t *testing.T) {
	servers(t, func(t *testing.T, w *world, s *v1alpha1.IdempotencyStore) {
		n := w.node(s)
		d := deployer(n.dial)
		w.applied(d, s, reasonStarting)
		w.claim(s, "any")
		n.start()
		w.kubelet(s, "one")
		w.applied(d, s, reasonRunning)
		must(t, admin.Delete(w.ctx, n.secret()))
		message := w.applied(d, s, reasonPassword)
		if s.Spec.Redis != nil {
			if !strings.Contains(message, "kubectl delete pod payments-redis-0 --namespace="+w.ns) {
				t.Errorf("the message is %q", message)
			}
			n.kill()
			n.start()
			w.kubelet(s, "two")
		} else {
			if !strings.Contains(message, "kubectl exec -it payments-postgres-0 --namespace="+w.ns) {
				t.Errorf("the message is %q", message)
			}
			out, err := n.run("psql", "-U", "postgres", "-c", "ALTER ROLE postgres PASSWORD '"+string(n.secret().Data[workload.KeyAdminPassword])+"'")
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		w.applied(d, s, reasonRunning)
		n.use(n.open())

		secret := n.secret()
		delete(secret.Data, workload.KeyAdminPassword)
		must(t, admin.Update(w.ctx, secret))
		if message := w.applied(d, s, reasonSecret); !strings.Contains(message, workload.KeyAdminPassword) {
			t.Errorf("the message is %q", message)
		}
	})
}

// A deployed store whose object, and all that the operator remembers, went with an uninstallation: its Secret tells
// what it had. So an emptied volume is no first use, and what is left of an accepted loss is not forgotten.
func TestSecretRemembersTheStore(t *testing.T) {
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	n := w.node(s)
	w.create(s, w.budget("refunds", "payments"), w.tool("refund", "refunds"))
	var p *process
	install := func() {
		t.Helper()
		p = startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Gateway: true, GatewayName: "both", Dial: n.dial})
	}
	server := func(container string) {
		t.Helper()
		eventually(t, func() error { return w.get(workload.Name(s), &appsv1.StatefulSet{}) })
		n.start()
		w.kubelet(s, container)
	}
	// collect is what the cluster does some time after the store is gone. What the store made without an owner stays.
	collect := func() {
		t.Helper()
		for _, o := range w.children(s) {
			if _, is := o.(*corev1.Secret); !is {
				must(t, admin.Delete(w.ctx, o))
			}
		}
	}
	uninstallUncollected := func() {
		t.Helper()
		p.stop()
		must(t, admin.Delete(w.ctx, w.redisStore("payments")))
		forgotten := map[string]*string{}
		for key := range w.memory() {
			if strings.Contains(key, "."+w.ns+"_") {
				forgotten[key] = nil
			}
		}
		if len(forgotten) < 4 {
			t.Fatalf("the operator should remember a store, a budget and a tool: %v", w.memory())
		}
		w.remember(forgotten)
	}
	uninstall := func() {
		t.Helper()
		uninstallUncollected()
		collect()
		must(t, admin.Delete(w.ctx, &corev1.Pod{ObjectMeta: w.meta(workload.PodName(s))}, client.GracePeriodSeconds(0)))
		n.kill()
	}
	secret := func(change func(*corev1.Secret)) *corev1.Secret {
		t.Helper()
		var it corev1.Secret
		must(t, w.get(workload.SecretName(s), &it))
		if change != nil {
			w.edit(it.Name, &it, func() { change(&it) })
		}
		return &it
	}
	annotation := func(name string) string { return v1alpha1.GroupName + "/" + name }
	known := func() (epoch, domain, loss string) {
		t.Helper()
		m := w.memory()
		return m[w.key(epochOf, "payments")], m[w.key(keyDomainOf, "payments")], m[w.key(lossOf, "payments")]
	}

	install()
	server("one")
	w.claim(s, "any")
	w.toolReady("refund")
	w.pay(p, "refund", "k1", "9", "10", guard.AttemptSucceeded)
	epoch, domain, _ := known()
	uninstall()

	// The volume is emptied while nobody is there to see it.
	must(t, os.RemoveAll(filepath.Join(n.dir, "data")))
	must(t, os.Mkdir(filepath.Join(n.dir, "data"), 0o700))
	install()
	w.create(w.redisStore("payments"))
	server("two")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	for _, id := range []string{"k1", "k2"} {
		if _, err := w.try(p, "refund", id, "9", "10"); !errors.Is(err, store.ErrMemoryLost) {
			t.Fatalf("%s: nobody should be let in, got %v", id, said(err))
		}
	}
	w.accept("payments", epoch, "")
	w.toolReady("refund")
	next, sameDomain, loss := known()
	if next == epoch || sameDomain != domain || !strings.HasSuffix(loss, " "+epoch) {
		t.Fatalf("accepted, it is remembered as %q, %q and %q; before as %q and %q", next, sameDomain, loss, epoch, domain)
	}
	w.holdOf(p, "k1", "9", "10")
	uninstall()

	// The same once more, with all its records.
	install()
	w.create(w.redisStore("payments"))
	server("three")
	w.toolReady("refund")
	if e, d, l := known(); e != next || d != domain || l != loss {
		t.Errorf("put back it is remembered as %q, %q and %q, and should be as %q, %q and %q", e, d, l, next, domain, loss)
	}
	// Of what was lost nobody knows whether it was paid.
	w.holdOf(p, "k3", "7", "10")

	// Put back before the cluster has collected what the old store had, whose server still answers. As long as its
	// Secret is not read, nothing is known of it.
	uninstallUncollected()
	secret(func(it *corev1.Secret) { it.Labels[workload.StoreLabel] = "another" })
	install()
	w.create(w.redisStore("payments"))
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionDeployed, metav1.ConditionFalse, reasonNameTaken)
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonDeploying)
	if e, _, _ := known(); e != "" {
		t.Errorf("epoch %q is taken for the store's, and its Secret was not read", e)
	}
	secret(func(it *corev1.Secret) { it.Labels[workload.StoreLabel] = "payments" })
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionDeployed, metav1.ConditionFalse, reasonStarting)
	w.toolReady("refund")
	if e, d, l := known(); e != next || d != domain || l != loss {
		t.Errorf("served by the old server it is remembered as %q, %q and %q, and should be as %q, %q and %q", e, d, l, next, domain, loss)
	}
	w.holdOf(p, "k4", "8", "10")
	collect()
	must(t, admin.Delete(w.ctx, &corev1.Pod{ObjectMeta: w.meta(workload.PodName(s))}, client.GracePeriodSeconds(0)))
	n.kill()
	server("four")
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionDeployed, metav1.ConditionTrue, reasonRunning)
	if l := secret(nil).Annotations[annotation("loss")]; l != loss {
		t.Errorf("the Secret tells of the loss %q, and should of %q", l, loss)
	}

	// A loss that the ConfigMap does not have is taken from the Secret, whatever else is remembered.
	w.remember(map[string]*string{w.key(lossOf, "payments"): nil})
	eventually(t, func() error {
		if _, _, l := known(); l != loss {
			return fmt.Errorf("the loss %q is remembered, and should be %q", l, loss)
		}
		return nil
	})
	uninstall()

	// A loss that cannot be read is none that can be passed over.
	secret(func(it *corev1.Secret) { it.Annotations[annotation("loss")] = "yesterday" })
	install()
	w.create(w.redisStore("payments"))
	server("five")
	eventually(t, func() error {
		var obj v1alpha1.IdempotencyStore
		must(t, w.get("payments", &obj))
		if c := find(obj.Status.Conditions, v1alpha1.ConditionReady); c == nil || !strings.Contains(c.Message, `"yesterday"`) {
			return fmt.Errorf("it should say what it cannot read: %s", asJSON(obj.Status.Conditions))
		}
		return nil
	})
	if e, _, l := known(); e != "" || l != "" {
		t.Errorf("epoch %q and loss %q are remembered from a Secret that cannot be read", e, l)
	}
	secret(func(it *corev1.Secret) { it.Annotations[annotation("loss")] = loss })
	w.toolReady("refund")
	w.holdOf(p, "k5", "6", "10")

	// While nobody looked, an older copy of the volume was put in its place.
	seen := secret(nil).Annotations[annotation("seen")]
	last, err := parseSighting(seen)
	must(t, err)
	if last.clock.IsZero() {
		t.Fatalf("the Secret should tell how far the store had come: %q", seen)
	}
	// Its manifest has an acceptance since before that, which says nothing of this loss.
	w.accept("payments", next, "")
	spent := func(want string) {
		t.Helper()
		eventually(t, func() error {
			if is := secret(nil).Annotations[annotation("spent")]; is != want {
				return fmt.Errorf("the Secret tells of the spent acceptance %q, and should of %q", is, want)
			}
			return nil
		})
	}
	spent(next)
	uninstall()
	last.sequence += 1000
	secret(func(it *corev1.Secret) { it.Annotations[annotation("seen")] = last.String() })
	install()
	manifest := w.redisStore("payments")
	manifest.Spec.AcceptEpoch = next
	w.create(manifest)
	server("six")
	eventually(t, func() error {
		message := w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
		if !strings.Contains(message, next) || !strings.Contains(message, "since before the loss") {
			return fmt.Errorf("the loss should be of epoch %s, and not be accepted: %s", next, message)
		}
		return nil
	})
	if _, err := w.try(p, "refund", "k6", "5", "10"); !errors.Is(err, store.ErrMemoryLost) {
		t.Errorf("nobody should be let in, got %v", said(err))
	}
	must(t, admin.Patch(w.ctx, w.store("payments"), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"acceptEpoch":null}}`))))
	spent("")
	w.accept("payments", next, "")
	w.toolReady("refund")
	if e, d, l := known(); e == next || d != domain || !strings.HasSuffix(l, " "+next) {
		t.Errorf("accepted, it is remembered as %q, %q and %q; before as %q and %q", e, d, l, next, domain)
	}
	w.holdOf(p, "k6", "5", "10")
}

// Where nothing else is remembered, the Secret is not believed over the server; and a store is remembered only once its
// Secret tells of it.
func TestSecretAndServerMustAgree(t *testing.T) {
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	n := w.node(s)
	w.create(s, w.budget("refunds", "payments"), w.tool("refund", "refunds"))
	var p *process
	run := func() {
		t.Helper()
		p = startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Gateway: true, GatewayName: "both", Dial: n.dial})
	}
	epochKey, domainKey := w.key(epochOf, "payments"), w.key(keyDomainOf, "payments")
	forget := func() {
		t.Helper()
		p.stop()
		gone := map[string]*string{}
		for key := range w.memory() {
			if strings.HasSuffix(key, "."+w.ns+"_payments") {
				gone[key] = nil
			}
		}
		w.remember(gone)
	}
	secret := func(change func(annotations map[string]string)) map[string]string {
		t.Helper()
		var it corev1.Secret
		must(t, w.get(workload.SecretName(s), &it))
		if change != nil {
			w.edit(it.Name, &it, func() { change(it.Annotations) })
		}
		return it.Annotations
	}
	run()
	eventually(t, func() error { return w.get(workload.Name(s), &appsv1.StatefulSet{}) })
	n.start()
	w.kubelet(s, "one")
	w.claim(s, "any")
	w.toolReady("refund")
	epoch, domain := w.memory()[epochKey], w.memory()[domainKey]
	forget()

	secret(func(of map[string]string) { of[workload.KeyDomainAnnotation] = "another" })
	run()
	eventually(t, func() error {
		var obj v1alpha1.IdempotencyStore
		must(t, w.get("payments", &obj))
		if c := find(obj.Status.Conditions, v1alpha1.ConditionReady); c == nil || c.Status != metav1.ConditionFalse ||
			!strings.Contains(c.Message, workload.KeyDomainAnnotation) || !strings.Contains(c.Message, domainKey) {
			return fmt.Errorf("it should say what does not fit: %s", asJSON(obj.Status.Conditions))
		}
		return nil
	})
	if _, err := w.try(p, "refund", "k1", "9", "10"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("nobody should be let in, got %v", said(err))
	}
	if m := w.memory(); m[epochKey] != "" || m[domainKey] != "" {
		t.Errorf("remembered are %q and %q", m[epochKey], m[domainKey])
	}
	secret(func(of map[string]string) { delete(of, workload.KeyDomainAnnotation) })
	w.toolReady("refund")
	if m := w.memory(); m[epochKey] != epoch || m[domainKey] != domain {
		t.Errorf("remembered are %q and %q, and should be %q and %q", m[epochKey], m[domainKey], epoch, domain)
	}
	eventually(t, func() error {
		if is := secret(nil)[workload.KeyDomainAnnotation]; is != domain {
			return fmt.Errorf("the Secret tells of key domain %q, and should of %q", is, domain)
		}
		return nil
	})
	forget()

	// Of a Secret that tells nothing and cannot be written, the operator may only read.
	secret(func(of map[string]string) {
		for name := range of {
			if slices.Contains([]string{"memory-of", "epoch", "key-domain", "loss", "seen", "spent"}, strings.TrimPrefix(name, v1alpha1.GroupName+"/")) {
				delete(of, name)
			}
		}
	})
	must(t, admin.Delete(w.ctx, &rbacv1.RoleBinding{ObjectMeta: w.meta(deployerRole)}))
	w.create(&rbacv1.Role{ObjectMeta: w.meta("reads"), Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}}}},
		&rbacv1.RoleBinding{
			ObjectMeta: w.meta("reads"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reads"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: operatorNamespace, Name: "holdfast-manager"}},
		})
	operator := &Deployer{live: as(operatorUser)}
	eventually(t, func() error {
		missing, err := operator.missingRight(w.ctx, w.ns)
		if err == nil && missing != "create secrets" {
			err = fmt.Errorf("the operator should only read Secrets, and lacks %q", missing)
		}
		return err
	})
	run()
	w.condition(&v1alpha1.IdempotencyStore{}, "payments", v1alpha1.ConditionDeployed, metav1.ConditionFalse, reasonNotPermitted)
	eventually(t, func() error {
		_, err := w.try(p, "refund", "k2", "9", "10")
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "note in the store's Secret") {
			return fmt.Errorf("nobody should be let in before the Secret tells of the store, got %v", said(err))
		}
		return nil
	})
	if m := w.memory(); m[epochKey] != "" || m[domainKey] != "" {
		t.Errorf("remembered are %q and %q, and the Secret tells of neither", m[epochKey], m[domainKey])
	}
	w.permit()
	w.toolReady("refund")
	w.pay(p, "refund", "k3", "9", "10", guard.AttemptSucceeded)
	if is, m := secret(nil), w.memory(); is[v1alpha1.GroupName+"/epoch"] != epoch || m[epochKey] != epoch {
		t.Errorf("the Secret tells of epoch %q and the ConfigMap of %q, and both should of %q", is[v1alpha1.GroupName+"/epoch"], m[epochKey], epoch)
	}
}

// What the Secret of one namespace says changes nothing for a store of another one: no epoch is remembered that no
// server has shown, whoever is looked at first, and a store with which nothing is wrong is never given another one.
func TestSecretSaysNothingOfAnotherStore(t *testing.T) {
	a, b := newWorld(t), newWorld(t)
	dir := t.TempDir()
	run := func() *process {
		t.Helper()
		return startAs(t, operatorUser, Options{DataDir: dir, Controllers: true, Gateway: true, GatewayName: "both"})
	}
	epochs := func() (ofA, ofB string) {
		return a.memory()[a.key(epochOf, "payments")], b.memory()[b.key(epochOf, "payments")]
	}
	// looked waits until the store was looked at from now on.
	looked := func(w *world, kind string, status metav1.ConditionStatus, reason string) string {
		t.Helper()
		patch := fmt.Sprintf(`{"spec":{"acceptEpoch":"look %d"}}`, time.Now().UnixNano())
		must(t, admin.Patch(w.ctx, w.store("payments"), client.RawPatch(types.MergePatchType, []byte(patch))))
		return w.condition(&v1alpha1.IdempotencyStore{}, "payments", kind, status, reason)
	}
	p := run()
	a.ready()
	a.pay(p, "refund", "k1", "9", "10", guard.AttemptSucceeded)
	epoch, _ := epochs()

	b.permit()
	s := b.redisStore("payments")
	c := workload.NewCredentials(s)
	c.Keep(workload.Kept{Epoch: epoch, KeyDomain: "domain"})
	b.create(c.Secret, s)
	looked(b, v1alpha1.ConditionDeployed, metav1.ConditionFalse, reasonStarting)
	looked(a, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue, reasonKnown)
	if ofA, ofB := epochs(); ofA != epoch || ofB != "" {
		t.Fatalf("remembered are %q and %q, and should be %q alone", ofA, ofB, epoch)
	}
	a.pay(p, "refund", "k2", "10", "10", guard.AttemptSucceeded)

	// Put back, the one with the Secret is looked at first.
	p.stop()
	must(t, admin.Delete(a.ctx, a.store("payments")))
	gone := map[string]*string{}
	for key := range a.memory() {
		if strings.Contains(key, "."+a.ns+"_") || strings.Contains(key, "."+b.ns+"_") {
			gone[key] = nil
		}
	}
	a.remember(gone)
	p = run()
	looked(b, v1alpha1.ConditionDeployed, metav1.ConditionFalse, reasonStarting)
	a.create(a.store("payments"))
	a.toolReady("refund")
	a.pay(p, "refund", "k3", "11", "10", guard.AttemptSucceeded)
	if ofA, ofB := epochs(); ofA != epoch || ofB != "" {
		t.Fatalf("put back, remembered are %q and %q, and should be %q alone", ofA, ofB, epoch)
	}

	// And if it is remembered for both, nobody pays; but the store itself stays what it is.
	b.remember(map[string]*string{b.key(epochOf, "payments"): &epoch})
	message := looked(a, v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost)
	if !strings.Contains(message, "carries the epoch of IdempotencyStore "+b.ns+"/payments") {
		t.Errorf("it should say whose epoch it is: %s", message)
	}
	b.remember(map[string]*string{b.key(epochOf, "payments"): nil})
	looked(a, v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue, reasonKnown)
	eventually(t, func() error {
		_, err := a.try(p, "refund", "k1", "9", "10")
		return err
	})
	a.pay(p, "refund", "k4", "12", "10", guard.AttemptSucceeded)

	// Two stores that show one epoch at the same moment: one is remembered.
	live := as(operatorUser)
	m := NewMemory(operatorNamespace, live, live, func() bool { return true })
	id := store.Identity{Epoch: "shown-twice", KeyDomain: "domain"}
	of := func(w *world) types.NamespacedName { return types.NamespacedName{Namespace: w.ns, Name: "copy"} }
	must(t, m.rememberStore(a.ctx, of(a), id, "", sighting{}))
	if err := m.rememberStore(a.ctx, of(b), id, "", sighting{}); err == nil || !strings.Contains(err.Error(), a.ns+"/copy has epoch shown-twice") {
		t.Errorf("one epoch is remembered for two stores: %v", err)
	}
}
