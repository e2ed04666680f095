// This file is the operator's own memory: which store a budget had, which budget a
// tool had, and each store's epoch and key domain.
//
// It lives in one ConfigMap in the operator's namespace, without owner, so that it
// outlives the objects that it speaks of. What is remembered is never overwritten
// here: to accept a change, a person edits the ConfigMap.

package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// MemoryName is the name of the ConfigMap.
const MemoryName = "holdfast-memory"

// A key is KIND.NAMESPACE_NAME: names and namespaces have no underscore, so no two meet.
const (
	epochOf     = "epoch"     // of a store
	keyDomainOf = "keyDomain" // of a store
	lossOf      = "loss"      // of a store: when its last loss of memory was accepted, and whether it is forgotten
	seenOf      = "seen"      // of a store: how far it had come when it was last seen
	nextOf      = "next"      // of a store: the lost epoch, and the one that takes its place
	spentOf     = "spent"     // of a store: an acceptance that was there before the loss
	storeOf     = "store"     // of a budget
	budgetOf    = "budget"    // of a tool
)

// notBoundError: nothing is remembered yet, and this process is not the one that remembers.
type notBoundError struct{ what string }

func (e *notBoundError) Error() string {
	return e.what + " is not remembered yet: the controllers write it"
}

func memoryKey(kind string, of types.NamespacedName) string {
	return kind + "." + of.Namespace + "_" + of.Name
}

// Memory is the operator's ConfigMap.
type Memory struct {
	namespace string
	// cached answers what is already as it should be; all else is read and written live.
	cached client.Reader
	live   client.Client
	// leading says whether this process may write: one does.
	leading func() bool
	mu      sync.Mutex
}

// NewMemory returns the memory that is kept in this namespace. Only the process that
// leads writes it.
func NewMemory(namespace string, cached client.Reader, live client.Client, leading func() bool) *Memory {
	return &Memory{namespace: namespace, cached: cached, live: live, leading: leading}
}

// String names the ConfigMap, for messages.
func (m *Memory) String() string { return "ConfigMap " + m.namespace + "/" + MemoryName }

func (m *Memory) read(ctx context.Context, from client.Reader) (map[string]string, error) {
	var cm corev1.ConfigMap
	err := from.Get(ctx, types.NamespacedName{Namespace: m.namespace, Name: MemoryName}, &cm)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", m, err)
	}
	return cm.Data, nil
}

// change writes what f changes, and returns only when it is durable. f may be called again.
func (m *Memory) change(ctx context.Context, f func(data map[string]string) (changed bool)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		var cm corev1.ConfigMap
		err := m.live.Get(ctx, types.NamespacedName{Namespace: m.namespace, Name: MemoryName}, &cm)
		if apierrors.IsNotFound(err) {
			cm = corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: m.namespace, Name: MemoryName}, Data: map[string]string{}}
			if !f(cm.Data) {
				return nil
			}
			err = m.live.Create(ctx, &cm, client.FieldOwner(ownerMemory))
			if apierrors.IsAlreadyExists(err) {
				return apierrors.NewConflict(corev1.Resource("configmaps"), MemoryName, err)
			}
			return err
		}
		if err != nil {
			return err
		}
		if cm.Data == nil {
			cm.Data = map[string]string{}
		}
		if !f(cm.Data) {
			return nil
		}
		return m.live.Update(ctx, &cm, client.FieldOwner(ownerMemory))
	})
	if err != nil {
		return fmt.Errorf("write the %s: %w", m, err)
	}
	return nil
}

// bind remembers what an object refers to if nothing is remembered yet, and returns
// what is remembered. An empty reference is never written.
func (m *Memory) bind(ctx context.Context, kind string, of types.NamespacedName, ref string) (string, error) {
	key := memoryKey(kind, of)
	data, err := m.read(ctx, m.cached)
	if err != nil {
		return "", err
	}
	if was := data[key]; was == ref {
		return was, nil
	}
	if ref == "" || !m.leading() {
		data, err := m.read(ctx, m.live)
		if was, ok := data[key]; err == nil && !ok && ref != "" {
			return was, &notBoundError{key}
		}
		return data[key], err
	}
	var was string
	err = m.change(ctx, func(data map[string]string) bool {
		var ok bool
		if was, ok = data[key]; ok {
			return false
		}
		was, data[key] = ref, ref
		return true
	})
	return was, err
}

