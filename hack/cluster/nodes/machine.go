// The nodes as boxes on this machine, without containers: what it takes to start them,
// to end them, and to leave nothing behind.
//
// Invariant: whatever is made outside of the state directory has a name that a later
// command knows, and shows which state directory it belongs to: the cgroups by their names,
// the switch by its alias, and the cables by the switch that they are in.

package nodes

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/hack/cluster/box/spec"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
)

// endLimit is how long a box may take to be gone after it was killed.
const endLimit = 30 * time.Second

// machine makes the nodes on this machine.
type machine struct {
	*Cluster
	control *cluster.Cluster
}

func (m *machine) kubeconfig() string { return m.control.Kubeconfig }

func (m *machine) box(node string) string     { return filepath.Join(m.dir, "nodes", node) }
func (m *machine) pidFile(node string) string { return filepath.Join(m.box(node), "pid") }
func (m *machine) names(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("node-%d", i+1)
	}
	return names
}

func (m *machine) boxProgram() string             { return filepath.Join(m.dir, "bin", "box") }
func (m *machine) images() string                 { return filepath.Join(m.dir, "images") }
func (m *machine) inBox(node, path string) string { return filepath.Join(m.box(node), path) }
func (m *machine) number(node string) int         { return slices.Index(m.state.Nodes, node) + 1 }
func (m *machine) kubectl(ctx context.Context, args ...string) error {
	_, err := m.control.RunKubectl(ctx, args...)
	return err
}

