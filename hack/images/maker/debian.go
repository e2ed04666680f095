// This file makes a tree of Debian's packages, as a machine of its own would have them:
// apt resolves and verifies, dpkg-deb unpacks, and no maintainer script runs.
//
// apt works in a directory of its own in the cache: nothing is installed on this machine,
// its package lists are left alone, and root is not needed.
//
// What must hold: a package that was left out is missed by nobody. Every library that a
// program or library of the tree asks for is in the tree, which is checked here.

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// listsAge is how old the lists of packages may become.
const listsAge = 24 * time.Hour

// debian is apt with its own state.
type debian struct {
	dir string
	log io.Writer
}

// archive is one package as apt found it.
type archive struct {
	// name is the package's, file what apt calls its file.
	name, version, file, sha256 string
}

// leftOut are packages of the closure that only maintainer scripts, people at a shell, or the
// just-in-time compiler of PostgreSQL need. A name ends with * to mean all that begin so.
var leftOut = []string{
	"adduser", "debconf", "debianutils", "dpkg", "init-system-helpers", "libaudit-common", "libdb5.3*", "libgdbm*", "libllvm*",
	"libbz2-1.0", "libc-l10n", "libpam-modules*", "libperl*", "libsasl2-modules*", "libsemanage*", "libsepol*", "locales", "lsb-base", "netbase", "openssl",
	"passwd", "perl*", "postgresql", "postgresql-client-common", "postgresql-common*", "readline-common", "sensible-utils", "ssl-cert",
	"sysvinit-utils", "tar", "ucf", "usrmerge", "usr-is-merged", "libz3-4", "*-perl",
}

// stripped are paths of packages that no server reads: a directory, or all files that match.
var stripped = []string{
	"etc/cron*", "etc/init.d", "etc/logrotate.d", "etc/pam.d", "usr/lib/systemd", "lib/systemd", "usr/share/bash-completion",
	"usr/share/doc-base", "usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man", "usr/share/bug",
	"usr/share/postgresql-common", "usr/share/apport", "var/cache", "var/log",
	"usr/lib/postgresql/*/lib/bitcode", "usr/lib/postgresql/*/lib/llvmjit*", "usr/share/postgresql/*/man",
	"usr/lib/*/gconv", "usr/lib/*/perl*",
}

func matches(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, name)
		return err == nil && ok
	})
}

func isStripped(name string) bool {
	if strings.HasPrefix(name, "usr/share/doc/") && path.Base(name) != "copyright" {
		return true
	}
	for at := name; at != "."; at = path.Dir(at) {
		if matches(at, stripped) {
			return true
		}
	}
	return false
}

