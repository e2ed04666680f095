// Package gitops tests what GitOps tools make of the kinds: Argo CD's health checks with its
// own test data, kstatus, and the health expressions that are documented for Flux.
package gitops

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/google/cel-go/cel"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const (
	group     = "guardrails.holdfast.dev"
	argoDir   = "../../config/argocd"
	scriptDir = argoDir + "/resource_customizations/" + group
	crdDir    = "../../config/crd/bases"
	page      = "../../docs/gitops.md"
)

// health is what a check says.
type health struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

// example is an object, and what Argo CD must say of it.
type example struct {
	kind, file string
	object     *unstructured.Unstructured
	want       health
}

func read(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// kinds are all that have a CRD, each with its schema's default of the status.
func kinds(t *testing.T) map[string]map[string]any {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(crdDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]any{}
	for _, file := range files {
		var crd map[string]any
		read(t, file, &crd)
		kind, _, err := unstructured.NestedString(crd, "spec", "names", "kind")
		if err != nil {
			t.Fatal(err)
		}
		versions, _, err := unstructured.NestedSlice(crd, "spec", "versions")
		if err != nil || len(versions) != 1 {
			t.Fatalf("%s: %d versions, %v", file, len(versions), err)
		}
		version, ok := versions[0].(map[string]any)
		if !ok {
			t.Fatalf("%s: a version is a %T", file, versions[0])
		}
		fallback, found, err := unstructured.NestedMap(version, "schema", "openAPIV3Schema", "properties", "status", "default")
		if err != nil || !found {
			t.Fatalf("%s: a new object has no status: %v", file, err)
		}
		out[kind] = fallback
	}
	if len(out) < 5 {
		t.Fatalf("only %d kinds were found", len(out))
	}
	return out
}

// examples are those of Argo CD's test data.
func examples(t *testing.T) []example {
	t.Helper()
	var out []example
	for kind := range kinds(t) {
		var list struct {
			Tests []struct {
				HealthStatus health `json:"healthStatus"`
				InputPath    string `json:"inputPath"`
			} `json:"tests"`
		}
		dir := filepath.Join(scriptDir, kind)
		read(t, filepath.Join(dir, "health_test.yaml"), &list)
		if len(list.Tests) < 4 {
			t.Errorf("%s has %d examples", kind, len(list.Tests))
		}
		used := map[string]bool{}
		for _, test := range list.Tests {
			e := example{kind: kind, file: filepath.Base(test.InputPath), object: &unstructured.Unstructured{}, want: test.HealthStatus}
			read(t, filepath.Join(dir, test.InputPath), &e.object.Object)
			// As a decoder of the API server has it: whole numbers as int64.
			text, err := e.object.MarshalJSON()
			if err == nil {
				err = e.object.UnmarshalJSON(text)
			}
			if err != nil {
				t.Fatalf("%s: %v", e.file, err)
			}
			used[e.file] = true
			out = append(out, e)
		}
		files, err := filepath.Glob(filepath.Join(dir, "testdata", "*.yaml"))
		if err != nil || len(files) != len(used) {
			t.Errorf("%s: %d files of test data, and %d are used: %v", kind, len(files), len(used), err)
		}
	}
	return out
}

// value turns what a decoder has read into what a script sees.
func value(l *lua.LState, v any) lua.LValue {
	switch v := v.(type) {
	case nil:
		return lua.LNil
	case bool:
		return lua.LBool(v)
	case string:
		return lua.LString(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		t := l.NewTable()
		for _, e := range v {
			t.Append(value(l, e))
		}
		return t
	case map[string]any:
		t := l.NewTable()
		for k, e := range v {
			t.RawSetString(k, value(l, e))
		}
		return t
	}
	panic(fmt.Sprintf("%T in an object", v))
}

// judge runs a health check as Argo CD does: with the basic functions and those of tables alone.
func judge(script string, object map[string]any) (health, error) {
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			return health{}, err
		}
	}
	l.SetGlobal("obj", value(l, object))
	if err := l.DoString(script); err != nil {
		return health{}, err
	}
	answer, ok := l.Get(-1).(*lua.LTable)
	if !ok {
		return health{}, fmt.Errorf("the script returns a %s", l.Get(-1).Type())
	}
	return health{lua.LVAsString(answer.RawGetString("status")), lua.LVAsString(answer.RawGetString("message"))}, nil
}

