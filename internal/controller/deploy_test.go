// Deployed stores against a real API server, under the operator's own rights. There is no
// kubelet: the tests say what it would have said of a pod, and the pod's server is a real one
// of this machine (deploy_server_test.go).

package controller

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// writes are the requests of one client that change something.
type writes struct {
	mu   sync.Mutex
	list []string
}

func (w *writes) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.list = nil }()
	return w.list
}

type counting struct {
	http.RoundTripper
	to *writes
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodGet && !strings.Contains(r.URL.Path, "/authorization.k8s.io/") && !strings.Contains(r.URL.Path, "/authentication.k8s.io/") {
		c.to.mu.Lock()
		c.to.list = append(c.to.list, r.Method+" "+r.URL.Path)
		c.to.mu.Unlock()
	}
	return c.RoundTripper.RoundTrip(r)
}

// counted is a client of the operator's whose writes are counted.
func counted(t *testing.T) (client.Client, *writes) {
	t.Helper()
	w := &writes{}
	cfg := configOf(operatorUser)
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return counting{rt, w} })
	c, err := client.New(cfg, client.Options{Scheme: scheme, Mapper: admin.RESTMapper()})
	must(t, err)
	return client.WithFieldValidation(c, metav1.FieldValidationStrict), w
}

var errNoServer = errors.New("nobody is there")

func noDial(context.Context, string, string, string) (net.Conn, error) { return nil, errNoServer }

// deployer is one under the operator's rights, without a cache.
func deployer(dial Dial) *Deployer {
	c := as(operatorUser)
	return NewDeployer(c, c, operatorNamespace, dial)
}

// permit is what the namespace's owner does.
func (w *world) permit() {
	w.Helper()
	w.create(&rbacv1.RoleBinding{
		ObjectMeta: w.meta(deployerRole),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: deployerRole},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: operatorNamespace, Name: "holdfast-manager"}},
	})
}

func (w *world) redisStore(name string, change ...func(*v1alpha1.RedisDeployment)) *v1alpha1.IdempotencyStore {
	d := &v1alpha1.RedisDeployment{Storage: v1alpha1.StoreStorage{Size: "1Gi"}}
	for _, c := range change {
		c(d)
	}
	return &v1alpha1.IdempotencyStore{ObjectMeta: w.meta(name), Spec: v1alpha1.IdempotencyStoreSpec{Redis: &v1alpha1.RedisStore{Deploy: d}}}
}

func withTLS(d *v1alpha1.RedisDeployment) {
	d.TLS = &v1alpha1.ServerTLS{SecretRef: v1alpha1.SecretReference{Name: "certificate"}}
}

func (w *world) postgresStore(name string) *v1alpha1.IdempotencyStore {
	return &v1alpha1.IdempotencyStore{ObjectMeta: w.meta(name), Spec: v1alpha1.IdempotencyStoreSpec{Postgres: &v1alpha1.PostgresStore{
		Deploy: &v1alpha1.PostgresDeployment{Storage: v1alpha1.StoreStorage{Size: "1Gi"}},
	}}}
}

// certificate is a Secret as cert-manager makes them, for this name.
func (w *world) certificate(host string, until time.Time) *corev1.Secret {
	w.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(w.T, err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host}, NotBefore: time.Now().Add(-time.Hour), NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	encode := func(c *x509.Certificate) []byte {
		der, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), key)
		must(w.T, err)
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	der, err := x509.MarshalECPrivateKey(key)
	must(w.T, err)
	s := &corev1.Secret{ObjectMeta: w.meta("certificate"), Data: map[string][]byte{
		"ca.crt": encode(ca), "tls.crt": encode(leaf), "tls.key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
	}}
	s.Labels = map[string]string{v1alpha1.CredentialsLabel: "true"}
	return s
}

// children are all objects that are made for the store, the Secret last.
func (w *world) children(s *v1alpha1.IdempotencyStore) []client.Object {
	w.Helper()
	list := []client.Object{
		&corev1.ConfigMap{ObjectMeta: w.meta(workload.Name(s))}, &networkingv1.NetworkPolicy{ObjectMeta: w.meta(workload.Name(s))},
		&corev1.Service{ObjectMeta: w.meta(workload.HeadlessName(s))}, &corev1.Service{ObjectMeta: w.meta(workload.Name(s))},
		&policyv1.PodDisruptionBudget{ObjectMeta: w.meta(workload.Name(s))}, &appsv1.StatefulSet{ObjectMeta: w.meta(workload.Name(s))},
		&corev1.Secret{ObjectMeta: w.meta(workload.SecretName(s))},
	}
	for _, o := range list {
		must(w.T, w.get(o.GetName(), o))
	}
	return list
}

func versions(list []client.Object) []string {
	var out []string
	for _, o := range list {
		out = append(out, fmt.Sprintf("%T %s %s", o, o.GetName(), o.GetResourceVersion()))
	}
	return out
}

// applied expects this reason, and returns the message.
func (w *world) applied(d *Deployer, s *v1alpha1.IdempotencyStore, reason string) string {
	w.Helper()
	must(w.T, w.get(s.Name, s))
	out, err := d.Apply(w.ctx, s)
	must(w.T, err)
	if out.Reason != reason || out.Ready != (reason == reasonRunning) {
		w.Fatalf("the server should be %s, it is %+v", reason, out)
	}
	return out.Message
}

