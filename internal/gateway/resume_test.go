package gateway

// Unknown outcomes that are sent again over TCP, with the provider's ledger as judge.

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/keyring"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/test/provider"
)

func resumes(changes ...func(*v1alpha1.AgentTool)) func(*v1alpha1.AgentTool) {
	return func(o *v1alpha1.AgentTool) {
		o.Spec.UnknownOutcome = v1alpha1.UnknownResume
		o.Spec.Idempotency.ProviderDeduplicates = &v1alpha1.ProviderDeduplication{Window: metav1.Duration{Duration: time.Hour}}
		for _, change := range changes {
			change(o)
		}
	}
}

// keys are request keys that a test may change, or take away.
type keys struct {
	entries map[string][]byte
	stale   *keyring.Ring // what Ring gives; nil: what there is
	reread  int
}

func (k *keys) Ring(ctx context.Context) (*keyring.Ring, error) {
	if k.stale != nil {
		return k.stale, nil
	}
	return k.now()
}

func (k *keys) Reread(context.Context) (*keyring.Ring, error) {
	k.reread++
	return k.now()
}

func (k *keys) now() (*keyring.Ring, error) {
	if k.entries == nil {
		return nil, errors.New("there is no Secret: internal detail")
	}
	return keyring.New(k.entries)
}

// setUpResume is a rig with a provider that deduplicates and a tool whose unknown outcomes are sent again.
func setUpResume(t *testing.T, changes ...func(*v1alpha1.AgentTool)) (*rig, *keys) {
	t.Helper()
	k := &keys{entries: keyring.Generate()}
	r := setUp(t, func(o *Options) { o.RequestKeys = k })
	r.tool("charge", "/charges", resumes(changes...))
	if err := r.p.SetWindow(time.Hour); err != nil {
		t.Fatal(err)
	}
	return r, k
}

// plan has something go wrong at the provider, once.
func (r *rig) plan(fault string) {
	r.t.Helper()
	if err := r.p.AddFault(provider.Fault{Fault: fault, Times: 1, Path: "/charges"}); err != nil {
		r.t.Fatal(err)
	}
}

// sentAgain lets lease and grace pass, and has sent again what is due.
func (r *rig) sentAgain() { r.check(waitedOut) }

func TestTheSameRequestIsSentAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		fault string
		moved int // by the first attempt
	}{
		"the answer was lost":      {"close-after-commit", 1},
		"a 500 after the commit":   {"error-500-after-commit", 1},
		"nothing has moved":        {"reset-before-commit", 0},
		"a 503, nothing has moved": {"error-503-before-commit", 0},
		"a body that was cut":      {"cut-body", 1},
		"a redirect":               {"redirect-307", 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := setUpResume(t, func(o *v1alpha1.AgentTool) {
				o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
					SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
				}
			})
			r.secrets[namespace+"/provider/token"] = "secret-1"
			r.plan(tc.fault)
			a := ask{id: "k1", body: refundOf("9", "49.99"), header: map[string]string{"Accept": "application/json"}}
			p := r.pay(a, 409, guard.UnknownHold).problem(t)
			if p.Reason != string(guard.OutcomeUnknown) || !strings.Contains(p.Detail, "sends it again under the same key") {
				t.Errorf("problem %+v", p)
			}
			if _, doc := r.poll("charge", "k1", "agent", ""); doc.Resumes == nil || doc.Resumes.Next.IsZero() {
				t.Errorf("the poll: %+v", doc.Resumes)
			}
			r.check(time.Second) // too early
			r.paid(tc.moved, 1)
			r.sentAgain()
			r.paid(1, 2)
			again := r.pay(a, 201, guard.Replay)
			if !strings.Contains(again.body, `"orderId":"9"`) {
				t.Errorf("the replay: %s", again.body)
			}
			_, doc := r.poll("charge", "k1", "agent", "")
			if doc.State != guard.Succeeded || len(doc.Attempts) != 2 || !doc.Attempts[1].Resumed || doc.Attempts[0].Outcome != guard.AttemptUnknown || doc.Resumes != nil {
				t.Errorf("the poll: %+v", doc)
			}
			got := r.p.Received()
			first, second := got[len(got)-2], got[len(got)-1]
			if string(first.Body) != string(second.Body) || first.Path != second.Path {
				t.Errorf("sent %s %s, and again %s %s", first.Path, first.Body, second.Path, second.Body)
			}
			for _, h := range []string{"Idempotency-Key", "Content-Type", "Accept", "Authorization", "User-Agent"} {
				if first.Header.Get(h) == "" || first.Header.Get(h) != second.Header.Get(h) {
					t.Errorf("%s was %q, and again %q", h, first.Header.Get(h), second.Header.Get(h))
				}
			}
			if log := r.logged(); strings.Contains(log, "49.99") || strings.Contains(log, "secret-1") || !strings.Contains(log, `"resumed attempt"`) {
				t.Errorf("the log: %s", log)
			}
		})
	}
}

