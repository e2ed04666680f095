// Package controller is the operator's side of the cluster: one reconciler a kind, the
// worklist that turns held records into PaymentHolds, and what the gateway needs to
// know of the cluster.
//
// Everything is level-triggered: what is done follows from what is there, not from what
// happened. No status is a store, no object is written when nothing changed, and nothing
// carries a finalizer.
package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// Options of the operator.
type Options struct {
	// Namespace is the operator's own.
	Namespace string
	// Controllers and Gateway are the roles of this process; one at least.
	Controllers, Gateway bool
	// GatewayName tells this gateway from the others; it names its Lease.
	GatewayName string
	// DataDir is where the embedded stores' files are.
	DataDir string
	// StoreTimeout bounds a question to a store's server; 0: the driver's own.
	StoreTimeout time.Duration
	// CollectAfter is how long an object stays once it is over; 7 days.
	CollectAfter time.Duration
	// Dial reaches stores' servers for a namespace. It judges every address.
	Dial Dial
	// Guard are the options of every engine; Observe is set here.
	Guard guard.Options
	// Service is that of the gateways, for which a certificate is made; "": none is.
	// ServiceNames are further names and addresses of it.
	Service      string
	ServiceNames []string
	// EvidenceLog takes what is known of results that could not be written. It must leave
	// nothing out; its zero value: the process's log.
	EvidenceLog logr.Logger
}

// Operator is what the controllers and the gateway of one process share.
type Operator struct {
	Engines     *guard.Engines
	Policies    *policy.Current
	Credentials Credentials
	// RequestKeys seal the requests that are kept.
	RequestKeys *RequestKeys
	Consent     Consent
	Places      *Places
	// Metrics are of all that this process does. Whoever serves them registers them.
	Metrics *metrics.Metrics

	stores  *StoreReconciler
	budgets *BudgetReconciler
	tools   *ToolReconciler
	holds   *HoldReconciler
	intents *IntentReconciler
	client  client.Client

	beginning *beginning
}

// CacheOptions keep the cache to what is read: in the operator's namespace, one
// ConfigMap and the gateways' Leases; in all, what was deployed for stores.
func CacheOptions(namespace string) cache.Options {
	read := map[client.Object]cache.ByObject{
		&corev1.ConfigMap{}: {
			Namespaces: map[string]cache.Config{namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, MemoryName)}},
		},
		&coordinationv1.Lease{}: {
			Namespaces: map[string]cache.Config{namespace: {LabelSelector: labels.SelectorFromSet(labels.Set{gatewayLabel: "true"})}},
		},
	}
	maps.Copy(read, DeployedCache())
	maps.Copy(read, fencesCache(namespace))
	// Who owns which field is not asked, and is a third of an object.
	return cache.Options{ByObject: read, DefaultTransform: cache.TransformStripManagedFields()}
}

// LiveClient reads and writes without a cache, and refuses fields that the API server does not know.
func LiveClient(cfg *rest.Config, mgr ctrl.Manager) (client.Client, error) {
	c, err := client.New(cfg, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper()})
	if err != nil {
		return nil, fmt.Errorf("make the uncached client: %w", err)
	}
	return client.WithFieldValidation(c, metav1.FieldValidationStrict), nil
}

