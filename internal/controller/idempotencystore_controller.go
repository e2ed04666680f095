// This file opens the stores and decides whether each may be used.
//
// What must hold: a store serves only after its epoch is durably remembered, and only
// while it is the one remembered. A memory that was lost is a payment made twice. Every
// process judges for itself; the leader alone remembers, and writes the status.

package controller

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// The reasons of an IdempotencyStore's conditions.
const (
	reasonServing     = "Serving"
	reasonKnown       = "Known"
	reasonMemoryLost  = "MemoryLost"
	reasonUnavailable = "StoreUnavailable"
	reasonClockJumped = "ClockJumped"
	reasonDeploying   = "Deploying"
	reasonAccepting   = "Accepting"
	reasonAllInOne    = "NeedsAllInOne"
)

const (
	// storeLook is how often an open store is looked at.
	storeLook = 10 * time.Second
	// storeRetry is how soon one is looked at again that could not be asked.
	storeRetry = 2 * time.Second
	// busyAgain is how soon a store is tried again that is to be closed and still in use.
	busyAgain = time.Second
	// storesAtOnce keeps a store that does not answer from keeping the others waiting.
	storesAtOnce = 8
	// lookTimeout bounds one look at a store.
	lookTimeout = 30 * time.Second
	// sightingEvery is how often it is remembered how far a store has come.
	sightingEvery = 30 * time.Second
	// maxClockStep is how far a store's clock may go from what it should show.
	maxClockStep = time.Hour
)

// errNeedsAllInOne: the embedded store is a file of the process that has both roles.
var errNeedsAllInOne = fmt.Errorf("%w: the embedded store is a file of one process that is controllers and gateway both: run it so, or use redis or postgres", store.ErrUnavailable)

// StoreReconciler keeps one engine for each IdempotencyStore.
type StoreReconciler struct {
	Client  client.Client
	Live    client.Client
	Memory  *Memory
	Engines *guard.Engines
	// Policies are what the tools say, for what is held again after a loss.
	Policies *policy.Current
	Events   events.EventRecorder
	// Credentials read the Secrets of stores, and Dial reaches their servers.
	Credentials Credentials
	Dial        Dial
	// Deployer makes what a deployed store runs on.
	Deployer *Deployer
	// DataDir is where the embedded stores' files are.
	DataDir string
	// Gateway and AllInOne say what this process is, and Leading whether it writes for all.
	Gateway, AllInOne bool
	Leading           func() bool
	// StoreTimeout bounds a question to a store's server; 0: the driver's own.
	StoreTimeout time.Duration
	Options      guard.Options
	// Metrics count the round trips, and show what was found; nil: nobody asks.
	Metrics *metrics.Metrics

	mu   sync.Mutex
	open map[types.NamespacedName]*openStore
	// old are stores whose settings have changed, until nothing of them is in use.
	old []*openStore
	// seen are the stores that were served or refused since the process began.
	seen map[types.NamespacedName]bool
	// lostSince says since when this process has known of a loss, by the lost epoch.
	lostSince map[types.NamespacedName]lostSince
	// longest is the longest time that an attempt of the store's tools could need.
	longest map[types.NamespacedName]time.Duration
	// told is what this process last logged of a store.
	told map[types.NamespacedName]string
	done bool
}

// lostSince is when a loss was first seen.
type lostSince struct {
	epoch string
	at    time.Time
}

// SetupWithManager watches the stores, what they run on, and the operator's memory.
func (r *StoreReconciler) SetupWithManager(mgr ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.IdempotencyStore{}).
		Watches(&corev1.ConfigMap{}, enqueueAll(r.Client, &v1alpha1.IdempotencyStoreList{}), builder.WithPredicates(isMemory(r.Memory))).
		WatchesRawSource(onElection(mgr, r.Client, &v1alpha1.IdempotencyStoreList{})).
		// Every gateway opens the stores.
		WithOptions(ctrlcontroller.Options{NeedLeaderElection: ptr.To(false), MaxConcurrentReconciles: storesAtOnce})
	if r.Deployer != nil {
		r.Deployer.Watches(b)
	}
	return b.Complete(r)
}

