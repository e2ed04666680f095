//go:build linux

// This file has the stores' servers run from their images, in exactly the pods that the
// operator makes, and killed; what was answered must be there afterwards.

package build_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/images/build"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// strange is a user that no image knows.
const strange = 123456

// deployed is what the operator would have a cluster run.
func deployed(t *testing.T, spec v1alpha1.IdempotencyStoreSpec) (corev1.PodSpec, map[string]string, workload.Credentials) {
	t.Helper()
	store := &v1alpha1.IdempotencyStore{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "payments"}, Spec: spec}
	objects, err := workload.Render(workload.Inputs{Store: store, OperatorNamespace: "holdfast-system"})
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(objects.StatefulSet.Spec.Template.Spec)
	if err != nil {
		t.Fatal(err)
	}
	var pod corev1.PodSpec
	if err := json.Unmarshal(text, &pod); err != nil {
		t.Fatal(err)
	}
	return pod, objects.ConfigMap.Data, workload.NewCredentials(store)
}

// made makes one image and unpacks it.
func made(t *testing.T, name string) unpacked {
	t.Helper()
	images, err := build.Images(t.Context(), build.Options{Out: t.TempDir()}, name)
	if err != nil {
		t.Fatal(err)
	}
	if len(images) != 1 || images[0].Reference != build.Reference(name, build.Version) {
		t.Fatalf("made %+v, which should be %s alone", images, build.Reference(name, build.Version))
	}
	return unpack(t, images[0].Archive, images[0].Reference)
}

func userOf(t *testing.T, pod corev1.PodSpec) int {
	t.Helper()
	if s := pod.SecurityContext; s == nil || s.RunAsUser == nil {
		t.Fatal("the pod names no user")
	}
	return int(*pod.SecurityContext.RunAsUser)
}

func TestRedisAsAPod(t *testing.T) {
	image := made(t, build.Redis)
	spec, content, secret := deployed(t, v1alpha1.IdempotencyStoreSpec{Redis: &v1alpha1.RedisStore{
		Deploy: &v1alpha1.RedisDeployment{Image: build.Reference(build.Redis, build.Version), Storage: v1alpha1.StoreStorage{Size: "1Gi"}},
	}})
	v := volumesOf(t, spec, content, secret.Secret.Data)
	cli := func(p *pod, args ...string) string {
		return p.says([]string{"REDISCLI_AUTH=" + string(secret.Secret.Data[workload.KeyPassword])},
			append([]string{"redis-cli", "--no-auth-warning", "--user", workload.StoreUser}, args...)...)
	}
	p := start(t.Context(), t, image, spec, v, userOf(t, spec))
	p.probe(p.spec.StartupProbe)
	p.probe(p.spec.ReadinessProbe)
	if got := cli(p, "SET", "{shop}x", "paid"); got != "OK" {
		t.Fatalf("SET says %q", got)
	}
	p.kill()
	// Another user and the same volume, as after a restore: what was answered is there.
	p = start(t.Context(), t, image, spec, v, strange)
	p.probe(p.spec.ReadinessProbe)
	p.probe(p.spec.LivenessProbe)
	if got := cli(p, "GET", "{shop}x"); got != "paid" {
		t.Fatalf("after the kill GET says %q", got)
	}
	// Two at once: the second has what the first has answered meanwhile.
	next := successor(t.Context(), t, image, spec, v, strange)
	if got := cli(p, "SET", "{shop}y", "paid"); got != "OK" {
		t.Fatalf("SET says %q", got)
	}
	p.kill()
	next.probe(next.spec.ReadinessProbe)
	if got := cli(next, "GET", "{shop}y"); got != "paid" {
		t.Fatalf("of the second server GET says %q", got)
	}
}

// TestProviderAsAPod is of a program of Holdfast's own: nothing is in the image but it, and
// only its volume takes writes.
func TestProviderAsAPod(t *testing.T) {
	image := made(t, build.Provider)
	user := 0
	if _, err := fmt.Sscanf(image.Config.User, "%d:", &user); err != nil || user == 0 {
		t.Fatalf("the image's user is %q, which should be one by number, and not root: %v", image.Config.User, err)
	}
	readOnly := true
	spec := corev1.PodSpec{Containers: []corev1.Container{{
		Args:            []string{"--listen", "127.0.0.1:8080", "--ledger-file", "/data/ledger"},
		SecurityContext: &corev1.SecurityContext{ReadOnlyRootFilesystem: &readOnly},
		VolumeMounts:    []corev1.VolumeMount{{Name: workload.VolumeName(), MountPath: "/data"}},
	}}}
	v := volumesOf(t, spec, nil, nil)
	p := start(t.Context(), t, image, spec, v, user)
	for deadline := time.Now().Add(time.Minute); !strings.Contains(p.log.String(), "http://127.0.0.1:8080"); {
		if time.Now().After(deadline) {
			p.kill()
			t.Fatalf("the provider does not say where it listens\n%s", p.log)
		}
		pause(t, 10*time.Millisecond)
	}
	if _, err := os.Stat(filepath.Join(v[workload.VolumeName()], "ledger")); err != nil {
		t.Errorf("the ledger is not in the volume: %v", err)
	}
	if r := p.run(nil, image.Config.Entrypoint[0], "--listen", "127.0.0.1:0", "--ledger-file", "/ledger"); r.Code != 1 || !strings.Contains(r.Output, "read-only file system") {
		t.Errorf("a ledger outside of the volume: it ends with %d and says %q", r.Code, r.Output)
	}
}

