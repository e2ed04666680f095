// This file is the gateway's process: the real gateway, access, policy and guard, as
// the manager wires them, on a store that is named. Only the API server is missing:
// what it would say to reviews is said here, as seldom as there.

package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	_ "net/http/pprof" // for -profiles
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/holdfast-dev/holdfast/internal/access"
	"github.com/holdfast-dev/holdfast/internal/gateway"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/bolt"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
	"github.com/holdfast-dev/holdfast/internal/store/redis"
)

// place names a store: its kind, where it is, and what it is called there.
type place struct {
	kind, name string
	// at is a file, an address or a DSN; password is for an address.
	at, password string
}

// They go by the environment: everybody on the machine sees arguments.
const (
	envAt       = "HOLDFAST_BENCH_AT"
	envPassword = "HOLDFAST_BENCH_PASSWORD"
)

func (p *place) bind(flags *flag.FlagSet) {
	p.at, p.password = os.Getenv(envAt), os.Getenv(envPassword)
	flags.StringVar(&p.kind, "store", "", "bolt, redis or postgres")
	flags.StringVar(&p.name, "name", "", "namespace or schema")
}

func (p *place) args() []string { return []string{"-store", p.kind, "-name", p.name} }

func (p *place) env() []string { return []string{envAt + "=" + p.at, envPassword + "=" + p.password} }

// open opens the store. unsafe: nothing has to be on the disk yet.
func (p *place) open(unsafe bool) (store.Store, error) {
	switch p.kind {
	case "bolt":
		return bolt.Open(p.at, bolt.Options{NoSync: unsafe})
	case "redis":
		return redis.Open(redis.Options{
			Addresses: []string{p.at}, Namespace: p.name,
			Credentials: func() (string, string, error) { return "", p.password, nil },
		})
	case "postgres":
		return postgres.Open(postgres.Options{DSN: p.at, Schema: p.name})
	}
	return nil, fmt.Errorf("there is no store %q", p.kind)
}

// identity is the same for all, so that what is loaded is what a gateway would have written.
var identity = store.Identity{Epoch: "bench-epoch-0001", KeyDomain: "bench-domain-0001"}

// tokenReviews and accessReviews are the API server.
type tokenReviews struct{}

func (tokenReviews) Create(_ context.Context, r *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	parts := strings.Split(r.Spec.Token, ".")
	if len(parts) != 3 {
		return nil, errors.New("no token")
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return nil, err
	}
	var claims struct {
		Sub        string `json:"sub"`
		Kubernetes struct {
			ServiceAccount struct {
				UID string `json:"uid"`
			} `json:"serviceaccount"`
		} `json:"kubernetes.io"`
	}
	if err := json.Unmarshal(raw, &claims); err != nil {
		return nil, err
	}
	r.Status = authenticationv1.TokenReviewStatus{
		Authenticated: true, Audiences: []string{access.Audience},
		User: authenticationv1.UserInfo{
			Username: claims.Sub, UID: claims.Kubernetes.ServiceAccount.UID,
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
			Extra: map[string]authenticationv1.ExtraValue{
				"authentication.kubernetes.io/credential-id": {"JTI=f3b1c9de-2d0a-4f4a-8a54-7c39f0a0c5a1"},
				"authentication.kubernetes.io/node-name":     {"node-1"},
				"authentication.kubernetes.io/pod-name":      {"agent"},
			},
		},
	}
	return r, nil
}

type accessReviews struct{}

func (accessReviews) Create(_ context.Context, r *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	a := r.Spec.ResourceAttributes
	r.Status.Allowed = a != nil && a.Verb == access.Verb && a.Namespace == namespace && a.Name == toolName
	return r, nil
}

func gatewayRole(args []string) error {
	var at place
	flags := flag.NewFlagSet("gateway", flag.ContinueOnError)
	at.bind(flags)
	upstream := flags.String("upstream", "", "the upstream")
	profiles := flags.String("profiles", "", "address of the profiler")
	profiled := flags.String("profiled", "", "what it is asked for")
	if err := flags.Parse(args); err != nil {
		return err
	}
	// The manager's logger, at its level: a line for each call.
	var options zap.Options
	options.BindFlags(flag.NewFlagSet("", flag.ContinueOnError))
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&options)))

	if *profiles != "" {
		// What is not looked at must not cost.
		switch *profiled {
		case "block":
			runtime.SetBlockProfileRate(100_000)
		case "mutex":
			runtime.SetMutexProfileFraction(100)
		}
		go func() { _ = http.ListenAndServe(*profiles, nil) }() // of the measuring alone
	}
	st, err := at.open(false)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	id, err := st.Initialise(ctx, identity)
	if err != nil {
		return errors.Join(err, st.Close())
	}
	tool, err := compiled(*upstream)
	if err != nil {
		return errors.Join(err, st.Close())
	}
	var tools policy.Current
	tools.Set(tool)
	engines := guard.NewEngines()
	engine := guard.New(st, id, guard.Options{})
	engines.Put(namespace, storeName, engine)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return errors.Join(err, st.Close())
	}
	g, err := gateway.New(gateway.Options{
		Access:   access.New(tokenReviews{}, accessReviews{}, nil),
		Policies: func() gateway.Policies { return tools.Load() },
		Engines:  engines,
		Addresses: gateway.Addresses{
			AllowLoopback: true,
		},
		Log: ctrl.Log.WithName("gateway"), InsecureHTTP: true, Listener: listener,
	})
	if err != nil {
		return errors.Join(err, st.Close())
	}
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		sweep(ctx, engine)
	}()
	fmt.Println("http://" + listener.Addr().String())
	err = g.Start(ctx)
	stop()
	<-swept
	return errors.Join(err, st.Close())
}

// sweep does each second what is due, as every gateway does.
func sweep(ctx context.Context, e *guard.Engine) {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	for {
		if err := e.Sweep(ctx); err != nil && ctx.Err() == nil {
			ctrl.Log.Error(err, "what is due could not be done")
		}
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}

// stores are the layers whose process is a gateway.
var stores = []string{"bolt", "redis", "postgres"}

func isStore(layer string) bool { return slices.Contains(stores, layer) }
