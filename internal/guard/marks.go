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
	"strconv"
	"strings"
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
	markLookalike    = "lookalike"     // recipient and amount, of any tool and caller
	markNeverSent    = "never-sent"    // tool, caller and scope of a hold that was never sent
)

// namer writes names one behind the other into memory that they share.
type namer struct{ strings.Builder }

// prefix is what the names of this kind and budget begin with.
func (n *namer) prefix(kind, budget string) string {
	start := n.Len()
	n.part(kind)
	n.part(budget)
	return n.String()[start:]
}

// part writes one part of a name.
func (n *namer) part(text string) {
	n.length(len(text))
	n.WriteString(text)
}

func (n *namer) length(of int) {
	var digits [20]byte
	n.Write(append(strconv.AppendInt(digits[:0], int64(of), 10), ':'))
}

// name is that of a mark or probe with this prefix.
func (n *namer) name(prefix, rest string) string {
	start := n.Len()
	n.WriteString(prefix)
	n.part(rest)
	return n.String()[start:]
}

// hashed is a name that ends with the hash of these parts.
func (n *namer) hashed(kind, budget string, parts ...string) string {
	var text [512]byte
	sum := sha256.Sum256(appendPrefixed(text[:0], parts...))
	var digits [2 * sha256.Size]byte
	hex.Encode(digits[:], sum[:])
	start := n.Len()
	n.part(kind)
	n.part(budget)
	n.length(len(digits))
	n.Write(digits[:])
	return n.String()[start:]
}

// markNames are the strings of a record's marks and probes. They follow from its identity and
// its budget, so the steps of one attempt share them.
type markNames struct {
	budget   string
	imported bool
	// lookalike is the name of recipient and amount, where they are compared and there are both.
	lookalike []string
	compared  bool
	// exact is empty without a lineage, and while no call has said the fingerprint.
	exact, neverSent string
	// identity: see identityTags.
	identity [3]string
	scope    []pathsNames
	lineage  []pathsNames // one, or none
}

// pathNames are those of a path: as itself, and as what something lies under.
type pathNames struct{ own, under string }

// pathsNames are those of a path and of its ancestors.
type pathsNames struct {
	pathNames
	ancestors []pathNames
}

func (r *record) names() *markNames {
	b := r.Policy.Budget
	if n := r.named; n != nil && n.budget == b && n.imported == r.Imported && n.compared == (r.Policy.Lookalike > 0) {
		return n
	}
	scope, amount := r.Scope.String(), ""
	if r.Amount != nil {
		amount = lengthPrefixed(r.Amount.Currency, r.Amount.Value)
	}
	var in namer
	in.Grow(r.sizeOfNames())
	n := &markNames{
		budget: b, imported: r.Imported, compared: r.Policy.Lookalike > 0,
		neverSent: in.hashed(markNeverSent, b, r.Tool, r.Caller, r.CallerUID, scope),
		identity: [3]string{
			in.hashed(markPayment, b, r.Tool, r.Recipient, amount),
			in.hashed(markPayment, b, r.Tool, r.Recipient),
			in.hashed(markPayment, b, r.Tool),
		},
		scope: make([]pathsNames, len(r.Scope)),
	}
	for i, p := range r.Scope {
		n.scope[i] = in.path(markScope, markUnderScope, b, p)
	}
	if r.Lineage != "" && r.Fingerprint != "" {
		n.exact = in.hashed(markExact, b, r.Tool, r.Caller, r.CallerUID, scope, string(r.Lineage), r.Fingerprint)
	}
	if r.Lineage != "" {
		n.lineage = []pathsNames{in.path(markLineage, markUnderLineage, b, r.Lineage)}
	}
	if n.compared && r.Recipient != "" && r.Amount != nil {
		n.lookalike = []string{in.hashed(markLookalike, b, r.Recipient, amount)}
	}
	r.named = n
	return n
}

// sizeOfNames is about how long the names are together; where it is too little, they move.
func (r *record) sizeOfNames() int {
	const kind, lengths = len(markUnderLineage), len("00:00:000:")
	each := kind + lengths + len(r.Policy.Budget)
	size := 5 * (each + 2*sha256.Size)
	if r.Policy.Lookalike > 0 {
		size += each + 2*sha256.Size
	}
	path := func(p intent.Path) int { return 2*each + 2*(1+strings.Count(string(p), "/"))*(each+len(p)) }
	for _, p := range r.Scope {
		size += path(p)
	}
	return size + path(r.Lineage)
}

func (n *namer) path(own, under, budget string, p intent.Path) pathsNames {
	own, under = n.prefix(own, budget), n.prefix(under, budget)
	name := func(p intent.Path) pathNames {
		return pathNames{own: n.name(own, string(p)), under: n.name(under, string(p))}
	}
	ancestors := p.Ancestors()
	names := pathsNames{pathNames: name(p), ancestors: make([]pathNames, len(ancestors))}
	for i, a := range ancestors {
		names.ancestors[i] = name(a)
	}
	return names
}

// most is how many marks or probes there are of the paths at the most, with those of another kind.
func (n *markNames) most(others int) int {
	for _, paths := range [2][]pathsNames{n.scope, n.lineage} {
		for i := range paths {
			others += 2 + len(paths[i].ancestors)
		}
	}
	return others
}

// several says that a name may come twice: two paths of a scope may have ancestors in common.
// Names of other kinds differ, and so do those of one path.
func (n *markNames) several() bool { return len(n.scope) > 1 }

