// Package workload knows what a deployed store is made of: the objects that have a
// cluster run its server, and the Secret with which it is spoken to. All of it is pure
// functions of the IdempotencyStore; who applies it is another's matter.
//
// What must hold: all objects but the Secret, and the volume that the StatefulSet makes,
// belong to the IdempotencyStore and go with it. The Secret and the volume outlive it,
// so that a store that is made again finds its records.
//
// This file is what both kinds of server have in common.
package workload

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsv1ac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	networkingv1ac "k8s.io/client-go/applyconfigurations/networking/v1"
	policyv1ac "k8s.io/client-go/applyconfigurations/policy/v1"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// The labels and annotations of what is deployed.
const (
	// StoreLabel names the IdempotencyStore.
	StoreLabel = v1alpha1.GroupName + "/store"
	// ManagedByLabel is on everything that the operator makes.
	ManagedByLabel = "app.kubernetes.io/managed-by"
	// ManagedBy is its value.
	ManagedBy = "holdfast"
	// NameLabel tells the operator's pods, where its value is Operator, from those of its stores.
	NameLabel = "app.kubernetes.io/name"
	// Operator is the value of NameLabel on the operator's and the gateways' pods: they alone may connect.
	Operator = "holdfast"
	// ContentAnnotation has the pod begin anew when what it read at its start has changed.
	ContentAnnotation = v1alpha1.GroupName + "/content"
)

const (
	// container is the name of the pod's only container.
	container = "server"
	// volume is the name of the data volume, and of the claim in the StatefulSet's template.
	volume = "data"
	// user runs the server. The official images of Valkey, Redis and PostgreSQL (Debian) have it.
	user = 999

	contentDir = "/etc/holdfast"
	// Not inside of each other: a mount point cannot be made in one that is read-only.
	secretDir = "/etc/holdfast-secret"
	tlsDir    = "/etc/holdfast-tls"
)

// lockScript has one server at a time on a volume. Both kinds of server are started by it.
//
//go:embed files/lock.sh
var lockScript string

// kind is what differs between the servers.
type kind struct {
	// name is the suffix of all names, and the value of NameLabel.
	name    string
	port    int32
	image   string
	storage v1alpha1.StoreStorage
	// resources with the effective values.
	resources *v1alpha1.StoreResources
}

var (
	redisResources = v1alpha1.StoreResources{
		Requests: &v1alpha1.ResourceAmounts{CPU: "100m", Memory: "256Mi"}, Limits: &v1alpha1.ResourceAmounts{Memory: "512Mi"},
	}
	postgresResources = v1alpha1.StoreResources{
		Requests: &v1alpha1.ResourceAmounts{CPU: "250m", Memory: "256Mi"}, Limits: &v1alpha1.ResourceAmounts{Memory: "1Gi"},
	}
)

// kindOf is the zero kind for a store that is not deployed.
func kindOf(store *v1alpha1.IdempotencyStore) kind {
	var k kind
	switch {
	case store.Spec.Redis != nil && store.Spec.Redis.Deploy != nil:
		d := store.Spec.Redis.Deploy
		k = kind{name: "redis", port: RedisPort, image: RedisImage, storage: d.Storage, resources: &redisResources}
		k.override(d.Image, d.Resources)
	case store.Spec.Postgres != nil && store.Spec.Postgres.Deploy != nil:
		d := store.Spec.Postgres.Deploy
		k = kind{name: "postgres", port: PostgresPort, image: PostgresImage, storage: d.Storage, resources: &postgresResources}
		k.override(d.Image, d.Resources)
	}
	return k
}

func (k *kind) override(image string, resources *v1alpha1.StoreResources) {
	if image != "" {
		k.image = image
	}
	if resources != nil {
		k.resources = resources
	}
}

// Deployed says whether the operator runs the store's server.
func Deployed(store *v1alpha1.IdempotencyStore) bool { return kindOf(store).name != "" }

// Name is that of the StatefulSet, the client Service, the ConfigMap, the NetworkPolicy
// and the PodDisruptionBudget.
func Name(store *v1alpha1.IdempotencyStore) string { return store.Name + "-" + kindOf(store).name }

// SecretName is that of the Secret with the passwords.
func SecretName(store *v1alpha1.IdempotencyStore) string { return Name(store) }

// HeadlessName is that of the Service which gives the pod its own name.
func HeadlessName(store *v1alpha1.IdempotencyStore) string { return Name(store) + "-headless" }

// PodName is that of the only pod.
func PodName(store *v1alpha1.IdempotencyStore) string { return Name(store) + "-0" }

// ClaimName is that of the PersistentVolumeClaim.
func ClaimName(store *v1alpha1.IdempotencyStore) string { return volume + "-" + PodName(store) }

// VolumeName is that of the data volume in the pod.
func VolumeName() string { return volume }

