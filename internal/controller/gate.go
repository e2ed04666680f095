// This file is the gate before every resolution, and before every registration by an object:
// none is taken until the API server has refused a forged one.
//
// Who may resolve a hold is decided by an admission policy. Where that policy is not
// in force, whoever may patch a PaymentHold could release a payment. So the operator,
// which never has the verb resolve, tries it: dry runs that must be refused, by the
// policies and by nothing else, each time before a resolution is taken. Who may register an
// intent for which caller is decided in the same way, and tried in the same way.

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// The ValidatingAdmissionPolicies that must refuse; a prefix before their names is accepted.
const (
	ResolutionPolicy   = "holdfast-paymentholds-resolution"
	OperatorOnlyPolicy = "holdfast-paymentholds-operator-only"
	IntentCallerPolicy = "holdfast-paymentintents-caller"
)

// forgery is what a dry run forges.
type forgery struct {
	// what it is, of all that are not protected, and the verb that the operator must not have.
	what, all, verb string
}

var (
	forgedResolution   = forgery{"resolution", "resolutions", "resolve"}
	forgedRegistration = forgery{"registration", "registrations", "register-for"}
)

const (
	// forger is who the forged resolution says has decided: nobody.
	forger = "holdfast:admission-probe"
	// probeKept is how long a hold to probe with may be there. One that is older was
	// left behind by a process that ended meanwhile.
	probeKept = time.Minute
)

// errNotRefused: what was forged is not protected against it. The text says what to do.
var errNotRefused = errors.New("not protected by the API server")

// Gate tells whether a forgery is refused. It remembers nothing: what was
// refused a second ago may be accepted now.
type Gate struct{ live client.Client }

// NewGate probes as this client.
func NewGate(live client.Client) *Gate { return &Gate{live: live} }

// check returns nil while resolutions in the namespace are protected, errNotRefused
// with the reason while they are not, and any other error if it cannot be told.
func (g *Gate) check(ctx context.Context, namespace string) error {
	if err := g.born(ctx, namespace); err != nil {
		return err
	}
	return g.probe(ctx, namespace)
}

// checkIntents is check for registrations by objects of the namespace.
func (g *Gate) checkIntents(ctx context.Context, namespace string) error {
	err := g.live.Create(ctx, probeIntent(namespace), client.DryRunAll, client.FieldOwner(ownerIntent))
	if unasked(err) {
		return fmt.Errorf("probe whether %s are protected: %w", forgedRegistration.all, err)
	}
	return judged(err, IntentCallerPolicy, forgedRegistration)
}

// unasked says that the API server refused before it asked any policy, by RBAC or the kind's schema,
// as between the steps of an installation. That tells nothing of the policy, and passes. What is
// refused after the policies were asked, as by a quota, they have let pass.
func unasked(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		return false
	}
	details := status.Status().Details
	switch {
	case apierrors.IsInvalid(err): // by a field of it
		return details != nil && len(details.Causes) > 0
	case apierrors.IsForbidden(err):
		return strings.Contains(err.Error(), " cannot create resource ")
	}
	return false
}

// forged is the resolution that nobody gave.
func forged() *v1alpha1.HoldResolution {
	return &v1alpha1.HoldResolution{Decision: v1alpha1.DecisionReject, Reason: "probe: this must be refused", By: forger}
}

// born tries to make a hold that is resolved from the beginning.
func (g *Gate) born(ctx context.Context, namespace string) error {
	hold := probeHold(namespace)
	hold.Spec.Resolution = forged()
	err := g.live.Create(ctx, hold, client.DryRunAll, client.FieldOwner(ownerHold))
	return judged(err, OperatorOnlyPolicy, forgedResolution)
}

// probe forges a resolution of a hold that has none. If there is no such hold, it
// makes one of its own for as long as that takes.
func (g *Gate) probe(ctx context.Context, namespace string) error {
	for range 3 { // a hold may be resolved or deleted meanwhile
		hold, err := g.unresolved(ctx, namespace)
		if err != nil {
			return fmt.Errorf("look for a hold to probe with: %w", err)
		}
		if hold == nil {
			own := probeHold(namespace)
			if err := g.live.Create(ctx, own, client.FieldOwner(ownerHold)); err != nil {
				return fmt.Errorf("make a hold to probe with: %w", err)
			}
			err := g.forge(ctx, own)
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			gone := client.IgnoreNotFound(g.live.Delete(end, own))
			cancel()
			return errors.Join(err, gone)
		}
		if err := g.forge(ctx, hold); !errors.Is(err, errOvertaken) {
			return err
		}
	}
	return fmt.Errorf("probe whether resolutions are protected: %w", errOvertaken)
}

