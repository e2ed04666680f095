// The store that a run is on, and the servers behind it.

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// The kinds of store.
const (
	bolt     = "bolt"
	redis    = "redis"
	postgres = "postgres"
)

// storeEnv chooses the one store that a run is on.
const storeEnv = "HOLDFAST_E2E_STORE"

var kinds = []string{bolt, redis, postgres}

// kind is the store of this run.
var kind = os.Getenv(storeEnv)

// memory is a server of that kind, and the address under which the store finds it: its
// own, or that of a proxy before it.
type memory struct {
	servers.Server
	host string
	port int
}

// shared is the server of all specs that do no harm to it; nil for bolt.
var shared memory

// serversDir is a directory that PostgreSQL's user may reach.
var serversDir string

// newMemory starts a server for one spec alone, with a proxy before it.
func newMemory(ctx context.Context, o servers.Options) (memory, *servers.Proxy) {
	GinkgoHelper()
	began := time.Now()
	m := startServer(ctx, o)
	proxy, err := servers.NewProxy(loopback+":0", address(m))
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(proxy.Close)
	m.port = proxy.Port()
	GinkgoWriter.Printf("a %s server of its own after %s\n", kind, time.Since(began))
	return m, proxy
}

// startServer starts a server, until the end of the spec, or of the suite.
func startServer(ctx context.Context, o servers.Options) memory {
	GinkgoHelper()
	dir, err := os.MkdirTemp(serversDir, kind+"-")
	Expect(err).NotTo(HaveOccurred())
	o.Dir = filepath.Join(dir, "server")
	Expect(os.Chmod(dir, 0o755)).To(Succeed())
	var s servers.Server
	if kind == redis {
		s, err = servers.NewRedis(ctx, o)
	} else {
		s, err = servers.NewPostgres(ctx, o)
	}
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx context.Context) {
		if CurrentSpecReport().Failed() {
			AddReportEntry("the end of the server's log", s.Log())
		}
		Expect(s.Remove(ctx)).To(Succeed())
	})
	return memory{Server: s, host: loopback, port: s.Port()}
}

// address is where a server listens itself.
func address(s servers.Server) string { return net.JoinHostPort(loopback, strconv.Itoa(s.Port())) }

const loopback = "127.0.0.1"

const (
	// storeSecret has the credentials of a world's store.
	storeSecret = "store"
	dsnKey      = "dsn"
)

// secretOf is what the Secret of a store on a server holds.
func (m memory) secretOf() map[string]string {
	if p, ok := m.Server.(*servers.Postgres); ok {
		return map[string]string{dsnKey: p.DSN(m.host, m.port)}
	}
	return map[string]string{"password": m.Password()}
}

// newStore makes the world's IdempotencyStore on a server, with what it takes to reach it.
func (w *world) newStore(ctx context.Context, on memory) {
	GinkgoHelper()
	store := &v1alpha1.IdempotencyStore{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: storeName}}
	switch kind {
	case bolt:
		store.Spec.Embedded = &v1alpha1.EmbeddedStore{}
	case redis:
		store.Spec.Redis = &v1alpha1.RedisStore{External: &v1alpha1.ExternalRedis{
			Addresses:       []v1alpha1.HostPort{v1alpha1.HostPort(net.JoinHostPort(on.host, strconv.Itoa(on.port)))},
			CredentialsFrom: &v1alpha1.SecretReference{Name: storeSecret},
		}}
	case postgres:
		store.Spec.Postgres = &v1alpha1.PostgresStore{External: &v1alpha1.ExternalPostgres{
			DSNFrom: v1alpha1.SecretKeyReference{Name: storeSecret, Key: dsnKey},
			Schema:  w.schema(),
		}}
	}
	if kind != bolt {
		create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: storeSecret, Labels: map[string]string{v1alpha1.GroupName + "/credentials": "true"}},
			StringData: on.secretOf(),
		})
		w.letRead(ctx, storeSecret)
	}
	create(ctx, store)
}

