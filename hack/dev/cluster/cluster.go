// Package cluster runs a local control plane in a state directory: etcd,
// kube-apiserver and kube-controller-manager, with real authentication, RBAC,
// ServiceAccount tokens and admission policies. It has no nodes, unless it is told
// where they are: then it is reached from them too, and kube-scheduler runs beside it.
//
// The processes outlive the one that started them. What is needed to find them
// again is in the state directory, which belongs to this package: Up may be
// called on one that is up, half up, down or new, and leaves it up.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/process"
)

// EnvExisting, when "true", says to use the cluster of the current kubeconfig
// instead of starting one.
const EnvExisting = "USE_EXISTING_CLUSTER"

const (
	// startLimit is how long a control plane may take to be ready.
	startLimit = 3 * time.Minute
	// tries is how often other ports are picked when somebody has taken one.
	tries = 3
)

// The names of the processes, in the order of their start.
var controlPlane = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// The network of the Services where there are no nodes that could reach one.
const noServices = "10.0.0.0/24"

// Options say what to start.
type Options struct {
	// Dir is the state directory. It is made if it is not there.
	Dir string
	// UnsafeNoFsync lets etcd answer before its data is on the disk. For tests,
	// whose data nobody wants after a crash of the machine.
	UnsafeNoFsync bool
	// Namespace is where the administrator's kubectl looks unless told otherwise; ""
	// for default. The kubeconfig of an existing cluster is not changed.
	Namespace string
	// Log is told what happens; nil for nobody.
	Log io.Writer
	// Nodes makes it the control plane of a cluster with nodes; nil for none. It must be
	// the same at each start of a state directory.
	Nodes *Nodes
}

// Nodes is what the control plane knows of its nodes before they are there.
type Nodes struct {
	// Address is this machine's, as the nodes reach it. The API server listens on it alone.
	Address netip.Addr
	// Services is the network of the Services.
	Services netip.Prefix
	// Silence is how long a node may say nothing before it is not ready.
	Silence time.Duration
}

// api is the address of the API server.
func (o Options) api() netip.Addr {
	if o.Nodes == nil {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return o.Nodes.Address
}

func (o Options) services() netip.Prefix {
	if o.Nodes == nil {
		return netip.MustParsePrefix(noServices)
	}
	return o.Nodes.Services
}

// Cluster is a running control plane, or an existing one with a state directory
// for the processes that are run beside it.
type Cluster struct {
	// Kubeconfig is the administrator's.
	Kubeconfig string
	// Kubectl is the program.
	Kubectl string

	dir       string
	existing  bool
	processes process.Set
}

// state is what must be the same when a control plane is started again.
type state struct {
	APIServerPort int  `json:"apiServerPort"`
	EtcdPort      int  `json:"etcdPort"`
	EtcdPeerPort  int  `json:"etcdPeerPort"`
	UnsafeNoFsync bool `json:"unsafeNoFsync"`
}

// Up starts the control plane in the state directory, or what of it is not
// running, and waits until it is ready for use.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if o.Log == nil {
		o.Log = io.Discard
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	if o.Dir == "" {
		return nil, errors.New("no state directory")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	c := Open(dir)
	if c.existing && o.Nodes == nil {
		return c, c.useExisting(ctx)
	}
	if c.existing {
		return nil, fmt.Errorf("%s=true: nodes can only be added to a control plane that is started here; unset it", EnvExisting)
	}
	var found *assets.Nodes
	if o.Nodes == nil {
		alone, err := assets.Find(ctx, o.Log)
		if err != nil {
			return nil, err
		}
		found = &assets.Nodes{Assets: *alone}
	} else if found, err = assets.FindNodes(ctx, o.Log); err != nil {
		return nil, err
	}
	c.Kubectl = found.Kubectl
	// The first address of the Service network is the API server's own.
	if err := c.pki().ensure(o.api(), o.services().Masked().Addr().Next()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for try := 1; ; try++ {
		err := c.start(ctx, found, o)
		if err == nil {
			return c, nil
		}
		if try == tries || !c.lostPort() {
			return nil, err
		}
		// Other ports are as good: whoever runs beside it is started again, and the
		// kubeconfigs are written anew.
		if err := errors.Join(c.Down(context.WithoutCancel(ctx)), os.Remove(c.stateFile())); err != nil {
			return nil, err
		}
	}
}

// Open returns the control plane of a state directory without starting anything:
// to end it, or to use one that is known to be up.
func Open(dir string) *Cluster {
	c := &Cluster{
		dir:        dir,
		existing:   os.Getenv(EnvExisting) == "true",
		processes:  process.In(dir),
		Kubeconfig: filepath.Join(dir, "kubeconfig"),
		Kubectl:    "kubectl",
	}
	if c.existing {
		// The one that kubectl would use, as one file: KUBECONFIG may name several.
		c.Kubeconfig = clientcmd.NewDefaultClientConfigLoadingRules().GetDefaultFilename()
	}
	return c
}

// Dir is the state directory.
func (c *Cluster) Dir() string { return c.dir }

// Existing says that the cluster was not started here.
func (c *Cluster) Existing() bool { return c.existing }

// RESTConfig is the administrator's.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("reading kubeconfig: %w", err)
	}
	return config, nil
}

