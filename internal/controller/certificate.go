// This file makes the gateways' certificate where nobody else does: a Secret with the
// certificate and its key, an authority that signs it in a Secret of its own, and a
// ConfigMap that tells agents whom to trust. The process that leads makes them, and renews
// them long before they end.
//
// What must hold: a certificate that somebody else has put there is left as it is, also if
// it has replaced one that was made here. A new certificate is shown only once the ConfigMap
// has what it is verified by; an authority that is renewed keeps its key, so that who knows
// the one before goes on trusting. The authority can sign for the gateways' names alone, and
// a certificate with one name that it may not sign for is refused under all of its names: so
// one that is shown gets no further name by itself, but only when it is made anew because
// somebody has deleted it, who has told the agents of the wider authority before.

package controller

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	// CertificateName is the name of the Secret with the gateways' certificate.
	CertificateName = "holdfast-gateway-tls"
	// AuthorityName is the name of the Secret with the authority, and of the ConfigMap that
	// has its certificates.
	AuthorityName = "holdfast-gateway-ca"
	// AuthorityKey is the ConfigMap's entry.
	AuthorityKey = "ca.crt"

	// madeAnnotation has the digest of the certificate that was made here, in both Secrets:
	// another certificate beside it is somebody else's.
	madeAnnotation = v1alpha1.GroupName + "/made"

	ownerCertificate = "holdfast-gateway-certificate"
	// certificateTick is how often the process that leads looks whether all is there.
	certificateTick = 15 * time.Second

	certificateLife  = 90 * 24 * time.Hour
	certificateRenew = 30 * 24 * time.Hour
	authorityLife    = 10 * 365 * 24 * time.Hour
	authorityRenew   = 365 * 24 * time.Hour
	// clockSkew is how far the clock of who verifies may be behind.
	clockSkew = time.Hour
)

// Certificate makes the certificate and keeps it valid.
type Certificate struct {
	namespace string
	// dns and ips are what it is for; the first of dns, as many as own, are the Service's names.
	dns  []string
	own  int
	ips  []net.IP
	live client.Client
	now  func() time.Time
}

// NewCertificate is for the gateways behind this Service, and for further names and addresses.
func NewCertificate(namespace, service string, more []string, live client.Client) (*Certificate, error) {
	c := &Certificate{namespace: namespace, live: live, now: time.Now}
	for _, suffix := range []string{"", "." + namespace, "." + namespace + ".svc", "." + namespace + ".svc.cluster.local"} {
		c.dns = append(c.dns, service+suffix)
	}
	c.own = len(c.dns)
	for _, name := range more {
		name = strings.TrimSpace(name)
		if ip := net.ParseIP(name); ip != nil {
			c.ips = append(c.ips, ip)
		} else {
			c.dns = append(c.dns, name)
		}
	}
	for _, name := range c.dns {
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			return nil, fmt.Errorf("the gateways' certificate cannot be for %q: %s", name, strings.Join(problems, "; "))
		}
	}
	return c, nil
}

// NeedLeaderElection is true: one process makes it.
func (c *Certificate) NeedLeaderElection() bool { return true }

// Start makes what is missing and renews what ends, until the process ends.
func (c *Certificate) Start(ctx context.Context) error {
	repeat(ctx, certificateTick, "the gateways' certificate is not as it should be; trying on", c.ensure)
	return nil
}

// pair is a certificate and its key.
type pair struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

// ensure brings all three objects to what they should be, once.
func (c *Certificate) ensure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	var shown corev1.Secret
	found, err := c.get(ctx, CertificateName, &shown)
	if err != nil || found && !madeHere(&shown) {
		return err
	}
	authority, err := c.authority(ctx)
	if err != nil {
		return err
	}
	if err := c.publish(ctx, authority); err != nil {
		return err
	}
	dns, ips := c.dns, c.ips
	if found {
		// What cannot be read is for the Service's names.
		now, _ := readPair(&shown)
		dns, ips = c.narrowed(now.certificate)
		if c.good(now.certificate, authority, dns, ips) {
			return nil
		}
	}
	key, err := newKey()
	if err != nil {
		return err
	}
	issued, err := c.sign(&x509.Certificate{
		Subject:  pkix.Name{CommonName: c.dns[0]},
		NotAfter: c.now().Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: dns, IPAddresses: ips, BasicConstraintsValid: true,
	}, key, authority)
	if err != nil {
		return err
	}
	data, err := secretData(pair{issued, key})
	if err != nil {
		return err
	}
	data[AuthorityKey] = encode(authority.certificate)
	c.mark(&shown.ObjectMeta, CertificateName)
	shown.Annotations[madeAnnotation] = digestOf(data[corev1.TLSCertKey])
	shown.Data = data
	if !found {
		shown.Type = corev1.SecretTypeTLS
	}
	return c.put(ctx, &shown, found)
}

