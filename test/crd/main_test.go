// Package crd tests the schemas, the admission policies and the roles under config/ against a real API server.
// The server, etcd and kubectl are those in KUBEBUILDER_ASSETS.
package crd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	configDir = "../../config"
	// namespace is where most tests work: the one that the samples make.
	namespace = "support"
	// operator is the user name that config/rbac gives the operator.
	operator = "system:serviceaccount:holdfast-system:holdfast-manager"
	// agent is the caller in the samples, alice the one who may resolve.
	agent = "system:serviceaccount:support:agent"
	alice = "alice"

	patience = 30 * time.Second
	interval = 50 * time.Millisecond
)

var (
	scheme     = runtime.NewScheme()
	restConfig *rest.Config
	// kubeconfig is a file for kubectl, with all rights.
	kubeconfig string
	// rendered is what config/default renders to.
	rendered []*unstructured.Unstructured
	// admin has all rights.
	admin client.Client
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "setting up:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		return 0, errors.New("KUBEBUILDER_ASSETS is not set: it must name the directory with etcd, kube-apiserver and kubectl; `make test` sets it")
	}
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return 0, err
	}
	env := &envtest.Environment{}
	if restConfig, err = env.Start(); err != nil {
		return 0, fmt.Errorf("starting the API server: %w", err)
	}
	defer func() {
		if stopErr := env.Stop(); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("stopping the API server: %w", stopErr))
		}
	}()
	restConfig.QPS, restConfig.Burst = 500, 500
	restConfig.WarningHandler = rest.NoWarnings{}

	user, err := env.AddUser(envtest.User{Name: "admin", Groups: []string{"system:masters"}}, nil)
	if err != nil {
		return 0, err
	}
	content, err := user.KubeConfig()
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "holdfast-crd-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, content, 0o600); err != nil {
		return 0, err
	}

	if admin, err = client.New(restConfig, client.Options{Scheme: scheme}); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	if err := install(ctx); err != nil {
		return 0, fmt.Errorf("installing config/default: %w", err)
	}
	if err := waitForPolicies(ctx); err != nil {
		return 0, fmt.Errorf("waiting for the admission policies: %w", err)
	}
	return m.Run(), nil
}

// kubectl runs the kubectl of KUBEBUILDER_ASSETS.
func kubectl(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.String(), errOut.String(), err
}

// kustomize renders a directory.
func kustomize(ctx context.Context, dir string) ([]*unstructured.Unstructured, error) {
	out, errOut, err := kubectl(ctx, "kustomize", dir)
	if err != nil {
		return nil, fmt.Errorf("rendering %s: %w: %s", dir, err, errOut)
	}
	return decode(strings.NewReader(out))
}

// decode reads all objects of a YAML stream.
func decode(r io.Reader) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	d := utilyaml.NewYAMLOrJSONDecoder(r, 4096)
	for {
		o := &unstructured.Unstructured{}
		switch err := d.Decode(o); {
		case errors.Is(err, io.EOF):
			return objects, nil
		case err != nil:
			return nil, err
		}
		if len(o.Object) > 0 {
			objects = append(objects, o)
		}
	}
}

// apply applies an object server-side, as kubectl apply --server-side does.
func apply(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"), client.ForceOwnership)
}

func install(ctx context.Context) (err error) {
	if rendered, err = kustomize(ctx, filepath.Join(configDir, "default")); err != nil {
		return err
	}
	for _, o := range rendered {
		if err := apply(ctx, admin, o.DeepCopy()); err != nil {
			return fmt.Errorf("applying %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	samples, err := readSamples()
	if err != nil {
		return err
	}
	for _, o := range samples {
		// The CRDs take a moment to be served.
		if err := poll(ctx, func() error {
			err := apply(ctx, admin, o.DeepCopy())
			if err != nil && !meta.IsNoMatchError(err) && !strings.Contains(err.Error(), "could not find the requested resource") {
				return permanent{err}
			}
			return err
		}); err != nil {
			return fmt.Errorf("applying the sample %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	return nil
}

// readSamples reads config/samples. What has no namespace goes to default, as kubectl would have it.
func readSamples() ([]*unstructured.Unstructured, error) {
	files, err := filepath.Glob(filepath.Join(configDir, "samples", "*.yaml"))
	if err != nil {
		return nil, err
	}
	var samples []*unstructured.Unstructured
	for _, file := range files {
		if filepath.Base(file) == "kustomization.yaml" {
			continue // says which of them go together, and is no object
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		objects, err := decode(bytes.NewReader(content))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, o := range objects {
			if o.GetNamespace() == "" && o.GetKind() != "Namespace" {
				o.SetNamespace(metav1.NamespaceDefault)
			}
		}
		samples = append(samples, objects...)
	}
	// Some are in a namespace of another file.
	slices.SortStableFunc(samples, func(a, b *unstructured.Unstructured) int {
		first := func(o *unstructured.Unstructured) int {
			if o.GetKind() == "Namespace" {
				return 0
			}
			return 1
		}
		return first(a) - first(b)
	})
	return samples, nil
}

// permanent is an error that no waiting mends.
type permanent struct{ error }

// poll calls f until it succeeds.
func poll(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := f()
		var p permanent
		if err == nil || errors.As(err, &p) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("still after %s: %w", patience, err)
		case <-tick.C:
		}
	}
}

// as is a client of another user. Every request asks for strict validation: a pruned field is an error.
func as(user string, groups ...string) client.Client {
	c := rest.CopyConfig(restConfig)
	c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	cl, err := client.New(c, client.Options{Scheme: scheme, Mapper: admin.RESTMapper()})
	if err != nil {
		panic(err) // The same configuration made the admin's client.
	}
	return client.WithFieldValidation(cl, metav1.FieldValidationStrict)
}

// waitForPolicies waits until each shipped policy has answered once: a policy is active some time after it was made.
func waitForPolicies(ctx context.Context) error {
	if err := poll(ctx, func() error {
		err := admin.Create(ctx, validHold("probe"), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), "only the operator") {
			return fmt.Errorf("a hold that an admin makes should be refused, got: %w", err)
		}
		return nil
	}); err != nil {
		return err
	}
	hold := validHold("probe")
	if err := as(operator).Create(ctx, hold); err != nil {
		return err
	}
	if err := poll(ctx, func() error {
		err := as("bob", "system:masters").Patch(ctx, hold.DeepCopy(), resolve(map[string]any{"decision": "Reject", "reason": "probe", "by": "eve"}), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), "spec.resolution.by must be") {
			return fmt.Errorf("a forged resolution should be refused, got: %w", err)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := poll(ctx, func() error {
		return as("bob", "system:masters").Patch(ctx, hold.DeepCopy(), resolve(map[string]any{"decision": "Reject", "reason": "probe"}), client.DryRunAll)
	}); err != nil {
		return fmt.Errorf("a resolution should be stamped: %w", err)
	}
	return admin.Delete(ctx, hold)
}
