// This file is how the controllers know what the gateways serve.
//
// Each gateway process keeps a Lease in the operator's namespace with the highest
// resourceVersion of AgentTools up to which it serves all of them as they are. A tool
// is programmed once every live gateway, and at least one, has come to its version.

package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	// gatewayLabel marks the Leases of gateways.
	gatewayLabel = v1alpha1.GroupName + "/gateway"
	// seenTools carries the resourceVersion of AgentTools that the gateway has come to.
	seenTools = v1alpha1.GroupName + "/seen-agenttools"

	leaseDuration = 15 * time.Second
	leaseRenewal  = leaseDuration / 3
	// leaseKept is how long the Lease of a gateway that is gone is left for people to see.
	leaseKept = time.Hour
	// presenceTick is how often a gateway looks whether it has something new to tell.
	presenceTick = time.Second
)

// Presence is this process's own Lease as a gateway.
type Presence struct {
	namespace string
	name      string
	cached    client.Reader
	live      client.Client
	// serves says at which generation the gateway has this tool; it serves what is
	// served, and refuses what is refused.
	serves func(types.NamespacedName) (uid types.UID, generation int64, ok bool)
	poke   chan struct{}
}

// NewPresence names the Lease after the gateway: the process that follows it under the
// same name takes it over.
func NewPresence(namespace, gateway string, cached client.Reader, live client.Client, serves func(types.NamespacedName) (types.UID, int64, bool)) *Presence {
	return &Presence{
		namespace: namespace, name: "holdfast-gateway-" + gateway, cached: cached, live: live, serves: serves, poke: make(chan struct{}, 1),
	}
}

// GatewayName makes a name that a Lease can carry of one that a machine or pod has.
func GatewayName(name string) string {
	name = strings.ToLower(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '.':
			return r
		}
		return '-'
	}, name))
	return strings.Trim(name[:min(len(name), 200)], "-.")
}

// Poke says that the gateway may have come further.
func (p *Presence) Poke() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// NeedLeaderElection: every gateway has its own Lease.
func (p *Presence) NeedLeaderElection() bool { return false }

// Start keeps the Lease until the process ends, and then takes it away.
func (p *Presence) Start(ctx context.Context) error {
	tick := time.NewTicker(presenceTick)
	defer tick.Stop()
	var told string
	var toldAt time.Time
	for {
		seen, err := p.seen(ctx)
		if err == nil && (seen != told || time.Since(toldAt) >= leaseRenewal) {
			if err = p.tell(ctx, seen); err == nil {
				told, toldAt = seen, time.Now()
			}
		}
		if err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "the gateway's Lease could not be renewed", "lease", p.name)
		}
		select {
		case <-ctx.Done():
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			err := p.live.Delete(end, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: p.name}})
			return client.IgnoreNotFound(err)
		case <-tick.C:
		case <-p.poke:
		}
	}
}

// seen is the highest resourceVersion up to which all tools are served as they are:
// below that of any tool that is not.
func (p *Presence) seen(ctx context.Context) (string, error) {
	var tools v1alpha1.AgentToolList
	if err := p.cached.List(ctx, &tools); err != nil {
		return "", fmt.Errorf("list AgentTools: %w", err)
	}
	slices.SortFunc(tools.Items, func(a, b v1alpha1.AgentTool) int {
		return compareVersions(a.ResourceVersion, b.ResourceVersion)
	})
	seen := ""
	for i := range tools.Items {
		t := &tools.Items[i]
		uid, generation, ok := p.serves(client.ObjectKeyFromObject(t))
		if !ok || uid != t.UID || generation != t.Generation {
			break
		}
		seen = t.ResourceVersion
	}
	return seen, nil
}

// compareVersions orders resourceVersions; one that is missing or cannot be compared comes first.
func compareVersions(a, b string) int {
	n, err := resourceversion.CompareResourceVersion(a, b)
	if err == nil {
		return n
	}
	_, errA := resourceversion.CompareResourceVersion(a, a)
	_, errB := resourceversion.CompareResourceVersion(b, b)
	switch {
	case errA != nil && errB != nil:
		return 0
	case errA != nil:
		return -1
	default:
		return 1
	}
}

