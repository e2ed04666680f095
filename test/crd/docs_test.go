// Every YAML that the documents show is one that the API server takes, strictly.

package crd

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// shown is a YAML block of a document.
var shown = regexp.MustCompile("(?m)^```yaml\n((?s:.*?))^```$")

// ofOthers marks what is no object of a cluster, or of a kind that is not here.
const ofOthers, flux = "<!-- of others -->", "<!-- flux -->"

// wholes are the smallest objects that a part can be shown of.
var wholes = map[string]string{
	"AgentTool": `
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: AgentTool
spec:
  effect: Mutating
  intentBudgetRef: {name: refunds}
  upstream:
    http: {url: "https://payments.example.com/refunds", methods: [POST], settleAfter: 1m}
  identity:
    intentID: ['call.header["idempotency-key"]']
    scope: ['path("order", call.body.orderId)']
  idempotency: {key: {header: Idempotency-Key}}
`,
	"IntentBudget": `
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IntentBudget
spec: {storeRef: {name: payments}}
`,
	"IdempotencyStore": `
apiVersion: guardrails.holdfast.dev/v1alpha1
kind: IdempotencyStore
spec: {}
`,
}

// partOf puts a part into the whole of a kind.
func partOf(kind, part string) (*unstructured.Unstructured, error) {
	var fields map[string]any
	if err := yaml.UnmarshalStrict([]byte(part), &fields); err != nil {
		return nil, err
	}
	if _, whole := fields["spec"]; !whole {
		fields = map[string]any{"spec": fields}
	}
	o := object(wholes[kind])
	merge(o.Object, fields)
	o.SetName("shown")
	text, err := o.MarshalJSON()
	if err == nil {
		err = o.UnmarshalJSON(text) // whole numbers as int64
	}
	return o, err
}

func merge(into, from map[string]any) {
	for k, v := range from {
		old, isMap := into[k].(map[string]any)
		if now, ok := v.(map[string]any); ok && isMap {
			merge(old, now)
			continue
		}
		into[k] = v
	}
}

// take creates an object in a dry run.
func take(t *testing.T, o *unstructured.Unstructured) error {
	t.Helper()
	c := strict()
	if o.GetKind() == "PaymentHold" {
		c = client.WithFieldValidation(as(operator), metav1.FieldValidationStrict)
	}
	o.SetName("shown-" + strings.ToLower(o.GetKind()))
	if o.GetKind() != "Namespace" {
		o.SetNamespace(namespace)
	}
	return c.Create(t.Context(), o, client.DryRunAll)
}

func TestWhatTheDocumentsShowIsTaken(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		found := shown.FindAllSubmatchIndex(text, -1)
		if n := strings.Count(string(text), "```yaml"); n != len(found) {
			t.Errorf("%s shows %d blocks, and %d are read", page, n, len(found))
		}
		for i, m := range found {
			// The line before a block may carry a mark.
			before := strings.Split(strings.TrimSuffix(string(text[:m[0]]), "\n"), "\n")
			mark, block := before[len(before)-1], string(text[m[2]:m[3]])
			if mark == ofOthers || mark == flux {
				continue
			}
			blocks++
			t.Run(fmt.Sprintf("%s/%d", filepath.Base(page), i+1), func(t *testing.T) {
				if strings.Contains(block, "apiVersion:") {
					objects, err := decode(strings.NewReader(block))
					if err != nil {
						t.Fatalf("%v:\n%s", err, block)
					}
					for _, o := range objects {
						if err := take(t, o); err != nil {
							t.Errorf("%v:\n%s", err, block)
						}
					}
					return
				}
				// One block may show several ways of one thing.
				for _, part := range regexp.MustCompile(`(?m)^spec:`).Split(block, -1) {
					if strings.TrimSpace(part) == "" {
						continue
					}
					if strings.Contains(block, "\nspec:") || strings.HasPrefix(block, "spec:") {
						part = "spec:" + part
					}
					kinds := []string{"AgentTool", "IntentBudget", "IdempotencyStore"}
					if kind, ok := strings.CutPrefix(strings.TrimSuffix(mark, " -->"), "<!-- part of "); ok {
						kinds = []string{kind}
					}
					var errs []string
					for _, kind := range kinds {
						o, err := partOf(kind, part)
						if err == nil {
							err = take(t, o)
						}
						if err == nil {
							errs = nil
							break
						}
						errs = append(errs, kind+": "+err.Error())
					}
					if len(errs) > 0 {
						t.Errorf("no kind takes this; mark what is of others with %s:\n%s\n%s", ofOthers, part, strings.Join(errs, "\n"))
					}
				}
			})
		}
	}
	if blocks < 20 {
		t.Errorf("only %d blocks were found", blocks)
	}
}
