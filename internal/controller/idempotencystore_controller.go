// This file opens the stores and decides whether each is the memory that it was.
//
// What must hold: a store serves only after its epoch is durably remembered, and only
// while it is the one remembered. A memory that was lost is a payment made twice.

package controller

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// The reasons of an IdempotencyStore's conditions.
const (
	reasonServing     = "Serving"
	reasonKnown       = "Known"
	reasonMemoryLost  = "MemoryLost"
	reasonUnavailable = "StoreUnavailable"
)

// storeLook is how often an open store is looked at, and one that is refused tried again.
const storeLook = 10 * time.Second

// busyAgain is how soon a store is tried again that is to be closed and still in use.
const busyAgain = time.Second

// StoreReconciler keeps one engine for each IdempotencyStore.
type StoreReconciler struct {
	Client  client.Client
	Live    client.Client
	Memory  *Memory
	Engines *guard.Engines
	Events  events.EventRecorder
	// DataDir is where the embedded stores' files are.
	DataDir string
	Options guard.Options

	mu   sync.Mutex
	open map[types.NamespacedName]*openStore
	// seen are the stores that were served or refused since the process began.
	seen map[types.NamespacedName]bool
	done bool
}

// openStore is a store whose file this process holds.
type openStore struct {
	store    store.Store
	file     os.FileInfo
	identity store.Identity
	engine   *guard.Engine
}

// SetupWithManager watches the stores and the operator's memory.
func (r *StoreReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.IdempotencyStore{}).
		Watches(&corev1.ConfigMap{}, enqueueAll(r.Client, &v1alpha1.IdempotencyStoreList{}), builder.WithPredicates(isMemory(r.Memory))).
		Complete(r)
}

// Reconcile opens the store if need be, judges it, and serves it or says why not.
func (r *StoreReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var obj v1alpha1.IdempotencyStore
	if err := r.Client.Get(ctx, req.NamespacedName, &obj); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, err
		}
		// The file stays: it is the memory of whoever makes the store again.
		r.Engines.Remove(req.Namespace, req.Name)
		busy, err := r.retire(req.NamespacedName)
		if busy {
			return ctrl.Result{RequeueAfter: busyAgain}, nil
		}
		return ctrl.Result{}, err
	}
	next := v1alpha1.IdempotencyStoreStatus{ObservedGeneration: obj.Generation, Epoch: obj.Status.Epoch}
	set := newConditions(obj.Status.Conditions, obj.Generation)

	epoch, failed := r.serve(ctx, &obj)
	if epoch != "" {
		next.Epoch = epoch
	}
	r.mu.Lock()
	if r.seen == nil {
		r.seen = map[types.NamespacedName]bool{}
	}
	r.seen[req.NamespacedName] = true
	r.mu.Unlock()
	lost := errors.Is(failed, store.ErrMemoryLost)
	switch {
	case failed == nil:
		set.set(v1alpha1.ConditionReady, metav1.ConditionTrue, reasonServing, "The store is open and its memory is the one it had.")
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionTrue, reasonKnown, "The store carries the epoch that is remembered for it.")
	case lost:
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonMemoryLost, failed.Error())
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionFalse, reasonMemoryLost, failed.Error())
		set.set(v1alpha1.ConditionStalled, metav1.ConditionTrue, reasonMemoryLost, "A person must restore the store or accept that its memory is lost.")
	default:
		set.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonUnavailable, failed.Error())
		set.set(v1alpha1.ConditionEpochAccepted, metav1.ConditionUnknown, reasonUnavailable, "The store could not be read.")
	}
	next.Conditions = set.list
	was := obj.Status
	was.Conditions = sorted(was.Conditions)
	wrote, err := applyStatus(ctx, r.Client, &obj, &was, &next, ownerStore)
	if err != nil {
		return ctrl.Result{}, err
	}
	if wrote && lost && !stalledFor(was.Conditions, reasonMemoryLost) {
		log.FromContext(ctx).Error(failed, "the store is refused")
		r.Events.Eventf(&obj, nil, corev1.EventTypeWarning, reasonMemoryLost, "Refuse", "%s", clip(failed.Error(), maxNote))
	}
	if failed != nil && !lost {
		return ctrl.Result{}, failed // it may pass: try again, with backoff
	}
	return ctrl.Result{RequeueAfter: storeLook}, nil
}

func stalledFor(list []metav1.Condition, reason string) bool {
	c := find(list, v1alpha1.ConditionStalled)
	return c != nil && c.Reason == reason
}

