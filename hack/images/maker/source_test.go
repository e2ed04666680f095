package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckoutIsTheCommit(t *testing.T) {
	ctx, root, cache := t.Context(), t.TempDir(), t.TempDir()
	commit := func(text string) string {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, "main.go"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{
			{"add", "main.go"}, {"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", text},
		} {
			if _, err := git(ctx, root, args...); err != nil {
				t.Fatal(err)
			}
		}
		return revision(ctx, root)
	}
	if _, err := git(ctx, root, "init", "-q"); err != nil {
		t.Fatal(err)
	}
	if got := revision(ctx, root); got != "" {
		t.Errorf("before the first commit the revision is %q", got)
	}
	first := commit("first")
	second := commit("second")
	if len(first) != 40 || first == second {
		t.Fatalf("the revisions are %q and %q", first, second)
	}
	for range 2 { // the second time it is there already
		dir, hash, err := checkout(ctx, root, cache, "HEAD~1")
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(filepath.Join(dir, "main.go")); err != nil || string(text) != "first" || hash != first {
			t.Errorf("commit %s, which should be %s, has %q, %v", hash, first, text, err)
		}
	}
	if text, err := os.ReadFile(filepath.Join(root, "main.go")); err != nil || string(text) != "second" {
		t.Errorf("the tree itself has now %q, %v", text, err)
	}
	if _, _, err := checkout(ctx, root, cache, "no-such-commit"); err == nil {
		t.Error("a commit that is not there is checked out")
	}
	if err := os.WriteFile(filepath.Join(root, "main.go"), []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := revision(ctx, root); !strings.HasSuffix(got, "-dirty") {
		t.Errorf("with a changed file the revision is %q", got)
	}
}

func TestOrders(t *testing.T) {
	var log strings.Builder
	o, err := parse([]string{"-root", "/src", "-from", "/here", "-o", "out", "redis"}, &log)
	if err != nil || o.out != "/here/out" || len(o.names) != 1 || o.names[0] != "redis" {
		t.Errorf("read %+v, %v", o, err)
	}
	if o, err := parse([]string{"-root", "/src", "-o", "/out"}, &log); err != nil || len(o.names) != len(names()) || o.out != "/out" {
		t.Errorf("without names: %+v, %v", o, err)
	}
	for _, args := range [][]string{{"-root", "/src"}, {"-root", "/src", "-o", "/out", "valkey"}, {"-o", "/out", "--tag", "x"}} {
		if o, err := parse(args, &log); err == nil {
			t.Errorf("%q is read as %+v", args, o)
		}
	}
}
