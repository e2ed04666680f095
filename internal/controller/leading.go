// This file is about which process of several does what: every gateway serves, and
// one process, the leader, writes what all of them share.

package controller

import (
	"context"

	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// leading says whether a process with these roles is the leader now. Once it is, it
// stays so until it ends.
func leading(mgr ctrl.Manager, controllers bool) func() bool {
	if !controllers {
		return func() bool { return false }
	}
	return func() bool {
		select {
		case <-mgr.Elected():
			return true
		default:
			return false
		}
	}
}

// onElection looks at every object of the kind when this process becomes the leader:
// what the one before it had left undone is found then.
func onElection(mgr ctrl.Manager, c client.Reader, list client.ObjectList) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go func() {
			select {
			case <-ctx.Done():
			case <-mgr.Elected():
				for _, r := range requests(ctx, c, list, "", nil) {
					queue.Add(r)
				}
			}
		}()
		return nil
	})
}
