// This file reads the files: a RetryTest, which exists only there and never in a
// cluster, and beside it the objects that a team applies anyway.

package retrytest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

const (
	kindTest   = "RetryTest"
	kindTool   = "AgentTool"
	kindBudget = "IntentBudget"
	kindStore  = "IdempotencyStore"
)

// RetryTest says how a tool is called and how its effects are counted.
type RetryTest struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Name      string `json:"name,omitempty"`
		Namespace string `json:"namespace,omitempty"`
	} `json:"metadata,omitempty"`
	Spec TestSpec `json:"spec"`
}

// TestSpec is the whole of it.
type TestSpec struct {
	// ToolRef names the AgentTool. Absent: the only one in the files.
	ToolRef *v1alpha1.ToolReference `json:"toolRef,omitempty"`
	Call    CallSpec                `json:"call"`
	// Effects say how they are counted. Absent only with --effects-command.
	Effects *EffectsSpec `json:"effects,omitempty"`
	// AtOnce is how many calls are made at the same time; 20.
	AtOnce int `json:"atOnce,omitempty"`
	// Patience is how long a caller comes back while it is told to; 60s.
	Patience *metav1.Duration `json:"patience,omitempty"`
}

// CallSpec describes one call. Its texts may hold placeholders.
type CallSpec struct {
	// Method; absent: the tool's, if it has only one.
	Method string `json:"method,omitempty"`
	// Path is what is appended to the tool's, with its slash, and may have a query.
	Path    string            `json:"path,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
	// Body is a value, sent as JSON, or a text, sent as it is.
	Body json.RawMessage `json:"body,omitempty"`
}

// EffectsSpec says how the effects of an order are counted: exactly one of HTTP and Command.
type EffectsSpec struct {
	HTTP *QuerySpec `json:"http,omitempty"`
	// Command is run as it is, without a shell. It prints a number, or a JSON list of what was found.
	Command []string `json:"command,omitempty"`
	// SettleWithin is the longest time from an answer until an effect is counted or never
	// will be. Absent: settleAfter of the AgentTool.
	SettleWithin *metav1.Duration `json:"settleWithin,omitempty"`
}

// QuerySpec is a GET whose answer tells what was moved.
type QuerySpec struct {
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers,omitempty"`
	// Count is CEL over body, order, intent and digits. It gives a number, or a list of what was found.
	Count string `json:"count"`
}

const (
	defaultAtOnce   = 20
	maxAtOnce       = 50 // of one caller, a gateway takes no more than a quarter of its places
	defaultPatience = time.Minute
	// longestSettling is what nobody has meant by leaving settleWithin out.
	longestSettling = 10 * time.Minute
)

// documents are what the files hold.
type documents struct {
	test    *RetryTest
	objects []*unstructured.Unstructured
}