// R18: a refusal of what may have been paid is no failure.
func TestR18ARefusalOfWhatIsSentAgain(t *testing.T) {
	r, _ := setUpResume(t)
	r.plan("close-after-commit")
	a := ask{id: "k1", body: refundOf("9", "5")}
	r.pay(a, 409, guard.UnknownHold)
	r.plan("decline-402")
	r.sentAgain()
	r.paid(1, 2)
	r.sentAgain()
	r.paid(1, 2)
	r.pay(a, 409, guard.UnknownHold)
	r.pay(ask{id: "k2", body: a.body}, 409, guard.UnknownHold)
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Held || doc.Attempts[1].Outcome != guard.AttemptFailed || doc.Attempts[1].Status != 402 || !strings.Contains(doc.Hold.Cause, "attempt 2 was refused") {
		t.Errorf("the poll: %+v, %+v", doc, doc.Hold)
	}
}

// "Already used" is probable success: the status check finds it.
func TestWhatWasUsedAlreadyIsChecked(t *testing.T) {
	r, _ := setUpResume(t, func(o *v1alpha1.AgentTool) {
		check := &v1alpha1.AgentTool{}
		asks()(check)
		o.Spec.StatusCheck = check.Spec.StatusCheck
	})
	r.plan("close-after-commit")
	a := ask{id: "k1", body: refundOf("9", "5")}
	r.pay(a, 409, guard.UnknownHold)
	r.plan("error-400")
	r.check(time.Second)
	if n := r.questions(); n != 0 {
		t.Errorf("it was asked %d times before it was sent again", n)
	}
	r.sentAgain()
	r.check(2 * time.Second)
	r.pay(a, 200, guard.Replay)
	r.paid(1, 2)
}

// R13: the address changes after the first attempt: the other one is not sent the request.
func TestWhatIsNeverSentAgain(t *testing.T) {
	credential := func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
			SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
		}
	}
	ruled := func(action v1alpha1.AdmissionAction) func(*rig, *keys) {
		return func(r *rig, _ *keys) {
			r.tool("charge", "/charges", resumes(credential, func(o *v1alpha1.AgentTool) {
				o.Spec.Admission = []v1alpha1.AdmissionRule{{Expression: "false", Message: "not any more", Action: action}}
			}))
		}
	}
	large := refundOf("9", "5")
	large = large[:len(large)-1] + `,"memo":"` + strings.Repeat("x", maxKept) + `"}`
	for name, tc := range map[string]struct {
		body   string
		change func(*rig, *keys)
		why    string
	}{
		"R13, another upstream": {change: func(r *rig, _ *keys) { r.tool("charge", "/refunds", resumes(credential)) }, why: "another one than that of the attempt"},
		"another credential":    {change: func(r *rig, _ *keys) { r.secrets[namespace+"/provider/token"] = "secret-2" }, why: "credential is another one"},
		"no Resume any more":    {change: func(r *rig, _ *keys) { r.tool("charge", "/charges", credential) }, why: "does not say unknownOutcome Resume"},
		"no tool":               {change: func(r *rig, _ *keys) { r.tools.Remove(namespace, "charge") }, why: "does not exist"},
		"a key that is gone": {change: func(_ *rig, k *keys) {
			k.entries = map[string][]byte{"current": []byte("key-9"), "key-9": make([]byte, 32)}
		}, why: "key-1"},
		"another key's name":        {change: func(_ *rig, k *keys) { k.entries = keyring.Generate() }, why: "not what was sealed"},
		"a rule that denies it now": {change: ruled(v1alpha1.AdmissionDeny), why: "a rule of the tool denies it now: not any more"},
		"a rule that holds it now":  {change: ruled(v1alpha1.AdmissionHold), why: "a rule of the tool wants a person to decide about it now: not any more"},
		"a caller that may no longer invoke the tool": {change: func(r *rig, _ *keys) {
			r.people.mu.Lock()
			defer r.people.mu.Unlock()
			r.people.forbidden["system:serviceaccount:"+namespace+":agent"] = true
		}, why: "its caller may not invoke the tool any more"},
		"a request too large":    {body: large, why: "is not kept"},
		"K09, the window passed": {change: func(r *rig, _ *keys) { r.clock.pass(2 * time.Hour) }, why: "the provider knows the key for"},
		"K09, a window corrected": {change: func(r *rig, _ *keys) {
			r.tool("charge", "/charges", resumes(credential, func(o *v1alpha1.AgentTool) {
				o.Spec.Idempotency.ProviderDeduplicates.Window.Duration = 25 * time.Second
			}))
		}, why: "the provider knows the key for 25s"},
	} {
		t.Run(name, func(t *testing.T) {
			r, k := setUpResume(t, credential)
			r.secrets[namespace+"/provider/token"] = "secret-1"
			r.plan("reset-before-commit")
			a := ask{id: "k1", body: tc.body}
			if a.body == "" {
				a.body = refundOf("9", "5")
			}
			r.pay(a, 409, guard.UnknownHold)
			if tc.change != nil {
				tc.change(r, k)
			}
			for range 3 {
				r.sentAgain()
			}
			answer, err := r.engine.Poll(t.Context(), guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"})
			if err != nil || answer.Intent.State != guard.Held || !strings.Contains(answer.Intent.Hold.Cause, tc.why) {
				t.Fatalf("%+v, %+v, %v", answer.Intent, answer.Intent.Hold, err)
			}
			r.paid(0, 1)
		})
	}
}

