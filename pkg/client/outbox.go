// This file is the outbox: one file that remembers, through a crash, what was begun. Every
// change of it is synced before anything follows from it.

package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// step is how far an intent has come.
type step string

const (
	// stepWritten: nothing runs. It may be claimed under its token, and nobody has begun it.
	stepWritten step = "written"
	// stepBegun: the function may be running, or has run.
	stepBegun step = "begun"
	// stepFinished: the function has returned, and its settlement is to be brought.
	stepFinished step = "finished"
)

// entry is an intent in the outbox.
type entry struct {
	key    string
	Intent Intent
	Called bool `json:",omitempty"`
	Step   step
	// Token names the next claim, or the one whose attempt is begun.
	Token       string
	Attempt     int         `json:",omitempty"`
	Fence       string      `json:",omitempty"`
	ProviderKey string      `json:",omitempty"`
	Settlement  *settlement `json:",omitempty"`
	// Answered is what Holdfast says to the settlement, where it will always say so.
	Answered string `json:",omitempty"`
	Written  time.Time

	// unwritten is why the outbox does not have the entry as it is here; nil: it has.
	unwritten error
	// wait is how long the next claim should wait.
	wait time.Duration
}

func (e *entry) begun() Begun {
	b := Begun{
		Intent: e.Intent, Called: e.Called, Ran: e.Step == stepBegun, Finished: e.Step == stepFinished,
		Attempt: e.Attempt, ProviderKey: e.ProviderKey, Answered: e.Answered,
	}
	if s := e.Settlement; s != nil {
		b.Outcome, b.Detail, b.Result = s.Outcome, s.Detail, s.result()
	}
	return b
}

// same says that two intents are one request.
func (in Intent) same(o Intent) bool {
	return in.Tool == o.Tool && in.ID == o.ID && string(in.Body) == string(o.Body) && in.ContentType == o.ContentType &&
		in.Session == o.Session && in.Call == o.Call && in.Method == o.Method && in.Suffix == o.Suffix &&
		maps.EqualFunc(in.Header, o.Header, slices.Equal) && maps.EqualFunc(in.Query, o.Query, slices.Equal)
}

func outboxKey(namespace, tool, id string) string {
	return url.PathEscape(namespace) + "/" + url.PathEscape(tool) + "/" + url.PathEscape(id)
}

var (
	intentsBucket = []byte("intents")
	// forgottenBucket keeps what was taken out although it may have been paid: it is
	// evidence, and keeps the same ID from being run again here.
	forgottenBucket = []byte("forgotten")
)

type outbox struct{ db *bbolt.DB }

func openOutbox(path string) (*outbox, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if errors.Is(err, berrors.ErrTimeout) {
		return nil, fmt.Errorf("the outbox %s is open in another process: each process needs its own", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open the outbox %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(intentsBucket)
		if err == nil {
			_, err = tx.CreateBucketIfNotExists(forgottenBucket)
		}
		return err
	})
	if err == nil {
		// A file whose name is not durable is lost with all that is in it.
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the outbox %s: %w", path, err), db.Close())
	}
	return &outbox{db}, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (o *outbox) close() error { return o.db.Close() }

// put writes an entry; it is on the disk when it returns.
func (o *outbox) put(e *entry) error {
	text, err := json.Marshal(e)
	if err == nil {
		err = o.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(intentsBucket).Put([]byte(e.key), text) })
	}
	if e.unwritten = err; err != nil {
		return fmt.Errorf("write intent %s of %s into the outbox: %w", e.Intent.ID, e.Intent.Tool, err)
	}
	return nil
}

// forget moves an entry to where it is only evidence.
func (o *outbox) forget(e *entry) error {
	text, err := json.Marshal(e)
	if err == nil {
		err = o.db.Update(func(tx *bbolt.Tx) error {
			return errors.Join(tx.Bucket(forgottenBucket).Put([]byte(e.key), text), tx.Bucket(intentsBucket).Delete([]byte(e.key)))
		})
	}
	if err != nil {
		return fmt.Errorf("take %s out of the outbox: %w", e.key, err)
	}
	return nil
}

// forgotten says whether an intent was taken out although it may have been paid.
func (o *outbox) forgotten(key string) (is bool, err error) {
	err = o.db.View(func(tx *bbolt.Tx) error {
		is = tx.Bucket(forgottenBucket).Get([]byte(key)) != nil
		return nil
	})
	return is, err
}

func (o *outbox) remove(key string) error {
	err := o.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(intentsBucket).Delete([]byte(key)) })
	if err != nil {
		return fmt.Errorf("take %s out of the outbox: %w", key, err)
	}
	return nil
}

// get reads an entry; nil: there is none.
func (o *outbox) get(key string) (e *entry, err error) {
	err = o.db.View(func(tx *bbolt.Tx) error {
		text := tx.Bucket(intentsBucket).Get([]byte(key))
		if text == nil {
			return nil
		}
		e, err = readEntry(key, text)
		return err
	})
	return e, err
}

func readEntry(key string, text []byte) (*entry, error) {
	e := &entry{key: key}
	if err := json.Unmarshal(text, e); err != nil {
		return nil, fmt.Errorf("the outbox has something unreadable under %s: %w", key, err)
	}
	switch e.Step {
	case stepWritten, stepBegun, stepFinished:
		return e, nil
	}
	return nil, fmt.Errorf("the outbox has the step %q under %s, which this version does not know", e.Step, key)
}

// list reads all entries, the oldest first.
func (o *outbox) list() ([]*entry, error) {
	var out []*entry
	err := o.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(intentsBucket).ForEach(func(key, text []byte) error {
			e, err := readEntry(string(key), text)
			out = append(out, e)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(out, func(a, b *entry) int { return a.Written.Compare(b.Written) })
	return out, nil
}
