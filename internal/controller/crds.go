// This file compares the API that the cluster serves with the types of this binary.
//
// A field that the served schema lacks is dropped by the API server without a word:
// a guard's setting that silently does not count. So the process refuses to serve.

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// ErrOldAPI says that the cluster's CRDs are not those that this binary needs.
var ErrOldAPI = errors.New("the cluster's CRDs of " + v1alpha1.GroupName + " do not fit this binary")

var kinds = map[string]reflect.Type{
	"AgentTool":        reflect.TypeFor[v1alpha1.AgentTool](),
	"IdempotencyStore": reflect.TypeFor[v1alpha1.IdempotencyStore](),
	"IntentBudget":     reflect.TypeFor[v1alpha1.IntentBudget](),
	"PaymentHold":      reflect.TypeFor[v1alpha1.PaymentHold](),
	"PaymentIntent":    reflect.TypeFor[v1alpha1.PaymentIntent](),
}

// CheckAPI returns ErrOldAPI with what is missing. The API server publishes a CRD some
// moments after it was made: a lack is believed only when it lasts as long as patience.
func CheckAPI(ctx context.Context, cfg *rest.Config, patience time.Duration) error {
	dc, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return fmt.Errorf("ask the API server for its schema: %w", err)
	}
	deadline := time.Now().Add(patience)
	for {
		missing, err := missingFromAPI(dc)
		if err == nil && len(missing) == 0 {
			return nil
		}
		if !time.Now().Before(deadline) {
			if err != nil {
				return fmt.Errorf("ask the API server for the schema of %s: %w", v1alpha1.GroupVersion, err)
			}
			return fmt.Errorf("%w: missing: %s; apply the CRDs of this version (config/crd)", ErrOldAPI, strings.Join(missing, ", "))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// openAPISchema is the part of a schema that is compared.
type openAPISchema struct {
	Ref                  string                    `json:"$ref"`
	AllOf                []openAPISchema           `json:"allOf"`
	Properties           map[string]openAPISchema  `json:"properties"`
	Items                *openAPISchema            `json:"items"`
	AdditionalProperties *json.RawMessage          `json:"additionalProperties"`
	GVKs                 []schema.GroupVersionKind `json:"x-kubernetes-group-version-kind"`
}

func missingFromAPI(dc discovery.DiscoveryInterface) ([]string, error) {
	names := slices.Sorted(maps.Keys(kinds))
	served, err := dc.ServerResourcesForGroupVersion(v1alpha1.GroupVersion.String())
	if apierrors.IsNotFound(err) {
		return names, nil
	}
	if err != nil {
		return nil, err
	}
	var missing []string
	for _, kind := range names {
		if !slices.ContainsFunc(served.APIResources, func(r metav1.APIResource) bool { return r.Kind == kind && !strings.Contains(r.Name, "/") }) {
			missing = append(missing, kind)
		}
	}
	if len(missing) > 0 {
		return missing, nil
	}
	paths, err := dc.OpenAPIV3().Paths()
	if err != nil {
		return nil, err
	}
	gv, ok := paths["apis/"+v1alpha1.GroupVersion.String()]
	if !ok {
		return names, nil
	}
	raw, err := gv.Schema("application/json")
	if err != nil {
		return nil, err
	}
	var doc struct {
		Components struct {
			Schemas map[string]openAPISchema `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, err
	}
	for _, kind := range names {
		want := v1alpha1.GroupVersion.WithKind(kind)
		found := false
		for _, s := range doc.Components.Schemas {
			if slices.Contains(s.GVKs, want) {
				found = true
				missing = append(missing, missingFields(kinds[kind], s, kind, doc.Components.Schemas)...)
			}
		}
		if !found {
			missing = append(missing, kind)
		}
	}
	return missing, nil
}

// missingFields walks the fields of our own types; those of Kubernetes are its own matter.
func missingFields(t reflect.Type, s openAPISchema, path string, all map[string]openAPISchema) []string {
	for s.Ref != "" || len(s.AllOf) == 1 {
		if s.Ref == "" {
			s = s.AllOf[0]
			continue
		}
		s = all[strings.TrimPrefix(s.Ref, "#/components/schemas/")]
	}
	switch t.Kind() {
	case reflect.Pointer:
		return missingFields(t.Elem(), s, path, all)
	case reflect.Slice:
		if s.Items == nil {
			return nil // bytes, or not a list to the API server: its own field was found
		}
		return missingFields(t.Elem(), *s.Items, path+"[]", all)
	case reflect.Struct:
	default:
		return nil
	}
	if t.PkgPath() != reflect.TypeFor[v1alpha1.AgentTool]().PkgPath() {
		return nil
	}
	var missing []string
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" || !f.IsExported() {
			continue
		}
		if name == "" && strings.Contains(options, "inline") {
			continue // apiVersion and kind
		}
		p, ok := s.Properties[name]
		if !ok {
			missing = append(missing, path+"."+name)
			continue
		}
		missing = append(missing, missingFields(f.Type, p, path+"."+name, all)...)
	}
	return missing
}
