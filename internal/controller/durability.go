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
	"github.com/holdfast-dev/holdfast/internal/workload"
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
func embeddedDurability(path string) (store.Durability, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil {
		return store.Durability{}, fmt.Errorf("look at the file system of %s: %w", path, err)
	}
	where := ""
	switch {
	case fs.Type == unix.TMPFS_MAGIC, fs.Type == unix.RAMFS_MAGIC:
		where = "in memory (tmpfs): a restart of the machine or pod loses it; give --data-dir a directory on a lasting volume"
	case fs.Type == unix.OVERLAYFS_SUPER_MAGIC && os.Getenv("KUBERNETES_SERVICE_HOST") != "":
		// In a pod that is the container's own layer, which goes with the container.
		where = "in the container's own file system, which goes with the container; give --data-dir a directory on a PersistentVolumeClaim"
	default:
		return store.Durability{}, nil
	}
	return store.Durability{Findings: []store.Finding{{Reason: reasonEphemeralVolume, Loses: true, Text: path + " is " + where}}}, nil
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
func (r *StoreReconciler) judgeDurability(ctx context.Context, obj *v1alpha1.IdempotencyStore, o *openStore) (store.Durability, error) {
	d, err := o.durability(ctx)
	if err != nil || !r.Leading() {
		return d, err
	}
	// What the cluster knows only the leader asks; the others read it in the status.
	if p := obj.Spec.Postgres; p != nil && p.External != nil && p.External.CloudNativePG != nil {
		more, err := CloudNativePG(ctx, r.Live, obj.Namespace, p.External.CloudNativePG.Name)
		if err != nil {
			return d, err
		}
		d.Findings = append(d.Findings, more...)
	}
	if workload.Deployed(obj) {
		more, err := r.Deployer.Volume(ctx, obj)
		if err != nil {
			return d, err
		}
		d.Findings = append(d.Findings, more...)
	}
	return d, nil
}

// judgedByCluster says that only the cluster knows whether acknowledged writes stay.
func judgedByCluster(obj *v1alpha1.IdempotencyStore) bool {
	return workload.Deployed(obj) || obj.Spec.Postgres != nil && obj.Spec.Postgres.External != nil && obj.Spec.Postgres.External.CloudNativePG != nil
}

// durabilityStatus is how the findings are shown.
func durabilityStatus(found store.Durability) *v1alpha1.StoreDurability {
	d := &v1alpha1.StoreDurability{Class: v1alpha1.DurabilitySingleNode}
	switch {
	case losing(found.Findings) != nil:
		d.Class = v1alpha1.DurabilityAtRisk
	case found.Replicated:
		d.Class = v1alpha1.DurabilityReplicated
	}
	for _, f := range found.Findings[:min(len(found.Findings), maxFindings)] {
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
