// Package whole runs all of Holdfast on this machine: the control plane, the
// manager with both roles under its own ServiceAccount and RBAC, the test
// provider, and the samples. It is what `make up` leaves running. On request a second
// gateway runs beside the manager, as several do in production on one shared store.
//
// Up is level-triggered: it brings what it finds, new, half up, old or dead, to
// the wanted state and waits until a call of a sample tool would work.
package whole

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/hack/dev/cluster"
	"github.com/holdfast-dev/holdfast/hack/dev/filelock"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
)

// The names of the processes beside the control plane.
const (
	Manager  = "manager"
	Provider = "provider"
	// Gateway is the second gateway, which runs without the controllers.
	Gateway = "gateway"
)

const (
	// SamplesProviderPort is the provider's port that the samples name.
	SamplesProviderPort = 18080
	// DefaultGatewayPort is where the gateway listens unless told otherwise.
	DefaultGatewayPort = 18443

	operatorNamespace = "holdfast-system"
	operatorAccount   = "holdfast-manager"
	gatewayAccount    = "holdfast-gateway"
	agentNamespace    = "support"
	agentAccount      = "agent"
	audience          = "holdfast"

	// The agent's token is pasted into shells; the manager's must last as long as
	// somebody may leave all this running. Every up renews both.
	agentTokenFor   = 24 * time.Hour
	managerTokenFor = 30 * 24 * time.Hour

	// stepLimit is how long each thing may take to become ready.
	stepLimit = 2 * time.Minute
	pollEvery = 200 * time.Millisecond
)

// Options say what to run and where.
type Options struct {
	// Root is the clone of Holdfast.
	Root string
	// Dir is the state directory.
	Dir string
	// GatewayPort and ProviderPort are on the loopback address; 0 for the defaults.
	// With another ProviderPort the samples are applied with that one.
	GatewayPort, ProviderPort int
	// UnsafeNoFsync is for tests: see cluster.Options.
	UnsafeNoFsync bool
	// SecondGateway runs a gateway without the controllers beside the manager, as a
	// process and a ServiceAccount of its own. It serves no embedded store.
	SecondGateway bool
	// Store is where the records of the samples are: Redis or Postgres, on a server that
	// runs beside the rest; "": in the manager's own file.
	Store string
	// ProviderArgs and ManagerArgs are further arguments; a second gateway has the manager's.
	ProviderArgs, ManagerArgs []string
	// Log is told what happens; nil for nobody.
	Log io.Writer
}

// Whole is all of it, running.
type Whole struct {
	*cluster.Cluster

	o     Options
	state state
}

// state is what must be the same when a process is started again.
type state struct {
	HealthPort  int `json:"healthPort"`
	MetricsPort int `json:"metricsPort"`
	// Second is of the second gateway; nil: there has been none.
	Second *endpoints `json:"secondGateway,omitempty"`
	// Server is the store's; nil: there has been none.
	Server *server `json:"server,omitempty"`
}

// endpoints are where a second gateway listens.
type endpoints struct {
	Gateway int `json:"gateway"`
	Health  int `json:"health"`
	Metrics int `json:"metrics"`
}

// GatewayURL is where tools are called.
func (w *Whole) GatewayURL() string { return "http://127.0.0.1:" + strconv.Itoa(w.o.GatewayPort) }

// SecondGatewayURL is where the second gateway serves the same tools; "" if there is none.
func (w *Whole) SecondGatewayURL() string {
	if !w.o.SecondGateway {
		return ""
	}
	return "http://127.0.0.1:" + strconv.Itoa(w.state.Second.Gateway)
}

// ProviderURL is the test provider; its GET /ledger counts the money.
func (w *Whole) ProviderURL() string { return "http://127.0.0.1:" + strconv.Itoa(w.o.ProviderPort) }

// MetricsURL is where the manager serves its metrics.
func (w *Whole) MetricsURL() string {
	return "http://127.0.0.1:" + strconv.Itoa(w.state.MetricsPort) + "/metrics"
}

// SecondMetricsURL is where the second gateway serves its metrics; "" if there is none.
func (w *Whole) SecondMetricsURL() string {
	if !w.o.SecondGateway {
		return ""
	}
	return "http://127.0.0.1:" + strconv.Itoa(w.state.Second.Metrics) + "/metrics"
}