// visit is what one look at a store has found.
type visit struct {
	// epoch is that of the memory that the object has, also where it is lost.
	epoch string
	// accepting says how far the acceptance of a loss has come.
	accepting string
	found     store.Durability
	// judged says that found is of this visit.
	judged   bool
	deployed *Deployed
}

// Reconcile opens the store if need be, judges it, and serves it or says why not.
func (r *StoreReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	nn := req.NamespacedName
	r.closeOld()
	var obj v1alpha1.IdempotencyStore
	if err := r.Client.Get(ctx, nn, &obj); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, err
		}
		r.unmeasure(nn)
		// The records stay: they are the memory of whoever makes the store again.
		r.Engines.Remove(nn.Namespace, nn.Name)
		r.mu.Lock()
		delete(r.seen, nn)
		delete(r.told, nn)
		delete(r.lostSince, nn)
		delete(r.longest, nn)
		r.mu.Unlock()
		busy, err := r.retire(nn)
		if busy {
			return ctrl.Result{RequeueAfter: busyAgain}, nil
		}
		return ctrl.Result{}, err
	}
	if !r.Gateway && !r.Leading() {
		return ctrl.Result{}, nil
	}
	v, failed := r.look(ctx, &obj)
	r.mu.Lock()
	if r.seen == nil {
		r.seen = map[types.NamespacedName]bool{}
	}
	r.seen[nn] = true
	r.mu.Unlock()
	r.tell(ctx, nn, failed)
	r.measure(nn, v, failed)
	after := ctrl.Result{RequeueAfter: storeLook}
	if failed != nil && !errors.Is(failed, store.ErrMemoryLost) || v.accepting != "" {
		after.RequeueAfter = storeRetry
	}
	if !r.Leading() {
		return after, nil
	}
	if err := r.status(ctx, &obj, v, failed); err != nil {
		return ctrl.Result{}, err
	}
	return after, nil
}

// tell logs what has changed about a store that is refused.
func (r *StoreReconciler) tell(ctx context.Context, nn types.NamespacedName, failed error) {
	text := ""
	if failed != nil {
		text = failed.Error()
	}
	r.mu.Lock()
	was := r.told[nn]
	if r.told == nil {
		r.told = map[types.NamespacedName]string{}
	}
	r.told[nn] = text
	r.mu.Unlock()
	switch {
	case text != "" && text != was:
		log.FromContext(ctx).Error(failed, "the store is refused")
	case text == "" && was != "":
		log.FromContext(ctx).Info("the store serves again")
	}
}

// status writes what was found.
func (r *StoreReconciler) status(ctx context.Context, obj *v1alpha1.IdempotencyStore, v visit, failed error) error {
	next := v1alpha1.IdempotencyStoreStatus{ObservedGeneration: obj.Generation, Epoch: obj.Status.Epoch, Durability: obj.Status.Durability}
	set := newConditions(obj.Status.Conditions, obj.Generation)
	if v.epoch != "" {
		next.Epoch = v.epoch
	}
	lost := errors.Is(failed, store.ErrMemoryLost)
	ready := func(reason string, err error) {
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reason, err.Error())
	}
	switch {
	case failed == nil:
		set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing, "The store is open and its memory is the one it had.")
	case lost && v.accepting != "":
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonAccepting, v.accepting)
	case lost:
		ready(reasonMemoryLost, failed)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonMemoryLost, "A person must restore the store or accept that its memory is lost.")
	case errors.Is(failed, guard.ErrClockJumped):
		ready(reasonClockJumped, failed)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonClockJumped, "A person must set the store's clock right, or accept the time that it shows.")
	case errors.Is(failed, store.ErrNotDurable):
		ready(reasonLoses, failed)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonLoses, "A person must make the store durable, or choose durabilityPolicy Warn.")
	case errors.Is(failed, errNeedsAllInOne):
		ready(reasonAllInOne, failed)
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonAllInOne, failed.Error())
	case v.deployed != nil && !v.deployed.Ready:
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonDeploying, v.deployed.Message)
	default:
		ready(reasonUnavailable, failed)
	}
	switch {
	case lost:
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost, failed.Error())
	case failed == nil, errors.Is(failed, guard.ErrClockJumped), errors.Is(failed, store.ErrNotDurable):
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue, reasonKnown, "The store carries the epoch that is remembered for it.")
	default:
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionUnknown, reasonUnavailable, "The store could not be read.")
	}
	if v.judged {
		next.Durability = durabilityStatus(v.found)
		durableCondition(set, v.found.Findings, obj.Spec.DurabilityPolicy)
	} else if was := find(obj.Status.Conditions, v1alpha1.ConditionDurable); was != nil && (was.Reason == reasonLoses ||
		was.ObservedGeneration == obj.Generation && (was.Reason == reasonDurable || was.Reason == reasonNotRefused)) {
		// What was found stands until somebody has looked again.
		set.set(v1alpha1.ConditionDurable, was.Status, was.Reason, was.Message)
	} else {
		set.set(v1alpha1.ConditionDurable, metav1.ConditionUnknown, reasonNotJudged, "The store could not be looked at.")
	}
	if v.deployed != nil {
		is := metav1.ConditionFalse
		if v.deployed.Ready {
			is = metav1.ConditionTrue
		}
		set.set(v1alpha1.ConditionDeployed, is, v.deployed.Reason, v.deployed.Message)
	}
	next.Conditions = set.list
	was := obj.Status
	was.Conditions = sorted(was.Conditions)
	wrote, err := applyStatus(ctx, r.Client, obj, &was, &next, ownerStore)
	if err != nil {
		return err
	}
	if now := find(next.Conditions, v1alpha1.ConditionStalled); wrote && now != nil && !stalledFor(was.Conditions, now.Reason) {
		r.Events.Eventf(obj, nil, corev1.EventTypeWarning, now.Reason, "Refuse", "%s", clip(failed.Error(), maxNote))
	}
	return nil
}

