// This file is about a store that forgot: how it is told, and what happens once a
// person has accepted it.
//
// What must hold: a loss is told from a first use by what the operator's memory and the
// cluster know; nothing of a lost memory decides anything under the next one; and until
// the loss is accepted nobody pays.

package controller

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// reholdTimeout bounds one acceptance of a loss.
const reholdTimeout = 10 * time.Minute

// unknownEpoch stands for a memory of which nothing is known but that there was one.
const unknownEpoch = "unknown"

// unknownBudget stands for that of a tool of which nothing is known any more.
const unknownBudget = "unknown"

// lostEpoch is the epoch of the memory that the store should have.
func lostEpoch(obj *v1alpha1.IdempotencyStore, known storeMemory) string {
	if e := known.epoch(client.ObjectKeyFromObject(obj)); e != "" {
		return e
	}
	if obj.Status.Epoch != "" {
		return obj.Status.Epoch
	}
	return unknownEpoch
}

// judge says whether a store that stands so is the memory that the object had. With an
// ErrMemoryLost it returns the epoch of the one that is lost.
func (r *StoreReconciler) judge(ctx context.Context, obj *v1alpha1.IdempotencyStore, is store.Standing, known storeMemory) (string, error) {
	nn := client.ObjectKeyFromObject(obj)
	remembered := known.epoch(nn)
	lost := func(epoch, format string, args ...any) (string, error) {
		return epoch, fmt.Errorf("%w: IdempotencyStore %s: %s. Restore %s as it was. Or, to go on without that memory, settle its open payments by the provider's ledger "+
			"and set spec.acceptEpoch to %q", store.ErrMemoryLost, nn, fmt.Sprintf(format, args...), r.place(obj), epoch)
	}
	if is.Epoch != "" {
		if other := known.bearer(is.Epoch, nn); other != "" {
			return "", fmt.Errorf("%w: IdempotencyStore %s carries the epoch of IdempotencyStore %s: two copies of one memory would each pay once. "+
				"Move the copy away, or remove the other's keys from the %s if it is gone for good", store.ErrMemoryLost, nn, other, r.Memory)
		}
	}
	last, err := known.seen(nn)
	if err != nil {
		return "", fmt.Errorf("%w: the %s: %w", store.ErrUnavailable, r.Memory, err)
	}
	switch {
	case remembered != "" && is.Epoch == "":
		return lost(remembered, "it is empty, and epoch %s is remembered for it", remembered)
	case remembered != "" && is.Epoch != remembered:
		return lost(remembered, "it carries epoch %s, and epoch %s is remembered for it", is.Epoch, remembered)
	case remembered != "" && is.Sequence < last.sequence:
		return lost(remembered, "it has come to write %d, and had come to %d before: an older copy of it was restored, or it has lost writes", is.Sequence, last.sequence)
	case remembered != "":
		return "", nil
	}
	if was := obj.Status.Epoch; was != "" && was != is.Epoch {
		return lost(was, "nothing is remembered for it in the %s, but its status tells of epoch %s, and it carries %s", r.Memory, was, orNone(is.Epoch))
	}
	if is.Epoch != "" {
		return "", nil // adopted
	}
	if known.keyDomain(nn) != "" {
		return lost(unknownEpoch, "it is empty, and the %s has a key domain for it, so it had a memory", r.Memory)
	}
	hold, err := r.strayHold(ctx, nn, known)
	if err != nil {
		return "", fmt.Errorf("%w: whether this is the store's first use cannot be told: %w", store.ErrUnavailable, err)
	}
	if hold != nil {
		return lost(hold.Spec.Record.Epoch, "it is empty, but PaymentHold %s was made under epoch %s, which no store of this namespace carries", hold.Name, hold.Spec.Record.Epoch)
	}
	intent, err := r.strayIntent(ctx, nn, known)
	if err != nil {
		return "", fmt.Errorf("%w: whether this is the store's first use cannot be told: %w", store.ErrUnavailable, err)
	}
	if intent != nil {
		return lost(unknownEpoch, "it is empty, but PaymentIntent %s says that it was registered (%s), and no other store of this namespace can have its record", intent.Name, intent.Status.State)
	}
	return "", nil
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
			if known.belongs(h.Spec.ToolRef.Name, nn) {
				return h, nil
			}
		}
		if next = page.Continue; next == "" {
			return nil, nil
		}
	}
}

