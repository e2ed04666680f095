// This file is what is left of a settlement that was refused. The tool may have run, and its
// result is on no record: the log is then the only place that has it, and its holder must not
// be told that nothing was sent.

package gateway

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
)

// maxUnsettled is how much of the body of a refused settlement is still read to be looked at. What
// was read before is looked at as it is.
const maxUnsettled = 64 << 10

// notSettled notes what a refused settlement would have said, and words its refusal, and
// that of a renewal, for somebody whose tool runs or has run.
func (c *call) notSettled(p *problem) {
	if c.action != actSettle && c.action != actRenew {
		return
	}
	p.Detail = strings.NewReplacer("Nothing was sent", "Nothing was written down", "This one sent nothing", "This one wrote nothing down").Replace(p.Detail)
	if c.action != actSettle {
		return
	}
	if !strings.Contains(p.Detail, "run the tool again") && !strings.Contains(p.Detail, "If the tool has run") {
		then := "Keep the attempt's result: if the tool has run, it must be settled, or a person must look at it. Do not run the tool again."
		if p.SuggestedAction == actRetryLater {
			then = "Keep the attempt's result and settle it again until that is answered; do not run the tool again meanwhile."
		}
		p.Detail = strings.TrimSpace(p.Detail) + " " + then
	}
	if c.caller.Username == "" {
		return // whoever it is may say anything
	}
	c.unwritten, c.intent = true, c.intentID
	if !c.whole && len(c.sent) == 0 && c.r.Body != nil && c.r.Body != http.NoBody {
		_ = http.NewResponseController(c.w).SetReadDeadline(time.Now().Add(restTimeout)) // not every ResponseWriter has one
		// What came until then is looked at, whatever ended it.
		c.sent, _ = io.ReadAll(io.LimitReader(c.r.Body, maxUnsettled))
	}
	c.saidUnsettled(c.sent)
}

// saidUnsettled takes from a settlement what can be understood of it, as far as it came.
func (c *call) saidUnsettled(body []byte) {
	d := json.NewDecoder(bytes.NewReader(body))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return
		}
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return
		}
		var text string
		switch name {
		case "attempt":
			var n int
			if json.Unmarshal(value, &n) == nil && n > 0 {
				c.attempt = n
			}
		case "outcome":
			if json.Unmarshal(value, &text) != nil {
				continue
			}
			switch o := guard.Outcome(text); o {
			case guard.AttemptSucceeded, guard.AttemptFailed, guard.AttemptRetryable, guard.AttemptPending, guard.AttemptUnknown:
				c.outcome = o
			}
		case "provider_reference":
			if json.Unmarshal(value, &text) == nil && len(text) <= maxSettledReference && printable(text) {
				c.reference = text
			}
		}
	}
}
