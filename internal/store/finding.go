package store

// Finding is something about a store's server that is to be mended.
type Finding struct {
	// Reason names the finding in one word.
	Reason string
	// Loses says that an acknowledged write could be lost, or that it cannot be ruled out.
	Loses bool
	// Text says it in plain words, with what to do, without a full stop.
	Text string
}
