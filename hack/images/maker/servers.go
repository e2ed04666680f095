// This file is the images of the stores' servers, for tests: Debian's Redis and PostgreSQL,
// to be run as the operator runs the official ones.

package main

import (
	"context"
	_ "embed"
	"errors"
	"io/fs"
	"path"
	"strings"
)

// serverUser is what the official images have, and what the operator's pods run as.
const serverUser = 999

//go:embed files/docker-entrypoint.sh
var postgresEntrypoint []byte

// shell is what the operator's probes and start scripts are written for: util-linux has flock.
var shell = []string{"dash", "coreutils", "grep", "libc-bin", "util-linux"}

func server(name, description, home string, t tree, parts []part) image {
	users(t, name, home, serverUser)
	t.dir("/tmp", fs.ModeSticky|0o777)
	t.dir("/run", 0o755)
	t.link("/var/run", "../run")
	t.dir(home, 0o755)
	f := t[clean(home)]
	f.uid, f.gid = serverUser, serverUser
	t[clean(home)] = f
	return image{
		name: name, description: description, layers: []tree{t}, parts: parts,
		user: "999:999", env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, workingDir: home,
	}
}

func redisImage(ctx context.Context, d debian) (image, error) {
	t, parts, err := d.tree(ctx, append(shell, "redis-server", "redis-tools")...)
	if err != nil {
		return image{}, err
	}
	i := server("redis", "Debian's Redis, for tests", "/data", t, parts)
	i.cmd = []string{"redis-server", "--bind", "*", "--protected-mode", "yes"}
	return i, nil
}

func postgresImage(ctx context.Context, d debian) (image, error) {
	t, parts, err := d.tree(ctx, append(shell, "postgresql", "libnss-wrapper")...)
	if err != nil {
		return image{}, err
	}
	bin := ""
	for name := range t {
		if ok, err := path.Match("usr/lib/postgresql/*/bin/postgres", name); err == nil && ok {
			bin = "/" + path.Dir(name)
		}
	}
	if bin == "" {
		return image{}, errors.New("the packages have no /usr/lib/postgresql/*/bin/postgres")
	}
	// As in the official image: the operator's start script calls it by that name.
	const entry = "/usr/local/bin/docker-entrypoint.sh"
	t.file(entry, 0o755, postgresEntrypoint)
	i := server("postgres", "Debian's PostgreSQL, for tests", "/var/lib/postgresql", t, parts)
	t.dir("/run/postgresql", fs.ModeSticky|0o777)
	i.env = []string{"PATH=" + strings.Join([]string{bin, "/usr/local/bin", "/usr/bin", "/bin"}, ":"), "PGDATA=/var/lib/postgresql/data/pgdata"}
	// Clients ask the system for the user's name, and it may know none.
	i.env = append(i.env, "PGUSER=postgres")
	i.entrypoint, i.cmd = []string{entry}, []string{"postgres"}
	// As in the official image: it ends its clients' connections. By SIGTERM it would wait until they leave.
	i.stopSignal = "SIGINT"
	return i, nil
}
