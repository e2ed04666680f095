// This file has the cluster run the server of a deployed store: it applies what package
// workload renders, and says how far the server has come.
//
// What must hold: nothing of anybody else is taken over, nothing is written that is already
// so, and what only a person can mend is a reason in a condition, never an error that is
// tried again and again. What may be written in a namespace its owner gives with a
// RoleBinding to the ClusterRole holdfast-store-deployer.

package controller

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	appsv1ac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	networkingv1ac "k8s.io/client-go/applyconfigurations/networking/v1"
	policyv1ac "k8s.io/client-go/applyconfigurations/policy/v1"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// ownerDeployer is the owner of the fields of what is deployed.
const ownerDeployer = "holdfast-deployer"

// deployerRole is the ClusterRole that a namespace's owner binds.
const deployerRole = "holdfast-store-deployer"

// The reasons of the condition Deployed.
const (
	reasonRunning       = "Running"
	reasonStarting      = "Starting"
	reasonNotStarting   = "ServerDoesNotStart"
	reasonNotPermitted  = "NotPermitted"
	reasonRefused       = "RefusedByCluster"
	reasonNameTaken     = "NameTaken"
	reasonTerminating   = "Terminating"
	reasonSecret        = "SecretUnusable"
	reasonCertificate   = "CertificateUnusable"
	reasonPassword      = "PasswordNotSet"
	reasonExpanding     = "Expanding"
	reasonNotExpandable = "StorageNotExpandable"
)

// Deployed is how far the server of a store has come.
type Deployed struct {
	// Ready is the status of the condition Deployed: the server runs as the spec says. A server
	// that is not as the spec says may serve all the same.
	Ready bool
	// Reason and Message are the condition's.
	Reason, Message string
	// kept is what the store's Secret says of its memory, whether or not the rest is as it should
	// be; nil: it could not be read.
	kept *workload.Kept
}

// says is what the store's Secret says of its memory; empty: nothing that is known.
func (d *Deployed) says() workload.Kept {
	if d == nil || d.kept == nil {
		return workload.Kept{}
	}
	return *d.kept
}

// Deployer deploys the servers of stores. Apply is to be called again and again: it goes by
// what is there, and some of what it waits for has no event.
type Deployer struct {
	// cached reads what Watches has watched; all else is read, and everything written, live.
	cached    client.Reader
	live      client.Client
	namespace string
	dial      Dial
	now       func() time.Time

	mu   sync.Mutex
	self string
}

// NewDeployer makes a Deployer of the operator that runs in this namespace.
func NewDeployer(cached client.Reader, live client.Client, operatorNamespace string, dial Dial) *Deployer {
	return &Deployer{cached: cached, live: live, namespace: operatorNamespace, dial: dial, now: time.Now}
}

// DeployedCache keeps the cache to what the operator itself has deployed.
func DeployedCache() map[client.Object]cache.ByObject {
	ours := cache.ByObject{Label: labels.SelectorFromSet(labels.Set{workload.ManagedByLabel: workload.ManagedBy}), Transform: whole}
	return map[client.Object]cache.ByObject{
		&appsv1.StatefulSet{}:           ours,
		&networkingv1.NetworkPolicy{}:   ours,
		&policyv1.PodDisruptionBudget{}: ours,
	}
}

// whole keeps an object as it is: what is compared by the fields that were applied needs to
// know who owns which.
func whole(o any) (any, error) { return o, nil }

// Watches has a store looked at again when something of its server changes or is taken away.
// A ConfigMap is not watched: that would be the right to read those of all namespaces.
func (d *Deployer) Watches(b *builder.Builder) {
	b.Owns(&appsv1.StatefulSet{}).Owns(&corev1.Service{}).Owns(&networkingv1.NetworkPolicy{}).Owns(&policyv1.PodDisruptionBudget{})
}

// stopped says that nothing can go on until somebody has done something about it. It is the
// condition's reason and message.
type stopped struct{ reason, message string }

func (s stopped) Error() string { return s.message }

func stop(reason, format string, args ...any) error {
	return stopped{reason, fmt.Sprintf(format, args...)}
}