func (g *Gate) unresolved(ctx context.Context, namespace string) (*v1alpha1.PaymentHold, error) {
	next := ""
	for {
		var page v1alpha1.PaymentHoldList
		err := g.live.List(ctx, &page, client.InNamespace(namespace), client.Limit(100), client.Continue(next))
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			if h := &page.Items[i]; h.Spec.Resolution == nil && h.DeletionTimestamp.IsZero() {
				return h, nil
			}
		}
		if next = page.Continue; next == "" {
			return nil, nil
		}
	}
}

// errOvertaken: the hold changed between the look and the probe.
var errOvertaken = errors.New("the hold was resolved or deleted meanwhile")

// forge tries to resolve the hold, without the right to.
func (g *Gate) forge(ctx context.Context, hold *v1alpha1.PaymentHold) error {
	patch, err := json.Marshal(map[string]any{
		// A hold that somebody resolved meanwhile must not be refused for that.
		"metadata": map[string]any{"resourceVersion": hold.ResourceVersion},
		"spec":     map[string]any{"resolution": forged()},
	})
	if err != nil {
		return err
	}
	target := &v1alpha1.PaymentHold{ObjectMeta: metav1.ObjectMeta{Namespace: hold.Namespace, Name: hold.Name}}
	err = g.live.Patch(ctx, target, client.RawPatch(types.MergePatchType, patch), client.DryRunAll, client.FieldOwner(ownerHold))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return errOvertaken
	}
	return judged(err, ResolutionPolicy, forgedResolution)
}

// judged says what the answer to a forgery proves: only a refusal by the policy itself is
// protection.
func judged(err error, policy string, of forgery) error {
	switch {
	case err == nil:
		return fmt.Errorf("%s are %w: a forged %s was accepted in a dry run, which %s must refuse: apply the admission policies of this version (config/admission), and take the verb %s from the operator", of.all, errNotRefused, of.what, policy, of.verb)
	case refusedBy(err, policy):
		return nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return fmt.Errorf("probe whether %s are protected: %w", of.all, err)
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err):
		return fmt.Errorf("%s are %w: a forged %s was refused, but not by the policy %s: %s", of.all, errNotRefused, of.what, policy, err.Error())
	default:
		return fmt.Errorf("probe whether %s are protected: %w", of.all, err)
	}
}

// refusedBy says that this policy refused, and not RBAC, the schema or another policy.
// The API server gives the policy's name only in the text.
func refusedBy(err error, policy string) bool {
	if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
		return false
	}
	_, after, found := strings.Cut(err.Error(), "ValidatingAdmissionPolicy '")
	name, _, _ := strings.Cut(after, "'")
	return found && (name == policy || strings.HasSuffix(name, "-"+policy))
}

// probeEpoch is the epoch of no store: nothing can be released by such a hold.
const probeEpoch = "probe"

func probeHold(namespace string) *v1alpha1.PaymentHold {
	return &v1alpha1.PaymentHold{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "holdfast-admission-probe-"},
		Spec: v1alpha1.PaymentHoldSpec{
			ToolRef: v1alpha1.ToolReference{Name: "holdfast-admission-probe"}, Caller: forger, IntentID: "probe", Hold: 1,
			Scope: []v1alpha1.HoldPath{"probe"}, Fingerprint: "sha256:" + strings.Repeat("0", 64),
			Record:  v1alpha1.HoldRecord{Epoch: probeEpoch, Nonce: "probe"},
			Reasons: []v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap},
		},
	}
}

// probeIntentName is the name by which the policy knows an object that is only tried.
const probeIntentName = "holdfast-admission-probe"

func probeIntent(namespace string) *v1alpha1.PaymentIntent {
	return &v1alpha1.PaymentIntent{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: probeIntentName},
		Spec: v1alpha1.PaymentIntentSpec{
			ToolRef: v1alpha1.ToolReference{Name: probeIntentName}, Caller: "system:serviceaccount:" + namespace + ":" + probeIntentName,
			IntentID: "probe", Scope: []v1alpha1.HoldPath{"probe"},
		},
	}
}
