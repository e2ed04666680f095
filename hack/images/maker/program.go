// This file is the images of Holdfast's own programs: one static program each, the
// certificates of the public authorities, and nothing else; no shell, no packages.
//
// The Dockerfile at the root makes the same for those who have Docker; a test compares them.

package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

const (
	module = "github.com/holdfast-dev/holdfast"
	// nonRoot is the user of these images, as in many that have no root.
	nonRoot = 65532
	// authorities is where Go looks for certificates first.
	authorities = "/etc/ssl/certs/ca-certificates.crt"
	// dataDir is where the manager keeps embedded stores, unless a flag says otherwise.
	dataDir = "/var/lib/holdfast"
)

// program is one of Holdfast's programs.
type program struct {
	name, pkg, description string
	// dirs belong to the program's user.
	dirs []string
}

var programs = []program{
	{name: "manager", pkg: "./cmd/manager", description: "Holdfast, the controllers and the gateway: an agent's payment happens once", dirs: []string{dataDir}},
	{name: "provider", pkg: "./test/provider/cmd/provider", description: "A payment provider for tests: its ledger counts the money", dirs: []string{"/data"}},
	{name: "agent", pkg: "./test/agent/cmd/agent", description: "An agent for tests: it pays, and tells what it saw"},
}

// buildFlags are those of every program; the Dockerfile has the same.
func buildFlags(version string) []string {
	return []string{"-trimpath", "-buildvcs=false", "-ldflags=-s -w -X main.version=" + version}
}

// compile builds the program from the tree at source, and leaves it in dir, where the
// next build finds that there is nothing to do.
func (p program) compile(ctx context.Context, source, dir, version string) ([]byte, error) {
	out := filepath.Join(dir, p.name)
	args := append([]string{"build"}, buildFlags(version)...)
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", out, p.pkg)...)
	cmd.Dir = source
	// The caller's own settings must not be in an image.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+runtime.GOARCH, "GOFLAGS=-mod=readonly", "GOWORK=off", "GOEXPERIMENT=",
		"GOAMD64=v1", "GOARM64=v8.0", "GOFIPS140=off")
	if os.Getenv("GOGC") == "" {
		// The compiler then collects less often, which is a fifth less work.
		cmd.Env = append(cmd.Env, "GOGC=400")
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", p.pkg, err, strings.TrimSpace(stderr.String()))
	}
	return os.ReadFile(out)
}

// image is the program's.
func (p program) image(ctx context.Context, source, dir string, s stamp) (image, error) {
	binary, err := p.compile(ctx, source, dir, s.version)
	if err != nil {
		return image{}, err
	}
	libraries, interpreter, err := linked(binary)
	if err != nil {
		return image{}, fmt.Errorf("program %s: %w", p.name, err)
	}
	if len(libraries) > 0 || interpreter != "" {
		return image{}, fmt.Errorf("program %s is not static: it asks for %q and %q", p.name, interpreter, libraries)
	}
	base, err := base()
	if err != nil {
		return image{}, err
	}
	for _, d := range p.dirs {
		base.dir(d, 0o700)
		f := base[clean(d)]
		f.uid, f.gid = nonRoot, nonRoot
		base[clean(d)] = f
	}
	own, err := programPart(binary, s)
	if err != nil {
		return image{}, fmt.Errorf("program %s: %w", p.name, err)
	}
	version, err := rootsVersion()
	if err != nil {
		return image{}, err
	}
	at := path.Join("/", p.name)
	top := tree{}
	top.file(at, 0o755, binary)
	return image{
		name: p.name, description: p.description, layers: []tree{base, top},
		user: fmt.Sprintf("%d:%d", nonRoot, nonRoot), entrypoint: []string{at},
		parts: []part{own, {name: rootsModule, version: version, purl: golang(rootsModule, version)}},
	}, nil
}

// base is what all of them have.
func base() (tree, error) {
	t := tree{}
	users(t, "nonroot", "/", nonRoot)
	t.dir("/tmp", os.ModeSticky|0o777)
	roots, err := authorityCertificates()
	if err != nil {
		return nil, err
	}
	t.file(authorities, 0o644, roots)
	return t, nil
}

// authorityCertificates are those of the public authorities, from a Go module that go.sum
// pins, so that an image depends on no machine's own. An authority that is trusted with a
// condition is left out: a file of certificates cannot say the condition.
func authorityCertificates() ([]byte, error) {
	var out bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint != nil {
			continue
		}
		if err := pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return nil, err
		}
	}
	if out.Len() == 0 {
		return nil, fmt.Errorf("module %s has no certificates", rootsModule)
	}
	return out.Bytes(), nil
}
