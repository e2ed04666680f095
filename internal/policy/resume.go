// This file compiles what a tool says of a provider that deduplicates: that the same request
// may be sent again after an unknown outcome, and for how long.

package policy

import (
	"time"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

// boundsDeduplication are of AgentTool spec.idempotency.providerDeduplicates.window. The
// memory of what was paid is kept for longer than that.
var boundsDeduplication = [2]time.Duration{10 * time.Second, 720 * time.Hour}

// compileResume comes after all that says where attempts go and what they carry.
func (t *Tool) compileResume(spec *v1alpha1.AgentToolSpec) error {
	const field = "spec.idempotency.providerDeduplicates"
	d := spec.Idempotency.ProviderDeduplicates
	if spec.UnknownOutcome != v1alpha1.UnknownResume {
		if d != nil {
			return specError(field, "is for unknownOutcome Resume: remove it, or set unknownOutcome")
		}
		return nil
	}
	switch {
	case d == nil:
		return specError(field, "is missing: only a provider that deduplicates may be sent the same again; say for how long it knows a key, or set unknownOutcome to %s", v1alpha1.UnknownHold)
	case t.Key == KeyPlacement{}:
		return specError("spec.idempotency.key", "none is not for unknownOutcome Resume: the provider deduplicates by the key")
	}
	window, err := duration(field+".window", &d.Window, 0, boundsDeduplication)
	if err != nil {
		return err
	}
	if need := t.Guard.Timeout + t.Guard.SettleAfter; window <= need {
		return specError(field+".window", "is %v, which is not more than upstream.http.timeout and settleAfter together, %v: nothing could ever be sent again in time", window, need)
	}
	t.Resume = &Resume{Upstream: t.sendsTo(), Window: window}
	t.Guard.Resume = &guard.ResumePolicy{Upstream: t.Resume.Upstream, Window: window}
	return nil
}
