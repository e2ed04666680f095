// This file checks objects as the API server does when they are created: unknown
// fields, the schema, and the rules in it. What a cluster would refuse is refused here.

package retrytest

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/config/crd"
)

// schemas are those of the kinds that are checked, by kind.
type schemas map[string]schemaOf

type schemaOf struct {
	structural *structural.Structural
	validator  validation.SchemaValidator
	rules      *cel.Validator
}

// readSchemas reads the CRDs of this binary.
func readSchemas() (schemas, error) {
	out := schemas{}
	files, err := fs.Glob(crd.Bases, "bases/*.yaml")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := crd.Bases.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var d apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &d); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, version := range d.Spec.Versions {
			if version.Name != v1alpha1.GroupVersion.Version {
				continue
			}
			var props apiextensions.JSONSchemaProps
			if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(version.Schema.OpenAPIV3Schema, &props, nil); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			s, err := structural.NewStructural(&props)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			validator, _, err := validation.NewSchemaValidator(&props)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			out[d.Spec.Names.Kind] = schemaOf{s, validator, cel.NewValidator(s, true, celconfig.PerCallLimit)}
		}
	}
	return out, nil
}

// into checks an object and reads it into its type.
func (s schemas) into(ctx context.Context, o *unstructured.Unstructured, typed any) error {
	of, ok := s[o.GetKind()]
	if !ok {
		return fmt.Errorf("there is no kind %s", o.GetKind())
	}
	o = o.DeepCopy()
	delete(o.Object, "status") // the API server drops it
	unknown := pruning.PruneWithOptions(o.DeepCopy().Object, of.structural, true, structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	slices.Sort(unknown)
	var lines []string
	for _, path := range unknown {
		lines = append(lines, path+": there is no such field")
	}
	var errs field.ErrorList
	for _, why := range apivalidation.NameIsDNSSubdomain(o.GetName(), false) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), o.GetName(), why))
	}
	errs = append(errs, validation.ValidateCustomResource(nil, o.Object, of.validator)...)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, of.structural, o.Object)...)
	if len(errs) == 0 && len(lines) == 0 { // a rule may rely on the schema
		broken, _ := of.rules.Validate(ctx, nil, of.structural, o.Object, nil, celconfig.RuntimeCELCostBudget)
		errs = append(errs, broken...)
	}
	for _, e := range errs {
		lines = append(lines, e.Error())
	}
	if len(lines) > 0 {
		return fmt.Errorf("%s %s is not valid: %s", o.GetKind(), o.GetName(), strings.Join(unique(lines), "; "))
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, typed); err != nil {
		return fmt.Errorf("%s %s cannot be read: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}
