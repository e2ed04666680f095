// The ledger is what a run is judged by.
//
// Invariant: an entry counts exactly when its whole line is in the ledger file
// and synced. Nothing is answered, shown or deduplicated before that, and a
// line that a crash cut short never counted. Without a file the ledger lives
// in memory under the same rules.

package provider

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cockroachdb/apd/v3"
)

// Kind says which way the money moved.
type Kind string

const (
	Charge Kind = "charge"
	Refund Kind = "refund"
)

// Entry is one movement of money. Amount is the text that was sent.
type Entry struct {
	ID        string `json:"id"`
	Kind      Kind   `json:"kind"`
	AccountID string `json:"accountId"`
	OrderID   string `json:"orderId"`
	Amount    string `json:"amount"`
	Currency  string `json:"currency"`
	// Key is the idempotency key of the request, empty if it had none.
	Key  string `json:"key"`
	Memo string `json:"memo,omitempty"`
	// Extra holds all other arguments of the request, as they were sent but
	// for white space.
	Extra map[string]json.RawMessage `json:"extra,omitempty"`
	// Created is the time of the commit, not of the request.
	Created time.Time `json:"created,omitzero"`
}

// sameRequest reports whether two entries come from equal requests, whatever
// their keys.
func (e Entry) sameRequest(other Entry) (bool, error) {
	strip := func(e Entry) ([]byte, error) {
		e.ID, e.Key, e.Created = "", "", time.Time{}
		return json.Marshal(e)
	}
	a, err := strip(e)
	if err != nil {
		return false, err
	}
	b, err := strip(other)
	if err != nil {
		return false, err
	}
	return bytes.Equal(a, b), nil
}

// Totals are exact sums by kind and currency.
type Totals map[Kind]map[string]string

// errClosed is what a commit gets once the provider has been closed.
var errClosed = errors.New("the ledger is closed")

// line is one line of the ledger file: an entry, or a reset of all before it.
type line struct {
	Entry *Entry     `json:"entry,omitempty"`
	Reset *time.Time `json:"reset,omitempty"`
}

type ledger struct {
	mu      sync.Mutex
	file    *os.File // nil: in memory only
	end     int64    // where the next line begins; all before it is synced
	err     error    // once set, nothing is read or written any more
	entries []Entry
	latest  map[string]int // by key: the index of its newest entry
}

func newLedger() *ledger { return &ledger{latest: map[string]int{}} }

// openLedger reads the ledger file, makes it if there is none, and locks it
// against a second process.
func openLedger(path string) (*ledger, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the ledger file: %w", err)
	}
	l := newLedger()
	l.file = file
	if err := l.load(path); err != nil {
		return nil, errors.Join(fmt.Errorf("ledger file %s: %w", path, err), file.Close())
	}
	return l, nil
}

func (l *ledger) load(path string) error {
	if err := syscall.Flock(int(l.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("lock it (is another provider running on it?): %w", err)
	}
	// The file's name must outlive a crash as surely as its lines.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("open its directory: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("sync its directory: %w", err)
	}

	lines := bufio.NewReader(l.file)
	for number := 1; ; number++ {
		text, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			if len(text) == 0 {
				return nil
			}
			// A crash cut this line short: it was never answered and never
			// counted, and it must not run into the next one.
			return l.cutTail()
		}
		if err != nil {
			return fmt.Errorf("read line %d: %w", number, err)
		}
		var next line
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&next); err != nil {
			return fmt.Errorf("line %d is not a ledger line: %w", number, err)
		}
		if (next.Entry == nil) == (next.Reset == nil) {
			return fmt.Errorf("line %d must be an entry or a reset", number)
		}
		l.apply(next)
		l.end += int64(len(text))
	}
}

func (l *ledger) cutTail() error {
	if err := l.file.Truncate(l.end); err != nil {
		return fmt.Errorf("cut off an unfinished line: %w", err)
	}
	if err := l.file.Sync(); err != nil {
		return fmt.Errorf("sync after cutting off an unfinished line: %w", err)
	}
	return nil
}

// apply changes the memory as a synced line says.
func (l *ledger) apply(next line) {
	if next.Reset != nil {
		l.entries, l.latest = nil, map[string]int{}
		return
	}
	l.entries = append(l.entries, *next.Entry)
	if next.Entry.Key != "" {
		l.latest[next.Entry.Key] = len(l.entries) - 1
	}
}

// write makes a line durable and then applies it. The caller holds l.mu.
func (l *ledger) write(next line) error {
	if l.err != nil {
		return l.err
	}
	if l.file != nil {
		// Encode ends a line by itself. Without escapes for HTML, arguments
		// are read again as they were.
		var encoded bytes.Buffer
		encoder := json.NewEncoder(&encoded)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(next); err != nil {
			return fmt.Errorf("encode a ledger line: %w", err)
		}
		text := encoded.Bytes()
		if _, err := l.file.WriteAt(text, l.end); err != nil {
			err = fmt.Errorf("write to the ledger file: %w", err)
			if cut := l.cutTail(); cut != nil {
				l.err = errors.Join(err, cut)
			}
			return err
		}
		if err := l.file.Sync(); err != nil {
			// Whether the line is on disk cannot be known any more, so the
			// ledger must not judge any longer.
			l.err = fmt.Errorf("sync the ledger file: %w", err)
			return l.err
		}
		l.end += int64(len(text))
	}
	l.apply(next)
	return nil
}

// commit writes an entry, stamped with the time at which it is written.
func (l *ledger) commit(e Entry, now func() time.Time) (Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.Created = now().UTC().Round(0)
	if err := l.write(line{Entry: &e}); err != nil {
		return Entry{}, err
	}
	return e, nil
}

func (l *ledger) reset(now func() time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := now().UTC().Round(0)
	return l.write(line{Reset: &at})
}

// newest finds the newest entry of a key.
func (l *ledger) newest(key string) (Entry, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return Entry{}, false, l.err
	}
	i, ok := l.latest[key]
	if !ok {
		return Entry{}, false, nil
	}
	return l.entries[i], true, nil
}

// all returns the entries in the order of their commits.
func (l *ledger) all() ([]Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A closed ledger is still true; one whose file failed is not.
	if l.err != nil && !errors.Is(l.err, errClosed) {
		return nil, l.err
	}
	return slices.Clone(l.entries), nil
}

func (l *ledger) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = errClosed
	}
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}

// totals sums without rounding: precision 0 is exact for additions.
func totals(entries []Entry) (Totals, error) {
	sums := map[Kind]map[string]*apd.Decimal{}
	for _, e := range entries {
		amount, _, err := apd.NewFromString(e.Amount)
		if err != nil {
			return nil, fmt.Errorf("amount of entry %s: %w", e.ID, err)
		}
		if sums[e.Kind] == nil {
			sums[e.Kind] = map[string]*apd.Decimal{}
		}
		sum := sums[e.Kind][e.Currency]
		if sum == nil {
			sum = new(apd.Decimal)
			sums[e.Kind][e.Currency] = sum
		}
		if _, err := apd.BaseContext.Add(sum, sum, amount); err != nil {
			return nil, fmt.Errorf("add entry %s: %w", e.ID, err)
		}
	}
	out := Totals{}
	for kind, currencies := range sums {
		out[kind] = map[string]string{}
		for currency, sum := range currencies {
			out[kind][currency] = sum.Text('f')
		}
	}
	return out, nil
}