// strayIntent is an intent that was registered, and whose record may have been in this store.
// Its object does not say under which epoch: but what is asked is of a store of which nothing
// is known at all, and a tool that is known to belong to another store says nothing of it.
func (r *StoreReconciler) strayIntent(ctx context.Context, nn types.NamespacedName, known storeMemory) (*v1alpha1.PaymentIntent, error) {
	next := ""
	for {
		var page v1alpha1.PaymentIntentList
		if err := r.Live.List(ctx, &page, client.InNamespace(nn.Namespace), client.Limit(500), client.Continue(next)); err != nil {
			return nil, err
		}
		for i := range page.Items {
			if o := &page.Items[i]; !unregistered(o) && known.belongs(o.Spec.ToolRef.Name, nn) {
				return o, nil
			}
		}
		if next = page.Continue; next == "" {
			return nil, nil
		}
	}
}

// disown has everybody know that the store is no longer the memory that is remembered:
// this process has seen that writes are missing under this epoch, and others may not
// have. "": it is known already. Then it gives up what it has open.
func (r *StoreReconciler) disown(ctx context.Context, nn types.NamespacedName, s settings, epoch string) error {
	o := r.held(nn)
	if o == nil {
		return nil
	}
	if o.engine != nil {
		o.engine.Retire()
	}
	if epoch != "" {
		next := rand.Text()
		err := o.store.Disown(ctx, epoch, next)
		if errors.Is(err, store.ErrMemoryLost) {
			// This process has missed writes of its own, and is told nothing else any more. One that is
			// opened anew has none to miss.
			err = r.disownAnew(ctx, s, epoch, next)
		}
		if err != nil {
			return fmt.Errorf("give the store another epoch: %w", err) // it stays open, and says so at the next visit
		}
	}
	// It is known to all now. Opened anew it shows what it is.
	_, err := r.retire(nn)
	return err
}

// disownAnew disowns the store by a connection of its own.
func (r *StoreReconciler) disownAnew(ctx context.Context, s settings, epoch, next string) (err error) {
	o, err := r.openAs(s, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.store.Close()) }()
	return o.store.Disown(ctx, epoch, next)
}

// accept goes on without the memory that is lost. The store gets an epoch of its own,
// what is held in the cluster is held again, and then it is remembered.
func (r *StoreReconciler) accept(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore, is store.Standing, known storeMemory, v visit, cause error) (visit, error) {
	nn := client.ObjectKeyFromObject(obj)
	// What is held again may be much: it has more time than a look.
	ctx, cancel := context.WithTimeout(ctx, reholdTimeout)
	defer cancel()
	wait, err := r.lossWait(ctx, nn, v.epoch)
	if err != nil {
		return v, errors.Join(cause, err)
	}
	if wait > 0 {
		v.accepting = fmt.Sprintf("The loss of epoch %s is accepted. Attempts that were under way may still pay: the store serves in %s at the earliest.", v.epoch, wait.Round(time.Second))
		return v, cause
	}
	v.accepting = fmt.Sprintf("The loss of epoch %s is accepted; what is held is being held again.", v.epoch)
	if o == nil {
		// The embedded store's file is gone: a new one takes its place.
		s, err := r.settingsOf(ctx, obj)
		if err == nil {
			o, err = r.openAs(s, false)
		}
		if err == nil {
			err = r.hold(nn, o)
		}
		if err == nil {
			is, err = o.store.Standing(ctx)
		}
		if err != nil {
			return v, errors.Join(cause, err)
		}
	}
	domain := known.keyDomain(nn)
	if domain == "" {
		if domain = is.KeyDomain; domain == "" {
			domain = rand.Text()
		}
	}
	// A new epoch in any case: holds that were made under one that comes back decide nothing.
	// One that an earlier try had chosen for this loss is gone on with.
	next, err := r.Memory.acceptAs(ctx, nn, v.epoch, rand.Text())
	if err != nil {
		return v, errors.Join(cause, err)
	}
	id := store.Identity{Epoch: next, KeyDomain: domain}
	switch is.Epoch {
	case id.Epoch:
	case "":
		var have store.Identity
		if have, err = o.store.Initialise(ctx, id); err == nil && have != id {
			err = fmt.Errorf("%w: somebody else has given the store epoch %s meanwhile", store.ErrUnavailable, have.Epoch)
		}
	default:
		err = o.store.Disown(ctx, is.Epoch, id.Epoch)
	}
	if err != nil {
		return v, errors.Join(cause, fmt.Errorf("give the store a new epoch: %w", err))
	}
	if is, err = o.store.Standing(ctx); err != nil || is.Epoch != id.Epoch {
		return v, errors.Join(cause, fmt.Errorf("the store carries epoch %s, and should carry %s: %w", is.Epoch, id.Epoch, errors.Join(store.ErrUnavailable, err)))
	}
	l := loss{at: is.Now, epoch: v.epoch, forget: obj.Spec.ForgetEpoch == v.epoch}
	engine := guard.New(o.store, id, r.after(l))
	if err := r.reimport(ctx, nn, engine, known); err != nil {
		return v, errors.Join(cause, fmt.Errorf("hold again what is held: %w", err))
	}
	seen := sight(is)
	if err := r.Memory.acceptLoss(ctx, nn, v.epoch, id, l, seen); err != nil {
		return v, errors.Join(cause, err)
	}
	log.FromContext(ctx).Info("the loss of a memory was accepted", "lost", v.epoch, "epoch", id.Epoch, "forget", l.forget)
	v.epoch = id.Epoch
	// The next visit serves it, like any other store.
	return v, cause
}

