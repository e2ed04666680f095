// A world is a namespace of its own for a spec: a store, a budget, an agent, and
// somebody who resolves, so that no spec meets the payments of another.

package e2e

import (
	"context"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	storeName  = "payments"
	budgetName = "money"
	// charge is the tool that every world has.
	charge = "charge"
	// resolver is a person who may resolve.
	resolver = "alice"
	audience = "holdfast"

	upstreamTimeout = 2 * time.Second
	settleAfter     = time.Second
	// lease is how long an attempt of a world's tools has.
	lease = upstreamTimeout + settlement + margin
)

type world struct {
	// namespace is also the account of all payments of this world, which tells them apart in the ledger.
	namespace string
	// token is the agent's.
	token string
}

// setting changes what a world is made of.
type setting func(*v1alpha1.IntentBudget, *v1alpha1.AgentTool)

// unhurried gives attempts all the time that a spec may take: what waits at the provider ends when it is let go, and not
// before, however busy the machine is.
func unhurried(_ *v1alpha1.IntentBudget, tool *v1alpha1.AgentTool) {
	tool.Spec.Upstream.HTTP.Timeout = &metav1.Duration{Duration: time.Minute}
	tool.Spec.Idempotency.InFlight.Timeout = &metav1.Duration{Duration: time.Minute}
}

// newWorld makes a namespace with a store, a budget and the tool charge, and waits until it can be called.
func newWorld(ctx context.Context, settings ...setting) *world {
	GinkgoHelper()
	return newWorldOn(ctx, shared, settings...)
}

// newWorldOn is newWorld with its store on a server of its own.
func newWorldOn(ctx context.Context, on memory, settings ...setting) *world {
	GinkgoHelper()
	w := bareWorld(ctx)
	budget := &v1alpha1.IntentBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: budgetName},
		Spec:       v1alpha1.IntentBudgetSpec{StoreRef: v1alpha1.StoreReference{Name: storeName}},
	}
	tool := w.paymentTool(charge, "/charges")
	for _, set := range settings {
		set(budget, tool)
	}
	w.newStore(ctx, on)
	create(ctx, budget)
	w.add(ctx, tool)
	return w
}

// bareWorld is a namespace with an agent that may invoke and a person who may resolve.
func bareWorld(ctx context.Context) *world {
	GinkgoHelper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}
	create(ctx, ns)
	w := &world{namespace: ns.Name}
	DeferCleanup(func(ctx context.Context) {
		Expect(client.IgnoreNotFound(admin.Delete(ctx, ns))).To(Succeed())
	})
	w.serviceAccount(ctx, "agent", "holdfast-agent")
	w.bind(ctx, "holdfast-resolver", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: resolver})
	w.token = w.tokenOf(ctx, "agent", audience)
	return w
}

func create(ctx context.Context, obj client.Object) {
	GinkgoHelper()
	Expect(admin.Create(ctx, obj, client.FieldValidation(metav1.FieldValidationStrict))).To(Succeed())
}

// serviceAccount makes one, bound to ClusterRoles in this namespace.
func (w *world) serviceAccount(ctx context.Context, name string, roles ...string) {
	GinkgoHelper()
	create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}})
	for _, role := range roles {
		w.bind(ctx, role, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.namespace, Name: name})
	}
}

// bind gives somebody a role, and waits until the API server's authorizer knows: nobody is to be refused because it is new.
func (w *world) bind(ctx context.Context, role string, subject rbacv1.Subject) {
	GinkgoHelper()
	create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, GenerateName: role + "-"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{subject},
	})
	may := map[string]authorizationv1.ResourceAttributes{
		"holdfast-agent":    {Verb: "invoke", Resource: "agenttools"},
		"holdfast-resolver": {Verb: "resolve", Resource: "paymentholds"},
	}
	Expect(may).To(HaveKey(role))
	what := may[role]
	what.Group, what.Namespace = v1alpha1.GroupName, w.namespace
	user := subject.Name
	if subject.Kind == rbacv1.ServiceAccountKind {
		user = "system:serviceaccount:" + subject.Namespace + ":" + subject.Name
	}
	Eventually(func(ctx context.Context) (bool, error) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &what}}
		err := admin.Create(ctx, review)
		return review.Status.Allowed, err
	}).WithContext(ctx).Should(BeTrue(), "%s as %s", user, role)
}

func (w *world) tokenOf(ctx context.Context, serviceAccount string, audiences ...string) string {
	GinkgoHelper()
	token, err := all.Token(ctx, w.namespace, serviceAccount, time.Hour, audiences...)
	Expect(err).NotTo(HaveOccurred())
	return token
}

