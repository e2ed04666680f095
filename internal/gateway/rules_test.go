// What a caller is told when a rule of the tool denies its payment or wants a person.

package gateway

import (
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

func TestRulesOfATool(t *testing.T) {
	r := setUp(t)
	// Paid before there were rules: it is answered whatever they say.
	r.pay(ask{id: "k0", body: refundOf("0", "900")}, 201, guard.Allow)
	r.tool("charge", "/charges", func(o *v1alpha1.AgentTool) {
		o.Spec.Admission = []v1alpha1.AdmissionRule{
			{Expression: `quantity(object.spec.amount.value).compareTo(quantity("500")) <= 0`, Message: "above 500 a person decides.", Action: v1alpha1.AdmissionHold},
			{Expression: `quantity(object.spec.amount.value).compareTo(quantity("800")) <= 0`, Message: "more than 800 is never paid.", Action: v1alpha1.AdmissionDeny},
			{Expression: `object.spec.scope.all(p, !p.contains("order/13"))`, Message: "never order 13", Action: v1alpha1.AdmissionDeny},
			{Expression: `object.spec.scope[0].split("/")[3] != "14" || object.spec.lineage == "a"`, Message: "order 14 needs a lineage", Action: v1alpha1.AdmissionDeny},
		}
	})
	r.pay(ask{id: "k0", body: refundOf("0", "900")}, 201, guard.Replay)

	r.pay(ask{id: "k1", body: refundOf("1", "500")}, 201, guard.Allow)
	p := r.pay(ask{id: "k2", body: refundOf("2", "800.01")}, 403, guard.Deny).problem(t)
	if p.Reason != string(guard.ReasonDeniedByRule) || p.Intent != "k2" || p.Poll != "" || p.SuggestedAction != actStop || p.RetryAfter != 0 || p.Hold != "" ||
		!strings.Contains(p.Detail, "Nothing was sent. An admission rule of the tool denies this payment: more than 800 is never paid. Do not split") {
		t.Errorf("problem %+v", p)
	}
	if got, _ := r.poll("charge", "k2", "agent", ""); got.status != 404 {
		t.Errorf("there is a record of it: %+v", got)
	}
	p = r.pay(ask{id: "k3", body: refundOf("13", "1")}, 403, guard.Deny).problem(t)
	if !strings.Contains(p.Detail, "never order 13") {
		t.Errorf("problem %+v", p)
	}
	// A rule that fails denies, and says why.
	p = r.pay(ask{id: "k4", body: refundOf("14", "1")}, 403, guard.Deny).problem(t)
	if !strings.Contains(p.Detail, "resulted in error: no such key: lineage") {
		t.Errorf("problem %+v", p)
	}
	p = r.pay(ask{id: "k5", body: refundOf("5", "500.01")}, 409, guard.UnknownHold).problem(t)
	if p.Reason != string(guard.ApprovalRequired) || p.Hold == "" || p.SuggestedAction != actPoll || p.Poll == "" ||
		!strings.Contains(p.Detail, "above 500 a person decides. Do not repeat it under new intent IDs, and do not split it. A person decides in the PaymentHold "+p.Hold) {
		t.Errorf("problem %+v", p)
	}
	r.paid(2, 2)
}

func TestAHoldThatExpiredIsTold(t *testing.T) {
	p := fromGuard(guard.Answer{
		Verdict: guard.Deny, Reason: guard.ReasonHoldExpired, Intent: guard.View{Key: guard.Key{Caller: "agent", IntentID: "k1"}, Exists: true},
	}, access.Caller{Username: "agent", UID: "1"})
	if p.Status != 403 || p.Reason != "hold_expired" || p.Type != problemBase+"hold-expired" || p.SuggestedAction != actNewIntent || !strings.Contains(p.Detail, "nobody decided in time") {
		t.Errorf("problem %+v", p)
	}
}