// Client is the administrator's client.
func (c *Cluster) Client() (*kubernetes.Clientset, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// RunKubectl runs kubectl as the administrator and returns what it wrote to
// standard output; what it wrote to standard error is in the error.
func (c *Cluster) RunKubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.Kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// StartProcess starts a program beside the control plane. See process.Set.Start.
func (c *Cluster) StartProcess(name string, argv, env []string) error {
	return c.processes.Start(name, argv, env)
}

// Kill sends a signal to a process that was started here.
func (c *Cluster) Kill(name string, signal syscall.Signal) error {
	return c.processes.Kill(name, signal)
}

// Running says whether a process that was started here is alive.
func (c *Cluster) Running(name string) bool { return c.processes.Running(name) }

// Processes are all that were started here, the control plane's included.
func (c *Cluster) Processes() process.Set { return c.processes }

// Down ends every process that was started here, last what the others need. It
// may be called at any time and again; the data stays.
func (c *Cluster) Down(ctx context.Context) error {
	names, err := c.processes.Names()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if !slices.Contains(controlPlane, name) {
			errs = append(errs, c.processes.Stop(ctx, name))
		}
	}
	for _, name := range slices.Backward(controlPlane) {
		errs = append(errs, c.processes.Stop(ctx, name))
	}
	return errors.Join(errs...)
}

// start starts what is not running and waits.
func (c *Cluster) start(ctx context.Context, found *assets.Nodes, o Options) error {
	s, err := c.loadState(o)
	if err != nil {
		return err
	}
	if err := c.writeKubeconfigs(s, o); err != nil {
		return err
	}
	type program struct {
		name  string
		argv  []string
		ready func(context.Context) error
	}
	programs := []program{
		{"etcd", c.etcdArgs(found, s), func(ctx context.Context) error { return c.etcdReady(ctx, s.EtcdPort) }},
		{"kube-apiserver", c.apiServerArgs(found, s, o), c.apiServerReady},
		{"kube-controller-manager", c.controllerManagerArgs(found, o), c.controllersReady},
	}
	if o.Nodes != nil {
		// It has done nothing before the first node is there, so nothing tells that it is ready.
		programs = append(programs, program{"kube-scheduler", c.schedulerArgs(found), func(context.Context) error { return nil }})
	}
	for _, p := range programs {
		started, err := c.processes.Ensure(p.name, p.argv, seldomCollecting())
		if err != nil {
			return err
		}
		if started {
			_, _ = fmt.Fprintf(o.Log, "cluster: %s started\n", p.name)
		}
		if err := c.processes.Await(ctx, p.name, p.name+" was ready", p.ready); err != nil {
			return err
		}
	}
	return nil
}

// seldomCollecting has a Go program collect its garbage less often than it would: the
// control plane's heap is small here, and it spent a fifth of its time on that.
func seldomCollecting() []string {
	if os.Getenv("GOGC") != "" {
		return nil
	}
	return []string{"GOGC=400"}
}

