// Package assets finds the programs of a local control plane: etcd,
// kube-apiserver, kubectl and kube-controller-manager, and those that a cluster with
// nodes needs beside them: kube-scheduler, kubelet, kube-proxy and CoreDNS.
//
// It looks in this order: the directory that KUBEBUILDER_ASSETS names; what an
// earlier run has left in the user's cache directory; what setup-envtest can
// download; and last it builds them from their Go modules. The downloads have
// no kube-controller-manager: that one is then built alone.
//
// Invariant: a program in the cache is whole. It gets its name there by a
// rename, after it was written and synced under another one.
package assets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The names of the programs, as their files are called.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	kubectl           = "kubectl"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
	kubelet           = "kubelet"
	kubeProxy         = "kube-proxy"
	coreDNS           = "coredns"
)

// EnvDir names the directory to take the programs from.
const EnvDir = "KUBEBUILDER_ASSETS"

// downloadLimit is how long the download may take, the tool that does it
// included. Where there is no network this is lost before the build begins.
const downloadLimit = 90 * time.Second

// Assets are the programs of a control plane, as absolute paths.
type Assets struct {
	// Dir has at least etcd and kube-apiserver: the value for KUBEBUILDER_ASSETS.
	Dir string

	Etcd              string
	APIServer         string
	Kubectl           string
	ControllerManager string
}

// Nodes are the programs of a cluster with nodes, as absolute paths.
type Nodes struct {
	Assets

	Scheduler string
	Kubelet   string
	KubeProxy string
	CoreDNS   string
}

// Find returns the programs and makes those that are missing. It tells log what
// it does, since a first build takes minutes.
func Find(ctx context.Context, log io.Writer) (*Assets, error) {
	return newFinder(ctx, log).find(ctx)
}

// FindNodes is Find for a cluster with nodes.
func FindNodes(ctx context.Context, log io.Writer) (*Nodes, error) {
	return newFinder(ctx, log).findNodes(ctx)
}

func newFinder(ctx context.Context, log io.Writer) finder {
	return finder{
		env: os.Getenv,
		log: log,
		cache: func() (string, error) {
			dir, err := os.UserCacheDir()
			if err != nil {
				return "", fmt.Errorf("no cache directory for the control plane, set HOME or XDG_CACHE_HOME: %w", err)
			}
			return filepath.Join(dir, "holdfast", "controlplane"), nil
		},
		versions: func() (Versions, error) { return ReadVersions(ctx) },
		download: download,
		build:    build,
	}
}

// finder is the order of the search; what touches the world is in its fields.
type finder struct {
	env      func(string) string
	log      io.Writer
	cache    func() (string, error)
	versions func() (Versions, error)
	// download puts etcd, kube-apiserver and kubectl in dir, or leaves no dir.
	download func(ctx context.Context, log io.Writer, v Versions, dir string) error
	// build puts the named programs in dir; what is there already it leaves alone.
	build func(ctx context.Context, log io.Writer, v Versions, dir string, names ...string) error
}

func (f finder) find(ctx context.Context) (*Assets, error) {
	if dir := f.env(EnvDir); dir != "" {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", EnvDir, err)
		}
		if missing := lacking(dir, etcd, apiServer); len(missing) > 0 {
			return nil, fmt.Errorf("%s is %s, which has no %s: set it to a directory that has them, or unset it",
				EnvDir, dir, strings.Join(missing, " and no "))
		}
		return f.complete(ctx, dir)
	}

	cache, v, err := f.cacheAndVersions()
	if err != nil {
		return nil, err
	}
	built := builtDir(cache, v)
	if len(lacking(built, etcd, apiServer, kubectl)) == 0 {
		return f.complete(ctx, built)
	}
	downloaded := filepath.Join(cache, "envtest-"+v.minor())
	if len(lacking(downloaded, etcd, apiServer, kubectl)) == 0 {
		return f.complete(ctx, downloaded)
	}

	say(f.log, "trying to download Kubernetes %s with setup-envtest, for at most %s", v.minor(), downloadLimit)
	limited, cancel := context.WithTimeout(ctx, downloadLimit)
	err = f.download(limited, f.log, v, downloaded)
	cancel()
	switch {
	case err == nil:
		return f.complete(ctx, downloaded)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	say(f.log, "cannot download it, building it from source instead: %v", err)
	return f.complete(ctx, built)
}

// complete fills in the programs: those of dir first, what dir lacks is built.
func (f finder) complete(ctx context.Context, dir string) (*Assets, error) {
	from := map[string]string{}
	missing := lacking(dir, etcd, apiServer, kubectl, controllerManager)
	if len(missing) > 0 {
		cache, v, err := f.cacheAndVersions()
		if err != nil {
			return nil, err
		}
		built := builtDir(cache, v)
		if unbuilt := lacking(built, missing...); len(unbuilt) > 0 {
			if err := f.build(ctx, f.log, v, built, unbuilt...); err != nil {
				return nil, err
			}
		}
		for _, name := range missing {
			from[name] = built
		}
	}
	path := func(name string) string {
		if d, ok := from[name]; ok {
			return filepath.Join(d, name)
		}
		return filepath.Join(dir, name)
	}
	return &Assets{
		Dir:               dir,
		Etcd:              path(etcd),
		APIServer:         path(apiServer),
		Kubectl:           path(kubectl),
		ControllerManager: path(controllerManager),
	}, nil
}

