package controller

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

func explained(lines []v1alpha1.HoldSentence) string {
	var out []string
	for _, l := range lines {
		out = append(out, string(l))
	}
	return strings.Join(out, "\n")
}

func TestAHoldIsExplained(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	w.ready()
	w.pay(p, "refund", "first", "9", "10", guard.AttemptSucceeded)
	name := w.holdOf(p, "second", "9", "11.50")
	o := w.shown(name, v1alpha1.HoldHeld)
	if s := o.Status.Summary; s == nil || *s != (v1alpha1.HoldSummary{Amount: "11.50 USD", Reasons: "ScopeOverlap", Overlaps: "first (Succeeded)"}) {
		t.Errorf("the line of the worklist is %s", asJSON(s))
	}
	text := explained(o.Status.Explanation)
	contains(t, text, w.agent(), "11.50 USD to 9", `"second"`, "ScopeOverlap: another intent is for the same thing", "If it shall be paid as well: Release")
	// Side by side: the two intents are two rows with the same columns.
	var at []int
	for _, line := range o.Status.Explanation {
		for _, amount := range []string{"AMOUNT", "11.50 USD", "10.00 USD"} {
			if i := strings.Index(string(line), amount); i > 0 && !strings.Contains(string(line), "asked") {
				at = append(at, i)
			}
		}
	}
	if len(at) != 3 || at[0] != at[1] || at[1] != at[2] {
		t.Errorf("the amounts stand at %v, which is not one below the other:\n%s", at, text)
	}
	must(t, w.resolve(name, v1alpha1.HoldResolution{Decision: v1alpha1.DecisionRelease}))
	contains(t, explained(w.shown(name, v1alpha1.HoldResolved).Status.Explanation), `alice decided Release ("the customer confirmed")`)

	// It is sent, and paid: the hold's events are the story, each told once also when
	// the object is looked at again and again.
	w.pay(p, "refund", "second", "9", "11.50", guard.AttemptSucceeded)
	for range 5 {
		p.reconcileHold(w, name)
	}
	want := map[string]int{reasonHeld: 1, reasonResolved: 1, reasonSent: 1, reasonSettled: 1}
	eventually(t, func() error {
		var list eventsv1.EventList
		if err := admin.List(w.ctx, &list, client.InNamespace(w.ns)); err != nil {
			return err
		}
		got := map[string]int{}
		for _, e := range list.Items {
			if e.Regarding.Name == name {
				got[e.Reason]++
				if e.Series != nil {
					got[e.Reason] += int(e.Series.Count) - 1
				}
			}
		}
		if asJSON(got) != asJSON(want) {
			return fmt.Errorf("the events are %v, want %v", got, want)
		}
		return nil
	})
}

// An explanation of a hold with the longest of everything is still one that the API server takes.
func TestAnExplanationIsBounded(t *testing.T) {
	w := newWorld(t)
	hold := probeHold(w.ns)
	hold.Spec.Record.Epoch = "bounded"
	long := strings.Repeat("ü\n", 250)
	hold.Spec.Caller, hold.Spec.IntentID, hold.Spec.Recipient = strings.Repeat("c", 512), strings.Repeat("i\t", 2048), strings.Repeat("ü", 4096)
	hold.Spec.Amount = &v1alpha1.Money{Value: strings.Repeat("9", 128), Currency: strings.Repeat("X", 128)}
	hold.Spec.Reasons = nil
	for r := range because {
		hold.Spec.Reasons = append(hold.Spec.Reasons, r)
	}
	for i := range guard.MaxMatches {
		hold.Spec.Matches = append(hold.Spec.Matches, v1alpha1.HoldMatch{
			Caller: strings.Repeat("c", 512), Tool: strings.Repeat("t", 63), IntentID: fmt.Sprint(i, long), Relation: strings.Repeat("r", 256),
			Amount: hold.Spec.Amount, State: strings.Repeat("s", 32), At: ptr.To(metav1.NewTime(time.Unix(1e9, 0))),
		})
	}
	hold.Spec.MatchCount = ptr.To(int32(2_000_000_000))
	must(t, as(operatorUser).Create(w.ctx, hold))
	next := holdStatus(hold, finding{view: guard.HoldView{State: guard.HoldHeld, Cause: strings.Repeat("cause ", 1000)}})
	if _, err := applyStatus(w.ctx, as(operatorUser), hold, &hold.Status, next, ownerHold); err != nil {
		t.Fatal(err)
	}
	var got v1alpha1.PaymentHold
	must(t, w.get(hold.Name, &got))
	contains(t, explained(got.Status.Explanation), "and 1999999992 more")
	if n := len(explained(got.Status.Explanation)); n > 16<<10 {
		t.Errorf("the explanation has %d bytes", n)
	}
	if strings.ContainsAny(explained(got.Status.Explanation), "\t") || strings.Contains(got.Status.Summary.Overlaps, "\n") {
		t.Error("what the agent wrote breaks the lines")
	}
}

