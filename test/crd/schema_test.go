// What must hold for every field of every kind: a bound, a description that begins with its name, a list type,
// conditions that are a map, and no default in a spec.

package crd

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func crds(t *testing.T) []*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	var list []*apiextensionsv1.CustomResourceDefinition
	for _, o := range rendered {
		if o.GetKind() != "CustomResourceDefinition" {
			continue
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, crd, true); err != nil {
			t.Fatalf("%s: %v", o.GetName(), err)
		}
		list = append(list, crd)
	}
	if len(list) != 5 {
		t.Fatalf("found %d kinds, want 5", len(list))
	}
	return list
}

// faults walks a schema and lists what breaks the rules.
func faults(path string, s *apiextensionsv1.JSONSchemaProps) []string {
	var found []string
	fault := func(format string, args ...any) { found = append(found, path+": "+fmt.Sprintf(format, args...)) }

	if s.Default != nil && strings.HasPrefix(path, "spec") {
		fault("a default in a spec is a permanent difference for GitOps tools")
	}
	switch {
	case s.XIntOrString:
		if len(s.XValidations) == 0 {
			fault("a quantity without bounds")
		}
	case s.Type == "string":
		if s.MaxLength == nil && len(s.Enum) == 0 && s.Format == "" {
			fault("a string without maxLength, enum or format")
		}
	case s.Type == "integer":
		if s.Minimum == nil {
			fault("a number without minimum")
		}
	case s.Type == "array":
		if s.MaxItems == nil {
			fault("a list without maxItems")
		}
		if s.XListType == nil {
			fault("a list without list type")
		}
		if strings.HasSuffix(path, ".conditions") && (s.XListType == nil || *s.XListType != "map" || !slices.Equal(s.XListMapKeys, []string{"type"})) {
			fault("conditions that are not a map by type")
		}
		if s.Items == nil || s.Items.Schema == nil {
			fault("a list without a schema of its items")
		} else {
			found = append(found, faults(path+"[]", s.Items.Schema)...)
		}
	case s.Type == "boolean":
		fault("an enum says more than a boolean")
	case s.Type == "object":
		if s.XPreserveUnknownFields != nil || s.AdditionalProperties != nil {
			fault("an object of unknown fields")
		}
	default:
		fault("type %q is not known here", s.Type)
	}
	for name, property := range s.Properties {
		if !strings.HasPrefix(property.Description, name+" ") {
			found = append(found, fmt.Sprintf("%s.%s: the description does not begin with the field's name: %.60q", path, name, property.Description))
		}
		found = append(found, faults(path+"."+name, &property)...)
	}
	return found
}

func TestEveryFieldIsBoundedAndDescribed(t *testing.T) {
	for _, crd := range crds(t) {
		t.Run(crd.Spec.Names.Kind, func(t *testing.T) {
			version := crd.Spec.Versions[0]
			if len(crd.Spec.Versions) != 1 || version.Name != "v1alpha1" || crd.Spec.Group != "guardrails.holdfast.dev" {
				t.Fatal("one group, one version")
			}
			if crd.Spec.Scope != apiextensionsv1.NamespaceScoped || !slices.Equal(crd.Spec.Names.Categories, []string{"guardrails"}) {
				t.Error("must be namespaced, of category guardrails")
			}
			if version.Subresources == nil || version.Subresources.Status == nil {
				t.Error("must have a status subresource")
			}
			root := version.Schema.OpenAPIV3Schema
			if !slices.Equal(root.Required, []string{"spec"}) {
				t.Errorf("exactly spec must be required, is %v", root.Required)
			}
			for _, name := range []string{"spec", "status"} {
				s := root.Properties[name]
				if !strings.HasPrefix(s.Description, name+" ") {
					t.Errorf("%s: the description does not begin with the field's name", name)
				}
				for _, f := range faults(name, &s) {
					t.Error(f)
				}
			}
		})
	}
}

