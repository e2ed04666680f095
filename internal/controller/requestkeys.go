// This file keeps the keys by which gateways seal requests that may be sent again: one
// Secret in the operator's namespace, made once by the process that leads, and read by every
// gateway.
//
// What must hold: it is never overwritten here, since what it has sealed could not be opened
// any more; a person replaces keys by adding one, and later naming it as current. It has no
// owner, so it outlives all that uses it. What is read is used for a short time without
// asking again, and for longer only while the API server cannot be asked.

package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/keyring"
)

const (
	// RequestKeysName is the name of the Secret.
	RequestKeysName = "holdfast-request-keys"
	// RequestKeysLabel tells what the Secret is for.
	RequestKeysLabel = v1alpha1.GroupName + "/request-keys"

	ownerRequestKeys = "holdfast-request-keys"
	// keysFresh is how long keys that were read are not asked for again.
	keysFresh = 15 * time.Second
	// keysTick is how often the process that leads looks whether they are there.
	keysTick = 15 * time.Second
	// keysRetry is when a tool that waits for them is looked at again.
	keysRetry = 2 * time.Second
	// keysTimeout bounds one question.
	keysTimeout = 5 * time.Second
)

// errRequestKeys: they cannot be used. Only a person can mend it, or the operator makes them.
var errRequestKeys = errors.New("the request keys cannot be used")

// RequestKeys reads the Secret, and makes it.
type RequestKeys struct {
	namespace string
	live      client.Client

	mu     sync.Mutex
	ring   *keyring.Ring
	at     time.Time
	asking bool
}

// NewRequestKeys are those of the operator in this namespace.
func NewRequestKeys(namespace string, live client.Client) *RequestKeys {
	return &RequestKeys{namespace: namespace, live: live}
}

// String names the Secret, for messages.
func (k *RequestKeys) String() string { return "Secret " + k.namespace + "/" + RequestKeysName }

// Ring gives the keys as they were a short time ago. Whoever asks when that is over gets
// them still, and they are read again beside it.
func (k *RequestKeys) Ring(ctx context.Context) (*keyring.Ring, error) {
	k.mu.Lock()
	ring, stale := k.ring, time.Since(k.at) > keysFresh && !k.asking
	if ring != nil && stale {
		k.asking = true
		go func() {
			bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), keysTimeout)
			defer cancel()
			_, err := k.Reread(bounded)
			if err != nil {
				log.FromContext(ctx).V(1).Info("the request keys could not be read again", "cause", err.Error())
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			k.asking = false
		}()
	}
	k.mu.Unlock()
	if ring != nil {
		return ring, nil
	}
	return k.Reread(ctx)
}

// Reread gives the keys as they are. Keys that are gone or cannot be used are not used any
// more; those that could not be asked for are.
func (k *RequestKeys) Reread(ctx context.Context) (*keyring.Ring, error) {
	ring, err := k.read(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil || errors.Is(err, errRequestKeys) {
		k.ring, k.at = ring, time.Now()
	}
	return ring, err
}

func (k *RequestKeys) read(ctx context.Context) (*keyring.Ring, error) {
	var s corev1.Secret
	err := k.live.Get(ctx, types.NamespacedName{Namespace: k.namespace, Name: RequestKeysName}, &s)
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: there is no %s; the controllers make it", errRequestKeys, k)
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("%w: the %s may not be read: %w", errRequestKeys, k, err)
	case err != nil:
		return nil, fmt.Errorf("read the %s: %w", k, err)
	}
	ring, err := keyring.New(s.Data)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errRequestKeys, k, err)
	}
	return ring, nil
}

// NeedLeaderElection is true: one process makes the keys.
func (k *RequestKeys) NeedLeaderElection() bool { return true }

// Start makes the Secret wherever it is missing, until the process ends.
func (k *RequestKeys) Start(ctx context.Context) error {
	repeat(ctx, keysTick, "the request keys could not be made; trying on", k.ensure)
	return nil
}

func (k *RequestKeys) ensure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	var s corev1.Secret
	err := k.live.Get(ctx, types.NamespacedName{Namespace: k.namespace, Name: RequestKeysName}, &s)
	if !apierrors.IsNotFound(err) {
		return err
	}
	s = corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: k.namespace, Name: RequestKeysName,
			Labels: map[string]string{RequestKeysLabel: "true", "app.kubernetes.io/part-of": "holdfast"},
		},
		Type: corev1.SecretTypeOpaque, Data: keyring.Generate(),
	}
	if err := k.live.Create(ctx, &s, client.FieldOwner(ownerRequestKeys)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make the %s: %w", k, err)
	}
	return nil
}
