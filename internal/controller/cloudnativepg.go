// This file judges a Cluster of CloudNativePG: whether a commit that was answered is on
// another node too before the operator of that cluster may fail over to it. The server itself
// does not know that: with preferred data durability it looks synchronous until a standby is
// missing.

package controller

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/store/postgres"
)

// The reasons of findings about a Cluster.
const (
	reasonClusterNotSeen      = "ClusterNotSeen"
	reasonAsyncStandbys       = postgres.AsyncStandby
	reasonPreferredDurability = "PreferredDurability"
	reasonForeignStandbys     = "ForeignStandbys"
)

var cloudNativePG = schema.GroupVersionKind{Group: "postgresql.cnpg.io", Version: "v1", Kind: "Cluster"}

// cluster is what counts of a Cluster's spec.
type cluster struct {
	Instances       int64  `json:"instances"`
	MinSyncReplicas *int64 `json:"minSyncReplicas"`
	MaxSyncReplicas *int64 `json:"maxSyncReplicas"`
	PostgreSQL      struct {
		Synchronous *struct {
			Method                     string   `json:"method"`
			Number                     int64    `json:"number"`
			DataDurability             string   `json:"dataDurability"`
			MaxStandbyNamesFromCluster *int64   `json:"maxStandbyNamesFromCluster"`
			StandbyNamesPre            []string `json:"standbyNamesPre"`
			StandbyNamesPost           []string `json:"standbyNamesPost"`
		} `json:"synchronous"`
	} `json:"postgresql"`
}

// CloudNativePG looks for what could lose an acknowledged write of a Cluster.
func CloudNativePG(ctx context.Context, live client.Reader, namespace, name string) ([]store.Finding, error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(cloudNativePG)
	nn := types.NamespacedName{Namespace: namespace, Name: name}
	notSeen := func(format string, args ...any) []store.Finding {
		return []store.Finding{{Reason: reasonClusterNotSeen, Loses: true, Text: fmt.Sprintf(format, args...)}}
	}
	switch err := live.Get(ctx, nn, u); {
	case meta.IsNoMatchError(err):
		return notSeen("this cluster has no kind Cluster of postgresql.cnpg.io, so it is not known how the database replicates: install CloudNativePG, or remove cloudNativePG from the spec"), nil
	case apierrors.IsNotFound(err):
		return notSeen("there is no Cluster %s of postgresql.cnpg.io, so it is not known how the database replicates: correct cloudNativePG.name", nn), nil
	case apierrors.IsForbidden(err):
		return notSeen("the operator may not read Cluster %s, so it is not known how the database replicates: apply config/rbac of this version (%v)", nn, err), nil
	case err != nil:
		return nil, fmt.Errorf("read Cluster %s: %w", nn, err)
	}
	var c cluster
	spec, _, err := unstructured.NestedMap(u.Object, "spec")
	if err == nil {
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &c)
	}
	if err != nil {
		return notSeen("the spec of Cluster %s cannot be read: %v", nn, err), nil
	}
	return c.judge(nn.String()), nil
}

func (c cluster) judge(name string) []store.Finding {
	const require = `set postgresql.synchronous to {method: any, number: 1, dataDurability: required}`
	var found []store.Finding
	loses := func(reason, format string, args ...any) {
		found = append(found, store.Finding{Reason: reason, Loses: true, Text: fmt.Sprintf("Cluster "+name+" "+format, args...)})
	}
	if c.Instances < 2 {
		return nil // one disk, and nobody to fail over to
	}
	s := c.PostgreSQL.Synchronous
	switch {
	case s == nil && (c.MinSyncReplicas != nil || c.MaxSyncReplicas != nil):
		loses(reasonPreferredDurability, "has minSyncReplicas and maxSyncReplicas, which do not wait for a standby when none is ready: a failover then loses writes that were answered; remove both and "+require)
		return found
	case s == nil:
		loses(reasonAsyncStandbys, "has %d instances and no synchronous replication: a failover loses writes that were answered; "+require, c.Instances)
		return found
	case s.Number < 1:
		loses(reasonAsyncStandbys, "waits for %d standbys: a failover loses writes that were answered; "+require, s.Number)
	}
	// Absent means required.
	if s.DataDurability != "" && s.DataDurability != "required" {
		loses(reasonPreferredDurability, "has dataDurability %q: when no standby is ready it does not wait for one, and a failover then loses writes that were answered; "+require, s.DataDurability)
	}
	if n := s.MaxStandbyNamesFromCluster; n != nil && *n < 1 || len(s.StandbyNamesPre)+len(s.StandbyNamesPost) > 0 {
		loses(reasonForeignStandbys, "counts standbys that are not its own instances: when those alone have a write, a failover to its own loses it; remove standbyNamesPre, standbyNamesPost and maxStandbyNamesFromCluster")
	}
	return found
}
