// This file tests what is known of a store by the operator's ConfigMap and the store's Secret together.

package controller

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/holdfast-dev/holdfast/internal/workload"
)

func TestSecretFillsTheMemory(t *testing.T) {
	const (
		lost  = "2026-01-02T03:04:05Z E0"
		far   = "9 2026-01-02T03:04:05Z 2026-01-02T03:04:05Z"
		less  = "8 2026-01-02T03:04:05Z 2026-01-02T03:04:05Z"
		wrong = "yesterday"
	)
	full := workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: far, Spent: "E"}
	for name, c := range map[string]struct {
		memory, secret, want workload.Kept
		refused              bool
	}{
		"neither":                        {},
		"the ConfigMap alone":            {memory: full, want: full},
		"the Secret alone":               {secret: full, want: full},
		"a loss is missing":              {memory: workload.Kept{Epoch: "E", KeyDomain: "domain", Seen: far}, secret: full, want: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: far}},
		"a forgotten loss stays so":      {memory: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost + " forgotten", Seen: far}, secret: full, want: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost + " forgotten", Seen: far}},
		"the key domain is missing":      {memory: workload.Kept{Epoch: "E", Loss: lost, Seen: far}, secret: full, want: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: far}},
		"the ConfigMap has seen less":    {memory: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: less}, secret: full, want: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: far}},
		"the Secret has seen less":       {memory: full, secret: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: lost, Seen: less}, want: full},
		"a Secret of another memory":     {memory: workload.Kept{Epoch: "E2", KeyDomain: "domain"}, secret: full, want: workload.Kept{Epoch: "E2", KeyDomain: "domain"}},
		"a sighting of another memory":   {memory: workload.Kept{Seen: far}, secret: workload.Kept{Epoch: "E", KeyDomain: "domain"}, want: workload.Kept{Epoch: "E", KeyDomain: "domain"}},
		"a loss that cannot be read":     {secret: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: wrong}, refused: true},
		"a sighting that cannot be read": {secret: workload.Kept{Epoch: "E", KeyDomain: "domain", Seen: wrong}, refused: true},
		"neither, and the ConfigMap knows": {
			memory: workload.Kept{Epoch: "E", KeyDomain: "domain"}, secret: workload.Kept{Epoch: "E", KeyDomain: "domain", Loss: wrong, Seen: wrong},
			want: workload.Kept{Epoch: "E", KeyDomain: "domain"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			of, other := types.NamespacedName{Namespace: "shop", Name: "payments"}, types.NamespacedName{Namespace: "shop", Name: "refunds"}
			before := storeMemory{memoryKey(epochOf, other): "other"}
			for kind, value := range map[string]string{
				epochOf: c.memory.Epoch, keyDomainOf: c.memory.KeyDomain, lossOf: c.memory.Loss, seenOf: c.memory.Seen, spentOf: c.memory.Spent,
			} {
				if value != "" {
					before[memoryKey(kind, of)] = value
				}
			}
			known, err := before.with(of, c.secret)
			if refused := err != nil; refused != c.refused {
				t.Fatalf("refused is %t: %v", refused, err)
			}
			if !c.refused && known.kept(of) != c.want {
				t.Errorf("known is %+v, and should be %+v", known.kept(of), c.want)
			}
			if before.kept(of) != c.memory || known.epoch(other) != "other" || len(known.kept(other).KeyDomain) > 0 {
				t.Errorf("what was read is changed: %v, %v", before, known)
			}
		})
	}
}