// lossWait is how long the acceptance of a loss must still wait: until no attempt can be
// under way that was begun before, and what it paid can be seen.
func (r *StoreReconciler) lossWait(ctx context.Context, nn types.NamespacedName, epoch string) (time.Duration, error) {
	r.mu.Lock()
	since, ok := r.lostSince[nn]
	if !ok || since.epoch != epoch {
		since = lostSince{epoch, time.Now()}
		if r.lostSince == nil {
			r.lostSince = map[types.NamespacedName]lostSince{}
		}
		r.lostSince[nn] = since
	}
	r.mu.Unlock()
	r.mu.Lock()
	longest := r.longest[nn]
	r.mu.Unlock()
	var tools v1alpha1.AgentToolList
	if err := r.Client.List(ctx, &tools, client.InNamespace(nn.Namespace)); err != nil {
		return 0, err
	}
	for i := range tools.Items {
		timeout, settleAfter := policy.Times(&tools.Items[i])
		longest = max(longest, timeout+settleAfter)
	}
	r.mu.Lock()
	if r.longest == nil {
		r.longest = map[types.NamespacedName]time.Duration{}
	}
	r.longest[nn] = longest // a tool that is deleted meanwhile may have attempts all the same
	r.mu.Unlock()
	// Every gateway looks at the store by then, and refuses it.
	longest += storeLook + r.Options.Settlement + r.Options.Margin + r.Options.Grace
	return longest - time.Since(since.at), nil
}

