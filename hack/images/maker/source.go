// This file is what the programs are built from: the tree as it lies there, or a commit.

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func git(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{"-C", dir}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// revision names the commit of the tree at root; "" where there is none to name.
func revision(ctx context.Context, root string) string {
	head, err := git(ctx, root, "rev-parse", "HEAD")
	if err != nil {
		return ""
	}
	if changed, err := git(ctx, root, "status", "--porcelain"); err != nil || changed != "" {
		return head + "-dirty"
	}
	return head
}

// checkout puts the files of a commit in a directory of the cache, which git does not take
// for a worktree, and returns the directory and the commit's whole name.
func checkout(ctx context.Context, root, cache, commit string) (dir, hash string, err error) {
	hash, err = git(ctx, root, "rev-parse", "--verify", "--end-of-options", commit+"^{commit}")
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(cache, "commits", hash)
	if _, err := os.Stat(dir); err == nil {
		return dir, hash, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", "", err
	}
	partial, err := os.MkdirTemp(filepath.Dir(dir), ".partial-")
	if err != nil {
		return "", "", err
	}
	defer func() { _ = os.RemoveAll(partial) }()
	packed := filepath.Join(partial, "tree.tar")
	if _, err := git(ctx, root, "archive", "--format=tar", "--output="+packed, hash); err != nil {
		return "", "", err
	}
	files := filepath.Join(partial, "tree")
	if err := os.Mkdir(files, 0o755); err != nil {
		return "", "", err
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xf", packed, "-C", files).CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("unpack commit %s: %w: %s", hash, err, bytes.TrimSpace(out))
	}
	return dir, hash, os.Rename(files, dir)
}
