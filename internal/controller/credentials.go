// This file reads what a namespace gives the gateway of its own accord: credentials
// for its tools, and the consent to be called by other namespaces' tools.
//
// Both are read live: nothing of a Secret is cached, and a consent that was taken back
// does not count.

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// UpstreamConsent is the annotation by which a namespace lets its Services be upstreams
// of other namespaces' tools: their names, with commas between them, or *. It cannot be
// a label, whose values take neither.
const UpstreamConsent = v1alpha1.GroupName + "/allow-upstream-from"

// errCredentials: the credential cannot be used. It never carries the value.
var errCredentials = errors.New("the credential cannot be used")

// Credentials reads Secrets that carry the label for it.
type Credentials struct{ Live client.Reader }

// Get returns the value of one key.
func (c Credentials) Get(ctx context.Context, namespace, secret, key string) (string, error) {
	s, err := c.read(ctx, namespace, secret)
	if err != nil {
		return "", err
	}
	value, ok := s.Data[key]
	if !ok || len(value) == 0 {
		return "", fmt.Errorf("%w: Secret %s/%s has no value under the key %q", errCredentials, namespace, secret, key)
	}
	return string(value), nil
}

// The keys of a Secret that names a user of a server.
const (
	userKey     = "username"
	passwordKey = "password"
)

// User returns the user's name, which may be absent, and the password.
func (c Credentials) User(ctx context.Context, namespace, secret string) (name, password string, err error) {
	s, err := c.read(ctx, namespace, secret)
	if err != nil {
		return "", "", err
	}
	if len(s.Data[passwordKey]) == 0 {
		return "", "", fmt.Errorf("%w: Secret %s/%s has no value under the key %q", errCredentials, namespace, secret, passwordKey)
	}
	return string(s.Data[userKey]), string(s.Data[passwordKey]), nil
}

func (c Credentials) read(ctx context.Context, namespace, secret string) (*corev1.Secret, error) {
	var s corev1.Secret
	err := c.Live.Get(ctx, types.NamespacedName{Namespace: namespace, Name: secret}, &s)
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: there is no Secret %s/%s", errCredentials, namespace, secret)
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("%w: the operator may not read Secret %s/%s: its namespace's owner must give the right with a RoleBinding: %w", errCredentials, namespace, secret, err)
	case err != nil:
		return nil, fmt.Errorf("read Secret %s/%s: %w", namespace, secret, err)
	case s.Labels[v1alpha1.CredentialsLabel] != "true":
		return nil, fmt.Errorf("%w: Secret %s/%s does not carry the label %s: \"true\"", errCredentials, namespace, secret, v1alpha1.CredentialsLabel)
	}
	return &s, nil
}

// Consent reads the annotation of Namespaces.
type Consent struct{ Live client.Reader }

// Allows says whether tools of one namespace may call the Services of another.
func (c Consent) Allows(ctx context.Context, serviceNamespace, toolNamespace string) (bool, error) {
	if serviceNamespace == toolNamespace {
		return true, nil
	}
	var ns metav1.PartialObjectMetadata
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	err := c.Live.Get(ctx, types.NamespacedName{Name: serviceNamespace}, &ns)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read Namespace %s: %w", serviceNamespace, err)
	}
	return slices.ContainsFunc(strings.Split(ns.Annotations[UpstreamConsent], ","), func(s string) bool {
		s = strings.TrimSpace(s)
		return s == "*" || s == toolNamespace
	}), nil
}
