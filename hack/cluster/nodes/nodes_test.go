//go:build cluster

// The cluster is started for real, used as its users do, and broken; nothing of it may be
// left at the end. It takes root and minutes, so it is built only where that is wanted:
//
//	go test -tags=cluster ./hack/cluster/nodes
package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
)

// peerImage is the image of testdata/peer.
const peerImage = "peer"

func TestCluster(t *testing.T) {
	ctx, before, dir := t.Context(), hostState(t), filepath.Join(t.TempDir(), "cluster")
	start := time.Now()
	c, err := Up(ctx, Options{Dir: dir, Nodes: 2, Log: t.Output()})
	t.Cleanup(func() {
		if err := Down(context.Background(), dir); err != nil {
			t.Error(err)
		}
		nothingIsLeft(t, dir, before)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("two nodes are ready and names are served after %s", since(start))
	client, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Load(ctx, peerArchive(t)); err != nil {
		t.Fatal(err)
	}
	w := &peers{t: t, c: c, client: client}
	w.make("a", "node-1", "")
	w.make("b", "node-2", "")
	w.service()
	w.ready("a")
	w.ready("b")

	t.Run("pods reach each other and their names, on one node and across", func(t *testing.T) {
		for _, asking := range []string{"a", "b"} {
			for _, asked := range []string{"a", "b"} {
				if got, err := w.ask(asking, "http://"+w.ip(asked)+":8080/name"); err != nil || got != asked {
					t.Errorf("%s asked %s by address: %q, %v", asking, asked, got, err)
				}
			}
			served, seen := false, map[string]bool{}
			if err := await(ctx, time.Minute, asking+" to meet both pods behind the Service", func(context.Context) error {
				got, err := w.ask(asking, "http://peer.default.svc:8080/name")
				if err != nil {
					// Not one call may fail once the node knows the Service's pods.
					if served {
						t.Errorf("%s asked by name: %v", asking, err)
					}
					return err
				}
				served = true
				seen[got] = true
				if !seen["a"] || !seen["b"] {
					return fmt.Errorf("met %v", seen)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		}
	})

	t.Run("this machine reaches a NodePort at each node", func(t *testing.T) {
		for _, node := range c.Names() {
			if err := await(ctx, 30*time.Second, "the NodePort at "+node, func(ctx context.Context) error {
				_, err := get(ctx, fmt.Sprintf("http://%s:30080/name", c.Address(node)))
				return err
			}); err != nil {
				t.Error(err)
			}
		}
	})

	t.Run("the API server reaches kubelets, pods and Services", func(t *testing.T) {
		for _, pod := range []string{"a", "b"} {
			text, err := client.CoreV1().Pods("default").GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(ctx)
			if err != nil || !strings.Contains(string(text), pod+" serves") {
				t.Errorf("the log of %s: %q, %v", pod, text, err)
			}
			name, err := client.CoreV1().Pods("default").ProxyGet("http", pod, "8080", "name", nil).DoRaw(ctx)
			if err != nil || string(name) != pod {
				t.Errorf("%s by the API server: %q, %v", pod, name, err)
			}
		}
		name, err := client.CoreV1().Services("default").ProxyGet("http", "peer", "8080", "name", nil).DoRaw(ctx)
		if err != nil || len(name) != 1 {
			t.Errorf("the Service by the API server: %q, %v", name, err)
		}
	})

	t.Run("a command runs in the box", func(t *testing.T) {
		if got, err := c.Exec(ctx, "node-2", "hostname"); err != nil || got != "node-2\n" {
			t.Errorf("hostname says %q, %v", got, err)
		}
		if _, err := c.Exec(ctx, "node-2", "sh", "-c", "echo no >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "exit status 3: no") {
			t.Errorf("the error is %v", err)
		}
		if _, err := c.Exec(ctx, "node-3", "true"); err == nil || !strings.Contains(err.Error(), "there are node-1, node-2") {
			t.Errorf("an unknown node: %v", err)
		}
	})

	reaches := func(asking, asked string) error {
		_, err := w.ask(asking, "http://"+w.ip(asked)+":8080/name")
		return err
	}
	t.Run("a cut between nodes drops what their pods send, and is mended", func(t *testing.T) {
		if err := c.Cut(ctx, "node-1", "node-2"); err != nil {
			t.Fatal(err)
		}
		if err := reaches("a", "b"); err == nil {
			t.Error("a reaches b in spite of the cut")
		}
		if err := reaches("a", "a"); err != nil {
			t.Errorf("the cut is wider than asked for: %v", err)
		}
		if err := c.Mend(ctx, "node-1"); err != nil {
			t.Fatal(err)
		}
		if err := reaches("a", "b"); err != nil {
			t.Errorf("after mending: %v", err)
		}
	})

	t.Run("a cut of a pod drops its packets alone, on its own node too", func(t *testing.T) {
		w.make("c", "node-1", "")
		w.ready("c")
		for _, far := range []string{"b", "c"} {
			if err := c.CutPod(ctx, "default", "a", w.ip(far)); err != nil {
				t.Fatal(err)
			}
			if err := reaches("a", far); err == nil {
				t.Errorf("a reaches %s in spite of the cut", far)
			}
			if err := reaches(far, "a"); err == nil {
				t.Errorf("%s reaches a in spite of the cut", far)
			}
			if far == "b" {
				if err := reaches("c", "b"); err != nil {
					t.Errorf("a pod that was not cut: %v", err)
				}
			}
			if err := c.MendPod(ctx, "default", "a"); err != nil {
				t.Fatal(err)
			}
			if err := reaches("a", far); err != nil {
				t.Errorf("after mending: %v", err)
			}
		}
		// By the Service's address, which kube-proxy replaces.
		if err := c.CutPod(ctx, "default", "a", w.serviceIP()); err != nil {
			t.Fatal(err)
		}
		if got, err := w.ask("a", "http://"+w.serviceIP()+":8080/name"); err == nil {
			t.Errorf("a reaches %s by the Service in spite of the cut", got)
		}
		if err := reaches("a", "b"); err != nil {
			t.Errorf("the cut is wider than asked for: %v", err)
		}
		// By the addresses of those behind it.
		if err := c.CutPod(ctx, "default", "a", w.ip("a"), w.ip("b"), w.ip("c")); err == nil {
			if got, err := w.ask("a", "http://"+w.serviceIP()+":8080/name"); err == nil {
				t.Errorf("a reaches %s by the Service in spite of the cut", got)
			}
		} else {
			t.Error(err)
		}
		if err := c.MendPod(ctx, "default", "a"); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("a cut reaches what is under way, also an answer that comes by a Service", func(t *testing.T) {
		w.make("e", "node-2", "")
		w.ready("e")
		service := w.only("e")
		answered := make(chan error, 1)
		go func() {
			_, err := w.ask("a", "http://"+service+":8080/late")
			answered <- err
		}()
		w.eventually("the request is there", func(ctx context.Context) error {
			got, err := get(ctx, "http://"+w.ip("e")+":8080/waiting")
			return is(got, "1", err)
		})
		if err := c.CutPod(ctx, "default", "a", service); err != nil {
			t.Fatal(err)
		}
		if _, err := get(ctx, "http://"+w.ip("e")+":8080/release"); err != nil {
			t.Fatal(err)
		}
		if err := <-answered; err == nil {
			t.Error("the answer arrives in spite of the cut")
		}
		if err := c.MendPod(ctx, "default", "a"); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("a pod that is cut off from the control plane cannot reach its Service", func(t *testing.T) {
		const api = "http://kubernetes.default.svc:443/"
		if _, err := w.ask("a", api); err != nil {
			t.Errorf("before: %v", err)
		}
		if err := c.CutPod(ctx, "default", "a", ControlPlane); err != nil {
			t.Fatal(err)
		}
		if _, err := w.ask("a", api); err == nil {
			t.Error("it does in spite of the cut")
		}
		if err := c.MendPod(ctx, "default", "a"); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("a node that crashes is lost, and comes back with its disk", func(t *testing.T) {
		w.claim("data")
		w.make("d", "node-2", "data")
		w.ready("d")
		if got, err := w.starts("d"); err != nil || got != "1" {
			t.Fatalf("starts: %q, %v", got, err)
		}
		pid, err := c.world.(*machine).pid("node-2")
		if err != nil {
			t.Fatal(err)
		}
		members := below(pid)
		if len(members) < 6 {
			t.Errorf("the box has only the processes %v", members)
		}
		lost := time.Now()
		if err := c.Crash(ctx, "node-2"); err != nil {
			t.Fatal(err)
		}
		for _, p := range members {
			if syscall.Kill(p, 0) == nil {
				t.Errorf("process %d of the box lives on", p)
			}
		}
		if err := c.Crash(ctx, "node-2"); err == nil {
			t.Error("what is down can be crashed")
		}
		if err := await(ctx, time.Minute, "node-2 to be lost", func(ctx context.Context) error {
			n, err := client.CoreV1().Nodes().Get(ctx, "node-2", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, condition := range n.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
					return nil
				}
			}
			return errors.New("it still counts as ready")
		}); err != nil {
			t.Fatal(err)
		}
		t.Logf("the control plane has lost the node after %s", since(lost))
		boot := time.Now()
		if err := c.Boot(ctx, "node-2"); err != nil {
			t.Fatal(err)
		}
		t.Logf("it is ready again after %s", since(boot))
		w.ready("d")
		if err := await(ctx, time.Minute, "the second start", func(context.Context) error {
			got, err := w.starts("d")
			return is(got, "2", err)
		}); err != nil {
			t.Error(err)
		}
	})

	t.Run("a volume can be wiped while its node is down", func(t *testing.T) {
		if err := c.Crash(ctx, "node-2"); err != nil {
			t.Fatal(err)
		}
		if err := c.Wipe(ctx, "node-2", w.volumePath("data")); err != nil {
			t.Fatal(err)
		}
		if err := c.Wipe(ctx, "node-2", "/var/../etc"); err == nil {
			t.Error("what is not the node's own can be wiped")
		}
		if err := c.Boot(ctx, "node-2"); err != nil {
			t.Fatal(err)
		}
		w.ready("d")
		if err := await(ctx, time.Minute, "a start with nothing on the volume", func(context.Context) error {
			got, err := w.starts("d")
			return is(got, "1", err)
		}); err != nil {
			t.Error(err)
		}
	})

	t.Run("what is up is found and left alone, and another directory's cluster is refused", func(t *testing.T) {
		again, err := Up(ctx, Options{Dir: dir, Nodes: 2, Log: t.Output()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := again.Exec(ctx, "node-1", "true"); err != nil {
			t.Error(err)
		}
		w.ready("a")
		other := filepath.Join(t.TempDir(), "other")
		_, err = Up(ctx, Options{Dir: other, Nodes: 1, Log: t.Output()})
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("the error does not name %s: %v", dir, err)
		}
		if err := Down(ctx, other); err != nil {
			t.Error(err)
		}
		if _, err := again.Exec(ctx, "node-1", "true"); err != nil {
			t.Errorf("the other directory's end reached this cluster: %v", err)
		}
	})

	t.Run("what is left of a cluster that was killed is removed by the next up", func(t *testing.T) {
		m := c.world.(*machine)
		for _, name := range []string{"kube-apiserver", "kube-controller-manager", "node-1"} {
			if err := m.control.Kill(name, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Attach(ctx, dir); err == nil {
			t.Error("a broken cluster can be attached to")
		}
		again, err := Up(ctx, Options{Dir: dir, Nodes: 1, Log: t.Output()})
		if err != nil {
			t.Fatal(err)
		}
		if got := again.Names(); len(got) != 1 {
			t.Errorf("nodes: %v", got)
		}
	})
}

// peers are the pods of the test.
type peers struct {
	t      *testing.T
	c      *Cluster
	client *kubernetes.Clientset
}

func peerArchive(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "peer")
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", program, "./testdata/peer")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	archive := filepath.Join(dir, "peer.tar")
	if err := writeImage(archive, peerImage, program); err != nil {
		t.Fatal(err)
	}
	return archive
}

func (w *peers) make(name, node, claim string) {
	w.t.Helper()
	yes, no, grace := true, false, int64(1)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "peer", "name": name}},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{"kubernetes.io/hostname": node},
			TerminationGracePeriodSeconds: &grace,
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: &yes, FSGroup: new(int64(2000)), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "peer", Image: imageReference(peerImage), ImagePullPolicy: corev1.PullNever,
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
				ReadinessProbe: &corev1.Probe{
					PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/name", Port: intstr.FromInt32(8080)}},
				},
			}},
		},
	}
	if claim != "" {
		pod.Labels = nil // it is none of the Service's
		pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}
		pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	}
	w.eventually("pod "+name+" is made", func(ctx context.Context) error {
		// Its ServiceAccount may not be there yet.
		_, err := w.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
		return err
	})
}

func (w *peers) service() {
	w.t.Helper()
	_, err := w.client.CoreV1().Services("default").Create(w.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "peer"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, Selector: map[string]string{"app": "peer"},
			Ports: []corev1.ServicePort{{Port: 8080, NodePort: 30080}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// only is the address of a Service that leads to one pod.
func (w *peers) only(pod string) string {
	w.t.Helper()
	services := w.client.CoreV1().Services("default")
	if s, err := services.Get(w.t.Context(), pod, metav1.GetOptions{}); err == nil {
		return s.Spec.ClusterIP
	}
	s, err := services.Create(w.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: pod},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"name": pod}, Ports: []corev1.ServicePort{{Port: 8080}}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.eventually("the Service of "+pod+" leads to it", func(context.Context) error {
		_, err := w.ask("a", "http://"+s.Spec.ClusterIP+":8080/name")
		return err
	})
	return s.Spec.ClusterIP
}

func (w *peers) claim(name string) {
	w.t.Helper()
	_, err := w.client.CoreV1().PersistentVolumeClaims("default").Create(w.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// volumePath is where the volume behind a claim is on its node.
func (w *peers) volumePath(claim string) string {
	w.t.Helper()
	pvc, err := w.client.CoreV1().PersistentVolumeClaims("default").Get(w.t.Context(), claim, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	pv, err := w.client.CoreV1().PersistentVolumes().Get(w.t.Context(), pvc.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return pv.Spec.Local.Path
}

func (w *peers) serviceIP() string {
	w.t.Helper()
	s, err := w.client.CoreV1().Services("default").Get(w.t.Context(), "peer", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s.Spec.ClusterIP
}

func (w *peers) ready(name string) {
	w.t.Helper()
	w.eventually("pod "+name+" is ready", func(ctx context.Context) error {
		p, err := w.client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
				_, err := get(ctx, "http://"+p.Status.PodIP+":8080/name")
				return err
			}
		}
		return fmt.Errorf("it is %s: %v", p.Status.Phase, p.Status.ContainerStatuses)
	})
}

func (w *peers) eventually(what string, done func(context.Context) error) {
	w.t.Helper()
	if err := await(w.t.Context(), 2*time.Minute, what, done); err != nil {
		w.t.Fatal(err)
	}
}

func (w *peers) ip(name string) string {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p.Status.PodIP
}

// ask lets a pod ask for a URL.
func (w *peers) ask(asking, what string) (string, error) {
	return get(w.t.Context(), "http://"+w.ip(asking)+":8080/ask?url="+url.QueryEscape(what))
}

func (w *peers) starts(name string) (string, error) {
	return get(w.t.Context(), "http://"+w.ip(name)+":8080/starts")
}

func get(ctx context.Context, what string) (text string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, what, nil)
	if err != nil {
		return "", err
	}
	request.Close = true
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	body, err := io.ReadAll(answer.Body)
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%d: %s", answer.StatusCode, body)
	}
	return string(body), err
}

// is says how an answer differs from what is awaited.
func is(got, want string, err error) error {
	if err == nil && got != want {
		return fmt.Errorf("the answer is %q", got)
	}
	return err
}

// below are a process and all that come from it.
func below(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, f := range files {
			text, _ := os.ReadFile(f)
			for _, field := range strings.Fields(string(text)) {
				var child int
				if _, err := fmt.Sscan(field, &child); err == nil {
					all = append(all, child)
				}
			}
		}
	}
	return all
}

// hostState is what a cluster must leave as it was: the machine's mounts, and the settings
// that a kubelet and a kube-proxy would change.
func hostState(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, path := range []string{
		"/proc/self/mountinfo", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic", "/proc/sys/kernel/panic_on_oops",
		"/proc/sys/kernel/keys/root_maxkeys", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/netfilter/nf_conntrack_max", "/etc/cni/net.d", "/run/containerd",
	} {
		text, err := os.ReadFile(path)
		if err != nil {
			text = []byte("none\n")
		}
		for line := range strings.Lines(string(text)) {
			// Whoever looks at the kernel meanwhile, such as perf, mounts tracefs and debugfs.
			if !strings.Contains(line, " /sys/kernel/") {
				_, _ = fmt.Fprintf(&b, "%s: %s", path, line)
			}
		}
	}
	return b.String()
}

func nothingIsLeft(t *testing.T, dir, before string) {
	t.Helper()
	if after := hostState(t); after != before {
		t.Errorf("the machine is another one:\nbefore\n%s\nafter\n%s", before, after)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there: %v", dir, err)
	}
	devices, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if strings.HasPrefix(d.Name, "holdfast") {
			t.Errorf("the network device %s is still there", d.Name)
		}
	}
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), "holdfast-") {
			t.Errorf("the cgroup %s is still there", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		if text, err := os.ReadFile(path); err == nil && strings.Contains(string(text), dir) {
			t.Errorf("a process is still there: %s", strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	if out, err := exec.Command("ip", "-4", "route", "show", "root", pods.String()).Output(); err != nil || len(out) > 0 {
		t.Errorf("routes are still there: %s, %v", out, err)
	}
}
