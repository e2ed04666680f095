// The control plane is started for real, and asked for what Holdfast needs of it.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/holdfast-dev/holdfast/hack/dev/ports"
)

func eventually(t *testing.T, what string, done func() error) {
	t.Helper()
	for limit := time.Now().Add(30 * time.Second); ; {
		err := done()
		if err == nil {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("not within 30s: %s: %v", what, err)
		}
		<-time.After(100 * time.Millisecond)
	}
}

// up starts a control plane that ends with the test.
func up(t *testing.T, dir string) *Cluster {
	t.Helper()
	c, err := Up(t.Context(), Options{Dir: dir, Namespace: "support", UnsafeNoFsync: true, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestControlPlane(t *testing.T) {
	t.Setenv(EnvExisting, "")
	start := time.Now()
	c := up(t, t.TempDir())
	t.Logf("up after %s", time.Since(start).Round(time.Millisecond))
	client, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "support"}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "agent"}}
	if _, err := client.CoreV1().ServiceAccounts("support").Create(ctx, account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	t.Run("kubectl looks in the namespace that was asked for", func(t *testing.T) {
		if out, err := c.RunKubectl(ctx, "get", "serviceaccount", "agent", "-o", "name"); err != nil || out != "serviceaccount/agent\n" {
			t.Errorf("got %q, %v", out, err)
		}
	})

	t.Run("a token is known for its own audience only", func(t *testing.T) {
		token, err := c.Token(ctx, "support", "agent", 24*time.Hour, "holdfast")
		if err != nil {
			t.Fatal(err)
		}
		review := func(token, audience string) authenticationv1.TokenReviewStatus {
			t.Helper()
			r := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{audience}}}
			r, err := client.AuthenticationV1().TokenReviews().Create(ctx, r, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return r.Status
		}
		if got := review(token, "holdfast"); !got.Authenticated || got.User.Username != "system:serviceaccount:support:agent" {
			t.Errorf("audience holdfast: %+v", got)
		}
		if got := review(token, "another"); got.Authenticated {
			t.Errorf("audience another: %+v", got)
		}
		other, err := c.Token(ctx, "support", "agent", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if got := review(other, "holdfast"); got.Authenticated {
			t.Errorf("a token of the API server's audience passes for holdfast: %+v", got)
		}
	})

	t.Run("a ServiceAccount has its own rights and no more", func(t *testing.T) {
		path, err := c.ServiceAccountKubeconfig(ctx, "support", "agent", 24*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		config, err := clientcmd.BuildConfigFromFlags("", path)
		if err != nil {
			t.Fatal(err)
		}
		agent, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := agent.CoreV1().ConfigMaps("support").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("without a role: %v, want forbidden", err)
		}
		if _, err := c.RunKubectl(ctx, "create", "rolebinding", "agent", "-n", "support",
			"--clusterrole=view", "--serviceaccount=support:agent"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "allowed by the aggregated role view", func() error {
			_, err := agent.CoreV1().ConfigMaps("support").List(ctx, metav1.ListOptions{})
			return err
		})
	})

	t.Run("admission policies mutate and refuse", func(t *testing.T) { policies(t, client) })

	t.Run("a namespace that is deleted goes away", func(t *testing.T) {
		if err := client.CoreV1().Namespaces().Delete(ctx, "support", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "namespace gone", func() error {
			_, err := client.CoreV1().Namespaces().Get(ctx, "support", metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(errors.New("still there"), err)
		})
	})

	t.Run("what died is started again and the data is kept", func(t *testing.T) {
		marker := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "marker", Namespace: "default"}}
		if _, err := client.CoreV1().ConfigMaps("default").Create(ctx, marker, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		etcd, err := c.Processes().PID("etcd")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Kill("kube-apiserver", syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "kube-apiserver gone", func() error {
			if c.Running("kube-apiserver") {
				return errors.New("still running")
			}
			return nil
		})
		again := up(t, c.Dir())
		if pid, err := again.Processes().PID("etcd"); err != nil || pid != etcd {
			t.Errorf("etcd was restarted: pid %d, was %d (%v)", pid, etcd, err)
		}
		if err := again.Down(ctx); err != nil {
			t.Fatal(err)
		}
		for _, name := range controlPlane {
			if again.Running(name) {
				t.Errorf("%s runs after Down", name)
			}
		}
		up(t, c.Dir())
		if _, err := client.CoreV1().ConfigMaps("default").Get(ctx, "marker", metav1.GetOptions{}); err != nil {
			t.Errorf("after down and up: %v", err)
		}
	})
}

// policies creates a mutating and a validating policy for ConfigMaps and waits
// until both are in force: the first stamps the user's name, the second refuses.
func policies(t *testing.T, client *kubernetes.Clientset) {
	ctx := t.Context()
	match := &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
		RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
		},
	}}}
	fail := admissionv1.Fail
	admission := client.AdmissionregistrationV1()

	_, err := admission.MutatingAdmissionPolicies().Create(ctx, &admissionv1.MutatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "stamp"},
		Spec: admissionv1.MutatingAdmissionPolicySpec{
			MatchConstraints:   match,
			FailurePolicy:      &fail,
			ReinvocationPolicy: admissionv1.NeverReinvocationPolicy,
			Mutations: []admissionv1.Mutation{{
				PatchType: admissionv1.PatchTypeJSONPatch,
				JSONPatch: &admissionv1.JSONPatch{Expression: `[JSONPatch{op: "add", path: "/data", value: {"by": request.userInfo.username}}]`},
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admission.MutatingAdmissionPolicyBindings().Create(ctx, &admissionv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "stamp"},
		Spec:       admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: "stamp"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admission.ValidatingAdmissionPolicies().Create(ctx, &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "refuse"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: match,
			FailurePolicy:    &fail,
			Validations: []admissionv1.Validation{{
				Expression: `object.metadata.name != "refused" || object.data.by != request.userInfo.username`,
				Message:    "stamped, and so refused",
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admission.ValidatingAdmissionPolicyBindings().Create(ctx, &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "refuse"},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName:        "refuse",
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	create := func(name string) (*corev1.ConfigMap, error) {
		return client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, dryRun)
	}
	start := time.Now()
	eventually(t, "the mutating policy stamps", func() error {
		made, err := create("stamped")
		if err != nil {
			return err
		}
		if made.Data["by"] != "holdfast-dev-admin" {
			return fmt.Errorf("data is %v", made.Data)
		}
		return nil
	})
	eventually(t, "the validating policy refuses", func() error {
		if _, err := create("refused"); err == nil || !strings.Contains(err.Error(), "stamped, and so refused") {
			return fmt.Errorf("creating it says: %w", err)
		}
		return nil
	})
	t.Logf("policies in force after %s", time.Since(start).Round(time.Millisecond))
	eventually(t, "the controller manager has type-checked the policy", func() error {
		policy, err := admission.ValidatingAdmissionPolicies().Get(ctx, "refuse", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if policy.Status.ObservedGeneration != policy.Generation || policy.Status.TypeChecking == nil {
			return fmt.Errorf("status is %+v", policy.Status)
		}
		return nil
	})
	for _, err := range []error{
		admission.MutatingAdmissionPolicyBindings().Delete(ctx, "stamp", metav1.DeleteOptions{}),
		admission.ValidatingAdmissionPolicyBindings().Delete(ctx, "refuse", metav1.DeleteOptions{}),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	eventually(t, "both policies out of force", func() error {
		made, err := create("refused")
		if err != nil {
			return err
		}
		if made.Data != nil {
			return fmt.Errorf("data is %v", made.Data)
		}
		return nil
	})
}

func TestATakenPortIsGivenUp(t *testing.T) {
	t.Setenv(EnvExisting, "")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	taken := l.Addr().(*net.TCPAddr).Port
	free, err := ports.Free(2)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	// As if the port had been free when it was chosen.
	chosen := fmt.Sprintf(`{"apiServerPort": %d, "etcdPort": %d, "etcdPeerPort": %d}`, free[0], taken, free[1])
	if err := os.WriteFile(filepath.Join(dir, "cluster.json"), []byte(chosen), 0o600); err != nil {
		t.Fatal(err)
	}
	c := up(t, dir)
	if err := c.apiServerReady(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAnExistingClusterIsNotTouched(t *testing.T) {
	t.Setenv(EnvExisting, "true")
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "kubeconfig"))
	dir := t.TempDir()
	if err := os.WriteFile(os.Getenv("KUBECONFIG"), []byte("apiVersion: v1\nkind: Config\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Open(dir)
	if !c.Existing() || c.Kubeconfig != os.Getenv("KUBECONFIG") {
		t.Errorf("existing %v, kubeconfig %s", c.Existing(), c.Kubeconfig)
	}
	if _, err := Up(t.Context(), Options{Dir: dir}); err == nil {
		t.Error("a kubeconfig that leads nowhere was accepted")
	}
	if names, err := c.Processes().Names(); err != nil || len(names) != 0 {
		t.Errorf("it started %v (%v)", names, err)
	}
}