// kubelet says that the pod of the present revision is ready, as the controllers of a cluster would.
func (w *world) kubelet(s *v1alpha1.IdempotencyStore, container string) {
	w.Helper()
	set := &appsv1.StatefulSet{}
	must(w.T, w.get(workload.Name(s), set))
	revision := fmt.Sprintf("%s-%d", set.Name, set.Generation)
	set.Status = appsv1.StatefulSetStatus{ObservedGeneration: set.Generation, Replicas: 1, ReadyReplicas: 1, UpdatedReplicas: 1, UpdateRevision: revision, CurrentRevision: revision}
	must(w.T, admin.Status().Update(w.ctx, set))
	pod := &corev1.Pod{}
	if err := w.get(workload.PodName(s), pod); err == nil && pod.Labels[appsv1.ControllerRevisionHashLabelKey] != revision {
		must(w.T, admin.Delete(w.ctx, pod, client.GracePeriodSeconds(0)))
	}
	if err := w.get(workload.PodName(s), pod); apierrors.IsNotFound(err) {
		pod = &corev1.Pod{ObjectMeta: w.meta(workload.PodName(s)), Spec: *set.Spec.Template.Spec.DeepCopy()}
		pod.Labels = map[string]string{appsv1.ControllerRevisionHashLabelKey: revision}
		for k, v := range set.Spec.Template.Labels {
			pod.Labels[k] = v
		}
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: workload.VolumeName(), VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: workload.ClaimName(s)},
		}})
		w.create(pod)
	}
	pod.Status = corev1.PodStatus{
		Phase:             corev1.PodRunning,
		Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		ContainerStatuses: []corev1.ContainerStatus{{Name: workload.ContainerName(), ContainerID: container, Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}},
	}
	must(w.T, admin.Status().Update(w.ctx, pod))
}

// claim makes the claim that the StatefulSet would, and binds it.
func (w *world) claim(s *v1alpha1.IdempotencyStore, class string) *corev1.PersistentVolumeClaim {
	w.Helper()
	size := resource.MustParse(workload.Storage(s).Size)
	c := &corev1.PersistentVolumeClaim{ObjectMeta: w.meta(workload.ClaimName(s)), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: size}},
	}}
	w.create(c)
	c.Status.Phase = corev1.ClaimBound
	c.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: size}
	must(w.T, admin.Status().Update(w.ctx, c))
	return c
}

// Applied twice, nothing moves: neither when it is compared, nor when the same is applied with force.
func TestDeployedTwiceMovesNothing(t *testing.T) {
	for name, make := range map[string]func(*world) *v1alpha1.IdempotencyStore{
		"redis":          func(w *world) *v1alpha1.IdempotencyStore { return w.redisStore("payments") },
		"redis with tls": func(w *world) *v1alpha1.IdempotencyStore { return w.redisStore("payments", withTLS) },
		"redis with all settings": func(w *world) *v1alpha1.IdempotencyStore {
			return w.redisStore("payments", func(d *v1alpha1.RedisDeployment) {
				d.Image, d.Storage = "registry.example/redis:7", v1alpha1.StoreStorage{Size: "1024Mi", ClassName: "fast"}
				d.Resources = &v1alpha1.StoreResources{
					Requests: &v1alpha1.ResourceAmounts{CPU: "1000m", Memory: "1024Mi"}, Limits: &v1alpha1.ResourceAmounts{CPU: "1.5", Memory: "2048Mi"},
				}
			})
		},
		"postgres": func(w *world) *v1alpha1.IdempotencyStore { return w.postgresStore("payments") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.permit()
			s := make(w)
			w.create(w.certificate(workload.Host(s), time.Now().Add(time.Hour)), s)
			c, written := counted(t)
			d := NewDeployer(c, c, operatorNamespace, noDial)
			w.applied(d, s, reasonStarting)
			first := w.children(s)
			if n := len(written.take()); n != len(first) {
				t.Errorf("%d writes for %d objects", n, len(first))
			}
			for range 2 {
				w.applied(d, s, reasonStarting)
			}
			if list := written.take(); len(list) > 0 {
				t.Errorf("what was applied was written again: %q", list)
			}
			second := w.children(s)
			if a, b := versions(first), versions(second); !slices.Equal(a, b) {
				t.Errorf("applied twice, %q became %q", a, b)
			}
			// The same once more, without looking.
			objects, err := workload.Render(workload.Inputs{Store: s, OperatorNamespace: operatorNamespace, Certificate: w.certificates(s)})
			must(t, err)
			force := []client.ApplyOption{client.FieldOwner(ownerDeployer), client.ForceOwnership}
			for _, err := range []error{
				c.Apply(w.ctx, objects.ConfigMap, force...), c.Apply(w.ctx, objects.NetworkPolicy, force...), c.Apply(w.ctx, objects.Headless, force...),
				c.Apply(w.ctx, objects.Client, force...), c.Apply(w.ctx, objects.PodDisruptionBudget, force...), c.Apply(w.ctx, objects.StatefulSet, force...),
			} {
				must(t, err)
			}
			if a, b := versions(first), versions(w.children(s)); !slices.Equal(a, b) {
				t.Errorf("applied with force, %q became %q", a, b)
			}
			for _, o := range second[:6] {
				if !metav1.IsControlledBy(o, s) {
					t.Errorf("%T %s does not belong to the store", o, o.GetName())
				}
			}
			if secret := second[6]; len(secret.GetOwnerReferences()) > 0 {
				t.Error("the Secret would go with the store")
			}
		})
	}
}

