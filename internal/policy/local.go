// This file compiles a tool that runs inside its agent. What must hold: nothing is sent to
// such a tool, so nothing is declared for it that says how to send or how to read an answer.

package policy

import (
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// The effective values of fields that are absent.
const (
	defaultLease    = 30 * time.Second // AgentTool spec.upstream.local.lease
	defaultRenewFor = 15 * time.Minute // AgentTool spec.upstream.local.renewFor
)

var (
	boundsLease    = [2]time.Duration{time.Second, 5 * time.Minute}
	boundsRenewFor = [2]time.Duration{time.Second, 24 * time.Hour}
)

const localField = "spec.upstream.local"

func (t *Tool) compileLocal(spec *v1alpha1.AgentToolSpec) error {
	local := spec.Upstream.Local
	switch {
	case spec.Upstream.HTTP != nil:
		return specError("spec.upstream", "names two upstreams: set http or local")
	case !t.Mutating:
		return specError(localField, "is for a Mutating tool: what moves nothing needs no claim")
	case spec.Outcomes != nil:
		return specError("spec.outcomes", "is for answers of upstream.http: the agent of a local tool says itself how an attempt ended; remove it")
	case spec.UnknownOutcome != "" && spec.UnknownOutcome != v1alpha1.UnknownHold:
		return specError("spec.unknownOutcome", "must be %s for a local tool: nobody but its agent and a person can find out", v1alpha1.UnknownHold)
	case spec.StatusCheck != nil:
		return specError("spec.statusCheck", "is for upstream.http: nobody can be asked about a local tool; remove it")
	case spec.Idempotency != nil && spec.Idempotency.Key.None == nil:
		return specError("spec.idempotency.key", "must be none for a local tool: its agent gets the key with its claim and passes it on itself")
	case spec.RetryBudget != nil && spec.RetryBudget.PerAttemptTimeout != nil:
		return specError("spec.retryBudget.perAttemptTimeout", "is for upstream.http: use upstream.local.lease")
	}
	t.Local = true
	var err error
	if t.Upstream.Timeout, err = duration(localField+".lease", local.Lease, defaultLease, boundsLease); err != nil {
		return err
	}
	if t.Guard.RenewFor, err = duration(localField+".renewFor", local.RenewFor, defaultRenewFor, boundsRenewFor); err != nil {
		return err
	}
	t.Guard.SettleAfter, err = duration(localField+".settleAfter", &local.SettleAfter, 0, boundsSettleAfter)
	return err
}
