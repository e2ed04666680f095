package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/hack/images/build"
)

// TestVersionIsSetByTheImage: the linker ignores a name that is not there, so what makes the
// images and this package must agree on it.
func TestVersionIsSetByTheImage(t *testing.T) {
	for _, file := range []string{"Dockerfile", "hack/images/maker/program.go"} {
		text, err := os.ReadFile(filepath.Join("..", "..", file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "-X main.version=") {
			t.Errorf("%s does not set main.version", file)
		}
	}
	if version != build.Version {
		t.Errorf("without the linker's word it is %q, and an image's tag is %q", version, build.Version)
	}
	var out strings.Builder
	if err := printVersion(&out); err != nil || !strings.HasPrefix(out.String(), "holdfast "+version+" go") {
		t.Errorf("it says %q, %v", out.String(), err)
	}
}
