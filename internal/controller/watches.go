// This file says which changes of one object are news to another.

package controller

import (
	"context"
	"maps"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// requests are all objects of a list's kind that are wanted; namespace "": of all namespaces.
func requests(ctx context.Context, c client.Reader, list client.ObjectList, namespace string, want func(client.Object) bool) []reconcile.Request {
	list, ok := list.DeepCopyObject().(client.ObjectList)
	if !ok {
		return nil
	}
	if err := c.List(ctx, list, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil { // they are only read
		log.FromContext(ctx).Error(err, "objects to look at again could not be listed")
		return nil
	}
	var out []reconcile.Request
	err := meta.EachListItem(list, func(o runtime.Object) error {
		if obj, ok := o.(client.Object); ok && (want == nil || want(obj)) {
			out = append(out, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: obj.GetNamespace(), Name: obj.GetName()}})
		}
		return nil
	})
	if err != nil {
		log.FromContext(ctx).Error(err, "objects to look at again could not be read")
	}
	return out
}

// enqueueAll looks at every object of the kind again.
func enqueueAll(c client.Reader, list client.ObjectList) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		return requests(ctx, c, list, "", nil)
	})
}

// isMemory passes the operator's ConfigMap, and of its changes those that decide
// something: how far the stores have come is news to nobody.
func isMemory(m *Memory) predicate.Predicate {
	is := predicate.NewPredicateFuncs(func(o client.Object) bool {
		return o.GetNamespace() == m.namespace && o.GetName() == MemoryName
	})
	decides := predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		old, ok := e.ObjectOld.(*corev1.ConfigMap)
		now, isMap := e.ObjectNew.(*corev1.ConfigMap)
		return !ok || !isMap || !maps.Equal(decisive(old.Data), decisive(now.Data))
	}}
	return predicate.And(is, decides)
}

// decisive is what is remembered without how far the stores have come.
func decisive(data map[string]string) map[string]string {
	out := maps.Clone(data)
	maps.DeleteFunc(out, func(key, _ string) bool { return strings.HasPrefix(key, seenOf+".") })
	return out
}

// conditionsChanged passes a change of the spec or of what the conditions say.
func conditionsChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() ||
			!equality.Semantic.DeepEqual(conditionsOf(e.ObjectOld), conditionsOf(e.ObjectNew))
	}}
}

func conditionsOf(o client.Object) []metav1.Condition {
	switch o := o.(type) {
	case *v1alpha1.IdempotencyStore:
		return o.Status.Conditions
	case *v1alpha1.IntentBudget:
		return o.Status.Conditions
	case *v1alpha1.AgentTool:
		return o.Status.Conditions
	}
	return nil
}

// seenChanged passes what a gateway has come to, and not that it is still alive.
func seenChanged() predicate.Predicate {
	isGateway := func(o client.Object) bool { return o.GetLabels()[gatewayLabel] == "true" }
	return predicate.Funcs{
		CreateFunc:  func(e event.CreateEvent) bool { return isGateway(e.Object) },
		DeleteFunc:  func(e event.DeleteEvent) bool { return isGateway(e.Object) },
		GenericFunc: func(event.GenericEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, ok := e.ObjectOld.(*coordinationv1.Lease)
			if !ok || !isGateway(e.ObjectNew) {
				return false
			}
			now, ok := e.ObjectNew.(*coordinationv1.Lease)
			return ok && (old.Annotations[seenTools] != now.Annotations[seenTools] ||
				// One that had stopped has come back.
				now.Spec.RenewTime != nil && !alive(old, now.Spec.RenewTime.Time))
		},
	}
}
