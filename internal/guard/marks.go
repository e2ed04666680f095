// This file turns paths, fingerprints and recipients into marks and probes, and
// what the probes hit back into reasons. A store sees opaque strings only.
//
// A path marks itself and, differently, its ancestors; it probes itself, its
// ancestors, and what lies under it.

package guard

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"time"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// kind of a mark or probe: the first part of its string.
const (
	markScope        = "scope"         // a path of the scope
	markUnderScope   = "under-scope"   // something of the scope lies under this path
	markLineage      = "lineage"       //
	markUnderLineage = "under-lineage" //
	markExact        = "exact"         // tool, caller, scope, lineage and fingerprint
	markPayment      = "payment"       // tool, with recipient and amount as far as they can be compared, tagged with a hash of the identity
	markNeverSent    = "never-sent"    // tool, caller and scope of a hold that was never sent
)

func digest(parts ...string) string {
	sum := sha256.Sum256([]byte(lengthPrefixed(parts...)))
	return hex.EncodeToString(sum[:])
}

func markString(kind, budget, rest string) string { return lengthPrefixed(kind, budget, rest) }

func exactString(h *header, budget string) string {
	return markString(markExact, budget, digest(h.Tool, h.Caller, h.CallerUID, h.Scope.String(), string(h.Lineage), h.Fingerprint))
}

// identityMarks are how records of one tool meet across a change of its identity
// block: equal recipient and amount under another block; equal recipient where the
// amount is read in another way, so that amounts cannot be compared; and any where the
// recipient is.
func identityMarks(h *header, budget string) []store.Mark {
	amount := ""
	if h.Amount != nil {
		amount = lengthPrefixed(h.Amount.Currency, h.Amount.Value)
	}
	return []store.Mark{
		{String: markString(markPayment, budget, digest(h.Tool, h.Recipient, amount)), Tag: h.IdentityHash},
		{String: markString(markPayment, budget, digest(h.Tool, h.Recipient)), Tag: h.AmountHash},
		{String: markString(markPayment, budget, digest(h.Tool)), Tag: h.RecipientHash},
	}
}

func neverSentString(h *header, budget string) string {
	return markString(markNeverSent, budget, digest(h.Tool, h.Caller, h.CallerUID, h.Scope.String()))
}

// marks are those that the record leaves in its present state.
func (r *record) marks(now time.Time) []store.Mark {
	stands, ends := r.standing()
	if !stands {
		if r.State == Held && r.neverSent() {
			return []store.Mark{{String: neverSentString(&r.header, r.Policy.Budget)}}
		}
		return nil
	}
	var until time.Time
	if ends {
		until = now.Add(r.Policy.Window)
	}
	out := make([]store.Mark, 0, 16)
	add := func(kind, rest, tag string) {
		s := rest
		if kind != "" {
			s = markString(kind, r.Policy.Budget, rest)
		}
		if !slices.ContainsFunc(out, func(m store.Mark) bool { return m.String == s }) {
			out = append(out, store.Mark{String: s, Tag: tag, Until: until})
		}
	}
	paths := func(own, under string, p intent.Path) {
		add(own, string(p), "")
		for _, a := range p.Ancestors() {
			add(under, string(a), "")
		}
	}
	for _, p := range r.Scope {
		paths(markScope, markUnderScope, p)
	}
	if r.Lineage != "" {
		paths(markLineage, markUnderLineage, r.Lineage)
		add("", exactString(&r.header, r.Policy.Budget), "")
	}
	identity := identityMarks(&r.header, r.Policy.Budget)
	if r.Imported {
		// By which block it was identified is not known, so it meets all of them; without
		// recipient and amount that would be every call of the tool.
		identity = identity[:1]
		if r.Recipient == "" && r.Amount == nil {
			identity = nil
		}
	}
	for _, m := range identity {
		add("", m.String, m.Tag)
	}
	if r.State == Held && r.unsent() {
		// It may have been sent, and a loop is shown it all the same.
		add("", neverSentString(&r.header, r.Policy.Budget), "")
	}
	return out
}