// paymentTool is a tool of the test provider. What it takes for the same payment is
// what an owner would write; scope and lineage can be given in the body, too, for
// specs that are about them.
func (w *world) paymentTool(name, path string) *v1alpha1.AgentTool {
	const paths = `p, p.size() == 1 ? path(p[0]) : p.size() == 2 ? path(p[0], p[1]) : p.size() == 4 ? path(p[0], p[1], p[2], p[3]) : path(p[0], p[1], p[2], p[3], p[4], p[5])`
	return &v1alpha1.AgentTool{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: v1alpha1.AgentToolSpec{
			Effect:          v1alpha1.EffectMutating,
			IntentBudgetRef: &v1alpha1.BudgetReference{Name: budgetName},
			Upstream: v1alpha1.ToolUpstream{HTTP: &v1alpha1.HTTPUpstream{
				URL:         all.ProviderURL() + path,
				Methods:     []v1alpha1.HTTPMethod{"POST"},
				Timeout:     &metav1.Duration{Duration: upstreamTimeout},
				SettleAfter: &metav1.Duration{Duration: settleAfter},
				// The last one chooses what goes wrong at the provider.
				RequestHeaders: []v1alpha1.RequestHeader{"accept", "content-type", "provider-fault"},
			}},
			Identity: &v1alpha1.ToolIdentity{
				IntentID: []v1alpha1.Expression{`call.header["idempotency-key"]`, `path(call.session, call.index)`},
				Scope: []v1alpha1.Expression{
					`has(call.body.scope) ? call.body.scope.map(` + paths + `) : [path("account", call.body.accountId, "order", call.body.orderId)]`,
				},
				Lineage: `has(call.body.lineage) ? [call.body.lineage].map(` + paths + `)[0] : path(call.session, call.index)`,
				Amount: &v1alpha1.AmountExpressions{
					Value: `call.body.amount`, Currency: `call.body.?currency.orValue("USD")`, Unit: v1alpha1.UnitMajor,
				},
				Recipient: `call.body.accountId`,
				Volatile:  []v1alpha1.JSONPointer{"/timestamp", "/memo", "/lineage"},
			},
			Idempotency: &v1alpha1.IdempotencySpec{
				Key: v1alpha1.ProviderKey{Header: "Idempotency-Key"},
				InFlight: &v1alpha1.InFlightSpec{
					Mode: v1alpha1.InFlightWait, Timeout: &metav1.Duration{Duration: 5 * time.Second}, RetryAfter: &metav1.Duration{Duration: time.Second},
				},
			},
		},
	}
}

// add makes a tool and waits until it can be called.
func (w *world) add(ctx context.Context, tool *v1alpha1.AgentTool) {
	GinkgoHelper()
	create(ctx, tool)
	w.ready(ctx, tool.Name)
}

// change changes a tool and waits until the change is in force.
func (w *world) change(ctx context.Context, name string, change func(*v1alpha1.AgentTool)) {
	GinkgoHelper()
	Eventually(func(g Gomega, ctx context.Context) {
		var tool v1alpha1.AgentTool
		g.Expect(admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &tool)).To(Succeed())
		change(&tool)
		g.Expect(admin.Update(ctx, &tool)).To(Succeed())
	}).WithContext(ctx).Should(Succeed())
	w.ready(ctx, name)
}

func (w *world) ready(ctx context.Context, name string) {
	GinkgoHelper()
	Eventually(func(ctx context.Context) error {
		return w.condition(ctx, name, v1alpha1.ConditionReady, metav1.ConditionTrue)
	}).
		WithContext(ctx).Should(Succeed())
	// A gateway that opens its store a moment later than others answers 503 until then, which an agent
	// bears. Here nobody is to meet it by chance.
	for _, g := range gateways() {
		g.serves(ctx, w, name)
	}
}

// condition is nil if the tool's condition has this status for its newest spec.
func (w *world) condition(ctx context.Context, name, kind string, status metav1.ConditionStatus) error {
	var tool v1alpha1.AgentTool
	if err := admin.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &tool); err != nil {
		return err
	}
	c := apimeta.FindStatusCondition(tool.Status.Conditions, kind)
	switch {
	case c == nil:
		return fmt.Errorf("%s has no condition %s", name, kind)
	case c.Status != status || c.ObservedGeneration != tool.Generation:
		return fmt.Errorf("%s: %s is %s for generation %d of %d: %s: %s", name, kind, c.Status, c.ObservedGeneration, tool.Generation, c.Reason, c.Message)
	}
	return nil
}

// caller is the user name of the agent.
func (w *world) caller() string { return "system:serviceaccount:" + w.namespace + ":agent" }
