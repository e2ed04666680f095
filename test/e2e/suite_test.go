// Package e2e looks at the whole from outside: agents are HTTP clients, people are
// kubectl, processes are killed for real, and what the money did is asked of the
// provider's ledger and of nobody else.
//
// All specs run once for each kind of store, one kind after another, each in a process
// of its own: on the embedded one with one process that serves, on the others with two.
// This file starts the whole, once for all specs of a run, and ends it.
package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

// The times of the manager under test, short but safe on a busy machine.
const (
	settlement = time.Second
	margin     = 500 * time.Millisecond
	grace      = time.Second
)

// long are specs that take about a minute or more. Their containers begin before all others: whichever began last,
// the other processes would have nothing more to do.
const long = SpecPriority(1)

var (
	// all is the whole under test; admin its administrator.
	all   *whole.Whole
	admin client.Client
)

func TestEndToEnd(t *testing.T) {
	switch {
	case kind == "":
		for _, k := range kinds {
			t.Run(k, func(t *testing.T) { runOn(t, k) })
		}
		return
	case !slices.Contains(kinds, kind):
		t.Fatalf("%s is %q: it must be one of %v, or nothing for all of them", storeEnv, kind, kinds)
	}
	RegisterFailHandler(Fail)
	log.SetLogger(GinkgoLogr)
	SetDefaultEventuallyTimeout(30 * time.Second)
	SetDefaultEventuallyPollingInterval(50 * time.Millisecond)
	EnforceDefaultTimeoutsWhenUsingContexts()
	suite, reporter := GinkgoConfiguration()
	suite.Timeout = time.Hour
	if os.Getenv(admissionsEnv) != "" {
		suite.Timeout += drillTime
	}
	RunSpecs(t, "the whole on "+kind+", from outside", suite, reporter)
}

// runOn runs this program again for one kind of store, with the same flags.
func runOn(t *testing.T, kind string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], append(slices.Clone(os.Args[1:]), "-test.run=^TestEndToEnd$")...)
	cmd.Env = append(os.Environ(), storeEnv+"="+kind)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// It ends what it has started.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v", kind, err)
	}
}

var _ = BeforeSuite(func(ctx SpecContext) {
	root, err := assets.Root(ctx)
	Expect(err).NotTo(HaveOccurred())
	free, err := ports.Free(2)
	Expect(err).NotTo(HaveOccurred())
	// In the clone, as a developer's: where a temporary directory is in memory, what the
	// embedded store keeps there would rightly be called not durable.
	parent, err := os.MkdirTemp(root, ".e2e-")
	Expect(err).NotTo(HaveOccurred())
	dir := filepath.Join(parent, "state")
	serversDir, err = os.MkdirTemp("", "holdfast-e2e-")
	Expect(err).NotTo(HaveOccurred())
	Expect(os.Chmod(serversDir, 0o755)).To(Succeed())
	DeferCleanup(os.RemoveAll, serversDir)
	if kind != bolt {
		shared = startServer(ctx, servers.Options{})
	}
	DeferCleanup(func(ctx context.Context) {
		Expect(whole.Down(ctx, dir, false, GinkgoWriter)).To(Succeed())
		Expect(os.RemoveAll(parent)).To(Succeed())
	})
	all, err = whole.Up(ctx, whole.Options{
		Root: root, Dir: dir, GatewayPort: free[0], ProviderPort: free[1], UnsafeNoFsync: true,
		SecondGateway: kind != bolt,
		ManagerArgs: []string{
			"--lease-settlement=" + settlement.String(), "--lease-margin=" + margin.String(), "--lease-grace=" + grace.String(),
		},
		Log: GinkgoWriter,
	})
	Expect(err).NotTo(HaveOccurred())
	admin = clientAs("")
	early.begin(ctx)
	resolutionsAreStamped(ctx)
}, NodeTimeout(15*time.Minute))

// resolutionsAreStamped waits until a resolution can be written: the API server learns
// of a kind's schema, which it needs for the stamp, some seconds after the kind is
// there, and refuses all resolutions until then.
func resolutionsAreStamped(ctx context.Context) {
	GinkgoHelper()
	w := newWorld(ctx)
	w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
	hold := w.pay(ctx, call{id: "k2", body: w.order("9", "11")}, 409, unknownHold).problem().Hold
	w.holdIs(ctx, hold, v1alpha1.HoldHeld)
	began := time.Now()
	defer func() { GinkgoWriter.Printf("resolutions can be written after another %s\n", time.Since(began)) }()
	Eventually(func(ctx context.Context) error {
		return w.tryResolve(ctx, resolver, hold, resolution{Decision: "Reject"})
	}).WithContext(ctx).WithTimeout(time.Minute).WithPolling(time.Second).Should(Succeed())
}

// clientAs is the administrator's client, or somebody's whom the administrator stands
// in for. It does not slow itself down: the specs poll.
func clientAs(user string) client.Client {
	GinkgoHelper()
	config, err := all.RESTConfig()
	Expect(err).NotTo(HaveOccurred())
	config.QPS = -1
	config.Impersonate.UserName = user
	known := runtime.NewScheme()
	Expect(scheme.AddToScheme(known)).To(Succeed())
	Expect(v1alpha1.AddToScheme(known)).To(Succeed())
	c, err := client.New(config, client.Options{Scheme: known})
	Expect(err).NotTo(HaveOccurred())
	return c
}

var _ = JustAfterEach(func() {
	if CurrentSpecReport().Failed() {
		for _, g := range gateways() {
			AddReportEntry("the end of the log of the "+string(g), all.Processes().Tail(string(g), 60))
		}
	}
})
