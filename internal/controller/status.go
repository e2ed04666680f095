// This file is how every controller writes a status: computed whole, compared with
// what is there, and applied only when something changed, under an owner of its own.

package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// The owners of fields: one a controller.
const (
	ownerMemory  = "holdfast-memory"
	ownerStore   = "holdfast-idempotencystore"
	ownerBudget  = "holdfast-intentbudget"
	ownerTool    = "holdfast-agenttool"
	ownerHold    = "holdfast-paymenthold"
	ownerIntent  = "holdfast-paymentintent"
	ownerGateway = "holdfast-gateway"
)

// maxMessage is the longest message of a condition.
const maxMessage = 2048

// conditions collects what a controller says of an object in one visit. What it
// does not say again goes away.
type conditions struct {
	old        []metav1.Condition
	generation int64
	list       []metav1.Condition
}

func newConditions(old []metav1.Condition, generation int64) *conditions {
	return &conditions{old: old, generation: generation}
}

// set says one condition. Its time moves only when its status does.
func (c *conditions) set(kind string, status metav1.ConditionStatus, reason, message string) {
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	next := metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: clip(message, maxMessage),
		ObservedGeneration: c.generation, LastTransitionTime: now,
	}
	if was := find(c.old, kind); was != nil && was.Status == status {
		next.LastTransitionTime = was.LastTransitionTime
	}
	c.list = slices.DeleteFunc(c.list, func(o metav1.Condition) bool { return o.Type == kind })
	c.list = append(c.list, next)
	slices.SortFunc(c.list, func(a, b metav1.Condition) int { return cmp.Compare(a.Type, b.Type) })
}

func find(list []metav1.Condition, kind string) *metav1.Condition {
	for i := range list {
		if list[i].Type == kind {
			return &list[i]
		}
	}
	return nil
}

// isTrue says that the condition was true for this generation.
func isTrue(list []metav1.Condition, kind string, generation int64) bool {
	c := find(list, kind)
	return c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == generation
}

// clip shortens a text that is longer than the field it goes to, in whole characters.
func clip(s string, limit int) string {
	s = strings.ToValidUTF8(s, "�")
	if utf8.RuneCountInString(s) <= limit {
		return s
	}
	return string([]rune(s)[:limit-1]) + "…"
}

// sorted returns the conditions in the order in which they are compared.
func sorted(list []metav1.Condition) []metav1.Condition {
	out := slices.Clone(list)
	slices.SortFunc(out, func(a, b metav1.Condition) int { return cmp.Compare(a.Type, b.Type) })
	return out
}

// applyStatus writes the status if it differs from what is there, and says whether
// it did. Both are pointers to the kind's status struct. An object that is gone, or
// was made again meanwhile, is left alone.
func applyStatus(ctx context.Context, c client.Client, obj client.Object, was, now any, owner string) (bool, error) {
	if equality.Semantic.DeepEqual(was, now) {
		return false, nil
	}
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return false, err
	}
	status, err := runtime.DefaultUnstructuredConverter.ToUnstructured(now)
	if err != nil {
		return false, fmt.Errorf("status of %s %s/%s: %w", gvk.Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	u.SetGroupVersionKind(gvk)
	u.SetNamespace(obj.GetNamespace())
	u.SetName(obj.GetName())
	// The UID keeps one object's status from an object of the same name that followed it.
	u.SetUID(obj.GetUID())
	err = c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(owner), client.ForceOwnership)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("write the status of %s %s/%s: %w", gvk.Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	return true, nil
}
