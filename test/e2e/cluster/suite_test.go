// Package cluster looks at Holdfast as it is installed: in a cluster of several nodes with
// real kubelets, its parts, its stores, the provider and the agents each as pods. Then it
// breaks what it stands on, one drill after another, and asks the provider's ledger after each.
//
// All drills share one cluster and two worlds, one on each kind of store that the operator
// deploys. A drill leaves them as it found them; one that damages a store makes its own.
//
// This file brings the cluster up, or attaches to one, and installs Holdfast as a user does.
package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/cluster/nodes"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
)

const (
	// clusterEnv is the state directory of a cluster that runs; "": the suite makes its own and ends it.
	clusterEnv = "HOLDFAST_CLUSTER"
	// imagesEnv is a directory with the images' archives, made before; "": the suite makes them.
	imagesEnv = "HOLDFAST_IMAGES"
	// timesEnv is how often each drill is made; "": once.
	timesEnv = "HOLDFAST_DRILLS"
	// tableEnv is the file that gets the table of what callers saw.
	tableEnv = "HOLDFAST_DRILLS_TABLE"
)

var (
	// box is the cluster, as those see it who can pull its plugs.
	box *nodes.Cluster
	// admin is its administrator.
	admin client.Client
	// tools are the programs beside it, such as kubectl.
	tools *assets.Assets
	// root is the clone.
	root string
)

func TestCluster(t *testing.T) {
	RegisterFailHandler(Fail)
	log.SetLogger(GinkgoLogr)
	SetDefaultEventuallyTimeout(time.Minute)
	SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	EnforceDefaultTimeoutsWhenUsingContexts()
	suite, reporter := GinkgoConfiguration()
	suite.Timeout = time.Duration(times()) * 40 * time.Minute
	RunSpecs(t, "Holdfast in a cluster", suite, reporter)
}

// times is how often each drill is made.
func times() int {
	text := os.Getenv(timesEnv)
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		panic(fmt.Sprintf("%s is %q: it must be a number of times", timesEnv, text))
	}
	return n
}

// drill is a spec that is made as often as drills are, and ends with everybody well again.
func drill(text string, args ...any) {
	for n := range times() {
		name := text
		if times() > 1 {
			name = fmt.Sprintf("%s, %d of %d", text, n+1, times())
		}
		It(name, append([]any{Offset(1), Label("drill"), NodeTimeout(6 * time.Minute)}, args...)...)
	}
}

var _ = BeforeSuite(func(ctx SpecContext) {
	prepared := false
	defer func() {
		if !prepared && box != nil {
			sayWhatIs(context.WithoutCancel(ctx))
		}
	}()
	var err error
	root, err = assets.Root(ctx)
	Expect(err).NotTo(HaveOccurred())
	tools, err = assets.Find(ctx, GinkgoWriter)
	Expect(err).NotTo(HaveOccurred())
	built := make(chan error, 1)
	images := os.Getenv(imagesEnv)
	if images == "" {
		images = GinkgoT().TempDir()
		go func() { built <- buildImages(ctx, images) }()
	} else {
		built <- nil
	}
	bringUp(ctx)
	admin = clientAs("")
	Expect(<-built).To(Succeed())
	archives, err := filepath.Glob(filepath.Join(images, "*.tar"))
	Expect(err).NotTo(HaveOccurred())
	Expect(archives).NotTo(BeEmpty())
	for _, archive := range archives {
		Expect(box.Load(ctx, archive)).To(Succeed())
	}
	install(ctx)
	prepare(ctx)
	prepared = true
}, NodeTimeout(20*time.Minute))

// bringUp makes a cluster of two nodes, or attaches to one.
func bringUp(ctx context.Context) {
	GinkgoHelper()
	var err error
	if dir := os.Getenv(clusterEnv); dir != "" {
		box, err = nodes.Attach(ctx, dir)
		Expect(err).NotTo(HaveOccurred())
		return
	}
	dir := filepath.Join(root, ".dev", "test-e2e")
	DeferCleanup(func(ctx context.Context) {
		if box != nil {
			Expect(box.Down(ctx)).To(Succeed())
		}
		Expect(os.RemoveAll(dir)).To(Succeed())
	}, NodeTimeout(3*time.Minute))
	began := time.Now()
	box, err = nodes.Up(ctx, nodes.Options{Dir: dir, Nodes: 2, Log: GinkgoWriter})
	Expect(err).NotTo(HaveOccurred())
	AddReportEntry("the cluster was up after", time.Since(began).Round(time.Second).String())
}

// buildImages writes all images of this tree to a directory.
func buildImages(ctx context.Context, dir string) error {
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/images", "-o", dir)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("build the images: %w: %s", err, out)
	}
	return nil
}

// install is what a user does. It may be done again after an uninstall, and the worlds then
// need an apply of theirs.
func install(ctx context.Context) {
	GinkgoHelper()
	mustKubectl(ctx, "apply", "-k", filepath.Join(root, "config", "default"))
	available(ctx)
	openFront(ctx)
}

// available waits until all of Holdfast is.
func available(ctx context.Context) {
	GinkgoHelper()
	for _, name := range []string{controllersName, gatewayName} {
		mustKubectl(ctx, "rollout", "status", "--namespace="+system, "--timeout=3m", "deployment/"+name)
	}
}

// kubectl runs it as the administrator, in the clone.
func kubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, tools.Kubectl, args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "KUBECONFIG="+box.Kubeconfig())
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

func mustKubectl(ctx context.Context, args ...string) string {
	GinkgoHelper()
	out, err := kubectl(ctx, args...)
	Expect(err).NotTo(HaveOccurred())
	return out
}

// kubectlAs is kubectl of somebody whom the administrator stands in for.
func kubectlAs(ctx context.Context, user string, args ...string) (string, error) {
	return kubectl(ctx, append([]string{"--as=" + user}, args...)...)
}

func restConfig() *rest.Config {
	GinkgoHelper()
	config, err := clientcmd.BuildConfigFromFlags("", box.Kubeconfig())
	Expect(err).NotTo(HaveOccurred())
	// The drills poll.
	config.QPS = -1
	return config
}

// clientAs is the administrator's client, or somebody's whom the administrator stands in for.
func clientAs(user string) client.Client {
	GinkgoHelper()
	config := restConfig()
	config.Impersonate.UserName = user
	known := runtime.NewScheme()
	Expect(scheme.AddToScheme(known)).To(Succeed())
	Expect(v1alpha1.AddToScheme(known)).To(Succeed())
	c, err := client.New(config, client.Options{Scheme: known})
	Expect(err).NotTo(HaveOccurred())
	return c
}

// sayWhatIs has the report end with what there is and what Holdfast said last.
func sayWhatIs(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "--all-namespaces", "--output=wide"},
		{"get", "atool,idem,ibudget", "--all-namespaces"},
		{"logs", "--namespace=" + system, "--selector=app.kubernetes.io/name=holdfast", "--prefix", "--tail=400"},
		{"get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"},
	} {
		out, err := kubectl(ctx, args...)
		lines := slices.DeleteFunc(strings.Split(out, "\n"), func(line string) bool { return strings.Contains(line, `"status":201`) })
		out = strings.Join(lines[max(0, len(lines)-100):], "\n")
		AddReportEntry("kubectl "+strings.Join(args, " "), fmt.Sprint(out, err))
	}
}

var _ = JustAfterEach(func(ctx SpecContext) {
	if CurrentSpecReport().Failed() {
		sayWhatIs(ctx)
	}
}, NodeTimeout(time.Minute))
