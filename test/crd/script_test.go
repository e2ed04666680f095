// What make deploy, make undeploy and make build-installer work on. That it runs is seen in a cluster with nodes.

package crd

import (
	"bytes"
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
	cmd := exec.CommandContext(t.Context(), "../../hack/install.sh", command)
	cmd.Env = append(os.Environ(), "KUBECTL="+filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), "KUBECONFIG="+kubeconfig, "IMG="+image)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	return decode(&out)
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
