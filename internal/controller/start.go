// This file is about the start of the process: the gateway listens once what existed
// then has been looked at, so that a restart refuses nothing that could be served.
//
// What must hold: no object can keep the gateway from serving the others. One whose
// visit ended in an error was looked at, and its own calls are refused; the wait as a
// whole is bounded; and what was ready once does not become unready for this reason.

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

const (
	// startPatience is how long the gateway waits for what existed at the start.
	startPatience = 30 * time.Second
	// startTell is how often what it waits for is logged.
	startTell = 5 * time.Second
	startTick = 50 * time.Millisecond
	// maxNamed bounds how many objects one line names.
	maxNamed = 10
	// askTool bounds a look into the cache for a tool that the policy does not have.
	askTool = 5 * time.Second
)

// awaited is an object that existed at the start.
type awaited struct {
	kind   string
	name   types.NamespacedName
	looked func(types.NamespacedName) bool
	// object is one to read it into.
	object client.Object
}

func (a awaited) String() string { return a.kind + " " + a.name.String() }

// beginning waits for what existed at the start.
type beginning struct {
	// list gives what exists.
	list     func(context.Context) ([]awaited, error)
	exists   func(context.Context, awaited) bool
	patience time.Duration
	// ready is closed when the wait is over.
	ready chan struct{}
	// waits says what is waited for.
	waits atomic.Pointer[string]
	// late is what was not looked at in time; it is written before ready is closed.
	late []awaited
}

func (o *Operator) newBeginning() *beginning {
	b := &beginning{patience: startPatience, ready: make(chan struct{})}
	b.waits.Store(new("the lists of objects"))
	b.list = func(ctx context.Context) ([]awaited, error) {
		var tools v1alpha1.AgentToolList
		var stores v1alpha1.IdempotencyStoreList
		if err := errors.Join(o.client.List(ctx, &tools), o.client.List(ctx, &stores)); err != nil {
			return nil, err
		}
		var out []awaited
		for i := range stores.Items {
			out = append(out, awaited{"IdempotencyStore", client.ObjectKeyFromObject(&stores.Items[i]), o.stores.looked, &v1alpha1.IdempotencyStore{}})
		}
		known := func(nn types.NamespacedName) bool {
			_, _, ok := o.tools.Serves(nn)
			return ok
		}
		for i := range tools.Items {
			out = append(out, awaited{"AgentTool", client.ObjectKeyFromObject(&tools.Items[i]), known, &v1alpha1.AgentTool{}})
		}
		return out, nil
	}
	b.exists = func(ctx context.Context, a awaited) bool {
		return !apierrors.IsNotFound(o.client.Get(ctx, a.name, a.object))
	}
	return b
}

// NeedLeaderElection is false: every gateway waits for itself.
func (b *beginning) NeedLeaderElection() bool { return false }

// Start waits, and says for what.
func (b *beginning) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithName("start")
	left, err := b.list(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("list what exists at the start: %w", err)
	}
	tick := time.NewTicker(startTick)
	defer tick.Stop()
	began := time.Now()
	told := began
	for {
		left = slices.DeleteFunc(left, func(a awaited) bool { return a.looked(a.name) || !b.exists(ctx, a) })
		if len(left) == 0 {
			break
		}
		b.waits.Store(new(named(left)))
		if time.Since(began) >= b.patience {
			logger.Error(errors.New("not looked at in time"), "the gateway serves without them; calls of such tools get 503 until then", "objects", named(left))
			break
		}
		if time.Since(told) >= startTell {
			told = time.Now()
			logger.Info("the gateway waits until these were looked at", "objects", named(left))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
	b.late = left
	close(b.ready)
	return nil
}

func named(list []awaited) string {
	var out []string
	for _, a := range list[:min(len(list), maxNamed)] {
		out = append(out, a.String())
	}
	if more := len(list) - maxNamed; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// Programmed says whether what existed at the start was looked at, or waited for long
// enough. Once it is so, it stays so.
func (o *Operator) Programmed() error {
	select {
	case <-o.beginning.ready:
		return nil
	default:
		return fmt.Errorf("waiting until these were looked at: %s", *o.beginning.waits.Load())
	}
}

// WhenProgrammed starts a runnable once Programmed.
func (o *Operator) WhenProgrammed(r manager.Runnable) manager.Runnable {
	return &afterProgrammed{ready: o.beginning.ready, runnable: r}
}

type afterProgrammed struct {
	ready    <-chan struct{}
	runnable manager.Runnable
}

// NeedLeaderElection is false: every gateway serves.
func (a *afterProgrammed) NeedLeaderElection() bool { return false }

// Start waits, then runs.
func (a *afterProgrammed) Start(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-a.ready:
		return a.runnable.Start(ctx)
	}
}

// Served is the policy at one moment. It tells a tool that was not looked at yet from
// one that does not exist.
type Served struct {
	snapshot *policy.Snapshot
	cached   client.Reader
}

// Served gives the policy that is served now.
func (o *Operator) Served() Served { return Served{o.Policies.Load(), o.client} }

// Tool gives a tool that is served. One that is not is a *policy.NotServedError, one
// that does not exist policy.ErrNoTool.
func (s Served) Tool(namespace, name string) (*policy.Tool, error) {
	tool, err := s.snapshot.Tool(namespace, name)
	if !errors.Is(err, policy.ErrNoTool) {
		return tool, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTool)
	defer cancel()
	var obj v1alpha1.AgentTool
	switch failed := s.cached.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &obj); {
	case apierrors.IsNotFound(failed):
		return nil, err
	case failed != nil:
		return nil, fmt.Errorf("ask whether there is an AgentTool %s/%s: %w", namespace, name, failed)
	}
	return nil, &policy.NotServedError{
		Namespace: namespace, Tool: name, Reason: policy.ReasonPending, Message: "Holdfast has not looked at it yet",
	}
}