// reimport holds again, under the new epoch, what is held in the cluster or in what is
// left of the store.
func (r *StoreReconciler) reimport(ctx context.Context, nn types.NamespacedName, engine *guard.Engine, known storeMemory) error {
	if err := engine.Rehold(ctx); err != nil {
		if !errors.Is(err, guard.ErrCorrupt) {
			return err
		}
		// What cannot be read is refused whenever it is called; the others must be held.
		log.FromContext(ctx).Error(err, "records that cannot be read are left as they are")
	}
	highest := map[guard.Key]int{}
	open := map[guard.Key]*v1alpha1.PaymentHold{}
	next := ""
	for {
		var page v1alpha1.PaymentHoldList
		if err := r.Live.List(ctx, &page, client.InNamespace(nn.Namespace), client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		for i := range page.Items {
			h := &page.Items[i]
			if h.Spec.Record.Epoch == probeEpoch || !known.belongs(h.Spec.ToolRef.Name, nn) {
				continue
			}
			id := holdID(h)
			highest[id.Key] = max(highest[id.Key], id.Number)
			if h.Status.State == v1alpha1.HoldResolved || h.Status.State == v1alpha1.HoldVoid {
				continue
			}
			if was := open[id.Key]; was == nil || was.Spec.Hold < h.Spec.Hold {
				open[id.Key] = h
			}
		}
		if next = page.Continue; next == "" {
			break
		}
	}
	for key, h := range open {
		imported, err := importedHold(h, highest[key])
		if err == nil {
			imported.Policy, err = r.policyOf(ctx, &imported, known)
		}
		if err == nil {
			err = engine.Import(ctx, imported)
		}
		if errors.Is(err, guard.ErrCorrupt) {
			log.FromContext(ctx).Error(err, "the record of a hold cannot be read and is left as it is", "hold", h.Name)
			continue
		}
		if err != nil {
			return fmt.Errorf("PaymentHold %s: %w", h.Name, err)
		}
	}
	return nil
}

// policyOf is what a tool and its budget say, also of a tool that is not served now.
func (r *StoreReconciler) policyOf(ctx context.Context, of *guard.ImportedHold, known storeMemory) (guard.Policy, error) {
	namespace, name := of.Namespace, of.Tool
	if t, err := r.Policies.Load().Tool(namespace, name); err == nil && t.Guard.Budget != "" {
		return t.GuardFor(&guard.Call{
			Key: of.Key, Scope: of.Scope, Lineage: of.Lineage, Amount: of.Amount, Recipient: of.Recipient, Fingerprint: of.Fingerprint,
		}), nil
	}
	nn := types.NamespacedName{Namespace: namespace, Name: name}
	budget := known[memoryKey(budgetOf, nn)]
	if budget == "" {
		budget = unknownBudget
	}
	var tool v1alpha1.AgentTool
	err := r.Live.Get(ctx, nn, &tool)
	if apierrors.IsNotFound(err) {
		return policy.OfTool(nil, budget), nil
	}
	return policy.OfTool(&tool, budget), err
}

// importedHold is what an object tells of its record.
func importedHold(h *v1alpha1.PaymentHold, highest int) (guard.ImportedHold, error) {
	out := guard.ImportedHold{
		Key: holdID(h).Key, Lineage: intent.Path(h.Spec.Lineage), Recipient: h.Spec.Recipient, Fingerprint: h.Spec.Fingerprint, Number: highest,
	}
	for _, p := range h.Spec.Scope {
		out.Scope = append(out.Scope, intent.Path(p))
	}
	for _, reason := range h.Spec.Reasons {
		out.Reasons = append(out.Reasons, guard.Reason(reason))
	}
	if m := h.Spec.Amount; m != nil {
		amount, err := intent.NewMoney(m.Value, m.Currency, intent.UnitMajor)
		if err != nil {
			return out, err
		}
		out.Amount = &amount
	}
	return out, nil
}

// baseline is what the store's clock showed when this process saw that it was right.
type baseline struct {
	clock time.Time
	boot  time.Duration
}

// step is how far the store's clock is from where it should be: by what this process has
// seen itself, or else by what is remembered, which is as good as the machines' clocks.
func (o *openStore) step(is store.Standing, last sighting) time.Duration {
	switch {
	case o.sighted.same(last) && !o.base.clock.IsZero():
		return is.Now.Sub(o.base.clock) - (guard.SystemClock{}.Now().Boot - o.base.boot)
	case !last.clock.IsZero():
		return is.Now.Sub(last.clock) - time.Since(last.wall)
	}
	return 0
}

// watch begins to watch the clock from here, where it is right.
func (o *openStore) watch(is store.Standing, last sighting) {
	if !o.sighted.same(last) || o.base.clock.IsZero() {
		o.sighted, o.base = last, baseline{is.Now, guard.SystemClock{}.Now().Boot}
	}
}

func far(d time.Duration) bool { return d > maxClockStep || d < -maxClockStep }

// judgeClock stops the store whose clock has gone somewhere else than time has, and
// remembers how far the store has come.
func (r *StoreReconciler) judgeClock(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore, is store.Standing, known storeMemory) error {
	nn := client.ObjectKeyFromObject(obj)
	last, err := known.seen(nn)
	if err != nil {
		return fmt.Errorf("%w: the %s: %w", store.ErrUnavailable, r.Memory, err)
	}
	_, to, jumped := o.engine.ClockJump()
	accepts := r.Leading() && obj.Spec.AcceptClock == last.name()
	if step := o.step(is, last); far(step) {
		if accepts {
			// The engine accepts what it has heard.
			if _, _, err := o.engine.Holds(ctx, ""); err != nil {
				return err
			}
			o.engine.AcceptClock()
			return r.remember(ctx, nn, o, is)
		}
		return fmt.Errorf("%w: IdempotencyStore %s: the store's clock shows %s and should show %s. Leases, windows and purges cannot be judged by it. "+
			"Set the clock of %s right. Or, if the time that it shows now is right, set spec.acceptClock to %q",
			guard.ErrClockJumped, nn, is.Now.UTC().Format(time.RFC3339), is.Now.Add(-step).UTC().Format(time.RFC3339), r.place(obj), last.name())
	}
	if jumped && !far(is.Now.Sub(to)) {
		// The time that the engine takes for wrong is the one that was accepted since.
		o.engine.AcceptClock()
	}
	o.watch(is, last)
	if r.Leading() && (last.clock.IsZero() || accepts || is.Sequence != last.sequence && time.Since(last.wall) >= sightingEvery) {
		// With a new sighting an acceptance is spent: it says nothing of a later jump.
		return r.remember(ctx, nn, o, is)
	}
	return nil
}

// remember writes how far the store has come.
func (r *StoreReconciler) remember(ctx context.Context, nn types.NamespacedName, o *openStore, is store.Standing) error {
	seen := sight(is)
	if err := r.Memory.sawStore(ctx, nn, is.Epoch, seen); err != nil {
		return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
	}
	o.sighted, o.base = seen, baseline{is.Now, guard.SystemClock{}.Now().Boot}
	return nil
}
