// Kubeconfigs: the administrator's, the controller manager's, and those of
// ServiceAccounts, whose token is a file beside it that can be renewed while a
// client reads it.
package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// writeKubeconfig writes one context, with nothing but embedded data or the
// files that user names. No namespace is kubectl's own, default.
func writeKubeconfig(path, server, namespace string, ca []byte, user *clientcmdapi.AuthInfo) error {
	const name = "holdfast-dev"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	config.AuthInfos[name] = user
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: namespace}
	config.CurrentContext = name
	data, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	return replaceFile(path, data)
}

// certificateUser is a user who shows a client certificate.
func (p pki) certificateUser(name string) (*clientcmdapi.AuthInfo, error) {
	cert, err := os.ReadFile(p.cert(name))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(p.key(name))
	if err != nil {
		return nil, err
	}
	return &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}, nil
}

// Token asks the API server for a token of a ServiceAccount. No audience is the
// API server's own.
func (c *Cluster) Token(ctx context.Context, namespace, name string, validFor time.Duration, audiences ...string) (string, error) {
	client, err := c.Client()
	if err != nil {
		return "", err
	}
	seconds := int64(validFor.Seconds())
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: &seconds},
	}
	answer, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of ServiceAccount %s/%s: %w", namespace, name, err)
	}
	return answer.Status.Token, nil
}

// ServiceAccountKubeconfig writes a kubeconfig of a ServiceAccount and a fresh
// token file beside it, and returns the kubeconfig's path. Called again it renews
// the token; clients that use the kubeconfig read the file anew by themselves.
func (c *Cluster) ServiceAccountKubeconfig(ctx context.Context, namespace, name string, validFor time.Duration) (string, error) {
	token, err := c.Token(ctx, namespace, name, validFor)
	if err != nil {
		return "", err
	}
	config, err := c.RESTConfig()
	if err != nil {
		return "", err
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return "", err
	}
	base := filepath.Join(c.dir, "users", namespace+"."+name)
	if err := os.MkdirAll(filepath.Dir(base), 0o700); err != nil {
		return "", err
	}
	if err := replaceFile(base+".token", []byte(token)); err != nil {
		return "", err
	}
	path := base + ".kubeconfig"
	return path, writeKubeconfig(path, config.Host, "", config.CAData, &clientcmdapi.AuthInfo{TokenFile: base + ".token"})
}

// replaceFile writes a file as a whole: whoever reads it sees the old content or
// the new one.
func replaceFile(path string, data []byte) error {
	tmp := path + ".partial"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
