// What needs no cluster; the end-to-end tests and the demo run Up for real.
package whole

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
)

func TestDownLeavesAloneWhatUpDidNotMake(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "precious")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(dir, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Down(t.Context(), dir, false, io.Discard); err == nil {
		t.Error("it took somebody else's directory for its own")
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

func TestDownAfterAnUpThatFailed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	dir := filepath.Join(t.TempDir(), "state")
	o := Options{Root: t.TempDir(), Dir: dir, ProviderPort: l.Addr().(*net.TCPAddr).Port}

	_, err = Up(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "PROVIDER_PORT") {
		t.Errorf("the error must name the variable that chooses another port, it is: %v", err)
	}
	if err := Down(t.Context(), dir, false, io.Discard); err != nil {
		t.Errorf("first down: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the state directory is still there: %v", err)
	}
	if err := Down(t.Context(), dir, false, io.Discard); err != nil {
		t.Errorf("second down: %v", err)
	}
}

func TestDownEndsAllThatRunsAndCanKeepTheData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	w := &Whole{o: Options{Log: io.Discard}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.Cluster = cluster.Open(dir)
	if err := w.loadState(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{Provider, Manager, "etcd"} {
		if err := w.StartProcess(name, []string{"sleep", "600"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := w.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := Down(t.Context(), dir, true, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{Provider, Manager, "etcd"} {
		if w.Running(name) {
			t.Errorf("%s runs after down", name)
		}
	}
	before := w.state
	if err := w.loadState(); err != nil || w.state != before {
		t.Errorf("with the data kept the ports are %+v, were %+v (%v)", w.state, before, err)
	}
}

func TestTheEnvironmentReachesAShellUnchanged(t *testing.T) {
	for _, value := range []string{"", "plain-1.2/3:4", "with space", "it's", `$(touch x) "quoted" \n`, "a\nb"} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "export V="+shellWord(value)+`; printf %s "$V"`).Output()
		if err != nil {
			t.Fatal(err)
		}
		if string(out) != value {
			t.Errorf("%q becomes %q", value, out)
		}
	}
	for _, dir := range []string{"/plain/v1.36.3-v3.6.16", "/with space/it's"} {
		line := appendToPath(dir)
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "PATH=/bin\n"+line+line+`exec sh -c 'printf %s "$PATH"'`).Output()
		if err != nil {
			t.Fatal(err)
		}
		if want := "/bin:" + dir; string(out) != want {
			t.Errorf("read twice, the PATH should be %s, it is %s", want, out)
		}
	}
	if got := shellWord("http://127.0.0.1:18443"); strings.Contains(got, "'") {
		t.Errorf("a plain value is quoted: %s", got)
	}
}