// loadState returns what is in the state file, or picks free ports and keeps them.
func (c *Cluster) loadState(o Options) (state, error) {
	var s state
	data, err := os.ReadFile(c.stateFile())
	switch {
	case err == nil:
		if err := json.Unmarshal(data, &s); err != nil {
			return s, fmt.Errorf("reading %s: %w", c.stateFile(), err)
		}
		s.UnsafeNoFsync = o.UnsafeNoFsync
	case errors.Is(err, fs.ErrNotExist):
		free, err := ports.Free(3)
		if err != nil {
			return s, err
		}
		s = state{APIServerPort: free[0], EtcdPort: free[1], EtcdPeerPort: free[2], UnsafeNoFsync: o.UnsafeNoFsync}
	default:
		return s, err
	}
	data, err = json.MarshalIndent(s, "", "  ")
	if err != nil {
		return s, err
	}
	return s, replaceFile(c.stateFile(), append(data, '\n'))
}

func (c *Cluster) stateFile() string { return filepath.Join(c.dir, "cluster.json") }
func (c *Cluster) pki() pki          { return pki{dir: filepath.Join(c.dir, "pki")} }

// kubeconfigOf is where the kubeconfig of a component is.
func (c *Cluster) kubeconfigOf(user string) string {
	return filepath.Join(c.dir, "users", user+".kubeconfig")
}

func (c *Cluster) writeKubeconfigs(s state, o Options) error {
	if err := os.MkdirAll(filepath.Join(c.dir, "users"), 0o700); err != nil {
		return err
	}
	ca, err := os.ReadFile(c.pki().cert(authority))
	if err != nil {
		return err
	}
	server := "https://" + netip.AddrPortFrom(o.api(), uint16(s.APIServerPort)).String()
	type kubeconfig struct{ user, path, namespace string }
	kubeconfigs := []kubeconfig{{admin, c.Kubeconfig, o.Namespace}, {manager, c.kubeconfigOf(manager), ""}}
	if o.Nodes != nil {
		kubeconfigs = append(kubeconfigs, kubeconfig{scheduler, c.kubeconfigOf(scheduler), ""}, kubeconfig{proxy, c.kubeconfigOf(proxy), ""})
	}
	for _, k := range kubeconfigs {
		user, err := c.pki().certificateUser(k.user)
		if err != nil {
			return err
		}
		if err := writeKubeconfig(k.path, server, k.namespace, ca, user); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) etcdArgs(found *assets.Nodes, s state) []string {
	p := c.pki()
	client := "https://127.0.0.1:" + strconv.Itoa(s.EtcdPort)
	peer := "https://127.0.0.1:" + strconv.Itoa(s.EtcdPeerPort)
	args := []string{
		found.Etcd,
		"--name=holdfast-dev",
		"--data-dir=" + filepath.Join(c.dir, "etcd"),
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=holdfast-dev=" + peer,
		"--cert-file=" + p.cert(etcdServing), "--key-file=" + p.key(etcdServing),
		"--client-cert-auth", "--trusted-ca-file=" + p.cert(authority),
		"--peer-cert-file=" + p.cert(etcdServing), "--peer-key-file=" + p.key(etcdServing),
		"--peer-client-cert-auth", "--peer-trusted-ca-file=" + p.cert(authority),
		// The only member elects itself after this time.
		"--heartbeat-interval=50", "--election-timeout=500",
		"--log-level=warn",
	}
	if s.UnsafeNoFsync {
		args = append(args, "--unsafe-no-fsync")
	}
	return args
}

func (c *Cluster) apiServerArgs(found *assets.Nodes, s state, o Options) []string {
	p := c.pki()
	args := []string{
		found.APIServer,
		"--etcd-servers=https://127.0.0.1:" + strconv.Itoa(s.EtcdPort),
		"--etcd-cafile=" + p.cert(authority),
		"--etcd-certfile=" + p.cert(etcdClient), "--etcd-keyfile=" + p.key(etcdClient),
		"--bind-address=" + o.api().String(), "--advertise-address=" + o.api().String(),
		"--secure-port=" + strconv.Itoa(s.APIServerPort),
		"--tls-cert-file=" + p.cert(serving), "--tls-private-key-file=" + p.key(serving),
		"--client-ca-file=" + p.cert(authority),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + p.cert(serviceAccount),
		"--service-account-signing-key-file=" + p.key(serviceAccount),
		"--service-cluster-ip-range=" + o.services().String(),
	}
	if o.Nodes == nil {
		return append(args,
			"--authorization-mode=RBAC",
			// A loopback address is not a valid endpoint, and there are no nodes to use it.
			"--endpoint-reconciler-type=none",
		)
	}
	return append(args,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--kubelet-client-certificate="+p.cert(kubeletClient), "--kubelet-client-key="+p.key(kubeletClient),
		"--kubelet-certificate-authority="+p.cert(authority),
		"--kubelet-preferred-address-types=InternalIP",
		"--allow-privileged",
		// This machine has no kube-proxy: what is behind a Service is asked itself.
		"--enable-aggregator-routing",
	)
}

func (c *Cluster) controllerManagerArgs(found *assets.Nodes, o Options) []string {
	p := c.pki()
	args := []string{
		found.ControllerManager,
		"--kubeconfig=" + c.kubeconfigOf(manager),
		"--service-account-private-key-file=" + p.key(serviceAccount),
		"--root-ca-file=" + p.cert(authority),
		"--use-service-account-credentials",
		"--leader-elect=false",
		"--secure-port=0",
	}
	if o.Nodes != nil {
		return append(args,
			"--node-monitor-period=2s",
			"--node-monitor-grace-period="+o.Nodes.Silence.String(),
		)
	}
	return append(args,
		// What a cluster without nodes has a use for.
		"--controllers="+strings.Join([]string{
			"clusterrole-aggregation-controller",
			"garbage-collector-controller",
			"namespace-controller",
			"root-ca-certificate-publisher-controller",
			"serviceaccount-controller",
			"serviceaccount-token-controller",
			"validatingadmissionpolicy-status-controller",
		}, ","),
	)
}

func (c *Cluster) schedulerArgs(found *assets.Nodes) []string {
	return []string{
		found.Scheduler,
		"--kubeconfig=" + c.kubeconfigOf(scheduler),
		"--leader-elect=false",
		"--secure-port=0",
	}
}

// etcdReady asks with the client certificate: that somebody listens on the port
// does not mean that it is etcd.
func (c *Cluster) etcdReady(ctx context.Context, port int) error {
	p := c.pki()
	client, err := rest.HTTPClientFor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{
		CAFile: p.cert(authority), CertFile: p.cert(etcdClient), KeyFile: p.key(etcdClient),
	}})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://127.0.0.1:"+strconv.Itoa(port)+"/health", nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("/health answers %d", answer.StatusCode)
	}
	return errors.Join(err, answer.Body.Close())
}

