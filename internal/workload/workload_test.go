// What is rendered, where no server can tell: the rest is tested on real ones, in package
// controller.

package workload

import (
	"encoding/json"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func redisStore(d v1alpha1.RedisDeployment) *v1alpha1.IdempotencyStore {
	d.Storage.Size = "1Gi"
	return &v1alpha1.IdempotencyStore{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "payments", UID: "uid"},
		Spec:       v1alpha1.IdempotencyStoreSpec{Redis: &v1alpha1.RedisStore{Deploy: &d}},
	}
}

func postgresStore(d v1alpha1.PostgresDeployment) *v1alpha1.IdempotencyStore {
	if d.Storage.Size == "" {
		d.Storage.Size = "1Gi"
	}
	return &v1alpha1.IdempotencyStore{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "payments", UID: "uid"},
		Spec:       v1alpha1.IdempotencyStoreSpec{Postgres: &v1alpha1.PostgresStore{Deploy: &d}},
	}
}

func rendered(t *testing.T, s *v1alpha1.IdempotencyStore) string {
	t.Helper()
	o, err := Render(Inputs{Store: s, OperatorNamespace: "holdfast-system"})
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal([]any{o.ConfigMap, o.NetworkPolicy, o.Headless, o.Client, o.PodDisruptionBudget, o.StatefulSet})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestRender(t *testing.T) {
	limit := func(memory string) *v1alpha1.StoreResources {
		return &v1alpha1.StoreResources{Limits: &v1alpha1.ResourceAmounts{Memory: memory}}
	}
	for name, c := range map[string]struct {
		store    *v1alpha1.IdempotencyStore
		has, not []string
	}{
		"redis": {redisStore(v1alpha1.RedisDeployment{}),
			[]string{RedisImage, `maxmemory 402653184\n`, `\nport 6379\n`, `"cpu":"100m"`, `"terminationGracePeriodSeconds":60`}, []string{"tls-port", `"name":"PROBE_TLS"`}},
		"redis with tls": {redisStore(v1alpha1.RedisDeployment{TLS: &v1alpha1.ServerTLS{SecretRef: v1alpha1.SecretReference{Name: "cert"}}}),
			[]string{`\nport 0\ntls-port 6379\n`, `tls-auth-clients no\n`, `"PROBE_TLS"`, `"secretName":"cert"`}, []string{`\nport 6379`}},
		"redis without a limit": {redisStore(v1alpha1.RedisDeployment{Resources: &v1alpha1.StoreResources{Requests: &v1alpha1.ResourceAmounts{CPU: "1"}}}),
			[]string{`"requests":{"cpu":"1"}`}, []string{"maxmemory ", `"limits"`}},
		"redis of another image": {redisStore(v1alpha1.RedisDeployment{Image: "redis:7"}), []string{`"image":"redis:7"`}, []string{RedisImage}},
		"postgres": {postgresStore(v1alpha1.PostgresDeployment{}),
			[]string{PostgresImage, `"shared_buffers=256MB"`, `"max_wal_size=256MB"`, `"fsync=on"`, `"full_page_writes=on"`, `"synchronous_commit=on"`, "scram-sha-256"}, nil},
		"a small postgres": {postgresStore(v1alpha1.PostgresDeployment{Storage: v1alpha1.StoreStorage{Size: "64Mi"}, Resources: limit("64Mi")}),
			[]string{`"shared_buffers=16MB"`, `"max_wal_size=64MB"`}, nil},
		"a large postgres": {postgresStore(v1alpha1.PostgresDeployment{Storage: v1alpha1.StoreStorage{Size: "1Ti"}, Resources: limit("8Gi")}),
			[]string{`"shared_buffers=2048MB"`, `"max_wal_size=1024MB"`}, nil},
	} {
		text := rendered(t, c.store)
		for _, s := range c.has {
			if !strings.Contains(text, s) {
				t.Errorf("%s: has no %s:\n%s", name, s, text)
			}
		}
		for _, s := range c.not {
			if strings.Contains(text, s) {
				t.Errorf("%s: has %s:\n%s", name, s, text)
			}
		}
		if strings.Contains(text, "password\":\"") || text != rendered(t, c.store) {
			t.Errorf("%s: a password, or not the same twice", name)
		}
	}
	for _, s := range []*v1alpha1.IdempotencyStore{
		{Spec: v1alpha1.IdempotencyStoreSpec{Embedded: &v1alpha1.EmbeddedStore{}}},
		postgresStore(v1alpha1.PostgresDeployment{Storage: v1alpha1.StoreStorage{Size: "much"}}),
		postgresStore(v1alpha1.PostgresDeployment{Resources: limit("much")}),
		redisStore(v1alpha1.RedisDeployment{Resources: limit("much")}),
	} {
		if _, err := Render(Inputs{Store: s}); err == nil {
			t.Errorf("%+v was rendered", s.Spec)
		}
	}
}

// A server must not be let in where the operator is, and no name is longer than a label's value.
func TestNames(t *testing.T) {
	for _, s := range []*v1alpha1.IdempotencyStore{redisStore(v1alpha1.RedisDeployment{}), postgresStore(v1alpha1.PostgresDeployment{})} {
		s.Name = strings.Repeat("n", 40)
		if Labels(s)[NameLabel] == Operator {
			t.Error("the server carries the operator's label")
		}
		for _, name := range []string{HeadlessName(s), PodName(s), Name(s) + "-0123456789"} {
			if len(name) > 63 {
				t.Errorf("%s has %d characters", name, len(name))
			}
		}
	}
	if got := Endpoint(redisStore(v1alpha1.RedisDeployment{})); got != "payments-redis.ns.svc:6379" {
		t.Error(got)
	}
	if got := Endpoint(postgresStore(v1alpha1.PostgresDeployment{})); got != "payments-postgres.ns.svc:5432" {
		t.Error(got)
	}
}

// The file of users has hashes alone, and a Secret is told from another by what it has.
func TestCredentials(t *testing.T) {
	s := redisStore(v1alpha1.RedisDeployment{})
	c := NewCredentials(s)
	if len(c.text(KeyPassword)) != 32 || c.text(KeyPassword) == c.text(KeyAdminPassword) {
		t.Error("passwords have 32 characters, each its own")
	}
	for _, key := range []string{KeyPassword, KeyAdminPassword, KeyProbePassword} {
		if strings.Contains(c.text(KeyUsersACL), c.text(key)) {
			t.Errorf("the file of users shows %s", key)
		}
	}
	if _, err := ReadCredentials(s, c.Secret); err != nil {
		t.Error(err)
	}
	for says, damage := range map[string]func(Credentials){
		`no value under the key "password"`: func(c Credentials) { delete(c.Secret.Data, KeyPassword) },
		"control character":                 func(c Credentials) { c.Secret.Data[KeyPassword] = []byte("a\nuser evil on nopass +@all") },
		`its username is "other"`:           func(c Credentials) { c.Secret.Data[KeyUsername] = []byte("other") },
		"does not carry the label":          func(c Credentials) { delete(c.Secret.Labels, v1alpha1.CredentialsLabel) },
	} {
		c := NewCredentials(s)
		damage(c)
		if _, err := ReadCredentials(s, c.Secret); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("want %q: %v", says, err)
		}
	}
	if err := CheckOwn(s, c.Secret); err != nil {
		t.Error(err)
	}
	other := redisStore(v1alpha1.RedisDeployment{})
	other.Name = "other"
	if CheckOwn(other, c.Secret) == nil {
		t.Error("another store's Secret is taken for one's own")
	}
}
