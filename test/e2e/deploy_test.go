// What the cluster's API tells of a store's server and of its volume.

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
)

var _ = onServers("A cluster's view of a store", func() {
	if kind == postgres {
		It("S03: a CloudNativePG Cluster whose durability is only preferred is not durable", func(ctx SpecContext) {
			root, err := assets.Root(ctx)
			Expect(err).NotTo(HaveOccurred())
			// The kind alone: what is judged is what the Cluster's owner wrote, and no operator of it runs here.
			_, err = all.RunKubectl(ctx, "apply", "-f", filepath.Join(root, "internal", "controller", "testdata", "cloudnativepg.yaml"))
			Expect(err).NotTo(HaveOccurred())
			_, err = all.RunKubectl(ctx, "wait", "--for=condition=Established", "crd/clusters.postgresql.cnpg.io", "--timeout=30s")
			Expect(err).NotTo(HaveOccurred())
			w := newWorld(ctx)
			known := call{id: "known", body: w.order("1", "10")}
			w.pay(ctx, known, 201, allow)

			cluster := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "postgresql.cnpg.io/v1", "kind": "Cluster",
				"metadata": map[string]any{"namespace": w.namespace, "name": "records"},
				"spec":     map[string]any{"instances": int64(3)},
			}}
			create(ctx, cluster)
			w.changeStore(ctx, func(spec *v1alpha1.IdempotencyStoreSpec) {
				spec.Postgres.External.CloudNativePG = &v1alpha1.ClusterReference{Name: "records"}
			})
			for _, row := range []struct {
				synchronous map[string]any
				durable     metav1.ConditionStatus
				words       string
			}{
				{nil, metav1.ConditionFalse, "no synchronous replication"},
				{map[string]any{"method": "any", "number": int64(1), "dataDurability": "preferred"}, metav1.ConditionFalse, `dataDurability "preferred"`},
				{map[string]any{"method": "any", "number": int64(1), "dataDurability": "required"}, metav1.ConditionTrue, ""},
				{map[string]any{"method": "any", "number": int64(1), "dataDurability": "preferred"}, metav1.ConditionFalse, `dataDurability "preferred"`},
				// Absent is required.
				{map[string]any{"method": "any", "number": int64(1), "dataDurability": nil}, metav1.ConditionTrue, ""},
			} {
				By(fmt.Sprint(row.synchronous))
				patch := mustJSON(map[string]any{"spec": map[string]any{"postgresql": map[string]any{"synchronous": row.synchronous}}})
				Expect(admin.Patch(ctx, cluster, client.RawPatch("application/merge-patch+json", []byte(patch)))).To(Succeed())
				Eventually(func(ctx context.Context) error {
					s, err := w.storeObject(ctx)
					if err != nil {
						return err
					}
					c := apimeta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionDurable)
					if c == nil || c.Status != row.durable || !strings.Contains(c.Message, row.words) {
						return fmt.Errorf("want Durable to be %s, with %q; the status is %+v", row.durable, row.words, s.Status)
					}
					return nil
				}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Succeed())
				if row.durable == metav1.ConditionTrue {
					w.servedEverywhere(ctx, known)
					continue
				}
				nothingSent(ctx, func() {
					for _, g := range gateways() {
						Eventually(func(ctx context.Context) int {
							return w.call(ctx, call{id: known.id, body: known.body, at: g}).status
						}).WithContext(ctx).WithTimeout(time.Minute).Should(Equal(http.StatusServiceUnavailable), string(g))
						w.pay(ctx, call{id: "new", body: w.order("9", "10"), at: g}, http.StatusServiceUnavailable, deny)
					}
				})
			}
			w.pay(ctx, call{id: "new", body: w.order("9", "10")}, 201, allow)
		}, NodeTimeout(5*time.Minute))
	}

	for _, expands := range []bool{true, false} {
		It(fmt.Sprintf("S06: storage is raised, and the StorageClass allows expansion: %v", expands), func(ctx SpecContext) {
			w := bareWorld(ctx)
			class := &storagev1.StorageClass{
				ObjectMeta:           metav1.ObjectMeta{GenerateName: "e2e-"},
				Provisioner:          "e2e.invalid/none",
				AllowVolumeExpansion: ptr.To(expands),
			}
			create(ctx, class)
			DeferCleanup(func(ctx context.Context) { Expect(admin.Delete(ctx, class)).To(Succeed()) })
			create(ctx, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "holdfast-store-deployer"},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "holdfast-store-deployer"},
				Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "holdfast-system", Name: "holdfast-manager"}},
			})
			storage := v1alpha1.StoreStorage{Size: "1Gi", ClassName: class.Name}
			store := &v1alpha1.IdempotencyStore{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: storeName}}
			if kind == redis {
				store.Spec.Redis = &v1alpha1.RedisStore{Deploy: &v1alpha1.RedisDeployment{Storage: storage}}
			} else {
				store.Spec.Postgres = &v1alpha1.PostgresStore{Deploy: &v1alpha1.PostgresDeployment{Storage: storage}}
			}
			create(ctx, store)

			var set appsv1.StatefulSet
			name := client.ObjectKey{Namespace: w.namespace, Name: storeName + "-" + kind}
			Eventually(func(ctx context.Context) error { return admin.Get(ctx, name, &set) }).WithContext(ctx).Should(Succeed())
			Expect(set.Spec.VolumeClaimTemplates).To(HaveLen(1))
			// What the StatefulSet's own controller and the storage driver would do; there is neither here.
			template := set.Spec.VolumeClaimTemplates[0]
			claim := &corev1.PersistentVolumeClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: template.Name + "-" + set.Name + "-0", Labels: template.Labels},
				Spec:       template.Spec,
			}
			claim.Spec.VolumeName = "e2e-none"
			create(ctx, claim)
			bound := func(size string) {
				GinkgoHelper()
				claim.Status.Phase = corev1.ClaimBound
				claim.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
				Expect(admin.Status().Update(ctx, claim)).To(Succeed())
			}
			bound("1Gi")
			asked := func(ctx context.Context) (string, error) {
				err := admin.Get(ctx, client.ObjectKeyFromObject(claim), claim)
				return claim.Spec.Resources.Requests.Storage().String(), err
			}
			w.changeStore(ctx, func(spec *v1alpha1.IdempotencyStoreSpec) {
				if kind == redis {
					spec.Redis.Deploy.Storage.Size = "2Gi"
				} else {
					spec.Postgres.Deploy.Storage.Size = "2Gi"
				}
			})
			// What its condition says is shown where the server can be reached: here nothing runs it.
			w.storeIs(ctx, v1alpha1.ConditionReady, metav1.ConditionFalse)
			if expands {
				Eventually(asked).WithContext(ctx).WithTimeout(time.Minute).Should(Equal("2Gi"))
				bound("2Gi")
			} else {
				Expect(asked(ctx)).To(Equal("1Gi"))
			}
			// No loop: what is there is left as it is.
			Expect(admin.Get(ctx, name, &set)).To(Succeed())
			at := set.ResourceVersion
			of := claim.ResourceVersion
			Consistently(func(g Gomega, ctx context.Context) {
				g.Expect(admin.Get(ctx, name, &set)).To(Succeed())
				g.Expect(set.ResourceVersion).To(Equal(at))
				_, err := asked(ctx)
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(claim.ResourceVersion).To(Equal(of))
			}).WithContext(ctx).WithTimeout(3 * time.Second).WithPolling(250 * time.Millisecond).Should(Succeed())
		}, NodeTimeout(2*time.Minute))
	}
})