func (c *Cluster) apiServerReady(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	var status int
	if err := client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).StatusCode(&status).Error(); err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("/readyz answers %d", status)
	}
	return nil
}

// controllersReady asks for their work: the controller manager serves no health.
func (c *Cluster) controllersReady(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	if _, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err
	}
	role, err := client.RbacV1().ClusterRoles().Get(ctx, "view", metav1.GetOptions{})
	if err != nil {
		return err
	}
	if len(role.Rules) == 0 {
		return errors.New("ClusterRole view is not aggregated yet")
	}
	return nil
}

// useExisting makes sure that the current kubeconfig leads to a cluster.
func (c *Cluster) useExisting(ctx context.Context) error {
	path, err := exec.LookPath("kubectl")
	if err != nil {
		return fmt.Errorf("%s=true needs kubectl in PATH: %w", EnvExisting, err)
	}
	c.Kubectl = path
	client, err := c.Client()
	if err != nil {
		return err
	}
	if _, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{}); err != nil && !apierrors.IsForbidden(err) {
		return fmt.Errorf("%s=true, but the cluster of %s does not answer: %w", EnvExisting, c.Kubeconfig, err)
	}
	return nil
}

// lostPort says that a process of the control plane ended because somebody else
// has its port.
func (c *Cluster) lostPort() bool {
	for _, name := range controlPlane {
		if !c.Running(name) && strings.Contains(c.processes.Tail(name, 50), "address already in use") {
			return true
		}
	}
	return false
}
