// Package access knows who calls, and whether they may.
//
// A caller is a ServiceAccount with a bearer token of Holdfast's own audience;
// the API server says whose token it is (TokenReview) and whether that
// ServiceAccount may invoke a tool (SubjectAccessReview, verb invoke). What must
// hold here: nobody is let in while the API server cannot be asked and has not
// been asked lately, "cannot ask" is never told as "no" or the other way round,
// and no token is kept: caches know it by its SHA-256.
package access

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"

	"golang.org/x/sync/singleflight"
)

// Audience is the one that a caller's token must be made for.
const Audience = "holdfast"

// What a SubjectAccessReview asks for.
const (
	Group    = "guardrails.holdfast.dev"
	Resource = "agenttools"
	Verb     = "invoke"
)

// MaxTokenBytes is the longest token that is looked at.
const MaxTokenBytes = 8 << 10

const (
	// tokenTTL bounds how long a token that was revoked still works.
	tokenTTL = 60 * time.Second
	// refusedTTL spares the API server the same bad token again and again.
	refusedTTL = 2 * time.Second
	allowedTTL = 5 * time.Second
	deniedTTL  = 2 * time.Second
	// askTimeout bounds one review. It does not end with the caller that began it,
	// because others may wait for the same one.
	askTimeout = 10 * time.Second
	// maxEntries bounds each cache.
	maxEntries = 8192
)

// The ways to be refused. The texts say what to do and may be shown to the caller.
var (
	// ErrUnauthenticated: the token is missing or says nothing about who calls.
	ErrUnauthenticated = errors.New("not authenticated")
	// ErrForbidden: the caller is known and may not invoke the tool.
	ErrForbidden = errors.New("not allowed")
	// ErrUnavailable: the API server could not be asked. It says nothing about the caller.
	ErrUnavailable = errors.New("access cannot be checked")
)

// Caller is a ServiceAccount that has shown a good token. It does not change.
type Caller struct {
	// Username is system:serviceaccount:NAMESPACE:NAME.
	Username string
	// UID tells a ServiceAccount from an earlier one of the same name.
	UID    string
	Groups []string
	Extra  map[string][]string

	// subject is the digest of all above, if it is known already.
	subject *[sha256.Size]byte
}

// ServiceAccount is the caller of this name, system:serviceaccount:NAMESPACE:NAME, where it is
// asked about without a token.
func ServiceAccount(username, uid string) Caller {
	c := Caller{Username: username, UID: uid, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	if parts := strings.Split(username, ":"); isServiceAccount(username) {
		c.Groups = append(c.Groups, "system:serviceaccounts:"+parts[2])
	}
	return c
}

// digest tells callers apart: equal ones have one.
func (c *Caller) digest() ([sha256.Size]byte, error) {
	if c.subject != nil {
		return *c.subject, nil
	}
	text, err := json.Marshal(c) // maps are written in order, so equal callers have one text
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("%w: the caller cannot be written down: %w", ErrUnavailable, err)
	}
	return sha256.Sum256(text), nil
}

// permission is what a SubjectAccessReview is about.
type permission struct {
	subject         [sha256.Size]byte
	namespace, tool string
}

// TokenReviews is the part of client-go's AuthenticationV1().TokenReviews() that is used.
type TokenReviews interface {
	Create(ctx context.Context, review *authenticationv1.TokenReview, opts metav1.CreateOptions) (*authenticationv1.TokenReview, error)
}

// SubjectAccessReviews is the part of client-go's AuthorizationV1().SubjectAccessReviews() that is used.
type SubjectAccessReviews interface {
	Create(ctx context.Context, review *authorizationv1.SubjectAccessReview, opts metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error)
}

// Clock is what expiry is judged by; nil in New: the system's.
type Clock = cache.Clock

// Reviewer asks the API server, and remembers its answers for a short while.
type Reviewer struct {
	tokens   TokenReviews
	accesses SubjectAccessReviews
	clock    Clock

	// Good and bad answers are kept apart, so that a flood of bad tokens cannot push out good ones.
	known, refused  *cache.LRUExpireCache
	allowed, denied *cache.LRUExpireCache
	asking          singleflight.Group
}

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