// Apply makes what the store runs on as its spec has it. An error is one that may pass.
func (d *Deployer) Apply(ctx context.Context, s *v1alpha1.IdempotencyStore) (Deployed, error) {
	if s.DeletionTimestamp != nil {
		return Deployed{Reason: reasonTerminating, Message: "The store is being deleted; its Secret and its volume stay."}, nil
	}
	var kept *workload.Kept
	credentials, err := d.credentials(ctx, s)
	if err == nil {
		says := credentials.Kept()
		kept = &says
		var out Deployed
		if out, err = d.apply(ctx, s, credentials); err == nil {
			out.kept = kept
			return out, nil
		}
	}
	var why stopped
	if errors.As(d.explain(ctx, s, err), &why) {
		// The server may serve all the same, such as one that the cluster has not collected yet.
		return Deployed{Reason: why.reason, Message: why.message, kept: kept}, nil
	}
	return Deployed{}, err
}

// keep writes to the store's Secret what is remembered of the store.
func (d *Deployer) keep(ctx context.Context, s *v1alpha1.IdempotencyStore, kept workload.Kept) error {
	c, err := d.credentials(ctx, s)
	if err != nil {
		return err
	}
	c.Keep(kept)
	return d.writeSecret(ctx, c)
}

// explain turns what the API server will say again and again into a reason.
func (d *Deployer) explain(ctx context.Context, s *v1alpha1.IdempotencyStore, err error) error {
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return stop(reasonTerminating, "Namespace %s is being deleted.", s.Namespace)
	case apierrors.IsForbidden(err):
		// By RBAC, or by an admission plugin: the cluster itself says which.
		missing, reviewErr := d.missingRight(ctx, s.Namespace)
		if reviewErr != nil {
			return errors.Join(err, reviewErr)
		}
		if missing != "" {
			return stop(reasonNotPermitted, "The operator may not %s in namespace %s. Its owner gives the right with: %s",
				missing, s.Namespace, d.bindCommand(ctx, s.Namespace))
		}
		return stop(reasonRefused, "The cluster refuses what the store runs on: %v", err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return stop(reasonRefused, "The API server refuses what the store runs on; change the spec: %v", err)
	}
	return err
}

// right is what the ClusterRole of the Deployer gives.
type right struct{ group, resource, verb string }

func deployerRights() []right {
	var out []right
	for _, of := range []struct{ group, resource, verbs string }{
		{"", "secrets", "get create update"},
		{"", "configmaps", "get create patch"},
		{"networking.k8s.io", "networkpolicies", "get create patch"},
		{"", "services", "get create patch"},
		{"policy", "poddisruptionbudgets", "get create patch"},
		{"apps", "statefulsets", "get create patch"},
		{"", "persistentvolumeclaims", "get patch"},
		{"", "pods", "get"},
	} {
		for _, verb := range strings.Fields(of.verbs) {
			out = append(out, right{of.group, of.resource, verb})
		}
	}
	return out
}

// missingRight is one that the operator lacks in the namespace; "": it has all.
func (d *Deployer) missingRight(ctx context.Context, namespace string) (string, error) {
	for _, r := range deployerRights() {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Group: r.group, Resource: r.resource, Verb: r.verb},
		}}
		if err := d.live.Create(ctx, review); err != nil {
			return "", fmt.Errorf("ask what the operator may do in namespace %s: %w", namespace, err)
		}
		if !review.Status.Allowed {
			return r.verb + " " + r.resource, nil
		}
	}
	return "", nil
}

// bindCommand is what a namespace's owner runs.
func (d *Deployer) bindCommand(ctx context.Context, namespace string) string {
	who := "--user=" + d.name(ctx)
	if parts := strings.Split(d.name(ctx), ":"); len(parts) == 4 && parts[1] == "serviceaccount" {
		who = "--serviceaccount=" + parts[2] + ":" + parts[3]
	}
	return fmt.Sprintf("kubectl create rolebinding %[1]s --clusterrole=%[1]s %[2]s --namespace=%[3]s", deployerRole, who, namespace)
}

// name is the operator's own, as the API server knows it.
func (d *Deployer) name(ctx context.Context) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.self == "" {
		var review authenticationv1.SelfSubjectReview
		if err := d.live.Create(ctx, &review); err != nil {
			return "system:serviceaccount:" + d.namespace + ":holdfast-manager"
		}
		d.self = review.Status.UserInfo.Username
	}
	return d.self
}

