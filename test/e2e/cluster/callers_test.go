// Whoever calls: the judge, who calls from outside through a NodePort, and the agents, which
// are pods that call as agents do and keep account of what they saw.

package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/holdfast-dev/holdfast/test/agent"
)

// The verdicts, as an agent reads them.
const (
	allow       = "ALLOW"
	replay      = "REPLAY"
	unknownHold = "UNKNOWN_HOLD"
)

const (
	// gatewayHost is what agents call, and what the gateways' certificate is for.
	gatewayHost = gatewayName + "." + system + ".svc"
	// caName is the ConfigMap with the authority of the gateways' certificate.
	caName = "holdfast-gateway-ca"
	caKey  = "ca.crt"
	// outsideName is the Service by which the judge calls.
	outsideName = "drill-gateway"
)

// front is where the judge calls, with a client that trusts what is there.
var front struct {
	address string
	client  *http.Client
}

// openFront has the gateways' Service once more, with a NodePort.
func openFront(ctx context.Context) {
	GinkgoHelper()
	var of corev1.Service
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: system, Name: gatewayName}, &of)).To(Succeed())
	Expect(of.Spec.Ports).To(HaveLen(1))
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: outsideName},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, Selector: of.Spec.Selector,
			Ports: []corev1.ServicePort{{Port: of.Spec.Ports[0].Port, TargetPort: of.Spec.Ports[0].TargetPort}},
		},
	}
	ensure(ctx, service)
	front.address = nodePort(ctx, system, outsideName)
	roots := x509.NewCertPool()
	Expect(roots.AppendCertsFromPEM([]byte(gatewayCA(ctx)))).To(BeTrue())
	front.client = &http.Client{
		Transport: &http.Transport{
			MaxIdleConnsPerHost: 32, DisableCompression: true,
			TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: gatewayHost, MinVersion: tls.VersionTLS12},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       30 * time.Second,
	}
}

// nodePort is where a Service is reached from outside, at the node that is never broken.
func nodePort(ctx context.Context, namespace, name string) string {
	GinkgoHelper()
	var s corev1.Service
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &s)).To(Succeed())
	return net.JoinHostPort(box.Address(steadyNode()), strconv.Itoa(int(s.Spec.Ports[0].NodePort)))
}

// gatewayCA waits until there is the authority of the gateways' certificate.
func gatewayCA(ctx context.Context) string {
	GinkgoHelper()
	var ca string
	Eventually(func(ctx context.Context) (string, error) {
		var m corev1.ConfigMap
		err := admin.Get(ctx, client.ObjectKey{Namespace: system, Name: caName}, &m)
		ca = m.Data[caKey]
		return ca, err
	}).WithContext(ctx).ShouldNot(BeEmpty())
	return ca
}

// trustGateways puts that authority where the agents' pods find it.
func (w *world) trustGateways(ctx context.Context) {
	GinkgoHelper()
	m := &corev1.ConfigMap{ObjectMeta: w.in(caName), Data: map[string]string{caKey: gatewayCA(ctx)}}
	ensure(ctx, m)
	Expect(admin.Update(ctx, m)).To(Succeed())
}

// call is one call of the tool charge.
type call struct{ id, body, fault string }

// reply is what a caller got. err is a transport error.
type reply struct {
	status int
	header http.Header
	body   string
	err    error
}

func (r reply) verdict() string { return r.header.Get("Holdfast-Verdict") }

func (r reply) String() string {
	return fmt.Sprintf("status %d, verdict %q, error %v, body %.2000s", r.status, r.verdict(), r.err, r.body)
}

type problem struct {
	Status int    `json:"status"`
	Reason string `json:"reason"`
	Hold   string `json:"hold"`
}

func (r reply) problem() problem {
	GinkgoHelper()
	Expect(r.header.Get("Content-Type")).To(Equal("application/problem+json"), r.String())
	var p problem
	Expect(json.Unmarshal([]byte(r.body), &p)).To(Succeed(), r.String())
	return p
}

func (w *world) toolURL() string {
	return "https://" + front.address + "/v1/namespaces/" + w.namespace + "/tools/" + charge
}