// madeHere says that the certificate in it is one that was made here.
func madeHere(s *corev1.Secret) bool {
	return s.Annotations[madeAnnotation] != "" && s.Annotations[madeAnnotation] == digestOf(s.Data[corev1.TLSCertKey])
}

// narrowed are the Service's names, and of the further ones those that a certificate has already: who trusts an earlier
// authority goes on doing so.
func (c *Certificate) narrowed(now *x509.Certificate) (dns []string, ips []net.IP) {
	dns = slices.Clone(c.dns[:c.own])
	if now == nil {
		return dns, nil
	}
	for _, name := range c.dns[c.own:] {
		if slices.Contains(now.DNSNames, name) {
			dns = append(dns, name)
		}
	}
	for _, ip := range c.ips {
		if slices.ContainsFunc(now.IPAddresses, ip.Equal) {
			ips = append(ips, ip)
		}
	}
	return dns, ips
}

// good says whether the certificate that is shown can stay.
func (c *Certificate) good(now *x509.Certificate, authority pair, dns []string, ips []net.IP) bool {
	return now != nil && now.CheckSignatureFrom(authority.certificate) == nil && c.lasts(now, certificateRenew) &&
		slices.Equal(now.DNSNames, dns) && slices.EqualFunc(now.IPAddresses, ips, net.IP.Equal)
}

// lasts says that a certificate is valid, and not yet to be renewed. One of later was made by a clock that was wrong.
func (c *Certificate) lasts(of *x509.Certificate, renew time.Duration) bool {
	now := c.now()
	return !now.Before(of.NotBefore) && now.Before(of.NotAfter.Add(-renew))
}

// authority gives the one that is there, made or renewed if it must be.
func (c *Certificate) authority(ctx context.Context) (pair, error) {
	var s corev1.Secret
	found, err := c.get(ctx, AuthorityName, &s)
	if err != nil {
		return pair{}, err
	}
	var key crypto.Signer
	if found {
		p, err := readPair(&s)
		if err != nil {
			return pair{}, fmt.Errorf("the Secret %s/%s cannot be used; mend it, or delete it, and agents must learn to trust another authority: %w", c.namespace, AuthorityName, err)
		}
		if !madeHere(&s) {
			return pair{}, fmt.Errorf("the Secret %s/%s is not what was written here: if the authority is your own, write a certificate that it has signed into %s, and delete this Secret",
				c.namespace, AuthorityName, CertificateName)
		}
		if c.lasts(p.certificate, authorityRenew) && c.constrained(p.certificate) {
			return p, nil
		}
		key = p.key
	} else if key, err = newKey(); err != nil {
		return pair{}, err
	}
	template := &x509.Certificate{
		// The name never changes, so that a renewed one is the issuer of what the one before has signed.
		Subject:  pkix.Name{CommonName: "holdfast-gateway-ca"},
		NotAfter: c.now().Add(authorityLife),
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IsCA: true, MaxPathLenZero: true, BasicConstraintsValid: true,
		PermittedDNSDomainsCritical: true,
	}
	template.PermittedDNSDomains, template.PermittedIPRanges, template.ExcludedIPRanges = c.constraints()
	issued, err := c.sign(template, key, pair{key: key})
	if err != nil {
		return pair{}, err
	}
	p := pair{issued, key}
	if s.Data, err = secretData(p); err != nil {
		return pair{}, err
	}
	c.mark(&s.ObjectMeta, AuthorityName)
	s.Annotations[madeAnnotation] = digestOf(s.Data[corev1.TLSCertKey])
	if !found {
		s.Type = corev1.SecretTypeTLS
	}
	return p, c.put(ctx, &s, found)
}

// constraints are the names and addresses that the authority may sign for.
func (c *Certificate) constraints() (dns []string, permitted, excluded []*net.IPNet) {
	for _, ip := range c.ips {
		bits := 8 * len(ip)
		if four := ip.To4(); four != nil {
			ip, bits = four, 32
		}
		permitted = append(permitted, &net.IPNet{IP: ip, Mask: net.CIDRMask(bits, bits)})
	}
	if len(permitted) == 0 {
		excluded = []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		}
	}
	return c.dns, permitted, excluded
}

