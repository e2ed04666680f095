package redis

// What a failure means. All are unavailability to the guard: what was asked may or
// may not have been done. The message says what was being done and where to look.

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var (
	errSilent  = errors.New("no answer in time: look whether the server runs, what it is busy with, and the network to it")
	errDamaged = errors.New("the store's memory is damaged")
	errLate    = errors.New("later questions have overtaken this one")
	errForeign = errors.New("this program does not read it: run the one that wrote it, or use another namespace")
)

const rights = "the user may not do this: give it all commands and scripts on the store's keys"

// advice says where to look, by the code that the server's error begins with.
var advice = map[string]string{
	"READONLY":        "this server is a replica: look whether a failover has moved the primary, and whether the address follows it",
	"OOM":             "the server's memory is full, nothing was written: raise maxmemory or free memory; do not evict",
	"LOADING":         "the server is reading its files after a start: wait, or look at its log",
	"MASTERDOWN":      "this server is a replica that has lost its primary: look at the primary",
	"NOREPLICAS":      "the server demands more replicas than it has: look at min-replicas-to-write and at the replicas",
	"MISCONF":         "the server cannot write its files: look at its disk and its log",
	"BUSY":            "another script does not end: look at the server's slow log for who runs it",
	"NOAUTH":          "the server asks for a password and none was given: look at the store's secret",
	"WRONGPASS":       "user or password is wrong: look at the store's secret and the server's ACL",
	"NOPERM":          rights,
	"CLUSTERDOWN":     "the cluster does not serve all of its slots: look at its nodes",
	"TRYAGAIN":        "the store's slot is being moved: wait",
	"WRONGTYPE":       "a key of the store is not what it has to be, another program has written it: use a namespace of one's own",
	"HOLDFASTSIZE":    "a record has more marks or meter entries than 16 MiB hold; nothing was written",
	"HOLDFASTABSENT":  "if a cluster is just moving the store's slot, wait; else restore the server's data, or accept the loss with another namespace",
	"HOLDFASTDAMAGED": "restore the server's data, or accept the loss with another namespace",
}

// longerAdvice is for errors that have no code of their own.
var longerAdvice = []struct{ text, advice string }{
	{"max number of clients", "the server has no more connections: raise maxclients, or look who holds them"},
	{"Error compiling script", "the server is too old: Redis 7.0 or any Valkey is needed"},
	{"can't run this command", rights},
	{"unknown command", "the server lacks a command: Redis 7.0 or any Valkey is needed"},
}

func (s *Store) unavailable(doing string, cause error) error {
	return fmt.Errorf("%w: %s in %s at %s: %w", store.ErrUnavailable, doing, s.opts.Namespace, strings.Join(s.opts.Addresses, ","), cause)
}

// explain turns what went wrong into the contract's errors.
func (s *Store) explain(doing string, err error) error {
	answer, ok := valkey.IsValkeyErr(err)
	if !ok {
		for _, own := range []error{errSilent, errClosed, context.Canceled, context.DeadlineExceeded} {
			if errors.Is(err, own) {
				return s.unavailable(doing, err)
			}
		}
		// A server that has too many clients says so, but has often hung up before that is read.
		return s.unavailable(doing, fmt.Errorf("%w: look whether the server runs and takes connections (its log, maxclients), and at the network to it", err))
	}
	message := answer.Error()
	code, rest, _ := strings.Cut(message, " ")
	switch code {
	case "HOLDFASTFORMAT":
		format, _, _ := strings.Cut(rest, " script:")
		return s.unavailable(doing, fmt.Errorf("the memory has format %s, not %s: %w", format, format1, errForeign))
	case "HOLDFASTLATE":
		return s.unavailable(doing, errLate)
	case "HOLDFASTLOST":
		counts, _, _ := strings.Cut(rest, " script:")
		return fmt.Errorf("%w: %s in %s at %s: the server shows %s writes that it has answered to this process: it was set back or emptied; accept the loss of that memory, and open the store anew",
			store.ErrMemoryLost, doing, s.opts.Namespace, strings.Join(s.opts.Addresses, ","), counts)
	case "HOLDFASTDAMAGED":
		return s.unavailable(doing, fmt.Errorf("%w: %w: %s", errDamaged, err, advice[code]))
	}
	if a := advice[code]; a != "" {
		return s.unavailable(doing, fmt.Errorf("%w: %s", err, a))
	}
	for _, l := range longerAdvice {
		if strings.Contains(message, l.text) {
			return s.unavailable(doing, fmt.Errorf("%w: %s", err, l.advice))
		}
	}
	return s.unavailable(doing, err)
}

// damaged is an answer of the server that no script of this store gives.
func (s *Store) damaged(doing, what string) error {
	return s.unavailable(doing, fmt.Errorf("%w: %s", errDamaged, what))
}
