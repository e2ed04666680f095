// A world is a namespace with a store that the operator deploys, a budget, a tool, an agent
// and a person who resolves. What was paid and held in it before the drills began stands
// there throughout, and is looked at after each.

package cluster

import (
	"context"
	"fmt"
	"path"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// storeKind is a kind of store that the operator deploys.
type storeKind string

const (
	redis    storeKind = "redis"
	postgres storeKind = "postgres"
)

const (
	// system is Holdfast's own namespace.
	system          = "holdfast-system"
	controllersName = "holdfast-controllers"
	gatewayName     = "holdfast-gateway"

	storeName  = "payments"
	budgetName = "money"
	charge     = "charge"
	agentName  = "agent"
	audience   = "holdfast"
	// resolver is a person who may resolve.
	resolver = "alice"

	// volumesClass is of the volumes that are directories of a node.
	volumesClass = "drill-local"
	volumesDir   = "/var/lib/holdfast-volumes"

	upstreamTimeout = 10 * time.Second
	settleAfter     = time.Second
)

// undecided is how long an intent may be undecided after its last call: timeout, settlement, margin
// and grace as they are when nobody sets them, and time to sweep.
var undecided = upstreamTimeout + 5*time.Second + 30*time.Second

// steady and storage are nodes: provider and agents run on the first, which is never broken,
// and the stores' volumes are on the second.
func steadyNode() string  { return box.Names()[0] }
func storageNode() string { return box.Names()[1] }

type world struct {
	on        storeKind
	namespace string
	// volume is the name of the PersistentVolume, and of its directory.
	volume string
	// token is the agent's, for the judge.
	token string

	// paid and held stand since before the drills.
	paid []standingPayment
	held []standingHold
}

type standingPayment struct {
	call call
	body string
}

type standingHold struct {
	call call
	name string
	spec v1alpha1.PaymentHoldSpec
}

// onRedis and onPostgres live as long as the suite.
var onRedis, onPostgres *world

// worlds are those that live as long as the suite.
func worlds() []*world { return []*world{onRedis, onPostgres} }

// prepare makes the provider and the worlds.
func prepare(ctx context.Context) {
	GinkgoHelper()
	startProvider(ctx)
	made := make(chan *world, 2)
	for _, on := range []storeKind{redis, postgres} {
		go func() {
			defer GinkgoRecover()
			w := &world{on: on, namespace: "drill-" + string(on)}
			defer func() { made <- w }()
			w.apply(ctx)
		}()
	}
	for range 2 {
		if w := <-made; w.on == redis {
			onRedis = w
		} else {
			onPostgres = w
		}
	}
	for _, w := range worlds() {
		w.stand(ctx)
	}
	onRedis.resolutionsAreStamped(ctx)
}

// resolutionsAreStamped waits until a resolution can be written: the API server learns of a
// kind's schema, which it needs for the stamp, some seconds after the kind is there, and
// refuses all resolutions until then.
func (w *world) resolutionsAreStamped(ctx context.Context) {
	GinkgoHelper()
	order := fmt.Sprintf("stamped-%d", time.Now().UnixMilli())
	w.pay(ctx, call{id: order, body: w.order(order, "10.00")}, 201, allow)
	hold := w.pay(ctx, call{id: order + "-again", body: w.order(order, "11.00")}, 409, unknownHold).problem().Hold
	w.holdIs(ctx, hold, v1alpha1.HoldHeld)
	Eventually(func(ctx context.Context) error { return w.resolve(ctx, resolver, hold, "Reject") }).WithContext(ctx).Should(Succeed())
}

// ensure makes what is not there yet.
func ensure(ctx context.Context, objects ...client.Object) {
	GinkgoHelper()
	for _, o := range objects {
		err := admin.Create(ctx, o, client.FieldValidation(metav1.FieldValidationStrict))
		if !apierrors.IsAlreadyExists(err) {
			Expect(err).NotTo(HaveOccurred(), "%T %s", o, o.GetName())
		}
	}
}

func (w *world) in(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.namespace, Name: name}
}

func (w *world) volumeDir() string { return path.Join(volumesDir, w.volume) }

// apply makes what of the world is not there, and waits until its tool can be called.
func (w *world) apply(ctx context.Context) {
	GinkgoHelper()
	w.made(ctx)
	w.ready(ctx)
}

