//go:build linux

// This file runs an image as a pod's container, as far as a test may: in namespaces of its
// own, with the image as its root, which is read-only, with the pod's volumes mounted, as a
// user without rights. It is no kubelet, but what fails here fails there.

package build_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/holdfast-dev/holdfast/internal/workload"
)

// inPod marks the process that becomes the pod.
const inPod = "HOLDFAST_TEST_POD"

func TestMain(m *testing.M) {
	if text := os.Getenv(inPod); text != "" {
		if err := becomePod(text); err != nil {
			fmt.Fprintln(os.Stderr, "pod:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// container is what a process needs to become one.
type container struct {
	Root    string
	Command []string
	Env     []string
	Dir     string
	Mounts  []mount
}

type mount struct {
	From, To string
	ReadOnly bool
}

// request has a command run in the pod, or, without one, the server killed.
type request struct{ Command, Env []string }

// response is how it ended.
type response struct {
	Code   int
	Output string
}

// becomePod makes this process, which is the first in its namespaces, the root of a
// container, starts the server in it, and answers requests until there are no more.
func becomePod(text string) error {
	// The rights to mount are given back on this thread, from which all programs are started.
	runtime.LockOSThread()
	var c container
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	if err := c.mount(); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("give back the rights: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new rights: %w", err)
	}
	command := func(args, env []string) (*exec.Cmd, error) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env, cmd.Dir = slices.Concat(c.Env, env), c.Dir
		for _, e := range c.Env {
			if path, ok := strings.CutPrefix(e, "PATH="); ok {
				if err := os.Setenv("PATH", path); err != nil {
					return nil, err
				}
			}
		}
		var err error
		cmd.Path, err = exec.LookPath(args[0])
		cmd.Err = nil
		return cmd, err
	}
	server, err := command(c.Command, nil)
	if err != nil {
		return err
	}
	server.Stdout, server.Stderr = os.Stderr, os.Stderr
	if err := server.Start(); err != nil {
		return err
	}
	answers := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return err
		}
		if len(r.Command) == 0 {
			// With the first process ends every other one of the namespace.
			return nil
		}
		cmd, err := command(r.Command, r.Env)
		if err != nil {
			return err
		}
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return err
		}
		if err := answers.Encode(response{Code: cmd.ProcessState.ExitCode(), Output: string(out)}); err != nil {
			return err
		}
	}
	return nil
}

