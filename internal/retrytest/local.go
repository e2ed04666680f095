// This file is the gateway within this process: the real gateway, policy and guard on
// an embedded store, as the manager wires them. Only the API server is missing: the
// files are checked as it would, and the one caller and its credentials are known here.

package retrytest

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/gateway"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/keyring"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
)

// drain is how long calls may take to end at the end of the test. All were waited for.
const drain = 5 * time.Second

// local is the gateway within this process.
type local struct {
	url, token string
	notes      []string
	keyOf      func(ctx context.Context, intent string) string
	stop       func() error
}

// oneCaller is access for who knows the token, which this process alone does.
type oneCaller struct{ token, namespace, tool string }

func (c oneCaller) caller() access.Caller {
	return access.Caller{Username: "system:serviceaccount:" + c.namespace + ":retry-test", UID: "retry-test"}
}

func (c oneCaller) Authenticate(_ context.Context, h http.Header) (access.Caller, error) {
	if subtle.ConstantTimeCompare([]byte(h.Get("Authorization")), []byte("Bearer "+c.token)) != 1 {
		return access.Caller{}, fmt.Errorf("%w: this gateway is for a test alone", access.ErrUnauthenticated)
	}
	return c.caller(), nil
}

func (c oneCaller) Authorize(_ context.Context, _ access.Caller, namespace, tool string) error {
	if namespace != c.namespace || tool != c.tool {
		return fmt.Errorf("%w: this gateway is for one tool alone", access.ErrForbidden)
	}
	return nil
}

// secrets are the credentials, by name and key.
type secrets map[[2]string]string

func (s secrets) Get(_ context.Context, _, name, key string) (string, error) {
	v, ok := s[[2]string{name, key}]
	if !ok {
		return "", fmt.Errorf("the credential %s/%s is not known", name, key)
	}
	return v, nil
}

// everybody consents: which namespace lets which tool reach it is the cluster's affair.
type everybody struct{}

func (everybody) Allows(context.Context, string, string) (bool, error) { return true, nil }

// compile makes the tool ready as the operator does.
func (p *plan) compile(o options) (*policy.Tool, []string, error) {
	if p.toolObject == nil {
		return nil, nil, errors.New("--local needs the AgentTool and its IntentBudget: give their file with -f, too")
	}
	var notes []string
	object := p.toolObject
	if o.upstream != "" {
		object = object.DeepCopy()
		object.Spec.Upstream.HTTP.URL = o.upstream
		notes = append(notes, "the upstream is "+o.upstream+", and not the AgentTool's")
	}
	tool, err := policy.Compile(object, p.budgetObject)
	if err != nil {
		return nil, nil, fmt.Errorf("the AgentTool %s cannot be served: %w", p.tool, err)
	}
	return tool, notes, nil
}

// readSecrets takes credentials from the environment and from the Secrets of the files.
func readSecrets(o options, docs *documents, p *plan, tool *policy.Tool) (secrets, error) {
	out := secrets{}
	for _, object := range docs.objects {
		if object.GetKind() != "Secret" || object.GetAPIVersion() != "v1" || object.GetNamespace() != "" && object.GetNamespace() != p.namespace {
			continue
		}
		var s corev1.Secret
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &s); err != nil {
			return nil, fmt.Errorf("the Secret %s cannot be read: %w", object.GetName(), err)
		}
		if s.Labels[v1alpha1.CredentialsLabel] != "true" {
			continue // it does not consent
		}
		for key, value := range s.Data {
			out[[2]string{s.Name, key}] = string(value)
		}
		for key, value := range s.StringData {
			out[[2]string{s.Name, key}] = value
		}
	}
	for _, given := range o.secrets {
		at, variable, ok := strings.Cut(given, "=")
		name, key, isPath := strings.Cut(at, "/")
		if !ok || !isPath || name == "" || key == "" || variable == "" {
			return nil, fmt.Errorf("--secret-from-env %q: write it like NAME/KEY=VARIABLE", given)
		}
		value, found := os.LookupEnv(variable)
		if !found {
			return nil, fmt.Errorf("--secret-from-env %s: %s is not in the environment", given, variable)
		}
		out[[2]string{name, key}] = value
	}
	if c := tool.Upstream.Credentials; c != nil {
		if _, ok := out[[2]string{c.SecretName, c.SecretKey}]; !ok {
			return nil, fmt.Errorf("the AgentTool sends the credential %s of the Secret %s: give it with --secret-from-env %s/%s=VARIABLE, "+
				"or the Secret, with the label %s: \"true\", in a file", c.SecretKey, c.SecretName, c.SecretName, c.SecretKey, v1alpha1.CredentialsLabel)
		}
	}
	return out, nil
}

