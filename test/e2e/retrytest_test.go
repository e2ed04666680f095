// The command retry-test against the gateways that run, as a team's CI runs it.

package e2e

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
)

var _ = Describe("retry-test", func() {
	It("passes a good tool, and finds the one that charges twice", func(ctx SpecContext) {
		w := newWorld(ctx)
		good := w.paymentTool(charge, "/charges")
		By("a good tool")
		w.retryTest(ctx, 0, good, "One effect in each of 4 scenarios")

		By("the same as the agent's ServiceAccount, with a token made for it")
		w.retryTest(ctx, 0, good, "One effect in each of 4 scenarios", "--service-account=agent")

		By("an identity that takes each request for a purchase of its own")
		bad := w.paymentTool("own", "/charges")
		own := v1alpha1.Expression(`call.header["x-request-id"]`)
		bad.Spec.Identity.IntentID = []v1alpha1.Expression{own}
		bad.Spec.Identity.Scope = []v1alpha1.Expression{`path("request", ` + own + `)`}
		w.add(ctx, bad.DeepCopy())
		w.retryTest(ctx, 2, w.paymentTool("own", "/charges"), "in the cluster is not the one in the files: apply it first")
		w.retryTest(ctx, 1, bad, "had 2 effects, and may have one. The calls were taken for 2 intents")

		By("an upstream that books twice for one request")
		double := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			for range 2 {
				if err == nil {
					err = ask(context.WithoutCancel(ctx), http.MethodPost, "/charges", jsonText(body), nil)
				}
			}
			if err != nil {
				answer.WriteHeader(http.StatusBadGateway)
				return
			}
			answer.WriteHeader(http.StatusCreated)
		}))
		DeferCleanup(double.Close)
		twice := w.paymentTool("twice", "/charges")
		twice.Spec.Upstream.HTTP.URL = double.URL
		w.add(ctx, twice.DeepCopy())
		w.retryTest(ctx, 1, twice, "the upstream itself books twice")
	}, NodeTimeout(5*time.Minute))
})

// jsonText is a body that is JSON already.
type jsonText []byte

func (t jsonText) MarshalJSON() ([]byte, error) { return t, nil }

// retryTest runs the command on a tool of this world, and wants this end and this in its report.
func (w *world) retryTest(ctx context.Context, code int, tool *v1alpha1.AgentTool, says string, args ...string) {
	GinkgoHelper()
	root, err := assets.Root(ctx)
	Expect(err).NotTo(HaveOccurred())
	object := tool.DeepCopy()
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("AgentTool"))
	text, err := yaml.Marshal(object)
	Expect(err).NotTo(HaveOccurred())
	text = append(text, fmt.Sprintf(`---
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: RetryTest
spec:
  toolRef: {name: %s}
  call:
    method: POST
    headers: {Idempotency-Key: "{{intent}}"}
    body: {accountId: %q, orderId: "{{order}}", amount: "{{number}}.00", memo: "request {{call}}"}
  effects:
    http: {url: "%s/charges?orderId={{order}}", count: body.entries}
`, tool.Name, w.namespace, all.ProviderURL())...)
	dir := GinkgoT().TempDir()
	file, junit := filepath.Join(dir, "tool.yaml"), filepath.Join(dir, "junit.xml")
	Expect(os.WriteFile(file, text, 0o600)).To(Succeed())

	cmd := exec.CommandContext(ctx, filepath.Join(root, "bin", "manager"),
		append([]string{"retry-test", "-f", file, "--kubeconfig", all.Kubeconfig, "--junit", junit}, args...)...)
	cmd.Env = append(os.Environ(), "HOLDFAST_URL="+anyGateway().url())
	if len(args) == 0 {
		cmd.Env = append(cmd.Env, "HOLDFAST_TOKEN="+w.token)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		Expect(err).NotTo(HaveOccurred())
	}
	Expect(cmd.ProcessState.ExitCode()).To(Equal(code), out.String())
	Expect(out.String()).To(ContainSubstring(says))
	report, err := os.ReadFile(junit)
	Expect(err).NotTo(HaveOccurred())
	var suites struct {
		Failures int `xml:"failures,attr"`
		Errors   int `xml:"errors,attr"`
	}
	Expect(xml.Unmarshal(report, &suites)).To(Succeed())
	Expect(suites.Failures > 0).To(Equal(code == 1), string(report))
	if code != 1 { // beside a fault there may be both
		Expect(suites.Errors > 0).To(Equal(code == 2), string(report))
	}
}
