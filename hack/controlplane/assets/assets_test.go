// The order of the search, with directories that only look as if they had the
// programs, and what keeps a half-made program out of the cache.
package assets

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var versions = Versions{Kubernetes: "v1.36.3", Etcd: "v3.6.16", CoreDNS: "v1.14.1"}

func put(t *testing.T, dir string, names ...string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOrder(t *testing.T) {
	all := []string{etcd, apiServer, kubectl, controllerManager}
	const built, downloaded, given = "cache/v1.36.3-v3.6.16", "cache/envtest-1.36", "given"

	for name, c := range map[string]struct {
		present    map[string][]string // what is in which directory beforehand
		env        string
		networked  bool
		wantDir    string
		wantKCM    string   // the directory of kube-controller-manager
		wantBuilt  []string // what had to be built
		wantFetch  bool
		wantErrHas string
	}{
		"the named directory comes first": {
			present: map[string][]string{given: all, built: all, downloaded: all},
			env:     given, networked: true,
			wantDir: given, wantKCM: given,
		},
		"what the named directory lacks is built, alone": {
			present: map[string][]string{given: {etcd, apiServer, kubectl}},
			env:     given, networked: true,
			wantDir: given, wantKCM: built, wantBuilt: []string{controllerManager},
		},
		"what the named directory lacks may be in the cache": {
			present: map[string][]string{given: {etcd, apiServer, kubectl}, built: {controllerManager}},
			env:     given,
			wantDir: given, wantKCM: built,
		},
		"a named directory without an API server is an error": {
			present: map[string][]string{given: {etcd}, built: all},
			env:     given, networked: true,
			wantErrHas: "which has no kube-apiserver",
		},
		"what was built before is used without a download": {
			present: map[string][]string{built: all}, networked: true,
			wantDir: built, wantKCM: built,
		},
		"what was downloaded before is used without a download": {
			present: map[string][]string{downloaded: {etcd, apiServer, kubectl}, built: {controllerManager}}, networked: true,
			wantDir: downloaded, wantKCM: built,
		},
		"a download comes before a build": {
			networked: true, wantFetch: true,
			wantDir: downloaded, wantKCM: built, wantBuilt: []string{controllerManager},
		},
		"without a network all is built": {
			wantFetch: true,
			wantDir:   built, wantKCM: built, wantBuilt: all,
		},
		"a build that was broken off goes on": {
			present:   map[string][]string{built: {etcd}},
			wantFetch: true,
			wantDir:   built, wantKCM: built, wantBuilt: []string{apiServer, kubectl, controllerManager},
		},
		"another version's build is not used": {
			present:   map[string][]string{"cache/v1.36.2-v3.6.16": all},
			wantFetch: true,
			wantDir:   built, wantKCM: built, wantBuilt: all,
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for dir, names := range c.present {
				put(t, filepath.Join(root, dir), names...)
			}
			var fetched bool
			var didBuild []string
			f := finder{
				env: func(key string) string {
					if key == EnvDir && c.env != "" {
						return filepath.Join(root, c.env)
					}
					return ""
				},
				log:      io.Discard,
				cache:    func() (string, error) { return filepath.Join(root, "cache"), nil },
				versions: func() (Versions, error) { return versions, nil },
				download: func(_ context.Context, _ io.Writer, _ Versions, dir string) error {
					fetched = true
					if !c.networked {
						return errors.New("no network")
					}
					put(t, dir, etcd, apiServer, kubectl)
					return nil
				},
				build: func(_ context.Context, _ io.Writer, _ Versions, dir string, names ...string) error {
					didBuild = append(didBuild, names...)
					put(t, dir, names...)
					return nil
				},
			}
			got, err := f.find(t.Context())
			if c.wantErrHas != "" {
				if err == nil || !strings.Contains(err.Error(), c.wantErrHas) {
					t.Fatalf("error is %v, want one that has %q", err, c.wantErrHas)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := filepath.Join(root, c.wantDir); got.Dir != want {
				t.Errorf("directory is %s, want %s", got.Dir, want)
			}
			if want := filepath.Join(root, c.wantKCM, controllerManager); got.ControllerManager != want {
				t.Errorf("kube-controller-manager is %s, want %s", got.ControllerManager, want)
			}
			for _, path := range []string{got.Etcd, got.APIServer, got.Kubectl, got.ControllerManager} {
				if missing := lacking(filepath.Dir(path), filepath.Base(path)); missing != nil {
					t.Errorf("%s is not there", path)
				}
			}
			if !slices.Equal(didBuild, c.wantBuilt) {
				t.Errorf("built %v, want %v", didBuild, c.wantBuilt)
			}
			if fetched != c.wantFetch {
				t.Errorf("tried a download: %v, want %v", fetched, c.wantFetch)
			}
		})
	}
}

func TestTheProgramsOfNodesAreTakenOrBuilt(t *testing.T) {
	controlPlane := []string{etcd, apiServer, kubectl, controllerManager}
	const built, dns, given = "cache/v1.36.3-v3.6.16", "cache/coredns-v1.14.1", "given"
	for name, c := range map[string]struct {
		present   map[string][]string
		env       string
		wantDirs  []string // of kube-scheduler, kubelet, kube-proxy and coredns
		wantBuilt []string
	}{
		"what was built before is used": {
			present:  map[string][]string{built: append([]string{scheduler, kubelet, kubeProxy}, controlPlane...), dns: {coreDNS}},
			wantDirs: []string{built, built, built, dns},
		},
		"what the named directory lacks is built": {
			present:  map[string][]string{given: append([]string{kubelet}, controlPlane...)},
			env:      given,
			wantDirs: []string{built, given, built, dns}, wantBuilt: []string{scheduler, kubeProxy, coreDNS},
		},
		"another version of CoreDNS is not used": {
			present:  map[string][]string{built: append([]string{scheduler, kubelet, kubeProxy}, controlPlane...), "cache/coredns-v1.14.0": {coreDNS}},
			wantDirs: []string{built, built, built, dns}, wantBuilt: []string{coreDNS},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for dir, names := range c.present {
				put(t, filepath.Join(root, dir), names...)
			}
			var didBuild []string
			got, err := finder{
				env: func(key string) string {
					if key == EnvDir && c.env != "" {
						return filepath.Join(root, c.env)
					}
					return ""
				},
				log:      io.Discard,
				cache:    func() (string, error) { return filepath.Join(root, "cache"), nil },
				versions: func() (Versions, error) { return versions, nil },
				build: func(_ context.Context, _ io.Writer, _ Versions, dir string, names ...string) error {
					didBuild = append(didBuild, names...)
					put(t, dir, names...)
					return nil
				},
			}.findNodes(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for i, path := range []string{got.Scheduler, got.Kubelet, got.KubeProxy, got.CoreDNS} {
				if want := filepath.Join(root, c.wantDirs[i]); filepath.Dir(path) != want {
					t.Errorf("%s is not in %s", path, want)
				}
			}
			if !slices.Equal(didBuild, c.wantBuilt) {
				t.Errorf("built %v, want %v", didBuild, c.wantBuilt)
			}
		})
	}
}

func TestAFileThatCannotRunIsMissing(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, etcd)
	if err := os.Chmod(filepath.Join(dir, etcd), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, kubectl), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := lacking(dir, etcd, kubectl); !slices.Equal(got, []string{etcd, kubectl}) {
		t.Errorf("lacking is %v, want both", got)
	}
}

func TestABrokenBuildLeavesNoProgram(t *testing.T) {
	dir := t.TempDir()
	half := func(tmp string) error {
		if err := os.WriteFile(tmp, []byte("half"), 0o755); err != nil {
			return err
		}
		if lacking(dir, etcd) == nil {
			t.Error("a half-written file counts as the program")
		}
		return errors.New("out of disk")
	}
	if err := install(dir, etcd, half); err == nil {
		t.Error("the error is lost")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left over: %v, %v", left, err)
	}

	// One that was ended in the middle could not even clean up.
	put(t, dir, "."+etcd+".partial")
	if lacking(dir, etcd) == nil {
		t.Error("a partial file counts as the program")
	}
	whole := func(tmp string) error { return os.WriteFile(tmp, []byte("whole"), 0o755) }
	if err := install(dir, etcd, whole); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, etcd)); err != nil || string(got) != "whole" {
		t.Errorf("program is %q, %v", got, err)
	}
}

func TestVersionsAreReadFromTheBuildModule(t *testing.T) {
	v, err := ReadVersions(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// MutatingAdmissionPolicy v1 is served from this version on.
	if v.minor() < "1.36" || !strings.HasPrefix(v.Kubernetes, "v1.") || !strings.HasPrefix(v.Etcd, "v3.") || !strings.HasPrefix(v.CoreDNS, "v1.") {
		t.Errorf("versions are %+v", v)
	}
	if got := (Versions{Kubernetes: "v1.36.3"}).minor(); got != "1.36" {
		t.Errorf("minor is %q", got)
	}
	flags := ldflags(apiServer, Versions{Kubernetes: "v1.36.3"})
	for _, want := range []string{".gitVersion=v1.36.3", ".gitMajor=1 ", ".gitMinor=36 "} {
		if !strings.Contains(flags, want) {
			t.Errorf("no %q in %s", want, flags)
		}
	}
}
