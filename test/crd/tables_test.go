// The machinery of the tables: each case changes a valid object and says what the API server must answer.

package crd

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// change is one change of an object.
type change func(map[string]any)

// set writes a field, named by its path with dots.
func set(path string, value any) change {
	return func(o map[string]any) {
		if err := unstructured.SetNestedField(o, value, strings.Split(path, ".")...); err != nil {
			panic(err)
		}
	}
}

// remove removes a field.
func remove(path string) change {
	return func(o map[string]any) {
		unstructured.RemoveNestedField(o, strings.Split(path, ".")...)
	}
}

// tableCase is a row. want is a part of the expected error; empty: the object is accepted.
type tableCase struct {
	name    string
	changes []change
	want    string
}

func object(text string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		panic(err)
	}
	o.SetNamespace(namespace)
	// As the API server's decoder has it: whole numbers as int64.
	content, err := o.MarshalJSON()
	if err == nil {
		err = o.UnmarshalJSON(content)
	}
	if err != nil {
		panic(err)
	}
	return o
}

// creating runs a table of objects that are made.
func creating(t *testing.T, c client.Client, valid *unstructured.Unstructured, table []tableCase) {
	t.Helper()
	for _, tc := range append([]tableCase{{name: "valid"}}, table...) {
		t.Run("create/"+tc.name, func(t *testing.T) {
			o := valid.DeepCopy()
			o.SetName("created")
			for _, change := range tc.changes {
				change(o.Object)
			}
			check(t, c.Create(t.Context(), o, client.DryRunAll), tc.want)
		})
	}
}

// updating runs a table of objects that are changed after they were made.
func updating(t *testing.T, maker, c client.Client, valid *unstructured.Unstructured, table []tableCase) {
	t.Helper()
	o := valid.DeepCopy()
	o.SetName("updated")
	if err := maker.Create(t.Context(), o); err != nil {
		t.Fatalf("making the object that is changed: %v", err)
	}
	t.Cleanup(func() { mustDelete(t, o) })
	for _, tc := range table {
		t.Run("update/"+tc.name, func(t *testing.T) {
			changed := o.DeepCopy()
			for _, change := range tc.changes {
				change(changed.Object)
			}
			check(t, c.Update(t.Context(), changed, client.DryRunAll), tc.want)
		})
	}
	t.Run("update/a JSON patch that removes the spec", func(t *testing.T) {
		err := c.Patch(t.Context(), o.DeepCopy(), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"remove","path":"/spec"}]`)), client.DryRunAll)
		check(t, err, "spec: Required value")
	})
	t.Run("update/a merge patch that removes the spec", func(t *testing.T) {
		err := c.Patch(t.Context(), o.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec":null}`)), client.DryRunAll)
		check(t, err, "spec: Required value")
	})
}

func check(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("should be accepted, got: %v", err)
	case want != "" && err == nil:
		t.Errorf("should be refused with %q, was accepted", want)
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("should be refused with %q, got: %v", want, err)
	}
}

func mustDelete(t *testing.T, o client.Object) {
	t.Helper()
	if err := admin.Delete(context.Background(), o); err != nil {
		t.Errorf("removing %s: %v", o.GetName(), err)
	}
}

// strict is a client with all rights whose requests are strictly validated.
func strict() client.Client { return client.WithFieldValidation(admin, metav1.FieldValidationStrict) }

// repeat is a list of n different strings.
func repeat(n int, format string) []any {
	list := make([]any, n)
	for i := range list {
		list[i] = fmt.Sprintf(format, i)
	}
	return list
}

// letters is a text of n letters.
func letters(n int) string { return strings.Repeat("x", n) }

// resolve is a merge patch that sets the resolution.
func resolve(resolution map[string]any) client.Patch {
	content, err := json.Marshal(map[string]any{"spec": map[string]any{"resolution": resolution}})
	if err != nil {
		panic(err)
	}
	return client.RawPatch(types.MergePatchType, content)
}