// BindBudget returns the store that this budget is known to have.
func (m *Memory) BindBudget(ctx context.Context, budget types.NamespacedName, store string) (string, error) {
	return m.bind(ctx, storeOf, budget, store)
}

// BindTool returns the budget that this tool is known to have.
func (m *Memory) BindTool(ctx context.Context, tool types.NamespacedName, budget string) (string, error) {
	return m.bind(ctx, budgetOf, tool, budget)
}

// storeMemory is what is remembered of all stores.
type storeMemory map[string]string

// Stores reads what is remembered of the stores, live.
func (m *Memory) stores(ctx context.Context) (storeMemory, error) {
	data, err := m.read(ctx, m.live)
	return data, err
}

func (s storeMemory) epoch(of types.NamespacedName) string { return s[memoryKey(epochOf, of)] }

func (s storeMemory) keyDomain(of types.NamespacedName) string { return s[memoryKey(keyDomainOf, of)] }

// epochs are the epochs of all stores of a namespace, by the store's name.
func (s storeMemory) epochs(namespace string) map[string]string {
	out := map[string]string{}
	for k, v := range s {
		if name, ok := strings.CutPrefix(k, epochOf+"."+namespace+"_"); ok {
			out[name] = v
		}
	}
	return out
}

// belongs says whether a tool's records are in this store, as far as is known: of a tool
// of which nothing is known they may be.
func (s storeMemory) belongs(tool string, of types.NamespacedName) bool {
	budget := s[memoryKey(budgetOf, types.NamespacedName{Namespace: of.Namespace, Name: tool})]
	name := s[memoryKey(storeOf, types.NamespacedName{Namespace: of.Namespace, Name: budget})]
	return budget == "" || name == "" || name == of.Name
}

// bearer is another store that is remembered with this epoch; "" if there is none.
func (s storeMemory) bearer(epoch string, not types.NamespacedName) string {
	for k, v := range s {
		if strings.HasPrefix(k, epochOf+".") && v == epoch && k != memoryKey(epochOf, not) {
			return strings.Replace(strings.TrimPrefix(k, epochOf+"."), "_", "/", 1)
		}
	}
	return ""
}

// loss is a loss of memory that was accepted.
type loss struct {
	// at is the store's time of the acceptance; zero: none was lost.
	at time.Time
	// epoch is that of the memory that was lost.
	epoch string
	// forget: no payment of that memory is looked for.
	forget bool
}

const forgotten = "forgotten"

func (l loss) String() string {
	text := l.at.UTC().Format(time.RFC3339Nano) + " " + l.epoch
	if l.forget {
		text += " " + forgotten
	}
	return text
}

// loss is the store's last one.
func (s storeMemory) loss(of types.NamespacedName) (loss, error) {
	key := memoryKey(lossOf, of)
	l, err := parseLoss(s[key])
	if err != nil {
		return loss{}, fmt.Errorf("the key %q is not readable: %w", key, err)
	}
	return l, nil
}

// parseLoss reads what String has written; "": none was lost.
func parseLoss(text string) (loss, error) {
	if text == "" {
		return loss{}, nil
	}
	words := strings.Fields(text)
	if len(words) < 2 || len(words) > 3 || len(words) == 3 && words[2] != forgotten {
		return loss{}, fmt.Errorf("%q is no time with the epoch that was lost", text)
	}
	at, err := time.Parse(time.RFC3339Nano, words[0])
	if err != nil {
		return loss{}, err
	}
	return loss{at: at, epoch: words[1], forget: len(words) == 3}, nil
}

// sighting is how far a store had come when it was last looked at.
type sighting struct {
	sequence uint64
	// clock is the store's, wall was then that of whoever looked.
	clock, wall time.Time
}

