package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// sample is a program in a directory of its own.
func sample(t *testing.T, says string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module example.com/sample\n\ngo 1.26.0\n",
		"main.go": "package main\n\nimport \"os\"\n\nvar version string\n\nfunc main() { _, _ = os.Stdout.WriteString(\"" + says + " \" + version) }\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// makeSample builds the program in source and writes its image.
func makeSample(t *testing.T, source, version string) made {
	t.Helper()
	p := program{name: "sample", pkg: ".", description: "a sample", dirs: []string{dataDir}}
	s := stamp{version: version, revision: "0123", created: epoch}
	i, err := p.image(t.Context(), source, t.TempDir(), s)
	if err != nil {
		t.Fatal(err)
	}
	m, err := i.write(s, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func TestEqualInputsAreEqualImages(t *testing.T) {
	first := makeSample(t, sample(t, "paid"), "v1")
	// What somebody has set for builds of their own: an image for the newest processors alone would not start elsewhere.
	t.Setenv("GOAMD64", "v3")
	t.Setenv("GOARM64", "v9.0")
	second := makeSample(t, sample(t, "paid"), "v1")
	if first.Digest != second.Digest {
		t.Errorf("the same program in two directories is two images: %s and %s", first.Digest, second.Digest)
	}
	if !bytes.Equal(read(t, first.Archive), read(t, second.Archive)) {
		t.Error("the same image is two archives")
	}
	if !bytes.Equal(read(t, first.SBOM), read(t, second.SBOM)) {
		t.Error("the same image has two SBOMs")
	}
	for what, other := range map[string]made{
		"program": makeSample(t, sample(t, "paid twice"), "v1"), "version": makeSample(t, sample(t, "paid"), "v2"),
	} {
		if other.Digest == first.Digest {
			t.Errorf("another %s is the same image", what)
		}
	}
}

func TestImageOfAProgram(t *testing.T) {
	m := makeSample(t, sample(t, "paid"), "v1")
	if m.Reference != "holdfast-dev/sample:v1" || filepath.Base(m.Archive) != "sample.tar" || filepath.Base(m.SBOM) != "sample.spdx.json" {
		t.Errorf("made %+v", m)
	}
	tag, err := name.NewTag(m.Reference)
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(m.Archive, &tag)
	if err != nil {
		t.Fatalf("the archive has no image of the name that a runtime looks for: %v", err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c := config.Config; c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/sample"}) || len(c.Cmd) > 0 {
		t.Errorf("user %q, entry point %q, command %q", c.User, c.Entrypoint, c.Cmd)
	}
	for label, want := range map[string]string{"title": "sample", "description": "a sample", "version": "v1", "revision": "0123", "source": "https://" + module} {
		if got := config.Config.Labels["org.opencontainers.image."+label]; got != want {
			t.Errorf("the label %s is %q, which should be %q", label, got, want)
		}
	}
	files := filesOf(t, img)
	var names []string
	for name, h := range files {
		if h.Typeflag != tar.TypeDir {
			names = append(names, name)
		}
		if h.Mode&0o6000 != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s has mode %o and time %s", name, h.Mode, h.ModTime)
		}
	}
	slices.Sort(names)
	if want := []string{"etc/group", "etc/passwd", "etc/ssl/certs/ca-certificates.crt", "sample"}; !slices.Equal(names, want) {
		t.Errorf("the image has %q, which should be %q", names, want)
	}
	if h := files["var/lib/holdfast/"]; h == nil || h.Uid != nonRoot || h.Gid != nonRoot || h.Mode != 0o700 {
		t.Errorf("the data directory is %+v", h)
	}
	if h := files["tmp/"]; h == nil || h.Mode != 0o1777 {
		t.Errorf("/tmp is %+v", h)
	}
}

func filesOf(t *testing.T, img v1.Image) map[string]*tar.Header {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*tar.Header{}
	for _, l := range layers {
		content, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(content); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			all[h.Name] = h
		}
		if err := content.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestSBOM is of the maker itself, which has modules linked in.
func TestSBOM(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := stamp{version: "v1", created: epoch}
	own, err := programPart(read(t, self), s)
	if err != nil {
		t.Fatal(err)
	}
	i := image{name: "sample", parts: []part{own, {name: "libc6", version: "2.36-9+deb12u1", purl: "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64", sha256: "ab", supplier: "Debian"}, own}}
	text, err := i.sbom(s, "sha256:cd")
	if err != nil {
		t.Fatal(err)
	}
	d := &v2_3.Document{}
	if err := spdxjson.ReadInto(bytes.NewReader(text), d); err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(d); err != nil {
		t.Errorf("the SBOM is not valid: %v", err)
	}
	listed := map[string]int{}
	for _, p := range d.Packages {
		for _, r := range p.PackageExternalReferences {
			listed[r.Locator]++
		}
	}
	for purl, n := range listed {
		if n != 1 {
			t.Errorf("%s is listed %d times", purl, n)
		}
	}
	if len(own.parts) < 3 {
		t.Fatalf("the program has %d modules, which should be many", len(own.parts))
	}
	for _, p := range append(own.parts, own, i.parts[1]) {
		if listed[p.purl] == 0 {
			t.Errorf("%s is not listed", p.purl)
		}
	}
	if !slices.ContainsFunc(own.parts, func(p part) bool {
		return strings.HasPrefix(p.purl, "pkg:golang/github.com/google/go-containerregistry@v")
	}) {
		t.Error("the program's modules do not have go-containerregistry, which it is linked with")
	}
}

func TestTreeKeepsNoRights(t *testing.T) {
	x := tree{}
	x.file("/usr/bin/su", 0o755|fs.ModeSetuid, []byte("x"))
	x.link("/bin", "usr/bin")
	x.link("/loop", "loop")
	content, err := x.layer()
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(bytes.NewReader(content)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode&0o7000 != 0 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
	}
	if f, ok := x.resolve("/bin/su"); !ok || string(f.data) != "x" {
		t.Error("/bin/su is not found by its link")
	}
	if _, ok := x.resolve("/loop/x"); ok {
		t.Error("a link to itself leads somewhere")
	}
}