// A person on call reads what every reason means, in the hold and on the page.
func TestEachReasonHasItsSentence(t *testing.T) {
	source, err := os.ReadFile("../../api/v1alpha1/paymenthold_types.go")
	must(t, err)
	page, err := os.ReadFile("../../docs/holds-on-call.md")
	must(t, err)
	enum := regexp.MustCompile(`Enum=(ScopeOverlap;[A-Za-z;]+)`).FindSubmatch(source)
	if enum == nil {
		t.Fatal("the list of reasons was not found")
	}
	reasons := strings.Split(string(enum[1]), ";")
	for _, r := range reasons {
		if !strings.HasPrefix(because[v1alpha1.HoldReason(r)], r+": ") {
			t.Errorf("no hold says what %s means", r)
		}
		if !strings.Contains(string(page), "| `"+r+"` |") {
			t.Errorf("holds-on-call.md does not say what %s means", r)
		}
	}
	if len(because) != len(reasons) {
		t.Errorf("%d reasons have a sentence, and there are %d", len(because), len(reasons))
	}
}

// KeyExpired says something else of what may have been sent.
func TestAForgottenKeyIsExplained(t *testing.T) {
	for _, tc := range []struct {
		reasons []v1alpha1.HoldReason
		want    string
	}{
		{[]v1alpha1.HoldReason{v1alpha1.HoldKeyExpired}, because[v1alpha1.HoldKeyExpired]},
		{[]v1alpha1.HoldReason{v1alpha1.HoldOutcomeUnknown, v1alpha1.HoldKeyExpired}, forgottenKey},
	} {
		text := explainedFor(tc.reasons)
		if !strings.Contains(text, tc.want) || strings.Count(text, "KeyExpired:") != 1 {
			t.Errorf("%v: %s", tc.reasons, text)
		}
	}
}

// explainedFor is what is said of a hold with these reasons.
func explainedFor(reasons []v1alpha1.HoldReason) string {
	hold := probeHold("ns")
	hold.Spec.Reasons = reasons
	return explained(explain(hold, &v1alpha1.PaymentHoldStatus{State: v1alpha1.HoldHeld}, nil))
}

// What waits for an approval is no repetition.
func TestAnApprovalIsAskedForAsOne(t *testing.T) {
	for _, tc := range []struct {
		reasons []v1alpha1.HoldReason
		want    string
	}{
		{[]v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap}, "If it shall be paid as well: Release. If it is a repetition: Reject."},
		{[]v1alpha1.HoldReason{v1alpha1.HoldApprovalRequired}, "If it is approved: Release. If not: Reject."},
		{[]v1alpha1.HoldReason{v1alpha1.HoldBudgetExceeded, v1alpha1.HoldApprovalRequired}, "If it is approved: Release. If not: Reject."},
		{[]v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap, v1alpha1.HoldApprovalRequired}, "If it is approved, and shall be paid as well: Release. If it is not, or is a repetition: Reject."},
	} {
		text := explainedFor(tc.reasons)
		if !strings.Contains(text, tc.want) || strings.Count(text, "Reject") != 1 {
			t.Errorf("%v: %s", tc.reasons, text)
		}
	}
}

// What was sent is told with its key, its times and its status, the last attempts of many,
// and stays to be read while the store cannot be asked.
func TestWhatWasSentIsExplained(t *testing.T) {
	at := time.Unix(1e9, 0)
	var sent []guard.SentView
	for n := 1; n <= 10; n++ {
		sent = append(sent, guard.SentView{Key: fmt.Sprint("hf_", n), AttemptView: guard.AttemptView{
			Number: n, Outcome: guard.AttemptUnknown, Started: at, Ended: at.Add(time.Minute), Status: 504, Detail: "the upstream's gateway timed out",
		}})
	}
	sent[8].Lost = true
	hold := probeHold("ns")
	hold.Spec.Reasons = []v1alpha1.HoldReason{v1alpha1.HoldOutcomeUnknown}
	next := holdStatus(hold, finding{view: guard.HoldView{State: guard.HoldHeld, Sent: sent}})
	text := explained(next.Explanation)
	contains(t, text, "What was sent (10)", "2 earlier ones, then:", "attempt 3, key hf_3: sent 2001-09-09T01:46:40Z, ended 2001-09-09T01:47:40Z, status 504, Unknown: the upstream's gateway timed out",
		"attempt 9, key hf_9: the store's memory of it was lost", "attempt 10, key hf_10")
	if strings.Contains(text, "hf_2:") {
		t.Errorf("too many are shown: %s", text)
	}
	hold.Status = *next
	if after := explained(holdStatus(hold, finding{unknown: "the store is away"}).Explanation); after != text {
		t.Errorf("while the store is away it says %s", after)
	}
	// Where nothing may have been sent there is nothing to look for.
	hold.Spec.Reasons = []v1alpha1.HoldReason{v1alpha1.HoldScopeOverlap}
	if text := explained(holdStatus(hold, finding{view: guard.HoldView{State: guard.HoldHeld, Sent: sent}}).Explanation); strings.Contains(text, "hf_") {
		t.Error(text)
	}
}

// However long an effect is, it names the next hold.
func TestAnEffectNamesTheNextHold(t *testing.T) {
	v := guard.HoldView{State: guard.HoldVoid, Effect: strings.Repeat("long ", 1000), Next: "refund-abc-2"}
	if got := effectOf(v); !strings.HasSuffix(got, " The intent was held again, as PaymentHold refund-abc-2.") || len([]rune(got)) > maxMessage {
		t.Errorf("%d characters: %s", len([]rune(got)), got)
	}
	text := explained(holdStatus(probeHold("ns"), finding{view: v}).Explanation)
	contains(t, text, "nothing to decide here any more", "as PaymentHold refund-abc-2.")
	v.State = guard.HoldHeld
	if got := effectOf(v); got != v.Effect {
		t.Errorf("one that stands: %s", got)
	}
}