func (d *Deployer) apply(ctx context.Context, s *v1alpha1.IdempotencyStore, credentials workload.Credentials) (Deployed, error) {
	shown, ca, err := d.certificate(ctx, s)
	if err != nil {
		return Deployed{}, err
	}
	set := &appsv1.StatefulSet{}
	if err := d.cached.Get(ctx, types.NamespacedName{Namespace: s.Namespace, Name: workload.Name(s)}, set); client.IgnoreNotFound(err) != nil {
		return Deployed{}, fmt.Errorf("read StatefulSet %s/%s: %w", s.Namespace, workload.Name(s), err)
	} else if err != nil {
		// Once more past the cache, which knows only what carries the label.
		if err := d.live.Get(ctx, types.NamespacedName{Namespace: s.Namespace, Name: workload.Name(s)}, set); client.IgnoreNotFound(err) != nil {
			return Deployed{}, fmt.Errorf("read StatefulSet %s/%s: %w", s.Namespace, workload.Name(s), err)
		}
	}
	objects, err := workload.Render(workload.Inputs{
		Store: s, OperatorNamespace: d.namespace, TemplateSize: templateSize(set), Certificate: shown,
	})
	if err != nil {
		return Deployed{}, stop(reasonRefused, "The spec cannot be deployed: %v", err)
	}
	// The policy before the server, and what the server reads before the server.
	if credentials.Derive() {
		if err := d.writeSecret(ctx, credentials); err != nil {
			return Deployed{}, err
		}
	}
	_, err = applyChild(ctx, d, s, d.live, &corev1.ConfigMap{}, objects.ConfigMap, corev1ac.ExtractConfigMap)
	if err == nil {
		_, err = applyChild(ctx, d, s, d.cached, &networkingv1.NetworkPolicy{}, objects.NetworkPolicy, networkingv1ac.ExtractNetworkPolicy)
	}
	for _, service := range []*corev1ac.ServiceApplyConfiguration{objects.Headless, objects.Client} {
		if err == nil {
			_, err = applyChild(ctx, d, s, d.cached, &corev1.Service{}, service, corev1ac.ExtractService)
		}
	}
	if err == nil {
		_, err = applyChild(ctx, d, s, d.cached, &policyv1.PodDisruptionBudget{}, objects.PodDisruptionBudget, policyv1ac.ExtractPodDisruptionBudget)
	}
	wrote := false
	if err == nil {
		wrote, err = applyChild(ctx, d, s, d.cached, set, objects.StatefulSet, func(set *appsv1.StatefulSet, owner string) (*appsv1ac.StatefulSetApplyConfiguration, error) {
			has, err := appsv1ac.ExtractStatefulSet(set, owner)
			if err == nil && has.Spec != nil {
				// The claim template cannot change, and reads back with what the API server adds to it.
				has.Spec.VolumeClaimTemplates = objects.StatefulSet.Spec.VolumeClaimTemplates
			}
			return has, err
		})
	}
	if err != nil {
		return Deployed{}, err
	}
	_, storage, err := d.expand(ctx, s)
	if err != nil {
		return Deployed{}, err
	}
	pod, out, err := d.progress(ctx, s, set, wrote)
	if err != nil {
		return Deployed{}, err
	}
	if problem, err := d.rotate(ctx, s, credentials, ca, pod); err != nil {
		return Deployed{}, err
	} else if problem != nil && out.Ready {
		return *problem, nil
	}
	if storage != nil && out.Ready {
		return *storage, nil
	}
	return out, nil
}

// templateSize is the size in a StatefulSet's claim template; "": there is none.
func templateSize(set *appsv1.StatefulSet) string {
	for i := range set.Spec.VolumeClaimTemplates {
		if t := &set.Spec.VolumeClaimTemplates[i]; t.Name == workload.VolumeName() {
			size := t.Spec.Resources.Requests[corev1.ResourceStorage]
			return size.String()
		}
	}
	return ""
}

// configuration is what can be applied.
type configuration[C any] interface {
	runtime.ApplyConfiguration
	GetName() *string
	WithUID(types.UID) C
}

// applyChild makes one object as it is to be, and says whether it had to be written. It is
// compared by the fields that were applied before: one that somebody else has changed since
// is no longer among them.
func applyChild[O client.Object, C configuration[C]](
	ctx context.Context, d *Deployer, s *v1alpha1.IdempotencyStore, from client.Reader, object O, want C,
	extract func(O, string) (C, error),
) (bool, error) {
	kind := reflect.TypeOf(object).Elem().Name()
	name := types.NamespacedName{Namespace: s.Namespace, Name: *want.GetName()}
	doing := fmt.Sprintf("deploy %s %s", kind, name)
	err := from.Get(ctx, name, object)
	if apierrors.IsNotFound(err) {
		// The cache may not have it yet, and has nothing that does not carry the label.
		err = d.live.Get(ctx, name, object)
	}
	switch {
	case apierrors.IsNotFound(err):
		// Without force: what somebody else makes at this moment is not taken from them.
		if err := d.live.Apply(ctx, want, client.FieldOwner(ownerDeployer)); err != nil {
			return false, fmt.Errorf("%s: %w", doing, err)
		}
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%s: %w", doing, err)
	}
	if err := ours(s, kind, object); err != nil {
		return false, err
	}
	has, err := extract(object, ownerDeployer)
	if err != nil {
		return false, fmt.Errorf("%s: %w", doing, err)
	}
	if same, err := sameJSON(has, want); err != nil || same {
		return false, err
	}
	// The UID keeps from changing one that has followed the one that was looked at.
	if err := d.live.Apply(ctx, want.WithUID(object.GetUID()), client.FieldOwner(ownerDeployer), client.ForceOwnership); err != nil {
		return false, fmt.Errorf("%s: %w", doing, err)
	}
	return true, nil
}

