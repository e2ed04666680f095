// This file is about the volume of a deployed store: it is made to grow, and judged.
//
// A volume grows by its claim. The claim template of the StatefulSet cannot change and stays
// as it was first applied: to replace the StatefulSet for it would leave the pod without
// anybody who minds it, for nothing. A claim that is made anew from the template is too small
// at first, and grows at the next visit.

package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/store"
	"github.com/holdfast-dev/holdfast/internal/workload"
)

// expand has the claim ask for the size of the spec, where that can be. It returns the claim if
// there is one, and what keeps the volume from having that size.
func (d *Deployer) expand(ctx context.Context, s *v1alpha1.IdempotencyStore) (*corev1.PersistentVolumeClaim, *Deployed, error) {
	name := types.NamespacedName{Namespace: s.Namespace, Name: workload.ClaimName(s)}
	claim := &corev1.PersistentVolumeClaim{}
	if err := d.live.Get(ctx, name, claim); apierrors.IsNotFound(err) {
		return nil, nil, nil
	} else if err != nil {
		return nil, nil, fmt.Errorf("read PersistentVolumeClaim %s: %w", name, err)
	}
	size := workload.Storage(s).Size
	want, err := resource.ParseQuantity(size)
	if err != nil {
		return claim, nil, stop(reasonRefused, "storage.size %q: %v", size, err)
	}
	asked, has := claim.Spec.Resources.Requests[corev1.ResourceStorage], claim.Status.Capacity[corev1.ResourceStorage]
	switch {
	case claim.Status.Phase != corev1.ClaimBound:
		// Why it is not is in the pod's trouble: it has no node. Only a bound claim can grow.
		return claim, nil, nil
	case asked.Cmp(want) >= 0 && has.Cmp(want) >= 0:
		return claim, nil, nil
	case asked.Cmp(want) >= 0:
		return claim, &Deployed{Reason: reasonExpanding, Message: growing(claim, size)}, nil
	}
	class, err := d.expandable(ctx, claim)
	if err != nil || class != "" {
		return claim, &Deployed{Reason: reasonNotExpandable, Message: fmt.Sprintf(
			"The volume has %s and storage.size is %s, but PersistentVolumeClaim %s cannot grow: %s. The server goes on with the volume that it has.",
			has.String(), size, name, class)}, err
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"resources": map[string]any{"requests": map[string]any{"storage": size}}}})
	if err != nil {
		return claim, nil, err
	}
	err = d.live.Patch(ctx, claim, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(ownerDeployer))
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		// Such as by a quota. A missing right is told of as such.
		if missing, reviewErr := d.missingRight(ctx, s.Namespace); reviewErr != nil || missing != "" {
			return claim, nil, err
		}
		return claim, &Deployed{Reason: reasonNotExpandable, Message: fmt.Sprintf(
			"The cluster refuses to let PersistentVolumeClaim %s grow to %s: %v", name, size, err)}, nil
	}
	if err != nil {
		return claim, nil, fmt.Errorf("let PersistentVolumeClaim %s grow: %w", name, err)
	}
	return claim, &Deployed{Reason: reasonExpanding, Message: growing(claim, size)}, nil
}

// expandable says why a claim's class does not let it grow; "": it does.
func (d *Deployer) expandable(ctx context.Context, claim *corev1.PersistentVolumeClaim) (string, error) {
	name := ptr.Deref(claim.Spec.StorageClassName, "")
	if name == "" {
		return "it has no StorageClass; let whoever made the volume make it larger", nil
	}
	var class storagev1.StorageClass
	if err := d.live.Get(ctx, types.NamespacedName{Name: name}, &class); apierrors.IsNotFound(err) {
		return "there is no StorageClass " + name, nil
	} else if err != nil {
		return "", fmt.Errorf("read StorageClass %s: %w", name, err)
	}
	if !ptr.Deref(class.AllowVolumeExpansion, false) {
		return fmt.Sprintf("StorageClass %[1]s does not allow it. If its driver can, allow it with: "+
			`kubectl patch storageclass %[1]s -p '{"allowVolumeExpansion":true}'`, name), nil
	}
	return "", nil
}

