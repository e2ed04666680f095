// Command manager is Holdfast: the controllers and the gateway, in one process. With the
// argument retry-test it tests a tool instead, with version it says which Holdfast it is.
//
// This file is flags and wiring. The order at the end matters: the gateway stops
// accepting and lets its calls settle, and only then are the stores closed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/controller"
	"github.com/holdfast-dev/holdfast/internal/gateway"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/retrytest"
	"github.com/holdfast-dev/holdfast/internal/tracing"
)

// The shortest times that are safe on a machine that is busy.
const (
	minSettlement = 500 * time.Millisecond
	minMargin     = 250 * time.Millisecond
	minGrace      = time.Second
	minDrain      = time.Second
	minStore      = 500 * time.Millisecond
	minCollect    = 10 * time.Second
)

// hangs is how long what does not end by itself is waited for, beyond the drain.
const hangs = 15 * time.Second

// apiPatience is how long the CRDs may take to be served at the start.
const apiPatience = 30 * time.Second

type flags struct {
	controllers, gateway    bool
	leaderElect             bool
	gatewayName             string
	namespace, dataDir      string
	address, cert, key      string
	insecureHTTP, loopback  bool
	metrics, probes         string
	metricsSecure           bool
	settlement              time.Duration
	margin, grace, draining time.Duration
	leaving                 time.Duration
	service, serviceNames   string
	storeTimeout            time.Duration
	collectAfter            time.Duration
	log                     zap.Options
	// evidence is the log without the sampling of bursts.
	evidence logr.Logger
	// traces are as the environment says.
	traces *tracing.Provider
}

func (f *flags) bind(fs *flag.FlagSet) {
	fs.BoolVar(&f.controllers, "controllers", true, "Run the controllers. The embedded store needs controllers and gateway in one process.")
	fs.BoolVar(&f.gateway, "gateway", true, "Run the gateway. The embedded store needs controllers and gateway in one process.")
	fs.BoolVar(&f.leaderElect, "leader-elect", false, "Elect one of several processes with controllers. Needed wherever there can be two of them, also during an update.")
	fs.StringVar(&f.gatewayName, "gateway-name", "", "The name of this gateway, which no other has at the same time; empty: the machine's or pod's.")
	fs.StringVar(&f.namespace, "operator-namespace", "holdfast-system", "The operator's own namespace: what it must remember and the gateways' Leases are there.")
	fs.StringVar(&f.dataDir, "data-dir", "/var/lib/holdfast", "Where the files of embedded stores are. It must outlive the process.")
	fs.StringVar(&f.address, "gateway-bind-address", ":8443", "Where the gateway listens for agents.")
	fs.StringVar(&f.cert, "tls-cert-file", "", "The gateway's certificate. It is read again when it changes.")
	fs.StringVar(&f.key, "tls-key-file", "", "The key of the gateway's certificate.")
	fs.BoolVar(&f.insecureHTTP, "insecure-http", false, "Serve agents over plain HTTP. For development only: tokens and payments can be read on the way.")
	fs.BoolVar(&f.loopback, "allow-loopback-upstreams", false, "Let tools be upstreams on this machine. For development only.")
	fs.StringVar(&f.metrics, "metrics-bind-address", "0", "Where metrics are served; 0: nowhere.")
	fs.BoolVar(&f.metricsSecure, "metrics-secure", true, "Serve metrics over HTTPS, to those whom RBAC allows.")
	fs.StringVar(&f.probes, "health-probe-bind-address", ":8081", "Where /healthz and /readyz are served; 0: nowhere.")
	fs.DurationVar(&f.settlement, "lease-settlement", 2*time.Second, "The time within a lease for writing an attempt's outcome. At least "+minSettlement.String()+".")
	fs.DurationVar(&f.margin, "lease-margin", time.Second, "The time between the end of sending and the end of the lease. At least "+minMargin.String()+".")
	fs.DurationVar(&f.grace, "lease-grace", 2*time.Second, "The time after a lease's end in which nobody judges it. At least "+minGrace.String()+".")
	fs.DurationVar(&f.storeTimeout, "store-timeout", 3*time.Second, "How long a Redis or PostgreSQL may take for one question. At least "+minStore.String()+".")
	fs.DurationVar(&f.draining, "drain-timeout", time.Minute, "How long calls in progress may take to end when the process does. At least "+minDrain.String()+".")
	fs.DurationVar(&f.leaving, "drain-delay", 0, "How long the gateway goes on to serve when the process is told to end, while it says that it is not ready and ends each connection with its answer: until nobody is sent to it any more. Behind a Service: 15s.")
	fs.StringVar(&f.service, "gateway-service", "", "The Service of the gateways. The controllers make a certificate for it, in the Secret "+controller.CertificateName+", and say in the ConfigMap "+controller.AuthorityName+" whom to trust for it, unless that Secret is somebody else's. Empty: they make none.")
	fs.StringVar(&f.serviceNames, "gateway-names", "", "Further names and addresses, separated by commas, by which agents reach the gateways; the certificate is for them too.")
	fs.DurationVar(&f.collectAfter, "collect-after", 7*24*time.Hour, "How long a PaymentHold stays in the cluster once it is resolved or void, and a PaymentIntent once it is settled or refused for good. What they were about stays in the record. At least "+minCollect.String()+".")
	f.log.BindFlags(fs)
}