// certificates is what the operator reads of a certificate.
func (w *world) certificates(s *v1alpha1.IdempotencyStore) []byte {
	w.Helper()
	if s.Spec.Redis == nil || s.Spec.Redis.Deploy.TLS == nil {
		return nil
	}
	var secret corev1.Secret
	must(w.T, w.get("certificate", &secret))
	return append(slices.Clone(secret.Data["tls.crt"]), secret.Data["ca.crt"]...)
}

// What somebody changes or takes away is mended; the Secret is not made over.
func TestDeployedIsMended(t *testing.T) {
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	w.create(s)
	d := deployer(noDial)
	w.applied(d, s, reasonStarting)
	whole := func() string {
		var out []string
		for _, o := range w.children(s) {
			switch o := o.(type) {
			case *corev1.ConfigMap:
				out = append(out, asJSON(o.Data))
			case *networkingv1.NetworkPolicy:
				out = append(out, asJSON(o.Spec))
			case *corev1.Service:
				out = append(out, asJSON(o.Spec.Selector), asJSON(o.Spec.Ports))
			case *policyv1.PodDisruptionBudget:
				out = append(out, asJSON(o.Spec))
			case *appsv1.StatefulSet:
				out = append(out, asJSON(o.Spec))
			case *corev1.Secret:
				out = append(out, asJSON(o.Data))
			}
		}
		return strings.Join(out, "\n")
	}
	want := whole()
	for i, change := range []func(client.Object){
		func(o client.Object) { o.(*corev1.ConfigMap).Data["redis.conf"] = "appendonly no" },
		func(o client.Object) {
			o.(*networkingv1.NetworkPolicy).Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{}}
		},
		func(o client.Object) { o.(*corev1.Service).Spec.Selector[workload.StoreLabel] = "other" },
		func(o client.Object) { o.(*corev1.Service).Spec.Ports[0].TargetPort = intstr.FromInt32(1) },
		func(o client.Object) {
			o.(*policyv1.PodDisruptionBudget).Spec.MinAvailable = ptr.To(intstr.FromInt32(0))
		},
		func(o client.Object) { o.(*appsv1.StatefulSet).Spec.Template.Spec.Containers[0].Image = "evil" },
	} {
		o := w.children(s)[i]
		change(o)
		must(t, admin.Update(w.ctx, o))
		if whole() == want {
			t.Fatalf("%T was not changed", o)
		}
		w.applied(d, s, reasonStarting)
		if got := whole(); got != want {
			t.Errorf("after a change of %T:\n%s\nwant\n%s", o, got, want)
		}
		must(t, admin.Delete(w.ctx, o))
		w.applied(d, s, reasonStarting)
		if got := whole(); got != want && i != 2 && i != 3 { // a Service's node ports and addresses are not compared
			t.Errorf("after a deletion of %T:\n%s\nwant\n%s", o, got, want)
		}
	}
	// Only the operator's pods come in, at one port; nothing goes out.
	np := w.children(s)[1].(*networkingv1.NetworkPolicy)
	if len(np.Spec.Egress) > 0 || len(np.Spec.PolicyTypes) != 2 || len(np.Spec.Ingress) != 1 || len(np.Spec.Ingress[0].From) != 1 || len(np.Spec.Ingress[0].Ports) != 1 {
		t.Errorf("the policy is %s", asJSON(np.Spec))
	}
	// A store that is made again finds its Secret and its volume.
	secret := w.children(s)[6].(*corev1.Secret)
	must(t, admin.Delete(w.ctx, s))
	for _, o := range w.children(s)[:6] { // as garbage collection would
		must(t, admin.Delete(w.ctx, o))
	}
	s = w.redisStore("payments")
	w.create(s)
	w.applied(d, s, reasonStarting)
	if again := w.children(s)[6].(*corev1.Secret); again.UID != secret.UID || asJSON(again.Data) != asJSON(secret.Data) {
		t.Error("the Secret is another one")
	}
}