// sight is how far a store has come that stands so now.
func sight(is store.Standing) sighting {
	return sighting{sequence: is.Sequence, clock: is.Now, wall: time.Now()}
}

func (s sighting) same(o sighting) bool { return s.String() == o.String() }

func (s sighting) String() string {
	return fmt.Sprintf("%d %s %s", s.sequence, s.clock.UTC().Format(time.RFC3339Nano), s.wall.UTC().Format(time.RFC3339Nano))
}

// name is how a person names the clock of this sighting.
func (s sighting) name() string { return s.clock.UTC().Format(time.RFC3339Nano) }

// seen is the store's last sighting; zero: none.
func (s storeMemory) seen(of types.NamespacedName) (sighting, error) {
	key := memoryKey(seenOf, of)
	last, err := parseSighting(s[key])
	if err != nil {
		return sighting{}, fmt.Errorf("the key %q is not readable: %w", key, err)
	}
	return last, nil
}

// parseSighting reads what String has written; "": there was none.
func parseSighting(text string) (sighting, error) {
	if text == "" {
		return sighting{}, nil
	}
	var last sighting
	words := strings.Fields(text)
	if len(words) != 3 {
		return sighting{}, fmt.Errorf("%q is no number with two times", text)
	}
	var failed [3]error
	last.sequence, failed[0] = strconv.ParseUint(words[0], 10, 64)
	last.clock, failed[1] = time.Parse(time.RFC3339Nano, words[1])
	last.wall, failed[2] = time.Parse(time.RFC3339Nano, words[2])
	if err := errors.Join(failed[:]...); err != nil {
		return sighting{}, err
	}
	return last, nil
}

// kept is what the Secret of a deployed store is to say of it.
func (s storeMemory) kept(of types.NamespacedName) workload.Kept {
	return workload.Kept{
		Epoch: s.epoch(of), KeyDomain: s.keyDomain(of), Loss: s[memoryKey(lossOf, of)], Seen: s[memoryKey(seenOf, of)], Spent: s[memoryKey(spentOf, of)],
	}
}

// with is what is known of a store, with what its Secret says where the operator's ConfigMap,
// which goes with the operator's namespace, says less. A Secret is the word of whoever can write
// in the store's namespace: it is remembered only once the store's server has shown the same
// epoch, and until then it tells nothing of any other store.
func (s storeMemory) with(of types.NamespacedName, kept workload.Kept) (storeMemory, error) {
	has := s.kept(of)
	if kept == (workload.Kept{}) || has.Epoch != "" && has.Epoch != kept.Epoch {
		return s, nil // it says nothing, or of another memory than the present one
	}
	_, badLoss := parseLoss(kept.Loss)
	next, badSeen := parseSighting(kept.Seen)
	if err := errors.Join(badLoss, badSeen); err != nil && has.Epoch == "" {
		return s, fmt.Errorf("nothing is remembered of the store but what its Secret says, and its annotations with the loss and how far it had come are not readable: "+
			"restore them, or, if no memory was ever lost and the volume is no old copy, remove them: %w", err)
	}
	if badLoss == nil && has.Loss == "" {
		has.Loss = kept.Loss
	}
	if last, err := s.seen(of); badSeen == nil && (has.Epoch == "" || err == nil && last.sequence < next.sequence) {
		has.Seen = kept.Seen
	}
	if has.KeyDomain == "" {
		has.KeyDomain = kept.KeyDomain
	}
	if has.Epoch == "" {
		has.Epoch = kept.Epoch
		if has.Spent == "" {
			has.Spent = kept.Spent
		}
	}
	if has == s.kept(of) {
		return s, nil
	}
	out := storeMemory{}
	maps.Copy(out, s)
	for kind, value := range map[string]string{epochOf: has.Epoch, keyDomainOf: has.KeyDomain, lossOf: has.Loss, seenOf: has.Seen, spentOf: has.Spent} {
		if out[memoryKey(kind, of)] = value; value == "" {
			delete(out, memoryKey(kind, of))
		}
	}
	return out, nil
}

