package store

// Durability is what a store's server was found to make of an acknowledged write.
type Durability struct {
	// Findings are what is to be mended; none is good.
	Findings []Finding
	// Replicated: it is on the disks of several nodes.
	Replicated bool
}

// Finding is something about a store's server that is to be mended.
type Finding struct {
	// Reason names the finding in one word.
	Reason string
	// Loses says that an acknowledged write could be lost, or that it cannot be ruled out.
	Loses bool
	// Text says it in plain words, with what to do, without a full stop.
	Text string
}
