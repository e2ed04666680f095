// The parts that need no cluster: what is said to nft, to kind and Docker, and what an
// image is. The whole is in nodes_test.go.
package nodes

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

func TestRulesDropBothDirectionsAtEachPlace(t *testing.T) {
	whole := rules("holdfast-cut", "", []string{"10.244.2.0/24", "192.168.77.12/32"})
	for _, hook := range []string{"prerouting", "input", "forward", "output", "postrouting"} {
		_, chain, found := strings.Cut(whole, "hook "+hook+" ")
		if !found {
			t.Fatalf("no rules at %s:\n%s", hook, whole)
		}
		chain, _, _ = strings.Cut(chain, "}")
		for _, want := range []string{"; ip daddr @peers drop;", "; ip saddr @peers drop;"} {
			if !strings.Contains(chain, want) {
				t.Errorf("%s: no %q in %q", hook, want, chain)
			}
		}
	}
	one := rules("holdfast-cut-default/a", "10.244.1.5", []string{"10.96.0.10/32"})
	for line := range strings.Lines(one) {
		for rule := range strings.SplitSeq(line, ";") {
			if strings.Contains(rule, "drop") && !strings.Contains(rule, "10.244.1.5") {
				t.Errorf("a rule for one pod meets others: %s", rule)
			}
		}
	}
}