// Without the namespace's owner nothing is made, and the condition says what to run.
func TestDeployNeedsTheOwner(t *testing.T) {
	w := newWorld(t)
	s := w.postgresStore("payments")
	w.create(s)
	d := deployer(noDial)
	message := w.applied(d, s, reasonNotPermitted)
	command := "kubectl create rolebinding holdfast-store-deployer --clusterrole=holdfast-store-deployer --serviceaccount=holdfast-system:holdfast-manager --namespace=" + w.ns
	if !strings.HasSuffix(message, command) || !strings.Contains(message, "may not get secrets") {
		t.Errorf("the message is %q", message)
	}
	w.permit()
	w.applied(d, s, reasonStarting)
	// Refused by the cluster for another cause: that is not the owner's.
	must(t, admin.Delete(w.ctx, &appsv1.StatefulSet{ObjectMeta: w.meta(workload.Name(s))}))
	quota := &corev1.ResourceQuota{ObjectMeta: w.meta("none"), Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/statefulsets.apps": resource.MustParse("0")}}}
	w.create(quota)
	quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: quota.Spec.Hard}
	must(t, admin.Status().Update(w.ctx, quota))
	eventually(t, func() error { // the API server needs a moment until it counts
		out, err := d.Apply(w.ctx, s)
		if err != nil || out.Reason != reasonRefused || !strings.Contains(out.Message, "exceeded quota") {
			return errors.Join(fmt.Errorf("want %s, got %+v", reasonRefused, out), err, client.IgnoreNotFound(admin.Delete(w.ctx, &appsv1.StatefulSet{ObjectMeta: w.meta(workload.Name(s))})))
		}
		return nil
	})
}

// The ClusterRole is what the Deployer asks about, and no more.
func TestDeployerRole(t *testing.T) {
	var role rbacv1.ClusterRole
	must(t, admin.Get(t.Context(), types.NamespacedName{Name: deployerRole}, &role))
	var has, want []string
	for _, rule := range role.Rules {
		for _, group := range rule.APIGroups {
			for _, res := range rule.Resources {
				for _, verb := range rule.Verbs {
					has = append(has, group+"/"+res+"/"+verb)
				}
			}
		}
	}
	for _, r := range deployerRights() {
		want = append(want, r.group+"/"+r.resource+"/"+r.verb)
	}
	slices.Sort(has)
	slices.Sort(want)
	if !slices.Equal(has, want) {
		t.Errorf("the role gives\n%q\nand the operator needs\n%q", has, want)
	}
}

// What is somebody else's is left alone.
func TestDeployTakesNothingOver(t *testing.T) {
	labels := map[string]string{"app": "theirs"}
	selector := &metav1.LabelSelector{MatchLabels: labels}
	for i, make := range []func(w *world, name string) client.Object{
		func(w *world, name string) client.Object {
			return &corev1.ConfigMap{ObjectMeta: w.meta(name), Data: map[string]string{"a": "b"}}
		},
		func(w *world, name string) client.Object {
			return &networkingv1.NetworkPolicy{ObjectMeta: w.meta(name), Spec: networkingv1.NetworkPolicySpec{PodSelector: *selector}}
		},
		func(w *world, name string) client.Object {
			return &corev1.Service{ObjectMeta: w.meta(name + "-headless"), Spec: corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 1}}}}
		},
		func(w *world, name string) client.Object {
			return &corev1.Service{ObjectMeta: w.meta(name), Spec: corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 1}}}}
		},
		func(w *world, name string) client.Object {
			return &policyv1.PodDisruptionBudget{ObjectMeta: w.meta(name), Spec: policyv1.PodDisruptionBudgetSpec{Selector: selector}}
		},
		func(w *world, name string) client.Object {
			return &appsv1.StatefulSet{ObjectMeta: w.meta(name), Spec: appsv1.StatefulSetSpec{Selector: selector, Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Image: "a"}}},
			}}}
		},
		func(w *world, name string) client.Object {
			return &corev1.Secret{ObjectMeta: w.meta(name), Data: map[string][]byte{"password": []byte("theirs")}}
		},
	} {
		w := newWorld(t)
		w.permit()
		s := w.redisStore("payments")
		theirs := make(w, workload.Name(s))
		w.create(theirs, s)
		version := theirs.GetResourceVersion()
		message := w.applied(deployer(noDial), s, reasonNameTaken)
		if !strings.Contains(message, w.ns+"/"+theirs.GetName()) {
			t.Errorf("%T: the message is %q", theirs, message)
		}
		must(t, w.get(theirs.GetName(), theirs))
		if theirs.GetResourceVersion() != version {
			t.Errorf("%T was written to", theirs)
		}
		// No server without all of it.
		if err := w.get(workload.Name(s), &appsv1.StatefulSet{}); i != 5 && !apierrors.IsNotFound(err) {
			t.Errorf("%T is taken, and there is a StatefulSet: %v", theirs, err)
		}
	}
	// What an earlier store of the name has left behind belongs to the next.
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	w.create(s)
	d := deployer(noDial)
	w.applied(d, s, reasonStarting)
	must(t, admin.Delete(w.ctx, s))
	next := w.redisStore("payments")
	w.create(next)
	if message := w.applied(d, next, reasonStarting); !strings.Contains(message, "is gone, and waits to be removed") {
		t.Errorf("while the old one's objects are there: %q", message)
	}
	for _, o := range w.children(s)[:6] { // deleted with --cascade=orphan
		o.SetOwnerReferences(nil)
		must(t, admin.Update(w.ctx, o))
	}
	w.applied(d, next, reasonStarting)
	for _, o := range w.children(next)[:6] {
		if !metav1.IsControlledBy(o, next) {
			t.Errorf("%T %s does not belong to the new store", o, o.GetName())
		}
	}
}