func stalledFor(list []metav1.Condition, reason string) bool {
	c := find(list, v1alpha1.ConditionStalled)
	return c != nil && c.Reason == reason
}

// look puts the store's engine into service if the store may be trusted, and takes it
// out of service if it may not.
func (r *StoreReconciler) look(parent context.Context, obj *v1alpha1.IdempotencyStore) (v visit, err error) {
	ctx, cancel := context.WithTimeout(parent, lookTimeout)
	defer cancel()
	nn := client.ObjectKeyFromObject(obj)
	fail := func(err error) error {
		if ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded) { // else the process is ending, which says nothing of the store
			r.Engines.Fail(nn.Namespace, nn.Name, err)
		}
		return err
	}
	// failNew refuses a store that is not served yet. One that is served stays so: nothing
	// says that it is another memory now, and its driver answers for itself.
	failNew := func(err error) error {
		if o := r.held(nn); o == nil || !o.served {
			return fail(err)
		}
		return err
	}
	if obj.Spec.Embedded != nil && !r.AllInOne {
		return v, fail(errNeedsAllInOne)
	}
	if r.Leading() && workload.Deployed(obj) {
		d, err := r.Deployer.Apply(ctx, obj)
		if err != nil {
			return v, failNew(fmt.Errorf("%w: what the store runs on could not be made: %w", store.ErrUnavailable, err))
		}
		v.deployed = &d
	}
	remembered, err := r.Memory.stores(ctx)
	if err != nil {
		return v, failNew(fmt.Errorf("%w: %w", store.ErrUnavailable, err))
	}
	known, err := remembered.with(nn, v.deployed.says())
	if err != nil {
		return v, fail(fmt.Errorf("%w: %w", store.ErrUnavailable, err))
	}
	v.epoch = known.epoch(nn)
	s, err := r.settingsOf(ctx, obj)
	if err != nil {
		return v, failNew(fmt.Errorf("%w: %w", store.ErrUnavailable, err))
	}
	o, standing, err := r.opened(ctx, obj, s, known)
	switch {
	case errors.Is(err, store.ErrMemoryLost):
		v.epoch = lostEpoch(obj, known)
		// It is the memory under which this process has written that lacks something. If
		// another one was accepted since, that one is whole.
		missing := ""
		if o := r.held(nn); o != nil && o.engine != nil && o.file == nil && o.identity.Epoch == known.epoch(nn) {
			missing = o.identity.Epoch
		}
		return v, errors.Join(fail(err), r.disown(ctx, nn, s, missing))
	case err != nil:
		return v, failNew(err)
	}
	l, err := r.judge(ctx, obj, standing, known)
	if errors.Is(err, store.ErrMemoryLost) {
		v.epoch = l
		_ = fail(err)
		if o != nil && o.engine != nil {
			o.engine.Retire()
			o.served = false
		}
		if l != "" && standing.Epoch == l {
			// It lacks writes, and others may not know it yet. A store of which nothing is wrong but that
			// another one has its epoch is not touched.
			return v, errors.Join(err, r.disown(ctx, nn, s, standing.Epoch))
		}
		if r.Leading() && l != "" {
			if other := r.sameDomain(nn, obj, standing, remembered, known); other != nil {
				return v, errors.Join(err, other)
			}
			return r.accepted(parent, obj, o, standing, known, v, err)
		}
		return v, err
	}
	if err != nil {
		return v, failNew(err)
	}
	if err := r.sameDomain(nn, obj, standing, remembered, known); err != nil {
		return v, fail(err)
	}
	if is := remembered.kept(nn); standing.Epoch == "" || is.Epoch == "" || is.KeyDomain == "" || is.Loss != known.kept(nn).Loss {
		if !r.Leading() {
			return v, failNew(fmt.Errorf("%w: the store is not in use yet: the controllers begin it", store.ErrUnavailable))
		}
		if v.deployed != nil && v.deployed.kept == nil {
			// There it may say that a memory was lost, or that there was one.
			return v, failNew(fmt.Errorf("%w: nothing is remembered of the store, and what its Secret says of it could not be read: %s", store.ErrUnavailable, v.deployed.Message))
		}
		if standing, err = r.begin(ctx, obj, o, standing, known, v.deployed); err != nil {
			return v, fail(err)
		}
		if known, err = r.known(ctx, nn, v.deployed); err != nil {
			return v, failNew(fmt.Errorf("%w: %w", store.ErrUnavailable, err))
		}
	}
	v.epoch = standing.Epoch
	if r.Leading() {
		if known, err = r.spend(ctx, obj, standing.Epoch, known, v.deployed); err != nil {
			return v, failNew(fmt.Errorf("%w: %w", store.ErrUnavailable, err))
		}
	}
	if err := r.engine(ctx, obj, o, standing, known); err != nil {
		return v, failNew(err)
	}
	if err := r.keep(ctx, obj, v.deployed, known.kept(nn)); err != nil {
		return v, failNew(fmt.Errorf("%w: note in the store's Secret what is remembered of it: %w", store.ErrUnavailable, err))
	}
	if err := r.judgeClock(ctx, obj, o, standing, known); errors.Is(err, guard.ErrClockJumped) {
		return v, r.refuse(nn, o, err)
	} else if err != nil {
		return v, failNew(err)
	}
	v.found, err = r.judgeDurability(ctx, obj, o)
	if err != nil {
		return v, failNew(fmt.Errorf("%w: judge how durable it is: %w", store.ErrUnavailable, err))
	}
	v.judged = true
	if err := notDurable(obj, v.found.Findings, r.Leading()); err != nil {
		return v, r.refuse(nn, o, err)
	}
	o.engine.Resume()
	r.serve(nn, o)
	return v, nil
}

