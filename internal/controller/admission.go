// This file keeps the admission policies of tools: each is as its tool's rules are, and one
// whose tool is gone goes too.
//
// What must hold: what nobody has changed is not written, a policy is found by its label also
// if its tool was deleted while no controller ran, and a cluster that refuses a policy keeps
// no tool from being served, since the gateway asks the same rules.

package controller

import (
	"context"
	"fmt"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	admissionv1ac "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/admission"
)

// ownerAdmission is the owner of the fields of admission policies.
const ownerAdmission = "holdfast-admission"

// Fences keeps the admission policies of tools.
type Fences struct {
	cached    client.Reader
	live      client.Client
	namespace string

	mu   sync.Mutex
	self string
}

// NewFences makes the Fences of the operator that runs in this namespace.
func NewFences(cached client.Reader, live client.Client, operatorNamespace string) *Fences {
	return &Fences{cached: cached, live: live, namespace: operatorNamespace}
}

// fencesCache keeps the cache to the policies of this installation.
func fencesCache(operatorNamespace string) map[client.Object]cache.ByObject {
	ours := cache.ByObject{Label: labels.SelectorFromSet(labels.Set{admission.Label: operatorNamespace}), Transform: whole}
	return map[client.Object]cache.ByObject{
		&admissionv1.ValidatingAdmissionPolicy{}:        ours,
		&admissionv1.ValidatingAdmissionPolicyBinding{}: ours,
	}
}

// watches has a tool looked at when its policies change, and when this process becomes the
// leader, so that what a tool has left behind is found.
func (f *Fences) watches(mgr ctrl.Manager, b *builder.Builder) {
	of := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		tool, ok := admission.ToolOf(o)
		if !ok {
			return nil
		}
		return []reconcile.Request{{NamespacedName: tool}}
	})
	b.Watches(&admissionv1.ValidatingAdmissionPolicy{}, of).
		Watches(&admissionv1.ValidatingAdmissionPolicyBinding{}, of).
		WatchesRawSource(source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			go func() {
				select {
				case <-ctx.Done():
				case <-mgr.Elected():
					for _, list := range []client.ObjectList{&admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicyBindingList{}} {
						requests(ctx, f.cached, list, "", func(o client.Object) bool {
							if tool, ok := admission.ToolOf(o); ok {
								queue.Add(reconcile.Request{NamespacedName: tool})
							}
							return false
						})
					}
				}
			}()
			return nil
		}))
}

// apply makes the policies of a tool as its rules are. It returns what the API server says
// of them: that it refuses them, or what its type check warns of.
func (f *Fences) apply(ctx context.Context, tool *v1alpha1.AgentTool) ([]string, error) {
	self, err := f.name(ctx)
	if err != nil {
		return nil, err
	}
	nn := client.ObjectKeyFromObject(tool)
	want := admission.Render(tool, admission.Operator{Namespace: f.namespace, Username: self})
	if want == nil {
		return nil, f.remove(ctx, nn)
	}
	// Its present UID: by that of one that is gone, what is applied would be collected at once.
	var own corev1.Namespace
	if err := f.live.Get(ctx, types.NamespacedName{Name: f.namespace}, &own); err != nil {
		return nil, fmt.Errorf("read the operator's own namespace: %w", err)
	}
	want.GoWith(&own)
	policy, binding := &admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}
	err = applyFence(ctx, f, policy, want.Policy, admissionv1ac.ExtractValidatingAdmissionPolicy)
	if err == nil {
		err = applyFence(ctx, f, binding, want.Binding, admissionv1ac.ExtractValidatingAdmissionPolicyBinding)
	}
	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
		return []string{"the API server does not take the rules as an admission policy: " + err.Error()}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("apply the admission policy of AgentTool %s: %w", nn, err)
	}
	return admission.Warnings(policy, tool), nil
}

// applyFence applies what is not as it should be. It is compared by the fields that were
// applied before: one that somebody else has changed since is no longer among them.
func applyFence[O client.Object, C interface {
	runtime.ApplyConfiguration
	GetName() *string
}](ctx context.Context, f *Fences, object O, want C, extract func(O, string) (C, error)) error {
	err := f.cached.Get(ctx, types.NamespacedName{Name: *want.GetName()}, object)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err == nil {
		has, err := extract(object, ownerAdmission)
		if err != nil {
			return err
		}
		if same, err := sameJSON(has, want); err != nil || same {
			return err
		}
	}
	return f.live.Apply(ctx, want, client.FieldOwner(ownerAdmission), client.ForceOwnership)
}

// remove takes away the policies of a tool that has none, or is gone.
func (f *Fences) remove(ctx context.Context, tool types.NamespacedName) error {
	// Without its binding a policy does nothing.
	for _, o := range []client.Object{&admissionv1.ValidatingAdmissionPolicyBinding{}, &admissionv1.ValidatingAdmissionPolicy{}} {
		err := f.cached.Get(ctx, types.NamespacedName{Name: admission.Name(tool)}, o)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err == nil {
			uid := o.GetUID()
			err = client.IgnoreNotFound(f.live.Delete(ctx, o, client.Preconditions{UID: &uid}))
		}
		if err != nil {
			return fmt.Errorf("remove the admission policy of AgentTool %s: %w", tool, err)
		}
	}
	return nil
}

// name is what the API server calls the operator, whatever it was installed as.
func (f *Fences) name(ctx context.Context) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.self == "" {
		var review authenticationv1.SelfSubjectReview
		if err := f.live.Create(ctx, &review); err != nil {
			return "", fmt.Errorf("ask for the operator's own name: %w", err)
		}
		f.self = review.Status.UserInfo.Username
	}
	return f.self, nil
}

// warned is what a condition says of warnings.
func warned(warnings []string) string {
	return "The spec is valid and its references hold, and the gateways ask its rules. " +
		"The API server warns of them: " + strings.Join(warnings, "; ")
}
