// Downloading the programs with setup-envtest, which checks their hashes.
package assets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// download fetches the newest patch of the wanted minor version into dir. It
// unpacks elsewhere and renames, so that dir is whole or not there.
func download(ctx context.Context, log io.Writer, v Versions, dir string) (err error) {
	root, err := Root(ctx)
	if err != nil {
		return err
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	unlock, err := lock(ctx, log, filepath.Join(parent, ".download.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if len(lacking(dir, etcd, apiServer, kubectl)) == 0 {
		return nil
	}
	tmp, err := os.MkdirTemp(parent, ".download-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removeReadOnly(tmp)) }()

	tool := filepath.Join(tmp, "setup-envtest")
	if err := quiet(ctx, filepath.Join(root, "hack", "tools"), nil,
		"go", "build", "-mod=readonly", "-buildvcs=false", "-o", tool, "sigs.k8s.io/controller-runtime/tools/setup-envtest"); err != nil {
		return fmt.Errorf("building setup-envtest: %w", err)
	}
	var out strings.Builder
	if err := quiet(ctx, tmp, &out, tool, "use", v.minor()+".x", "-p", "path", "--bin-dir", tmp); err != nil {
		return err
	}
	unpacked := strings.TrimSpace(out.String())
	if missing := lacking(unpacked, etcd, apiServer, kubectl); len(missing) > 0 {
		return fmt.Errorf("the download has no %s", strings.Join(missing, " and no "))
	}
	// setup-envtest leaves it read-only, and a directory that moves to another
	// parent must be writable.
	if err := os.Chmod(unpacked, 0o755); err != nil {
		return err
	}
	return os.Rename(unpacked, dir)
}

// quiet runs a command and says what it wrote only if it fails.
func quiet(ctx context.Context, dir string, stdout io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	cmd.WaitDelay = 5 * time.Second
	cmd.Stdout = stdout
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%s: %w: %s", filepath.Base(name), err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// removeReadOnly removes a tree in which directories may be read-only, as
// setup-envtest leaves them.
func removeReadOnly(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			return os.Chmod(path, 0o700)
		}
		return nil
	})
	return errors.Join(err, os.RemoveAll(dir))
}
