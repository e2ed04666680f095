// This file judges what could lose an acknowledged write.

package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// The reasons of the condition Durable, and of findings made here.
const (
	reasonDurable         = "NothingLoses"
	reasonLoses           = "LosesWrites"
	reasonNotJudged       = "NotJudged"
	reasonEphemeralVolume = "EphemeralVolume"
	reasonNotRefused      = "ServedAllTheSame"
)

// Limits of the status.
const (
	maxFindings       = 32
	maxFindingMessage = 1024
)

// embeddedDurability looks at the file system of the embedded store's file. What the
// store writes it syncs; what it cannot know is whether the disk stays.
func embeddedDurability(path string) ([]store.Finding, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil {
		return nil, fmt.Errorf("look at the file system of %s: %w", path, err)
	}
	switch fs.Type {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		return []store.Finding{{
			Reason: reasonEphemeralVolume, Loses: true,
			Text: fmt.Sprintf("%s is in memory (tmpfs): a restart of the machine or pod loses it; give --data-dir a directory on a lasting volume", path),
		}}, nil
	case unix.OVERLAYFS_SUPER_MAGIC:
		// In a pod that is the container's own layer, which goes with the container.
		if os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
			return []store.Finding{{
				Reason: reasonEphemeralVolume, Loses: true,
				Text: fmt.Sprintf("%s is in the container's own file system, which goes with the container; give --data-dir a directory on a PersistentVolumeClaim", path),
			}}, nil
		}
	}
	return nil, nil
}

// losing is the first finding that could lose a write; nil: none.
func losing(found []store.Finding) *store.Finding {
	for i := range found {
		if found[i].Loses {
			return &found[i]
		}
	}
	return nil
}

// judgeDurability gathers the findings of everybody who knows.
func (r *StoreReconciler) judgeDurability(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore) ([]store.Finding, bool, error) {
	found, err := o.durability(ctx)
	if err != nil {
		return nil, false, err
	}
	replicated := false
	if o.replicated != nil {
		if replicated, err = o.replicated(ctx); err != nil {
			return nil, false, err
		}
	}
	if !r.Leading() {
		return found, replicated, nil
	}
	// What the cluster knows only the leader asks; the others read it in the status.
	if p := obj.Spec.Postgres; p != nil && p.External != nil && p.External.CloudNativePG != nil {
		more, err := CloudNativePG(ctx, r.Live, obj.Namespace, p.External.CloudNativePG.Name)
		if err != nil {
			return nil, false, err
		}
		found = append(found, more...)
	}
	if deployed(obj) {
		more, err := r.Deployer.Volume(ctx, obj)
		if err != nil {
			return nil, false, err
		}
		found = append(found, more...)
	}
	return found, replicated, nil
}

// judgedByCluster says that only the cluster knows whether acknowledged writes stay.
func judgedByCluster(obj *v1alpha1.IdempotencyStore) bool {
	return deployed(obj) || obj.Spec.Postgres != nil && obj.Spec.Postgres.External != nil && obj.Spec.Postgres.External.CloudNativePG != nil
}

// deployed says that the operator runs the store's server.
func deployed(obj *v1alpha1.IdempotencyStore) bool {
	return obj.Spec.Redis != nil && obj.Spec.Redis.Deploy != nil || obj.Spec.Postgres != nil && obj.Spec.Postgres.Deploy != nil
}

// durabilityStatus is how the findings are shown.
func durabilityStatus(found []store.Finding, replicated bool) *v1alpha1.StoreDurability {
	d := &v1alpha1.StoreDurability{Class: v1alpha1.DurabilitySingleNode}
	switch {
	case losing(found) != nil:
		d.Class = v1alpha1.DurabilityAtRisk
	case replicated:
		d.Class = v1alpha1.DurabilityReplicated
	}
	for _, f := range found[:min(len(found), maxFindings)] {
		severity := v1alpha1.FindingWarns
		if f.Loses {
			severity = v1alpha1.FindingLoses
		}
		d.Findings = append(d.Findings, v1alpha1.DurabilityFinding{Reason: f.Reason, Severity: severity, Message: clip(f.Text, maxFindingMessage)})
	}
	return d
}

// durableCondition says it in one sentence.
func durableCondition(set *conditions, found []store.Finding, policy v1alpha1.DurabilityPolicy) {
	f := losing(found)
	switch {
	case f == nil:
		set.set(v1alpha1.ConditionDurable, metav1.ConditionTrue, reasonDurable, "Nothing was found that could lose an acknowledged write.")
	case policy == v1alpha1.DurabilityWarn:
		set.set(v1alpha1.ConditionDurable, metav1.ConditionFalse, reasonNotRefused,
			f.Text+". Calls are served all the same, because durabilityPolicy is Warn: a payment that is forgotten can be made twice.")
	default:
		set.set(v1alpha1.ConditionDurable, metav1.ConditionFalse, reasonLoses, f.Text)
	}
}
