// This file reads the path of a request. Paths are never cleaned and never
// redirected: a request is for exactly what it names, or for nothing.

package gateway

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/holdfast-dev/holdfast/internal/intent"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// intents is the reserved first segment under which a tool's intents are.
const intents = "intents"

// route is what a path names.
type route struct {
	namespace, tool string
	// suffix is what follows the tool, with its slash, or "".
	suffix string
	// poll: the path names an intent.
	poll     bool
	intentID string
}

// parseRoute reads an escaped path. ok is false for what is no path of the gateway's.
func parseRoute(escaped string) (rt route, ok bool, err error) {
	rest, ok := strings.CutPrefix(escaped, "/v1/namespaces/")
	if !ok {
		return rt, false, nil
	}
	if rt.namespace, rest, ok = strings.Cut(rest, "/tools/"); !ok {
		return rt, false, nil
	}
	var below bool
	rt.tool, rest, below = strings.Cut(rest, "/")
	// A name that the API server would not take is nobody's: there is nothing to ask.
	if !isLabel(rt.namespace) || len(rt.tool) > 63 || !isLabel(rt.tool) && len(validation.IsDNS1123Subdomain(rt.tool)) > 0 {
		return rt, false, nil
	}
	if !below {
		return rt, true, nil
	}
	if id, found := strings.CutPrefix(rest, intents+"/"); found {
		rt.poll = true
		raw, err := url.PathUnescape(id)
		if err != nil {
			return rt, true, &intent.InvalidError{Field: "intent ID", Reason: "is not escaped as a path needs it: escape it again"}
		}
		rt.intentID, err = intent.ParseIntentID(raw)
		return rt, true, err
	}
	if rest == intents {
		return rt, true, &intent.InvalidError{Field: "path", Reason: "names no intent: add its ID, as in " + intents + "/ID"}
	}
	rt.suffix = "/" + rest
	return rt, true, nil
}

// registers says that the request writes an intent down.
func (c *call) registers() bool { return c.poll && c.r.Method == http.MethodPut }

// isLabel is validation.IsDNS1123Label, which takes a regular expression for it.
func isLabel(name string) bool {
	if name == "" || len(name) > validation.DNS1123LabelMaxLength || name[0] == '-' || name[len(name)-1] == '-' {
		return false
	}
	for i := range len(name) {
		if c := name[i]; c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// segment is what a caller may put for a "*" of a declared suffix. It means the same
// escaped and not, and climbs nowhere.
var segment = regexp.MustCompile(`^[A-Za-z0-9_~!$&'()+,;=:@-][A-Za-z0-9._~!$&'()+,;=:@-]*$`)

// declared says that the tool takes this suffix.
func declared(u policy.Upstream, suffix string) bool {
	if suffix == "" {
		return true
	}
	got := strings.Split(suffix, "/")
	return slices.ContainsFunc(u.Suffixes, func(pattern string) bool {
		want := strings.Split(pattern, "/")
		if len(want) != len(got) {
			return false
		}
		for i := 1; i < len(want); i++ {
			if want[i] == "*" && !segment.MatchString(got[i]) || want[i] != "*" && want[i] != got[i] {
				return false
			}
		}
		return true
	})
}

// pollPath is where an intent can be asked for.
func pollPath(namespace, tool, intentID string) string {
	return "/v1/namespaces/" + namespace + "/tools/" + tool + "/" + intents + "/" + url.PathEscape(intentID)
}

// parseQuery is url.ParseQuery, which makes a map also of nothing.
func parseQuery(raw string) (url.Values, error) {
	if raw == "" {
		return nil, nil
	}
	return url.ParseQuery(raw)
}

// upstreamURL is the tool's URL with a declared suffix and the caller's query. The tool's
// own query parameters cannot be given again: two readers could take different ones.
func upstreamURL(base *url.URL, suffix string, query url.Values) (*url.URL, error) {
	if suffix == "" && len(query) == 0 && base.Fragment == "" && base.User == nil {
		return base, nil // nobody changes it
	}
	u := *base
	u.Path = strings.TrimSuffix(base.Path, "/") + suffix
	if base.RawPath != "" {
		u.RawPath = strings.TrimSuffix(base.RawPath, "/") + suffix
	}
	if suffix == "" {
		u.Path, u.RawPath = base.Path, base.RawPath
	}
	var own url.Values
	if base.RawQuery != "" && len(query) > 0 {
		own = base.Query()
	}
	for name := range query {
		if own.Has(name) {
			return nil, &intent.InvalidError{Field: "query", Reason: "holds a parameter that the tool itself sets: leave it out"}
		}
	}
	switch {
	case len(query) == 0:
	case base.RawQuery == "":
		u.RawQuery = query.Encode()
	default:
		u.RawQuery = base.RawQuery + "&" + query.Encode()
	}
	u.Fragment, u.User = "", nil
	return &u, nil
}