// made makes what of the world is not there.
func (w *world) made(ctx context.Context) {
	GinkgoHelper()
	ensure(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: w.namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}})
	w.applyVolume(ctx)
	system := func(account string) rbacv1.Subject {
		return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: system, Name: account}
	}
	ensure(ctx, &corev1.ServiceAccount{ObjectMeta: w.in(agentName)},
		// What the samples have: the operator may deploy here, and the gateways read the store's Secret.
		&rbacv1.Role{ObjectMeta: w.in("holdfast-credentials"), Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{storeName + "-" + string(w.on)}, Verbs: []string{"get"},
		}}},
		&rbacv1.RoleBinding{
			ObjectMeta: w.in("holdfast-credentials"), Subjects: []rbacv1.Subject{system("holdfast-gateway")},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "holdfast-credentials"},
		},
		w.binding("holdfast-store-deployer", system("holdfast-manager")),
		w.binding("holdfast-agent", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.namespace, Name: agentName}),
		w.binding("holdfast-resolver", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: resolver}),
		w.store(),
		&v1alpha1.IntentBudget{
			ObjectMeta: w.in(budgetName),
			Spec: v1alpha1.IntentBudgetSpec{
				StoreRef: v1alpha1.StoreReference{Name: storeName},
				// Drills that are made many times leave their holds.
				MaxHeld: &v1alpha1.MaxHeldSpec{Total: ptr.To(int32(2000)), PerCaller: ptr.To(int32(2000))},
			},
		},
		w.tool(),
	)
	w.trustGateways(ctx)
	w.token = tokenOf(ctx, w.namespace, agentName)
}

func (w *world) binding(role string, subject rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: w.in(role), Subjects: []rbacv1.Subject{subject},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
	}
}

// applyVolume makes a directory of a node the volume of this world's store alone.
func (w *world) applyVolume(ctx context.Context) {
	GinkgoHelper()
	ensure(ctx, &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: volumesClass}, Provisioner: "kubernetes.io/no-provisioner",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	})
	w.volume = w.namespace + "-" + storeName
	_, err := box.Exec(ctx, storageNode(), "mkdir", "-p", w.volumeDir())
	Expect(err).NotTo(HaveOccurred())
	ensure(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: w.volume},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName:              volumesClass,
			ClaimRef: &corev1.ObjectReference{
				Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: w.namespace, Name: "data-" + w.storePod(),
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: w.volumeDir()}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{storageNode()},
				}},
			}}}},
		},
	})
}

// storeService is the name of the store's Service and of its StatefulSet, and storePod of its one pod.
func (w *world) storeService() string { return storeName + "-" + string(w.on) }
func (w *world) storePod() string     { return w.storeService() + "-0" }

func (w *world) store() *v1alpha1.IdempotencyStore {
	s := &v1alpha1.IdempotencyStore{ObjectMeta: w.in(storeName)}
	storage := v1alpha1.StoreStorage{Size: "1Gi", ClassName: volumesClass}
	small := &v1alpha1.StoreResources{
		Requests: &v1alpha1.ResourceAmounts{CPU: "50m", Memory: "128Mi"}, Limits: &v1alpha1.ResourceAmounts{Memory: "512Mi"},
	}
	image := "holdfast-dev/" + string(w.on) + ":dev"
	if w.on == redis {
		s.Spec.Redis = &v1alpha1.RedisStore{Deploy: &v1alpha1.RedisDeployment{Image: image, Storage: storage, Resources: small}}
	} else {
		s.Spec.Postgres = &v1alpha1.PostgresStore{Deploy: &v1alpha1.PostgresDeployment{Image: image, Storage: storage, Resources: small}}
	}
	return s
}

func (w *world) tool() *v1alpha1.AgentTool {
	return &v1alpha1.AgentTool{
		ObjectMeta: w.in(charge),
		Spec: v1alpha1.AgentToolSpec{
			Effect:          v1alpha1.EffectMutating,
			IntentBudgetRef: &v1alpha1.BudgetReference{Name: budgetName},
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL:         providerURL + "/charges",
				Methods:     []v1alpha1.HTTPMethod{"POST"},
				Timeout:     &metav1.Duration{Duration: upstreamTimeout},
				SettleAfter: &metav1.Duration{Duration: settleAfter},
				// The last one chooses what goes wrong at the provider.
				RequestHeaders: []v1alpha1.RequestHeader{"accept", "content-type", "provider-fault"},
			}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID:  []v1alpha1.Expression{`call.header["idempotency-key"]`},
				Scope:     []v1alpha1.Expression{`path("account", call.body.accountId, "order", call.body.orderId)`},
				Amount:    &v1alpha1.AmountExpressions{Value: `call.body.amount`, Currency: `"USD"`, Unit: v1alpha1.UnitMajor},
				Recipient: `call.body.accountId`,
			},
			Idempotency: &v1alpha1.IdempotencySpec{Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"}},
		},
	}
}