// ContainerName is that of the server's container.
func ContainerName() string { return container }

// Host is the name at which clients reach the server; a certificate must be for it.
func Host(store *v1alpha1.IdempotencyStore) string {
	return Name(store) + "." + store.Namespace + ".svc"
}

// Endpoint is host and port of the server.
func Endpoint(store *v1alpha1.IdempotencyStore) string {
	return Host(store) + ":" + strconv.Itoa(int(kindOf(store).port))
}

// Image is the container image that is effective.
func Image(store *v1alpha1.IdempotencyStore) string { return kindOf(store).image }

// Storage is the volume that the spec asks for.
func Storage(store *v1alpha1.IdempotencyStore) v1alpha1.StoreStorage { return kindOf(store).storage }

// Labels are on everything that belongs to the store.
func Labels(store *v1alpha1.IdempotencyStore) map[string]string {
	return map[string]string{
		NameLabel:                     kindOf(store).name,
		"app.kubernetes.io/instance":  store.Name,
		"app.kubernetes.io/component": "store",
		ManagedByLabel:                ManagedBy,
		StoreLabel:                    store.Name,
	}
}

// selector finds the store's pods. It can never change: a StatefulSet's is immutable.
func selector(store *v1alpha1.IdempotencyStore) map[string]string {
	return map[string]string{NameLabel: kindOf(store).name, StoreLabel: store.Name}
}

// Inputs are what the objects follow from.
type Inputs struct {
	Store *v1alpha1.IdempotencyStore
	// OperatorNamespace is where the operator and the gateways run.
	OperatorNamespace string
	// TemplateSize is the size in the claim template of the StatefulSet that is there; "": there
	// is none. The template cannot change: a volume grows by its claim alone.
	TemplateSize string
	// Certificate is what the server shows and is verified with; a renewed one has the pod begin anew.
	Certificate []byte
}

// Objects are what the operator applies.
type Objects struct {
	ConfigMap           *corev1ac.ConfigMapApplyConfiguration
	NetworkPolicy       *networkingv1ac.NetworkPolicyApplyConfiguration
	Headless, Client    *corev1ac.ServiceApplyConfiguration
	PodDisruptionBudget *policyv1ac.PodDisruptionBudgetApplyConfiguration
	StatefulSet         *appsv1ac.StatefulSetApplyConfiguration
}