func (f *flags) check() error {
	if !f.controllers && !f.gateway {
		return errors.New("a process without a role: set --controllers or --gateway, or both")
	}
	if f.leaderElect && !f.controllers {
		return errors.New("--leader-elect is for processes with controllers: every gateway serves")
	}
	for _, d := range []struct {
		name        string
		is, atLeast time.Duration
	}{
		{"lease-settlement", f.settlement, minSettlement},
		{"lease-margin", f.margin, minMargin},
		{"lease-grace", f.grace, minGrace},
		{"drain-timeout", f.draining, minDrain},
		{"store-timeout", f.storeTimeout, minStore},
		{"collect-after", f.collectAfter, minCollect},
	} {
		if d.is < d.atLeast {
			return fmt.Errorf("--%s is %s, which is too short for a machine that is busy: use at least %s", d.name, d.is, d.atLeast)
		}
	}
	switch {
	case f.namespace == "":
		return errors.New("--operator-namespace is empty: name the namespace that the operator runs in")
	case f.dataDir == "":
		return errors.New("--data-dir is empty: name a directory that outlives the process")
	case f.leaving < 0:
		return fmt.Errorf("--drain-delay is %s: it cannot be negative", f.leaving)
	case f.leaving > 0 && !f.gateway:
		return errors.New("--drain-delay is for processes with the gateway: without one nobody comes")
	case f.service != "" && !f.controllers:
		return errors.New("--gateway-service is for processes with the controllers: they make its certificate")
	case f.serviceNames != "" && f.service == "":
		return errors.New("--gateway-names are of a certificate that --gateway-service asks for: name the Service")
	}
	return nil
}

func main() {
	// Nobody can ask this process what it has allocated, and to note a part of it takes a
	// hundredth of what a call costs.
	goruntime.MemProfileRate = 0
	if len(os.Args) > 1 && os.Args[1] == "retry-test" {
		os.Exit(retrytest.Main(ctrl.SetupSignalHandler(), os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	if len(os.Args) > 1 && os.Args[1] == "version" {
		if err := printVersion(os.Stdout); err != nil {
			os.Exit(1)
		}
		return
	}
	var f flags
	f.bind(flag.CommandLine)
	flag.Parse()
	sampled, whole := loggers(f.log)
	ctrl.SetLogger(sampled)
	f.evidence = whole
	ctrl.Log.WithName("setup").Info("starting", "version", version, "controllers", f.controllers, "gateway", f.gateway)
	if err := run(ctrl.SetupSignalHandler(), f); err != nil {
		fmt.Fprintln(os.Stderr, "manager:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, f flags) (err error) {
	if flag.NArg() > 0 {
		return fmt.Errorf("unknown argument %q: all settings are flags, and the only commands are retry-test and version, which come first", flag.Arg(0))
	}
	if err := f.check(); err != nil {
		return err
	}
	dataDir, err := filepath.Abs(f.dataDir)
	if err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	// Only one process with both roles has embedded stores; others may have no disk at all.
	if f.controllers && f.gateway {
		if err := os.MkdirAll(dataDir, 0o700); err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
	}
	cfg, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("find the cluster: give --kubeconfig, or run in a pod: %w", err)
	}
	// Every hold and every unknown token is a request: the API server's own fairness limits them.
	cfg.QPS = -1
	if err := controller.CheckAPI(ctx, cfg, apiPatience); err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	var names []string
	if f.serviceNames != "" {
		names = strings.Split(f.serviceNames, ",")
	}
	metrics := metricsserver.Options{BindAddress: f.metrics, SecureServing: f.metricsSecure}
	if f.metricsSecure {
		metrics.FilterProvider = filters.WithAuthenticationAndAuthorization
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         controller.CacheOptions(f.namespace),
		Metrics:                       metrics,
		HealthProbeBindAddress:        f.probes,
		LeaderElection:                f.leaderElect,
		LeaderElectionID:              "holdfast-controllers",
		LeaderElectionNamespace:       f.namespace,
		LeaderElectionReleaseOnCancel: true,
		// The gateway ends itself after its drain; this is for what hangs.
		GracefulShutdownTimeout: ptr.To(f.draining + hangs),
	})
	if err != nil {
		return fmt.Errorf("make the manager: %w", err)
	}
	live, err := controller.LiveClient(cfg, mgr)
	if err != nil {
		return err
	}
	if f.gatewayName == "" {
		if f.gatewayName, err = os.Hostname(); err != nil {
			return fmt.Errorf("name this gateway with --gateway-name: %w", err)
		}
	}
	reserved, err := apiServer(ctx, cfg)
	if err != nil {
		return err
	}
	addresses := gateway.Addresses{
		AllowLoopback: f.loopback,
		Reserved:      func() []netip.AddrPort { return reserved },
	}
	var op *controller.Operator
	op, err = controller.Setup(mgr, live, controller.Options{
		Namespace: f.namespace, DataDir: dataDir, StoreTimeout: f.storeTimeout, CollectAfter: f.collectAfter,
		Controllers: f.controllers, Gateway: f.gateway, GatewayName: controller.GatewayName(f.gatewayName),
		Dial: func(ctx context.Context, namespace, network, address string) (net.Conn, error) {
			at := addresses
			at.Places = op.Places
			return at.Dial(ctx, namespace, network, address, op.Consent)
		},
		Guard:       guard.Options{Settlement: f.settlement, Margin: f.margin, Grace: f.grace},
		EvidenceLog: f.evidence,
		Service:     f.service, ServiceNames: names,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, op.Close()) }()
	addresses.Places = op.Places
	if err := ctrlmetrics.Registry.Register(op.Metrics); err != nil {
		return fmt.Errorf("set up the metrics: %w", err)
	}

	if err := mgr.AddHealthzCheck("process", healthz.Ping); err != nil {
		return fmt.Errorf("set up the probes: %w", err)
	}
	if f.gateway {
		// It ends after the gateway has drained.
		if f.traces, err = tracing.FromEnv(ctx, ctrl.Log.WithName("traces")); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.traces.Close()) }()
		gw, err := addGateway(mgr, cfg, f, op, addresses)
		if err != nil {
			return err
		}
		ctx = later(ctx, f.leaving, gw.Leave)
	} else if err := mgr.AddReadyzCheck("process", healthz.Ping); err != nil {
		return fmt.Errorf("set up the probes: %w", err)
	}
	return mgr.Start(ctx)
}

// later gives a context that ends some time after this one, and calls begin before that time
// begins. Everything goes on meanwhile: what is still called must know of changes in the cluster.
func later(ctx context.Context, delay time.Duration, begin func()) context.Context {
	if delay == 0 {
		return ctx
	}
	ending, end := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() {
		begin()
		time.AfterFunc(delay, end)
	})
	return ending
}

