// Package store is the contract between the guard and the place where records live.
//
// A store offers four primitives and knows no policy: no path, no state, no
// verdict. The guard alone decides; it hands the store opaque strings (marks,
// probes, meters) and an opaque header and body. What every implementation must
// hold, and what the suite in storetest checks:
//
//   - Reserve and Update are all or nothing and serial: there is one order of
//     writes, and each of them sees all earlier ones.
//   - A version is never used twice, not even after a delete.
//   - A write whose nonce is already the record's nonce has been made before
//     (its reply was lost): it is answered as written and changes nothing.
//   - A mark is visible to every Reserve that is ordered after its write, and a
//     watermark covers exactly the stamps that its Reserve could see.
//   - What was answered as written survives a crash of the process and the machine.
//   - A store that many processes share notices when it does not: each process counts
//     its own writes in it. Once fewer are there than were answered as written, every
//     question of that process is answered with ErrMemoryLost, also after a reconnect,
//     and the store is disowned, so that all other processes are told so too.
//   - Time is the store's own. Nothing expires by itself.
package store

import (
	"context"
	"errors"
	"time"
)

// MaxHits is the most headers that one Reserve returns.
const MaxHits = 64

var (
	// ErrUnavailable says that the store could not be asked or did not answer in
	// time. The write may have been made: the writer reads back or repeats it with
	// the same nonce and expected version.
	ErrUnavailable = errors.New("store unavailable")
	// ErrMemoryLost says that the store carries another epoch than the one the
	// writer knows, or none, or lacks writes that were answered as written: it is not
	// the memory that the writer was using.
	ErrMemoryLost = errors.New("store memory lost")
	// ErrNotDurable says that the store is not used, because it could lose what it
	// acknowledges.
	ErrNotDurable = errors.New("store could lose an acknowledged write")
	// ErrInvalid says that the request itself breaks the contract. It is a bug of the caller.
	ErrInvalid = errors.New("invalid store request")
)

// Identity tells one store from another. Both parts are random strings.
type Identity struct {
	// Epoch is made at first use. Another epoch means that the memory was lost.
	Epoch string
	// KeyDomain is part of every key that the provider sees. It outlives a loss of
	// memory, so that a key is the same afterwards.
	KeyDomain string
}

// Standing is who a store is and how far it has come.
type Standing struct {
	// Identity is zero if the store was never used.
	Identity
	// Sequence is the highest version that was ever given, 0 if none was. A store that
	// shows a lower one than before has forgotten writes.
	Sequence uint64
	// Now is the store's time.
	Now time.Time
}

// Record is what the store remembers of an intent.
type Record struct {
	Key string
	// Version is given by the store and rises with every write to the store.
	Version uint64
	// Nonce is that of the write that made this version.
	Nonce string
	// At is the store's time of that write, in whole microseconds.
	At time.Time
	// Due is when a sweep has to look at the record; zero: never. Kept in
	// whole milliseconds, rounded down.
	Due time.Time
	// Held puts the record on the list of held ones.
	Held bool
	// Unsettled ranks the record before settled ones among the hits.
	Unsettled bool
	// Header and Body are the guard's own. Hits and lists carry no Body.
	Header []byte
	Body   []byte
}

// Mark is something that a record leaves for the probes of others.
type Mark struct {
	String string
	Tag    string
	// Until is when the mark ceases to be hit; zero: never. Kept in whole
	// milliseconds, rounded up.
	Until time.Time
}

// Probe asks for the marks with this string that other records have left.
type Probe struct {
	String string
	// Except leaves out marks that carry this tag; empty: none is left out.
	Except string
	// First lists the records that it hits before all others.
	First bool
}

// MeterEntry is what one record counts for in one meter. It is set, not added.
type MeterEntry struct {
	Meter string
	// Amount is an exact decimal, 0 or more, without sign and exponent; "" and 0
	// remove the entry.
	Amount string
	// Limit refuses the write if it raises the meter's sum above it; "": no limit.
	// A write that leaves the sum as it is or lowers it is never refused.
	Limit string
}

// Watermark is opaque outside the store: what a refused Reserve could see.
type Watermark string

