package ports

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// others is set in a process that chooses ports and says which, until its input ends.
const others = "HOLDFAST_TEST_PORTS"

func TestMain(m *testing.M) {
	if os.Getenv(others) == "" {
		os.Exit(m.Run())
	}
	got, err := Free(300)
	fmt.Println(got, err)
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// Without the locks, some of 1,500 ports of 12,768 would be chosen twice for certain.
func TestNobodyElseIsGivenThem(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	seen := map[string]bool{}
	add := func(ports string) {
		for _, port := range strings.Fields(strings.Trim(ports, "[]")) {
			if seen[port] {
				t.Errorf("port %s was chosen twice", port)
			}
			seen[port] = true
		}
	}
	for range 2 {
		ports, err := Free(300)
		if err != nil {
			t.Fatal(err)
		}
		add(fmt.Sprint(ports))
	}
	for range 3 {
		other := exec.Command(os.Args[0])
		other.Env = append(os.Environ(), others+"=1")
		in, err := other.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := other.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = in.Close()
			_ = other.Wait()
		})
		said := make([]byte, 1<<16)
		n, err := out.Read(said)
		if err != nil {
			t.Fatal(err)
		}
		ports, ok := strings.CutSuffix(strings.TrimSpace(string(said[:n])), " <nil>")
		if !ok {
			t.Fatalf("the other process: %s", said[:n])
		}
		add(ports)
	}
	if len(seen) != 5*300 {
		t.Errorf("%d ports", len(seen))
	}
}

func TestATakenPortIsNotChosen(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := l.Addr().(*net.TCPAddr).Port
	if _, err := take(dir, port); err == nil {
		t.Errorf("port %d, which somebody listens on, was chosen", port)
	}
}