// probes are what a step into flight asks, with the kind of each.
func (r *record) probes() (probes []store.Probe, kinds []string) {
	probes, kinds = make([]store.Probe, 0, 20), make([]string, 0, 20)
	add := func(kind string, p store.Probe) {
		// There are few: at most some for each segment of each path.
		if !slices.ContainsFunc(probes, func(have store.Probe) bool { return have.String == p.String }) {
			probes, kinds = append(probes, p), append(kinds, kind)
		}
	}
	b := r.Policy.Budget
	if r.Lineage != "" {
		add(markExact, store.Probe{String: exactString(&r.header, b), First: true})
	}
	if r.State == None {
		// A loop that comes again under new IDs is answered with the hold that it
		// has already; one's own release is not stopped by a later twin.
		add(markNeverSent, store.Probe{String: neverSentString(&r.header, b), First: true})
	}
	paths := func(own, under string, p intent.Path) {
		add(own, store.Probe{String: markString(own, b, string(p))})
		for _, a := range p.Ancestors() {
			add(own, store.Probe{String: markString(own, b, string(a))})
		}
		add(own, store.Probe{String: markString(under, b, string(p))})
	}
	for _, p := range r.Scope {
		paths(markScope, markUnderScope, p)
	}
	if r.Lineage != "" && !r.Policy.IgnoreLineage {
		paths(markLineage, markUnderLineage, r.Lineage)
	}
	for _, m := range identityMarks(&r.header, b) {
		if m.Tag != "" { // else there is nothing to except, and all would be hit
			add(markPayment, store.Probe{String: m.String, Except: m.Tag})
		}
	}
	return probes, kinds
}

// passedOver are the watermarks that count under the policy of this step: a
// release does not cover lineages that its hold had not compared, nor another budget.
func (r *record) passedOver() []store.Watermark {
	var out []store.Watermark
	for _, p := range r.Passed {
		if p.Budget == r.Policy.Budget && (p.Lineage || r.Policy.IgnoreLineage) {
			out = append(out, p.Watermark)
		}
	}
	return out
}

// obstacle is a record in the way, and how it relates to the call.
type obstacle struct {
	header
	key       string
	exact     bool
	neverSent bool
	reasons   []Reason
}

// obstacles reads what a refused Reserve has hit: the records, and all reasons together.
func (r *record) obstacles(res store.Result, kinds []string) ([]obstacle, []Reason, error) {
	all := map[Reason]bool{}
	var out []obstacle
	for i := range res.Hits {
		h, err := decodeHeader(&res.Hits[i].Record)
		if err != nil {
			return nil, nil, err
		}
		o := obstacle{header: h, key: res.Hits[i].Record.Key}
		of := map[Reason]bool{}
		for _, p := range res.Hits[i].Probes {
			switch kinds[p] {
			case markExact:
				o.exact = true
			case markNeverSent:
				o.neverSent = true
			case markScope:
				of[ScopeOverlap] = true
			case markLineage:
				of[LineageOverlap] = true
			case markPayment:
				of[IdentityChanged] = true
			}
		}
		if o.exact {
			// It is the same call, not merely one for the same thing.
			of = map[Reason]bool{ExactMatch: true}
		}
		o.reasons = ordered(of)
		for _, x := range o.reasons {
			all[x] = true
		}
		out = append(out, o)
	}
	if res.HitCount > len(res.Hits) {
		// Beyond the headers only the probes speak.
		for i, hit := range res.ProbeHits {
			if !hit {
				continue
			}
			switch kinds[i] {
			case markScope:
				all[ScopeOverlap] = true
			case markLineage:
				all[LineageOverlap] = true
			case markPayment:
				all[IdentityChanged] = true
			}
		}
	}
	return out, ordered(all), nil
}

func ordered(set map[Reason]bool) []Reason {
	var out []Reason
	for _, r := range []Reason{ExactMatch, ScopeOverlap, LineageOverlap, OutcomeUnknown, KeyExpired, IdentityChanged} {
		if set[r] {
			out = append(out, r)
		}
	}
	return out
}

// matches shows obstacles to a person, the most telling first.
func matches(obs []obstacle) []Match {
	var out []Match
	for _, o := range obs {
		if len(out) == MaxMatches {
			break
		}
		relation := "Related"
		if len(o.reasons) > 0 {
			relation = string(o.reasons[0])
		}
		out = append(out, Match{
			Caller: o.Caller, CallerUID: o.CallerUID, Tool: o.Tool, IntentID: o.IntentID, Relation: relation,
			Amount: o.Amount, State: o.State, At: o.Changed,
		})
	}
	return out
}