// The pods are allowed where the restricted pod security standard is enforced.
func TestDeployedPodsAreRestricted(t *testing.T) {
	w := newWorld(t)
	ns := &corev1.Namespace{}
	must(t, admin.Get(w.ctx, types.NamespacedName{Name: w.ns}, ns))
	ns.Labels["pod-security.kubernetes.io/enforce"] = "restricted"
	must(t, admin.Update(w.ctx, ns))
	w.permit()
	d := deployer(noDial)
	tlsStore := w.redisStore("secure", withTLS)
	w.create(w.certificate(workload.Host(tlsStore), time.Now().Add(time.Hour)))
	for _, s := range []*v1alpha1.IdempotencyStore{w.redisStore("a"), tlsStore, w.postgresStore("b")} {
		w.create(s)
		w.applied(d, s, reasonStarting)
		set := &appsv1.StatefulSet{}
		must(t, w.get(workload.Name(s), set))
		pod := &corev1.Pod{ObjectMeta: w.meta(workload.PodName(s)), Spec: *set.Spec.Template.Spec.DeepCopy()}
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: workload.VolumeName(), VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: workload.ClaimName(s)},
		}})
		if err := admin.Create(w.ctx, pod.DeepCopy(), client.DryRunAll); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
		c := pod.Spec.Containers[0].SecurityContext
		if ptr.Deref(pod.Spec.AutomountServiceAccountToken, true) || ptr.Deref(pod.Spec.EnableServiceLinks, true) || !ptr.Deref(c.ReadOnlyRootFilesystem, false) {
			t.Errorf("%s: a token, links or a writable root: %s", s.Name, asJSON(pod.Spec))
		}
		pod.Spec.SecurityContext = nil
		if err := admin.Create(w.ctx, pod, client.DryRunAll); !apierrors.IsForbidden(err) {
			t.Errorf("a pod that is not restricted should be refused: %v", err)
		}
	}
}

// S06: the volume grows where its class allows it, and otherwise the condition says what to do.
func TestStorageGrows(t *testing.T) {
	w := newWorld(t)
	w.permit()
	grows, fixed := w.ns+"-grows", w.ns+"-fixed"
	for name, allow := range map[string]*bool{grows: ptr.To(true), fixed: nil} {
		class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: "none", AllowVolumeExpansion: allow}
		w.create(class)
		t.Cleanup(func() { must(t, admin.Delete(context.WithoutCancel(w.ctx), class)) })
	}
	c, written := counted(t)
	d := NewDeployer(c, c, operatorNamespace, noDial)
	s := w.redisStore("payments", func(r *v1alpha1.RedisDeployment) { r.Storage.ClassName = grows })
	w.create(s)
	w.applied(d, s, reasonStarting)
	claim := w.claim(s, grows)
	w.kubelet(s, "one")
	w.applied(d, s, reasonPassword) // nobody answers here
	d.dial = accepting(t)
	w.applied(d, s, reasonRunning)

	s.Spec.Redis.Deploy.Storage.Size = "2Gi"
	must(t, admin.Update(w.ctx, s))
	if message := w.applied(d, s, reasonExpanding); !strings.Contains(message, "grows to 2Gi") {
		t.Errorf("the message is %q", message)
	}
	must(t, w.get(claim.Name, claim))
	if size := claim.Spec.Resources.Requests[corev1.ResourceStorage]; size.String() != "2Gi" {
		t.Errorf("the claim asks for %s", size.String())
	}
	// The template stays: to apply it with another size would be refused for ever.
	set := &appsv1.StatefulSet{}
	must(t, w.get(workload.Name(s), set))
	if templateSize(set) != "1Gi" {
		t.Errorf("the template has %s", templateSize(set))
	}
	written.take()
	w.applied(d, s, reasonExpanding)
	if list := written.take(); len(list) > 0 {
		t.Errorf("while it grows, it was written: %q", list)
	}
	claim.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue}}
	must(t, admin.Status().Update(w.ctx, claim))
	if message := w.applied(d, s, reasonExpanding); !strings.Contains(message, "kubectl delete pod payments-redis-0") {
		t.Errorf("the message is %q", message)
	}
	// Another change is applied all the same.
	s.Spec.Redis.Deploy.Image = "docker.io/valkey/valkey:9.0"
	must(t, admin.Update(w.ctx, s))
	w.applied(d, s, reasonStarting)
	w.kubelet(s, "two")
	claim.Status.Conditions, claim.Status.Capacity = nil, corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}
	must(t, admin.Status().Update(w.ctx, claim))
	w.applied(d, s, reasonRunning)

	still := w.redisStore("still", func(r *v1alpha1.RedisDeployment) { r.Storage.ClassName = fixed })
	w.create(still)
	w.applied(d, still, reasonStarting)
	w.claim(still, fixed)
	w.kubelet(still, "one")
	w.applied(d, still, reasonRunning)
	still.Spec.Redis.Deploy.Storage.Size = "2Gi"
	must(t, admin.Update(w.ctx, still))
	written.take()
	message := w.applied(d, still, reasonNotExpandable)
	if !strings.Contains(message, "kubectl patch storageclass "+fixed) || !strings.Contains(message, "has 1Gi and storage.size is 2Gi") {
		t.Errorf("the message is %q", message)
	}
	if list := written.take(); len(list) > 0 {
		t.Errorf("it was written: %q", list)
	}
	// Somebody does what it says.
	class := &storagev1.StorageClass{}
	must(t, admin.Get(w.ctx, types.NamespacedName{Name: fixed}, class))
	class.AllowVolumeExpansion = ptr.To(true)
	must(t, admin.Update(w.ctx, class))
	w.applied(d, still, reasonExpanding)
}