// mount makes the container's root this process's.
func (c container) mount() error {
	must := func(what string, err error) error {
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	if err := must("private mounts", unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
		return err
	}
	if err := must("the root", unix.Mount(c.Root, c.Root, "", unix.MS_BIND, "")); err != nil {
		return err
	}
	if err := must("/dev", unix.Mount("/dev", filepath.Join(c.Root, "dev"), "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
		return err
	}
	if err := must("/proc", unix.Mount("proc", filepath.Join(c.Root, "proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")); err != nil {
		return err
	}
	for _, m := range c.Mounts {
		to, err := filepath.EvalSymlinks(filepath.Join(c.Root, m.To))
		if err != nil {
			return err
		}
		if err := must(m.To, unix.Mount(m.From, to, "", unix.MS_BIND, "")); err != nil {
			return err
		}
		if m.ReadOnly {
			if err := must(m.To+" read-only", unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")); err != nil {
				return err
			}
		}
	}
	if err := must("the root read-only", unix.Mount("", c.Root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")); err != nil {
		return err
	}
	if err := must("chroot", unix.Chroot(c.Root)); err != nil {
		return err
	}
	if err := must("chdir", unix.Chdir("/")); err != nil {
		return err
	}
	return loopback()
}

// loopback sets the interface up that every pod has.
func loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("set up the loopback interface: %w", err)
	}
	return nil
}

// pod is a running one.
type pod struct {
	t       *testing.T
	spec    corev1.Container
	stdin   io.WriteCloser
	answers *json.Decoder
	log     *said
	wait    func() error
}

// said is what a pod has said so far.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// volumes are the directories of a pod's volumes, by their names.
type volumes map[string]string

// volumesOf makes them: what was rendered is in those of ConfigMap and Secret.
func volumesOf(t *testing.T, spec corev1.PodSpec, content map[string]string, secret map[string][]byte) volumes {
	t.Helper()
	v := volumes{}
	for _, volume := range append(spec.Volumes, corev1.Volume{Name: workload.VolumeName()}) {
		dir := t.TempDir()
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		v[volume.Name] = dir
		files := map[string][]byte{}
		switch {
		case volume.ConfigMap != nil:
			for name, text := range content {
				files[name] = []byte(text)
			}
		case volume.Secret != nil:
			for _, item := range volume.Secret.Items {
				files[item.Path] = secret[item.Key]
			}
		}
		for name, data := range files {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o444); err != nil {
				t.Fatal(err)
			}
		}
	}
	return v
}

// start runs the image as the container of the pod, as this user.
func start(ctx context.Context, t *testing.T, image unpacked, spec corev1.PodSpec, v volumes, user int) *pod {
	t.Helper()
	if len(spec.Containers) != 1 {
		t.Fatalf("the pod has %d containers, which should be 1", len(spec.Containers))
	}
	c := spec.Containers[0]
	if s := c.SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		t.Fatal("the container's root is not read-only")
	}
	in := container{Root: image.root, Dir: image.Config.WorkingDir, Env: image.Config.Env}
	in.Command = slices.Concat(image.Config.Entrypoint, image.Config.Cmd)
	switch {
	case len(c.Command) > 0:
		in.Command = slices.Concat(c.Command, c.Args)
	case len(c.Args) > 0:
		in.Command = slices.Concat(image.Config.Entrypoint, c.Args)
	}
	if c.WorkingDir != "" {
		in.Dir = c.WorkingDir
	}
	for _, e := range c.Env {
		in.Env = append(in.Env, e.Name+"="+e.Value)
	}
	for _, m := range c.VolumeMounts {
		in.Mounts = append(in.Mounts, mount{From: v[m.Name], To: m.MountPath, ReadOnly: m.ReadOnly})
		// As a container runtime does: what is mounted on is made.
		if err := os.MkdirAll(image.path(m.MountPath), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"dev", "proc"} {
		if err := os.MkdirAll(filepath.Join(image.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), inPod+"="+string(text))
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: user, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: user, HostID: os.Getgid(), Size: 1}},
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_NET_ADMIN},
		Pdeathsig:   syscall.SIGKILL,
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{t: t, spec: c, stdin: stdin, answers: json.NewDecoder(stdout), log: &said{}, wait: cmd.Wait}
	cmd.Stderr = p.log
	if err := cmd.Start(); err != nil {
		t.Fatalf("start a process in namespaces of its own, which the kernel must allow: %v", err)
	}
	t.Cleanup(p.kill)
	return p
}

// successor starts another pod on the volumes of one that runs, as where that one's object is deleted by
// force: it waits.
func successor(ctx context.Context, t *testing.T, image unpacked, spec corev1.PodSpec, v volumes, user int) *pod {
	t.Helper()
	p := start(ctx, t, image, spec, v, user)
	for deadline := time.Now().Add(time.Minute); !strings.Contains(p.log.String(), "another server still has the volume"); {
		if time.Now().After(deadline) {
			p.kill()
			t.Fatalf("a second server on the volume does not say that it waits\n%s", p.log)
		}
		pause(t, 10*time.Millisecond)
	}
	for _, probe := range []*corev1.Probe{p.spec.StartupProbe, p.spec.ReadinessProbe} {
		if r := p.run(nil, probe.Exec.Command...); r.Code == 0 {
			p.kill()
			t.Fatalf("the probe %q of a server that waits succeeds\n%s", probe.Exec.Command, p.log)
		}
	}
	return p
}

