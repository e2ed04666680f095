// Package build makes the container images of Holdfast and of the stores' servers without
// Docker, for the tests and for `make images`. The program that does it is a module of its
// own beside this package; here it is only run.
package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
)

// The images.
const (
	Manager  = "manager"
	Provider = "provider"
	Agent    = "agent"
	Redis    = "redis"
	Postgres = "postgres"
)

// Version is the images' tag where the options name none.
const Version = "dev"

// Reference is what a pod names the image by; a container runtime completes it with the
// host that every name without one has.
func Reference(name, version string) string { return "holdfast-dev/" + name + ":" + version }

// Options say what is made.
type Options struct {
	// Out is the directory to write to, made if it is not there.
	Out string
	// Version is the tag; "": Version, or the first twelve digits of the commit.
	Version string
	// Commit has the programs built from it; "": from the files as they are.
	Commit string
	// Log is told what is done.
	Log io.Writer
}

// Image is one that was made.
type Image struct {
	Name, Reference string
	// Digest is the image's ID in a container runtime: sha256:….
	Digest string
	// Archive is the file to load, SBOM the list of what the image is made of (SPDX, JSON).
	Archive, SBOM string
}

// Images makes the named images, or all of them.
func Images(ctx context.Context, o Options, names ...string) ([]Image, error) {
	args := []string{"-o", o.Out}
	if o.Version != "" {
		args = append(args, "-version", o.Version)
	}
	if o.Commit != "" {
		args = append(args, "-commit", o.Commit)
	}
	var out bytes.Buffer
	if err := Run(ctx, append(args, names...), &out, o.Log); err != nil {
		return nil, err
	}
	var all []Image
	for d := json.NewDecoder(&out); ; {
		var i Image
		if err := d.Decode(&i); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("read what was made: %w", err)
		}
		all = append(all, i)
	}
}

// Run runs the program with these arguments. The directory after -o is this process's; for
// each image it writes a line of JSON to stdout.
func Run(ctx context.Context, args []string, stdout, log io.Writer) error {
	root, err := assets.Root(ctx)
	if err != nil {
		return err
	}
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"run", "-mod=readonly", ".", "-root", root, "-from", here}, args...)...)
	cmd.Dir = filepath.Join(root, "hack", "images", "maker")
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK=off")
	var said bytes.Buffer
	cmd.Stdout = stdout
	cmd.Stderr = &said
	if log != nil {
		cmd.Stderr = io.MultiWriter(log, &said)
	}
	// Of an interrupt a terminal tells the whole group; of a context that ends, this does.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if log != nil {
			return fmt.Errorf("make images: %w", err)
		}
		return fmt.Errorf("make images: %w\n%s", err, strings.TrimSpace(said.String()))
	}
	return nil
}