// Another image rolls the pod, and so does a change of what the server reads at its start; a
// rotated password does not.
func TestImageUpgrade(t *testing.T) {
	w := newWorld(t)
	w.permit()
	d := deployer(accepting(t))
	s := w.redisStore("payments")
	w.create(s)
	w.applied(d, s, reasonStarting)
	w.claim(s, "any")
	w.kubelet(s, "one")
	w.applied(d, s, reasonRunning)
	template := func() string {
		set := &appsv1.StatefulSet{}
		must(t, w.get(workload.Name(s), set))
		return asJSON(set.Spec.Template)
	}
	was := template()
	s.Annotations = map[string]string{v1alpha1.RotatePasswordAnnotation: "now"}
	must(t, admin.Update(w.ctx, s))
	w.applied(d, s, reasonRunning)
	if template() != was {
		t.Error("a rotated password restarts the pod")
	}
	s.Spec.Redis.Deploy.Image = "docker.io/valkey/valkey:9.0"
	must(t, admin.Update(w.ctx, s))
	if message := w.applied(d, s, reasonStarting); !strings.Contains(message, "about to be replaced") {
		t.Errorf("the message is %q", message)
	}
	if now := template(); now == was || !strings.Contains(now, "valkey:9.0") {
		t.Errorf("the template is %s", now)
	}
	w.applied(d, s, reasonStarting)
	w.kubelet(s, "two")
	w.applied(d, s, reasonRunning)
	was = template()
	s.Spec.Redis.Deploy.Resources = &v1alpha1.StoreResources{Limits: &v1alpha1.ResourceAmounts{Memory: "1Gi"}}
	must(t, admin.Update(w.ctx, s))
	w.applied(d, s, reasonStarting)
	cm := w.children(s)[0].(*corev1.ConfigMap)
	if !strings.Contains(cm.Data["redis.conf"], "maxmemory 805306368\n") {
		t.Errorf("the configuration is %s", cm.Data["redis.conf"])
	}
	if !strings.Contains(template(), workload.ContentAnnotation) || template() == was {
		t.Error("another configuration does not roll the pod")
	}
}

// A certificate that no client would take is refused before the server shows it; a renewed one rolls the pod.
func TestServerCertificate(t *testing.T) {
	w := newWorld(t)
	w.permit()
	d := deployer(noDial)
	s := w.redisStore("payments", withTLS)
	w.create(s)
	host := workload.Host(s)
	message := w.applied(d, s, reasonCertificate)
	if !strings.Contains(message, "There is no Secret "+w.ns+"/certificate") || !strings.Contains(message, host) {
		t.Errorf("the message is %q", message)
	}
	put := func(change func(*corev1.Secret), host string, until time.Time) {
		t.Helper()
		secret := w.certificate(host, until)
		if change != nil {
			change(secret)
		}
		must(t, client.IgnoreNotFound(admin.Delete(w.ctx, w.certificate(host, until))))
		w.create(secret)
	}
	hour := time.Now().Add(time.Hour)
	for says, bad := range map[string]func(){
		"other.example":            func() { put(nil, "other.example", hour) },
		"expired":                  func() { put(nil, host, time.Now().Add(-time.Minute)) },
		"no certificate in ca.crt": func() { put(func(s *corev1.Secret) { s.Data["ca.crt"] = []byte("x") }, host, hour) },
		"unknown authority": func() {
			other := w.certificate(host, hour).Data["ca.crt"]
			put(func(s *corev1.Secret) { s.Data["ca.crt"] = other }, host, hour)
		},
		"failed to find any PEM":   func() { put(func(s *corev1.Secret) { delete(s.Data, "tls.key") }, host, hour) },
		"does not carry the label": func() { put(func(s *corev1.Secret) { s.Labels = nil }, host, hour) },
	} {
		bad()
		if message := w.applied(d, s, reasonCertificate); !strings.Contains(message, says) {
			t.Errorf("want %q, the message is %q", says, message)
		}
	}
	put(nil, host, hour)
	w.applied(d, s, reasonStarting)
	content := func() string {
		set := &appsv1.StatefulSet{}
		must(t, w.get(workload.Name(s), set))
		return set.Spec.Template.Annotations[workload.ContentAnnotation]
	}
	was := content()
	put(nil, host, hour)
	w.applied(d, s, reasonStarting)
	if content() == was {
		t.Error("a renewed certificate does not reach the server")
	}
}