// constrained says whether an authority may sign for what it must, and for nothing else.
func (c *Certificate) constrained(of *x509.Certificate) bool {
	dns, permitted, excluded := c.constraints()
	same := func(a, b *net.IPNet) bool { return a.String() == b.String() }
	return of.PermittedDNSDomainsCritical && slices.Equal(of.PermittedDNSDomains, dns) &&
		slices.EqualFunc(of.PermittedIPRanges, permitted, same) && slices.EqualFunc(of.ExcludedIPRanges, excluded, same)
}

// publish has the ConfigMap say whom to trust: the authority, and what it was before it was renewed.
func (c *Certificate) publish(ctx context.Context, authority pair) error {
	var cm corev1.ConfigMap
	found, err := c.get(ctx, AuthorityName, &cm)
	if err != nil {
		return err
	}
	bundle := encode(authority.certificate)
	// What cannot be read is written anew.
	earlier, _ := cert.ParseCertsPEM([]byte(cm.Data[AuthorityKey]))
	for _, e := range earlier {
		// Only of the same key: whoever deletes the authority wants nobody to trust it any more.
		if !e.Equal(authority.certificate) && c.now().Before(e.NotAfter) && samePublic(e, authority.certificate) {
			bundle = append(bundle, encode(e)...)
		}
	}
	if found && cm.Data[AuthorityKey] == string(bundle) {
		return nil
	}
	c.mark(&cm.ObjectMeta, AuthorityName)
	cm.Data = map[string]string{AuthorityKey: string(bundle)}
	return c.put(ctx, &cm, found)
}

// sign completes a template and signs it; an authority without a certificate signs itself.
func (c *Certificate) sign(template *x509.Certificate, key crypto.Signer, by pair) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("number the gateways' certificate: %w", err)
	}
	template.SerialNumber = serial.Add(serial, big.NewInt(1))
	template.NotBefore = c.now().Add(-clockSkew)
	parent := by.certificate
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), by.key)
	if err != nil {
		return nil, fmt.Errorf("sign the gateways' certificate: %w", err)
	}
	return x509.ParseCertificate(der)
}

func newKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key for the gateways' certificate: %w", err)
	}
	return key, nil
}

func encode(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: c.Raw})
}

func digestOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

func samePublic(a, b *x509.Certificate) bool {
	return bytes.Equal(a.RawSubjectPublicKeyInfo, b.RawSubjectPublicKeyInfo)
}

// secretData is a pair as Secrets of the type kubernetes.io/tls have it.
func secretData(p pair) (map[string][]byte, error) {
	key, err := keyutil.MarshalPrivateKeyToPEM(p.key)
	if err != nil {
		return nil, fmt.Errorf("write the key of the gateways' certificate: %w", err)
	}
	return map[string][]byte{corev1.TLSCertKey: encode(p.certificate), corev1.TLSPrivateKeyKey: key}, nil
}

func readPair(s *corev1.Secret) (pair, error) {
	list, err := cert.ParseCertsPEM(s.Data[corev1.TLSCertKey])
	if err != nil {
		return pair{}, fmt.Errorf("%s: %w", corev1.TLSCertKey, err)
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(s.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return pair{}, fmt.Errorf("%s: %w", corev1.TLSPrivateKeyKey, err)
	}
	key, ok := parsed.(crypto.Signer)
	if !ok {
		return pair{}, fmt.Errorf("%s: a %T does not sign", corev1.TLSPrivateKeyKey, parsed)
	}
	public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(list[0].PublicKey) {
		return pair{}, errors.New("the key is not that of the certificate")
	}
	return pair{list[0], key}, nil
}

// mark names an object, and says whose it is.
func (c *Certificate) mark(o *metav1.ObjectMeta, name string) {
	o.Namespace, o.Name = c.namespace, name
	if o.Labels == nil {
		o.Labels = map[string]string{}
	}
	if o.Annotations == nil {
		o.Annotations = map[string]string{}
	}
	o.Labels["app.kubernetes.io/part-of"] = "holdfast"
}

// get says whether an object is there, and reads it.
func (c *Certificate) get(ctx context.Context, name string, into client.Object) (bool, error) {
	err := c.live.Get(ctx, types.NamespacedName{Namespace: c.namespace, Name: name}, into)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the %T %s/%s: %w", into, c.namespace, name, err)
	}
	return true, nil
}

// put writes an object as a whole, unless it has changed since it was read.
func (c *Certificate) put(ctx context.Context, o client.Object, found bool) error {
	var err error
	if found {
		err = c.live.Update(ctx, o, client.FieldOwner(ownerCertificate))
	} else {
		err = c.live.Create(ctx, o, client.FieldOwner(ownerCertificate))
	}
	if err != nil {
		return fmt.Errorf("write the %T %s/%s: %w", o, c.namespace, o.GetName(), err)
	}
	return nil
}
