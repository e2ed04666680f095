package crd

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// fields are part of an object.
func fields(t *testing.T, text string) map[string]any {
	t.Helper()
	m := map[string]any{}
	if err := yaml.UnmarshalStrict([]byte(text), &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestIdempotencyStore(t *testing.T) {
	valid := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  embedded: {}
`)
	creating(t, strict(), valid, []tableCase{
		{"name of 40 characters", []change{set("metadata.name", letters(40))}, ""},
		{"name of 41 characters", []change{set("metadata.name", letters(41))}, "the name of an IdempotencyStore has at most 40 characters"},
		{"no kind of store", []change{remove("spec.embedded")}, "exactly one kind of store must be set"},
		{"no spec", []change{remove("spec")}, "spec: Required value"},
		{"a kind of store that does not exist", []change{set("spec.memory", map[string]any{})}, `unknown field "spec.memory"`},
		{"a setting that does not exist", []change{set("spec.embedded.path", "/data")}, `unknown field "spec.embedded.path"`},
		{"two kinds of store", []change{set("spec.redis", fields(t, "external: {addresses: ['redis:6379']}"))}, "exactly one kind of store must be set"},
		{"a durability policy", []change{set("spec.durabilityPolicy", "Warn")}, ""},
		{"another durability policy", []change{set("spec.durabilityPolicy", "Ignore")}, "Unsupported value"},
		{"a lost epoch that is accepted", []change{set("spec.acceptEpoch", "E1")}, ""},
		{"and forgotten", []change{set("spec.acceptEpoch", "E1"), set("spec.forgetEpoch", "E1")}, ""},
		{"another one forgotten", []change{set("spec.acceptEpoch", "E1"), set("spec.forgetEpoch", "E2")}, "forgetEpoch must be the same as acceptEpoch"},
		{"one forgotten that is not accepted", []change{set("spec.forgetEpoch", "E2")}, "forgetEpoch must be the same as acceptEpoch"},
		{"a clock that is accepted", []change{set("spec.acceptClock", "2026-11-30T02:48:49Z")}, ""},
	})
	updating(t, strict(), strict(), valid, []tableCase{
		{"a label", []change{set("metadata.labels", map[string]any{"team": "support"})}, ""},
		{"the kind of store removed", []change{remove("spec.embedded")}, "exactly one kind of store must be set"},
		{"the kind of store changed", []change{remove("spec.embedded"), set("spec.redis", fields(t, "external: {addresses: ['redis:6379']}"))}, "the kind of store cannot change"},
		{"the durability policy", []change{set("spec.durabilityPolicy", "Warn")}, ""},
	})
}

func TestRedisStore(t *testing.T) {
	deployed := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  redis:
    deploy:
      image: docker.io/valkey/valkey:8.1
      storage: {size: 10Gi, className: fast}
      resources: {requests: {cpu: 250m, memory: 1Gi}, limits: {memory: 2Gi}}
      tls: {secretRef: {name: payments-tls}}
`)
	creating(t, strict(), deployed, []tableCase{
		{"the smallest", []change{remove("spec.redis.deploy.image"), remove("spec.redis.deploy.resources"), remove("spec.redis.deploy.tls"), remove("spec.redis.deploy.storage.className")}, ""},
		{"neither deploy nor external", []change{remove("spec.redis.deploy")}, "exactly one of deploy and external must be set"},
		{"both", []change{set("spec.redis.external", fields(t, "addresses: ['redis:6379']"))}, "exactly one of deploy and external must be set"},
		{"no storage", []change{remove("spec.redis.deploy.storage")}, "spec.redis.deploy.storage: Required value"},
		{"a size that is none", []change{set("spec.redis.deploy.storage.size", "much")}, "size must be a quantity"},
		{"a size that is too small", []change{set("spec.redis.deploy.storage.size", "1Mi")}, "size must be a quantity of at least 64Mi"},
		{"a cpu that is none", []change{set("spec.redis.deploy.resources.requests.cpu", "fast")}, "cpu must be a quantity"},
		{"a memory that is too small", []change{set("spec.redis.deploy.resources.limits.memory", "1Mi")}, "memory must be a quantity of at least 64Mi"},
		{"an image with a blank", []change{set("spec.redis.deploy.image", "valkey --protected-mode")}, "should match"},
	})
	updating(t, strict(), strict(), deployed, []tableCase{
		{"another image", []change{set("spec.redis.deploy.image", "docker.io/valkey/valkey:9.0")}, ""},
		{"a larger volume", []change{set("spec.redis.deploy.storage.size", "20480Mi")}, ""},
		{"a smaller volume", []change{set("spec.redis.deploy.storage.size", "9Gi")}, "size cannot be lowered"},
		{"another class", []change{set("spec.redis.deploy.storage.className", "slow")}, "className cannot change"},
		{"the class removed", []change{remove("spec.redis.deploy.storage.className")}, "className cannot change"},
		{"external instead", []change{remove("spec.redis.deploy"), set("spec.redis.external", fields(t, "addresses: ['redis:6379']"))}, "deploy and external cannot be exchanged"},
		{"postgres instead", []change{remove("spec.redis"), set("spec.postgres", fields(t, "external: {dsnFrom: {name: a, key: b}}"))}, "the kind of store cannot change"},
		{"removed", []change{remove("spec.redis")}, "exactly one kind of store must be set"},
	})

}

func TestExternalRedisStore(t *testing.T) {
	external := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  redis:
    external:
      addresses: ["redis.support.svc:6379", "[fd00::1]:6379"]
      credentialsFrom: {name: redis}
      tls: {caFrom: {name: redis-ca, key: ca.crt}, serverName: redis.support.svc}
`)
	creating(t, strict(), external, []tableCase{
		{"the smallest", []change{remove("spec.redis.external.credentialsFrom"), remove("spec.redis.external.tls")}, ""},
		{"no address", []change{remove("spec.redis.external.addresses")}, "addresses: Required value"},
		{"an address without port", []change{set("spec.redis.external.addresses", []any{"redis"})}, "should match"},
		{"a socket", []change{set("spec.redis.external.addresses", []any{"unix:/run/redis.sock"})}, "should match"},
		{"a URL", []change{set("spec.redis.external.addresses", []any{"redis://redis:6379"})}, "should match"},
	})
	updating(t, strict(), strict(), external, []tableCase{
		{"another address", []change{set("spec.redis.external.addresses", []any{"other:6379"})}, ""},
		{"deploy instead", []change{remove("spec.redis.external"), set("spec.redis.deploy", fields(t, "storage: {size: 1Gi}"))}, "deploy and external cannot be exchanged"},
	})
}

func TestPostgresStore(t *testing.T) {
	external := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  postgres:
    external:
      dsnFrom: {name: payments-app, key: uri}
      caFrom: {name: payments-ca, key: ca.crt}
      schema: holdfast
      cloudNativePG: {name: payments}
`)
	creating(t, strict(), external, []tableCase{
		{"the smallest", []change{remove("spec.postgres.external.caFrom"), remove("spec.postgres.external.schema"), remove("spec.postgres.external.cloudNativePG")}, ""},
		{"no DSN", []change{remove("spec.postgres.external.dsnFrom")}, "dsnFrom: Required value"},
		{"a DSN in the spec", []change{set("spec.postgres.external.dsn", "postgres://")}, `unknown field "spec.postgres.external.dsn"`},
		{"a schema of PostgreSQL's own", []change{set("spec.postgres.external.schema", "pg_catalog")}, "schema must not be one of PostgreSQL's own"},
		{"the schema public", []change{set("spec.postgres.external.schema", "public")}, "schema must not be one of PostgreSQL's own, nor public"},
		{"a schema in upper case", []change{set("spec.postgres.external.schema", "Holdfast")}, "should match"},
		{"a schema that is too long", []change{set("spec.postgres.external.schema", strings.Repeat("a", 64))}, "may not be more than 63"},
		{"neither deploy nor external", []change{remove("spec.postgres.external")}, "exactly one of deploy and external must be set"},
	})
	deployed := object(`
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec:
  postgres: {deploy: {storage: {size: 10Gi}}}
`)
	updating(t, strict(), strict(), deployed, []tableCase{
		{"a larger volume", []change{set("spec.postgres.deploy.storage.size", "11Gi")}, ""},
		{"a class given later", []change{set("spec.postgres.deploy.storage.className", "fast")}, "className cannot change"},
		{"external instead", []change{remove("spec.postgres.deploy"), set("spec.postgres.external", fields(t, "dsnFrom: {name: a, key: b}"))}, "deploy and external cannot be exchanged"},
	})
}
