package redis

// Durability judges how much of what was answered would survive, from what the
// server says of itself.

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/valkey-io/valkey-go"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// The reasons of findings.
const (
	// Evicts: the server forgets keys when its memory is full.
	Evicts = "Evicts"
	// NoAppendOnlyFile: writes are not logged at all.
	NoAppendOnlyFile = "NoAppendOnlyFile"
	// NotSynced: writes are answered before they are on the disk.
	NotSynced = "NotSynced"
	// WriteFailing: the server could not write its log last time.
	WriteFailing = "WriteFailing"
	// AsyncReplica: a failover to a replica loses what it had not received.
	AsyncReplica = "AsyncReplica"
	// IsReplica: the server takes no writes, and may lag behind.
	IsReplica = "IsReplica"
	// LowMemory: soon all writes will be refused.
	LowMemory = "LowMemory"
	// NotReadable: the server does not let its configuration be read.
	NotReadable = "NotReadable"
)

// headroom is the part of maxmemory, in percent, above which memory is low.
const headroom = 80

// Durability asks the server that holds the store; no findings: what is answered
// as written is on its disk, and stays. It cannot see what the disk itself promises.
func (s *Store) Durability(ctx context.Context) (store.Durability, error) {
	var info string
	var config map[string]string
	var configErr error
	err := s.ask(ctx, s.link(), "judge durability", func(ctx context.Context, client valkey.Client) error {
		// A key of the store in the place of a section or a pattern, which matches
		// none, brings the question to its node in a cluster.
		key := s.keys.meta
		answer, err := client.Do(ctx, client.B().Arbitrary("INFO").Keys(key).
			Args("server", "memory", "persistence", "replication").Build()).ToString()
		if err != nil {
			return err
		}
		settings, err := client.Do(ctx, client.B().Arbitrary("CONFIG", "GET").Keys(key).
			Args("appendfsync", "no-appendfsync-on-rewrite").Build()).AsStrMap()
		if _, refused := valkey.IsValkeyErr(err); err != nil && !refused {
			return err
		}
		info, config, configErr = answer, settings, err
		return nil
	})
	if err != nil {
		return store.Durability{}, err
	}
	return store.Durability{Findings: judge(fields(info), config, configErr)}, nil
}

// fields reads the lines of INFO.
func fields(info string) map[string]string {
	f := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			f[name] = value
		}
	}
	return f
}

// judge takes what it cannot read for the worse.
func judge(info, config map[string]string, configErr error) []store.Finding {
	var found []store.Finding
	add := func(reason string, loses bool, text string, args ...any) {
		found = append(found, store.Finding{Reason: reason, Loses: loses, Text: fmt.Sprintf(text, args...)})
	}
	switch policy := info["maxmemory_policy"]; policy {
	case "noeviction":
	case "":
		add(NotReadable, true, "the server does not say what it does when its memory is full: let the user run INFO")
	default:
		add(Evicts, true, "maxmemory-policy is %s: when memory is full the server forgets what was paid; set it to noeviction", policy)
	}
	switch aof := info["aof_enabled"]; {
	case aof == "":
		add(NotReadable, true, "the server does not say whether it logs writes: let the user run INFO")
	case aof != "1":
		add(NoAppendOnlyFile, true, "appendonly is no: a restart of the server loses writes that were answered; set it to yes")
	case configErr != nil:
		add(NotReadable, true, "the server does not let its configuration be read (%v), so it is not known whether it syncs each write: let the user run CONFIG GET, or see to it that appendfsync is always", configErr)
	default:
		if sync := config["appendfsync"]; sync != "always" {
			add(NotSynced, true, "appendfsync is %q: a failure of the machine loses writes that were answered; set it to always", sync)
		}
		if config["no-appendfsync-on-rewrite"] == "yes" {
			add(NotSynced, true, "no-appendfsync-on-rewrite is yes: while the server rewrites its log it does not sync; set it to no")
		}
	}
	if status := info["aof_last_write_status"]; status != "" && status != "ok" {
		add(WriteFailing, true, "the server's last write to its log failed (%s): look at its disk and its log", status)
	}
	switch role := info["role"]; role {
	case "master":
	case "":
		add(NotReadable, true, "the server does not say whether it is a replica: let the user run INFO")
	default:
		add(IsReplica, true, "the server is a replica of %s:%s: it refuses writes and lags behind; address the primary", info["master_host"], info["master_port"])
	}
	if n := info["connected_slaves"]; n != "" && n != "0" {
		add(AsyncReplica, true, "%s replica(s) follow without being waited for: a failover to one loses writes that were answered; do not fail over by itself, or use a store with synchronous replication", n)
	}
	most, errMost := strconv.ParseUint(info["maxmemory"], 10, 64)
	used, errUsed := strconv.ParseUint(info["used_memory"], 10, 64)
	switch {
	case errMost != nil || errUsed != nil:
		add(NotReadable, false, "the server does not say how much memory it uses: let the user run INFO")
	case most > 0 && used > most/100*headroom:
		add(LowMemory, false, "%d of %d bytes of maxmemory are used: when it is full all writes are refused; raise it", used, most)
	}
	return found
}
