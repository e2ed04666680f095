package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/intent"
)

// What is registered and what is called come to the same identity.
func TestIdentifyStated(t *testing.T) {
	tool := mustCompile(t, func(tool *v1alpha1.AgentTool) { tool.Spec.Identity.Recipient = "call.body.account" })
	said := Stated{IntentID: "k-1", Scope: []string{"b/2", "a/1", "a/1"}, Lineage: "s/1", Amount: &StatedAmount{"49.990", "USD"}, Recipient: "r"}
	id, err := tool.IdentifyStated(said)
	if err != nil {
		t.Fatal(err)
	}
	if id.IntentID != "k-1" || id.Scope.String() != "a/1\nb/2" || id.Lineage != "s/1" || *id.Amount != (intent.Money{Value: "49.99", Currency: "USD"}) ||
		id.Recipient != "r" || id.Fingerprint != "" || id.IdentityHash != tool.identity.hash || id.AmountHash == "" || id.RecipientHash == "" {
		t.Fatalf("%+v", id)
	}
	for name, change := range map[string]struct {
		do   func(*Stated)
		says string
	}{
		"no intent ID":             {func(s *Stated) { s.IntentID = "" }, "intent ID"},
		"no scope":                 {func(s *Stated) { s.Scope = nil }, "scope"},
		"a bad path":               {func(s *Stated) { s.Scope = []string{"a//b"} }, "path"},
		"a bad lineage":            {func(s *Stated) { s.Lineage = "a/" }, "path"},
		"no amount":                {func(s *Stated) { s.Amount = nil }, "amount"},
		"an amount that is none":   {func(s *Stated) { s.Amount.Value = "x" }, "amount"},
		"an unknown currency":      {func(s *Stated) { s.Amount.Currency = "usd" }, "currency"},
		"a recipient with a break": {func(s *Stated) { s.Recipient = "a\nb" }, "recipient"},
		"no fingerprint":           {func(s *Stated) { s.Fingerprint = "sha256:" + strings.Repeat("G", 64) }, "fingerprint"},
	} {
		s := said
		amount := *said.Amount
		s.Amount = &amount
		change.do(&s)
		_, err := tool.IdentifyStated(s)
		if problem := (*intent.InvalidError)(nil); !errors.As(err, &problem) || problem.Field != change.says {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What no call could ever have is refused at once.
	plain := mustCompile(t, func(tool *v1alpha1.AgentTool) {
		tool.Spec.Identity.Lineage, tool.Spec.Identity.Amount, tool.Spec.Identity.Recipient = "", nil, ""
	})
	for _, s := range []Stated{
		{IntentID: "k", Scope: []string{"a"}, Lineage: "l"},
		{IntentID: "k", Scope: []string{"a"}, Recipient: "r"},
		{IntentID: "k", Scope: []string{"a"}, Amount: &StatedAmount{"1", "USD"}},
	} {
		if _, err := plain.IdentifyStated(s); err == nil {
			t.Errorf("%+v is taken", s)
		}
	}
	if _, err := plain.IdentifyStated(Stated{IntentID: "k", Scope: []string{"a"}}); err != nil {
		t.Error(err)
	}
}

func TestRegistrationIsNoPartOfTheIdentity(t *testing.T) {
	required := mustCompile(t, func(tool *v1alpha1.AgentTool) { tool.Spec.Identity.Registration = v1alpha1.RegistrationRequired })
	optional := mustCompile(t, func(tool *v1alpha1.AgentTool) { tool.Spec.Identity.Registration = v1alpha1.RegistrationOptional })
	if !required.Guard.RegisteredOnly || optional.Guard.RegisteredOnly || required.identity.hash != mustCompile(t).identity.hash {
		t.Error("registration should be the guard's alone")
	}
}