// AgentToken is a token of the samples' agent, of the audience of Holdfast.
func (w *Whole) AgentToken(ctx context.Context) (string, error) {
	return w.Token(ctx, agentNamespace, agentAccount, agentTokenFor, audience)
}

// Up brings all of it up and waits.
func Up(ctx context.Context, o Options) (*Whole, error) {
	if o.Log == nil {
		o.Log = io.Discard
	}
	if o.GatewayPort == 0 {
		o.GatewayPort = DefaultGatewayPort
	}
	if o.ProviderPort == 0 {
		o.ProviderPort = SamplesProviderPort
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, err
	}
	o.Dir = dir
	release, err := takeLock(ctx, dir, o.Log)
	if err != nil {
		return nil, err
	}
	defer release()
	w := &Whole{o: o, Cluster: cluster.Open(dir)}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// First of all: Down removes only a directory that has this file.
	if err := w.loadState(); err != nil {
		return nil, err
	}
	// Before anything is started, so that a port that is taken costs nothing.
	if err := w.portsFree(); err != nil {
		return nil, err
	}
	type step struct {
		what string
		do   func(context.Context) error
	}
	steps := []step{
		{"building manager and provider, which takes minutes the first time", w.build},
		{"starting the control plane", w.startCluster},
		{"applying kinds, roles and admission policies", w.applyConfig},
		{"starting the provider", w.StartProvider},
		{"starting the manager", w.StartManager},
		{"applying the samples", w.applySamples},
		{"writing the environment", w.writeEnv},
	}
	if o.Store != "" {
		steps = slices.Insert(steps, 0, step{"starting the store's server", w.startServer})
	}
	if o.SecondGateway {
		// Last: until it is ready nothing that the samples need would wait for it.
		steps = slices.Insert(steps, len(steps)-1, step{"starting the second gateway", w.StartGateway})
	}
	for _, step := range steps {
		w.say("%s", step.what)
		if err := step.do(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return w, nil
}

// Down ends all that was started in a state directory, and removes the directory
// unless its data is to be kept. It may be called at any time and again.
func Down(ctx context.Context, dir string, keepData bool, log io.Writer) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	release, err := takeLock(ctx, dir, log)
	if err != nil {
		return err
	}
	defer release()
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if _, err := os.Stat(stateFile(dir)); err != nil {
		return fmt.Errorf("%s was not made by up, so it is left alone: %w", dir, err)
	}
	c := cluster.Open(dir)
	if err := errors.Join(c.Down(ctx), downServer(ctx, dir, keepData)); err != nil {
		return err
	}
	if c.Existing() {
		_, _ = fmt.Fprintf(log, "dev: what was applied to the existing cluster stays there\n")
	}
	if keepData {
		return nil
	}
	return os.RemoveAll(dir)
}

// takeLock is for one up or down of a directory at a time. The file is beside the
// directory, since down removes that.
func takeLock(ctx context.Context, dir string, log io.Writer) (func(), error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, err
	}
	return filelock.Take(ctx, dir+".lock", func() {
		_, _ = fmt.Fprintf(log, "dev: another up or down is running, waiting for it\n")
	})
}

func (w *Whole) say(format string, args ...any) {
	_, _ = fmt.Fprintf(w.o.Log, "dev: "+format+"\n", args...)
}

func stateFile(dir string) string { return filepath.Join(dir, "whole.json") }