// What is missing for a while is waited for.
func TestWhatCannotBeSentAgainNow(t *testing.T) {
	for name, tc := range map[string]struct{ away, back func(*rig, *keys) }{
		"the credential": {
			func(r *rig, _ *keys) { delete(r.secrets, namespace+"/provider/token") },
			func(r *rig, _ *keys) { r.secrets[namespace+"/provider/token"] = "secret-1" },
		},
		"who may call": {
			func(r *rig, _ *keys) { r.people.away(true) },
			func(r *rig, _ *keys) { r.people.away(false) },
		},
		"the request keys": {func(_ *rig, k *keys) { k.entries, k.stale = nil, nil }, nil},
		"the tool": {
			func(r *rig, _ *keys) {
				r.tools.Refuse(&policy.NotServedError{Namespace: namespace, Tool: "charge", Reason: policy.ReasonPending, Message: "not yet"})
			},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			credential := func(o *v1alpha1.AgentTool) {
				o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
					SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
				}
			}
			r, k := setUpResume(t, credential)
			r.secrets[namespace+"/provider/token"] = "secret-1"
			entries := k.entries
			r.plan("close-after-commit")
			a := ask{id: "k1", body: refundOf("9", "5")}
			r.pay(a, 409, guard.UnknownHold)
			tc.away(r, k)
			r.sentAgain()
			r.paid(1, 1)
			if tc.back != nil {
				tc.back(r, k)
			}
			k.entries = entries
			r.tool("charge", "/charges", resumes(credential))
			r.sentAgain()
			r.check(time.Minute)
			r.paid(1, 2)
			r.pay(a, 201, guard.Replay)
		})
	}
}

// A key is replaced: what the old one sealed is opened, also by a gateway that does not have the new one yet.
func TestRequestKeysAreReplaced(t *testing.T) {
	r, k := setUpResume(t)
	lose := func(id, order string) {
		r.plan("close-after-commit")
		r.pay(ask{id: id, body: refundOf(order, "5")}, 409, guard.UnknownHold)
	}
	lose("k1", "9")
	old, err := k.now()
	if err != nil {
		t.Fatal(err)
	}
	k.entries["key-2"] = []byte(strings.Repeat("2", keyring.KeySize))
	k.entries[keyring.CurrentEntry] = []byte("key-2")
	lose("k2", "10")
	k.stale = old
	r.sentAgain()
	r.check(5 * time.Second)
	if k.reread != 1 {
		t.Errorf("the keys were read again %d times", k.reread)
	}
	for _, id := range []string{"k1", "k2"} {
		if _, doc := r.poll("charge", id, "agent", ""); doc.State != guard.Succeeded {
			t.Errorf("%s: %+v", id, doc)
		}
	}
	r.paid(2, 4)
}

// Without keys nothing is sent at all, and what was paid before is told all the same.
func TestCallsWithoutRequestKeys(t *testing.T) {
	r, k := setUpResume(t)
	a := ask{id: "k1", body: refundOf("9", "5")}
	r.pay(a, 201, guard.Allow)
	k.entries = nil
	r.pay(a, 201, guard.Replay)
	p := r.pay(ask{id: "k2", body: refundOf("10", "5")}, 503, guard.Deny).problem(t)
	if !strings.Contains(p.Type, "request-keys-not-available") || strings.Contains(p.Detail, "internal detail") || p.RetryAfter == 0 {
		t.Errorf("problem %+v", p)
	}
	r.paid(1, 1)
}

