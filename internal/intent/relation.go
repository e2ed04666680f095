// This file is about how two intents stand to each other: by their scopes, by
// their lineages, and by both. Every relation is symmetric. What cannot be told
// apart counts as standing in the way.

package intent

import (
	"slices"
	"strings"
)

// Scope is what the money is for: a set of paths, sorted by bytes and without
// duplicates. A scope is made by NewScope; an empty one is no scope at all.
type Scope []Path

// NewScope makes a scope of 1 to MaxScopePaths different paths, in any order.
// A path that lies under another one of the set stays in it.
func NewScope(paths ...Path) (Scope, error) {
	s := make(Scope, 0, min(len(paths), MaxScopePaths+1))
	for _, p := range paths {
		if slices.Contains(s, p) {
			continue
		}
		if len(s) == MaxScopePaths {
			return nil, invalid("scope", "has more than %d paths: name a common ancestor, or split the intent", MaxScopePaths)
		}
		if _, err := ParsePath(string(p)); err != nil {
			return nil, err
		}
		s = append(s, p)
	}
	if len(s) == 0 {
		return nil, invalid("scope", "is empty: name what the money is for, 1 to %d paths", MaxScopePaths)
	}
	slices.Sort(s)
	return s, nil
}

// Equal says whether both are the same set.
func (s Scope) Equal(o Scope) bool { return slices.Equal(s, o) }

// String is the scope's canonical text, one path a line. It is injective,
// because a path holds no control characters.
func (s Scope) String() string {
	var b strings.Builder
	for i, p := range s {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(string(p))
	}
	return b.String()
}

// ScopeRelation is how two scopes stand to each other.
type ScopeRelation string

const (
	// ScopeEqual: the same set of paths.
	ScopeEqual ScopeRelation = "Equal"
	// ScopePartial: not equal, but some path of one is, contains, or lies under
	// some path of the other: intersecting, nested or subset.
	ScopePartial ScopeRelation = "Partial"
	// ScopeDisjoint: no path of one meets a path of the other.
	ScopeDisjoint ScopeRelation = "Disjoint"
)

// CompareScopes relates two scopes. One that is empty cannot be told apart
// from anything, so it is Partial to everything, also to another empty one.
func CompareScopes(a, b Scope) ScopeRelation {
	if len(a) == 0 || len(b) == 0 {
		return ScopePartial
	}
	if a.Equal(b) {
		return ScopeEqual
	}
	for _, p := range a {
		for _, q := range b {
			if p.Contains(q) || q.Contains(p) {
				return ScopePartial
			}
		}
	}
	return ScopeDisjoint
}

// LineageRelation is how two lineages stand to each other.
type LineageRelation string

const (
	// LineageSame: the same path.
	LineageSame LineageRelation = "Same"
	// LineageAncestor: one is a proper ancestor of the other.
	LineageAncestor LineageRelation = "Ancestor"
	// LineageUnrelated: siblings, unrelated, or at least one is absent.
	LineageUnrelated LineageRelation = "Unrelated"
)

// CompareLineages relates two lineages. The empty Path is an absent lineage;
// two absent ones are not the same.
func CompareLineages(a, b Path) LineageRelation {
	switch {
	case a == "" || b == "":
		return LineageUnrelated
	case a == b:
		return LineageSame
	case a.Contains(b) || b.Contains(a):
		return LineageAncestor
	}
	return LineageUnrelated
}

// Overlap is what the relation table says of two intents with different
// intent IDs. Only OverlapNone lets both be sent without a person's word.
type Overlap string

const (
	// OverlapNone: they do not meet.
	OverlapNone Overlap = "None"
	// OverlapExactScopeAndLineage: equal scope and same lineage. If tool, caller
	// and fingerprint are equal too it is an exact match, otherwise a hold.
	OverlapExactScopeAndLineage Overlap = "Exact"
	// OverlapScope: the scopes meet.
	OverlapScope Overlap = "Scope"
	// OverlapLineage: the scopes are disjoint, but the lineages meet.
	OverlapLineage Overlap = "Lineage"
)

// relations is the relation table: scopes down, lineages across.
var relations = map[ScopeRelation]map[LineageRelation]Overlap{
	ScopeEqual:    {LineageSame: OverlapExactScopeAndLineage, LineageAncestor: OverlapScope, LineageUnrelated: OverlapScope},
	ScopePartial:  {LineageSame: OverlapScope, LineageAncestor: OverlapScope, LineageUnrelated: OverlapScope},
	ScopeDisjoint: {LineageSame: OverlapLineage, LineageAncestor: OverlapLineage, LineageUnrelated: OverlapNone},
}

// Relate reads the relation table for two intents.
func Relate(aScope Scope, aLineage Path, bScope Scope, bLineage Path) Overlap {
	return relations[CompareScopes(aScope, bScope)][CompareLineages(aLineage, bLineage)]
}
