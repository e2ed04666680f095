// Applying config/ to the cluster, and knowing when it is in force.
package whole

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// Admin is the administrator's client, for Holdfast's kinds too.
func (w *Whole) Admin() (client.Client, error) {
	config, err := w.RESTConfig()
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return client.New(config, client.Options{Scheme: scheme})
}

// applyConfig applies the kinds, waits for them, and then the rest: a policy is
// type-checked against the kinds that it finds.
func (w *Whole) applyConfig(ctx context.Context) error {
	if err := w.apply(ctx, "-k", filepath.Join(w.o.Root, "config", "crd")); err != nil {
		return err
	}
	admin, err := w.Admin()
	if err != nil {
		return err
	}
	if err := eventually(ctx, "the kinds are established", func(ctx context.Context) error { return established(ctx, admin) }); err != nil {
		return err
	}
	if err := w.apply(ctx, "-k", filepath.Join(w.o.Root, "config", "without-manager")); err != nil {
		return err
	}
	return eventually(ctx, "the admission policies are in force", func(ctx context.Context) error { return inForce(ctx, admin) })
}

// applySamples applies the samples for this machine and waits until each of their
// tools can be called.
func (w *Whole) applySamples(ctx context.Context) error {
	samples, err := os.ReadFile(filepath.Join(w.o.Root, "config", "samples", "support.yaml"))
	if err != nil {
		return err
	}
	text := string(samples)
	if w.o.ProviderPort != SamplesProviderPort {
		named := "127.0.0.1:" + strconv.Itoa(SamplesProviderPort)
		if !strings.Contains(text, named) {
			return fmt.Errorf("the samples do not name the provider as %s, so its port cannot be changed there", named)
		}
		text = strings.ReplaceAll(text, named, "127.0.0.1:"+strconv.Itoa(w.o.ProviderPort))
	}
	if w.o.Store != "" {
		if text, err = w.onServer(text); err != nil {
			return err
		}
	}
	applied := filepath.Join(w.Dir(), "samples.yaml")
	if err := os.WriteFile(applied, []byte(text), 0o600); err != nil {
		return err
	}
	if err := w.apply(ctx, "-f", applied); err != nil {
		return err
	}
	admin, err := w.Admin()
	if err != nil {
		return err
	}
	return eventually(ctx, "the sample tools are ready", func(ctx context.Context) error { return toolsReady(ctx, admin, agentNamespace) })
}

// apply is strict: a field that the kind does not have is an error, not a
// protection that is silently off.
func (w *Whole) apply(ctx context.Context, from ...string) error {
	args := append([]string{"apply", "--server-side", "--force-conflicts", "--validate=strict"}, from...)
	_, err := w.RunKubectl(ctx, args...)
	return err
}

func established(ctx context.Context, admin client.Client) error {
	var list apiextensionsv1.CustomResourceDefinitionList
	if err := admin.List(ctx, &list); err != nil {
		return err
	}
	ours := 0
	for _, crd := range list.Items {
		if crd.Spec.Group != v1alpha1.GroupName {
			continue
		}
		ours++
		done := false
		for _, c := range crd.Status.Conditions {
			done = done || c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
		}
		if !done {
			return fmt.Errorf("%s is not established", crd.Name)
		}
	}
	if ours == 0 {
		return fmt.Errorf("there is no kind of %s", v1alpha1.GroupName)
	}
	return nil
}

// inForce tries to make a hold as the administrator, which only the operator may:
// from the moment that this is refused by the policy, no hold can be forged.
func inForce(ctx context.Context, admin client.Client) error {
	forged := &v1alpha1.PaymentHold{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "forged-to-be-refused"},
		Spec: v1alpha1.PaymentHoldSpec{
			ToolRef:     v1alpha1.ToolReference{Name: "none"},
			Caller:      "system:serviceaccount:default:nobody",
			IntentID:    "none",
			Hold:        1,
			Scope:       []v1alpha1.HoldPath{"none"},
			Fingerprint: "sha256:" + strings.Repeat("0", 64),
			Record:      v1alpha1.HoldRecord{Epoch: "none", Nonce: "none"},
			Reasons:     []v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap},
		},
	}
	err := admin.Create(ctx, forged, client.DryRunAll, client.FieldValidation(metav1.FieldValidationStrict))
	switch {
	case err == nil:
		return errors.New("a PaymentHold that the operator did not make is not refused yet")
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy"):
		return nil
	default:
		return fmt.Errorf("a forged PaymentHold should be refused by the admission policy, but: %w", err)
	}
}

func toolsReady(ctx context.Context, admin client.Client, namespace string) error {
	var list v1alpha1.AgentToolList
	if err := admin.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return err
	}
	if len(list.Items) == 0 {
		return fmt.Errorf("there is no AgentTool in namespace %s", namespace)
	}
	for _, tool := range list.Items {
		ready := apimeta.FindStatusCondition(tool.Status.Conditions, "Ready")
		switch {
		case ready == nil:
			return fmt.Errorf("AgentTool %s has no condition Ready", tool.Name)
		case ready.Status != metav1.ConditionTrue || ready.ObservedGeneration != tool.Generation:
			return fmt.Errorf("AgentTool %s is not ready: %s: %s", tool.Name, ready.Reason, ready.Message)
		}
	}
	return nil
}

// eventually polls until done says nil, and has its last word in the error.
func eventually(ctx context.Context, what string, done func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var last error
	for {
		err := done(ctx)
		if err == nil {
			return nil
		}
		// When the time is over the question itself fails; the answer before says more.
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w; last: %w", what, ctx.Err(), last)
		case <-tick.C:
		}
	}
}