// needed are the programs that are not built here.
func needed() error {
	if runtime.GOOS != "linux" || os.Getuid() != 0 {
		return errors.New("nodes are made of namespaces and cgroups: this needs Linux and root; with Docker and kind, set CLUSTER=kind instead")
	}
	var missing []string
	for _, name := range []string{"containerd", "ctr", "runc", "nft", "ip", "nsenter"} {
		if _, err := exec.LookPath(name); err != nil {
			missing = append(missing, name)
		}
	}
	for _, name := range []string{"ptp", "host-local", "loopback"} {
		if _, err := os.Stat(filepath.Join(cniPlugins, name)); err != nil {
			missing = append(missing, filepath.Join(cniPlugins, name))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("there is no %s: run hack/packages.sh, which installs the packages", strings.Join(missing, " and no "))
	}
	return nil
}

func (m *machine) up(ctx context.Context) (err error) {
	if err := needed(); err != nil {
		return err
	}
	start := time.Now()
	found, err := assets.FindNodes(ctx, m.log)
	if err != nil {
		return err
	}
	m.state.Kubelet, m.state.KubeProxy = found.Kubelet, found.KubeProxy
	if m.state.Cgroups, m.state.Hierarchies, err = hierarchies(); err != nil {
		return err
	}
	if err := m.save(); err != nil {
		return err
	}
	if err := m.prepare(ctx, found.CoreDNS); err != nil {
		return err
	}
	if err := m.plugSwitch(ctx); err != nil {
		return err
	}
	if m.control, err = cluster.Up(ctx, cluster.Options{
		Dir: m.dir, UnsafeNoFsync: true, Log: m.log,
		Nodes: &cluster.Nodes{Address: hostAddress, Services: services, Silence: silence},
	}); err != nil {
		return err
	}
	m.say("the control plane is up, %s", since(start))
	if err := m.each(func(node string) error {
		if err := m.start(ctx, node); err != nil {
			return err
		}
		for _, image := range []string{pauseImage, dnsImage} {
			if err := m.load(ctx, node, filepath.Join(m.images(), image+".tar")); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	m.say("the boxes are up, %s", since(start))
	if err := m.each(func(node string) error { return m.ready(ctx, node, start) }); err != nil {
		return err
	}
	m.say("%d nodes are ready, %s", len(m.state.Nodes), since(start))
	if err := m.furnish(ctx); err != nil {
		return err
	}
	m.say("names are served, %s", since(start))
	return nil
}

// prepare builds what pid 1 of each box is, and the images of the cluster's own pods.
func (m *machine) prepare(ctx context.Context, coreDNS string) error {
	root, err := assets.Root(ctx)
	if err != nil {
		return err
	}
	for _, dir := range []string{filepath.Dir(m.boxProgram()), m.images()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", m.boxProgram(), "./hack/cluster/box")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=", "GOARCH=")
	if _, err := output(build, "building hack/cluster/box"); err != nil {
		return err
	}
	if err := writeImage(filepath.Join(m.images(), pauseImage+".tar"), pauseImage, m.boxProgram(), "pause"); err != nil {
		return err
	}
	return writeImage(filepath.Join(m.images(), dnsImage+".tar"), dnsImage, coreDNS)
}

// start makes a node's box, plugs in its cable and waits until its containerd answers.
func (m *machine) start(ctx context.Context, node string) error {
	if m.control.Running(node) {
		return nil
	}
	if err := m.clean(ctx, node); err != nil {
		return err
	}
	for _, dir := range []string{"etc/cni", "log", "run", "disk"} {
		if err := os.MkdirAll(m.inBox(node, dir), 0o755); err != nil {
			return err
		}
	}
	for i := range volumes {
		// Whoever a pod runs as may write to its volume.
		dir := m.inBox(node, filepath.Join("disk", strings.TrimPrefix(volumePath(i), "/var")))
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o777); err != nil {
			return err
		}
	}
	files, err := m.control.Node(node, nodeAddress(m.number(node)))
	if err != nil {
		return err
	}
	programs, err := m.configure(node, files)
	if err != nil {
		return err
	}
	s := spec.Spec{
		Name: node, Dir: m.box(node), PIDFile: m.pidFile(node),
		Hierarchies: m.state.Hierarchies,
		Binaries:    []string{m.state.Kubelet, m.state.KubeProxy},
		Programs:    programs,
	}
	for _, dir := range m.state.Cgroups {
		s.Cgroups = append(s.Cgroups, filepath.Join(dir, m.cgroup(node)))
	}
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(m.inBox(node, "box.json"), append(data, '\n'), 0o600); err != nil {
		return err
	}
	if err := m.control.StartProcess(node, []string{m.boxProgram(), "run", m.inBox(node, "box.json")}, nil); err != nil {
		return err
	}
	awaitBox := func(what string, done func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, readyLimit)
		defer cancel()
		return m.control.Processes().Await(ctx, node, what, done)
	}
	if err := awaitBox("the box was furnished", func(context.Context) error {
		pid, err := m.pid(node)
		if err != nil {
			return err
		}
		_, err = os.Stat(fmt.Sprintf("/proc/%d/root%s/furnished", pid, spec.Home))
		return err
	}); err != nil {
		return err
	}
	if err := m.plug(ctx, node); err != nil {
		return err
	}
	pid, err := m.pid(node)
	if err != nil {
		return err
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/root%s/plugged", pid, spec.Home), nil, 0o644); err != nil {
		return err
	}
	return awaitBox("its containerd answered", func(ctx context.Context) error {
		_, err := m.Exec(ctx, node, "ctr", "version")
		return err
	})
}

func (m *machine) running(node string) bool {
	_, err := m.pid(node)
	return err == nil
}

// pid is that of the box's pid 1, as this machine sees it.
func (m *machine) pid(node string) (int, error) {
	outer, err := m.control.Processes().PID(node)
	if err != nil {
		return 0, fmt.Errorf("%s is down: %w", node, err)
	}
	text, err := os.ReadFile(m.pidFile(node))
	if err != nil {
		return 0, fmt.Errorf("%s is only starting: %w", node, err)
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		return 0, err
	}
	// The pid may be another process's since: the box's is a child of the one that made it.
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("%s is down: %w", node, err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 2 || fields[1] != strconv.Itoa(outer) {
		return 0, fmt.Errorf("%s is down", node)
	}
	return pid, nil
}

func (m *machine) attach(ctx context.Context) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		if !m.control.Running(name) {
			return fmt.Errorf("the cluster in %s is broken, its %s does not run: start it again with `go run ./hack/cluster up`", m.dir, name)
		}
	}
	if _, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("the API server of the cluster in %s does not answer: %w", m.dir, err)
	}
	return nil
}

func (m *machine) load(ctx context.Context, node, archive string) (err error) {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// The box need not see the file.
	_, err = m.run(ctx, node, false, f, "ctr", "--namespace=k8s.io", "images", "import", "-")
	return err
}

func (m *machine) command(ctx context.Context, node string, network bool, argv ...string) (*exec.Cmd, error) {
	pid, err := m.pid(node)
	if err != nil {
		return nil, err
	}
	enter := []string{"-t", strconv.Itoa(pid), "-n"}
	if !network {
		enter = append(enter, "-m", "-u", "-i", "-p", "-C")
	}
	cmd := exec.CommandContext(ctx, "nsenter", append(append(enter, "--"), argv...)...)
	cmd.Dir = "/"
	return cmd, nil
}

