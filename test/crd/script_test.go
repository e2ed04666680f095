// What make deploy, make undeploy and make build-installer work on. That it runs is seen in a cluster with nodes.

package crd

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// script runs hack/install.sh.
func script(t *testing.T, command, image string) ([]*unstructured.Unstructured, error) {
	t.Helper()
	out, err := scriptIn(t, "../..", command, image, kubeconfig)
	if err != nil {
		return nil, err
	}
	return decode(strings.NewReader(out))
}

// scriptIn runs the hack/install.sh of a clone. The error says what the script says.
func scriptIn(t *testing.T, clone, command, image, kubeconfig string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(clone, "hack", "install.sh"), command)
	cmd.Env = append(os.Environ(), "KUBECTL="+filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), "KUBECONFIG="+kubeconfig, "IMG="+image)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, said.String())
	}
	return out.String(), nil
}

func names(objects []*unstructured.Unstructured) []string {
	var out []string
	for _, o := range objects {
		out = append(out, o.GetKind()+"/"+o.GetName())
	}
	return out
}

func TestTheInstallerIsTheInstallation(t *testing.T) {
	const image = "registry.example.com:5000/team/manager@sha256:0123"
	whole, err := script(t, "render", image)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := names(whole), names(rendered); !slices.Equal(got, want) {
		t.Fatalf("it has %v, should have %v", got, want)
	}
	replaced := 0
	for i, o := range whole {
		got, err := o.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		want, err := rendered[i].MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(want), "holdfast-dev/manager:dev"); n > 0 {
			replaced += n
			want = bytes.ReplaceAll(want, []byte("holdfast-dev/manager:dev"), []byte(image))
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s %s is\n%s\nand should be\n%s", o.GetKind(), o.GetName(), got, want)
		}
	}
	if replaced != 2 {
		t.Errorf("the image is named %d times", replaced)
	}
	if _, err := script(t, "render", "an image|s/x/y/"); err == nil {
		t.Error("what is not the name of an image was taken for one")
	}
}

// Who names an image in config/default gets that one, and is told so who names a second one.
func TestTheInstallerKeepsAnImageThatIsNamed(t *testing.T) {
	clone := t.TempDir()
	for _, dir := range []string{"config", "hack"} {
		if err := os.MkdirAll(filepath.Join(clone, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(clone, "config"), os.DirFS(configDir)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../hack/install.sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(clone, "hack", "install.sh"), text, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(clone, "config", "default", "kustomization.yaml")
	text, err = os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const ours = "- name: holdfast-dev/manager\n"
	if !bytes.Contains(text, []byte(ours)) {
		t.Fatal("config/default sets no image of the manager")
	}
	text = bytes.Replace(text, []byte(ours), []byte(ours+"  newName: registry.example.com/named\n"), 1)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}

	whole, err := scriptIn(t, clone, "render", "", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(whole, "image: registry.example.com/named:dev\n"); n != 2 || strings.Contains(whole, "image: holdfast-dev/") {
		t.Errorf("the image that was named is there %d times", n)
	}
	if _, err := scriptIn(t, clone, "render", "registry.example.com/other:1", kubeconfig); err == nil || !strings.Contains(err.Error(), "leave IMG out") {
		t.Errorf("another image by IMG: %v", err)
	}
}

// Without a cluster nothing is tried, and the first word is what to do.
func TestTheInstallerNeedsACluster(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(nowhere, []byte(`
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: none, user: {token: none}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"deploy", "undeploy"} {
		_, err := scriptIn(t, "../..", command, "", nowhere)
		if err == nil || !strings.Contains(err.Error(), ": install: kubectl reaches no cluster: set KUBECONFIG. It says: ") {
			t.Errorf("%s: %v", command, err)
		}
	}
}

func TestUninstallingKeepsWhatMustNotBeLost(t *testing.T) {
	goes, err := script(t, "passing", "")
	if err != nil {
		t.Fatal(err)
	}
	var stays []string
	for _, name := range names(rendered) {
		if !slices.Contains(names(goes), name) {
			stays = append(stays, name)
		}
	}
	slices.Sort(stays)
	var want []string
	for _, o := range rendered {
		switch o.GetKind() {
		case "CustomResourceDefinition", "Namespace",
			// Else whoever may patch a hold could decide it as anybody until Holdfast is back.
			"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding":
			want = append(want, o.GetKind()+"/"+o.GetName())
		}
	}
	slices.Sort(want)
	if len(want) < 12 {
		t.Fatalf("only %v are to stay", want)
	}
	if !slices.Equal(stays, want) {
		t.Errorf("%v stay, and should: %v", stays, want)
	}
	if len(goes)+len(stays) != len(rendered) {
		t.Errorf("%d go and %d stay of %d", len(goes), len(stays), len(rendered))
	}
}