// known is what is remembered of the stores, with what the Secret of this one says. Whoever does
// not lead finds that in the operator's memory, or waits for it.
func (r *StoreReconciler) known(ctx context.Context, nn types.NamespacedName, d *Deployed) (storeMemory, error) {
	remembered, err := r.Memory.stores(ctx)
	if err != nil {
		return nil, err
	}
	return remembered.with(nn, d.says())
}

// sameDomain refuses what the Secret alone says of the key domain where the server shows another
// one: by the wrong one the provider would take what was paid for something new.
func (r *StoreReconciler) sameDomain(nn types.NamespacedName, obj *v1alpha1.IdempotencyStore, is store.Standing, remembered, known storeMemory) error {
	says := known.keyDomain(nn)
	if remembered.keyDomain(nn) != "" || says == "" || is.KeyDomain == "" || says == is.KeyDomain {
		return nil
	}
	return fmt.Errorf("%w: Secret %s/%s tells of another key domain than the store's server, and nothing else is remembered. "+
		"To go on with the server's, remove the annotation %s. If the server has the wrong one, because its memory was exchanged and that loss accepted, "+
		"write the right one in the %s, under the key %q", store.ErrUnavailable, nn.Namespace, workload.SecretName(obj), workload.KeyDomainAnnotation, r.Memory, memoryKey(keyDomainOf, nn))
}