// schema is the world's own in a database that many worlds share.
func (w *world) schema() string { return strings.ReplaceAll(w.namespace, "-", "_") }

// letRead lets the operator read a Secret of the world, as its owner would.
func (w *world) letRead(ctx context.Context, secret string) {
	GinkgoHelper()
	create(ctx, &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "read-" + secret},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{secret}, Verbs: []string{"get"}}},
	})
	create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "read-" + secret},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "read-" + secret},
		Subjects: []rbacv1.Subject{
			{Kind: rbacv1.ServiceAccountKind, Namespace: "holdfast-system", Name: "holdfast-manager"},
			{Kind: rbacv1.ServiceAccountKind, Namespace: "holdfast-system", Name: "holdfast-gateway"},
		},
	})
}

// onServers are specs of a store that several processes share, on a server that can fail.
func onServers(text string, args ...any) bool {
	return kind == bolt || kind == "" || Describe(text, args...)
}

// storeObject reads the world's IdempotencyStore.
func (w *world) storeObject(ctx context.Context) (*v1alpha1.IdempotencyStore, error) {
	var s v1alpha1.IdempotencyStore
	return &s, admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: storeName}, &s)
}

// storeIs waits until a condition of the store has a status for its newest spec, and returns the store.
func (w *world) storeIs(ctx context.Context, condition string, status metav1.ConditionStatus) *v1alpha1.IdempotencyStore {
	GinkgoHelper()
	var s *v1alpha1.IdempotencyStore
	Eventually(func(ctx context.Context) error {
		var err error
		if s, err = w.storeObject(ctx); err != nil {
			return err
		}
		c := apimeta.FindStatusCondition(s.Status.Conditions, condition)
		if c == nil || c.Status != status || c.ObservedGeneration != s.Generation {
			return fmt.Errorf("want %s to be %s; the status is %+v", condition, status, s.Status)
		}
		return nil
	}).WithContext(ctx).WithTimeout(time.Minute).Should(Succeed())
	return s
}

// changeStore changes the store's spec.
func (w *world) changeStore(ctx context.Context, change func(*v1alpha1.IdempotencyStoreSpec)) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		s, err := w.storeObject(ctx)
		if err != nil {
			return err
		}
		change(&s.Spec)
		return admin.Update(ctx, s, client.FieldValidation(metav1.FieldValidationStrict))
	}).WithContext(ctx).Should(Succeed())
}

// refusedEverywhere waits until every gateway refuses a call because of the store, for
// this reason, and checks each refusal on the way.
func (w *world) refusedEverywhere(ctx context.Context, c call, reason string) {
	GinkgoHelper()
	for _, g := range gateways() {
		c.at = g
		Eventually(func(ctx context.Context) string {
			p := w.pay(ctx, c, http.StatusServiceUnavailable, deny).problem()
			Expect(p.RetryAfter).To(BeNumerically(">", 0))
			return p.Reason
		}).WithContext(ctx).WithTimeout(time.Minute).Should(Equal(reason), string(g))
	}
}

// servedEverywhere waits until no gateway refuses a call any more because of the store:
// the call, which must be a known one, is replayed by each.
func (w *world) servedEverywhere(ctx context.Context, c call) {
	GinkgoHelper()
	for _, g := range gateways() {
		c.at = g
		Eventually(func(ctx context.Context) string { return w.call(ctx, c).verdict() }).
			WithContext(ctx).WithTimeout(time.Minute).Should(Equal(replay), string(g))
	}
}

// onServersAsRoot are specs that also make a network, which takes root.
func onServersAsRoot(text string, body func()) bool {
	if os.Geteuid() == 0 {
		return onServers(text, body)
	}
	if kind != "" && kind != bolt {
		fmt.Fprintf(os.Stderr, "%s: these specs make a network namespace, and need root to run\n", text)
	}
	return true
}