// Write is what Reserve and Update have in common.
type Write struct {
	// Epoch is that of the store which the writer knows.
	Epoch string
	Key   string
	// Expected is the version that the record must have; 0: it must be absent.
	Expected uint64
	// Nonce is new for every write, and the same when that write is repeated.
	Nonce string
	// Record is the new one; the store fills Key, Version, Nonce and At. Nil
	// deletes the record with its marks and meter entries (Update only); it then
	// has an Expected version and neither marks nor meters.
	Record *Record
	// Marks replace those of the record and are stamped anew, unless KeepMarks or RenewMarks.
	Marks []Mark
	// KeepMarks leaves marks and their stamps as they are (Update only).
	KeepMarks bool
	// RenewMarks leaves the strings and tags of the marks as they are (Update only). All
	// have the end Until from now on and are stamped anew, as if they had been given as
	// Marks again.
	RenewMarks bool
	// Until is the common end that RenewMarks gives, as Mark.Until.
	Until time.Time
	// Meters sets these entries of the record and leaves its others. A meter comes once.
	Meters []MeterEntry
}

// Reserve is a step into flight: written only if no probe hits.
type Reserve struct {
	Write
	Probes []Probe
	// PassedOver holds watermarks: a mark whose stamp one of them covers is not hit.
	PassedOver []Watermark
}

// Outcome says what became of a write.
type Outcome string

const (
	// Written: durable, or recognised as written before by its nonce.
	Written Outcome = "Written"
	// Mismatch: the record has not the expected version. Nothing was written.
	Mismatch Outcome = "Mismatch"
	// Blocked: a probe was hit. Nothing was written.
	Blocked Outcome = "Blocked"
	// OverLimit: a meter would exceed its limit. Nothing was written.
	OverLimit Outcome = "OverLimit"
)

// Hit is a record that a probe has hit.
type Hit struct {
	// Record is without its Body.
	Record Record
	// Probes are the indexes of the probes that hit it, ascending.
	Probes []int
}

// Result answers Reserve and Update.
type Result struct {
	Outcome Outcome
	// Now is the store's time of this step.
	Now time.Time
	// Version is that of the record just written (Written); 0 after a delete.
	Version uint64
	// Record is the one that is there instead, with its body; nil: absent (Mismatch).
	Record *Record
	// Hits are at most MaxHits: First probes' hits, then unsettled records, then
	// the newest, that is the highest Version (Blocked).
	Hits []Hit
	// HitCount is the number of different records that were hit (Blocked).
	HitCount int
	// ProbeHits says of each probe whether it was hit, also by records beyond MaxHits (Blocked).
	ProbeHits []bool
	// Watermark covers what this Reserve could see (Blocked).
	Watermark Watermark
	// Meter is the first one that was full (OverLimit).
	Meter string
}

// Listing selects what List returns.
type Listing string

const (
	// ListDue: records whose Due is not after List.Before, earliest first.
	ListDue Listing = "Due"
	// ListHeld: records that are Held, by key.
	ListHeld Listing = "Held"
)

// List asks for a page of records.
type List struct {
	What Listing
	// Before bounds ListDue.
	Before time.Time
	// Cursor goes on where an earlier page ended; "": from the start.
	Cursor string
	// Limit is the page's size; 0: 256.
	Limit int
}

// Page is part of a list. Records carry no Body.
type Page struct {
	Records []Record
	// Cursor of the next page; "": this was the last.
	Cursor string
	Now    time.Time
}

// Store is where records live.
type Store interface {
	// Standing returns who the store is and how far it has come.
	Standing(ctx context.Context) (Standing, error)
	// Initialise gives the store this identity if it has none, and returns the one
	// that it has.
	Initialise(ctx context.Context, id Identity) (Identity, error)
	// Disown gives the store another epoch if it carries this one: for whoever finds
	// that its memory is not whole, so that nobody takes it for that memory again. Its
	// records stay. A store that carries another epoch, or none, is left as it is.
	Disown(ctx context.Context, epoch, next string) error
	// Reserve writes the record only if the version is as expected, no probe hits
	// and no meter overflows, checked in this order, in one atomic step.
	Reserve(ctx context.Context, r Reserve) (Result, error)
	// Update is compare-and-set for every other step.
	Update(ctx context.Context, w Write) (Result, error)
	// Get returns the record with its body, nil if absent, and the store's time.
	Get(ctx context.Context, key string) (*Record, time.Time, error)
	// List pages through what is due or held. A record that changes meanwhile may
	// be missed or come twice; one that stays comes once.
	List(ctx context.Context, l List) (Page, error)
	// Meter returns the sum of a meter, an exact decimal.
	Meter(ctx context.Context, meter string) (string, error)
	// Close ends the use of the store.
	Close() error
}
