package policy

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func compileLocalTool(change func(*v1alpha1.AgentTool)) (*Tool, error) {
	tool := &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "support", Name: "book"},
		Spec: v1alpha1.AgentToolSpec{
			Effect: v1alpha1.EffectMutating, IntentBudgetRef: &v1alpha1.BudgetReference{Name: "refunds"},
			Upstream: v1alpha1.ToolUpstream{Local: &v1alpha1.LocalUpstream{SettleAfter: metav1.Duration{Duration: time.Minute}}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID: []v1alpha1.Expression{`call.header["idempotency-key"]`},
				Scope:    []v1alpha1.Expression{`path("order", call.body.orderId)`},
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{None: &v1alpha1.NoKey{}}},
		},
	}
	if change != nil {
		change(tool)
	}
	return Compile(tool, &v1alpha1.IntentBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "support", Name: "refunds"},
		Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: "payments"}},
	})
}

func TestALocalToolsEffectiveValues(t *testing.T) {
	tool, err := compileLocalTool(nil)
	if err != nil {
		t.Fatal(err)
	}
	if !tool.Local || !tool.Mutating || tool.Upstream.URL != nil || tool.Guard.Timeout != 30*time.Second || tool.Guard.RenewFor != 15*time.Minute || tool.Guard.SettleAfter != time.Minute {
		t.Errorf("%+v", tool)
	}
	tool, err = compileLocalTool(func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.Local.Lease, o.Spec.Upstream.Local.RenewFor = d(2*time.Second), d(time.Hour)
		o.Spec.RetryBudget = &v1alpha1.RetryBudget{Attempts: p(int32(2))}
		o.Spec.UnknownOutcome = v1alpha1.UnknownHold
	})
	if err != nil || tool.Guard.Timeout != 2*time.Second || tool.Guard.RenewFor != time.Hour || tool.Guard.Retry.Attempts != 2 {
		t.Errorf("%+v, %v", tool, err)
	}
	lease, settleAfter := Times(&v1alpha1.AgentTool{Spec: v1alpha1.AgentToolSpec{Upstream: v1alpha1.ToolUpstream{
		Local: &v1alpha1.LocalUpstream{Lease: d(time.Minute), SettleAfter: metav1.Duration{Duration: time.Hour}}}}})
	if lease != time.Minute || settleAfter != time.Hour {
		t.Errorf("times %s, %s", lease, settleAfter)
	}
}

func TestWhatALocalToolMustNotSay(t *testing.T) {
	for _, c := range []struct {
		field, message string
		change         func(*v1alpha1.AgentTool)
	}{
		{"spec.upstream", "two upstreams", func(o *v1alpha1.AgentTool) { o.Spec.Upstream.HTTP = &v1alpha1.HTTPUpstream{} }},
		{"spec.upstream.local", "Mutating", func(o *v1alpha1.AgentTool) { o.Spec.Effect = v1alpha1.EffectReadOnly }},
		{"spec.upstream.local.lease", "between", func(o *v1alpha1.AgentTool) { o.Spec.Upstream.Local.Lease = d(time.Millisecond) }},
		{"spec.upstream.local.renewFor", "between", func(o *v1alpha1.AgentTool) { o.Spec.Upstream.Local.RenewFor = d(25 * time.Hour) }},
		{"spec.upstream.local.settleAfter", "between", func(o *v1alpha1.AgentTool) { o.Spec.Upstream.Local.SettleAfter = metav1.Duration{} }},
		{"spec.outcomes", "remove it", func(o *v1alpha1.AgentTool) { o.Spec.Outcomes = []v1alpha1.OutcomeRule{} }},
		{"spec.unknownOutcome", "Hold", func(o *v1alpha1.AgentTool) { o.Spec.UnknownOutcome = v1alpha1.UnknownStatusCheck }},
		{"spec.statusCheck", "remove it", func(o *v1alpha1.AgentTool) { o.Spec.StatusCheck = &v1alpha1.StatusCheck{} }},
		{"spec.idempotency.key", "none", func(o *v1alpha1.AgentTool) { o.Spec.Idempotency.Key = v1alpha1.ProviderKey{Header: "Idempotency-Key"} }},
		{"spec.retryBudget.perAttemptTimeout", "lease", func(o *v1alpha1.AgentTool) {
			o.Spec.RetryBudget = &v1alpha1.RetryBudget{PerAttemptTimeout: d(time.Second)}
		}},
		{"spec.cache", "ReadOnly", func(o *v1alpha1.AgentTool) { o.Spec.Cache = &v1alpha1.ResponseCache{} }},
	} {
		_, err := compileLocalTool(c.change)
		var bad *SpecError
		if !errors.As(err, &bad) || bad.Field != c.field || !strings.Contains(bad.Message, c.message) {
			t.Errorf("%s: got %v, want …%s…", c.field, err, c.message)
		}
	}
}

func TestThePathNamesTheIntent(t *testing.T) {
	tool, err := compileLocalTool(nil)
	if err != nil {
		t.Fatal(err)
	}
	call := func(header, path string) (Identity, error) {
		in := CallInput{Method: "POST", Body: []byte(`{"orderId":"9"}`), IntentID: path}
		in.Header = map[string][]string{"Content-Type": {"application/json"}}
		if header != "" {
			in.Header["Idempotency-Key"] = []string{header}
		}
		return tool.Identify(in)
	}
	for _, c := range []struct{ header, path, want string }{
		{"", "k1", "k1"}, {"k1", "k1", "k1"}, {`"k1"`, "k1", "k1"}, {"k1", "", "k1"}, {"", "", ""}, {"k2", "k1", ""},
	} {
		id, err := call(c.header, c.path)
		if (err == nil) != (c.want != "") || id.IntentID != c.want {
			t.Errorf("header %q, path %q: %q, %v", c.header, c.path, id.IntentID, err)
		}
	}
}