// New makes a Reviewer. It needs the verb create on tokenreviews and subjectaccessreviews.
func New(tokens TokenReviews, accesses SubjectAccessReviews, clock Clock) *Reviewer {
	if clock == nil {
		clock = systemClock{}
	}
	newCache := func() *cache.LRUExpireCache { return cache.NewLRUExpireCacheWithClock(maxEntries, clock) }
	return &Reviewer{
		tokens: tokens, accesses: accesses, clock: clock,
		known: newCache(), refused: newCache(), allowed: newCache(), denied: newCache(),
	}
}

// Authenticate says who sent a request with this header: ErrUnauthenticated or
// ErrUnavailable, wrapped with a text for the caller.
func (r *Reviewer) Authenticate(ctx context.Context, header http.Header) (Caller, error) {
	token, err := bearer(header)
	if err != nil {
		return Caller{}, err
	}
	var text [2048]byte // enough for most, so that they need no other memory
	digest := sha256.Sum256(append(text[:0], token...))
	if caller, ok := r.known.Get(digest); ok {
		return caller.(Caller), nil
	}
	if _, ok := claims(token); !ok {
		return Caller{}, fmt.Errorf("%w: the token is malformed: send a ServiceAccount token of the audience %q", ErrUnauthenticated, Audience)
	}
	if why, ok := r.refused.Get(digest); ok {
		return Caller{}, why.(error)
	}
	v, err := r.once(ctx, "token "+string(digest[:]), func(ctx context.Context) (any, error) {
		caller, err := r.reviewToken(ctx, token)
		switch {
		case err == nil:
			r.known.Add(digest, caller, r.tokenLife(token))
		case errors.Is(err, ErrUnauthenticated):
			r.refused.Add(digest, err, refusedTTL)
		}
		return caller, err
	})
	if err != nil {
		return Caller{}, err
	}
	return v.(Caller), nil
}

// Authorize says whether the caller may invoke a tool: nil, ErrForbidden or
// ErrUnavailable, wrapped with a text for the caller.
func (r *Reviewer) Authorize(ctx context.Context, caller Caller, namespace, tool string) error {
	subject, err := caller.digest()
	if err != nil {
		return err
	}
	key := permission{subject, namespace, tool}
	if _, ok := r.allowed.Get(key); ok {
		return nil
	}
	if why, ok := r.denied.Get(key); ok {
		return why.(error)
	}
	return r.askAccess(ctx, caller, key)
}

// askAccess has the API server say what is not known. It stands by itself so that what is
// known takes no memory for it.
func (r *Reviewer) askAccess(ctx context.Context, caller Caller, key permission) error {
	_, err := r.once(ctx, fmt.Sprintf("access %s%d:%s%s", key.subject[:], len(key.namespace), key.namespace, key.tool), func(ctx context.Context) (any, error) {
		err := r.reviewAccess(ctx, caller, key.namespace, key.tool)
		switch {
		case err == nil:
			r.allowed.Add(key, true, allowedTTL)
		case errors.Is(err, ErrForbidden):
			r.denied.Add(key, err, deniedTTL)
		}
		return nil, err
	})
	return err
}

// once runs ask for all that want the same answer at the same time.
func (r *Reviewer) once(ctx context.Context, key string, ask func(context.Context) (any, error)) (any, error) {
	answer := r.asking.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		return ask(ctx)
	})
	select {
	case a := <-answer:
		return a.Val, a.Err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: the call ended before the API server answered: %w", ErrUnavailable, ctx.Err())
	}
}

func (r *Reviewer) reviewToken(ctx context.Context, token string) (Caller, error) {
	review, err := r.tokens.Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return Caller{}, unavailable("the token", err)
	}
	status := review.Status
	// An API server that knows no audiences answers without any: that is a no. So is an error of the review.
	if !status.Authenticated || status.Error != "" || !slices.Contains(status.Audiences, Audience) {
		return Caller{}, fmt.Errorf("%w: the token is not one that the API server knows for the audience %q, or it has expired: "+
			"mount a projected ServiceAccount token with this audience and read it anew for each call", ErrUnauthenticated, Audience)
	}
	user := status.User
	if !isServiceAccount(user.Username) || user.UID == "" {
		return Caller{}, fmt.Errorf("%w: only ServiceAccounts may call: use the token of one", ErrUnauthenticated)
	}
	caller := Caller{Username: user.Username, UID: user.UID, Groups: user.Groups}
	if len(user.Extra) > 0 {
		caller.Extra = make(map[string][]string, len(user.Extra))
		for k, v := range user.Extra {
			caller.Extra[k] = v
		}
	}
	subject, err := caller.digest()
	if err != nil {
		return Caller{}, err
	}
	caller.subject = &subject
	return caller, nil
}

