package controller

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Whose an address is, as it changes in the cluster.
func TestPlaces(t *testing.T) {
	w := newWorld(t)
	p := start(t, t.TempDir())
	at := func(addr string, port uint16, reserved bool, namespaces ...string) {
		t.Helper()
		eventually(t, func() error {
			r, ns, err := p.op.Places.Of(w.ctx, netip.AddrPortFrom(netip.MustParseAddr(addr), port))
			if err != nil {
				return err
			}
			if r != reserved || fmt.Sprint(ns) != fmt.Sprint(namespaces) {
				return fmt.Errorf("%s:%d is reserved %t and of %v, want %t and %v", addr, port, r, ns, reserved, namespaces)
			}
			return nil
		})
	}
	service := func(namespace string) *corev1.Service {
		t.Helper()
		s := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "crm-"},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, ExternalIPs: []string{"198.51.100.7"}},
		}
		w.create(s)
		t.Cleanup(func() { must(t, admin.Delete(w.ctx, s)) })
		return s
	}
	at(service(w.ns).Spec.ClusterIP, 9, false, w.ns)
	at(service(operatorNamespace).Spec.ClusterIP, 9, true, operatorNamespace)
	at("198.51.100.7", 80, false) // whoever writes a Service may claim any such address
	var api corev1.Service
	must(t, admin.Get(w.ctx, types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: apiService}, &api))
	at(api.Spec.ClusterIP, 443, true, metav1.NamespaceDefault)

	pod := &corev1.ObjectReference{Kind: "Pod", Namespace: w.ns, Name: "crm-0"}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: w.meta("crm"), AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.7.7.7"}, TargetRef: pod}, {Addresses: []string{"198.51.100.8"}}},
		Ports:     []discoveryv1.EndpointPort{{Port: ptr.To(int32(8080))}},
	}
	w.create(slice)
	at("10.7.7.7", 9, false, w.ns)
	at("::ffff:10.7.7.7", 8080, false, w.ns)
	at("198.51.100.8", 8080, false)
	must(t, admin.Delete(w.ctx, slice))
	at("10.7.7.7", 9, false)

	// The API server's own endpoints: its port is reserved, its machine is not.
	own := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "second-api-server", Labels: map[string]string{discoveryv1.LabelServiceName: apiService}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.7.7.8"}}},
		Ports: []discoveryv1.EndpointPort{{Port: ptr.To(int32(6443))}},
	}
	w.create(own)
	t.Cleanup(func() { must(t, admin.Delete(w.ctx, own)) })
	at("10.7.7.8", 6443, true)
	at("10.7.7.8", 8080, false)
}
