// The relation table, cell by cell and with what lies at its edges, and sets of
// paths.

package intent

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func mustScope(t *testing.T, paths ...Path) Scope {
	t.Helper()
	s, err := NewScope(paths...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRelationTable(t *testing.T) {
	const (
		order8 = "customer/c1/order/8"
		order9 = "customer/c1/order/9"
		line   = "customer/c1/order/9/line/1"
		whole  = "customer/c1"
		c10    = "customer/c10"
	)
	type scopes struct {
		name string
		a, b Scope
		want ScopeRelation
	}
	type lineages struct {
		name string
		a, b Path
		want LineageRelation
	}
	set := func(paths ...Path) Scope { return mustScope(t, paths...) }
	allScopes := []scopes{
		{"equal", set(order9), set(order9), ScopeEqual},
		{"equal, other order", set(order9, order8), set(order8, order9), ScopeEqual},
		{"equal, named twice", set(order9, order9), set(order9), ScopeEqual},
		{"nested", set(whole), set(order9), ScopePartial},
		{"nested deeper", set("customer"), set(line), ScopePartial},
		{"subset", set(order9), set(order8, order9), ScopePartial},
		{"intersecting", set(order8, order9), set(order9, c10), ScopePartial},
		{"nested in one of several", set(order8, line), set(c10, order9), ScopePartial},
		{"covering but not equal", set(whole, order9), set(whole), ScopePartial},
		{"siblings", set(order8), set(order9), ScopeDisjoint},
		{"prefix of the text only", set(whole), set(c10), ScopeDisjoint},
		{"letter case", set("customer/C1"), set(whole), ScopeDisjoint},
		{"several, none met", set(order8, "a"), set(order9, "b"), ScopeDisjoint},
		{"empty", nil, set(order9), ScopePartial},
		{"both empty", nil, Scope{}, ScopePartial},
	}
	allLineages := []lineages{
		{"same", "s1/plan-2/call-4", "s1/plan-2/call-4", LineageSame},
		{"parent", "s1/plan-2", "s1/plan-2/call-4", LineageAncestor},
		{"grandparent", "s1", "s1/plan-2/call-4", LineageAncestor},
		{"siblings", "s1/plan-2/call-4", "s1/plan-2/call-5", LineageUnrelated},
		{"prefix of the text only", "s1/call-4", "s1/call-40", LineageUnrelated},
		{"unrelated", "s1", "s2", LineageUnrelated},
		{"one absent", "", "s1", LineageUnrelated},
		{"both absent", "", "", LineageUnrelated},
	}
	// As the design has it, and not read from the code.
	table := map[ScopeRelation]map[LineageRelation]Overlap{
		"Equal":    {"Same": "Exact", "Ancestor": "Scope", "Unrelated": "Scope"},
		"Partial":  {"Same": "Scope", "Ancestor": "Scope", "Unrelated": "Scope"},
		"Disjoint": {"Same": "Lineage", "Ancestor": "Lineage", "Unrelated": "None"},
	}
	cells := map[string]bool{}
	for _, s := range allScopes {
		for _, l := range allLineages {
			t.Run(s.name+", "+l.name, func(t *testing.T) {
				cells[fmt.Sprint(s.want, l.want)] = true
				for _, swapScopes := range []bool{false, true} {
					for _, swapLineages := range []bool{false, true} {
						aScope, bScope, aLineage, bLineage := s.a, s.b, l.a, l.b
						if swapScopes {
							aScope, bScope = bScope, aScope
						}
						if swapLineages {
							aLineage, bLineage = bLineage, aLineage
						}
						if got := CompareScopes(aScope, bScope); got != s.want {
							t.Errorf("scopes %q and %q: %s, want %s", aScope, bScope, got, s.want)
						}
						if got := CompareLineages(aLineage, bLineage); got != l.want {
							t.Errorf("lineages %q and %q: %s, want %s", aLineage, bLineage, got, l.want)
						}
						if got, want := Relate(aScope, aLineage, bScope, bLineage), table[s.want][l.want]; got != want {
							t.Errorf("%s, want %s", got, want)
						}
					}
				}
			})
		}
	}
	if len(cells) != 9 {
		t.Errorf("%d of 9 cells were tried", len(cells))
	}
}

func TestNewScope(t *testing.T) {
	many := func(n int) (out []Path) {
		for i := range n {
			out = append(out, Path(fmt.Sprintf("order/%02d", i)))
		}
		return out
	}
	sixteen := "order/00\norder/01\norder/02\norder/03\norder/04\norder/05\norder/06\norder/07\n" +
		"order/08\norder/09\norder/10\norder/11\norder/12\norder/13\norder/14\norder/15"
	for _, c := range []struct {
		name  string
		paths []Path
		want  string
		wrong string
	}{
		{name: "sorted by bytes", paths: []Path{"b", "a/b", "a", "B"}, want: "B\na\na/b\nb"},
		{name: "without duplicates", paths: []Path{"a", "b", "a"}, want: "a\nb"},
		{name: "nested ones stay", paths: []Path{"a/b", "a"}, want: "a\na/b"},
		{name: "sixteen", paths: many(16), want: sixteen},
		{name: "sixteen, each twice", paths: slices.Repeat(many(16), 2), want: sixteen},
		{name: "none", wrong: "is empty"},
		{name: "seventeen", paths: many(17), wrong: "more than 16"},
		{name: "absent path", paths: []Path{"a", ""}, wrong: "no segment"},
		{name: "path that was never checked", paths: []Path{"a\nb"}, wrong: "control character"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := NewScope(c.paths...)
			if c.wrong != "" {
				wantInvalid(t, err, c.wrong)
				return
			}
			if err != nil || got.String() != c.want {
				t.Fatalf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// The input of NewScope is not the scope: sorting must not reach it.
func TestNewScopeLeavesItsInput(t *testing.T) {
	in := []Path{"b", "a"}
	if _, err := NewScope(in...); err != nil || !slices.Equal(in, []Path{"b", "a"}) {
		t.Fatal(in, err)
	}
}

// Scopes from a small alphabet of segments, so that every relation comes up:
// String is injective, and the relation agrees with one that is computed from
// segments.
func TestScopeProperties(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	segments := []string{"a", "a/", "%", "aa", "/"}
	random := func() Scope {
		var paths []Path
		for range 1 + rng.IntN(3) {
			var parts []string
			for range 1 + rng.IntN(3) {
				parts = append(parts, segments[rng.IntN(len(segments))])
			}
			p, err := NewPath(parts...)
			if err != nil {
				t.Fatal(err)
			}
			paths = append(paths, p)
		}
		return mustScope(t, paths...)
	}
	meets := func(a, b Path) bool {
		as, bs := a.Segments(), b.Segments()
		n := min(len(as), len(bs))
		return slices.Equal(as[:n], bs[:n])
	}
	seen := map[ScopeRelation]int{}
	for range 50_000 {
		a, b := random(), random()
		if (a.String() == b.String()) != a.Equal(b) {
			t.Fatalf("%q and %q: texts and sets disagree", a, b)
		}
		want := ScopeDisjoint
		for _, p := range a {
			for _, q := range b {
				if meets(p, q) {
					want = ScopePartial
				}
			}
		}
		if slices.Equal(a, b) {
			want = ScopeEqual
		}
		if got := CompareScopes(a, b); got != want || CompareScopes(b, a) != want {
			t.Fatalf("%q and %q: %s, want %s", a, b, got, want)
		}
		seen[want]++
	}
	for _, r := range []ScopeRelation{ScopeEqual, ScopePartial, ScopeDisjoint} {
		if seen[r] < 100 {
			t.Errorf("%s came up %d times only", r, seen[r])
		}
	}
}