// keep notes in a deployed store's Secret what is remembered of it.
func (r *StoreReconciler) keep(ctx context.Context, obj *v1alpha1.IdempotencyStore, d *Deployed, is workload.Kept) error {
	if d == nil || d.kept == nil || d.kept.Says(is) {
		return nil
	}
	err := r.Deployer.keep(ctx, obj, is)
	if err == nil {
		if is.Loss == "" {
			is.Loss = d.kept.Loss // it stays in the Secret
		}
		*d.kept = is
		return nil
	}
	if d.kept.Identity().Says(is.Identity()) {
		// How far it has come is noted later, and stands in the ConfigMap.
		log.FromContext(ctx).Error(err, "how far the store has come could not be noted in its Secret")
		return nil
	}
	return err
}

// refuse lets no call in. What was let in can be settled, and holds be resolved.
func (r *StoreReconciler) refuse(nn types.NamespacedName, o *openStore, err error) error {
	o.engine.Refuse(err)
	r.serve(nn, o)
	return err
}

func (r *StoreReconciler) serve(nn types.NamespacedName, o *openStore) {
	o.served = true
	r.Engines.Put(nn.Namespace, nn.Name, o.engine)
}

// after is how an engine is set up after this loss.
func (r *StoreReconciler) after(l loss) guard.Options {
	o := r.Options
	o.LostAt, o.ForgetLost = l.at, l.forget
	return o
}

