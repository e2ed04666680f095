// The samples read back as they were written, and the typed API loses nothing of them.

package crd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// O02: the smallest sample, applied and read back, is the same; and so is every other.
func TestSamplesReadBackTheSame(t *testing.T) {
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	// The smallest one has no namespace of its own.
	smallest := map[string]bool{"IdempotencyStore default/payments": false, "IntentBudget default/refunds": false, "AgentTool default/refund": false}
	ours := 0
	for _, o := range samples {
		if o.GroupVersionKind().Group != "guardrails.holdfast.dev" {
			continue
		}
		ours++
		if name := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName(); o.GetNamespace() == "default" {
			if _, known := smallest[name]; !known {
				t.Errorf("%s is of no known sample: the smallest one is %v", name, smallest)
			}
			smallest[name] = true
		}
		t.Run(o.GetKind()+" "+o.GetNamespace()+" "+o.GetName(), func(t *testing.T) {
			read := func() *unstructured.Unstructured {
				got := &unstructured.Unstructured{}
				got.SetGroupVersionKind(o.GroupVersionKind())
				if err := admin.Get(t.Context(), client.ObjectKeyFromObject(o), got); err != nil {
					t.Fatal(err)
				}
				return got
			}
			current := read()
			if want, got := text(t, o.Object["spec"]), text(t, current.Object["spec"]); got != want {
				t.Errorf("the spec was applied as\n%s\nand reads back as\n%s", want, got)
			}
			// The first write after creation stores the status that the CRD defaults, once: creation drops any status,
			// and the default of an object without one is filled in on reading.
			versions := make([]string, 2)
			for i := range versions {
				if err := apply(t.Context(), admin, o.DeepCopy()); err != nil {
					t.Fatal(err)
				}
				current = read()
				versions[i] = current.GetResourceVersion()
			}
			if versions[0] != versions[1] {
				t.Error("applying the same again should change nothing")
			}

			typed, err := scheme.New(o.GroupVersionKind())
			if err != nil {
				t.Fatal(err)
			}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(current.Object, typed, true); err != nil {
				t.Fatal(err)
			}
			back, err := runtime.DefaultUnstructuredConverter.ToUnstructured(typed)
			if err != nil {
				t.Fatal(err)
			}
			if want, got := text(t, keys(o.Object["spec"])), text(t, keys(back["spec"])); got != want {
				t.Errorf("the spec has the fields\n%s\nand the typed API keeps\n%s", want, got)
			}
			// A duration may be written in another way by a typed client; the API server must still take it.
			if err := strict().Update(t.Context(), &unstructured.Unstructured{Object: back}, client.DryRunAll); err != nil {
				t.Errorf("what a typed client writes should be accepted: %v", err)
			}
		})
	}
	for name, read := range smallest {
		if !read {
			t.Errorf("the smallest sample has no %s", name)
		}
	}
	if ours < 8 {
		t.Errorf("only %d samples are of this group", ours)
	}
}

// kubectl apply -k config/samples has every sample that needs nothing else, and no object twice.
func TestSamplesStandBesideEachOther(t *testing.T) {
	objects, err := kustomize(t.Context(), filepath.Join(configDir, "samples"))
	if err != nil {
		t.Fatal(err)
	}
	name := func(o *unstructured.Unstructured) string {
		return o.GroupVersionKind().GroupKind().String() + " " + o.GetNamespace() + "/" + o.GetName()
	}
	there := map[string]bool{}
	for _, o := range objects {
		there[name(o)] = true
	}
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	alone := 0
	for _, o := range samples {
		// minimal.yaml is for a namespace of one's own.
		if smallest := o.GetNamespace() == metav1.NamespaceDefault; smallest == there[name(o)] {
			t.Errorf("is %s among the samples that go together? %v", name(o), there[name(o)])
		} else if !smallest {
			alone++
		}
	}
	if alone != len(objects) {
		t.Errorf("%d objects are applied together, and the samples have %d of their own", len(objects), alone)
	}
}

// The README's first tool stays short.
func TestTheMinimalSampleIsMinimal(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(configDir, "samples", "minimal.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(content), "\n"); n > 25 {
		t.Errorf("minimal.yaml has %d lines, want at most 25", n)
	}
}

func text(t *testing.T, v any) string {
	t.Helper()
	content, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// keys replaces every scalar, so that only the fields are compared.
func keys(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for k, e := range v {
			out[k] = keys(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = keys(e)
		}
		return out
	}
	return reflect.ValueOf(v).IsValid()
}