func TestPostgresAsAPod(t *testing.T) {
	image := made(t, build.Postgres)
	spec, content, secret := deployed(t, v1alpha1.IdempotencyStoreSpec{Postgres: &v1alpha1.PostgresStore{
		Deploy: &v1alpha1.PostgresDeployment{Image: build.Reference(build.Postgres, build.Version), Storage: v1alpha1.StoreStorage{Size: "1Gi"}},
	}})
	_, password := secret.Admin()
	// Over TCP, where the server wants a password.
	sql := func(p *pod, statement string) string {
		return p.says([]string{"PGPASSWORD=" + password},
			"psql", "-X", "-A", "-t", "-q", "-h", "127.0.0.1", "-U", workload.PostgresSuperuser, "-c", statement)
	}
	t.Run("killed at any time", func(t *testing.T) {
		v := volumesOf(t, spec, content, secret.Secret.Data)
		user := userOf(t, spec)
		// While the database is being made: the next one begins anew.
		p := start(t.Context(), t, image, spec, v, user)
		half := filepath.Join(v[workload.VolumeName()], "pgdata.new", "PG_VERSION")
		for deadline := time.Now().Add(time.Minute); ; {
			if _, err := os.Stat(half); err == nil {
				break
			}
			if time.Now().After(deadline) {
				p.kill()
				t.Fatalf("no database is being made\n%s", p.log)
			}
			pause(t, time.Millisecond)
		}
		p.kill()
		if _, err := os.Stat(half); err != nil {
			t.Fatalf("the kill came too late: the database is whole: %v", err)
		}

		p = start(t.Context(), t, image, spec, v, user)
		p.probe(p.spec.StartupProbe)
		p.probe(p.spec.ReadinessProbe)
		sql(p, "CREATE TABLE paid (id text); INSERT INTO paid VALUES ('once')")
		if got := sql(p, "SELECT current_setting('fsync'), current_setting('data_checksums'), datcollate FROM pg_database WHERE datname = 'postgres'"); got != "on|on|C" {
			t.Errorf("fsync, checksums and collation are %q", got)
		}
		if r := p.run([]string{"PGPASSWORD=wrong"}, "psql", "-X", "-h", "127.0.0.1", "-U", workload.PostgresSuperuser, "-c", "SELECT 1"); r.Code == 0 {
			t.Error("the server takes a wrong password")
		}
		p.kill()

		// While it serves: what was answered is there.
		p = start(t.Context(), t, image, spec, v, user)
		p.probe(p.spec.ReadinessProbe)
		p.probe(p.spec.LivenessProbe)
		if got := sql(p, "SELECT id FROM paid"); got != "once" {
			t.Errorf("after the kill the table has %q", got)
		}

		// Two at once: the second has what the first has answered meanwhile.
		next := successor(t.Context(), t, image, spec, v, user)
		sql(p, "INSERT INTO paid VALUES ('twice')")
		p.kill()
		next.probe(next.spec.ReadinessProbe)
		if got := sql(next, "SELECT string_agg(id, ' ') FROM paid"); got != "once twice" {
			t.Errorf("of the second server the table has %q", got)
		}
	})
	t.Run("any user", func(t *testing.T) {
		p := start(t.Context(), t, image, spec, volumesOf(t, spec, content, secret.Secret.Data), strange)
		p.probe(p.spec.StartupProbe)
		p.probe(p.spec.ReadinessProbe)
		if got := sql(p, "SELECT 1"); got != "1" {
			t.Errorf("the server says %q", got)
		}
	})
	if image.Config.StopSignal != "SIGINT" {
		t.Errorf("it is ended by %q: only SIGINT ends it while clients are connected", image.Config.StopSignal)
	}
	t.Run("what is no database stays", func(t *testing.T) {
		v := volumesOf(t, spec, content, secret.Secret.Data)
		other := filepath.Join(v[workload.VolumeName()], "pgdata", "other")
		if err := os.MkdirAll(filepath.Dir(other), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(other, []byte("somebody's"), 0o666); err != nil {
			t.Fatal(err)
		}
		r := start(t.Context(), t, image, entryOnly(spec), v, userOf(t, spec)).run(nil, image.Config.Entrypoint[0], "postgres")
		if r.Code == 0 || !strings.Contains(r.Output, "neither empty nor a database") {
			t.Errorf("the entry point ends with %d and says %q", r.Code, r.Output)
		}
		if content, err := os.ReadFile(other); err != nil || string(content) != "somebody's" {
			t.Errorf("what was in the volume is now %q, %v", content, err)
		}
	})
}

// entryOnly is the pod with nothing running in it.
func entryOnly(spec corev1.PodSpec) corev1.PodSpec {
	idle := *spec.DeepCopy()
	idle.Containers[0].Command, idle.Containers[0].Args = []string{"sh", "-c", "exit 0"}, nil
	return idle
}