// serve puts the store's engine into service if the store may be trusted, and takes
// it out of service if it may not. It returns the epoch that is the store's own.
func (r *StoreReconciler) serve(ctx context.Context, obj *v1alpha1.IdempotencyStore) (string, error) {
	nn := client.ObjectKeyFromObject(obj)
	refuse := func(err error) error {
		if ctx.Err() != nil {
			return err // the process is ending, which says nothing of the store
		}
		r.Engines.Fail(nn.Namespace, nn.Name, err)
		// While it is busy it stays open, and the next visit judges it again.
		_, failed := r.retire(nn)
		return errors.Join(err, failed)
	}
	known, err := r.Memory.stores(ctx)
	if err != nil {
		// What is served stays so: nothing says that it is another memory now.
		if o := r.held(nn); o == nil {
			r.Engines.Fail(nn.Namespace, nn.Name, fmt.Errorf("%w: %w", store.ErrUnavailable, err))
		}
		return "", err
	}
	if o := r.held(nn); o != nil {
		if err := r.stillThere(ctx, nn, o); err != nil {
			return known.epoch(nn), refuse(err)
		}
	}
	o, err := r.openOrHeld(ctx, nn, known)
	if err != nil {
		return known.epoch(nn), refuse(err)
	}
	if err := r.judge(ctx, obj, o.identity, known); err != nil {
		return known.epoch(nn), refuse(err)
	}
	if o.identity.Epoch == "" {
		// The file first, then the memory of it: what is between the two is adopted at
		// the next visit, and never read as a loss.
		domain := known.keyDomain(nn)
		if domain == "" {
			domain = rand.Text()
		}
		id, err := o.store.Initialise(ctx, store.Identity{Epoch: rand.Text(), KeyDomain: domain})
		if err != nil {
			return "", refuse(fmt.Errorf("give the store its identity: %w", err))
		}
		o.identity = id
	}
	if known.epoch(nn) != o.identity.Epoch || known.keyDomain(nn) != o.identity.KeyDomain {
		if err := r.Memory.rememberStore(ctx, nn, o.identity.Epoch, o.identity.KeyDomain); err != nil {
			return "", refuse(fmt.Errorf("%w: its epoch must be remembered before it serves: %w", store.ErrUnavailable, err))
		}
	}
	if o.engine == nil {
		o.engine = guard.New(o.store, o.identity, r.Options)
		log.FromContext(ctx).Info("the store is open", "epoch", o.identity.Epoch, "file", r.path(nn))
	}
	o.engine.Resume()
	r.Engines.Put(nn.Namespace, nn.Name, o.engine)
	return o.identity.Epoch, nil
}

// judge says whether a store with this identity is the memory that the object had.
func (r *StoreReconciler) judge(ctx context.Context, obj *v1alpha1.IdempotencyStore, id store.Identity, known storeMemory) error {
	nn := client.ObjectKeyFromObject(obj)
	remembered := known.epoch(nn)
	accept := fmt.Sprintf("Restore %s as it was. Or, to go on without that memory, knowing that what it paid could be paid again, "+
		"settle its open payments by the provider's ledger and remove the key %q from the %s",
		r.path(nn), memoryKey(epochOf, nn), r.Memory)
	switch {
	case remembered != "" && id.Epoch == "":
		return fmt.Errorf("%w: the store is empty, and epoch %s is remembered for it. %s", store.ErrMemoryLost, remembered, accept)
	case remembered != "" && id.Epoch != remembered:
		return fmt.Errorf("%w: the store carries epoch %s, and epoch %s is remembered for it. %s", store.ErrMemoryLost, id.Epoch, remembered, accept)
	}
	if id.Epoch != "" {
		if other := known.bearer(id.Epoch, nn); other != "" {
			return fmt.Errorf("%w: the store carries the epoch of IdempotencyStore %s: two copies of one memory would each pay once. "+
				"Move the copy away, or remove the other's keys from the %s if it is gone for good", store.ErrMemoryLost, other, r.Memory)
		}
		if domain := known.keyDomain(nn); domain != "" && domain != id.KeyDomain {
			return fmt.Errorf("%w: the store carries another key domain than the one remembered for it, so the provider would not know its payments again. "+
				"Restore %s, or remove the key %q from the %s", store.ErrMemoryLost, r.path(nn), memoryKey(keyDomainOf, nn), r.Memory)
		}
	}
	if remembered != "" || known.keyDomain(nn) != "" {
		// With the key domain alone, a person has taken the epoch away: the loss is accepted.
		return nil
	}
	if was := obj.Status.Epoch; was != "" && was != id.Epoch {
		return fmt.Errorf("%w: nothing is remembered for the store, but its status tells of epoch %s, and it carries %s. "+
			"Restore the %s and %s. Or, to go on without that memory, knowing that what it paid could be paid again, "+
			"set the key %q in it to a new random text", store.ErrMemoryLost, was, orNone(id.Epoch), r.Memory, r.path(nn), memoryKey(keyDomainOf, nn))
	}
	if id.Epoch != "" {
		return nil // adopted
	}
	hold, err := r.strayHold(ctx, nn, known)
	if err != nil {
		return fmt.Errorf("%w: whether this is the store's first use cannot be told: %w", store.ErrUnavailable, err)
	}
	if hold != nil {
		return fmt.Errorf("%w: the store is empty, but PaymentHold %s was made under epoch %s, which no store of this namespace carries. "+
			"Restore %s as it was. Or, to go on without that memory, knowing that what it paid could be paid again, "+
			"set the key %q in the %s to a new random text", store.ErrMemoryLost, hold.Name, hold.Spec.Record.Epoch, r.path(nn), memoryKey(keyDomainOf, nn), r.Memory)
	}
	return nil
}

