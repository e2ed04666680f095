package policy

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func resumedTool(changes ...func(*v1alpha1.AgentTool)) *v1alpha1.AgentTool {
	return refundTool(func(o *v1alpha1.AgentTool) {
		o.Spec.UnknownOutcome = v1alpha1.UnknownResume
		o.Spec.Idempotency.ProviderDeduplicates = &v1alpha1.ProviderDeduplication{Window: metav1.Duration{Duration: 24 * time.Hour}}
		for _, change := range changes {
			change(o)
		}
	})
}

func TestResumeIsCompiled(t *testing.T) {
	out := compiled(t, resumedTool())
	if r, g := out.Resume, out.Guard.Resume; r == nil || g == nil || r.Window != 24*time.Hour || g.Window != r.Window || r.Upstream == "" || g.Upstream != r.Upstream {
		t.Fatalf("%+v, %+v", out.Resume, out.Guard.Resume)
	}
	if out.Check != nil || out.Guard.Check != nil {
		t.Errorf("a status check that nobody declared: %+v", out.Check)
	}
	both := compiled(t, resumedTool(func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck = ledgerCheck() }))
	if both.Check == nil || both.Guard.Check == nil || both.Check.Upstream != both.Resume.Upstream {
		t.Errorf("with a status check: %+v, %+v", both.Check, both.Resume)
	}
	if hold := compiled(t, refundTool()); hold.Resume != nil || hold.Guard.Resume != nil {
		t.Errorf("a tool without: %+v", hold.Resume)
	}
	other := compiled(t, resumedTool(func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP.URL = "http://crm.support.svc:8080/other" }))
	if other.Resume.Upstream == out.Resume.Upstream {
		t.Error("another URL is the same upstream")
	}
}

func TestResumesThatCannotBeUsed(t *testing.T) {
	for name, c := range map[string]struct {
		change      func(*v1alpha1.AgentTool)
		field, text string
	}{
		"no deduplication": {func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.ProviderDeduplicates = nil }, "spec.idempotency.providerDeduplicates", "missing"},
		"no Resume":        {func(o *v1alpha1.AgentTool) { o.Spec.UnknownOutcome = v1alpha1.UnknownHold }, "spec.idempotency.providerDeduplicates", "for unknownOutcome Resume"},
		"no key":           {func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key = v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}} }, "spec.idempotency.key", "deduplicates by the key"},
		"a short window":   {func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.ProviderDeduplicates.Window.Duration = time.Second }, "spec.idempotency.providerDeduplicates.window", "between"},
		"a long window":    {func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.ProviderDeduplicates.Window.Duration = 721 * time.Hour }, "spec.idempotency.providerDeduplicates.window", "between"},
		"a window in which nothing fits": {func(o *v1alpha1.AgentTool) {
			o.Spec.Upstream.HTTP.SettleAfter = &metav1.Duration{Duration: 24 * time.Hour}
		}, "spec.idempotency.providerDeduplicates.window", "nothing could ever be sent again"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Compile(resumedTool(c.change), refundBudget())
			var spec *SpecError
			if !errors.As(err, &spec) || spec.Field != c.field || !strings.Contains(spec.Message, c.text) {
				t.Fatalf("%v, want %s: …%s…", err, c.field, c.text)
			}
		})
	}
}
