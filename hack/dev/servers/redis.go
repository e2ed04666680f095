// Redis: appendonly, synced at each write, and never evicting.

package servers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/valkey-io/valkey-go"
)

// Redis is a Redis server.
type Redis struct{ base }

var _ Server = (*Redis)(nil)

// NewRedis makes a server and starts it.
func NewRedis(ctx context.Context, o Options) (*Redis, error) {
	b, err := newBase(o, "redis")
	if err != nil {
		return nil, err
	}
	r := &Redis{base: b}
	return r, r.Start(ctx)
}

// Address is host and port.
func (r *Redis) Address() string { return address + ":" + strconv.Itoa(r.port) }

// Start starts it.
func (r *Redis) Start(ctx context.Context) error {
	binary, err := program("redis-server", "/usr/bin/redis-server", "redis-server")
	if err != nil {
		return err
	}
	if err := r.mkdir(r.data()); err != nil {
		return err
	}
	settings := map[string]string{
		"bind": address, "port": strconv.Itoa(r.port), "dir": r.data(), "save": `""`, "daemonize": "no", "protected-mode": "yes",
		"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no", "maxmemory-policy": "noeviction",
		"auto-aof-rewrite-min-size": "256mb", "rdbcompression": "no",
		"requirepass": r.password, "masterauth": r.password,
	}
	maps.Copy(settings, r.o.Settings)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&text, "%s %s\n", name, settings[name])
	}
	// In a file: an argument is seen by everybody on the machine.
	config := filepath.Join(r.o.Dir, "redis.conf")
	if err := os.WriteFile(config, []byte(text.String()), 0o600); err != nil {
		return err
	}
	return r.launch(ctx, []string{binary, config}, nil, func(ctx context.Context) error {
		// A server that still reads its log answers LOADING.
		_, err := r.Do(ctx, "GET", "no-such-key")
		return err
	})
}

// Do asks the server past the store. The answer is as text, "" for none.
func (r *Redis) Do(ctx context.Context, args ...string) (string, error) {
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: []string{r.Address()}, Password: r.password,
		ForceSingleClient: true, DisableCache: true, DisableRetry: true, AlwaysRESP2: true,
	})
	if err != nil {
		return "", err
	}
	defer client.Close()
	answer := client.Do(ctx, client.B().Arbitrary(args...).Build())
	if err := answer.Error(); err != nil {
		if valkey.IsValkeyNil(err) {
			return "", nil
		}
		return "", fmt.Errorf("%s: %w", args[0], err)
	}
	message, err := answer.ToMessage()
	if err != nil {
		return "", err
	}
	if message.IsInt64() {
		n, err := message.AsInt64()
		return strconv.FormatInt(n, 10), err
	}
	if text, err := message.ToString(); err == nil {
		return text, nil
	}
	return message.String(), nil
}

// SetPassword changes requirepass at once, and for the next start.
func (r *Redis) SetPassword(ctx context.Context, password string) error {
	if strings.ContainsAny(password, " \t\r\n\"'") || password == "" {
		return errors.New("the password has characters that a configuration file would read otherwise")
	}
	if _, err := r.Do(ctx, "CONFIG", "SET", "requirepass", password); err != nil {
		return err
	}
	r.password = password
	return nil
}

// Follow makes it a replica of another one; Promote makes it a primary again.
func (r *Redis) Follow(ctx context.Context, primary *Redis) error {
	if _, err := r.Do(ctx, "CONFIG", "SET", "masterauth", primary.password); err != nil {
		return err
	}
	_, err := r.Do(ctx, "REPLICAOF", address, strconv.Itoa(primary.port))
	return err
}

// Promote makes a replica a primary with what it has.
func (r *Redis) Promote(ctx context.Context) error {
	_, err := r.Do(ctx, "REPLICAOF", "NO", "ONE")
	return err
}

// Following says whether it is a replica that has all that its primary has sent.
func (r *Redis) Following(ctx context.Context) error {
	info, err := r.Do(ctx, "INFO", "replication")
	if err != nil {
		return err
	}
	if !strings.Contains(info, "master_link_status:up") {
		return errors.New("the replica has no link to its primary yet")
	}
	return nil
}