// growing says how far a claim that grows has come.
func growing(claim *corev1.PersistentVolumeClaim, size string) string {
	name := claim.Namespace + "/" + claim.Name
	status := claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage]
	infeasible := status == corev1.PersistentVolumeClaimControllerResizeInfeasible || status == corev1.PersistentVolumeClaimNodeResizeInfeasible
	for _, c := range claim.Status.Conditions {
		switch {
		case c.Status != corev1.ConditionTrue:
		case c.Type == corev1.PersistentVolumeClaimControllerResizeError, c.Type == corev1.PersistentVolumeClaimNodeResizeError:
			return fmt.Sprintf("PersistentVolumeClaim %s does not grow to %s: %s", name, size, c.Message)
		case c.Type == corev1.PersistentVolumeClaimFileSystemResizePending:
			return fmt.Sprintf("The volume of PersistentVolumeClaim %s has grown to %s, and its file system grows when it is mounted. "+
				"If it lasts, the driver needs the pod to begin anew: kubectl delete pod %s --namespace=%s",
				name, size, claim.Name[len(workload.VolumeName())+1:], claim.Namespace)
		}
	}
	if infeasible {
		return fmt.Sprintf("The storage driver says that PersistentVolumeClaim %s cannot grow to %s: kubectl describe pvc %s --namespace=%s says why.",
			name, size, claim.Name, claim.Namespace)
	}
	return fmt.Sprintf("PersistentVolumeClaim %s grows to %s.", name, size)
}

// remadeWithin is how long a pod that is not there is looked for: its server may run on for a moment where it was
// deleted by force, and its StatefulSet makes it anew at once.
const remadeWithin = 2 * time.Second

// Volume looks for what could lose the volume of a deployed store: its data must be on a
// claim of its own, which nothing takes away with the pod or the StatefulSet.
func (d *Deployer) Volume(ctx context.Context, s *v1alpha1.IdempotencyStore) ([]store.Finding, error) {
	if !workload.Deployed(s) {
		return nil, nil
	}
	loses := func(format string, args ...any) []store.Finding {
		return []store.Finding{{Reason: reasonEphemeralVolume, Loses: true, Text: fmt.Sprintf(format, args...)}}
	}
	name := types.NamespacedName{Namespace: s.Namespace, Name: workload.PodName(s)}
	var pod corev1.Pod
	// What is found here has agents stay away for a minute.
	var err error
	_ = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, remadeWithin, true, func(context.Context) (bool, error) {
		err = d.live.Get(ctx, name, &pod)
		return !apierrors.IsNotFound(err), nil
	})
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("read Pod %s: %w", name, ctx.Err())
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return loses("pod %s cannot be seen (%v), so it is not known whether its data lasts; see the condition Deployed", name, err), nil
	case err != nil:
		return nil, fmt.Errorf("read Pod %s: %w", name, err)
	}
	at := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == workload.VolumeName() })
	if at < 0 || pod.Spec.Volumes[at].PersistentVolumeClaim == nil {
		return loses("pod %s keeps its data where it goes with the pod: delete StatefulSet %s, which is made anew with a volume that lasts, once what was paid is settled by the provider's ledger",
			name, workload.Name(s)), nil
	}
	if !mounted(s, &pod) {
		return loses("pod %s does not keep its data on its volume: delete StatefulSet %s, which is made anew as it should be, once what was paid is settled by the provider's ledger",
			name, workload.Name(s)), nil
	}
	var claim corev1.PersistentVolumeClaim
	of := types.NamespacedName{Namespace: s.Namespace, Name: pod.Spec.Volumes[at].PersistentVolumeClaim.ClaimName}
	switch err := d.live.Get(ctx, of, &claim); {
	case apierrors.IsNotFound(err):
		return loses("PersistentVolumeClaim %s of pod %s is gone: the data goes when the pod ends; do not end the pod, and see whether its volume can be kept", of, name), nil
	case err != nil:
		return nil, fmt.Errorf("read PersistentVolumeClaim %s: %w", of, err)
	case claim.DeletionTimestamp != nil:
		return loses("PersistentVolumeClaim %s was deleted, and goes when pod %s ends: do not end the pod, and keep the volume with persistentVolumeReclaimPolicy: Retain", of, name), nil
	case claim.Status.Phase != corev1.ClaimBound:
		return loses("PersistentVolumeClaim %s is %s, not Bound", of, claim.Status.Phase), nil
	case len(claim.OwnerReferences) > 0:
		return loses("PersistentVolumeClaim %s goes with %s %s, to which it belongs: remove its ownerReferences", of, claim.OwnerReferences[0].Kind, claim.OwnerReferences[0].Name), nil
	}
	return nil, nil
}

// mounted says whether the data directory of the server is on the data volume.
func mounted(s *v1alpha1.IdempotencyStore, pod *corev1.Pod) bool {
	for i := range pod.Spec.Containers {
		for _, m := range pod.Spec.Containers[i].VolumeMounts {
			if pod.Spec.Containers[i].Name == workload.ContainerName() && m.Name == workload.VolumeName() {
				return m.MountPath == workload.DataDir(s)
			}
		}
	}
	return false
}