// apt runs apt-get with the state of its own.
func (d debian) apt(ctx context.Context, dir string, args ...string) ([]byte, error) {
	settings := []string{
		// Nothing is installed yet, so that all that is needed is in the answer.
		"Dir::State::status=" + filepath.Join(d.dir, "status"),
		"Dir::State::Lists=" + filepath.Join(d.dir, "lists"),
		"Dir::State::extended_states=" + filepath.Join(d.dir, "extended_states"),
		"Dir::Cache=" + d.dir, "Dir::Cache::pkgcache=pkgcache.bin", "Dir::Cache::srcpkgcache=srcpkgcache.bin",
		"APT::Sandbox::User=", "APT::Install-Recommends=false", "Acquire::ForceHash=SHA256", "Acquire::Languages=none",
		"Acquire::Retries=3", "Debug::NoLocking=true",
	}
	var all []string
	for _, s := range settings {
		all = append(all, "-o", s)
	}
	cmd := exec.CommandContext(ctx, "apt-get", append(all, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("apt-get %s: %w\n%s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// lock has one process at a time use the directory.
func (d debian) lock() (unlock func(), err error) {
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(d.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// update fetches the lists of packages where they are not here or too old.
func (d debian) update(ctx context.Context) error {
	for _, program := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("the images of redis and postgres are made of Debian's packages, and %s is not here: "+
				"make them on Debian, or use the projects' own images: %w", program, err)
		}
	}
	for _, dir := range []string{"lists/partial", "archives/partial", "packages"} {
		if err := os.MkdirAll(filepath.Join(d.dir, dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(d.dir, "status"), nil, 0o644); err != nil {
		return err
	}
	done := filepath.Join(d.dir, "updated")
	info, err := os.Stat(done)
	if err == nil && time.Since(info.ModTime()) < listsAge {
		return nil
	}
	say(d.log, "images: fetching the lists of Debian's packages")
	if _, fetch := d.apt(ctx, "", "-qq", "update", "--error-on=any"); fetch != nil {
		if err != nil {
			return fetch
		}
		// The older ones are right, if not the newest.
		say(d.log, "images: using the lists of %s: %v", info.ModTime().Format(time.DateTime), fetch)
		return nil
	}
	return os.WriteFile(done, nil, 0o644)
}

// closure is what has to be there for the named packages to run, in the order of names.
func (d debian) closure(ctx context.Context, names []string) ([]archive, error) {
	out, err := d.apt(ctx, "", append([]string{"-qq", "-y", "--print-uris", "install"}, names...)...)
	if err != nil {
		return nil, err
	}
	return parseURIs(string(out))
}

// parseURIs reads lines such as 'http://…' name_version_arch.deb 123 SHA256:….
func parseURIs(text string) ([]archive, error) {
	var all []archive
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 4 || !strings.HasPrefix(fields[3], "SHA256:") {
			return nil, fmt.Errorf("apt-get says %q, which should be an address, a file, a size and a SHA-256", strings.TrimSpace(line))
		}
		parts := strings.Split(strings.TrimSuffix(fields[1], ".deb"), "_")
		if len(parts) != 3 {
			return nil, fmt.Errorf("apt-get names the file %q, which should be name_version_architecture.deb", fields[1])
		}
		version, err := url.PathUnescape(parts[1])
		if err != nil {
			return nil, fmt.Errorf("the version in %q: %w", fields[1], err)
		}
		if a := (archive{name: parts[0], version: version, file: fields[1], sha256: strings.TrimPrefix(fields[3], "SHA256:")}); !matches(a.name, leftOut) {
			all = append(all, a)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("apt-get finds no packages")
	}
	slices.SortFunc(all, func(a, b archive) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// kept is where a package's file is kept: by its content, so that a newer one is another.
func (d debian) kept(a archive) string { return filepath.Join(d.dir, "packages", a.sha256+".deb") }

// fetch has apt download what is not kept yet; apt verifies it by the archive's signature.
func (d debian) fetch(ctx context.Context, all []archive) error {
	var wanted []string
	var missing []archive
	for _, a := range all {
		if _, err := os.Stat(d.kept(a)); err != nil {
			wanted = append(wanted, a.name+"="+a.version)
			missing = append(missing, a)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	say(d.log, "images: downloading %d of Debian's packages", len(missing))
	dir, err := os.MkdirTemp(d.dir, "download-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err := d.apt(ctx, dir, append([]string{"-qq", "download"}, wanted...)...); err != nil {
		return err
	}
	for _, a := range missing {
		file := filepath.Join(dir, a.file)
		content, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("after apt-get download: %w", err)
		}
		if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != a.sha256 {
			return fmt.Errorf("%s has another SHA-256 than the list of packages says: run it again", a.file)
		}
		if err := os.Rename(file, d.kept(a)); err != nil {
			return err
		}
	}
	return nil
}

// tree unpacks the named packages and all that they need.
func (d debian) tree(ctx context.Context, names ...string) (tree, []part, error) {
	unlock, err := d.lock()
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	if err := d.update(ctx); err != nil {
		return nil, nil, err
	}
	all, err := d.closure(ctx, names)
	if err != nil {
		return nil, nil, err
	}
	if err := d.fetch(ctx, all); err != nil {
		return nil, nil, err
	}
	t := tree{}
	// As Debian has been since 2023; packages still say it in both ways.
	for _, dir := range merged {
		t.link(dir, "usr/"+dir)
		t.dir("usr/"+dir, 0o755)
	}
	var parts []part
	for _, a := range all {
		if err := unpack(ctx, t, d.kept(a)); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", a.file, err)
		}
		parts = append(parts, part{
			name: a.name, version: a.version, supplier: "Debian", sha256: a.sha256,
			purl: "pkg:deb/debian/" + a.name + "@" + url.QueryEscape(a.version) + "?arch=" + architecture(a.file),
		})
		// Where scanners look for what an image without dpkg was made of.
		control, err := control(ctx, d.kept(a))
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", a.file, err)
		}
		t.file("/var/lib/dpkg/status.d/"+a.name, 0o644, control)
	}
	return t, parts, t.complete()
}

var merged = []string{"bin", "lib", "lib64", "sbin"}

func architecture(file string) string {
	file = strings.TrimSuffix(file, ".deb")
	return file[strings.LastIndexByte(file, '_')+1:]
}

// place is where the tree has what a package calls so.
func place(name string) string {
	name = clean(name)
	if first, _, _ := strings.Cut(name, "/"); slices.Contains(merged, first) {
		return "usr/" + name
	}
	return name
}

func control(ctx context.Context, deb string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, "dpkg-deb", "--field", deb).Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb --field: %w", err)
	}
	return append(out, "Status: install ok installed\n"...), nil
}

// unpack adds what is in a package to the tree.
func unpack(ctx context.Context, t tree, deb string) error {
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("dpkg-deb --fsys-tarfile: %w\n%s", err, strings.TrimSpace(stderr.String()))
	}
	for r := tar.NewReader(bytes.NewReader(out)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := place(h.Name)
		if name == "" || isStripped(name) {
			continue
		}
		// Without the rights of another: nobody in these pods becomes another.
		mode := fs.FileMode(h.Mode).Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			if old, ok := t[name]; ok && old.mode&fs.ModeSymlink != 0 {
				continue
			}
			t.dir(name, mode|0o555)
		case tar.TypeReg:
			content, err := io.ReadAll(r)
			if err != nil {
				return fmt.Errorf("%s: %w", h.Name, err)
			}
			t.file(name, mode, content)
		case tar.TypeSymlink:
			t.link(name, h.Linkname)
		case tar.TypeLink:
			same, ok := t[place(h.Linkname)]
			if !ok {
				return fmt.Errorf("%s is a link to %s, which is not there before it", h.Name, h.Linkname)
			}
			t[name] = same
		default:
			return fmt.Errorf("%s: neither a file nor a directory nor a link", h.Name)
		}
	}
}

// complete says which libraries of the tree ask for one that is not there.
func (t tree) complete() error {
	var dirs []string
	for name := range t {
		if matches(name, []string{"usr/lib/*-linux-gnu*", "usr/lib/*-linux-gnu*/libnss_wrapper*"}) && t[name].mode.IsDir() {
			dirs = append(dirs, name)
		}
	}
	dirs = append(dirs, "usr/lib")
	slices.Sort(dirs)
	var missing []string
	for name, f := range t {
		if !f.mode.IsRegular() || !bytes.HasPrefix(f.data, []byte(elf.ELFMAG)) {
			continue
		}
		libraries, interpreter, err := linked(f.data)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for _, l := range libraries {
			if !slices.ContainsFunc(dirs, func(d string) bool { _, ok := t.resolve(d + "/" + l); return ok }) {
				missing = append(missing, name+" asks for "+l)
			}
		}
		if interpreter != "" {
			if _, ok := t.resolve(interpreter); !ok {
				missing = append(missing, name+" asks for "+interpreter)
			}
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return fmt.Errorf("a library is missing in the image; take its package out of the list of those left out:\n%s", strings.Join(missing, "\n"))
	}
	return nil
}

// linked are the libraries and the interpreter that a program or library asks for.
func linked(content []byte) (libraries []string, interpreter string, err error) {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, "", err
	}
	if libraries, err = f.ImportedLibraries(); err != nil {
		return nil, "", err
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			text, err := io.ReadAll(p.Open())
			if err != nil {
				return nil, "", err
			}
			interpreter = strings.TrimRight(string(text), "\x00")
		}
	}
	return libraries, interpreter, nil
}