// rememberStore writes a store's identity and its last loss where none is remembered, and how far
// it has come. What the store's server shows is remembered, and for one store only.
func (m *Memory) rememberStore(ctx context.Context, of types.NamespacedName, id store.Identity, lost string, seen sighting) error {
	known := map[string]string{memoryKey(epochOf, of): id.Epoch, memoryKey(keyDomainOf, of): id.KeyDomain}
	if lost != "" {
		known[memoryKey(lossOf, of)] = lost
	}
	var other error
	err := m.change(ctx, func(data map[string]string) bool {
		other = nil
		if bearer := storeMemory(data).bearer(id.Epoch, of); bearer != "" {
			other = fmt.Errorf("the %s tells by now that IdempotencyStore %s has epoch %s", m, bearer, id.Epoch)
			return false
		}
		for k, v := range known {
			switch was, ok := data[k]; {
			case !ok:
				data[k] = v
			case was != v:
				other = fmt.Errorf("%s of the %s is %q by now, not %q", k, m, was, v)
				return false
			}
		}
		data[memoryKey(seenOf, of)] = seen.String()
		return true
	})
	return errors.Join(err, other)
}

// sawStore writes how far the store with this epoch has come. It never goes back.
func (m *Memory) sawStore(ctx context.Context, of types.NamespacedName, epoch string, seen sighting) error {
	var other error
	err := m.change(ctx, func(data map[string]string) bool {
		other = nil
		last, err := storeMemory(data).seen(of)
		if is := storeMemory(data).epoch(of); err != nil || is != epoch || last.sequence > seen.sequence {
			other = fmt.Errorf("the %s tells of epoch %q and write %d of the store by now, not %q and %d", m, is, last.sequence, epoch, seen.sequence)
			return false
		}
		data[memoryKey(seenOf, of)] = seen.String()
		return true
	})
	return errors.Join(err, other)
}

// acceptAs chooses the epoch of the memory that takes the place of the lost one, and
// returns the one that was chosen first.
func (m *Memory) acceptAs(ctx context.Context, of types.NamespacedName, lost, next string) (string, error) {
	key := memoryKey(nextOf, of)
	err := m.change(ctx, func(data map[string]string) bool {
		if words := strings.Fields(data[key]); len(words) == 2 && words[0] == lost {
			next = words[1]
			return false
		}
		data[key] = lost + " " + next
		return true
	})
	return next, err
}

// forget says that no payment of the lost memory is looked for any more.
func (m *Memory) forget(ctx context.Context, of types.NamespacedName, l loss) error {
	return m.change(ctx, func(data map[string]string) bool {
		was, err := storeMemory(data).loss(of)
		if err != nil || was.epoch != l.epoch || was.forget {
			return false
		}
		was.forget = true
		data[memoryKey(lossOf, of)] = was.String()
		return true
	})
}

// spend notes that an acceptance of this epoch was there while the epoch was not lost: it
// says nothing of a later loss. "": there is none any more.
func (m *Memory) spend(ctx context.Context, of types.NamespacedName, epoch string) error {
	key := memoryKey(spentOf, of)
	return m.change(ctx, func(data map[string]string) bool {
		if data[key] == epoch {
			return false
		}
		if data[key] = epoch; epoch == "" {
			delete(data, key)
		}
		return true
	})
}

// acceptLoss puts another memory in the place of the one that was lost.
func (m *Memory) acceptLoss(ctx context.Context, of types.NamespacedName, lost string, id store.Identity, l loss, seen sighting) error {
	var other error
	err := m.change(ctx, func(data map[string]string) bool {
		other = nil
		if was := data[memoryKey(epochOf, of)]; was != "" && was != lost {
			other = fmt.Errorf("%s of the %s is %q by now, not %q", memoryKey(epochOf, of), m, was, lost)
			return false
		}
		data[memoryKey(epochOf, of)] = id.Epoch
		data[memoryKey(keyDomainOf, of)] = id.KeyDomain
		data[memoryKey(lossOf, of)] = l.String()
		delete(data, memoryKey(nextOf, of))
		delete(data, memoryKey(spentOf, of))
		data[memoryKey(seenOf, of)] = seen.String()
		return true
	})
	return errors.Join(err, other)
}