// ours says why an object of a name that the store needs is not the store's.
func ours(s *v1alpha1.IdempotencyStore, kind string, object client.Object) error {
	name := object.GetNamespace() + "/" + object.GetName()
	if object.GetDeletionTimestamp() != nil {
		return stop(reasonStarting, "%s %s is being deleted, and will be made anew.", kind, name)
	}
	if workload.IsController(s, object) || workload.Orphan(s, object) {
		return nil
	}
	if owner := metav1.GetControllerOf(object); owner != nil && owner.Kind == "IdempotencyStore" && owner.Name == s.Name {
		return stop(reasonStarting, "%s %s belongs to an IdempotencyStore of this name that is gone, and waits to be removed by the cluster.", kind, name)
	}
	return stop(reasonNameTaken, "%s %s is there and was not made for this store. It is left alone: remove it, or give the store another name.", kind, name)
}

// sameJSON compares two configurations as the API server would read them.
func sameJSON(a, b any) (bool, error) {
	var values [2]any
	for i, v := range []any{a, b} {
		raw, err := json.Marshal(v)
		if err != nil {
			return false, err
		}
		if err := json.Unmarshal(raw, &values[i]); err != nil {
			return false, err
		}
	}
	return reflect.DeepEqual(values[0], values[1]), nil
}

// credentials reads the store's Secret, or makes it. It is never made over.
func (d *Deployer) credentials(ctx context.Context, s *v1alpha1.IdempotencyStore) (workload.Credentials, error) {
	var secret corev1.Secret
	name := types.NamespacedName{Namespace: s.Namespace, Name: workload.SecretName(s)}
	err := d.live.Get(ctx, name, &secret)
	if apierrors.IsNotFound(err) {
		c := workload.NewCredentials(s)
		if err := d.live.Create(ctx, c.Secret, client.FieldOwner(ownerDeployer)); err != nil {
			return workload.Credentials{}, fmt.Errorf("make Secret %s: %w", name, err)
		}
		return c, nil
	}
	if err != nil {
		return workload.Credentials{}, fmt.Errorf("read Secret %s: %w", name, err)
	}
	if err := workload.CheckOwn(s, &secret); err != nil {
		return workload.Credentials{}, stop(reasonNameTaken, "Secret %s is there, and %v. It is left alone: remove it, or give the store another name.", name, err)
	}
	c, err := workload.ReadCredentials(s, &secret)
	if err != nil {
		return workload.Credentials{}, stop(reasonSecret, "Secret %s cannot be used: %v. Restore it as it was.", name, err)
	}
	return c, nil
}

// certificate reads what a server with TLS shows and what it is verified with, and refuses
// what no client would take.
func (d *Deployer) certificate(ctx context.Context, s *v1alpha1.IdempotencyStore) (shown, ca []byte, err error) {
	if s.Spec.Redis == nil || s.Spec.Redis.Deploy == nil || s.Spec.Redis.Deploy.TLS == nil {
		return nil, nil, nil
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Spec.Redis.Deploy.TLS.SecretRef.Name}
	var secret corev1.Secret
	if err := d.live.Get(ctx, name, &secret); apierrors.IsNotFound(err) {
		return nil, nil, stop(reasonCertificate, "There is no Secret %s: make it with tls.crt, tls.key and ca.crt, for the name %s, and the label %s: \"true\".",
			name, workload.Host(s), v1alpha1.CredentialsLabel)
	} else if err != nil {
		return nil, nil, fmt.Errorf("read Secret %s: %w", name, err)
	}
	if secret.Labels[v1alpha1.CredentialsLabel] != "true" {
		return nil, nil, stop(reasonCertificate, "Secret %s does not carry the label %s: \"true\", without which no client reads its ca.crt.", name, v1alpha1.CredentialsLabel)
	}
	ca = secret.Data[workload.KeyCA]
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err == nil {
		roots, between := x509.NewCertPool(), x509.NewCertPool()
		if !roots.AppendCertsFromPEM(ca) {
			return nil, nil, stop(reasonCertificate, "Secret %s has no certificate in ca.crt.", name)
		}
		for _, der := range pair.Certificate[1:] {
			if c, err := x509.ParseCertificate(der); err == nil {
				between.AddCert(c)
			}
		}
		_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: workload.Host(s), Roots: roots, Intermediates: between, CurrentTime: d.now()})
	}
	if err != nil {
		return nil, nil, stop(reasonCertificate, "The certificate of Secret %s cannot be used for %s: %v.", name, workload.Host(s), err)
	}
	return append(slices.Clone(secret.Data[corev1.TLSCertKey]), ca...), ca, nil
}