func (r *Reviewer) reviewAccess(ctx context.Context, caller Caller, namespace, tool string) error {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: caller.Username, UID: caller.UID, Groups: caller.Groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: Verb, Group: Group, Resource: Resource, Namespace: namespace, Name: tool,
		},
	}}
	if len(caller.Extra) > 0 {
		review.Spec.Extra = make(map[string]authorizationv1.ExtraValue, len(caller.Extra))
		for k, v := range caller.Extra {
			review.Spec.Extra[k] = v
		}
	}
	review, err := r.accesses.Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return unavailable("the permission", err)
	}
	if !review.Status.Allowed || review.Status.Denied {
		return fmt.Errorf("%w: %s may not invoke the tool %q in the namespace %q: bind a Role with the verb %q on %s.%s to it",
			ErrForbidden, caller.Username, tool, namespace, Verb, Resource, Group)
	}
	return nil
}

// unavailable keeps the API server's own words out of what a caller is shown: they are joined, and logged.
func unavailable(what string, cause error) error {
	return &askError{what: what, cause: cause}
}

// askError is an ErrUnavailable whose cause is for logs only.
type askError struct {
	what  string
	cause error
}

func (e *askError) Error() string {
	return fmt.Sprintf("%v: the API server cannot be asked about %s; try again later", ErrUnavailable, e.what)
}

func (e *askError) Unwrap() []error { return []error{ErrUnavailable, e.cause} }

// Cause gives what went wrong when the API server was asked, for logs; nil for other errors.
func Cause(err error) error {
	var ask *askError
	if errors.As(err, &ask) {
		return ask.cause
	}
	return nil
}

// bearer takes the token out of a request. What cannot be one is refused here,
// without asking the API server.
func bearer(header http.Header) (string, error) {
	values := header["Authorization"] // canonical, as servers give it
	if len(values) == 0 {
		return "", fmt.Errorf("%w: send a ServiceAccount token of the audience %q as \"Authorization: Bearer …\"", ErrUnauthenticated, Audience)
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	token = strings.Trim(token, " ")
	switch {
	case len(values) > 1:
		return "", fmt.Errorf("%w: more than one Authorization header: send one", ErrUnauthenticated)
	case !strings.EqualFold(scheme, "Bearer"):
		return "", fmt.Errorf("%w: the Authorization header must begin with Bearer", ErrUnauthenticated)
	case len(token) > MaxTokenBytes:
		return "", fmt.Errorf("%w: the token has more than %d bytes", ErrUnauthenticated, MaxTokenBytes)
	}
	return token, nil
}

// claims reads a JWT's payload without believing it.
func claims(token string) (payload struct {
	Expires float64 `json:"exp"`
}, ok bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return payload, false
	}
	for i, part := range parts {
		raw, err := base64.RawURLEncoding.DecodeString(part)
		if err != nil || len(raw) == 0 {
			return payload, false
		}
		if i == 1 && json.Unmarshal(raw, &payload) != nil {
			return payload, false
		}
	}
	return payload, true
}

// tokenLife is how long a token may be remembered: never beyond its own end. Its claims are
// true, because the API server has just said so.
func (r *Reviewer) tokenLife(token string) time.Duration {
	payload, _ := claims(token)
	if payload.Expires <= 0 {
		return tokenTTL
	}
	left := time.Unix(int64(payload.Expires), 0).Sub(r.clock.Now())
	return min(tokenTTL, left)
}

func isServiceAccount(username string) bool {
	parts := strings.Split(username, ":")
	return len(parts) == 4 && parts[0] == "system" && parts[1] == "serviceaccount" && parts[2] != "" && parts[3] != ""
}
