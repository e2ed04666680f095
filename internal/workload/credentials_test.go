// This file tests what the Secret of a deployed store tells of its memory.

package workload

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func storeNamed(namespace, name string) *v1alpha1.IdempotencyStore {
	return &v1alpha1.IdempotencyStore{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1alpha1.IdempotencyStoreSpec{
		Redis: &v1alpha1.RedisStore{Deploy: &v1alpha1.RedisDeployment{Storage: v1alpha1.StoreStorage{Size: "1Gi"}}},
	}}
}

func TestKept(t *testing.T) {
	c := NewCredentials(storeNamed("shop", "payments"))
	if k := c.Kept(); k != (Kept{}) {
		t.Fatalf("a new Secret tells of %+v", k)
	}
	all := Kept{Epoch: "E", KeyDomain: "domain", Loss: "a loss", Seen: "far", Spent: "E"}
	c.Keep(all)
	if k := c.Kept(); k != all || !k.Says(all) {
		t.Fatalf("kept was %+v, read is %+v", all, k)
	}
	// What is true no more goes, but a loss never does.
	c.Keep(Kept{Epoch: "E2", KeyDomain: "domain"})
	want := Kept{Epoch: "E2", KeyDomain: "domain", Loss: "a loss"}
	if k := c.Kept(); k != want || !k.Says(Kept{Epoch: "E2", KeyDomain: "domain"}) || k.Says(all) {
		t.Fatalf("kept should be %+v, it is %+v", want, k)
	}
	if k := (Kept{Epoch: "E"}); k.Says(Kept{Epoch: "E", Loss: "a loss"}) || k.Says(Kept{Epoch: "E", Seen: "far"}) || !k.Identity().Says(Kept{Epoch: "E", Seen: "far"}.Identity()) {
		t.Error("a Secret without the loss, or less far, does not say all")
	}
	if _, there := c.Secret.Annotations[seenAnnotation]; there {
		t.Error("an annotation without a value stays")
	}
}

// A copy of a Secret in another namespace, or for a store of another name, tells nothing of that store.
func TestKeptOfACopy(t *testing.T) {
	c := NewCredentials(storeNamed("shop", "payments"))
	c.Keep(Kept{Epoch: "E", KeyDomain: "domain", Loss: "a loss"})
	for _, s := range []*v1alpha1.IdempotencyStore{storeNamed("staging", "payments"), storeNamed("shop", "refunds")} {
		secret := c.Secret.DeepCopy()
		secret.Namespace = s.Namespace
		has, err := ReadCredentials(s, secret)
		if err != nil {
			t.Fatal(err)
		}
		if k := has.Kept(); k != (Kept{}) {
			t.Errorf("the copy tells %s/%s of %+v", s.Namespace, s.Name, k)
		}
		// Nor is the other's loss taken over with what is kept from now on.
		has.Keep(Kept{Epoch: "own", KeyDomain: "own"})
		if k := has.Kept(); k != (Kept{Epoch: "own", KeyDomain: "own"}) {
			t.Errorf("kept for %s/%s is %+v", s.Namespace, s.Name, k)
		}
	}
}