// findNodes takes the programs of the nodes from the named directory too, and
// builds what it lacks: nobody offers them for download.
func (f finder) findNodes(ctx context.Context) (*Nodes, error) {
	found, err := f.find(ctx)
	if err != nil {
		return nil, err
	}
	path := map[string]string{}
	for _, name := range []string{scheduler, kubelet, kubeProxy, coreDNS} {
		path[name] = filepath.Join(found.Dir, name)
	}
	if missing := lacking(found.Dir, scheduler, kubelet, kubeProxy, coreDNS); len(missing) > 0 {
		cache, v, err := f.cacheAndVersions()
		if err != nil {
			return nil, err
		}
		// CoreDNS, the last one, has versions of its own.
		kubernetes := slices.DeleteFunc(slices.Clone(missing), func(name string) bool { return name == coreDNS })
		for _, from := range []struct {
			dir   string
			names []string
		}{{builtDir(cache, v), kubernetes}, {filepath.Join(cache, coreDNS+"-"+v.CoreDNS), missing[len(kubernetes):]}} {
			if unbuilt := lacking(from.dir, from.names...); len(unbuilt) > 0 {
				if err := f.build(ctx, f.log, v, from.dir, unbuilt...); err != nil {
					return nil, err
				}
			}
			for _, name := range from.names {
				path[name] = filepath.Join(from.dir, name)
			}
		}
	}
	return &Nodes{
		Assets: *found, Scheduler: path[scheduler], Kubelet: path[kubelet], KubeProxy: path[kubeProxy], CoreDNS: path[coreDNS],
	}, nil
}

func (f finder) cacheAndVersions() (string, Versions, error) {
	cache, err := f.cache()
	if err != nil {
		return "", Versions{}, err
	}
	v, err := f.versions()
	return cache, v, err
}

// builtDir is keyed by both versions, so a new one never meets an old build.
func builtDir(cache string, v Versions) string {
	return filepath.Join(cache, v.Kubernetes+"-"+v.Etcd)
}

// lacking returns those of names that are not executable files in dir.
func lacking(dir string, names ...string) []string {
	var missing []string
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
		}
	}
	return missing
}

// Versions are what the build module requires, the one place that states them.
type Versions struct {
	Kubernetes string // v1.36.3
	Etcd       string // v3.6.16
	CoreDNS    string // v1.14.1
}

// minor is the Kubernetes version without its patch and v: 1.36.
func (v Versions) minor() string {
	parts := strings.SplitN(strings.TrimPrefix(v.Kubernetes, "v"), ".", 3)
	if len(parts) < 2 {
		return v.Kubernetes
	}
	return parts[0] + "." + parts[1]
}

// ReadVersions reads them from the go.mod of the build module.
func ReadVersions(ctx context.Context) (Versions, error) {
	dir, err := buildModule(ctx)
	if err != nil {
		return Versions{}, err
	}
	// Only parses the file: `go list -m` would fetch the module graph.
	out, err := goOutput(ctx, dir, "mod", "edit", "-json")
	if err != nil {
		return Versions{}, err
	}
	var mod struct {
		Require []struct{ Path, Version string }
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		return Versions{}, fmt.Errorf("reading %s/go.mod: %w", dir, err)
	}
	var v Versions
	for _, r := range mod.Require {
		switch r.Path {
		case "k8s.io/kubernetes":
			v.Kubernetes = r.Version
		case "go.etcd.io/etcd/server/v3":
			v.Etcd = r.Version
		case "github.com/coredns/coredns":
			v.CoreDNS = r.Version
		}
	}
	if v.Kubernetes == "" || v.Etcd == "" || v.CoreDNS == "" {
		return Versions{}, fmt.Errorf("%s/go.mod must require k8s.io/kubernetes, go.etcd.io/etcd/server/v3 and github.com/coredns/coredns", dir)
	}
	return v, nil
}

// Root is the directory of Holdfast's own module, found from the working
// directory: tests run in their package's directory, commands anywhere.
func Root(ctx context.Context) (string, error) {
	out, err := goOutput(ctx, "", "env", "GOMOD")
	if err != nil {
		return "", err
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return "", errors.New("not inside a clone of Holdfast: run this in its directory")
	}
	return filepath.Dir(mod), nil
}

func buildModule(ctx context.Context) (string, error) {
	root, err := Root(ctx)
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "hack", "controlplane", "build"), nil
}

func goOutput(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return nil, fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(exit.Stderr)))
		}
		return nil, fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

// say writes one line of progress. A reader that is gone must not stop a build.
func say(log io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(log, "controlplane: "+format+"\n", args...)
}
