// The installation and its samples are applied at once, as a user types it: nothing is waited
// for between the two.

package crd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

func TestTheSamplesAreAppliedAtOnce(t *testing.T) {
	env := &envtest.Environment{}
	if _, err := env.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	user, err := env.AddUser(envtest.User{Name: "admin", Groups: []string{"system:masters"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	content, err := user.KubeConfig()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"default", "samples"} {
		out, errOut, err := kubectl(t.Context(), "--kubeconfig="+file, "apply", "--validate=strict", "-k", filepath.Join(configDir, dir))
		if err != nil {
			t.Fatalf("kubectl apply -k config/%s: %v: %s", dir, err, errOut)
		}
		objects, err := kustomize(t.Context(), filepath.Join(configDir, dir))
		if err != nil {
			t.Fatal(err)
		}
		if made := strings.Count(out, " created\n"); made != len(objects) {
			t.Errorf("config/%s has %d objects, and %d were made:\n%s", dir, len(objects), made, out)
		}
	}
}
