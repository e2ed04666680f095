// Command maker makes the container images of Holdfast without Docker, and of the stores'
// servers for tests. `go run ./hack/images` runs it; it is a module of its own.
//
// Each image is an archive that container runtimes load, NAME.tar, with its bill of
// materials beside it, NAME.spdx.json. For each it prints a line of JSON.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const rootsModule = "golang.org/x/crypto/x509roots/fallback"

// names are those of all images.
func names() []string {
	var all []string
	for _, p := range programs {
		all = append(all, p.name)
	}
	return append(all, "redis", "postgres")
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "images:", err)
		}
		os.Exit(1)
	}
}

// orders are what is to be made.
type orders struct {
	root, out, cache, version, commit string
	names                             []string
	log                               io.Writer
}

func parse(args []string, log io.Writer) (orders, error) {
	o := orders{log: log}
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.SetOutput(log)
	fs.StringVar(&o.root, "root", "", "the directory of Holdfast's module; set by hack/images")
	from := fs.String("from", "", "the directory that -o is seen from; set by hack/images")
	fs.StringVar(&o.out, "o", "", "the directory to write to")
	fs.StringVar(&o.version, "version", "", "the images' tag, and what the programs call themselves; dev unless -commit is given")
	fs.StringVar(&o.commit, "commit", "", "build the programs of this commit, and not of the files as they are")
	fs.Usage = func() {
		say(log, "usage: go run ./hack/images -o DIR [flags] [%s]\n\nWithout names it makes all of them.", strings.Join(names(), "|"))
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if o.out == "" || o.root == "" {
		return o, errors.New("name the directory to write to with -o")
	}
	if !filepath.IsAbs(o.out) {
		o.out = filepath.Join(*from, o.out)
	}
	if o.names = fs.Args(); len(o.names) == 0 {
		o.names = names()
	}
	for _, n := range o.names {
		if !slices.Contains(names(), n) {
			return o, fmt.Errorf("there is no image %q, only %s", n, strings.Join(names(), ", "))
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return o, fmt.Errorf("no cache directory for what is built, set HOME or XDG_CACHE_HOME: %w", err)
	}
	o.cache = filepath.Join(cache, "holdfast", "images")
	return o, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	return o.make(ctx, func(m made) error {
		return json.NewEncoder(stdout).Encode(m)
	})
}

// make makes the images, one after another, and tells of each.
func (o orders) make(ctx context.Context, tell func(made) error) error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	s := stamp{version: o.version}
	var err error
	if s.created, err = created(os.Getenv("SOURCE_DATE_EPOCH")); err != nil {
		return err
	}
	source, bin := o.root, filepath.Join(o.cache, "bin", tag(o.root))
	if o.commit != "" {
		if source, s.revision, err = checkout(ctx, o.root, o.cache, o.commit); err != nil {
			return err
		}
		bin = filepath.Join(o.cache, "bin", s.revision)
		if s.version == "" {
			s.version = s.revision[:12]
		}
	} else {
		s.revision = revision(ctx, o.root)
	}
	if s.version == "" {
		s.version = "dev"
	}
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for _, name := range o.names {
		start := time.Now()
		i, err := o.image(ctx, name, source, bin, s)
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		m, err := i.write(s, o.out)
		if err != nil {
			return err
		}
		say(o.log, "images: %s, %s", m.Reference, time.Since(start).Round(time.Millisecond))
		if err := tell(m); err != nil {
			return err
		}
	}
	return nil
}

func (o orders) image(ctx context.Context, name, source, bin string, s stamp) (image, error) {
	for _, p := range programs {
		if p.name == name {
			return p.image(ctx, source, bin, s)
		}
	}
	d := debian{dir: filepath.Join(o.cache, "debian"), log: o.log}
	if name == "redis" {
		return redisImage(ctx, d)
	}
	return postgresImage(ctx, d)
}

// say tells how it goes. Whoever listens may be gone: that stops nothing.
func say(log io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(log, format+"\n", args...) }

// created is the time that an image says it was made at: none that differs from build to build.
func created(text string) (time.Time, error) {
	if text == "" {
		return epoch, nil
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH is %q, which should be seconds: %w", text, err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// tag keeps what is built from one directory apart from what is built from another.
func tag(dir string) string { return strings.ReplaceAll(strings.Trim(dir, "/"), "/", "-") }

// rootsVersion is that of the module with the public authorities.
func rootsVersion() (string, error) {
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, m := range info.Deps {
			if m.Path == rootsModule {
				return m.Version, nil
			}
		}
	}
	return "", fmt.Errorf("this program does not know which version of %s it has", rootsModule)
}
