package controller

import "testing"

// All open intents are looked at within a minute, up to a number that the store is asked for.
func TestATurnTakesAMinute(t *testing.T) {
	for open, want := range map[int]int{0: openPerTick, 1: openPerTick, 60 * openPerTick: openPerTick, 20_000: 334, 60 * mostPerTick: mostPerTick, 1_000_000: mostPerTick} {
		got := perTick(open)
		if got != want {
			t.Errorf("%d open ones: %d each second, want %d", open, got, want)
		}
		if ticks := (open + got - 1) / got; open <= 60*mostPerTick && ticks > 60 {
			t.Errorf("%d open ones take %d s", open, ticks)
		}
	}
}