// Nothing of a kept request can be read in the store, nor of the credential.
func TestAKeptRequestCannotBeRead(t *testing.T) {
	r, _ := setUpResume(t, func(o *v1alpha1.AgentTool) {
		o.Spec.Upstream.HTTP.CredentialsFrom = &v1alpha1.UpstreamCredentials{
			SecretRef: v1alpha1.SecretKeyReference{Name: "provider", Key: "token"}, Header: "Authorization", Prefix: "Bearer ",
		}
	})
	r.secrets[namespace+"/provider/token"] = "secret-1"
	body := refundOf("9", "5")
	body = body[:len(body)-1] + `,"memo":"for the broken lamp"}`
	stored := func() string {
		key := guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"}
		record, _, err := r.store.Get(t.Context(), key.String())
		if err != nil || record == nil {
			t.Fatalf("%v, %v", record, err)
		}
		return string(record.Header) + string(record.Body)
	}
	r.plan("reset-before-commit")
	r.pay(ask{id: "k1", body: body}, 409, guard.UnknownHold)
	if got := stored(); strings.Contains(got, "lamp") || strings.Contains(got, "secret-1") || !strings.Contains(got, keyring.FirstKey) {
		t.Errorf("the record of a kept request: %q", got)
	}
	r.sentAgain()
	r.paid(1, 2)
	if got := stored(); strings.Contains(got, keyring.FirstKey) {
		t.Errorf("the record is settled, and the request still kept: %q", got)
	}
}

// The key is an argument of the body: it is written anew into what was kept.
func TestAKeyInTheBodyIsSentAgain(t *testing.T) {
	r, _ := setUpResume(t, func(o *v1alpha1.AgentTool) {
		o.Spec.Idempotency.Key = v1alpha1.ProviderKey{Argument: "/idempotencyKey"}
	})
	r.plan("close-after-commit")
	a := ask{id: "k1", body: refundOf("9", "5")}
	r.pay(a, 409, guard.UnknownHold)
	r.sentAgain()
	r.paid(1, 2)
	got := r.p.Received()
	if first, second := got[len(got)-2], got[len(got)-1]; string(first.Body) != string(second.Body) || !strings.Contains(string(second.Body), "hf_") {
		t.Errorf("sent %s, and again %s", first.Body, second.Body)
	}
}

// The retries of all are bounded, and a resumed attempt is one.
func TestResumesCountInTheRatio(t *testing.T) {
	none, all := int32(0), int32(1)
	r, _ := setUpResume(t, func(o *v1alpha1.AgentTool) {
		o.Spec.RetryBudget = &v1alpha1.RetryBudget{Ratio: &v1alpha1.RetryRatio{Percent: &none, MinPerSecond: &all}}
	})
	for _, order := range []string{"9", "10", "11"} {
		r.plan("close-after-commit")
		r.pay(ask{id: "k" + order, body: refundOf(order, "5")}, 409, guard.UnknownHold)
	}
	r.sentAgain()
	r.paid(3, 4) // one in this second; the others are not forgotten
	eventually(t, "all are paid", func() bool {
		r.check(2 * time.Second)
		l, err := r.p.Ledger()
		return err == nil && l.Requests["POST /charges"] == 6
	})
	r.paid(3, 6)
	for _, id := range []string{"k9", "k10", "k11"} {
		if _, doc := r.poll("charge", id, "agent", ""); doc.State != guard.Succeeded {
			t.Errorf("%s: %+v", id, doc)
		}
	}
}

// Two gateways on one store send it again once a turn; one that dies with it in its hand is replaced.
func TestTwoGatewaysResume(t *testing.T) {
	r, _ := setUpResume(t)
	other := guard.New(r.store, r.engine.Identity(), guard.Options{Clock: r.clock})
	engines := []guard.Served{{Namespace: namespace, Store: "payments", Engine: r.engine}, {Namespace: namespace, Store: "payments", Engine: other}}
	all := r.g.Checker(func() []guard.Served { return engines })
	sweep := func(pass time.Duration) {
		t.Helper()
		r.clock.pass(pass)
		for _, e := range engines {
			if err := e.Engine.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.plan("reset-before-commit")
	a := ask{id: "k1", body: refundOf("9", "5")}
	r.pay(a, 409, guard.UnknownHold)
	sweep(0) // both watch
	sweep(waitedOut)
	key := guard.Key{Namespace: namespace, Tool: "charge", Caller: "system:serviceaccount:" + namespace + ":agent", IntentID: "k1"}
	m, err := other.NextResume(t.Context(), key)
	if err != nil || m == nil {
		t.Fatalf("%+v, %v", m, err)
	}
	if ticket, err := other.BeginResume(t.Context(), m, time.Hour); err != nil || ticket == nil {
		t.Fatalf("%+v, %v", ticket, err)
	}
	// That one is killed now.
	all.pass(t.Context())
	all.making.Wait()
	r.paid(0, 1)
	engines = engines[:1]
	sweep(0)
	sweep(waitedOut)
	sweep(waitedOut)
	all.pass(t.Context())
	all.making.Wait()
	r.paid(1, 2)
	_, doc := r.poll("charge", "k1", "agent", "")
	if doc.State != guard.Succeeded || len(doc.Attempts) != 3 || !doc.Attempts[1].Resumed {
		t.Fatalf("the poll: %+v", doc)
	}
	r.pay(a, 201, guard.Replay)
}
