// An installation that is not as config/default has it: in another namespace, under other names, and without the
// policy that stamps. What knows the operator by its name must follow, and nothing else may be looser.

package crd

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// elsewhere copies config/, with the namespace and a prefix of all names changed where config/default says so.
func elsewhere(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(configDir)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "default", "kustomization.yaml")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	content = append(bytes.Replace(content, []byte("namespace: holdfast-system"), []byte("namespace: elsewhere"), 1), "namePrefix: my-\n"...)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestAnInstallationElsewhereWithoutTheStamp(t *testing.T) {
	env := &envtest.Environment{}
	config, err := env.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	config.QPS, config.Burst, config.WarningHandler = 500, 500, rest.NoWarnings{}
	ctx := t.Context()
	objects, err := kustomize(ctx, filepath.Join(elsewhere(t), "without-stamp"))
	if err != nil {
		t.Fatal(err)
	}
	there, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if strings.HasPrefix(o.GetKind(), "MutatingAdmission") {
			t.Errorf("the overlay keeps %s %s", o.GetKind(), o.GetName())
		}
		if o.GetKind() == "Deployment" {
			content, err := o.MarshalJSON()
			if err != nil {
				t.Fatal(err)
			}
			// The ServiceAccount, and for whom the certificate is; the namespace, the pod tells by itself.
			for _, has := range map[string][]string{
				"my-holdfast-controllers": {`"serviceAccountName":"my-holdfast-manager"`, `{"name":"GATEWAY_SERVICE","value":"my-holdfast-gateway"}`},
				"my-holdfast-gateway":     {`"serviceAccountName":"my-holdfast-gateway"`},
			}[o.GetName()] {
				if !bytes.Contains(content, []byte(has)) || bytes.Contains(content, []byte("holdfast-system")) {
					t.Errorf("%s does not follow: %s", o.GetName(), content)
				}
			}
		}
		if err := apply(ctx, there, o); err != nil {
			t.Fatalf("apply %s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
	by := func(user string, groups ...string) client.Client {
		c := rest.CopyConfig(config)
		c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
		cl, err := client.New(c, client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		return client.WithFieldValidation(cl, metav1.FieldValidationStrict)
	}
	const newOperator = "system:serviceaccount:elsewhere:my-holdfast-manager"
	bind := func(role string, subject rbacv1.Subject) {
		if err := there.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: role + "-"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role}, Subjects: []rbacv1.Subject{subject},
		}); err != nil {
			t.Fatal(err)
		}
	}
	user := func(name string) rbacv1.Subject {
		return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: "User", Name: name}
	}
	if err := there.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		t.Fatal(err)
	}
	bind("my-holdfast-resolver", user(alice))
	bind("my-holdfast-admin", user("nadia"))

	// The policies know the operator that there is.
	if err := poll(ctx, func() error {
		err := there.Create(ctx, validHold("probe"), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), "only the operator ("+newOperator+") makes a PaymentHold") {
			return errors.Join(errors.New("a hold that an admin makes should be refused"), err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	check(t, by(operator, "system:masters").Create(ctx, validHold("probe"), client.DryRunAll), "only the operator")
	hold := validHold("held")
	if err := poll(ctx, func() error { return by(newOperator).Create(ctx, hold) }); err != nil {
		t.Fatalf("the operator should be able to make a hold: %v", err)
	}

	// Nobody stamps, so who resolves says who it is, and nobody else.
	resolution := func(by string) map[string]any {
		r := decided(release)
		if by != "" {
			r["by"] = by
		}
		return r
	}
	const who = `spec.resolution.by must be "alice", who is asking`
	if err := poll(ctx, func() error {
		err := by(alice).Patch(ctx, hold.DeepCopy(), resolve(resolution("bob")), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), who) {
			return errors.Join(errors.New("a resolution in another's name should be refused"), err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	check(t, by(alice).Patch(ctx, hold.DeepCopy(), resolve(resolution("")), client.DryRunAll), "spec.resolution.by: Required value")
	for _, forged := range []string{"bob", newOperator, agent, "Alice", " alice"} {
		check(t, by(alice).Patch(ctx, hold.DeepCopy(), resolve(resolution(forged)), client.DryRunAll), who)
	}
	check(t, by("bob", "system:masters").Patch(ctx, hold.DeepCopy(), resolve(resolution(alice)), client.DryRunAll), `spec.resolution.by must be "bob"`)
	check(t, by("nadia").Patch(ctx, hold.DeepCopy(), resolve(resolution("nadia")), client.DryRunAll), "cannot patch")
	if err := by(alice).Patch(ctx, hold, resolve(resolution(alice))); err != nil {
		t.Errorf("a resolver who gives the own name: %v", err)
	}
	check(t, by(alice).Patch(ctx, hold.DeepCopy(), resolve(resolution("bob")), client.DryRunAll), "resolution is set already")

	// A namespace's admin binds the roles by the names that they have.
	for role, may := range map[string]bool{
		"my-holdfast-agent": true, "my-holdfast-registrar": true, "my-holdfast-resolver": true, "my-holdfast-store-deployer": true,
		"holdfast-resolver": false, "holdfast-registrar": false, "my-holdfast-operator": false, "cluster-admin": false,
	} {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               "nadia",
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Group: rbacv1.GroupName, Resource: "clusterroles", Name: role, Verb: "bind"},
		}}
		if err := there.Create(context.WithoutCancel(ctx), review); err != nil || review.Status.Allowed != may {
			t.Errorf("a namespace's admin binds %s: %t, want %t (%v)", role, review.Status.Allowed, may, err)
		}
	}
	// Someone who resolves but is not told the name of a role that does not exist.
	bind("my-holdfast-view", user("vera"))
	if err := there.Create(ctx, &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "patcher"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"guardrails.holdfast.dev"}, Resources: []string{"paymentholds"}, Verbs: []string{"get", "patch"}}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := there.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "patcher"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "patcher"}, Subjects: []rbacv1.Subject{user("vera")},
	}); err != nil {
		t.Fatal(err)
	}
	other := validHold("other")
	if err := by(newOperator).Create(ctx, other); err != nil {
		t.Fatal(err)
	}
	if err := poll(ctx, func() error {
		err := by("vera").Patch(ctx, other.DeepCopy(), resolve(resolution("vera")), client.DryRunAll)
		if err == nil || !strings.Contains(err.Error(), "ClusterRole my-holdfast-resolver gives") {
			return errors.Join(errors.New("who may not resolve should be told which role gives it"), err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