// identityTags are how records of one tool meet across a change of its identity block:
// equal recipient and amount under another block; equal recipient where the amount is
// read in another way, so that amounts cannot be compared; and any where the recipient is.
func (r *record) identityTags() [3]string {
	return [3]string{r.IdentityHash, r.AmountHash, r.RecipientHash}
}

// marks are those that the record leaves in its present state.
func (r *record) marks(now time.Time) []store.Mark {
	stands, ends := r.standing()
	n := r.names()
	if !stands {
		if r.State == Held && r.neverSent() {
			return []store.Mark{{String: n.neverSent}}
		}
		return nil
	}
	var until time.Time
	if ends {
		until = now.Add(r.Policy.Window)
	}
	out := make([]store.Mark, 0, n.most(5)+len(n.lookalike))
	several := n.several()
	add := func(s, tag string) {
		if !several || !slices.ContainsFunc(out, func(m store.Mark) bool { return m.String == s }) {
			out = append(out, store.Mark{String: s, Tag: tag, Until: until})
		}
	}
	for _, paths := range [2][]pathsNames{n.scope, n.lineage} {
		for _, p := range paths {
			add(p.own, "")
			for _, a := range p.ancestors {
				add(a.under, "")
			}
		}
	}
	if n.exact != "" {
		add(n.exact, "")
	}
	for i, tag := range r.identityTags() {
		// By which block an imported one was identified is not known, so it meets all of
		// them; without recipient and amount that would be every call of the tool.
		if r.Imported && (i > 0 || r.Recipient == "" && r.Amount == nil) {
			break
		}
		add(n.identity[i], tag)
	}
	for _, s := range n.lookalike {
		add(s, "")
		if ends {
			out[len(out)-1].Until = now.Add(r.Policy.Lookalike)
		}
	}
	if r.State == Held && r.unsent() {
		// It may have been sent, and a loop is shown it all the same.
		add(n.neverSent, "")
	}
	return out
}

// renews says that the marks of the record are those of from, which is in flight, but for
// one end of all of them: so they need not be given again.
//
// What the store has are the marks of from: every step into flight gives them, and steps
// that leave it in flight keep them. The names are shared only by records of one process
// of which the later was made from the earlier.
func (r *record) renews(from *record, now time.Time) (until time.Time, renews bool) {
	if from == nil || from.State != InFlight || from.named == nil || from.named != r.names() || from.identityTags() != r.identityTags() {
		return time.Time{}, false
	}
	stands, ends := r.standing()
	switch {
	case !stands, r.State == Held && r.unsent():
		return time.Time{}, false
	case !ends:
		return time.Time{}, true
	case len(r.named.lookalike) > 0 && r.Policy.Lookalike != r.Policy.Window:
		return time.Time{}, false
	}
	return now.Add(r.Policy.Window), true
}

// probes are what a step into flight asks, with the kind of each. first: it has no record.
func (r *record) probes(first bool) (probes []store.Probe, kinds []string) {
	n := r.names()
	most := n.most(5) + len(n.lookalike)
	probes, kinds = make([]store.Probe, 0, most), make([]string, 0, most)
	several := n.several()
	add := func(kind string, p store.Probe) {
		// There are few: at most some for each segment of each path.
		if !several || !slices.ContainsFunc(probes, func(have store.Probe) bool { return have.String == p.String }) {
			probes, kinds = append(probes, p), append(kinds, kind)
		}
	}
	if n.exact != "" {
		add(markExact, store.Probe{String: n.exact, First: true})
	}
	if first {
		// A loop that comes again under new IDs is answered with the hold that it
		// has already; one's own release is not stopped by a later twin.
		add(markNeverSent, store.Probe{String: n.neverSent, First: true})
	}
	paths := func(kind string, paths []pathsNames) {
		for _, p := range paths {
			add(kind, store.Probe{String: p.own})
			for _, a := range p.ancestors {
				add(kind, store.Probe{String: a.own})
			}
			add(kind, store.Probe{String: p.under})
		}
	}
	paths(markScope, n.scope)
	if !r.Policy.IgnoreLineage {
		paths(markLineage, n.lineage)
	}
	for _, s := range n.lookalike {
		add(markLookalike, store.Probe{String: s})
	}
	for i, tag := range r.identityTags() {
		if tag != "" { // else there is nothing to except, and all would be hit
			add(markPayment, store.Probe{String: n.identity[i], Except: tag})
		}
	}
	return probes, kinds
}

// passedOver are the watermarks that count under the policy of this step: a
// release does not cover what its hold had not compared, nor another budget.
func (r *record) passedOver() []store.Watermark {
	var out []store.Watermark
	for _, p := range r.Passed {
		if p.Budget == r.Policy.Budget && (p.Lineage || r.Policy.IgnoreLineage) && (p.Lookalike || r.Policy.Lookalike == 0) {
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
			case markLookalike:
				of[Lookalike] = true
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
			case markLookalike:
				all[Lookalike] = true
			case markPayment:
				all[IdentityChanged] = true
			}
		}
	}
	return out, ordered(all), nil
}

func ordered(set map[Reason]bool) []Reason {
	var out []Reason
	for _, r := range []Reason{ExactMatch, ScopeOverlap, LineageOverlap, Lookalike, OutcomeUnknown, KeyExpired, IdentityChanged, BudgetExceeded, ApprovalRequired} {
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
