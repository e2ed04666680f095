// The store that a run is on, and the servers behind it.

package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// memory is a server of that kind, and the port under which the store finds it: its own,
// or that of a proxy before it.
type memory struct {
	servers.Server
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
	proxy, err := servers.NewProxy("127.0.0.1:0", address(m))
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
	return memory{Server: s, port: s.Port()}
}

// address is where a server listens itself.
func address(s servers.Server) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())) }

const (
	// storeSecret has the credentials of a world's store.
	storeSecret = "store"
	dsnKey      = "dsn"
)

// secretOf is what the Secret of a store on a server holds.
func (m memory) secretOf() map[string]string {
	if p, ok := m.Server.(*servers.Postgres); ok {
		return map[string]string{dsnKey: p.DSN(m.port)}
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
			Addresses:       []v1alpha1.HostPort{v1alpha1.HostPort(net.JoinHostPort("127.0.0.1", strconv.Itoa(on.port)))},
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