// Why a pod does not come up.
func TestTroubleOfAPod(t *testing.T) {
	w := newWorld(t)
	ended := func(reason, message string) corev1.ContainerStatus {
		return corev1.ContainerStatus{
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: reason, ExitCode: 3, Message: message}},
		}
	}
	waits := func(reason string) corev1.ContainerStatus {
		return corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "because"}}}
	}
	for says, status := range map[string]corev1.ContainerStatus{
		"":                                       waits("ContainerCreating"),
		"ImagePullBackOff: because":              waits("ImagePullBackOff"),
		"code 3, after it had said: no space":    ended("Error", " no space \n"),
		"raise it":                               ended("OOMKilled", ""),
		"another major version of PostgreSQL":    ended("Error", "FATAL:  database files are incompatible with server"),
		"…" + strings.Repeat("x", lastWords-1):   ended("Error", "y"+strings.Repeat("x", lastWords)),
		"code 7, after it had said: ended by it": {State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 7, Message: "ended by it"}}},
	} {
		status.Name = workload.ContainerName()
		got := trouble(w.postgresStore("p"), &corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "other", State: waits("Other").State}, status}}})
		if says == "" && got != "" || !strings.Contains(got, says) {
			t.Errorf("want %q, got %q", says, got)
		}
	}
	unscheduled := &corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "unbound claim"}}}}
	if got := trouble(w.redisStore("r"), unscheduled); got != "it has no node: unbound claim" {
		t.Errorf("got %q", got)
	}
}

// absent does not find a pod so many times.
type absent struct {
	client.Client
	times int
}

func (c *absent) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	if _, is := o.(*corev1.Pod); is && c.times > 0 {
		c.times--
		return apierrors.NewNotFound(corev1.Resource("pods"), key.Name)
	}
	return c.Client.Get(ctx, key, o, options...)
}

// The data of a deployed store must be on a volume that lasts.
func TestVolumeIsJudged(t *testing.T) {
	w := newWorld(t)
	w.permit()
	d := deployer(noDial)
	s := w.postgresStore("payments")
	w.create(s)
	w.applied(d, s, reasonStarting)
	is := func(says string) {
		t.Helper()
		found, err := d.Volume(w.ctx, s)
		must(t, err)
		switch {
		case says == "" && len(found) > 0, says != "" && (len(found) != 1 || !found[0].Loses || found[0].Reason != reasonEphemeralVolume || !strings.Contains(found[0].Text, says)):
			t.Errorf("want %q, found %s", says, asJSON(found))
		}
	}
	is("cannot be seen")
	w.kubelet(s, "one")
	is("is gone")
	claim := w.claim(s, "any")
	is("")
	// Deleted by force, it is made anew in a moment.
	between := &absent{d.live, 3}
	d.live = between
	is("")
	if d.live = between.Client; between.times > 0 {
		t.Errorf("the pod should have been looked for %d times more", between.times)
	}
	claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "1"}}
	must(t, admin.Update(w.ctx, claim))
	is("goes with Pod p")
	claim.OwnerReferences = nil
	must(t, admin.Update(w.ctx, claim))
	claim.Status.Phase = corev1.ClaimLost
	must(t, admin.Status().Update(w.ctx, claim))
	is("is Lost, not Bound")

	pod := &corev1.Pod{}
	must(t, w.get(workload.PodName(s), pod))
	must(t, admin.Delete(w.ctx, pod.DeepCopy(), client.GracePeriodSeconds(0)))
	remake := func(change func(*corev1.PodSpec)) {
		t.Helper()
		next := &corev1.Pod{ObjectMeta: w.meta(pod.Name), Spec: *pod.Spec.DeepCopy()}
		change(&next.Spec)
		w.create(next)
		t.Cleanup(func() {})
	}
	remake(func(p *corev1.PodSpec) {
		for i := range p.Volumes {
			if p.Volumes[i].Name == workload.VolumeName() {
				p.Volumes[i].VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
			}
		}
	})
	is("goes with the pod")
	must(t, admin.Delete(w.ctx, &corev1.Pod{ObjectMeta: w.meta(pod.Name)}, client.GracePeriodSeconds(0)))
	remake(func(p *corev1.PodSpec) { p.Containers[0].VolumeMounts[0].MountPath = "/elsewhere" })
	is("does not keep its data on its volume")

	found, err := d.Volume(w.ctx, w.store("embedded"))
	if must(t, err); len(found) > 0 {
		t.Errorf("of a store that is not deployed: %s", asJSON(found))
	}
}

