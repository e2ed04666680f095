package postgres

// Which locks of strings a Reserve takes, and in which order. What the modes do,
// and why that is enough and cannot deadlock, is said at the function write.

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// digest is how a string is known in an index.
type digest = [16]byte

func digestOf(s string) digest {
	sum := sha256.Sum256([]byte(s))
	return digest(sum[:16])
}

// Modes are bits: a string that is marked and probed has both.
const (
	modeMark  int32 = 1
	modeProbe int32 = 2
)

// lockPlan is what a Reserve locks, in ascending order. All processes must come to
// the same numbers: they are part of the format.
type lockPlan struct {
	numbers []int64
	modes   []int32
}

func (s *Store) lockNumber(d digest) int64 {
	return (int64(binary.BigEndian.Uint64(d[:8])) ^ s.seed) &^ 3
}

func (s *Store) lockPlan(marks []mark, probes []store.Probe) lockPlan {
	modes := make(map[int64]int32, len(marks)+len(probes))
	for _, m := range marks {
		modes[s.lockNumber(m.digest)] |= modeMark
	}
	for _, p := range probes {
		modes[s.lockNumber(digestOf(p.String))] |= modeProbe
	}
	plan := lockPlan{numbers: make([]int64, 0, len(modes)), modes: make([]int32, 0, len(modes))}
	for number := range modes {
		plan.numbers = append(plan.numbers, number)
	}
	slices.SortFunc(plan.numbers, cmp.Compare[int64])
	for _, number := range plan.numbers {
		plan.modes = append(plan.modes, modes[number])
	}
	return plan
}