// engine gives the store an engine, if it has none that is as it must be now.
func (r *StoreReconciler) engine(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore, standing store.Standing, known storeMemory) error {
	nn := client.ObjectKeyFromObject(obj)
	l, err := known.loss(nn)
	if err != nil {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	// The key domain is the one remembered: it outlives a loss of memory.
	id := store.Identity{Epoch: standing.Epoch, KeyDomain: known.keyDomain(nn)}
	last, err := known.seen(nn)
	if err != nil {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	if o.engine == nil || o.identity != id || !o.lost.at.Equal(l.at) || o.lost.forget != l.forget {
		options := r.after(l)
		if !last.clock.IsZero() {
			// So that an engine that begins while the clock is wrong ages and purges nothing.
			options.StoreClock = standing.Now.Add(-o.step(standing, last))
		}
		o.engine, o.identity, o.lost, o.served = guard.New(o.store, id, options), id, l, false
		log.FromContext(ctx).Info("the store is open", "epoch", id.Epoch, "store", r.place(obj))
	}
	return nil
}

// notDurable says why calls are refused: an acknowledged write could be lost, and nobody
// has accepted that.
func notDurable(obj *v1alpha1.IdempotencyStore, found []store.Finding, leads bool) error {
	text := ""
	if f := losing(found); f != nil {
		text = f.Text
	} else if c := find(obj.Status.Conditions, v1alpha1.ConditionDurable); !leads {
		// The leader knows more.
		switch {
		case c != nil && (c.Reason == reasonLoses || c.Reason == reasonNotRefused):
			text = c.Message
		case judgedByCluster(obj) && (c == nil || c.ObservedGeneration != obj.Generation || c.Status != metav1.ConditionTrue):
			text = "the controllers have not judged yet what the cluster knows of it"
		}
	}
	if text == "" || obj.Spec.DurabilityPolicy == v1alpha1.DurabilityWarn {
		return nil
	}
	return fmt.Errorf("%w (IdempotencyStore %s): %s. Or accept that a payment may be forgotten and made twice, with spec.durabilityPolicy: Warn", store.ErrNotDurable, obj.Name, text)
}

// accepted goes on without the lost memory if a person has said so since it was lost.
func (r *StoreReconciler) accepted(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore, is store.Standing, known storeMemory, v visit, lost error) (visit, error) {
	nn := client.ObjectKeyFromObject(obj)
	spent := known[memoryKey(spentOf, nn)] == v.epoch
	switch {
	case obj.Spec.AcceptEpoch != v.epoch:
		if spent {
			err := r.Memory.spend(ctx, nn, "")
			if err == nil {
				kept := v.deployed.says()
				kept.Spent = ""
				err = r.keep(ctx, obj, v.deployed, kept)
			}
			return v, errors.Join(lost, err)
		}
		return v, lost
	case spent:
		return v, fmt.Errorf("%w. spec.acceptEpoch has this value since before the loss: take it away, and then set it again", lost)
	}
	return r.accept(ctx, obj, o, is, known, v, lost)
}

// spend takes note of what a person has said of this memory or an earlier one while it serves.
func (r *StoreReconciler) spend(ctx context.Context, obj *v1alpha1.IdempotencyStore, epoch string, known storeMemory, d *Deployed) (storeMemory, error) {
	nn := client.ObjectKeyFromObject(obj)
	r.mu.Lock()
	delete(r.lostSince, nn)
	r.mu.Unlock()
	l, err := known.loss(nn)
	if err != nil {
		return known, err
	}
	forgets := l.epoch != "" && !l.forget && obj.Spec.ForgetEpoch == l.epoch
	if forgets {
		err = r.Memory.forget(ctx, nn, l)
	}
	spends := obj.Spec.AcceptEpoch == epoch && known[memoryKey(spentOf, nn)] != epoch
	if err == nil && spends {
		err = r.Memory.spend(ctx, nn, epoch)
	}
	if err != nil || !forgets && !spends {
		return known, err
	}
	return r.known(ctx, nn, d)
}

// begin gives a store its identity at its first use, and remembers it.
func (r *StoreReconciler) begin(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore, standing store.Standing, known storeMemory, d *Deployed) (store.Standing, error) {
	nn := client.ObjectKeyFromObject(obj)
	if standing.Epoch == "" {
		// The store first, then the memory of it: what is between the two is adopted at
		// the next visit, and never read as a loss.
		domain := known.keyDomain(nn)
		if domain == "" {
			domain = rand.Text()
		}
		id, err := o.store.Initialise(ctx, store.Identity{Epoch: rand.Text(), KeyDomain: domain})
		if err != nil {
			return standing, fmt.Errorf("give the store its identity: %w", err)
		}
		standing.Identity = id
	}
	id := standing.Identity
	if domain := known.keyDomain(nn); domain != "" {
		id.KeyDomain = domain
	}
	_, unreadable := known.loss(nn)
	seen, err := known.seen(nn)
	if err := errors.Join(unreadable, err); err != nil {
		return standing, fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	if seen.clock.IsZero() || known.epoch(nn) != standing.Epoch {
		seen = sight(standing) // else its clock is still to be judged by what was seen
	}
	// The Secret before the ConfigMap, with which the gateways serve: what they pay is then never
	// forgotten with the operator's namespace.
	kept := known.kept(nn)
	kept.Epoch, kept.KeyDomain, kept.Seen = id.Epoch, id.KeyDomain, seen.String()
	if err := r.keep(ctx, obj, d, kept); err != nil {
		return standing, fmt.Errorf("%w: note in the store's Secret what is remembered of it: %w", store.ErrUnavailable, err)
	}
	if err := r.Memory.rememberStore(ctx, nn, id, kept.Loss, seen); err != nil {
		return standing, fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return standing, nil
}

// opened returns the open store and how far it has come. What is open by other settings
// than the present ones gives way; it is closed once nothing of it is in use.
func (r *StoreReconciler) opened(ctx context.Context, obj *v1alpha1.IdempotencyStore, s settings, known storeMemory) (*openStore, store.Standing, error) {
	nn := client.ObjectKeyFromObject(obj)
	o := r.held(nn)
	if o != nil && o.settings != s.digest {
		r.replace(nn, o)
		o = nil
	}
	if o != nil && o.file != nil {
		if err := r.stillThere(nn, o); err != nil {
			return nil, store.Standing{}, err
		}
	}
	if o == nil {
		var err error
		o, err = r.openAs(s, known.epoch(nn) != "")
		if errors.Is(err, errNoFile) {
			return nil, store.Standing{}, nil // as empty as a new one would be
		}
		if err != nil {
			return nil, store.Standing{}, fmt.Errorf("%w: %w", store.ErrUnavailable, err)
		}
		if err := r.hold(nn, o); err != nil {
			return nil, store.Standing{}, errors.Join(err, o.store.Close())
		}
	}
	standing, err := o.store.Standing(ctx)
	if err != nil && o.file != nil && ctx.Err() == nil {
		// Nothing can be written to it any more, whatever is in hand: opening it anew may help.
		err = fmt.Errorf("the open store does not answer: %w", err)
		r.Engines.Fail(nn.Namespace, nn.Name, err)
		return nil, standing, errors.Join(err, r.close(nn))
	}
	return o, standing, err
}

// stillThere says whether the embedded store's file is still the one that is open.
func (r *StoreReconciler) stillThere(nn types.NamespacedName, o *openStore) error {
	file, err := os.Stat(r.path(nn))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(file, o.file) {
		err := fmt.Errorf("%w: %s was taken away under the running process: what is written now would be lost with it", store.ErrMemoryLost, r.path(nn))
		r.Engines.Fail(nn.Namespace, nn.Name, err)
		// While it is busy it stays open, and the next visit judges it again.
		_, failed := r.retire(nn)
		return errors.Join(err, failed)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	return nil
}

// looked says that the store was served or refused since the process began.
func (r *StoreReconciler) looked(nn types.NamespacedName) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seen[nn]
}

func (r *StoreReconciler) held(nn types.NamespacedName) *openStore {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open[nn]
}

func (r *StoreReconciler) hold(nn types.NamespacedName, o *openStore) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return fmt.Errorf("%w: the process is ending", store.ErrUnavailable)
	}
	if r.open == nil {
		r.open = map[types.NamespacedName]*openStore{}
	}
	r.open[nn] = o
	return nil
}

// replace takes a store out of service whose settings have changed.
func (r *StoreReconciler) replace(nn types.NamespacedName, o *openStore) {
	if o.engine != nil {
		o.engine.Retire()
	}
	r.Engines.Fail(nn.Namespace, nn.Name, fmt.Errorf("%w: its settings have changed, and it is being opened anew", store.ErrUnavailable))
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.open, nn)
	r.old = append(r.old, o)
}

// closeOld closes those that were replaced and are no longer in use.
func (r *StoreReconciler) closeOld() {
	r.mu.Lock()
	var idle, busy []*openStore
	for _, o := range r.old {
		if o.engine != nil && o.engine.Busy() {
			busy = append(busy, o)
		} else {
			idle = append(idle, o)
		}
	}
	r.old = busy
	r.mu.Unlock()
	for _, o := range idle {
		if err := o.store.Close(); err != nil {
			ctrl.Log.WithName("stores").Error(err, "a store that was replaced could not be closed")
		}
	}
}

// retire lets nobody use the store any more, and closes it once nothing is under way:
// the result of an attempt that was sent must find it open. Each attempt keeps it so
// until a minute after its lease at the latest.
func (r *StoreReconciler) retire(nn types.NamespacedName) (busy bool, err error) {
	if o := r.held(nn); o != nil && o.engine != nil {
		o.engine.Retire()
		if o.engine.Busy() {
			return true, nil
		}
	}
	return false, r.close(nn)
}

func (r *StoreReconciler) close(nn types.NamespacedName) error {
	r.mu.Lock()
	o := r.open[nn]
	delete(r.open, nn)
	r.mu.Unlock()
	if o == nil {
		return nil
	}
	return o.store.Close()
}

// Close closes all stores for good. Call it when nothing uses them any more.
func (r *StoreReconciler) Close() error {
	r.mu.Lock()
	open, old := r.open, r.old
	r.open, r.old, r.done = nil, nil, true
	r.mu.Unlock()
	var errs []error
	for nn, o := range open {
		r.Engines.Fail(nn.Namespace, nn.Name, fmt.Errorf("%w: the process is ending", store.ErrUnavailable))
		errs = append(errs, o.store.Close())
	}
	for _, o := range old {
		errs = append(errs, o.store.Close())
	}
	return errors.Join(errs...)
}