func (w *Whole) loadState() error {
	data, err := os.ReadFile(stateFile(w.Dir()))
	switch {
	case err == nil:
		if err := json.Unmarshal(data, &w.state); err != nil {
			return fmt.Errorf("reading %s: %w", stateFile(w.Dir()), err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	free, err := ports.Free(5)
	if err != nil {
		return err
	}
	if w.state.HealthPort == 0 {
		w.state.HealthPort, w.state.MetricsPort = free[0], free[1]
	}
	if w.state.Second == nil && w.o.SecondGateway {
		w.state.Second = &endpoints{Gateway: free[2], Health: free[3], Metrics: free[4]}
	}
	return w.saveState()
}

func (w *Whole) saveState() error {
	data, err := json.MarshalIndent(w.state, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(stateFile(w.Dir()), append(data, '\n'), 0o600)
}

// portsFree refuses a port that somebody else has: the samples and scripts name
// these, so there is no choosing of others here.
func (w *Whole) portsFree() error {
	for _, p := range []struct {
		process, env, flag string
		port               int
	}{
		{Provider, "PROVIDER_PORT", w.providerAddress(), w.o.ProviderPort},
		{Manager, "HOLDFAST_PORT", w.gatewayAddress(), w.o.GatewayPort},
	} {
		// The process itself may have it, from an earlier up.
		if slices.Contains(w.Processes().Argv(p.process), p.flag) {
			continue
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p.port))
		if err != nil {
			return fmt.Errorf("the %s cannot listen on 127.0.0.1:%d: %w; end what listens there, or choose another port with %s",
				p.process, p.port, err, p.env)
		}
		if err := l.Close(); err != nil {
			return err
		}
	}
	return nil
}

// The flags that say where the two listen.
func (w *Whole) providerAddress() string {
	return "--listen=127.0.0.1:" + strconv.Itoa(w.o.ProviderPort)
}

func (w *Whole) gatewayAddress() string {
	return "--gateway-bind-address=127.0.0.1:" + strconv.Itoa(w.o.GatewayPort)
}

func (w *Whole) program(name string) string { return filepath.Join(w.o.Root, "bin", name) }

// build has the flags of `go test` and `make build`, so that all share what is
// compiled already; without the commit in it, a commit restarts nothing.
func (w *Whole) build(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", filepath.Join(w.o.Root, "bin")+string(filepath.Separator),
		"./cmd/manager", "./test/provider/cmd/provider")
	cmd.Dir = w.o.Root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

func (w *Whole) startCluster(ctx context.Context) error {
	c, err := cluster.Up(ctx, cluster.Options{
		Dir: w.o.Dir, Namespace: agentNamespace, UnsafeNoFsync: w.o.UnsafeNoFsync, Log: w.o.Log,
	})
	if err != nil {
		return err
	}
	w.Cluster = c
	return nil
}

// StartProvider starts the test provider, or again if it differs, and waits until
// it answers. Its ledger is a file, so it outlives the process.
func (w *Whole) StartProvider(ctx context.Context) error {
	argv := append([]string{
		w.program(Provider),
		w.providerAddress(),
		"--ledger-file=" + filepath.Join(w.Dir(), "ledger"),
	}, w.o.ProviderArgs...)
	return w.run(ctx, Provider, argv, w.ProviderURL()+"/ledger")
}

// StartManager renews the manager's token, starts it, or again if it differs, and
// waits until it says that it is ready.
func (w *Whole) StartManager(ctx context.Context) error {
	kubeconfig, err := w.ServiceAccountKubeconfig(ctx, operatorNamespace, operatorAccount, managerTokenFor)
	if err != nil {
		return err
	}
	argv, err := w.managerArgv(Manager, kubeconfig, "127.0.0.1:"+strconv.Itoa(w.o.GatewayPort),
		"127.0.0.1:"+strconv.Itoa(w.state.HealthPort), "127.0.0.1:"+strconv.Itoa(w.state.MetricsPort))
	if err != nil {
		return err
	}
	return w.run(ctx, Manager, argv, "http://127.0.0.1:"+strconv.Itoa(w.state.HealthPort)+"/readyz")
}

// managerArgv is a manager with a data directory of its own.
func (w *Whole) managerArgv(name, kubeconfig, gateway, health, metrics string) ([]string, error) {
	data := filepath.Join(w.Dir(), name)
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, err
	}
	return append([]string{
		w.program(Manager),
		"--kubeconfig=" + kubeconfig,
		"--operator-namespace=" + operatorNamespace,
		"--data-dir=" + data,
		"--gateway-name=" + name,
		"--gateway-bind-address=" + gateway,
		"--health-probe-bind-address=" + health,
		"--metrics-bind-address=" + metrics,
		// For development: there is no certificate here, and the provider is local.
		"--insecure-http",
		"--metrics-secure=false",
		"--allow-loopback-upstreams",
	}, w.o.ManagerArgs...), nil
}

// GatewayProcess is a gateway without the controllers.
type GatewayProcess struct {
	// Name of the process, of its data directory and of its log.
	Name string
	// Address, Health and Metrics are host:port.
	Address, Health, Metrics string
	// Kubeconfig; "": one of the gateway's ServiceAccount.
	Kubeconfig string
	// Within is a program that runs it, with its arguments, and becomes it.
	Within []string
}

// StartGatewayProcess starts one, or again if it differs, and waits until it says that it
// is ready.
func (w *Whole) StartGatewayProcess(ctx context.Context, g GatewayProcess) error {
	if g.Kubeconfig == "" {
		var err error
		if g.Kubeconfig, err = w.GatewayKubeconfig(ctx); err != nil {
			return err
		}
	}
	argv, err := w.managerArgv(g.Name, g.Kubeconfig, g.Address, g.Health, g.Metrics)
	if err != nil {
		return err
	}
	argv = append(append(slices.Clone(g.Within), argv...), "--controllers=false")
	return w.run(ctx, g.Name, argv, "http://"+g.Health+"/readyz")
}

// GatewayKubeconfig is one of the gateway's ServiceAccount, with its token renewed.
func (w *Whole) GatewayKubeconfig(ctx context.Context) (string, error) {
	return w.ServiceAccountKubeconfig(ctx, operatorNamespace, gatewayAccount, managerTokenFor)
}

// StartGateway starts the second gateway, or again if it differs, and waits until it says
// that it is ready.
func (w *Whole) StartGateway(ctx context.Context) error {
	if !w.o.SecondGateway {
		return errors.New("there is no second gateway here")
	}
	at := func(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }
	return w.StartGatewayProcess(ctx, GatewayProcess{
		Name: Gateway, Address: at(w.state.Second.Gateway), Health: at(w.state.Second.Health), Metrics: at(w.state.Second.Metrics),
	})
}

// run starts a process and waits until its URL answers 200.
func (w *Whole) run(ctx context.Context, name string, argv []string, url string) error {
	started, err := w.Processes().Ensure(name, argv, nil)
	if err != nil {
		return err
	}
	if started {
		w.say("%s started, its log is %s", name, w.Processes().Log(name))
	}
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	return w.Processes().Await(ctx, name, url+" answered", func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("it answers %s", answer.Status)
		}
		return errors.Join(err, answer.Body.Close())
	})
}