// The walker itself must find each kind of fault.
func TestTheWalkerFindsFaults(t *testing.T) {
	described := func(name string, s apiextensionsv1.JSONSchemaProps) *apiextensionsv1.JSONSchemaProps {
		s.Description = name + " is described"
		return &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{name: s}}
	}
	max, set := int64(1), "set"
	items := &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &apiextensionsv1.JSONSchemaProps{Type: "string", MaxLength: &max}}
	for want, s := range map[string]*apiextensionsv1.JSONSchemaProps{
		"":                                   described("x", apiextensionsv1.JSONSchemaProps{Type: "string", MaxLength: &max}),
		"without maxLength, enum or format":  described("x", apiextensionsv1.JSONSchemaProps{Type: "string"}),
		"without minimum":                    described("x", apiextensionsv1.JSONSchemaProps{Type: "integer"}),
		"without maxItems":                   described("x", apiextensionsv1.JSONSchemaProps{Type: "array", XListType: &set, Items: items}),
		"without list type":                  described("x", apiextensionsv1.JSONSchemaProps{Type: "array", MaxItems: &max, Items: items}),
		"conditions that are not a map":      described("conditions", apiextensionsv1.JSONSchemaProps{Type: "array", MaxItems: &max, XListType: &set, Items: items}),
		"a default in a spec":                described("x", apiextensionsv1.JSONSchemaProps{Type: "string", MaxLength: &max, Default: &apiextensionsv1.JSON{Raw: []byte(`"a"`)}}),
		"an enum says more":                  described("x", apiextensionsv1.JSONSchemaProps{Type: "boolean"}),
		"an object of unknown fields":        described("x", apiextensionsv1.JSONSchemaProps{Type: "object", AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Allows: true}}),
		"does not begin with the field's":    {Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{"x": {Type: "string", MaxLength: &max, Description: "The x."}}},
		"spec.x[]: a string without maxLeng": described("x", apiextensionsv1.JSONSchemaProps{Type: "array", MaxItems: &max, XListType: &set, Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &apiextensionsv1.JSONSchemaProps{Type: "string"}}}),
		"a quantity without bounds":          described("x", apiextensionsv1.JSONSchemaProps{XIntOrString: true}),
		`type "" is not known`:               described("x", apiextensionsv1.JSONSchemaProps{}),
	} {
		found := faults("spec", s)
		if want == "" && len(found) != 0 || want != "" && (len(found) != 1 || !strings.Contains(found[0], want)) {
			t.Errorf("want one fault with %q, found %q", want, found)
		}
	}
}

// A new object reads as in progress before the operator has looked at it.
func TestANewObjectIsPending(t *testing.T) {
	samples, err := readSamples()
	if err != nil {
		t.Fatal(err)
	}
	hold := held(t, "pending", nil)
	want := map[string][]string{
		"AgentTool":        {"Accepted", "Programmed", "Ready"},
		"IntentBudget":     {"Ready"},
		"IdempotencyStore": {"Durable", "EpochAccepted", "Ready"},
		"PaymentHold":      {"Held", "Ready", "Resolved"},
		"PaymentIntent":    {"Admitted", "Ready", "Settled"},
	}
	seen := map[string]bool{}
	for _, o := range append(samples, hold) {
		conditions, ours := want[o.GetKind()]
		if !ours {
			continue
		}
		seen[o.GetKind()] = true
		got := &unstructured.Unstructured{}
		got.SetGroupVersionKind(o.GroupVersionKind())
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(o), got); err != nil {
			t.Fatal(err)
		}
		list, _, err := unstructured.NestedSlice(got.Object, "status", "conditions")
		if err != nil {
			t.Fatal(err)
		}
		var types []string
		for _, c := range list {
			condition := c.(map[string]any)
			types = append(types, condition["type"].(string))
			if condition["status"] != "Unknown" || condition["reason"] != "Pending" || condition["lastTransitionTime"] != "1970-01-01T00:00:00Z" {
				t.Errorf("%s %s: condition %v, want Unknown, Pending, 1970", o.GetKind(), o.GetName(), condition)
			}
		}
		slices.Sort(types)
		if !slices.Equal(types, conditions) {
			t.Errorf("%s %s: conditions %v, want %v", o.GetKind(), o.GetName(), types, conditions)
		}
	}
	if len(seen) != len(want) {
		t.Errorf("saw only the kinds %v", seen)
	}
}