func (m *machine) crash(ctx context.Context, node string) error {
	pid, err := m.pid(node)
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("kill the box of %s: %w", node, err)
	}
	return m.clean(ctx, node)
}

func (m *machine) boot(ctx context.Context, node string) error {
	if m.control.Running(node) {
		return fmt.Errorf("%s is up", node)
	}
	start := time.Now()
	if err := m.start(ctx, node); err != nil {
		return err
	}
	return m.ready(ctx, node, start)
}

func (m *machine) wipe(_ context.Context, node, path string) (err error) {
	// Nothing in the disk can lead out of it.
	disk, err := os.OpenRoot(m.inBox(node, "disk"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	dir := strings.TrimPrefix(path, "/var/")
	f, err := disk.Open(dir)
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, disk.RemoveAll(filepath.Join(dir, name)))
	}
	return errors.Join(errs...)
}

// clean waits until a box that was ended is gone, and removes what the machine had of it.
func (m *machine) clean(ctx context.Context, node string) error {
	// The end of the box's pid 1 ends who started it: otherwise it is ended too.
	if err := await(ctx, endLimit, "the end of "+node, func(context.Context) error {
		if m.control.Running(node) {
			if _, err := m.pid(node); err == nil {
				return errors.New("its processes are still there")
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := m.control.Processes().Stop(ctx, node); err != nil {
		return err
	}
	if err := m.unplug(ctx, node); err != nil {
		return err
	}
	if err := os.Remove(m.pidFile(node)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, dir := range m.state.Cgroups {
		if err := removeCgroup(ctx, filepath.Join(dir, m.cgroup(node))); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) down(ctx context.Context) error {
	var errs []error
	for _, node := range m.state.Nodes {
		if _, err := m.pid(node); err == nil {
			errs = append(errs, m.crash(ctx, node))
		} else {
			// Also one that had only begun to start.
			errs = append(errs, m.control.Processes().Stop(ctx, node), m.clean(ctx, node))
		}
	}
	errs = append(errs, m.control.Down(ctx))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return m.unplugSwitch(ctx)
}

// cgroup is the name of a box's groups. It differs for each state directory, whose nodes
// have the same names.
func (m *machine) cgroup(node string) string {
	return "holdfast-" + sum([]byte(m.dir))[:8] + "-" + node
}

// hierarchies finds where this process is in each mounted cgroup hierarchy, and what each
// is called.
func hierarchies() (dirs, names []string, err error) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, nil, err
	}
	own := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if part := strings.SplitN(strings.TrimSpace(line), ":", 3); len(part) == 3 {
			own[part[1]] = part[2]
		}
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, mounts.Close()) }()
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		before, after, found := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !found || len(left) < 5 || len(right) < 3 || right[0] != "cgroup" {
			continue
		}
		options := strings.Split(right[2], ",")
		for name, path := range own {
			controllers := strings.Split(name, ",")
			if name == "" || slices.ContainsFunc(controllers, func(c string) bool { return !slices.Contains(options, c) }) || slices.Contains(names, name) {
				continue
			}
			// What is mounted may begin below the hierarchy's own root.
			inside, err := filepath.Rel(left[3], path)
			if err != nil || strings.HasPrefix(inside, "..") {
				continue
			}
			dirs, names = append(dirs, filepath.Join(left[4], inside)), append(names, name)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, nil, err
	}
	for _, needs := range []string{"cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids"} {
		if !slices.ContainsFunc(names, func(n string) bool { return slices.Contains(strings.Split(n, ","), needs) }) {
			return nil, nil, fmt.Errorf("the cgroup controller %s is not mounted as version 1 of cgroups, which the boxes are made for: with Docker and kind, set CLUSTER=kind instead", needs)
		}
	}
	return dirs, names, nil
}

// removeCgroup removes a group and all below it. The kernel refuses while a process that
// was killed is not gone from it yet.
func removeCgroup(ctx context.Context, dir string) error {
	return await(ctx, endLimit, "the end of cgroup "+dir, func(context.Context) error {
		var all []string
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && d.IsDir() {
				all = append(all, path)
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, path := range slices.Backward(all) {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	})
}

func since(start time.Time) time.Duration { return time.Since(start).Round(100 * time.Millisecond) }
