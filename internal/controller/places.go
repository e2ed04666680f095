// This file knows to whom an address in the cluster belongs: the Services and their
// endpoints, as the cache shows them.
//
// A URL may name an address, or a name that resolves to one. So a namespace's consent
// is asked by the address that is dialled, not by what the URL says.

package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The index of Services and EndpointSlices by their addresses.
const byAddress = "address"

// apiService is the API server's own Service, in the namespace default.
const apiService = "kubernetes"

// Places reads whose an address is.
type Places struct {
	// namespace is the operator's own.
	namespace string
	cached    client.Reader
}

// NewPlaces has the cache keep Services and EndpointSlices, and index them.
func NewPlaces(ctx context.Context, mgr ctrl.Manager, namespace string) (*Places, error) {
	index := mgr.GetFieldIndexer()
	err := errors.Join(
		index.IndexField(ctx, &corev1.Service{}, byAddress, func(o client.Object) []string {
			s, ok := o.(*corev1.Service)
			if !ok {
				return nil
			}
			// Not spec.externalIPs and the like: whoever writes a Service chooses them, and
			// would take other namespaces' upstreams away from them.
			return canonical(s.Spec.ClusterIPs)
		}),
		index.IndexField(ctx, &discoveryv1.EndpointSlice{}, byAddress, func(o client.Object) []string {
			s, ok := o.(*discoveryv1.EndpointSlice)
			if !ok {
				return nil
			}
			var out []string
			for _, e := range s.Endpoints {
				// The same holds for endpoints that are no pods. The API server's own are none.
				if e.TargetRef != nil && e.TargetRef.Kind == "Pod" || isAPI(s) {
					out = append(out, canonical(e.Addresses)...)
				}
			}
			return out
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("index Services by their addresses: %w", err)
	}
	return &Places{namespace: namespace, cached: mgr.GetClient()}, nil
}

// canonical are those of the texts that are addresses, as netip writes them.
func canonical(texts []string) []string {
	var out []string
	for _, t := range texts {
		if a, err := netip.ParseAddr(t); err == nil {
			out = append(out, a.Unmap().String())
		}
	}
	return out
}

func isAPI(s *discoveryv1.EndpointSlice) bool {
	return s.Namespace == metav1.NamespaceDefault && s.Labels[discoveryv1.LabelServiceName] == apiService
}

// Of says whether the address is the API server's or Holdfast's own, and otherwise
// which namespaces have a Service, or a pod behind one, at it.
func (p *Places) Of(ctx context.Context, to netip.AddrPort) (reserved bool, namespaces []string, err error) {
	at := client.MatchingFields{byAddress: to.Addr().Unmap().String()}
	var services corev1.ServiceList
	var slicesAt discoveryv1.EndpointSliceList
	if err := errors.Join(p.cached.List(ctx, &services, at), p.cached.List(ctx, &slicesAt, at)); err != nil {
		return false, nil, fmt.Errorf("look whose the address is: %w", err)
	}
	add := func(namespace string) {
		reserved = reserved || namespace == p.namespace
		if !slices.Contains(namespaces, namespace) {
			namespaces = append(namespaces, namespace)
		}
	}
	for i := range services.Items {
		s := &services.Items[i]
		reserved = reserved || s.Namespace == metav1.NamespaceDefault && s.Name == apiService
		add(s.Namespace)
	}
	for i := range slicesAt.Items {
		s := &slicesAt.Items[i]
		if !isAPI(s) {
			add(s.Namespace)
			continue
		}
		// The API server shares its machine's address with others: its port tells.
		for _, port := range s.Ports {
			reserved = reserved || port.Port == nil || *port.Port == int32(to.Port())
		}
	}
	slices.Sort(namespaces)
	return reserved, namespaces, nil
}