// run runs a command in the pod.
func (p *pod) run(env []string, command ...string) response {
	p.t.Helper()
	text, err := json.Marshal(request{Command: command, Env: env})
	if err != nil {
		p.t.Fatal(err)
	}
	_, err = p.stdin.Write(append(text, '\n'))
	var r response
	if err == nil {
		err = p.answers.Decode(&r)
	}
	if err != nil {
		p.kill()
		p.t.Fatalf("run %q in the pod: %v\n%s", command, err, p.log)
	}
	return r
}

// kill ends all of it at once, like a node that loses its power.
func (p *pod) kill() {
	if p.wait == nil {
		return
	}
	_ = p.stdin.Close()
	_ = p.wait()
	p.wait = nil
}

// probe waits until a probe of the pod succeeds.
func (p *pod) probe(what *corev1.Probe) {
	p.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		r := p.run(nil, what.Exec.Command...)
		if r.Code == 0 {
			return
		}
		if time.Now().After(deadline) {
			p.kill()
			p.t.Fatalf("the probe %q fails with %d: %s\n%s", what.Exec.Command, r.Code, r.Output, p.log)
		}
		pause(p.t, 100*time.Millisecond)
	}
}

func pause(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-t.Context().Done():
		t.Fatal(t.Context().Err())
	case <-timer.C:
	}
}

// says runs a command that must succeed, and returns what it printed.
func (p *pod) says(env []string, command ...string) string {
	p.t.Helper()
	r := p.run(env, command...)
	if r.Code != 0 {
		p.kill()
		p.t.Fatalf("%q fails with %d: %s\n%s", command, r.Code, r.Output, p.log)
	}
	return strings.TrimSpace(r.Output)
}

// unpacked is an image's root in a directory, and its configuration.
type unpacked struct {
	root   string
	Config struct {
		User            string
		Entrypoint, Cmd []string
		Env             []string
		WorkingDir      string
		StopSignal      string
		Labels          map[string]string
	} `json:"config"`
}

// path follows symbolic links inside of the image alone.
func (u unpacked) path(name string) string {
	at := u.root
	for _, step := range strings.Split(strings.Trim(name, "/"), "/") {
		next := filepath.Join(at, step)
		if target, err := os.Readlink(next); err == nil {
			if filepath.IsAbs(target) {
				next = filepath.Join(u.root, target)
			} else {
				next = filepath.Join(at, target)
			}
		}
		at = next
	}
	return at
}

// unpack does what a container runtime does with the archive.
func unpack(t *testing.T, archive, reference string) unpacked {
	t.Helper()
	files := map[string][]byte{}
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	each(t, f, func(h *tar.Header, content []byte) { files[h.Name] = content })
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || !slices.Equal(manifest[0].RepoTags, []string{reference}) {
		t.Fatalf("the archive has %+v, which should be the image %s alone", manifest, reference)
	}
	u := unpacked{root: t.TempDir()}
	if err := os.Chmod(u.root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(files[manifest[0].Config], &u); err != nil {
		t.Fatal(err)
	}
	for _, layer := range manifest[0].Layers {
		each(t, bytes.NewReader(files[layer]), func(h *tar.Header, content []byte) {
			name := filepath.Join(u.root, h.Name)
			var err error
			switch h.Typeflag {
			case tar.TypeDir:
				err = os.MkdirAll(name, 0o755)
			case tar.TypeSymlink:
				err = os.Symlink(h.Linkname, name)
			default:
				err = os.WriteFile(name, content, os.FileMode(h.Mode).Perm())
			}
			if err == nil && h.Typeflag != tar.TypeSymlink {
				err = os.Chmod(name, h.FileInfo().Mode()&(os.ModePerm|os.ModeSticky))
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	}
	return u
}

func each(t *testing.T, r io.Reader, visit func(*tar.Header, []byte)) {
	t.Helper()
	for files := tar.NewReader(r); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		visit(h, content)
	}
}
