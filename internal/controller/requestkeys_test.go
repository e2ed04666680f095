package controller

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/keyring"
)

const gatewayUserName = "system:serviceaccount:holdfast-system:holdfast-gateway"

// keysSecret waits for the Secret with the request keys.
func (w *world) keysSecret() *corev1.Secret {
	w.Helper()
	var s corev1.Secret
	eventually(w.T, func() error {
		return admin.Get(w.ctx, types.NamespacedName{Namespace: operatorNamespace, Name: RequestKeysName}, &s)
	})
	return &s
}

// The operator makes the keys once, under its own rights, and never changes them; a gateway
// reads them under its own; a tool says if they are missing or cannot be used.
func TestRequestKeys(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	tool := w.tool("refund", "refunds")
	tool.Spec.UnknownOutcome = v1alpha1.UnknownResume
	tool.Spec.Idempotency.ProviderDeduplicates = &v1alpha1.ProviderDeduplication{Window: metav1.Duration{Duration: 24 * time.Hour}}
	w.create(w.store("payments"), w.budget("refunds", "payments"), tool)
	w.toolReady("refund")

	s := w.keysSecret()
	if _, err := keyring.New(s.Data); err != nil || s.Labels[RequestKeysLabel] != "true" || len(s.OwnerReferences) > 0 {
		t.Fatalf("%+v, %v", s.ObjectMeta, err)
	}
	// What is there is left as it is.
	must(t, p.op.RequestKeys.ensure(w.ctx))
	if again := w.keysSecret(); again.ResourceVersion != s.ResourceVersion {
		t.Error("the keys were written again")
	}

	gateway := NewRequestKeys(operatorNamespace, as(gatewayUserName))
	ring, err := gateway.Ring(w.ctx)
	must(t, err)
	sealed, err := ring.Seal([]byte("request"), "secret", []byte("record"))
	must(t, err)
	if _, err := NewRequestKeys(operatorNamespace, as(alice)).Ring(w.ctx); !errors.Is(err, errRequestKeys) {
		t.Errorf("somebody else reads them: %v", err)
	}
	for _, user := range []string{operatorUser, gatewayUserName} {
		if err := as(user).Update(w.ctx, s.DeepCopy()); err == nil {
			t.Errorf("%s may change them", user)
		}
		if err := as(user).Delete(w.ctx, s.DeepCopy()); err == nil {
			t.Errorf("%s may delete them", user)
		}
		var other corev1.Secret
		if err := as(user).Get(w.ctx, types.NamespacedName{Namespace: operatorNamespace, Name: "another"}, &other); err == nil || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("%s may read other Secrets: %v", user, err)
		}
	}

	// A person adds a key and names it as current.
	s.Data["key-2"] = bytes.Repeat([]byte{7}, keyring.KeySize)
	s.Data[keyring.CurrentEntry] = []byte("key-2")
	must(t, admin.Update(w.ctx, s))
	ring, err = gateway.Reread(w.ctx)
	must(t, err)
	if got, same, err := ring.Open(sealed, "secret", []byte("record")); err != nil || !same || string(got) != "request" {
		t.Errorf("what the old key sealed: %q, %v, %v", got, same, err)
	}

	// Keys that cannot be used: the tool says so, and what is read is not used any more.
	good := s.Data
	s.Data = map[string][]byte{keyring.CurrentEntry: []byte("key-1"), "key-1": []byte("short")}
	must(t, admin.Update(w.ctx, s))
	if _, err := gateway.Reread(w.ctx); !errors.Is(err, errRequestKeys) {
		t.Errorf("keys that are too short: %v", err)
	}
	if _, err := gateway.Ring(w.ctx); !errors.Is(err, errRequestKeys) {
		t.Errorf("the keys from before are still used: %v", err)
	}
	touch(w, "refund")
	if message := w.condition(&v1alpha1.AgentTool{}, "refund", v1alpha1.ConditionReady, metav1.ConditionFalse, reasonRequestKeys); !strings.Contains(message, "key-1") {
		t.Errorf("the condition says %q", message)
	}
	s.Data = good
	must(t, admin.Update(w.ctx, s))
	w.toolReady("refund")

	// Taken away they are made anew, and are others.
	must(t, admin.Delete(w.ctx, s))
	must(t, p.op.RequestKeys.ensure(w.ctx))
	if anew := w.keysSecret(); bytes.Equal(anew.Data[keyring.FirstKey], good[keyring.FirstKey]) {
		t.Error("they are the same")
	}
}

// touch has the operator look at a tool.
func touch(w *world, name string) {
	w.Helper()
	eventually(w.T, func() error {
		var o v1alpha1.AgentTool
		if err := w.get(name, &o); err != nil {
			return err
		}
		o.Spec.Description = fmt.Sprint("touched ", o.ResourceVersion)
		return client.IgnoreNotFound(admin.Update(w.ctx, &o))
	})
}
