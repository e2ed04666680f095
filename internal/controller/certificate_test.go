package controller

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// shownCertificate reads the certificate that the gateways show, and whom agents trust.
func shownCertificate(t *testing.T) (*corev1.Secret, *x509.Certificate, *x509.CertPool) {
	t.Helper()
	var s corev1.Secret
	must(t, admin.Get(t.Context(), types.NamespacedName{Namespace: operatorNamespace, Name: CertificateName}, &s))
	p, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	must(t, err)
	var cm corev1.ConfigMap
	must(t, admin.Get(t.Context(), types.NamespacedName{Namespace: operatorNamespace, Name: AuthorityName}, &cm))
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(cm.Data[AuthorityKey])) {
		t.Fatalf("the ConfigMap has no certificate: %v", cm.Data)
	}
	return &s, p.Leaf, pool
}

// The whole life of the certificate, under the operator's own rights.
func TestTheGatewaysCertificate(t *testing.T) {
	ctx := t.Context()
	live := as(operatorUser)
	now := time.Now()
	of := func(more ...string) *Certificate {
		t.Helper()
		c, err := NewCertificate(operatorNamespace, "holdfast-gateway", more, live)
		must(t, err)
		c.now = func() time.Time { return now }
		return c
	}
	verified := func(c *x509.Certificate, by *x509.CertPool, name string) error {
		_, err := c.Verify(x509.VerifyOptions{DNSName: name, Roots: by, CurrentTime: now})
		return err
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		for _, o := range []client.Object{
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: CertificateName}},
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: AuthorityName}},
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: AuthorityName}},
		} {
			if err := client.IgnoreNotFound(admin.Delete(ctx, o)); err != nil {
				t.Error(err)
			}
		}
	})

	c := of()
	must(t, c.ensure(ctx))
	first, leaf, trusted := shownCertificate(t)
	for _, name := range []string{"holdfast-gateway", "holdfast-gateway.holdfast-system", "holdfast-gateway.holdfast-system.svc", "holdfast-gateway.holdfast-system.svc.cluster.local"} {
		must(t, verified(leaf, trusted, name))
	}
	if first.Type != corev1.SecretTypeTLS || leaf.IsCA || len(first.OwnerReferences) > 0 {
		t.Errorf("the Secret is %s of %+v", first.Type, first.ObjectMeta)
	}
	if err := verified(leaf, trusted, "payments.example.com"); err == nil {
		t.Error("it is for another name, too")
	}

	// What is as it should be is left as it is, in another process, too.
	must(t, of().ensure(ctx))
	if again, _, _ := shownCertificate(t); again.ResourceVersion != first.ResourceVersion {
		t.Error("it was written again without need")
	}

	// The authority signs for nobody else.
	authority, err := c.authority(ctx)
	must(t, err)
	key, err := newKey()
	must(t, err)
	for _, other := range []x509.Certificate{{DNSNames: []string{"payments.example.com"}}, {DNSNames: []string{"holdfast-gateway.elsewhere.svc"}}} {
		other.NotAfter = now.Add(time.Hour)
		forged, err := c.sign(&other, key, authority)
		must(t, err)
		if err := verified(forged, trusted, other.DNSNames[0]); err == nil || !strings.Contains(err.Error(), "not permitted") {
			t.Errorf("what the authority signs for %v is trusted: %v", other.DNSNames, err)
		}
	}

	// It is renewed before it ends, and who trusted it goes on.
	now = leaf.NotAfter.Add(-certificateRenew + time.Minute)
	must(t, c.ensure(ctx))
	second, leaf2, _ := shownCertificate(t)
	if second.ResourceVersion == first.ResourceVersion || !leaf2.NotAfter.After(leaf.NotAfter) {
		t.Errorf("it ends at %s and was not renewed", leaf2.NotAfter)
	}
	must(t, verified(leaf2, trusted, "holdfast-gateway"))

	// So is the authority, with its key: old and new agents trust old and new certificates.
	now = authority.certificate.NotAfter.Add(-authorityRenew + time.Minute)
	must(t, c.ensure(ctx))
	_, leaf3, renewed := shownCertificate(t)
	must(t, verified(leaf3, trusted, "holdfast-gateway"))
	must(t, verified(leaf3, renewed, "holdfast-gateway"))
	if newer, err := c.authority(ctx); err != nil || !newer.certificate.NotAfter.After(authority.certificate.NotAfter) {
		t.Errorf("the authority was not renewed: %v", err)
	}
	now = authority.certificate.NotAfter.Add(time.Hour)
	must(t, c.ensure(ctx))
	_, leaf4, renewed := shownCertificate(t)
	must(t, verified(leaf4, renewed, "holdfast-gateway"))
	if err := verified(leaf4, trusted, "holdfast-gateway"); err == nil {
		t.Error("the authority that has ended is trusted still")
	}
	var cm corev1.ConfigMap
	must(t, admin.Get(ctx, types.NamespacedName{Namespace: operatorNamespace, Name: AuthorityName}, &cm))
	if n := strings.Count(cm.Data[AuthorityKey], "BEGIN"); n != 1 {
		t.Errorf("the ConfigMap has %d certificates after the first one has ended", n)
	}

	// Further names widen the authority and leave what is shown, which everybody goes on trusting, also once it is renewed.
	before := renewed
	c = of("pay.example.com", " 192.0.2.7")
	must(t, c.ensure(ctx))
	same, _, widened := shownCertificate(t)
	must(t, verified(leaf4, widened, "holdfast-gateway"))
	now = leaf4.NotAfter.Add(-certificateRenew + time.Minute)
	must(t, c.ensure(ctx))
	again, leaf5, _ := shownCertificate(t)
	if again.ResourceVersion == same.ResourceVersion {
		t.Error("it was not renewed")
	}
	must(t, verified(leaf5, before, "holdfast-gateway"))
	must(t, verified(leaf5, widened, "holdfast-gateway"))
	if err := verified(leaf5, widened, "pay.example.com"); err == nil {
		t.Error("it has a further name, of which agents were not told")
	}
	// Once somebody has told them and deleted it, it has them; and it keeps them, and loses what is taken back.
	must(t, admin.Delete(ctx, again))
	must(t, c.ensure(ctx))
	_, leaf5, _ = shownCertificate(t)
	for _, name := range []string{"holdfast-gateway", "pay.example.com", "192.0.2.7"} {
		must(t, verified(leaf5, widened, name))
	}
	now = leaf5.NotAfter.Add(-certificateRenew + time.Minute)
	must(t, c.ensure(ctx))
	_, leaf5, _ = shownCertificate(t)
	must(t, verified(leaf5, widened, "pay.example.com"))
	c = of("192.0.2.7")
	must(t, c.ensure(ctx))
	_, leaf5, narrowed := shownCertificate(t)
	for _, pool := range []*x509.CertPool{widened, narrowed} {
		must(t, verified(leaf5, pool, "192.0.2.7"))
		if err := verified(leaf5, pool, "pay.example.com"); err == nil {
			t.Error("it keeps a name that was taken back")
		}
	}
	c = of("pay.example.com", "192.0.2.7")

	// An authority that was stolen is deleted: nobody trusts it any more.
	must(t, admin.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: AuthorityName}}))
	must(t, c.ensure(ctx))
	shown, leaf6, anew := shownCertificate(t)
	must(t, verified(leaf6, anew, "holdfast-gateway"))
	if err := verified(leaf5, anew, "holdfast-gateway"); err == nil {
		t.Error("what the stolen authority has signed is trusted still")
	}

	// One that cannot be used is named, and not overwritten.
	var broken corev1.Secret
	must(t, admin.Get(ctx, types.NamespacedName{Namespace: operatorNamespace, Name: AuthorityName}, &broken))
	good := broken.DeepCopy()
	broken.Data[corev1.TLSPrivateKeyKey] = shown.Data[corev1.TLSPrivateKeyKey]
	must(t, admin.Update(ctx, &broken))
	if err := c.ensure(ctx); err == nil || !strings.Contains(err.Error(), "the key is not that of the certificate") || !strings.Contains(err.Error(), AuthorityName) {
		t.Errorf("an authority with another key: %v", err)
	}
	// Nor is somebody else's own.
	theirCA, theirKey, err := cert.GenerateSelfSignedCertKey("authority.example.com", nil, nil)
	must(t, err)
	broken.Data = map[string][]byte{corev1.TLSCertKey: theirCA, corev1.TLSPrivateKeyKey: theirKey}
	must(t, admin.Update(ctx, &broken))
	if err := c.ensure(ctx); err == nil || !strings.Contains(err.Error(), "not what was written here") {
		t.Errorf("somebody else's authority: %v", err)
	}
	good.ResourceVersion = ""
	must(t, admin.Update(ctx, good))

	// Somebody else's certificate in its place is left alone, whatever it is for and however old.
	certPEM, keyPEM, err := cert.GenerateSelfSignedCertKey("gateway.example.com", nil, nil)
	must(t, err)
	theirs := shown.DeepCopy()
	theirs.Data = map[string][]byte{corev1.TLSCertKey: certPEM, corev1.TLSPrivateKeyKey: keyPEM}
	must(t, admin.Update(ctx, theirs))
	now = now.Add(100 * 365 * 24 * time.Hour)
	must(t, c.ensure(ctx))
	if left, _, _ := shownCertificate(t); left.ResourceVersion != theirs.ResourceVersion {
		t.Error("somebody else's certificate was replaced")
	}
	// Deleted, it is made here again.
	must(t, admin.Delete(ctx, theirs))
	must(t, c.ensure(ctx))
	_, last, trusted := shownCertificate(t)
	must(t, verified(last, trusted, "holdfast-gateway"))

	// A clock that was wrong when it was made, and is right again.
	now = time.Now()
	must(t, c.ensure(ctx))
	_, last, trusted = shownCertificate(t)
	must(t, verified(last, trusted, "holdfast-gateway"))

	// Two processes that both think they lead do not overwrite each other.
	var stale corev1.Secret
	must(t, admin.Get(ctx, types.NamespacedName{Namespace: operatorNamespace, Name: CertificateName}, &stale))
	touched := stale.DeepCopy()
	touched.Annotations["touched"] = "true"
	must(t, admin.Update(ctx, touched))
	if err := c.put(ctx, &stale, true); !apierrors.IsConflict(errors.Unwrap(err)) {
		t.Errorf("a write over a newer one: %v", err)
	}
	// The gateway shows it by its file, and reads neither.
	for _, name := range []string{CertificateName, AuthorityName} {
		var s corev1.Secret
		if err := as(gatewayUserName).Get(ctx, types.NamespacedName{Namespace: operatorNamespace, Name: name}, &s); !apierrors.IsForbidden(err) {
			t.Errorf("a gateway may read %s: %v", name, err)
		}
		if err := live.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: name}}); !apierrors.IsForbidden(err) {
			t.Errorf("the operator may delete %s: %v", name, err)
		}
	}
}

// A manager with the controllers makes it by itself.
func TestTheControllersMakeTheCertificate(t *testing.T) {
	exists := func() error {
		return admin.Get(t.Context(), types.NamespacedName{Namespace: operatorNamespace, Name: CertificateName}, &corev1.Secret{})
	}
	startAs(t, operatorUser, Options{DataDir: t.TempDir(), Controllers: true, Service: "holdfast-gateway"})
	eventually(t, exists)
	_, leaf, trusted := shownCertificate(t)
	if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "holdfast-gateway.holdfast-system.svc", Roots: trusted}); err != nil {
		t.Error(err)
	}
}

func TestTheCertificatesNamesAreChecked(t *testing.T) {
	for _, name := range []string{"", "https://pay.example.com", "*.example.com", "Pay.example.com", "pay.example.com:443"} {
		if _, err := NewCertificate(operatorNamespace, "holdfast-gateway", []string{name}, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", name)) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