// progress says how far the server is, and returns its pod if that is ready.
func (d *Deployer) progress(ctx context.Context, s *v1alpha1.IdempotencyStore, set *appsv1.StatefulSet, wrote bool) (*corev1.Pod, Deployed, error) {
	name := types.NamespacedName{Namespace: s.Namespace, Name: workload.PodName(s)}
	var pod corev1.Pod
	err := d.live.Get(ctx, name, &pod)
	if apierrors.IsNotFound(err) {
		return nil, Deployed{Reason: reasonStarting, Message: fmt.Sprintf(
			"Pod %s has not been made yet. If it lasts, kubectl describe statefulset %s --namespace=%s says why.", name, workload.Name(s), s.Namespace)}, nil
	}
	if err != nil {
		return nil, Deployed{}, fmt.Errorf("read Pod %s: %w", name, err)
	}
	ready := podIs(&pod, corev1.PodReady) && pod.DeletionTimestamp == nil
	current := !wrote && set.Status.ObservedGeneration >= set.Generation && set.Status.UpdateRevision != "" &&
		pod.Labels[appsv1.ControllerRevisionHashLabelKey] == set.Status.UpdateRevision
	switch {
	case ready && current:
		return &pod, Deployed{Ready: true, Reason: reasonRunning, Message: fmt.Sprintf("Pod %s is ready and as the spec says.", name)}, nil
	case ready:
		return &pod, Deployed{Reason: reasonStarting, Message: fmt.Sprintf("Pod %s is ready, and about to be replaced by one that is as the spec says.", name)}, nil
	}
	if why := trouble(s, &pod); why != "" {
		return nil, Deployed{Reason: reasonNotStarting, Message: fmt.Sprintf("Pod %s: %s", name, why)}, nil
	}
	return nil, Deployed{Reason: reasonStarting, Message: fmt.Sprintf(
		"Pod %s is not ready yet. If it lasts, kubectl logs %s --namespace=%s says why.", name, name.Name, name.Namespace)}, nil
}

func podIs(pod *corev1.Pod, condition corev1.PodConditionType) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == condition {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// lastWords is as much of a container's last output as a condition shows.
const lastWords = 600

// trouble is why a pod does not become ready, as far as its status tells.
func trouble(s *v1alpha1.IdempotencyStore, pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return "it has no node: " + c.Message
		}
	}
	for i := range pod.Status.ContainerStatuses {
		c := &pod.Status.ContainerStatuses[i]
		if c.Name != workload.ContainerName() {
			continue
		}
		ended := c.State.Terminated
		if ended == nil {
			ended = c.LastTerminationState.Terminated
		}
		waits := c.State.Waiting
		switch {
		case ended != nil && ended.Reason == "OOMKilled":
			return "the server was ended because it took more memory than resources.limits.memory; raise it"
		case ended != nil && (waits != nil || c.State.Terminated != nil):
			said := strings.TrimSpace(ended.Message)
			if from := len(said) - lastWords; from > 0 {
				said = "…" + strings.ToValidUTF8(said[from:], "")
			}
			if s.Spec.Postgres != nil && strings.Contains(ended.Message, "database files are incompatible with server") {
				return "the volume was written by another major version of PostgreSQL than that of " + workload.Image(s) +
					": set the image back to that version; another one needs its own migration, such as pg_dump into a new store. The server said: " + said
			}
			return fmt.Sprintf("the server ended with code %d, after it had said: %s", ended.ExitCode, said)
		case waits != nil && waits.Reason != "ContainerCreating" && waits.Reason != "PodInitializing":
			return fmt.Sprintf("%s: %s", waits.Reason, waits.Message)
		}
	}
	return ""
}
