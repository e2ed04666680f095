// People: they look at PaymentHolds and resolve them, with kubectl.

package e2e

import (
	"context"
	"encoding/json"
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// kubectl runs it as somebody, in this world's namespace.
func (w *world) kubectl(ctx context.Context, as string, args ...string) (string, error) {
	return all.RunKubectl(ctx, append([]string{"--namespace=" + w.namespace, "--as=" + as}, args...)...)
}

// resolution is what a person writes.
type resolution struct {
	Decision          string `json:"decision"`
	Reason            string `json:"reason"`
	By                string `json:"by,omitempty"`
	ProviderReference string `json:"providerReference,omitempty"`
	Result            string `json:"result,omitempty"`
}

func (r resolution) patch() string {
	GinkgoHelper()
	if r.Reason == "" {
		r.Reason = "looked at it"
	}
	data, err := json.Marshal(map[string]any{"spec": map[string]any{"resolution": r}})
	Expect(err).NotTo(HaveOccurred())
	return string(data)
}

// tryResolve is kubectl patch hold, as somebody.
func (w *world) tryResolve(ctx context.Context, as, hold string, r resolution) error {
	GinkgoHelper()
	_, err := w.kubectl(ctx, as, "patch", "hold", hold, "--type=merge", "--patch="+r.patch())
	return err
}

// hold reads a PaymentHold.
func (w *world) hold(ctx context.Context, name string) (*v1alpha1.PaymentHold, error) {
	var h v1alpha1.PaymentHold
	return &h, admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &h)
}

// holdIs waits until a PaymentHold is in a state, and returns it.
func (w *world) holdIs(ctx context.Context, name string, state v1alpha1.HoldState) *v1alpha1.PaymentHold {
	GinkgoHelper()
	var h *v1alpha1.PaymentHold
	Eventually(func(ctx context.Context) (v1alpha1.HoldState, error) {
		var err error
		h, err = w.hold(ctx, name)
		return h.Status.State, err
	}).WithContext(ctx).Should(Equal(state), func() string { return fmt.Sprintf("%s: %+v", name, h.Status) })
	return h
}

// resolve is what a person does who may: it waits until the hold can be resolved, resolves it, and waits for the effect.
func (w *world) resolve(ctx context.Context, hold string, r resolution) *v1alpha1.PaymentHold {
	GinkgoHelper()
	w.holdIs(ctx, hold, v1alpha1.HoldHeld)
	Expect(w.tryResolve(ctx, resolver, hold, r)).To(Succeed())
	return w.holdIs(ctx, hold, v1alpha1.HoldResolved)
}

// release is the resolution that lets a payment go.
var release = resolution{Decision: "Release", Reason: "a second item, confirmed with the customer"}

// holds are all PaymentHolds of this world.
func (w *world) holds(ctx context.Context) []v1alpha1.PaymentHold {
	GinkgoHelper()
	var list v1alpha1.PaymentHoldList
	Expect(admin.List(ctx, &list, client.InNamespace(w.namespace))).To(Succeed())
	return list.Items
}

func mustJSON(v any) string {
	GinkgoHelper()
	data, err := json.Marshal(v)
	Expect(err).NotTo(HaveOccurred())
	return string(data)
}