// read reads all files.
func read(files []string, stdin io.Reader) (*documents, error) {
	out := &documents{}
	for _, file := range files {
		var text []byte
		var err error
		if file == "-" {
			text, err = io.ReadAll(stdin)
		} else {
			text, err = os.ReadFile(file)
		}
		if err == nil {
			err = out.add(text)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	if out.test == nil {
		return nil, fmt.Errorf("%s: there is no document of kind %s: it says how the tool is called and how its effects are counted", strings.Join(files, ", "), kindTest)
	}
	return out, nil
}

func (d *documents) add(text []byte) error {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for number := 1; ; number++ {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = d.addOne(doc)
		}
		if err != nil {
			return fmt.Errorf("document %d: %w", number, err)
		}
	}
}

func (d *documents) addOne(doc []byte) error {
	text, err := yaml.YAMLToJSONStrict(doc)
	if err != nil {
		return fmt.Errorf("is not YAML: %w", err)
	}
	if string(text) == "null" {
		return nil // only comments
	}
	o := &unstructured.Unstructured{}
	if err := o.UnmarshalJSON(text); err != nil {
		return fmt.Errorf("is no object with apiVersion and kind: %w", err)
	}
	if o.GroupVersionKind().Group == v1alpha1.GroupName && o.GetAPIVersion() != v1alpha1.GroupVersion.String() {
		return fmt.Errorf("apiVersion is %s: this version knows %s", o.GetAPIVersion(), v1alpha1.GroupVersion)
	}
	if o.GetKind() != kindTest || o.GetAPIVersion() != v1alpha1.GroupVersion.String() {
		d.objects = append(d.objects, o)
		return nil
	}
	if d.test != nil {
		return fmt.Errorf("is a second %s: test one at a time", kindTest)
	}
	d.test = &RetryTest{}
	if err := yaml.UnmarshalStrict(doc, d.test); err != nil {
		return fmt.Errorf("is not a valid %s: %w", kindTest, err)
	}
	return nil
}

// of are the objects of one of Holdfast's kinds.
func (d *documents) of(kind string) []*unstructured.Unstructured {
	var out []*unstructured.Unstructured
	for _, o := range d.objects {
		if o.GetKind() == kind && o.GetAPIVersion() == v1alpha1.GroupVersion.String() {
			out = append(out, o)
		}
	}
	return out
}

// plan is what will be done, with the effective value of every field.
type plan struct {
	namespace, tool string
	// toolObject and budgetObject are nil where the files do not have them.
	toolObject   *v1alpha1.AgentTool
	budgetObject *v1alpha1.IntentBudget

	call     CallSpec
	effects  *EffectsSpec
	atOnce   int
	patience time.Duration
	settle   time.Duration
}

// plan checks all that can be known without a gateway.
func (d *documents) plan(o options) (*plan, error) {
	kinds, err := readSchemas()
	if err != nil {
		return nil, fmt.Errorf("read the schemas of this program: %w", err)
	}
	spec := d.test.Spec
	p := &plan{call: spec.Call, effects: spec.Effects, atOnce: spec.AtOnce, patience: defaultPatience}
	object, err := d.chooseTool()
	if err != nil {
		return nil, err
	}
	if spec.ToolRef != nil {
		p.tool = spec.ToolRef.Name
	}
	var told []string
	for _, n := range []string{o.namespace, d.test.Metadata.Namespace} {
		if n != "" {
			told = append(told, n)
		}
	}
	if object != nil {
		p.tool, p.toolObject = object.GetName(), &v1alpha1.AgentTool{}
		if err := kinds.into(context.Background(), object, p.toolObject); err != nil {
			return nil, err
		}
		if p.toolObject.Spec.Upstream.HTTP == nil {
			return nil, notOverHTTP(p.tool)
		}
		if object.GetNamespace() != "" {
			told = append(told, object.GetNamespace())
		}
	}
	if told = unique(told); len(told) > 1 {
		return nil, fmt.Errorf("the tool is in namespace %s, as --namespace, the %s or the AgentTool say: let them say the same", strings.Join(told, " and in "), kindTest)
	}
	p.namespace = metav1.NamespaceDefault
	if len(told) > 0 {
		p.namespace = told[0]
	}
	if p.toolObject != nil {
		p.toolObject.Namespace = p.namespace
		if err := d.chooseBudget(kinds, p); err != nil {
			return nil, err
		}
	}
	// A store is not used, but whoever applies the file will find what is wrong with it.
	for _, s := range d.of(kindStore) {
		if err := kinds.into(context.Background(), s, &v1alpha1.IdempotencyStore{}); err != nil {
			return nil, err
		}
	}
	return p, p.check(spec, o)
}

// notOverHTTP: what runs inside its agent cannot be called from here.
func notOverHTTP(tool string) error {
	return fmt.Errorf("the AgentTool %s runs inside its agent (upstream.local) and cannot be called: test a tool with upstream.http", tool)
}

// chooseTool finds the AgentTool, or none if the files have none at all.
func (d *documents) chooseTool() (*unstructured.Unstructured, error) {
	tools := d.of(kindTool)
	var names []string
	for _, t := range tools {
		names = append(names, t.GetName())
	}
	ref := d.test.Spec.ToolRef
	switch {
	case ref != nil && ref.Name == "":
		return nil, fmt.Errorf("%s: spec.toolRef.name is empty: name the AgentTool", kindTest)
	case ref == nil && len(tools) == 1:
		return tools[0], nil
	case ref == nil && len(tools) == 0:
		return nil, fmt.Errorf("%s: spec.toolRef is missing, and the files have no AgentTool: name the tool, or give its file, too", kindTest)
	case ref == nil:
		return nil, fmt.Errorf("%s: spec.toolRef is missing: name one of %s", kindTest, strings.Join(names, ", "))
	case len(tools) == 0:
		return nil, nil
	}
	var found []*unstructured.Unstructured
	for _, t := range tools {
		if t.GetName() == ref.Name {
			found = append(found, t)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%s: spec.toolRef names %q, of which the files have %d: they have %s", kindTest, ref.Name, len(found), strings.Join(names, ", "))
	}
	return found[0], nil
}

// chooseBudget finds the tool's IntentBudget, if the files have it.
func (d *documents) chooseBudget(kinds schemas, p *plan) error {
	ref := p.toolObject.Spec.IntentBudgetRef
	if ref == nil {
		return nil
	}
	for _, b := range d.of(kindBudget) {
		if b.GetName() != ref.Name || b.GetNamespace() != "" && b.GetNamespace() != p.namespace {
			continue
		}
		if p.budgetObject != nil {
			return fmt.Errorf("the files have two IntentBudgets %s: leave one out", ref.Name)
		}
		p.budgetObject = &v1alpha1.IntentBudget{}
		if err := kinds.into(context.Background(), b, p.budgetObject); err != nil {
			return err
		}
		p.budgetObject.Namespace = p.namespace
	}
	return nil
}

func (p *plan) check(spec TestSpec, o options) error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%s: %s %s", kindTest, field, fmt.Sprintf(format, args...))
	}
	if p.toolObject != nil && p.toolObject.Spec.Effect != v1alpha1.EffectMutating {
		return fmt.Errorf("the AgentTool %s moves nothing (effect %s): there is nothing to test", p.tool, p.toolObject.Spec.Effect)
	}
	switch {
	case p.atOnce == 0:
		p.atOnce = defaultAtOnce
	case p.atOnce < 2 || p.atOnce > maxAtOnce:
		return bad("spec.atOnce", "must be between 2 and %d", maxAtOnce)
	}
	if spec.Patience != nil {
		if p.patience = spec.Patience.Duration; p.patience < time.Second || p.patience > time.Hour {
			return bad("spec.patience", "must be between 1s and 1h")
		}
	}
	if err := p.checkCall(bad); err != nil {
		return err
	}
	if p.effects == nil {
		if p.effects = (&EffectsSpec{}); o.command == "" {
			return bad("spec.effects", "is missing: say how effects are counted, by http or by command, or give --effects-command")
		}
	}
	e := p.effects
	if o.command != "" {
		e.HTTP, e.Command = nil, nil
		return nil
	}
	if (e.HTTP != nil) == (len(e.Command) > 0) {
		return bad("spec.effects", "must have exactly one of http and command")
	}
	return nil
}

