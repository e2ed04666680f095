package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParseURIs(t *testing.T) {
	const sum = "SHA256:1896a2aacf4ad681ff5eacc24a5b0ca4d5d9c9b9c9e4b6de5197bc1e116ea619"
	got, err := parseURIs("'http://m/redis-tools_7.0.15-1%7edeb12u10_amd64.deb' redis-tools_5%3a7.0.15-1~deb12u10_amd64.deb 991988 " + sum + "\n" +
		"'http://m/perl_5.36.0-7_amd64.deb' perl_5.36.0-7_amd64.deb 1 " + sum + "\n" +
		"'http://m/libc6_2.36-9_amd64.deb' libc6_2.36-9_amd64.deb 1 " + sum + "\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []archive{
		{name: "libc6", version: "2.36-9", file: "libc6_2.36-9_amd64.deb", sha256: sum[7:]},
		{name: "redis-tools", version: "5:7.0.15-1~deb12u10", file: "redis-tools_5%3a7.0.15-1~deb12u10_amd64.deb", sha256: sum[7:]},
	}
	if !slices.Equal(got, want) {
		t.Errorf("read %+v, which should be %+v", got, want)
	}
	for _, text := range []string{"", "E: no such package", "'http://m/x.deb' x_1_all.deb 1 MD5Sum:00", "'http://m/x.deb' x.deb 1 " + sum} {
		if got, err := parseURIs(text); err == nil {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}

func TestStripped(t *testing.T) {
	for name, want := range map[string]bool{
		"usr/share/doc/redis/copyright":            false,
		"usr/share/doc/redis/changelog.gz":         true,
		"usr/share/man/man1/redis.1.gz":            true,
		"usr/lib/postgresql/15/lib/llvmjit.so":     true,
		"usr/lib/postgresql/15/lib/bitcode/a/b.bc": true,
		"usr/lib/postgresql/15/lib/plpgsql.so":     false,
		"usr/share/zoneinfo/UTC":                   false,
	} {
		if got := isStripped(name); got != want {
			t.Errorf("%s stripped: %v", name, got)
		}
	}
}

// TestIncompleteTree takes a library away that a program of this machine asks for.
func TestIncompleteTree(t *testing.T) {
	content, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	x := tree{}
	x.file("usr/bin/sh", 0o755, content)
	err = x.complete()
	if err == nil || !strings.Contains(err.Error(), "usr/bin/sh asks for libc.so") {
		t.Errorf("a tree without a C library is complete: %v", err)
	}
	libraries, interpreter, err := linked(content)
	if err != nil {
		t.Fatal(err)
	}
	x.dir("usr/lib/x86_64-linux-gnu", 0o755)
	for _, l := range libraries {
		x.file("usr/lib/x86_64-linux-gnu/"+l, 0o755, nil)
	}
	x.file(interpreter, 0o755, nil)
	if err := x.complete(); err != nil {
		t.Errorf("with all that it asks for: %v", err)
	}
}

// TestDebianImages makes one twice: what apt and dpkg-deb say does not depend on the time.
func TestDebianImages(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	d := debian{dir: filepath.Join(cache, "holdfast", "images", "debian"), log: io.Discard}
	var digests []string
	for range 2 {
		i, err := redisImage(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"redis-tools", "util-linux"} {
			if !slices.ContainsFunc(i.parts, func(p part) bool { return p.name == name && p.sha256 != "" && p.version != "" }) {
				t.Errorf("the parts do not have %s", name)
			}
		}
		for _, program := range []string{"/usr/bin/redis-server", "/usr/bin/redis-cli", "/bin/sh", "/bin/grep", "/bin/cat", "/bin/head", "/usr/bin/tr", "/usr/bin/flock"} {
			if f, ok := i.layers[0].resolve(program); !ok || f.mode&0o111 == 0 {
				t.Errorf("%s is not there", program)
			}
		}
		img, err := i.build(stamp{version: "v1", created: epoch})
		if err != nil {
			t.Fatal(err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
	}
	if digests[0] != digests[1] {
		t.Errorf("made twice it is two images: %q", digests)
	}
}
