// This file puts a hold into words: one line for the worklist, and an explanation in
// sentences that shows the intent beside those that stand in its way.
//
// Both follow from the object, its state and what the record says was sent, with absolute
// times: what did not change reads the same at every visit, and nothing is written.

package controller

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
)

const (
	// maxSummary is the longest text of a summary.
	maxSummary = 256
	// shownID is how much of an intent ID a line of the worklist has room for.
	shownID = 48
	// maxSentence is the longest line of an explanation.
	maxSentence = 1024
	// maxCell is how much of a value the comparison has room for.
	maxCell = 56
	// comparedMatches is how many matches are shown beside the intent. The spec has more of them.
	comparedMatches = 8
	// shownAttempts is how many attempts are shown, the last ones. The intent's poll URL has all.
	shownAttempts = 8
)

// summaryOf is the hold as one line of a worklist.
func summaryOf(obj *v1alpha1.PaymentHold) *v1alpha1.HoldSummary {
	s := &v1alpha1.HoldSummary{Amount: clip(moneyText(obj.Spec.Amount), maxSummary)}
	reasons := make([]string, len(obj.Spec.Reasons))
	for i, r := range obj.Spec.Reasons {
		reasons[i] = string(r)
	}
	s.Reasons = clip(strings.Join(reasons, ","), maxSummary)
	if len(obj.Spec.Matches) > 0 {
		m := obj.Spec.Matches[0]
		s.Overlaps = clip(oneLine(m.IntentID), shownID)
		if m.State != "" {
			s.Overlaps += " (" + m.State + ")"
		}
		if more := matchCount(obj) - 1; more > 0 {
			s.Overlaps += fmt.Sprintf(" and %d more", more)
		}
		s.Overlaps = clip(s.Overlaps, maxSummary)
	}
	return s
}

// matchCount is how many records stand in the way, also those that are not listed.
func matchCount(obj *v1alpha1.PaymentHold) int {
	n := len(obj.Spec.Matches)
	if obj.Spec.MatchCount != nil {
		n = max(n, int(*obj.Spec.MatchCount))
	}
	return n
}

func moneyText(m *v1alpha1.Money) string {
	if m == nil {
		return ""
	}
	return m.Value + " " + m.Currency
}

// oneLine takes away what would break a line of a table.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// because says each reason in a sentence.
var because = map[v1alpha1.HoldReason]string{
	v1alpha1.HoldScopeOverlap:    "ScopeOverlap: another intent is for the same thing, for a part of it, or for a whole that it is part of.",
	v1alpha1.HoldLineageOverlap:  "LineageOverlap: another intent comes from the same step of the agent's work, or from one above or below it.",
	v1alpha1.HoldExactMatch:      "ExactMatch: the very same call was made under another intent ID. It is almost always a repetition.",
	v1alpha1.HoldLookalike:       "Lookalike: the same amount went to the same recipient a short time before, for something else.",
	v1alpha1.HoldOutcomeUnknown:  "OutcomeUnknown: it may have been sent already, and nobody knows whether money moved. Look at the provider's ledger first.",
	v1alpha1.HoldKeyExpired:      "KeyExpired: this intent ID was used long ago, and the answer is no longer kept.",
	v1alpha1.HoldIdentityChanged: "IdentityChanged: an equal payment was made before the tool's identity was changed, so nobody can tell whether it is the same.",
	v1alpha1.HoldBudgetExceeded:  "BudgetExceeded: it would exceed a limit of the budget's spend, or cannot be counted in one.",

	v1alpha1.HoldApprovalRequired: "ApprovalRequired: a rule of the tool wants a person to decide. The cause is what the rule says.",
}

// nothingToDecide is how a hold that is void begins to tell what came of it.
const nothingToDecide = "There is nothing to decide here any more. "

// forgottenKey is what KeyExpired says of an intent that may have been sent.
const forgottenKey = "KeyExpired: the provider may have forgotten the key under which it was sent. Released, it goes under a new key, as another payment."

// explain says what is held, why, what was sent, and what can be done about it.
func explain(obj *v1alpha1.PaymentHold, now *v1alpha1.PaymentHoldStatus, sent []guard.SentView) []v1alpha1.HoldSentence {
	var out []v1alpha1.HoldSentence
	say := func(format string, args ...any) {
		out = append(out, v1alpha1.HoldSentence(clip(oneLine(fmt.Sprintf(format, args...)), maxSentence)))
	}
	what := ""
	if obj.Spec.Amount != nil {
		what = " to move " + moneyText(obj.Spec.Amount)
	}
	if obj.Spec.Recipient != "" {
		what += fmt.Sprintf(" to %s", clip(obj.Spec.Recipient, maxCell))
	}
	say("%s asked the tool %s%s, as the intent %q.", obj.Spec.Caller, obj.Spec.ToolRef.Name, what, clip(obj.Spec.IntentID, maxCell))
	unknown := slices.Contains(obj.Spec.Reasons, v1alpha1.HoldOutcomeUnknown)
	for _, r := range obj.Spec.Reasons {
		if r == v1alpha1.HoldKeyExpired && unknown {
			say("%s", forgottenKey)
		} else if text, ok := because[r]; ok {
			say("%s", text)
		} else {
			say("%s.", r)
		}
	}
	if now.Cause != "" {
		say("Cause: %s", now.Cause)
	}
	if unknown {
		for _, line := range whatWasSent(sent) {
			say("%s", line)
		}
	}
	for _, line := range compare(obj) {
		say("%s", line)
	}
	say("%s", whatNow(obj, now))
	return out
}