// ready waits until the tool can be called, and at each gateway that there is.
func (w *world) ready(ctx context.Context) {
	GinkgoHelper()
	Eventually(w.isReady).WithContext(ctx).WithTimeout(4 * time.Minute).Should(Succeed())
	Eventually(func(ctx context.Context) error {
		got := w.poll(ctx, "nobody")
		if got.err != nil || got.status != 404 {
			return fmt.Errorf("the gateways do not serve it: %s", got)
		}
		return nil
	}).WithContext(ctx).Should(Succeed())
}

func (w *world) isReady(ctx context.Context) error {
	var tool v1alpha1.AgentTool
	if err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: charge}, &tool); err != nil {
		return err
	}
	var store v1alpha1.IdempotencyStore
	if err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: storeName}, &store); err != nil {
		return err
	}
	for _, of := range []struct {
		name       string
		generation int64
		conditions []metav1.Condition
	}{{"AgentTool", tool.Generation, tool.Status.Conditions}, {"IdempotencyStore", store.Generation, store.Status.Conditions}} {
		c := apimeta.FindStatusCondition(of.conditions, v1alpha1.ConditionReady)
		if c == nil || c.Status != metav1.ConditionTrue || c.ObservedGeneration != of.generation {
			var all []string
			for _, c := range of.conditions {
				all = append(all, fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message))
			}
			return fmt.Errorf("%s in %s is not ready: %s", of.name, w.namespace, strings.Join(all, "; "))
		}
	}
	return nil
}

// tokenOf is a token as the kubelet gives a pod of this ServiceAccount, for whoever judges from outside.
func tokenOf(ctx context.Context, namespace, account string) string {
	GinkgoHelper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		Audiences: []string{audience}, ExpirationSeconds: ptr.To(int64((12 * time.Hour).Seconds())),
	}}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}
	Expect(admin.SubResource("token").Create(ctx, sa, request)).To(Succeed())
	return request.Status.Token
}

// stand makes payments and holds that stay for as long as the world does.
func (w *world) stand(ctx context.Context) {
	GinkgoHelper()
	began := time.Now().Format("150405")
	for i := range 3 {
		order := fmt.Sprintf("standing-%s-%d", began, i)
		first := call{id: order, body: w.order(order, "10.00")}
		got := w.pay(ctx, first, 201, allow)
		w.paid = append(w.paid, standingPayment{call: first, body: got.body})
		second := call{id: order + "-again", body: w.order(order, "11.00")}
		name := w.pay(ctx, second, 409, unknownHold).problem().Hold
		w.held = append(w.held, standingHold{call: second, name: name, spec: w.holdIs(ctx, name, v1alpha1.HoldHeld).Spec})
	}
}

// order is the body of a payment for an order of this world's account.
func (w *world) order(order, amount string) string {
	return fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%q}`, w.namespace, order, amount)
}

func (w *world) hold(ctx context.Context, name string) (*v1alpha1.PaymentHold, error) {
	var h v1alpha1.PaymentHold
	return &h, admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &h)
}

// holdIs waits until a PaymentHold is in a state, and returns it.
func (w *world) holdIs(ctx context.Context, name string, state v1alpha1.HoldState) *v1alpha1.PaymentHold {
	GinkgoHelper()
	var h *v1alpha1.PaymentHold
	Eventually(func(ctx context.Context) (v1alpha1.HoldState, error) {
		var err error
		h, err = w.hold(ctx, name)
		return h.Status.State, err
	}).WithContext(ctx).Should(Equal(state), func() string { return fmt.Sprintf("%s: %+v", name, h.Status) })
	return h
}

// resolve is what a person types.
func (w *world) resolve(ctx context.Context, as, hold, decision string) error {
	GinkgoHelper()
	return w.decide(ctx, as, hold, fmt.Sprintf(`{"decision":%q,"reason":"looked at it"}`, decision))
}

// decide writes a resolution on a hold once it is shown, which is soon after a caller was told of it.
func (w *world) decide(ctx context.Context, as, hold, resolution string) error {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		_, err := w.hold(ctx, hold)
		return err
	}).WithContext(ctx).Should(Succeed())
	_, err := kubectlAs(ctx, as, "patch", "--namespace="+w.namespace, "hold", hold, "--type=merge",
		`--patch={"spec":{"resolution":`+resolution+`}}`)
	return err
}
