// Command box is what a node of the development cluster runs in: a process with its own
// mounts, network, processes, host name and cgroups, that starts the node's programs.
//
//	box run SPEC     makes the namespaces and, in them, pid 1; ends when that ends
//	box pause        waits for a signal: the process that keeps a pod's namespaces
//
// Invariants: all that a node does is done below pid 1 of the box, so the kernel ends all
// of it when that one ends, however it ends; and nothing outside of the box is changed but
// the cgroups below the one named in the spec, and the node's own directory.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdfast-dev/holdfast/hack/cluster/box/spec"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "box:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "pause":
		return pause()
	case len(args) == 2 && (args[0] == "run" || args[0] == "init"):
		data, err := os.ReadFile(args[1])
		if err != nil {
			return err
		}
		var s spec.Spec
		if err := json.Unmarshal(data, &s); err != nil {
			return fmt.Errorf("reading %s: %w", args[1], err)
		}
		if args[0] == "run" {
			return outside(s, args[1])
		}
		return inside(s)
	default:
		return errors.New("usage: box run SPEC | box pause")
	}
}

// pause waits, and collects the orphans of a pod whose containers share its processes.
func pause() error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return nil
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return nil
}

// outside joins the box's cgroups, starts pid 1 in new namespaces, writes its pid down and
// waits for its end.
func outside(s spec.Spec, path string) error {
	// The signal of a parent's death goes by the thread that started the child.
	runtime.LockOSThread()
	for _, dir := range s.Cgroups {
		if err := join(dir); err != nil {
			return fmt.Errorf("cgroup %s: %w", dir, err)
		}
	}
	cmd := exec.Command("/proc/self/exe", "init", path)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("making the namespaces, for which one must be root: %w", err)
	}
	if err := spec.Replace(s.PIDFile, []byte(strconv.Itoa(cmd.Process.Pid))); err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	return cmd.Wait()
}

// join makes a cgroup and moves this process into it. A new cpuset has no processors and
// takes no process before it is given some.
func join(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		of, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, file), of, 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0o644)
}

// inside is pid 1: it furnishes the box, waits until the network cable is plugged in, and
// keeps the programs running.
func inside(s spec.Spec) error {
	if err := furnish(s); err != nil {
		return err
	}
	if err := spec.Replace(filepath.Join(spec.Home, "furnished"), nil); err != nil {
		return err
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if _, err := os.Stat(filepath.Join(spec.Home, "plugged")); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return errors.New("nobody plugged in the network within a minute")
		}
		time.Sleep(20 * time.Millisecond)
	}
	return supervise(s.Programs)
}

// furnish makes the box's own view of the machine. What it needs of the node's directory
// is bound below Home first, since the directory may be in what is hidden then.
func furnish(s spec.Spec) error {
	if err := unix.Sethostname([]byte(s.Name)); err != nil {
		return err
	}
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := cgroups(s); err != nil {
		return err
	}
	// /run is made beside the disk and moved to its place at the end.
	run := filepath.Join(s.Dir, "run")
	if err := mount("run", run, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return err
	}
	home := filepath.Join(run, strings.TrimPrefix(spec.Home, "/run/"))
	for _, dir := range []string{"/lock", "/netns"} {
		if err := os.MkdirAll(run+dir, 0o755); err != nil {
			return err
		}
	}
	for name, from := range map[string]string{"etc": filepath.Join(s.Dir, "etc"), "log": filepath.Join(s.Dir, "log"), "disk": filepath.Join(s.Dir, "disk")} {
		if err := bind(from, filepath.Join(home, name), true); err != nil {
			return err
		}
	}
	for _, program := range s.Binaries {
		if err := bind(program, filepath.Join(home, "bin", filepath.Base(program)), false); err != nil {
			return err
		}
	}
	// What a kubelet would set for the whole machine it finds set already, here alone.
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join(home, "sysctl", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := mount(file, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	if err := mount(run, "/run", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	// The node's own disk, with what a new one must have.
	for _, dir := range []string{"lib", "log", "cache", "tmp", "local"} {
		if err := os.MkdirAll(filepath.Join(spec.Home, "disk", dir), 0o755); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"run": "/run", "lock": "/run/lock"} {
		if err := os.Symlink(to, filepath.Join(spec.Home, "disk", name)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	if err := mount(filepath.Join(spec.Home, "disk"), "/var", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := mount("tmp", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	// A kubelet's mounts must reach the containers that ask for it.
	if err := mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

// cgroups shows the hierarchies from the box's own groups down.
func cgroups(s spec.Spec) error {
	const root = "/sys/fs/cgroup"
	if err := mount("cgroup", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	for _, h := range s.Hierarchies {
		dir := filepath.Join(root, strings.TrimPrefix(h, "name="))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		options := h
		if strings.HasPrefix(h, "name=") {
			options = "none," + h
		}
		if err := mount("cgroup", dir, "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
			return err
		}
	}
	return nil
}

func bind(from, to string, dir bool) error {
	if dir {
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
	} else {
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, nil, 0o755); err != nil {
			return err
		}
	}
	return mount(from, to, "", unix.MS_BIND, "")
}

func mount(from, to, kind string, flags uintptr, options string) error {
	if err := unix.Mount(from, to, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s on %s: %w", from, to, err)
	}
	return nil
}

// again is how long after its end a program is started again.
const again = time.Second

// supervise starts the programs, starts those again that end, and collects all orphans,
// as pid 1 must. It returns only on an error.
func supervise(programs []spec.Program) error {
	running := map[int]spec.Program{}
	start := func(p spec.Program) error {
		pid, err := launch(p)
		if err != nil {
			return fmt.Errorf("starting %s: %w", p.Name, err)
		}
		running[pid] = p
		return nil
	}
	for _, p := range programs {
		if err := start(p); err != nil {
			return err
		}
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("no program is left: %w", err)
		}
		p, ours := running[pid]
		if !ours {
			continue
		}
		delete(running, pid)
		fmt.Printf("%s %s ended with %v, starting it again\n", time.Now().Format(time.RFC3339), p.Name, describe(status))
		time.Sleep(again)
		if err := start(p); err != nil {
			return err
		}
	}
}

func describe(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "signal " + s.Signal().String()
	}
	return "status " + strconv.Itoa(s.ExitStatus())
}

// launch starts one program past os/exec, which would wait for it itself.
func launch(p spec.Program) (pid int, err error) {
	log, err := os.OpenFile(filepath.Join(spec.Home, "log", p.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	none, err := os.Open(os.DevNull)
	if err != nil {
		return 0, errors.Join(err, log.Close())
	}
	pid, err = syscall.ForkExec(p.Argv[0], p.Argv, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{"PATH=" + spec.Home + "/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/var/lib"},
		Files: []uintptr{none.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	return pid, errors.Join(err, none.Close(), log.Close())
}