// Render makes the objects of a deployed store.
func Render(in Inputs) (Objects, error) {
	k := kindOf(in.Store)
	var (
		content map[string]string
		pod     *corev1ac.PodSpecApplyConfiguration
		err     error
	)
	switch k.name {
	case "redis":
		content, pod, err = renderRedis(in, k)
	case "postgres":
		content, pod, err = renderPostgres(in, k)
	default:
		err = fmt.Errorf("IdempotencyStore %s/%s is not deployed", in.Store.Namespace, in.Store.Name)
	}
	if err != nil {
		return Objects{}, err
	}
	s := in.Store
	size := k.storage.Size
	if in.TemplateSize != "" {
		size = in.TemplateSize
	}
	claim, err := claimTemplate(k.storage.ClassName, size)
	if err != nil {
		return Objects{}, err
	}
	owner := metav1ac.OwnerReference().WithAPIVersion(v1alpha1.GroupVersion.String()).WithKind("IdempotencyStore").
		WithName(s.Name).WithUID(s.UID).WithController(true)
	labels := Labels(s)

	return Objects{
		ConfigMap: corev1ac.ConfigMap(Name(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).WithData(content),
		Headless: corev1ac.Service(HeadlessName(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).
			WithSpec(corev1ac.ServiceSpec().WithClusterIP(corev1.ClusterIPNone).WithPublishNotReadyAddresses(true).
				WithSelector(selector(s)).WithPorts(servicePort(k))),
		Client: corev1ac.Service(Name(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).
			WithSpec(corev1ac.ServiceSpec().WithType(corev1.ServiceTypeClusterIP).WithSelector(selector(s)).WithPorts(servicePort(k))),
		NetworkPolicy: networkingv1ac.NetworkPolicy(Name(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).
			WithSpec(networkingv1ac.NetworkPolicySpec().
				WithPodSelector(metav1ac.LabelSelector().WithMatchLabels(selector(s))).
				// Egress without a rule: the server calls nobody, not even the DNS.
				WithPolicyTypes(networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress).
				WithIngress(networkingv1ac.NetworkPolicyIngressRule().
					WithFrom(networkingv1ac.NetworkPolicyPeer().
						WithNamespaceSelector(metav1ac.LabelSelector().WithMatchLabels(map[string]string{corev1.LabelMetadataName: in.OperatorNamespace})).
						WithPodSelector(metav1ac.LabelSelector().WithMatchLabels(map[string]string{NameLabel: Operator}))).
					WithPorts(networkingv1ac.NetworkPolicyPort().WithProtocol(corev1.ProtocolTCP).WithPort(intstr.FromInt32(k.port))))),
		// The one server is not evicted by the way. A person who drains its node deletes the pod; one
		// that is not ready is in nobody's way.
		PodDisruptionBudget: policyv1ac.PodDisruptionBudget(Name(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).
			WithSpec(policyv1ac.PodDisruptionBudgetSpec().WithMinAvailable(intstr.FromInt32(1)).
				WithUnhealthyPodEvictionPolicy(policyv1.AlwaysAllow).
				WithSelector(metav1ac.LabelSelector().WithMatchLabels(selector(s)))),
		StatefulSet: appsv1ac.StatefulSet(Name(s), s.Namespace).WithLabels(labels).WithOwnerReferences(owner).
			WithSpec(appsv1ac.StatefulSetSpec().
				WithReplicas(1).
				WithServiceName(HeadlessName(s)).
				// So that a pod that never becomes ready, such as one of a wrong image, is replaced when
				// the spec is mended: an ordered StatefulSet waits for it first.
				WithPodManagementPolicy(appsv1.ParallelPodManagement).
				WithUpdateStrategy(appsv1ac.StatefulSetUpdateStrategy().WithType(appsv1.RollingUpdateStatefulSetStrategyType)).
				WithPersistentVolumeClaimRetentionPolicy(appsv1ac.StatefulSetPersistentVolumeClaimRetentionPolicy().
					WithWhenDeleted(appsv1.RetainPersistentVolumeClaimRetentionPolicyType).
					WithWhenScaled(appsv1.RetainPersistentVolumeClaimRetentionPolicyType)).
				WithSelector(metav1ac.LabelSelector().WithMatchLabels(selector(s))).
				WithTemplate(corev1ac.PodTemplateSpec().
					WithLabels(labels).
					WithAnnotations(map[string]string{ContentAnnotation: digest(content, in.Certificate)}).
					WithSpec(pod)).
				WithVolumeClaimTemplates(claim)),
	}, nil
}

func servicePort(k kind) *corev1ac.ServicePortApplyConfiguration {
	return corev1ac.ServicePort().WithName(k.name).WithProtocol(corev1.ProtocolTCP).WithPort(k.port).WithTargetPort(intstr.FromString(k.name))
}

// claimTemplate has no labels: it can never change.
func claimTemplate(class, size string) (*corev1ac.PersistentVolumeClaimApplyConfiguration, error) {
	q, err := resource.ParseQuantity(size)
	if err != nil {
		return nil, fmt.Errorf("storage.size %q: %w", size, err)
	}
	spec := corev1ac.PersistentVolumeClaimSpec().WithAccessModes(corev1.ReadWriteOnce).WithVolumeMode(corev1.PersistentVolumeFilesystem).
		WithResources(corev1ac.VolumeResourceRequirements().WithRequests(corev1.ResourceList{corev1.ResourceStorage: q}))
	if class != "" {
		spec.WithStorageClassName(class)
	}
	// As the API server has it in a StatefulSet.
	claim := &corev1ac.PersistentVolumeClaimApplyConfiguration{ObjectMetaApplyConfiguration: &metav1ac.ObjectMetaApplyConfiguration{}}
	return claim.WithAPIVersion("v1").WithKind("PersistentVolumeClaim").WithName(volume).WithSpec(spec), nil
}

// digest tells one content from another.
func digest(content map[string]string, more ...[]byte) string {
	sum := sha256.New()
	write := func(b []byte) { sum.Write(fmt.Appendf(nil, "%d:%s", len(b), b)) }
	for _, name := range slices.Sorted(maps.Keys(content)) {
		write([]byte(name))
		write([]byte(content[name]))
	}
	for _, b := range more {
		write(b)
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// pod is what the pods of both kinds have in common: the restricted pod security standard,
// and no way to the API server.
func pod(grace int64, c *corev1ac.ContainerApplyConfiguration, volumes ...*corev1ac.VolumeApplyConfiguration) *corev1ac.PodSpecApplyConfiguration {
	c.WithName(container).
		WithImagePullPolicy(corev1.PullIfNotPresent).
		// What it said last is in the pod's status, and from there in the condition.
		WithTerminationMessagePolicy(corev1.TerminationMessageFallbackToLogsOnError).
		WithSecurityContext(corev1ac.SecurityContext().
			WithRunAsNonRoot(true).WithPrivileged(false).WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).
			WithCapabilities(corev1ac.Capabilities().WithDrop("ALL")))
	return corev1ac.PodSpec().
		WithAutomountServiceAccountToken(false).
		WithEnableServiceLinks(false).
		WithTerminationGracePeriodSeconds(grace).
		WithSecurityContext(corev1ac.PodSecurityContext().
			WithRunAsNonRoot(true).WithRunAsUser(user).WithRunAsGroup(user).WithFSGroup(user).
			WithFSGroupChangePolicy(corev1.FSGroupChangeOnRootMismatch).
			WithSeccompProfile(corev1ac.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
		WithContainers(c).
		WithVolumes(volumes...)
}

func contentVolume(s *v1alpha1.IdempotencyStore) *corev1ac.VolumeApplyConfiguration {
	return corev1ac.Volume().WithName("content").WithConfigMap(corev1ac.ConfigMapVolumeSource().WithName(Name(s)).WithDefaultMode(0o444))
}

// secretVolume shows the server these keys alone.
func secretVolume(secret, name string, keys ...string) *corev1ac.VolumeApplyConfiguration {
	source := corev1ac.SecretVolumeSource().WithSecretName(secret).WithDefaultMode(0o440)
	for _, key := range keys {
		source.WithItems(corev1ac.KeyToPath().WithKey(key).WithPath(key))
	}
	return corev1ac.Volume().WithName(name).WithSecret(source)
}

func mount(name, path string, readOnly bool) *corev1ac.VolumeMountApplyConfiguration {
	m := corev1ac.VolumeMount().WithName(name).WithMountPath(path)
	if readOnly {
		m.WithReadOnly(true)
	}
	return m
}

func scratch(name string) *corev1ac.VolumeApplyConfiguration {
	return corev1ac.Volume().WithName(name).WithEmptyDir(corev1ac.EmptyDirVolumeSource().WithSizeLimit(resource.MustParse("16Mi")))
}

// probes: the server has bound seconds to begin to answer; while it loads it answers; and
// it is killed only when it says nothing at all for minutes, which a slow disk is not cured by.
func probes(c *corev1ac.ContainerApplyConfiguration, script string, startSeconds int32) {
	probe := func(what string) *corev1ac.ProbeApplyConfiguration {
		return corev1ac.Probe().WithExec(corev1ac.ExecAction().WithCommand("sh", contentDir+"/"+script, what))
	}
	c.WithStartupProbe(probe("alive").WithPeriodSeconds(2).WithTimeoutSeconds(5).WithFailureThreshold(startSeconds / 2)).
		WithReadinessProbe(probe("ready").WithPeriodSeconds(5).WithTimeoutSeconds(5).WithFailureThreshold(2)).
		WithLivenessProbe(probe("alive").WithPeriodSeconds(10).WithTimeoutSeconds(10).WithFailureThreshold(18))
}

// amounts are a container's resources.
func amounts(r *v1alpha1.StoreResources) (*corev1ac.ResourceRequirementsApplyConfiguration, error) {
	out := corev1ac.ResourceRequirements()
	list := func(field string, a *v1alpha1.ResourceAmounts) (corev1.ResourceList, error) {
		l := corev1.ResourceList{}
		if a == nil {
			return l, nil
		}
		for name, text := range map[corev1.ResourceName]string{corev1.ResourceCPU: a.CPU, corev1.ResourceMemory: a.Memory} {
			if text == "" {
				continue
			}
			q, err := resource.ParseQuantity(text)
			if err != nil {
				return nil, fmt.Errorf("resources.%s.%s %q: %w", field, name, text, err)
			}
			l[name] = q
		}
		return l, nil
	}
	requests, err := list("requests", r.Requests)
	if err != nil {
		return nil, err
	}
	limits, err := list("limits", r.Limits)
	if err != nil {
		return nil, err
	}
	if len(requests) > 0 {
		out.WithRequests(requests)
	}
	if len(limits) > 0 {
		out.WithLimits(limits)
	}
	return out, nil
}

// memoryLimit is in bytes; 0: none.
func memoryLimit(r *v1alpha1.StoreResources) (int64, error) {
	if r.Limits == nil || r.Limits.Memory == "" {
		return 0, nil
	}
	q, err := resource.ParseQuantity(r.Limits.Memory)
	if err != nil {
		return 0, fmt.Errorf("resources.limits.memory %q: %w", r.Limits.Memory, err)
	}
	return q.Value(), nil
}

// IsController says whether an object belongs to this store.
func IsController(store *v1alpha1.IdempotencyStore, object metav1.Object) bool {
	return metav1.IsControlledBy(object, store)
}

// Orphan says whether an object was made for a store of this name, and belongs to nobody now:
// the store was deleted and what it owned was left behind.
func Orphan(store *v1alpha1.IdempotencyStore, object metav1.Object) bool {
	labels := object.GetLabels()
	return metav1.GetControllerOf(object) == nil && labels[ManagedByLabel] == ManagedBy && labels[StoreLabel] == store.Name
}

// DataDir is where the server's container has its data volume.
func DataDir(store *v1alpha1.IdempotencyStore) string {
	if store.Spec.Redis != nil {
		return redisData
	}
	return postgresData
}