// startLocal serves the tool.
func startLocal(ctx context.Context, o options, docs *documents, p *plan, pool *x509.CertPool, stderr io.Writer) (_ *local, err error) {
	tool, notes, err := p.compile(o)
	if err != nil {
		return nil, err
	}
	credentials, err := readSecrets(o, docs, p, tool)
	if err != nil {
		return nil, err
	}
	for _, s := range docs.of(kindStore) {
		if _, embedded, _ := unstructured.NestedFieldNoCopy(s.Object, "spec", "embedded"); s.GetName() == tool.Store && !embedded {
			notes = append(notes, "an embedded store stands in for the IdempotencyStore "+tool.Store)
		}
	}
	dir, err := os.MkdirTemp("", "holdfast-retry-test-")
	if err != nil {
		return nil, fmt.Errorf("make a place for the store: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	st, err := bolt.Open(filepath.Join(dir, "store.db"), bolt.Options{})
	if err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	// Keys of this run are those of no other, so that a sandbox does not know them yet.
	id, err := st.Initialise(ctx, store.Identity{Epoch: rand.Text(), KeyDomain: rand.Text()})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the store ready: %w", err), st.Close())
	}
	engine := guard.New(st, id, guard.Options{})
	engines := guard.NewEngines()
	engines.Put(p.namespace, tool.Store, engine)
	var tools policy.Current
	tools.Set(tool)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), st.Close())
	}
	log := logr.Discard()
	if o.verbose {
		log = logr.FromSlogHandler(slog.NewTextHandler(stderr, nil))
	}
	keys, err := keyring.New(keyring.Generate())
	if err != nil {
		return nil, errors.Join(err, listener.Close(), st.Close())
	}
	who := oneCaller{token: rand.Text(), namespace: p.namespace, tool: p.tool}
	g, err := gateway.New(gateway.Options{
		Access: who, Policies: func() gateway.Policies { return tools.Load() }, Engines: engines,
		Credentials: credentials, RequestKeys: keyring.Fixed{Keys: keys}, Consent: everybody{}, Addresses: gateway.Addresses{AllowLoopback: true},
		RootCAs: pool, Log: log, InsecureHTTP: true, Listener: listener, Drain: drain,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the gateway: %w", err), listener.Close(), st.Close())
	}
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	served := make(chan error, 1)
	go func() { served <- g.Start(running) }()
	var swept sync.WaitGroup
	swept.Go(func() { sweep(running, engine, log) })
	checks := g.Checker(engines.All)
	swept.Go(func() {
		if err := checks.Start(running); err != nil {
			log.Error(err, "unknown outcomes are not asked about any more")
		}
	})
	l := &local{url: "http://" + listener.Addr().String(), token: who.token, notes: notes}
	l.keyOf = func(ctx context.Context, intent string) string {
		a, err := engine.Poll(ctx, guard.Key{Namespace: p.namespace, Tool: p.tool, Caller: who.caller().Username, IntentID: intent})
		if err != nil {
			return "" // the report goes without it
		}
		return a.Intent.ProviderKey
	}
	l.stop = func() error {
		end()
		err := <-served
		swept.Wait()
		return errors.Join(err, st.Close(), os.RemoveAll(dir))
	}
	return l, nil
}

// sweep does each second what is due, as every gateway does.
func sweep(ctx context.Context, e *guard.Engine, log logr.Logger) {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	for {
		if err := e.Sweep(ctx); err != nil && ctx.Err() == nil {
			log.Error(err, "what is due could not be done")
		}
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}