// call calls the tool from outside, as the agent.
func (w *world) call(ctx context.Context, c call) reply {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.toolURL(), strings.NewReader(c.body))
	if err != nil {
		return reply{err: err}
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", c.id)
	if c.fault != "" {
		request.Header.Set("Provider-Fault", c.fault)
	}
	return w.do(request)
}

func (w *world) do(request *http.Request) reply {
	request.Header.Set("Authorization", "Bearer "+w.token)
	return send(front.client, request)
}

func send(by *http.Client, request *http.Request) reply {
	answer, err := by.Do(request)
	if err != nil {
		return reply{err: err}
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	return reply{status: answer.StatusCode, header: answer.Header, body: string(body), err: err}
}

// pay calls until there is an answer of the guard's, and says what it must be.
func (w *world) pay(ctx context.Context, c call, status int, verdict string) reply {
	GinkgoHelper()
	got := w.answer(ctx, c)
	Expect(got.status).To(Equal(status), "%s: %s", c.id, got)
	Expect(got.verdict()).To(Equal(verdict), "%s: %s", c.id, got)
	return got
}

// answer calls again, under the same ID, what no gateway could answer.
func (w *world) answer(ctx context.Context, c call) reply {
	GinkgoHelper()
	var got reply
	Eventually(func(ctx context.Context) error {
		got = w.call(ctx, c)
		if got.err != nil || got.status == http.StatusServiceUnavailable || got.verdict() == "IN_FLIGHT" {
			return fmt.Errorf("%s: no answer: %s", c.id, got)
		}
		return nil
	}).WithContext(ctx).Should(Succeed())
	return got
}

// poll asks what became of an intent.
func (w *world) poll(ctx context.Context, id string) reply {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, w.toolURL()+"/intents/"+url.PathEscape(id), nil)
	if err != nil {
		return reply{err: err}
	}
	return w.do(request)
}

// load is what agents are to do.
type load struct {
	// concurrency is how many calls are in flight at once.
	concurrency int
	// faults are what goes wrong at the provider, in turn; none: all goes well.
	faults []string
	// impatience is after how long calls are made again, also where the answer names a later time; 0: when it says.
	impatience time.Duration
}

// run is an agent at work.
type run struct {
	w      *world
	prefix string
	pod    string
	// at is where its report is.
	at string
}

// report is what an agent saw.
type report struct{ agent.Report }

type intent = agent.Intent

// connectionErrors are all of them.
func (r report) connectionErrors() int {
	n := 0
	for _, of := range r.ConnectionErrors {
		n += of
	}
	return n
}

var runs atomic.Int64

// suiteBegan tells the intents of one run of the suite from those of another on the same cluster.
var suiteBegan = strconv.FormatInt(time.Now().Unix(), 36)

// begin starts an agent as a pod, and waits until it has been paid for its first order.
func (w *world) begin(ctx context.Context, l load) *run {
	GinkgoHelper()
	r := &run{w: w, prefix: fmt.Sprintf("%s-%d", suiteBegan, runs.Add(1))}
	r.pod = "agent-" + r.prefix
	args := []string{
		"--gateway=https://" + gatewayHost, "--ca-file=/etc/gateway-ca/" + caKey, "--token-file=/var/run/secrets/holdfast/token",
		"--namespace=" + w.namespace, "--tool=" + charge, "--account=" + w.namespace, "--prefix=" + r.prefix,
		"--concurrency=" + strconv.Itoa(l.concurrency), "--listen=:8080",
	}
	if len(l.faults) > 0 {
		args = append(args, "--faults="+strings.Join(l.faults, ","))
	}
	if l.impatience > 0 {
		args = append(args, "--impatience="+l.impatience.String())
	}
	pod := restricted(w.in(r.pod), "agent", args)
	pod.Spec.ServiceAccountName = agentName
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
			ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: audience, ExpirationSeconds: ptr.To(int64(600)), Path: "token"},
		}}}}},
		{Name: "ca", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: caName}}}},
	}
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{
		{Name: "token", MountPath: "/var/run/secrets/holdfast", ReadOnly: true}, {Name: "ca", MountPath: "/etc/gateway-ca", ReadOnly: true},
	}
	r.at = "http://" + expose(ctx, pod)
	DeferCleanup(func(ctx context.Context) {
		for _, o := range []client.Object{pod, &corev1.Service{ObjectMeta: w.in(r.pod)}} {
			Expect(client.IgnoreNotFound(admin.Delete(ctx, o, client.GracePeriodSeconds(0)))).To(Succeed())
		}
	})
	r.paid(ctx, 1)
	return r
}

