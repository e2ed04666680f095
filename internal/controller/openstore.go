// This file opens stores: the embedded one's file, and what the settings of the others
// lead to. What is opened is kept until its settings change; then what they lead to is
// opened beside it, and judged like any other.

package controller

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/metrics"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// Dial connects to a store's server on behalf of a namespace, whose address it judges.
type Dial func(ctx context.Context, namespace, network, address string) (net.Conn, error)

// openStore is a store that this process has open.
type openStore struct {
	store store.Store
	// settings are a digest of what it was opened from.
	settings string
	// durability looks for what could lose an acknowledged write.
	durability func(context.Context) (store.Durability, error)
	// file is the embedded store's.
	file os.FileInfo
	// identity is the one under which the engine was made, and lost the loss before it.
	identity store.Identity
	lost     loss
	engine   *guard.Engine
	// served says that the engine is in service, if only to refuse calls.
	served bool
	// sighted is the sighting that this process has agreed with, and base what the clock
	// showed then.
	sighted sighting
	base    baseline
}

// secretTimeout bounds a look at a Secret for a new connection.
const secretTimeout = 5 * time.Second

// errNoFile: the embedded store's file is not there, although one is remembered.
var errNoFile = errors.New("the file is not there")

// settings are what a store is opened from: all of it but the password of a Redis,
// which is asked for at each connection.
type settings struct {
	name     metrics.Name
	Embedded string            `json:"embedded,omitempty"`
	Redis    *redis.Options    `json:"-"`
	Postgres *postgres.Options `json:"-"`
	digest   string
}

// settingsOf reads the settings, with the Secrets that they name.
func (r *StoreReconciler) settingsOf(ctx context.Context, obj *v1alpha1.IdempotencyStore) (settings, error) {
	nn := client.ObjectKeyFromObject(obj)
	s := settings{name: metrics.Name{Namespace: nn.Namespace, Name: nn.Name}}
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	switch {
	case obj.Spec.Embedded != nil:
		s.Embedded = r.path(nn)
		if err := enc.Encode(s.Embedded); err != nil {
			return s, err
		}
	case obj.Spec.Redis != nil:
		o, ca, err := r.redisOptions(ctx, obj)
		if err != nil {
			return s, err
		}
		s.Redis = o
		if err := enc.Encode([]any{o.Addresses, o.Namespace, obj.Spec.Redis, ca}); err != nil {
			return s, err
		}
	case obj.Spec.Postgres != nil:
		o, err := r.postgresOptions(ctx, obj)
		if err != nil {
			return s, err
		}
		s.Postgres = o
		// The password is asked for at each connection.
		password, err := postgres.PasswordOf(o.DSN)
		if err != nil {
			return s, err
		}
		dsn := o.DSN
		if password != "" {
			dsn = strings.ReplaceAll(dsn, password, "")
		}
		if err := enc.Encode([]any{dsn, o.Schema, o.RootCA}); err != nil {
			return s, err
		}
	}
	s.digest = hex.EncodeToString(sum.Sum(nil))
	return s, nil
}

// redisNamespace is the store's among all keys of its server. It is that of the object,
// so that one that is made again finds its records.
func redisNamespace(nn types.NamespacedName) string {
	return "holdfast:" + nn.Namespace + "/" + nn.Name
}

func (r *StoreReconciler) redisOptions(ctx context.Context, obj *v1alpha1.IdempotencyStore) (*redis.Options, string, error) {
	nn := client.ObjectKeyFromObject(obj)
	o := &redis.Options{Namespace: redisNamespace(nn), Timeout: r.StoreTimeout, Dial: r.dialFor(nn.Namespace)}
	secret, ca := "", ""
	var err error
	switch spec := obj.Spec.Redis; {
	case spec.Deploy != nil:
		o.Addresses = []string{workload.Endpoint(obj)}
		secret = workload.SecretName(obj)
		if t := spec.Deploy.TLS; t != nil {
			if ca, err = r.Credentials.Get(ctx, nn.Namespace, t.SecretRef.Name, "ca.crt"); err != nil {
				return nil, "", err
			}
			if o.TLS, err = clientTLS(ca, ""); err != nil {
				return nil, "", fmt.Errorf("the key ca.crt of Secret %s/%s: %w", nn.Namespace, t.SecretRef.Name, err)
			}
		}
	case spec.External != nil:
		for _, a := range spec.External.Addresses {
			o.Addresses = append(o.Addresses, string(a))
		}
		if from := spec.External.CredentialsFrom; from != nil {
			secret = from.Name
		}
		if t := spec.External.TLS; t != nil {
			if t.CAFrom != nil {
				if ca, err = r.Credentials.Get(ctx, nn.Namespace, t.CAFrom.Name, t.CAFrom.Key); err != nil {
					return nil, "", err
				}
			}
			if o.TLS, err = clientTLS(ca, t.ServerName); err != nil {
				return nil, "", fmt.Errorf("tls of the store: %w", err)
			}
		}
	}
	if secret != "" {
		o.Credentials = func() (string, string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), secretTimeout)
			defer cancel()
			return r.Credentials.User(ctx, nn.Namespace, secret)
		}
	}
	return o, ca, nil
}