// tell writes the Lease.
func (p *Presence) tell(ctx context.Context, seen string) error {
	var l coordinationv1.Lease
	err := p.live.Get(ctx, types.NamespacedName{Namespace: p.namespace, Name: p.name}, &l)
	absent := apierrors.IsNotFound(err)
	if err != nil && !absent {
		return err
	}
	l.Namespace, l.Name = p.namespace, p.name
	l.Labels = map[string]string{gatewayLabel: "true"}
	l.Annotations = map[string]string{seenTools: seen}
	l.Spec.HolderIdentity = ptr.To(p.name)
	l.Spec.LeaseDurationSeconds = ptr.To(int32(leaseDuration / time.Second))
	l.Spec.RenewTime = ptr.To(metav1.NowMicro())
	if absent {
		return p.live.Create(ctx, &l, client.FieldOwner(ownerGateway))
	}
	return p.live.Update(ctx, &l, client.FieldOwner(ownerGateway))
}

// Gateways are all gateways of the cluster, as their Leases tell.
type Gateways struct {
	namespace string
	cached    client.Reader
	live      client.Client

	mu      sync.Mutex
	started time.Time
	// since is the resourceVersion at which this process first saw a tool's generation.
	since map[types.UID]version
}

type version struct {
	generation      int64
	resourceVersion string
}

// NewGateways reads the Leases of this namespace.
func NewGateways(namespace string, cached client.Reader, live client.Client) *Gateways {
	return &Gateways{namespace: namespace, cached: cached, live: live, started: time.Now(), since: map[types.UID]version{}}
}

// programmed says whether all gateways serve this generation of the tool, and why not.
func (g *Gateways) programmed(ctx context.Context, tool *v1alpha1.AgentTool) (bool, string, error) {
	g.mu.Lock()
	v, ok := g.since[tool.UID]
	if !ok || v.generation != tool.Generation {
		v = version{tool.Generation, tool.ResourceVersion}
		g.since[tool.UID] = v
	}
	started := g.started
	g.mu.Unlock()

	// A restart changes nothing about what gateways run. What was true stays so until
	// their Leases have had the time to say otherwise.
	settling := time.Since(started) < leaseDuration &&
		isTrue(tool.Status.Conditions, v1alpha1.ConditionProgrammed, tool.Generation)

	var leases coordinationv1.LeaseList
	err := g.cached.List(ctx, &leases, client.InNamespace(g.namespace), client.MatchingLabels{gatewayLabel: "true"})
	if err != nil {
		return false, "", fmt.Errorf("list the Leases of gateways: %w", err)
	}
	live, behind := 0, ""
	for i := range leases.Items {
		l := &leases.Items[i]
		if !alive(l, time.Now()) {
			continue
		}
		live++
		if compareVersions(l.Annotations[seenTools], v.resourceVersion) < 0 {
			behind = l.Name
		}
	}
	switch {
	case settling || live > 0 && behind == "":
		return true, "", nil
	case live == 0:
		return false, "no gateway is alive", nil
	}
	return false, fmt.Sprintf("the gateway of Lease %s/%s does not serve this generation yet", g.namespace, behind), nil
}

// forget drops a tool that is gone.
func (g *Gateways) forget(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.since, uid)
}

func alive(l *coordinationv1.Lease, now time.Time) bool {
	if l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
		return false
	}
	return now.Before(l.Spec.RenewTime.Add(time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second))
}

// collect takes away the Leases of gateways that are long gone.
func (g *Gateways) collect(ctx context.Context) error {
	var leases coordinationv1.LeaseList
	if err := g.cached.List(ctx, &leases, client.InNamespace(g.namespace), client.MatchingLabels{gatewayLabel: "true"}); err != nil {
		return err
	}
	for i := range leases.Items {
		l := &leases.Items[i]
		if l.Spec.RenewTime == nil || time.Since(l.Spec.RenewTime.Time) < leaseKept {
			continue
		}
		// The preconditions spare a Lease that was just taken up again.
		err := g.live.Delete(ctx, l, client.Preconditions{UID: &l.UID, ResourceVersion: &l.ResourceVersion})
		if err := client.IgnoreNotFound(err); err != nil && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

// Start collects from time to time.
func (g *Gateways) Start(ctx context.Context) error {
	tick := time.NewTicker(leaseKept / 4)
	defer tick.Stop()
	for {
		if err := g.collect(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "old Leases of gateways could not be deleted")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
