// What a node of the control plane is given: its own certificates, signed by the one
// authority, the kubeconfig of its kubelet, and that of every kube-proxy.
package cluster

import (
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
)

// NodeFiles are the paths of what a node is given.
type NodeFiles struct {
	// Authority is the certificate that all others are checked with.
	Authority string
	// Serving is what the kubelet shows to whoever calls it.
	ServingCertificate, ServingKey string
	// Kubelet and Proxy are kubeconfigs: the kubelet's names this node alone.
	Kubelet, Proxy string
}

// Node makes what a node is given, or finds what it was given before. The control
// plane must be up.
func (c *Cluster) Node(name string, address netip.Addr) (NodeFiles, error) {
	p := c.pki()
	client, server := "kubelet-"+name, "kubelet-serving-"+name
	files := NodeFiles{
		Authority:          p.cert(authority),
		ServingCertificate: p.cert(server), ServingKey: p.key(server),
		Kubelet: c.kubeconfigOf(client), Proxy: c.kubeconfigOf(proxy),
	}
	ca, caKey, err := p.readAuthority()
	if err != nil {
		return files, err
	}
	subject := pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
	for file, certificate := range map[string]x509.Certificate{
		client: {Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}},
		server: {
			Subject: subject, DNSNames: []string{name}, IPAddresses: []net.IP{address.AsSlice()},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		},
	} {
		// The certificate is written last.
		if _, err := os.Stat(p.cert(file)); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return files, err
		}
		key, err := p.makeKey(file)
		if err != nil {
			return files, err
		}
		certificate.KeyUsage = x509.KeyUsageDigitalSignature
		if err := p.sign(file, &certificate, ca, &key.PublicKey, caKey); err != nil {
			return files, err
		}
	}
	config, err := c.RESTConfig()
	if err != nil {
		return files, err
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return files, err
	}
	user, err := p.certificateUser(client)
	if err != nil {
		return files, err
	}
	if err := os.MkdirAll(filepath.Dir(files.Kubelet), 0o700); err != nil {
		return files, err
	}
	return files, writeKubeconfig(files.Kubelet, config.Host, "", config.CAData, user)
}

func (p pki) readAuthority() (*x509.Certificate, *ecdsa.PrivateKey, error) {
	var der [2][]byte
	for i, path := range []string{p.cert(authority), p.key(authority)} {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, err
		}
		block, _ := pem.Decode(data)
		if block == nil {
			return nil, nil, fmt.Errorf("%s is not PEM", path)
		}
		der[i] = block.Bytes
	}
	ca, err := x509.ParseCertificate(der[0])
	if err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(der[1])
	return ca, key, err
}