func orNone(epoch string) string {
	if epoch == "" {
		return "none"
	}
	return "epoch " + epoch
}

// strayHold is a hold that may have come from this store under an epoch that no store
// of the namespace is known to carry.
func (r *StoreReconciler) strayHold(ctx context.Context, nn types.NamespacedName, known storeMemory) (*v1alpha1.PaymentHold, error) {
	epochs := map[string]bool{probeEpoch: true}
	for _, e := range known.epochs(nn.Namespace) {
		epochs[e] = true
	}
	data := map[string]string(known)
	next := ""
	for {
		var page v1alpha1.PaymentHoldList
		if err := r.Live.List(ctx, &page, client.InNamespace(nn.Namespace), client.Limit(500), client.Continue(next)); err != nil {
			return nil, err
		}
		for i := range page.Items {
			h := &page.Items[i]
			if epochs[h.Spec.Record.Epoch] {
				continue
			}
			// A tool that is known to belong to another store says nothing of this one.
			budget := data[memoryKey(budgetOf, types.NamespacedName{Namespace: nn.Namespace, Name: h.Spec.ToolRef.Name})]
			of := data[memoryKey(storeOf, types.NamespacedName{Namespace: nn.Namespace, Name: budget})]
			if budget == "" || of == "" || of == nn.Name {
				return h, nil
			}
		}
		if next = page.Continue; next == "" {
			return nil, nil
		}
	}
}

// path is the store's file. A namespace has no underscore and no dot, so no two stores share one.
func (r *StoreReconciler) path(nn types.NamespacedName) string {
	return filepath.Join(r.DataDir, nn.Namespace+"_"+nn.Name+".db")
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

// stillThere says whether an open store answers, and is still the file at its path.
func (r *StoreReconciler) stillThere(ctx context.Context, nn types.NamespacedName, o *openStore) error {
	file, err := os.Stat(r.path(nn))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(file, o.file) {
		return fmt.Errorf("%w: %s was taken away under the running process: what is written now would be lost with it", store.ErrMemoryLost, r.path(nn))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	if _, err := o.store.Identity(ctx); err != nil {
		err = fmt.Errorf("the open store does not answer: %w", err)
		if ctx.Err() != nil {
			return err
		}
		// Nothing can be written to it any more, whatever is in hand: opening it anew may help.
		r.Engines.Fail(nn.Namespace, nn.Name, err)
		return errors.Join(err, r.close(nn))
	}
	return nil
}

// openOrHeld opens the store's file if it is not open. It makes none where one is remembered.
func (r *StoreReconciler) openOrHeld(ctx context.Context, nn types.NamespacedName, known storeMemory) (*openStore, error) {
	if o := r.held(nn); o != nil {
		return o, nil
	}
	path := r.path(nn)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && known.epoch(nn) != "" {
		return &openStore{}, nil // as empty as a new one would be
	}
	st, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	o := &openStore{store: st}
	if o.file, err = os.Stat(path); err == nil {
		o.identity, err = st.Identity(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", store.ErrUnavailable, err), st.Close())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return nil, errors.Join(fmt.Errorf("%w: the process is ending", store.ErrUnavailable), st.Close())
	}
	if r.open == nil {
		r.open = map[types.NamespacedName]*openStore{}
	}
	r.open[nn] = o
	return o, nil
}

// retire lets nobody use the store any more, and closes its file once nothing is under
// way: the result of an attempt that was sent must find it open. Each attempt keeps it
// so until a minute after its lease at the latest.
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
	open := r.open
	r.open, r.done = nil, true
	r.mu.Unlock()
	var errs []error
	for nn, o := range open {
		r.Engines.Fail(nn.Namespace, nn.Name, fmt.Errorf("%w: the process is ending", store.ErrUnavailable))
		errs = append(errs, o.store.Close())
	}
	return errors.Join(errs...)
}