// Setup adds the controllers and the sweep to the manager.
func Setup(mgr ctrl.Manager, live client.Client, o Options) (*Operator, error) {
	cached := client.WithFieldValidation(mgr.GetClient(), metav1.FieldValidationStrict)
	recorder := mgr.GetEventRecorder("holdfast")
	places, err := NewPlaces(context.Background(), mgr, o.Namespace)
	if err != nil {
		return nil, err
	}
	leads := leading(mgr, o.Controllers)
	engines := guard.NewEngines()
	memory := NewMemory(o.Namespace, cached, live, leads)
	gateways := NewGateways(o.Namespace, cached, live)
	worklist := NewWorklist(cached, live, engines, recorder, leads)
	credentials := Credentials{Live: live}

	op := &Operator{
		Engines: engines, Policies: &policy.Current{},
		Credentials: credentials, RequestKeys: NewRequestKeys(o.Namespace, live), Consent: Consent{Live: live}, Places: places,
		client: cached,
	}
	op.Metrics = metrics.New(metrics.Options{Tools: op.toolNames})
	worklist.Metrics = op.Metrics
	o.Guard.Observe = func(c guard.Change) {
		countLate(op.Metrics, c)
		worklist.Observe(c)
	}
	if o.EvidenceLog.GetSink() == nil {
		o.EvidenceLog = ctrl.Log
	}
	o.Guard.Evidence = evidence(o.EvidenceLog.WithName("evidence"), op.Metrics)
	dial := o.Dial
	if dial == nil {
		dial = func(ctx context.Context, _, network, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, address)
		}
	}
	op.stores = &StoreReconciler{
		Client: cached, Live: live, Memory: memory, Engines: engines, Policies: op.Policies, Events: recorder, DataDir: o.DataDir, Options: o.Guard, Metrics: op.Metrics,
		Credentials: credentials, Dial: dial, StoreTimeout: o.StoreTimeout,
		Gateway: o.Gateway, AllInOne: o.Gateway && o.Controllers, Leading: leads,
	}
	var fences *Fences
	if o.Controllers {
		op.stores.Deployer = NewDeployer(cached, live, o.Namespace, dial)
		fences = NewFences(cached, live, o.Namespace)
	}
	op.tools = &ToolReconciler{Client: cached, Memory: memory, Policies: op.Policies, Gateways: gateways, RequestKeys: op.RequestKeys, Leading: leads, Fences: fences}
	op.beginning = op.newBeginning()
	reconcilers := []interface{ SetupWithManager(ctrl.Manager) error }{op.stores, op.tools}
	runnables := []manager.Runnable{worklist}
	if o.Controllers {
		op.budgets = &BudgetReconciler{Client: cached, Memory: memory, Engines: engines, Metrics: op.Metrics}
		op.holds = &HoldReconciler{
			Client: cached, Live: live, Engines: engines, Memory: memory, Gate: NewGate(live), Events: recorder,
			Looked: op.stores.looked, Look: worklist.look,
		}
		op.intents = &IntentReconciler{
			Client: cached, Live: live, Engines: engines, Gate: NewGate(live), Served: op.Served, Events: recorder, Look: worklist.lookIntents,
		}
		reconcilers = append(reconcilers, op.budgets, op.holds, op.intents)
		runnables = append(runnables, gateways, op.RequestKeys, &Collector{
			Client: cached, Live: live, Engines: engines, Leading: leads, After: cmp.Or(o.CollectAfter, collectAfter),
		})
		if o.Service != "" {
			certificate, err := NewCertificate(o.Namespace, o.Service, o.ServiceNames, live)
			if err != nil {
				return nil, err
			}
			runnables = append(runnables, certificate)
		}
	}
	if o.Gateway {
		presence := NewPresence(o.Namespace, o.GatewayName, cached, live, op.serves)
		op.tools.Programmed = presence.Poke
		runnables = append(runnables, op.beginning, presence, Sweep{Engines: engines})
	}
	for _, r := range reconcilers {
		if err := r.SetupWithManager(mgr); err != nil {
			return nil, fmt.Errorf("set up %T: %w", r, err)
		}
	}
	for _, r := range runnables {
		if err := mgr.Add(r); err != nil {
			return nil, fmt.Errorf("add %T: %w", r, err)
		}
	}
	return op, nil
}

// serves says at which generation this gateway has a tool. It has come to one only once
// it has opened the tool's store, or has been refused by it.
func (o *Operator) serves(nn types.NamespacedName) (types.UID, int64, bool) {
	uid, generation, ok := o.tools.Serves(nn)
	if t, err := o.Policies.Load().Tool(nn.Namespace, nn.Name); ok && err == nil && t.Store != "" {
		ok = o.stores.looked(types.NamespacedName{Namespace: nn.Namespace, Name: t.Store})
	}
	return uid, generation, ok
}

// Close closes the stores. Call it when the gateway has drained and the manager has ended.
func (o *Operator) Close() error { return o.stores.Close() }
