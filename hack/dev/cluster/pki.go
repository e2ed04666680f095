// The keys and certificates of the control plane: one authority that lives as
// long as the state directory and signs for everyone in it.
package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// validFor is longer than a development cluster should live: certificates are
// made once, when the state directory is.
const validFor = 365 * 24 * time.Hour

// pki is a directory of PEM files.
type pki struct{ dir string }

func (p pki) cert(name string) string { return filepath.Join(p.dir, name+".crt") }
func (p pki) key(name string) string  { return filepath.Join(p.dir, name+".key") }

const (
	authority      = "ca"
	serving        = "kube-apiserver"
	etcdServing    = "etcd"
	etcdClient     = "etcd-client"
	admin          = "admin"
	manager        = "kube-controller-manager"
	scheduler      = "kube-scheduler"
	proxy          = "kube-proxy"
	kubeletClient  = "kubelet-client"
	serviceAccount = "service-account"
)

// ensure makes all files if there are none yet. They are made in another
// directory that then gets this one's name, so a half-made set is never used.
// api and service are the API server's addresses.
func (p pki) ensure(api, service netip.Addr) error {
	if _, err := os.Stat(p.dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp := pki{dir: p.dir + ".partial"}
	if err := os.RemoveAll(tmp.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp.dir, 0o700); err != nil {
		return err
	}
	if err := tmp.make(api, service); err != nil {
		return fmt.Errorf("making keys and certificates: %w", err)
	}
	return os.Rename(tmp.dir, p.dir)
}

func (p pki) make(api, service netip.Addr) error {
	ca, caKey, err := p.makeAuthority()
	if err != nil {
		return err
	}
	local := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	for name, c := range map[string]x509.Certificate{
		serving: {
			Subject:     pkix.Name{CommonName: "kube-apiserver"},
			IPAddresses: append([]net.IP{api.AsSlice(), service.AsSlice()}, local...),
			DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		},
		etcdServing: {
			Subject:     pkix.Name{CommonName: "etcd"},
			IPAddresses: local,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		},
		etcdClient: {
			Subject:     pkix.Name{CommonName: "kube-apiserver-etcd-client"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
		admin: {
			Subject:     pkix.Name{CommonName: "holdfast-dev-admin", Organization: []string{"system:masters"}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
		manager: {
			Subject:     pkix.Name{CommonName: "system:kube-controller-manager"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
		scheduler: {
			Subject:     pkix.Name{CommonName: "system:kube-scheduler"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
		proxy: {
			Subject:     pkix.Name{CommonName: "system:kube-proxy"},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
		// The API server, as the kubelets see it.
		kubeletClient: {
			Subject:     pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
	} {
		key, err := p.makeKey(name)
		if err != nil {
			return err
		}
		c.KeyUsage = x509.KeyUsageDigitalSignature
		if err := p.sign(name, &c, ca, &key.PublicKey, caKey); err != nil {
			return err
		}
	}
	return p.makeServiceAccountKey()
}

func (p pki) makeAuthority() (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := p.makeKey(authority)
	if err != nil {
		return nil, nil, err
	}
	ca := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "holdfast-dev"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	return ca, key, p.sign(authority, ca, ca, &key.PublicKey, key)
}

func (p pki) makeKey(name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(p.key(name), "EC PRIVATE KEY", der)
}

// makeServiceAccountKey makes the pair that signs and checks ServiceAccount
// tokens; the certificate's place has the bare public key.
func (p pki) makeServiceAccountKey() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	if err := writePEM(p.key(serviceAccount), "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)); err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	return writePEM(p.cert(serviceAccount), "PUBLIC KEY", der)
}

func (p pki) sign(name string, c, parent *x509.Certificate, public *ecdsa.PublicKey, signer *ecdsa.PrivateKey) error {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	c.SerialNumber = serial
	// A clock that is set back a little must not make them invalid.
	c.NotBefore = time.Now().Add(-time.Hour)
	c.NotAfter = time.Now().Add(validFor)
	der, err := x509.CreateCertificate(rand.Reader, c, parent, public, signer)
	if err != nil {
		return fmt.Errorf("certificate of %s: %w", name, err)
	}
	return writePEM(p.cert(name), "CERTIFICATE", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