func script(t *testing.T, kind string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(scriptDir, kind, "health.lua"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestArgoCDsHealthChecks(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range examples(t) {
		t.Run(e.kind+"/"+e.file, func(t *testing.T) {
			got, err := judge(script(t, e.kind), e.object.Object)
			if err != nil {
				t.Fatal(err)
			}
			if got != e.want {
				t.Errorf("is\n%+v\nshould be\n%+v", got, e.want)
			}
		})
		seen[e.want.Status] = true
		if verdict, _, _ := unstructured.NestedString(e.object.Object, "status", "verdict"); e.want.Status == "Degraded" && (e.kind == "PaymentHold" || verdict == "UNKNOWN_HOLD") {
			t.Errorf("%s/%s: what waits for a person is not degraded", e.kind, e.file)
		}
	}
	for _, s := range []string{"Healthy", "Progressing", "Suspended", "Degraded"} {
		if !seen[s] {
			t.Errorf("no example is %s", s)
		}
	}
}

// What Argo CD reads is what is tested.
func TestThePatchIsTheScripts(t *testing.T) {
	var patch struct {
		Kind string
		Data map[string]string
	}
	text, err := os.ReadFile(filepath.Join(argoDir, "argocd-cm.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &patch); err != nil {
		t.Fatal(err)
	}
	all := kinds(t)
	if patch.Kind != "ConfigMap" || len(patch.Data) != len(all) {
		t.Errorf("%s with %d checks for %d kinds: run make generate", patch.Kind, len(patch.Data), len(all))
	}
	for kind := range all {
		if patch.Data["resource.customizations.health."+group+"_"+kind] != script(t, kind) {
			t.Errorf("the check of %s is not its script: run make generate", kind)
		}
	}
}

// expected is what kstatus and Flux must make of what Argo CD says. They know no word for what
// waits for a person. A hold is current, and so is a held intent for Flux: the rollout of a change
// must neither fail nor wait for it. For kstatus by itself a held intent is in progress.
var expected = map[string]status.Status{
	"Healthy": status.CurrentStatus, "Progressing": status.InProgressStatus,
	"Degraded": status.FailedStatus, "Suspended": status.CurrentStatus,
}

func TestKstatus(t *testing.T) {
	for _, e := range examples(t) {
		if _, has := e.object.Object["status"]; !has {
			continue // there is none without: see TestANewObjectIsInProgress
		}
		got, err := status.Compute(e.object)
		if err != nil {
			t.Fatalf("%s/%s: %v", e.kind, e.file, err)
		}
		want := expected[e.want.Status]
		if e.kind == "PaymentIntent" && e.want.Status == "Suspended" {
			want = status.InProgressStatus
		}
		if got.Status != want {
			t.Errorf("%s/%s: kstatus says %s (%s), should be %s", e.kind, e.file, got.Status, got.Message, want)
		}
	}
}

// O03: before anybody has looked at it, an object has the status that its CRD gives it.
func TestANewObjectIsInProgress(t *testing.T) {
	for kind, fallback := range kinds(t) {
		o := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": group + "/v1alpha1", "kind": kind,
			"metadata": map[string]any{"name": "new", "namespace": "support", "generation": int64(1)},
			"status":   fallback,
		}}
		got, err := status.Compute(o)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if got.Status != status.InProgressStatus {
			t.Errorf("%s: a new object is %s for kstatus (%s)", kind, got.Status, got.Message)
		}
		if h, err := judge(script(t, kind), o.Object); err != nil || h.Status != "Progressing" {
			t.Errorf("%s: a new object is %+v for Argo CD: %v", kind, h, err)
		}
		if s, err := flux(t, kind, o.Object); err != nil || s != status.InProgressStatus {
			t.Errorf("%s: a new object is %s for Flux: %v", kind, s, err)
		}
	}
}

// expressions are a Kustomization's health expressions of one kind.
type expressions struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Current    string `json:"current"`
	InProgress string `json:"inProgress"`
	Failed     string `json:"failed"`
}

// documented are those that the page shows.
func documented(t *testing.T) map[string]expressions {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(text), "<!-- flux -->\n```yaml\n")
	shown, _, ended := strings.Cut(after, "```\n<!-- /flux -->")
	if !found || !ended {
		t.Fatalf("%s shows no expressions between <!-- flux --> and <!-- /flux -->", page)
	}
	var kustomization struct {
		Spec struct {
			HealthCheckExprs []expressions `json:"healthCheckExprs"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal([]byte(shown), &kustomization); err != nil {
		t.Fatal(err)
	}
	out := map[string]expressions{}
	for _, e := range kustomization.Spec.HealthCheckExprs {
		if e.APIVersion != group+"/v1alpha1" {
			t.Errorf("%s of %s", e.Kind, e.APIVersion)
		}
		out[e.Kind] = e
	}
	return out
}

// flux evaluates the expressions as kustomize-controller does: another generation is in
// progress; then inProgress, failed and current are asked, in this order.
func flux(t *testing.T, kind string, object map[string]any) (status.Status, error) {
	t.Helper()
	e, ok := documented(t)[kind]
	if !ok {
		return "", fmt.Errorf("%s shows no expressions of %s", page, kind)
	}
	env, err := cel.NewEnv(cel.Variable("metadata", cel.DynType), cel.Variable("spec", cel.DynType), cel.Variable("status", cel.DynType))
	if err != nil {
		return "", err
	}
	observed, has, err := unstructured.NestedInt64(object, "status", "observedGeneration")
	if err != nil {
		return "", err
	}
	if generation, _, err := unstructured.NestedInt64(object, "metadata", "generation"); err != nil || has && observed != generation {
		return status.InProgressStatus, err
	}
	for _, ask := range []struct {
		expression string
		then       status.Status
	}{{e.InProgress, status.InProgressStatus}, {e.Failed, status.FailedStatus}, {e.Current, status.CurrentStatus}} {
		if ask.expression == "" {
			continue
		}
		ast, issues := env.Compile(ask.expression)
		if issues.Err() != nil {
			return "", fmt.Errorf("%q: %w", ask.expression, issues.Err())
		}
		program, err := env.Program(ast)
		if err != nil {
			return "", err
		}
		yields, _, err := program.Eval(map[string]any{"metadata": object["metadata"], "spec": object["spec"], "status": object["status"]})
		if err != nil {
			return "", fmt.Errorf("%q: %w", ask.expression, err)
		}
		if yields.Value() == true {
			return ask.then, nil
		}
	}
	return status.InProgressStatus, nil
}

func TestFluxsHealthExpressions(t *testing.T) {
	for _, e := range examples(t) {
		if _, has := e.object.Object["status"]; !has {
			continue
		}
		got, err := flux(t, e.kind, e.object.Object)
		if err != nil {
			t.Fatalf("%s/%s: %v", e.kind, e.file, err)
		}
		if got != expected[e.want.Status] {
			t.Errorf("%s/%s: Flux says %s, should be %s", e.kind, e.file, got, expected[e.want.Status])
		}
	}
}
