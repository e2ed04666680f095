// What an installation is besides that it serves: who may read its metrics, and how its
// certificate is replaced while agents call.

package cluster

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// certificateName is the Secret that the gateways show.
const certificateName = "holdfast-gateway-tls"

// shownBy gives the serial number of the certificate that a new connection is shown.
func shownBy(ctx context.Context, address string) (string, error) {
	d := tls.Dialer{Config: front.client.Transport.(*http.Transport).TLSClientConfig}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String(), nil
}

var _ = Describe("An installation", func() {
	BeforeEach(func(ctx SpecContext) { well(ctx) }, NodeTimeout(5*time.Minute))

	It("shows its metrics over TLS to those who may read them, and to nobody else", NodeTimeout(2*time.Minute), func(ctx SpecContext) {
		scraper := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "scraper"}}
		ensure(ctx, scraper)
		DeferCleanup(func(ctx context.Context) { Expect(admin.Delete(ctx, scraper)).To(Succeed()) })
		request := &authenticationv1.TokenRequest{}
		Expect(admin.SubResource("token").Create(ctx, scraper, request)).To(Succeed())
		scrape := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
			// As Prometheus does: the certificate is the process's own.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true,
		}}
		ask := func(ctx context.Context, url, token string) (int, string) {
			GinkgoHelper()
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			Expect(err).NotTo(HaveOccurred())
			if token != "" {
				r.Header.Set("Authorization", "Bearer "+token)
			}
			resp, err := scrape.Do(r)
			Expect(err).NotTo(HaveOccurred())
			defer func() { _ = resp.Body.Close() }()
			body, err := io.ReadAll(resp.Body)
			Expect(err).NotTo(HaveOccurred())
			return resp.StatusCode, string(body)
		}
		at := map[string]string{}
		for _, deployment := range []string{gatewayName, controllersName} {
			var d appsv1.Deployment
			Expect(admin.Get(ctx, client.ObjectKey{Namespace: system, Name: deployment}, &d)).To(Succeed())
			outside := &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: deployment + "-metrics-outside"},
				Spec: corev1.ServiceSpec{
					Type: corev1.ServiceTypeNodePort, Selector: d.Spec.Selector.MatchLabels,
					Ports: []corev1.ServicePort{{Port: 8080, TargetPort: intstr.FromString("metrics")}},
				},
			}
			ensure(ctx, outside)
			DeferCleanup(func(ctx context.Context) { Expect(admin.Delete(ctx, outside)).To(Succeed()) })
			at[deployment] = nodePort(ctx, system, outside.Name)
			Eventually(func(ctx context.Context) error {
				var t tls.Dialer
				t.Config = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
				conn, err := t.DialContext(ctx, "tcp", at[deployment])
				if err != nil {
					return err
				}
				return conn.Close()
			}).WithContext(ctx).Should(Succeed())
		}
		for _, address := range at {
			url := "https://" + address + "/metrics"
			status, _ := ask(ctx, url, "")
			Expect(status).To(Equal(http.StatusUnauthorized))
			// An agent's token is for the gateway alone. To one that is not good, controller-runtime answers 500.
			status, body := ask(ctx, url, tokenOf(ctx, onRedis.namespace, agentName))
			Expect(status).To(Equal(http.StatusInternalServerError))
			Expect(body).To(Equal("Authentication failed\n"))
			status, _ = ask(ctx, url, request.Status.Token)
			Expect(status).To(Equal(http.StatusForbidden))
		}
		mustKubectl(ctx, "apply", "-f", filepath.Join(root, "config", "prometheus", "reader.yaml"))
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "scraper-reads-metrics"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "holdfast-metrics-reader"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: scraper.Namespace, Name: scraper.Name}},
		}
		ensure(ctx, binding)
		DeferCleanup(func(ctx context.Context) {
			Expect(admin.Delete(ctx, binding)).To(Succeed())
			mustKubectl(ctx, "delete", "-f", filepath.Join(root, "config", "prometheus", "reader.yaml"))
		})
		for deployment, address := range at {
			url := "https://" + address + "/metrics"
			// What was refused is remembered for some seconds.
			Eventually(func(ctx context.Context) string {
				_, body := ask(ctx, url, request.Status.Token)
				return body
			}).WithContext(ctx).Should(ContainSubstring("\nholdfast_"), deployment)
		}
	})

	It("replaces its certificate while agents call: no call is lost or answered with a connection error", NodeTimeout(5*time.Minute), func(ctx SpecContext) {
		w := onRedis
		r := w.begin(ctx, load{concurrency: 8, faults: []string{"delay:50ms"}})
		before, err := shownBy(ctx, front.address)
		Expect(err).NotTo(HaveOccurred())
		// The controllers make another one, and a kubelet brings it to the pods when it next looks after them.
		Expect(admin.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: certificateName}})).To(Succeed())
		inARow := 0
		Eventually(func(ctx context.Context) (int, error) {
			now, err := shownBy(ctx, front.address)
			if inARow++; now == before {
				inARow = 0
			}
			return inARow, err
		}).WithContext(ctx).WithTimeout(4*time.Minute).WithPolling(100*time.Millisecond).Should(BeNumerically(">=", 30), "some gateway shows the certificate from before")
		r.paid(ctx, 20)
		saw := w.judge(ctx, "gateways' certificate replaced", r)
		w.lostNone(saw)
	})
})
