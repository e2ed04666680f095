package prometheus

import (
	"math"
	"testing"
	"time"
)

func TestTheDashboardAsksForWhatThereIs(t *testing.T) {
	d, err := ReadDashboard(DashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Panels) < 3 {
		t.Fatalf("the dashboard has %d panels", len(d.Panels))
	}
	for i, want := range []string{"Replay rate", "Concurrent conflicts", "Key-expiry collisions"} {
		if p := d.Panels[i]; p.Title != want || p.GridPos.Y != 0 || p.GridPos.X != 8*i {
			t.Errorf("panel %d is %q at %d,%d: an operator of agents needs %q first", i, p.Title, p.GridPos.X, p.GridPos.Y, want)
		}
	}
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q has no description or no query", p.Title)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("panel %q lies over %q, or outside", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		for _, target := range p.Targets {
			asksForWhatThereIs(t, p.Title, Query(target.Expr, 5*time.Minute))
		}
	}
}

// Each of the first three panels shows its signal.
func TestTheDashboardShowsTheThreeSignals(t *testing.T) {
	d, err := ReadDashboard(DashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	m := loaded(t,
		`holdfast_calls_total{`+refund+`,verdict="REPLAY",reason="",instance="b"} 0+1x240 240+10x240`,
		`holdfast_concurrent_conflicts_total{`+refund+`,instance="a"} 0x240 0+1x240`,
		`holdfast_key_expiry_collisions_total{`+refund+`,instance="a"} 0x240 1x240`,
	)
	for i, least := range []float64{0.1, 5, 1} {
		for _, at := range []struct {
			when time.Duration
			bad  bool
		}{{time.Hour, false}, {2*time.Hour + 4*time.Minute, true}} {
			got, err := m.Instant(t.Context(), Query(d.Panels[i].Targets[0].Expr, 5*time.Minute), start.Add(at.when))
			if err != nil {
				t.Fatal(err)
			}
			highest := 0.0
			for _, s := range got {
				if !math.IsNaN(s.F) { // of a tool that is not called there is no rate
					highest = max(highest, s.F)
				}
			}
			if at.bad != (highest >= least) {
				t.Errorf("%s shows %v after %s", d.Panels[i].Title, highest, at.when)
			}
		}
	}
}