func clientTLS(ca, serverName string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
	if ca != "" {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM([]byte(ca)) {
			return nil, errors.New("there is no certificate in PEM")
		}
	}
	return c, nil
}

func (r *StoreReconciler) postgresOptions(ctx context.Context, obj *v1alpha1.IdempotencyStore) (*postgres.Options, error) {
	namespace := obj.Namespace
	o := &postgres.Options{Timeout: r.StoreTimeout, Dial: r.dialFor(namespace)}
	var err error
	switch spec := obj.Spec.Postgres; {
	case spec.Deploy != nil:
		secret := workload.SecretName(obj)
		o.DSN, err = r.Credentials.Get(ctx, namespace, secret, workload.DSNKey)
		// Between two looks a new connection needs the new password.
		o.Password = func(ctx context.Context) (string, error) {
			_, password, err := r.Credentials.User(ctx, namespace, secret)
			return password, err
		}
	case spec.External != nil:
		from := spec.External.DSNFrom
		o.Password = func(ctx context.Context) (string, error) {
			dsn, err := r.Credentials.Get(ctx, namespace, from.Name, from.Key)
			if err != nil {
				return "", err
			}
			return postgres.PasswordOf(dsn)
		}
		o.Schema = spec.External.Schema
		o.DSN, err = r.Credentials.Get(ctx, namespace, spec.External.DSNFrom.Name, spec.External.DSNFrom.Key)
		if err == nil && spec.External.CAFrom != nil {
			var ca string
			ca, err = r.Credentials.Get(ctx, namespace, spec.External.CAFrom.Name, spec.External.CAFrom.Key)
			o.RootCA = []byte(ca)
		}
	}
	return o, err
}

func (r *StoreReconciler) dialFor(namespace string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		return r.Dial(ctx, namespace, network, address)
	}
}

// open opens the store's file, or what its settings lead to. It makes no file where one
// is remembered.
func (r *StoreReconciler) openAs(s settings, remembered bool) (*openStore, error) {
	o := &openStore{settings: s.digest}
	switch {
	case s.Redis != nil:
		st, err := redis.Open(*s.Redis)
		if err != nil {
			return nil, err
		}
		o.store, o.durability = st, st.Durability
	case s.Postgres != nil:
		st, err := postgres.Open(*s.Postgres)
		if err != nil {
			return nil, err
		}
		o.store, o.durability = st, st.Durability
	default:
		if _, err := os.Stat(s.Embedded); errors.Is(err, fs.ErrNotExist) && remembered {
			return nil, errNoFile
		}
		st, err := bolt.Open(s.Embedded, bolt.Options{})
		if err != nil {
			return nil, err
		}
		if o.file, err = os.Stat(s.Embedded); err != nil {
			return nil, errors.Join(err, st.Close())
		}
		o.store = st
		o.durability = func(context.Context) (store.Durability, error) { return embeddedDurability(s.Embedded) }
	}
	if r.Metrics != nil {
		o.store = r.Metrics.Store(o.store, s.name)
	}
	return o, nil
}

// path is the embedded store's file. A namespace has no underscore and no dot, so no two stores share one.
func (r *StoreReconciler) path(nn types.NamespacedName) string {
	return filepath.Join(r.DataDir, nn.Namespace+"_"+nn.Name+".db")
}

// place says where a store is, for messages.
func (r *StoreReconciler) place(obj *v1alpha1.IdempotencyStore) string {
	switch {
	case obj.Spec.Embedded != nil:
		return r.path(client.ObjectKeyFromObject(obj))
	case obj.Spec.Redis != nil && obj.Spec.Redis.External != nil:
		return fmt.Sprint("the Redis at ", obj.Spec.Redis.External.Addresses)
	case obj.Spec.Postgres != nil && obj.Spec.Postgres.External != nil:
		return "the database of Secret " + obj.Spec.Postgres.External.DSNFrom.Name
	default:
		return "the volume of StatefulSet " + workload.Name(obj)
	}
}