// addGateway adds what listens for agents.
func addGateway(mgr ctrl.Manager, cfg *rest.Config, f flags, op *controller.Operator, addresses gateway.Addresses) (*gateway.Gateway, error) {
	reviews, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make the client for reviews: %w", err)
	}
	gw, err := gateway.New(gateway.Options{
		Access:      access.New(reviews.AuthenticationV1().TokenReviews(), reviews.AuthorizationV1().SubjectAccessReviews(), nil),
		Policies:    func() gateway.Policies { return op.Served() },
		Engines:     op.Engines,
		Credentials: op.Credentials,
		RequestKeys: op.RequestKeys,
		Consent:     op.Consent,
		Addresses:   addresses,
		Log:         ctrl.Log.WithName("gateway"),
		Evidence:    f.evidence.WithName("gateway"),
		Metrics:     op.Metrics,
		Traces:      f.traces,
		Address:     f.address, CertFile: f.cert, KeyFile: f.key, InsecureHTTP: f.insecureHTTP,
		Drain: f.draining,
	})
	if err != nil {
		return nil, fmt.Errorf("set up the gateway (--tls-cert-file, --tls-key-file, --insecure-http): %w", err)
	}
	if err := errors.Join(mgr.Add(op.WhenProgrammed(gw)), mgr.Add(op.WhenProgrammed(gw.Checker(op.Engines.All)))); err != nil {
		return nil, fmt.Errorf("add the gateway: %w", err)
	}
	if err := errors.Join(
		mgr.AddReadyzCheck("programmed", func(*http.Request) error { return op.Programmed() }),
		mgr.AddReadyzCheck("gateway", gw.Ready),
	); err != nil {
		return nil, fmt.Errorf("set up the probes: %w", err)
	}
	return gw, nil
}

// apiServer gives the addresses at which this process reached the API server at its
// start: no upstream may be there. The cluster's own Service of it is asked at each dial.
func apiServer(ctx context.Context, cfg *rest.Config) ([]netip.AddrPort, error) {
	u, err := url.Parse(cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("the API server's address %q: %w", cfg.Host, err)
	}
	hosts := [][2]string{{u.Hostname(), u.Port()}}
	if u.Port() == "" {
		hosts[0][1] = map[string]string{"http": "80"}[u.Scheme]
		if hosts[0][1] == "" {
			hosts[0][1] = "443"
		}
	}
	if host := os.Getenv("KUBERNETES_SERVICE_HOST"); host != "" {
		hosts = append(hosts, [2]string{host, os.Getenv("KUBERNETES_SERVICE_PORT")})
	}
	var out []netip.AddrPort
	for _, h := range hosts {
		port, err := strconv.ParseUint(h[1], 10, 16)
		if err != nil {
			return nil, fmt.Errorf("the API server's port %q: %w", h[1], err)
		}
		addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", h[0])
		if err != nil {
			return nil, fmt.Errorf("the API server's address: %w", err)
		}
		for _, a := range addrs {
			out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
		}
	}
	return out, nil
}
