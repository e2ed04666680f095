// The server of a store that several processes share, beside the rest, and the samples
// on it.
package whole

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/holdfast-dev/holdfast/hack/dev/process"
	"github.com/holdfast-dev/holdfast/hack/dev/servers"
)

// The stores of the samples that have a server.
const (
	Redis    = "redis"
	Postgres = "postgres"
)

// server is what must be the same when it is started again.
type server struct {
	Store    string `json:"store"`
	Dir      string `json:"dir"`
	Port     int    `json:"port"`
	Password string `json:"password"`
}

// startServer starts the store's server, or finds it running.
func (w *Whole) startServer(ctx context.Context) error {
	is := w.state.Server
	if is != nil && is.Store != w.o.Store {
		return fmt.Errorf("%s has its records on %s: end it with its data first, or use another state directory", w.Dir(), is.Store)
	}
	if is == nil {
		dir := filepath.Join(w.Dir(), "server")
		if os.Geteuid() == 0 {
			// PostgreSQL does not run as root, and its user does not get into the state directory.
			var err error
			if dir, err = os.MkdirTemp("", "holdfast-dev-"); err != nil {
				return err
			}
			if err := os.Chmod(dir, 0o755); err != nil {
				return err
			}
		}
		is = &server{Store: w.o.Store, Dir: dir}
	}
	o := servers.Options{Dir: is.Dir, Port: is.Port, Password: is.Password}
	var s servers.Server
	var err error
	switch w.o.Store {
	case Redis:
		s, err = servers.NewRedis(ctx, o)
	case Postgres:
		s, err = servers.NewPostgres(ctx, o)
	default:
		return fmt.Errorf("%q is neither %s nor %s", w.o.Store, Redis, Postgres)
	}
	if err != nil {
		return err
	}
	is.Port, is.Password = s.Port(), s.Password()
	w.state.Server = is
	return w.saveState()
}

// downServer ends the server of a state directory, and removes its data.
func downServer(ctx context.Context, dir string, keepData bool) error {
	var s state
	data, err := os.ReadFile(stateFile(dir))
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if errors.Is(err, fs.ErrNotExist) || err == nil && s.Server == nil {
		return nil
	}
	if err != nil {
		return err
	}
	processes := process.In(s.Server.Dir)
	names, err := processes.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := processes.Stop(ctx, name); err != nil {
			return err
		}
	}
	if keepData {
		return nil
	}
	return os.RemoveAll(s.Server.Dir)
}

// onServer is the samples with their store on the server.
func (w *Whole) onServer(samples string) (string, error) {
	const embedded = "spec:\n  embedded: {}\n"
	if strings.Count(samples, embedded) != 1 {
		return "", errors.New("the samples do not have exactly one embedded store, so it cannot be put on a server")
	}
	is := w.state.Server
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(is.Port))
	spec, key, value := "spec:\n  redis: {external: {addresses: ['"+address+"'], credentialsFrom: {name: store}}}\n", "password", is.Password
	if is.Store == Postgres {
		spec, key = "spec:\n  postgres: {external: {dsnFrom: {name: store, key: dsn}}}\n", "dsn"
		value = servers.DSN("127.0.0.1", is.Port, is.Password)
	}
	return strings.Replace(samples, embedded, spec, 1) + fmt.Sprintf(credentials, agentNamespace, key, value, operatorNamespace, operatorAccount, gatewayAccount), nil
}

// credentials are the Secret of the store, and its owner's word that the operator may read it.
const credentials = `---
apiVersion: v1
kind: Secret
metadata:
  name: store
  namespace: %[1]s
  labels: {guardrails.holdfast.dev/credentials: "true"}
stringData:
  %[2]s: %[3]q
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: holdfast-store, namespace: %[1]s}
rules:
- {apiGroups: [""], resources: [secrets], resourceNames: [store], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: holdfast-store, namespace: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: holdfast-store}
subjects:
- {kind: ServiceAccount, name: %[5]s, namespace: %[4]s}
- {kind: ServiceAccount, name: %[6]s, namespace: %[4]s}
`
