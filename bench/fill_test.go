package main

import (
	"slices"
	"testing"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// A record that is loaded stands in the way as one that was paid: with all the marks of its claim.
func TestLoadedRecordHasItsMarks(t *testing.T) {
	tool, err := compiled(nowhere)
	if err != nil {
		t.Fatal(err)
	}
	claim, settlement, err := newMaker(tool).settled(1)
	if err != nil {
		t.Fatal(err)
	}
	if len(claim.Marks) == 0 || settlement.RenewMarks || settlement.KeepMarks {
		t.Fatalf("the claim has %d marks, and the settlement is to take them from a record that is not there", len(claim.Marks))
	}
	if !slices.EqualFunc(claim.Marks, settlement.Marks, func(a, b store.Mark) bool { return a.String == b.String && a.Tag == b.Tag && !b.Until.IsZero() }) {
		t.Errorf("the settlement has the marks %+v, the claim %+v", settlement.Marks, claim.Marks)
	}
	if err := settlement.Validate(); err != nil {
		t.Error(err)
	}
}