// S03: a Cluster of CloudNativePG, of which only the object is there.
func TestCloudNativePG(t *testing.T) {
	w := newWorld(t)
	judge := func(name string) []store.Finding {
		t.Helper()
		found, err := CloudNativePG(w.ctx, as(operatorUser), w.ns, name)
		must(t, err)
		return found
	}
	if found := judge("none"); len(found) != 1 || !found[0].Loses || !strings.Contains(found[0].Text, "install CloudNativePG") {
		t.Errorf("without the kind: %s", asJSON(found))
	}
	content, err := os.ReadFile("testdata/cloudnativepg.yaml")
	must(t, err)
	crd := objectOf(t, content)
	w.create(crd)
	t.Cleanup(func() { must(t, admin.Delete(context.WithoutCancel(w.ctx), objectOf(t, content))) })
	cluster := func(name, spec string) client.Object {
		return objectOf(t, fmt.Appendf(nil, "{apiVersion: postgresql.cnpg.io/v1, kind: Cluster, metadata: {name: %s, namespace: %s}, spec: %s}", name, w.ns, spec))
	}
	fresh, err := client.New(restConfig, client.Options{Scheme: scheme})
	must(t, err)
	eventually(t, func() error { return fresh.Create(w.ctx, cluster("probe", "{instances: 1}"), client.DryRunAll) })
	if found := judge("none"); len(found) != 1 || !found[0].Loses || !strings.Contains(found[0].Text, "there is no Cluster") {
		t.Errorf("without the Cluster: %s", asJSON(found))
	}
	i := 0
	for _, c := range []struct {
		spec    string
		reasons []string
	}{
		{"{instances: 1}", nil},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 1, dataDurability: required}}}", nil},
		{"{instances: 3, postgresql: {synchronous: {method: first, number: 2}}}", nil},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 1, dataDurability: preferred}}}", []string{reasonPreferredDurability}},
		{"{instances: 2}", []string{reasonAsyncStandbys}},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 0}}}", []string{reasonAsyncStandbys}},
		{"{instances: 3, minSyncReplicas: 1, maxSyncReplicas: 2}", []string{reasonPreferredDurability}},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 1, standbyNamesPre: [far]}}}", []string{reasonForeignStandbys}},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 1, maxStandbyNamesFromCluster: 0}}}", []string{reasonForeignStandbys}},
		{"{instances: 3, postgresql: {synchronous: {method: any, number: 1, maxStandbyNamesFromCluster: 1}}}", nil},
	} {
		i++
		name := fmt.Sprint("c", i)
		must(t, fresh.Create(w.ctx, cluster(name, c.spec)))
		var reasons []string
		for _, f := range judge(name) {
			reasons = append(reasons, f.Reason)
			if !f.Loses || !strings.Contains(f.Text, w.ns+"/"+name) {
				t.Errorf("%s: %+v", c.spec, f)
			}
		}
		if !slices.Equal(reasons, c.reasons) {
			t.Errorf("%s: found %q, want %q", c.spec, reasons, c.reasons)
		}
	}
	// The sample is what is asked for.
	sample, err := os.ReadFile("../../config/samples/cloudnativepg/cluster.yaml")
	must(t, err)
	first, _, _ := strings.Cut(string(sample), "\n---\n")
	o := objectOf(t, []byte(first))
	o.SetNamespace(w.ns)
	must(t, fresh.Create(w.ctx, o))
	if found := judge(o.GetName()); len(found) > 0 {
		t.Errorf("of the sample: %s", asJSON(found))
	}
}

// Changes and deletions are seen at once, through the cache that the operator has.
func TestDeployedIsWatched(t *testing.T) {
	w := newWorld(t)
	w.permit()
	s := w.redisStore("payments")
	w.create(s)
	cfg := configOf(operatorUser)
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Cache: cache.Options{ByObject: DeployedCache()}, Metrics: metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0", Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	must(t, err)
	live, err := LiveClient(cfg, mgr)
	must(t, err)
	d := NewDeployer(mgr.GetClient(), live, operatorNamespace, noDial)
	b := ctrl.NewControllerManagedBy(mgr).Named("deployed").For(&v1alpha1.IdempotencyStore{})
	d.Watches(b)
	must(t, b.Complete(reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
		var obj v1alpha1.IdempotencyStore
		if err := mgr.GetClient().Get(ctx, req.NamespacedName, &obj); err != nil || obj.Spec.Embedded != nil {
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
		_, err := d.Apply(ctx, &obj)
		return reconcile.Result{}, err
	})))
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	defer func() {
		cancel()
		must(t, <-ended)
	}()
	eventually(t, func() error { return w.get(workload.Name(s), &appsv1.StatefulSet{}) })
	for _, o := range w.children(s)[1:6] {
		must(t, admin.Delete(w.ctx, o))
		eventually(t, func() error {
			next := o.DeepCopyObject().(client.Object)
			if err := w.get(o.GetName(), next); err != nil {
				return err
			}
			if next.GetUID() == o.GetUID() {
				return errors.New("the old one is still there")
			}
			return nil
		})
	}
	eventually(t, func() error {
		set := &appsv1.StatefulSet{}
		if err := w.get(workload.Name(s), set); err != nil {
			return err
		}
		if set.Spec.Template.Spec.Containers[0].Image == "evil" {
			return errors.New("not mended")
		}
		if set.Annotations["seen"] == "" {
			set.Annotations = map[string]string{"seen": "yes"}
			set.Spec.Template.Spec.Containers[0].Image = "evil"
			return errors.Join(errors.New("just changed"), admin.Update(w.ctx, set))
		}
		return nil
	})
}

func objectOf(t *testing.T, content []byte) client.Object {
	t.Helper()
	raw, err := yaml.YAMLToJSON(content)
	must(t, err)
	u := &unstructured.Unstructured{}
	must(t, json.Unmarshal(raw, u))
	return u
}