func (p *plan) checkCall(bad func(field, format string, args ...any) error) error {
	c := &p.call
	if c.Method == "" && p.toolObject != nil && len(p.toolObject.Spec.Upstream.HTTP.Methods) == 1 {
		c.Method = string(p.toolObject.Spec.Upstream.HTTP.Methods[0])
	}
	switch {
	case c.Method == "":
		return bad("spec.call.method", "is missing: name the one that the tool is called with")
	case !slices.Contains([]string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}, c.Method):
		return bad("spec.call.method", "is %q: use one that an AgentTool can declare, in capitals", c.Method)
	case c.Path != "" && c.Path[0] != '/' && c.Path[0] != '?':
		return bad("spec.call.path", "must begin with a slash, or with ? for a query alone: it is appended to the tool's own")
	case string(c.Body) == "null":
		c.Body = nil
	}
	for name := range c.Headers {
		if !httpguts.ValidHeaderFieldName(name) {
			return bad("spec.call.headers", "has %q, which is no name of a header", name)
		}
		if k := http.CanonicalHeaderKey(name); k == "Authorization" || k == "Host" || k == "Content-Length" {
			return bad("spec.call.headers", "must not have %s: it is written for you", k)
		}
	}
	// What does not fill in now never will.
	_, err := p.request(values{}, "http://gateway.invalid")
	return err
}

// settling is how long effects are watched.
func (p *plan) settling() (time.Duration, error) {
	if w := p.effects.SettleWithin; w != nil {
		if w.Duration < 0 || w.Duration > 24*time.Hour {
			return 0, fmt.Errorf("%s: spec.effects.settleWithin must be between 0s and 24h", kindTest)
		}
		return w.Duration, nil
	}
	if p.toolObject == nil {
		return 0, fmt.Errorf("%s: spec.effects.settleWithin is missing, and the AgentTool is in none of the files: say how long after an answer an effect can still appear", kindTest)
	}
	after := p.toolObject.Spec.Upstream.HTTP.SettleAfter.Duration
	if after > longestSettling {
		return 0, fmt.Errorf("%s: spec.effects.settleWithin is missing, and settleAfter of the AgentTool is %s: say how long this test is to watch", kindTest, after)
	}
	return after, nil
}

// request is a call of the tool with the placeholders filled in.
func (p *plan) request(v values, gateway string) (*wire, error) {
	const field = kindTest + ": spec.call."
	path, err := v.fill(where{field: field + "path", calls: true}, p.call.Path)
	if err != nil {
		return nil, err
	}
	w := &wire{Method: p.call.Method, URL: gateway + "/v1/namespaces/" + p.namespace + "/tools/" + p.tool + path, Header: http.Header{}}
	if _, err := url.Parse(w.URL); err != nil {
		return nil, fmt.Errorf("%spath: %w", field, err)
	}
	// An agent has these anew for each request. They are part of no identity: one that
	// reads them must be found.
	w.Header.Set("Traceparent", newTraceparent())
	w.Header.Set("X-Request-Id", newRequestID())
	for name, value := range p.call.Headers {
		value, err = v.fill(where{field: field + "headers", calls: true, env: true}, value)
		if err != nil {
			return nil, err
		}
		if !httpguts.ValidHeaderFieldValue(value) {
			return nil, fmt.Errorf("%sheaders: %s has a character that no header can carry", field, name)
		}
		w.Header.Set(name, value)
	}
	if len(p.call.Body) == 0 {
		return w, nil
	}
	body, err := decodeJSON(p.call.Body)
	if err != nil {
		return nil, fmt.Errorf("%sbody: %w", field, err)
	}
	at := where{field: field + "body", calls: true}
	if text, ok := body.(string); ok {
		text, err = v.fill(at, text)
		w.Body = []byte(text)
		return w, err
	}
	if body, err = v.fillJSON(at, body); err != nil {
		return nil, err
	}
	if w.Header.Get("Content-Type") == "" {
		w.Header.Set("Content-Type", "application/json")
	}
	w.Body, err = json.Marshal(body)
	return w, err
}
