// This file is the operator's own memory: which store a budget had, which budget a
// tool had, and each store's epoch and key domain.
//
// It lives in one ConfigMap in the operator's namespace, without owner, so that it
// outlives the objects that it speaks of. What is remembered is never overwritten
// here: to accept a change, a person edits the ConfigMap.

package controller

import (
	"context"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// MemoryName is the name of the ConfigMap.
const MemoryName = "holdfast-memory"

// A key is KIND.NAMESPACE_NAME: names and namespaces have no underscore, so no two meet.
const (
	epochOf     = "epoch"     // of a store
	keyDomainOf = "keyDomain" // of a store
	storeOf     = "store"     // of a budget
	budgetOf    = "budget"    // of a tool
)

func memoryKey(kind string, of types.NamespacedName) string {
	return kind + "." + of.Namespace + "_" + of.Name
}

// Memory is the operator's ConfigMap.
type Memory struct {
	namespace string
	// cached answers what is already as it should be; all else is read and written live.
	cached client.Reader
	live   client.Client
	mu     sync.Mutex
}

// NewMemory returns the memory that is kept in this namespace.
func NewMemory(namespace string, cached client.Reader, live client.Client) *Memory {
	return &Memory{namespace: namespace, cached: cached, live: live}
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
	if ref == "" {
		data, err := m.read(ctx, m.live)
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

// bearer is another store that is remembered with this epoch; "" if there is none.
func (s storeMemory) bearer(epoch string, not types.NamespacedName) string {
	for k, v := range s {
		if strings.HasPrefix(k, epochOf+".") && v == epoch && k != memoryKey(epochOf, not) {
			return strings.Replace(strings.TrimPrefix(k, epochOf+"."), "_", "/", 1)
		}
	}
	return ""
}

// rememberStore writes a store's identity where none is remembered.
func (m *Memory) rememberStore(ctx context.Context, of types.NamespacedName, epoch, keyDomain string) error {
	var other error
	err := m.change(ctx, func(data map[string]string) bool {
		changed := false
		for k, v := range map[string]string{memoryKey(epochOf, of): epoch, memoryKey(keyDomainOf, of): keyDomain} {
			switch was, ok := data[k]; {
			case !ok:
				data[k], changed = v, true
			case was != v:
				other = fmt.Errorf("%s of the %s is %q by now, not %q", k, m, was, v)
				return false
			}
		}
		return changed
	})
	if err != nil {
		return err
	}
	return other
}