// writeEnv writes what scripts need, for the shell: `. .dev/env`.
func (w *Whole) writeEnv(ctx context.Context) error {
	token, err := w.AgentToken(ctx)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, kv := range [][2]string{
		{"KUBECONFIG", w.Kubeconfig},
		{"HOLDFAST_URL", w.GatewayURL()},
		{"HOLDFAST_TOKEN", token},
		{"PROVIDER_URL", w.ProviderURL()},
	} {
		fmt.Fprintf(&b, "export %s=%s\n", kv[0], shellWord(kv[1]))
	}
	if second := w.SecondGatewayURL(); second != "" {
		fmt.Fprintf(&b, "export HOLDFAST_URL_2=%s\n", shellWord(second))
	}
	// The kubectl of an existing cluster is on the PATH already.
	if filepath.IsAbs(w.Kubectl) {
		b.WriteString(appendToPath(filepath.Dir(w.Kubectl)))
	}
	path := w.EnvFile()
	if err := os.WriteFile(path+".partial", []byte(b.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".partial", path)
}

// appendToPath is for a shell to have a directory on its PATH, once, behind what the
// user has. It is no line of the form KEY=VALUE: a reader that knows only those would
// take $PATH for its value.
func appendToPath(dir string) string {
	dir = shellWord(dir)
	return `case ":$PATH:" in *:` + dir + `:*) ;; *) export PATH="$PATH":` + dir + " ;; esac\n"
}

// EnvFile is the file that has the environment for scripts.
func (w *Whole) EnvFile() string { return filepath.Join(w.Dir(), "env") }

// shellWord quotes a value only if a shell would read it as something else, so
// that simpler readers of the file get along too.
func shellWord(s string) string {
	safe := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./:=,@%+", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !safe(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
