// Command picture makes docs/dashboard.svg: it starts all of Holdfast on this machine,
// lets agents behave well and then badly for some minutes, and has the dashboard of
// config/prometheus drawn from the metrics that the manager served meanwhile.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/ports"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

const (
	tool = "issue-refund"
	// ttl is the shortest that a tool may have, so that intents come back too late within the run.
	ttl = time.Minute
)

// act is a part of the story. In it, so many calls a second, of which shares are not well.
type act struct {
	name    string
	lasts   time.Duration
	calls   float64
	again   float64 // the same intent once more
	twins   float64 // two replicas with one intent at once
	late    float64 // an intent that is older than the TTL
	lost    float64 // the provider's answer is lost
	changed float64 // an earlier intent ID with another amount
}

var story = []act{
	{name: "a good minute, and a little more", lasts: 80 * time.Second, calls: 12, again: .02},
	{name: "an agent loops", lasts: 50 * time.Second, calls: 20, again: .3, changed: .01},
	{name: "two replicas work on the same tasks", lasts: 50 * time.Second, calls: 12, again: .02, twins: .15, lost: .01},
	{name: "old tasks are run again", lasts: 40 * time.Second, calls: 12, again: .02, late: .02},
	{name: "it is over", lasts: 40 * time.Second, calls: 12, again: .02},
}

func main() {
	log.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	root, err := assets.Root(ctx)
	if err != nil {
		return err
	}
	free, err := ports.Free(2)
	if err != nil {
		return err
	}
	parent, err := os.MkdirTemp(root, ".picture-")
	if err != nil {
		return err
	}
	dir := filepath.Join(parent, "state")
	defer func() {
		err = errors.Join(err, whole.Down(context.WithoutCancel(ctx), dir, false, io.Discard), os.RemoveAll(parent))
	}()
	w, err := whole.Up(ctx, whole.Options{Root: root, Dir: dir, GatewayPort: free[0], ProviderPort: free[1], Log: os.Stderr})
	if err != nil {
		return err
	}
	token, err := w.AgentToken(ctx)
	if err != nil {
		return err
	}
	if err := prepare(ctx, w); err != nil {
		return err
	}
	lasts := time.Duration(0)
	for _, a := range story {
		lasts += a.lasts
	}
	draw := exec.CommandContext(ctx, "go", "run", "-C", filepath.Join(root, "test", "prometheus"), "./picture",
		"-panels", "9", "-for", (lasts + 5*time.Second).String(), "-out", filepath.Join(root, "docs", "dashboard.svg"), w.MetricsURL())
	draw.Stdout, draw.Stderr = os.Stdout, os.Stderr
	if err := draw.Start(); err != nil {
		return err
	}
	agents := &agents{url: w.GatewayURL() + "/v1/namespaces/support/tools/" + tool, token: token}
	for _, a := range story {
		fmt.Fprintf(os.Stderr, "picture: %s, for %s\n", a.name, a.lasts)
		agents.play(ctx, a)
	}
	agents.Wait()
	return draw.Wait()
}

// prepare gives the sample's tool a short memory, and lets agents choose what goes wrong at the provider.
func prepare(ctx context.Context, w *whole.Whole) error {
	admin, err := w.Admin()
	if err != nil {
		return err
	}
	var t v1alpha1.AgentTool
	if err := admin.Get(ctx, client.ObjectKey{Namespace: "support", Name: tool}, &t); err != nil {
		return err
	}
	t.Spec.Idempotency.TTL = &metav1.Duration{Duration: ttl}
	t.Spec.Upstream.HTTP.RequestHeaders = append(t.Spec.Upstream.HTTP.RequestHeaders, "provider-fault")
	if err := admin.Update(ctx, &t); err != nil {
		return err
	}
	for {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(&t), &t); err != nil {
			return err
		}
		for _, c := range t.Status.Conditions {
			if c.Type == v1alpha1.ConditionReady && c.Status == metav1.ConditionTrue && c.ObservedGeneration == t.Generation {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// paid is an intent that was made, and when.
type paid struct {
	n  int
	at time.Time
}

// agents call the tool.
type agents struct {
	url, token string
	sync.WaitGroup

	mu   sync.Mutex
	made []paid
}

// play makes an act's calls.
func (a *agents) play(ctx context.Context, of act) {
	ctx, cancel := context.WithTimeout(ctx, of.lasts)
	defer cancel()
	tick := time.NewTicker(time.Duration(float64(time.Second) / of.calls))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		switch p := rand.Float64(); {
		case p < of.again:
			a.call(a.earlier(0, ttl/2), "10", "")
		case p < of.again+of.changed:
			a.call(a.earlier(0, ttl/2), "99", "")
		case p < of.again+of.changed+of.late:
			a.call(a.earlier(ttl+10*time.Second, time.Hour), "10", "")
		case p < of.again+of.changed+of.late+of.twins:
			n := a.next()
			a.call(n, "10", "delay:300ms")
			a.call(n, "10", "delay:300ms")
		case p < of.again+of.changed+of.late+of.twins+of.lost:
			a.call(a.next(), "10", "close-after-commit")
		default:
			a.call(a.next(), "10", "")
		}
	}
}

// next is a new intent.
func (a *agents) next() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.made)
	a.made = append(a.made, paid{n, time.Now()})
	return n
}

// earlier is one that was made within this time; a new one if none was.
func (a *agents) earlier(least, most time.Duration) int {
	a.mu.Lock()
	var fit []int
	for _, p := range a.made {
		if age := time.Since(p.at); age >= least && age <= most {
			fit = append(fit, p.n)
		}
	}
	a.mu.Unlock()
	if len(fit) == 0 {
		return a.next()
	}
	return fit[rand.IntN(len(fit))]
}

// call calls in the background. What comes back is the metrics' to say.
func (a *agents) call(n int, amount, fault string) {
	a.Go(func() {
		body := fmt.Sprintf(`{"accountId":"a1","orderId":"%d","amount":%s}`, n, amount)
		r, err := http.NewRequest(http.MethodPost, a.url, bytes.NewBufferString(body))
		if err != nil {
			fmt.Fprintln(os.Stderr, "picture:", err)
			return
		}
		r.Header.Set("Authorization", "Bearer "+a.token)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", fmt.Sprintf("task-%d", n))
		if fault != "" {
			r.Header.Set("Provider-Fault", fault)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			fmt.Fprintln(os.Stderr, "picture:", err)
			return
		}
		_, _ = io.Copy(io.Discard, answer.Body) // the status says enough
		_ = answer.Body.Close()
	})
}