func TestAddressesToCut(t *testing.T) {
	got, err := parseNetworks([]string{"10.96.0.10", "10.244.2.7/24"})
	if err != nil || fmt.Sprint(got) != "[10.96.0.10/32 10.244.2.0/24]" {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseNetworks([]string{"node-9"}); err == nil || !strings.Contains(err.Error(), `"node-9" is neither`) {
		t.Errorf("an unknown name: %v", err)
	}
	c := &Cluster{state: state{Nodes: []string{"node-1", "node-2"}}}
	c.choose()
	for what, try := range map[string]func() error{
		"say which addresses":           func() error { return c.Cut(t.Context(), "node-1") },
		"cut off from itself":           func() error { return c.Cut(t.Context(), "node-1", "node-1") },
		"there is no node \"node-3\"":   func() error { return c.Cut(t.Context(), "node-3", "node-1") },
		"the cluster's network is IPv4": func() error { return c.Cut(t.Context(), "node-1", "fd00::1") },
	} {
		if err := try(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("want an error with %q, got %v", what, err)
		}
	}
}

func TestImageIsADockerArchive(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("the program"), 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "image.tar")
	if err := writeImage(path, "x", program, "serve"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	files := unpack(t, data)
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil || len(manifest) != 1 {
		t.Fatalf("%v, %v", manifest, err)
	}
	m := manifest[0]
	if m.Config != sum(files[m.Config])+".json" || !slices.Equal(m.RepoTags, []string{imageReference("x")}) {
		t.Errorf("manifest is %+v", m)
	}
	var config struct {
		Config struct {
			Entrypoint []string
			User       string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(files[m.Config], &config); err != nil {
		t.Fatal(err)
	}
	layer := files[m.Layers[0]]
	if !slices.Equal(config.RootFS.DiffIDs, []string{"sha256:" + sum(layer)}) {
		t.Errorf("the layer is not the one that is named: %v", config.RootFS.DiffIDs)
	}
	if !slices.Equal(config.Config.Entrypoint, []string{"/program", "serve"}) || config.Config.User != "65532:65532" {
		t.Errorf("config is %+v", config.Config)
	}
	if got := unpack(t, layer)["program"]; string(got) != "the program" {
		t.Errorf("program is %q", got)
	}
}

func unpack(t *testing.T, data []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// What kind and Docker are told, by programs that only write it down, and an API server
// that only knows its nodes.
func TestKind(t *testing.T) {
	dir := t.TempDir()
	told := filepath.Join(dir, "told")
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"apiVersion":"v1","kind":"Node","metadata":{"name":%q},"spec":{"podCIDR":"10.244.7.0/24"},
			"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":%q}]}}`,
			filepath.Base(r.URL.Path), time.Now().Add(time.Minute).UTC().Format(time.RFC3339))
	}))
	defer api.Close()
	config := clientcmdapi.NewConfig()
	config.Clusters["k"] = &clientcmdapi.Cluster{Server: api.URL}
	config.Contexts["k"] = &clientcmdapi.Context{Cluster: "k"}
	config.CurrentContext = "k"
	kubeconfig := filepath.Join(dir, "made-by-kind")
	if err := clientcmd.WriteToFile(*config, kubeconfig); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{
		"kind":    `case $1 in create) cat >>"$TOLD"; for a; do case $a in --kubeconfig=*) cp "$KUBECONFIG_OF_KIND" "${a#*=}";; esac; done;; esac`,
		"docker":  `case "$*" in *IPAddress*) echo 172.18.0.3;; *State.Running*) echo true;; "exec --interactive holdfast-worker nft"*) cat >>"$TOLD";; esac`,
		"kubectl": ``,
	} {
		text := "#!/bin/sh\necho \"" + name + " $*\" >>\"$TOLD\"\n" + script + "\n"
		if err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("TOLD", told)
	t.Setenv("KUBECONFIG_OF_KIND", kubeconfig)
	t.Setenv(EnvKind, "kind")
	since := func() string {
		t.Helper()
		text, err := os.ReadFile(told)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(told, 0); err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	heard := func(what string, want ...string) {
		t.Helper()
		got := since()
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: nobody was told %q:\n%s", what, w, got)
			}
		}
	}

	state := filepath.Join(dir, "state")
	c, err := Up(t.Context(), Options{Dir: state, Nodes: 2, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	heard("up", "kind create cluster --name=holdfast --config=- --kubeconfig="+c.Kubeconfig(),
		"- role: control-plane\n- role: worker\n- role: worker\n", "docker exec --interactive holdfast-worker2 mkdir", "kubectl --kubeconfig="+c.Kubeconfig()+" apply -f")
	if got := c.Names(); !slices.Equal(got, []string{"holdfast-worker", "holdfast-worker2"}) {
		t.Errorf("names are %v", got)
	}
	if got := c.Address("holdfast-worker"); got != "172.18.0.3" {
		t.Errorf("address is %q", got)
	}
	since()
	for _, step := range []struct {
		what string
		do   func() error
		want []string
	}{
		{"load", func() error { return c.Load(t.Context(), "/x.tar") },
			[]string{"kind load image-archive --name=holdfast --nodes=holdfast-worker /x.tar", "--nodes=holdfast-worker2 /x.tar"}},
		{"crash", func() error { return c.Crash(t.Context(), "holdfast-worker2") }, []string{"docker kill --signal=KILL holdfast-worker2"}},
		{"boot", func() error { return c.Boot(t.Context(), "holdfast-worker2") }, []string{"docker start holdfast-worker2"}},
		{"cut", func() error { return c.Cut(t.Context(), "holdfast-worker", "holdfast-worker2") },
			[]string{"docker exec --interactive holdfast-worker nft -f -", "172.18.0.3/32, 10.244.7.0/24"}},
		{"mend", func() error { return c.Mend(t.Context(), "holdfast-worker") }, []string{"delete table ip holdfast-cut"}},
		{"wipe", func() error { return c.Wipe(t.Context(), "holdfast-worker", volumePath(0)) }, []string{"find /var/local/volumes/1 -mindepth 1 -delete"}},
		{"down", func() error { return c.Down(t.Context()) }, []string{"kind delete cluster --name=holdfast"}},
	} {
		if err := step.do(); err != nil {
			t.Errorf("%s: %v", step.what, err)
		}
		heard(step.what, step.want...)
	}
	if _, err := os.Stat(state); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the state directory is still there: %v", err)
	}
}