// whatNow says where the hold stands and what can be done.
func whatNow(obj *v1alpha1.PaymentHold, now *v1alpha1.PaymentHoldStatus) string {
	unknown := slices.Contains(obj.Spec.Reasons, v1alpha1.HoldOutcomeUnknown)
	switch now.State {
	case v1alpha1.HoldWaiting:
		until := "some time from now"
		if now.WaitingUntil != nil {
			until = timeText(now.WaitingUntil)
		}
		return "It waits until " + until + ", when the payment would be visible at the provider. Until then only Reject and MarkPaid are possible. Patch spec.resolution."
	case v1alpha1.HoldHeld:
		if unknown {
			return "It waits for a person. If the provider has it: MarkPaid. If it does not, and never will: Release to send it, or MarkFailed. Patch spec.resolution."
		}
		return "It waits for a person. " + eitherWay(obj.Spec.Reasons) + " Patch spec.resolution."
	case v1alpha1.HoldResolved:
		by := ""
		if r := obj.Spec.Resolution; r != nil {
			by = fmt.Sprintf("%s decided %s (%q). ", r.By, r.Decision, clip(r.Reason, maxCell))
		}
		return by + now.Effect
	case v1alpha1.HoldVoid:
		return nothingToDecide + now.Effect
	}
	return "Where it stands is not known yet."
}

// eitherWay says which decision fits, where nothing was sent: what waits for an approval is
// no repetition of anything.
func eitherWay(reasons []v1alpha1.HoldReason) string {
	approval, other := false, false
	for _, r := range reasons {
		if r == v1alpha1.HoldApprovalRequired || r == v1alpha1.HoldBudgetExceeded {
			approval = true
		} else {
			other = true
		}
	}
	switch {
	case approval && other:
		return "If it is approved, and shall be paid as well: Release. If it is not, or is a repetition: Reject."
	case approval:
		return "If it is approved: Release. If not: Reject."
	}
	return "If it shall be paid as well: Release. If it is a repetition: Reject."
}

// whatWasSent is what to look for at the provider: each attempt with its times, what it got,
// and the key under which it went.
func whatWasSent(sent []guard.SentView) []string {
	if len(sent) == 0 {
		return nil
	}
	lines := []string{fmt.Sprintf("What was sent (%d), to be found at the provider by its key or by its time:", len(sent))}
	if more := len(sent) - shownAttempts; more > 0 {
		lines = append(lines, fmt.Sprintf("%d earlier ones, then:", more))
		sent = sent[more:]
	}
	for i := range sent {
		a := &sent[i]
		line := fmt.Sprintf("attempt %d, key %s", a.Number, a.Key)
		if a.Lost {
			lines = append(lines, line+": the store's memory of it was lost, so when it was sent, and whether, is not known.")
			continue
		}
		line += ": sent " + a.Started.UTC().Format(time.RFC3339)
		if !a.Ended.IsZero() {
			line += ", ended " + a.Ended.UTC().Format(time.RFC3339)
		}
		if a.Status != 0 {
			line += fmt.Sprintf(", status %d", a.Status)
		} else {
			line += ", no status"
		}
		if a.Outcome != "" {
			line += ", " + string(a.Outcome)
		}
		if a.ProviderReference != "" {
			line += ", provider reference " + a.ProviderReference
		}
		if a.Detail != "" {
			line += ": " + a.Detail
		}
		lines = append(lines, line)
	}
	return lines
}

// compare is a table of the intent and those that stand in its way: a column each
// would be too wide, so it is a row each.
func compare(obj *v1alpha1.PaymentHold) []string {
	if len(obj.Spec.Matches) == 0 {
		return nil
	}
	rows := [][]string{
		{"", "INTENT", "CALLER", "TOOL", "AMOUNT", "STATE", "CHANGED", "RELATION"},
		{"this", obj.Spec.IntentID, obj.Spec.Caller, obj.Spec.ToolRef.Name, moneyText(obj.Spec.Amount), "Held", "", ""},
	}
	shown := obj.Spec.Matches[:min(len(obj.Spec.Matches), comparedMatches)]
	for _, m := range shown {
		rows = append(rows, []string{"other", m.IntentID, m.Caller, m.Tool, moneyText(m.Amount), m.State, timeText(m.At), m.Relation})
	}
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i := range row {
			if row[i] = clip(oneLine(row[i]), maxCell); row[i] == "" {
				row[i] = "-"
			}
			width[i] = max(width[i], utf8.RuneCountInString(row[i]))
		}
	}
	rows[0][0] = ""
	lines := []string{fmt.Sprintf("What stands in its way, as it was when the hold was made (%d):", matchCount(obj))}
	for _, row := range rows {
		var b strings.Builder
		for i, cell := range row {
			b.WriteString(cell)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)+2))
			}
		}
		lines = append(lines, b.String())
	}
	if more := matchCount(obj) - len(shown); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more; spec.matches lists up to 32.", more))
	}
	return lines
}

func timeText(t *metav1.Time) string {
	if t == nil || t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}