// restricted is a pod of an image of ours, on the node that is never broken.
func restricted(meta metav1.ObjectMeta, image string, args []string) *corev1.Pod {
	meta.Labels = map[string]string{"app": meta.Name}
	return &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
		NodeSelector:                 map[string]string{corev1.LabelHostname: steadyNode()},
		RestartPolicy:                corev1.RestartPolicyNever,
		AutomountServiceAccountToken: ptr.To(false),
		EnableServiceLinks:           ptr.To(false),
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Containers: []corev1.Container{{
			Name: image, Image: "holdfast-dev/" + image + ":dev", ImagePullPolicy: corev1.PullNever, Args: args,
			Ports: []corev1.ContainerPort{{ContainerPort: 8080}},
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
				Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			},
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("20m"), corev1.ResourceMemory: resource.MustParse("32Mi"),
			}},
		}},
	}}
}

// expose makes a pod and a Service with a NodePort for it, and says where it is once it runs.
func expose(ctx context.Context, pod *corev1.Pod) string {
	GinkgoHelper()
	ensure(ctx, pod, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Selector: pod.Labels, Ports: []corev1.ServicePort{{Port: 8080}}},
	})
	Eventually(func(ctx context.Context) (string, error) {
		var now corev1.Pod
		err := admin.Get(ctx, client.ObjectKeyFromObject(pod), &now)
		if now.Status.Phase == corev1.PodRunning {
			return string(now.Status.Phase), err
		}
		return fmt.Sprintf("%s: %+v", now.Status.Phase, now.Status.ContainerStatuses), err
	}).WithContext(ctx).WithTimeout(2 * time.Minute).Should(Equal(string(corev1.PodRunning)))
	return nodePort(ctx, pod.Namespace, pod.Name)
}

// plain is the client of reports and of the provider.
var plain = &http.Client{Timeout: 30 * time.Second}

// ask is a request to a pod that answers in JSON.
func ask(ctx context.Context, method, to string, out any) error {
	request, err := http.NewRequestWithContext(ctx, method, to, nil)
	if err != nil {
		return err
	}
	got := send(plain, request)
	if got.err != nil || got.status >= 300 {
		return fmt.Errorf("%s %s: %s", method, to, got)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal([]byte(got.body), out)
}

// progress is what the agent has seen until now, without its intents.
func (r *run) progress(ctx context.Context) (report, error) {
	var now report
	err := ask(ctx, http.MethodGet, r.at+"/progress", &now)
	return now, err
}

// paid waits until so many more orders are known to be paid.
func (r *run) paid(ctx context.Context, more int) {
	GinkgoHelper()
	count := func(ctx context.Context) (int, error) {
		now, err := r.progress(ctx)
		return now.Ends[agent.Paid], err
	}
	var before int
	Eventually(func(ctx context.Context) (err error) {
		before, err = count(ctx)
		return err
	}).WithContext(ctx).Should(Succeed())
	Eventually(count).WithContext(ctx).WithTimeout(2*time.Minute).Should(BeNumerically(">=", before+more), func() string {
		now, err := r.progress(ctx)
		return fmt.Sprintf("%+v, %v", now, err)
	})
}

// end has the agent begin no order more, and waits until those that it began are at an end.
func (r *run) end(ctx context.Context) report {
	GinkgoHelper()
	var now report
	Eventually(func(ctx context.Context) error { return ask(ctx, http.MethodPost, r.at+"/stop", nil) }).WithContext(ctx).Should(Succeed())
	Eventually(func(ctx context.Context) (bool, error) {
		var err error
		now, err = r.progress(ctx)
		return now.Done, err
	}).WithContext(ctx).WithTimeout(3*time.Minute).Should(BeTrue(), func() string { return fmt.Sprintf("%+v", now) })
	var all report
	Eventually(func(ctx context.Context) error { return ask(ctx, http.MethodGet, r.at+"/report", &all) }).WithContext(ctx).Should(Succeed())
	return all
}
