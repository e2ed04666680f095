package access

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
)

// The typed clients are what New takes.
var (
	_ TokenReviews         = authenticationclient.TokenReviewInterface(nil)
	_ SubjectAccessReviews = authorizationclient.SubjectAccessReviewInterface(nil)
)

// server is an API server that knows tokens by their text.
type server struct {
	mu       sync.Mutex
	away     bool
	tokens   map[string]authenticationv1.TokenReviewStatus
	allowed  map[string]bool // "username namespace/name"
	entered  chan struct{}   // each token review says that it has begun
	hold     chan struct{}   // and waits for this, if it is there
	reviews  atomic.Int64
	accesses atomic.Int64
	last     authorizationv1.SubjectAccessReviewSpec
}

var errAway = errors.New("dial tcp 10.0.0.1:6443: connection refused")

type tokenReviews struct{ *server }

func (s tokenReviews) Create(_ context.Context, r *authenticationv1.TokenReview, _ metav1.CreateOptions) (*authenticationv1.TokenReview, error) {
	s.reviews.Add(1)
	if s.hold != nil {
		s.entered <- struct{}{}
		<-s.hold
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, errAway
	}
	if len(r.Spec.Audiences) != 1 || r.Spec.Audiences[0] != Audience {
		return nil, fmt.Errorf("asked for audiences %v", r.Spec.Audiences)
	}
	r.Status = s.tokens[r.Spec.Token]
	return r, nil
}

type accessReviews struct{ *server }

func (s accessReviews) Create(_ context.Context, r *authorizationv1.SubjectAccessReview, _ metav1.CreateOptions) (*authorizationv1.SubjectAccessReview, error) {
	s.accesses.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, errAway
	}
	s.last = r.Spec
	a := r.Spec.ResourceAttributes
	r.Status.Allowed = a.Verb == Verb && a.Group == Group && a.Resource == Resource && s.allowed[r.Spec.User+" "+a.Namespace+"/"+a.Name]
	return r, nil
}

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }
func (c *clock) step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func jwt(payload string) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{"alg":"RS256"}`)) + "." + part([]byte(payload)) + "." + part([]byte("signature"))
}

func bearerHeader(token string) http.Header {
	return http.Header{"Authorization": {"Bearer " + token}}
}

const agent = "system:serviceaccount:support:agent"

func known(username, uid string, audiences ...string) authenticationv1.TokenReviewStatus {
	return authenticationv1.TokenReviewStatus{
		Authenticated: true, Audiences: audiences,
		User: authenticationv1.UserInfo{Username: username, UID: uid, Groups: []string{"system:serviceaccounts"}},
	}
}

func setUp() (*server, *clock, *Reviewer) {
	s := &server{tokens: map[string]authenticationv1.TokenReviewStatus{}, allowed: map[string]bool{}}
	c := &clock{now: time.Unix(1_800_000_000, 0)}
	return s, c, New(tokenReviews{s}, accessReviews{s}, c)
}

func TestTokens(t *testing.T) {
	good := jwt(`{"sub":"x"}`)
	failed := known(agent, "u1", Audience)
	failed.Error = "webhook said no"
	cases := []struct {
		name   string
		header http.Header
		status authenticationv1.TokenReviewStatus
		want   error
		asked  int64
	}{
		{"good", bearerHeader(good), known(agent, "u1", Audience), nil, 1},
		{"scheme in another case", http.Header{"Authorization": {"bearer " + good}}, known(agent, "u1", Audience), nil, 1},
		{"no header", http.Header{}, known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"empty token", bearerHeader(""), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"another scheme", http.Header{"Authorization": {"Basic " + good}}, known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"two headers", http.Header{"Authorization": {"Bearer " + good, "Bearer " + good}}, known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"no JWT", bearerHeader("hunter2"), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"JWT with a bad payload", bearerHeader(jwt("nonsense")), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"JWT without a signature", bearerHeader(good[:strings.LastIndexByte(good, '.')+1]), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"not base64url", bearerHeader(good + "="), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"oversized", bearerHeader(jwt(`{"pad":"` + strings.Repeat("x", MaxTokenBytes) + `"}`)), known(agent, "u1", Audience), ErrUnauthenticated, 0},
		{"unknown to the API server", bearerHeader(good), authenticationv1.TokenReviewStatus{}, ErrUnauthenticated, 1},
		{"another audience", bearerHeader(good), known(agent, "u1", "https://kubernetes.default.svc"), ErrUnauthenticated, 1},
		{"an API server that knows no audiences", bearerHeader(good), known(agent, "u1"), ErrUnauthenticated, 1},
		{"a review in error", bearerHeader(good), failed, ErrUnauthenticated, 1},
		{"a person", bearerHeader(good), known("alice", "u1", Audience), ErrUnauthenticated, 1},
		{"a ServiceAccount without a name", bearerHeader(good), known("system:serviceaccount:support:", "u1", Audience), ErrUnauthenticated, 1},
		{"no UID", bearerHeader(good), known(agent, "", Audience), ErrUnauthenticated, 1},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			s, _, r := setUp()
			s.tokens[good] = tc.status
			caller, err := r.Authenticate(t.Context(), tc.header)
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil {
				t.Fatalf("error %v, want %v", err, tc.want)
			}
			if err == nil && (caller.Username != agent || caller.UID != "u1" || len(caller.Groups) != 1) {
				t.Errorf("caller %+v", caller)
			}
			if err != nil && strings.Contains(err.Error(), good) {
				t.Error("the token is in the error")
			}
			if got := s.reviews.Load(); got != tc.asked {
				t.Errorf("%d token reviews, want %d", got, tc.asked)
			}
		})
	}
}

func TestTokenIsRememberedForAMinute(t *testing.T) {
	s, c, r := setUp()
	token := jwt(`{}`)
	s.tokens[token] = known(agent, "u1", Audience)
	authenticate := func() error {
		_, err := r.Authenticate(t.Context(), bearerHeader(token))
		return err
	}
	if err := authenticate(); err != nil {
		t.Fatal(err)
	}
	s.away = true
	c.step(59 * time.Second)
	if err := authenticate(); err != nil {
		t.Fatalf("warm cache while the API server is away: %v", err)
	}
	c.step(2 * time.Second)
	err := authenticate()
	if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("cold cache while the API server is away: %v, want ErrUnavailable alone", err)
	}
	if strings.Contains(err.Error(), "10.0.0.1") || !errors.Is(Cause(err), errAway) {
		t.Errorf("the cause belongs in the log and not in the text: %q, cause %v", err, Cause(err))
	}
	s.away = false
	s.tokens[token] = authenticationv1.TokenReviewStatus{}
	if err := authenticate(); !errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("revoked token after a minute: %v", err)
	}
}

func TestTokenIsNotRememberedBeyondItsEnd(t *testing.T) {
	s, c, r := setUp()
	token := jwt(fmt.Sprintf(`{"exp":%d}`, c.Now().Add(10*time.Second).Unix()))
	s.tokens[token] = known(agent, "u1", Audience)
	if _, err := r.Authenticate(t.Context(), bearerHeader(token)); err != nil {
		t.Fatal(err)
	}
	s.tokens[token] = authenticationv1.TokenReviewStatus{}
	c.step(11 * time.Second)
	if _, err := r.Authenticate(t.Context(), bearerHeader(token)); !errors.Is(err, ErrUnauthenticated) {
		t.Fatalf("expired token: %v", err)
	}
}

func TestRefusedTokenIsAskedAgainSoon(t *testing.T) {
	s, c, r := setUp()
	token := jwt(`{}`)
	for range 5 {
		if _, err := r.Authenticate(t.Context(), bearerHeader(token)); !errors.Is(err, ErrUnauthenticated) {
			t.Fatal(err)
		}
	}
	if got := s.reviews.Load(); got != 1 {
		t.Errorf("%d reviews of one bad token, want 1", got)
	}
	s.tokens[token] = known(agent, "u1", Audience)
	c.step(3 * time.Second)
	if _, err := r.Authenticate(t.Context(), bearerHeader(token)); err != nil {
		t.Fatal(err)
	}
}

// A flood of bad tokens must not push out a good one, nor grow without end.
func TestFloodOfBadTokens(t *testing.T) {
	s, _, r := setUp()
	good := jwt(`{}`)
	s.tokens[good] = known(agent, "u1", Audience)
	if _, err := r.Authenticate(t.Context(), bearerHeader(good)); err != nil {
		t.Fatal(err)
	}
	for i := range maxEntries + 10 {
		if _, err := r.Authenticate(t.Context(), bearerHeader(jwt(fmt.Sprintf(`{"n":%d}`, i)))); !errors.Is(err, ErrUnauthenticated) {
			t.Fatal(err)
		}
	}
	if got := len(r.refused.Keys()); got > maxEntries {
		t.Errorf("%d refused tokens are remembered, want at most %d", got, maxEntries)
	}
	s.away = true
	if _, err := r.Authenticate(t.Context(), bearerHeader(good)); err != nil {
		t.Errorf("the good token was pushed out: %v", err)
	}
}

func TestConcurrentLookUpsShareOneReview(t *testing.T) {
	s, _, r := setUp()
	token := jwt(`{}`)
	s.tokens[token] = known(agent, "u1", Audience)
	s.entered, s.hold = make(chan struct{}, 100), make(chan struct{})
	// The first one gives up while it waits; the others must get their answer all the same.
	first, leave := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := r.Authenticate(first, bearerHeader(token))
		failed <- err
	}()
	<-s.entered
	leave()
	if err := <-failed; !errors.Is(err, ErrUnavailable) {
		t.Fatalf("the caller that left: %v", err)
	}
	var wg sync.WaitGroup
	errs := make(chan error, 50)
	for range 50 {
		wg.Go(func() {
			_, err := r.Authenticate(t.Context(), bearerHeader(token))
			errs <- err
		})
	}
	close(s.hold)
	wg.Wait()
	for range 50 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	if got := s.reviews.Load(); got != 1 {
		t.Errorf("%d reviews, want 1", got)
	}
}

func TestAccess(t *testing.T) {
	s, c, r := setUp()
	caller := Caller{Username: agent, UID: "u1", Groups: []string{"g"}, Extra: map[string][]string{"pod": {"p"}}}
	authorize := func(namespace, tool string) error { return r.Authorize(t.Context(), caller, namespace, tool) }

	if err := authorize("support", "refund"); !errors.Is(err, ErrForbidden) {
		t.Fatalf("without the verb: %v", err)
	}
	s.allowed[agent+" support/refund"] = true
	if err := authorize("support", "refund"); !errors.Is(err, ErrForbidden) {
		t.Fatalf("a refusal is remembered for a moment: %v", err)
	}
	c.step(3 * time.Second)
	if err := authorize("support", "refund"); err != nil {
		t.Fatalf("a refusal is remembered for a moment only: %v", err)
	}
	if s.last.User != agent || s.last.UID != "u1" || len(s.last.Groups) != 1 || len(s.last.Extra["pod"]) != 1 {
		t.Errorf("the review was about %+v", s.last)
	}
	asked := s.accesses.Load()
	if err := authorize("support", "refund"); err != nil || s.accesses.Load() != asked {
		t.Errorf("a permission is remembered for seconds: %v, %d reviews more", err, s.accesses.Load()-asked)
	}
	for _, other := range [][2]string{{"support", "refund2"}, {"other", "refund"}, {"supportr", "efund"}} {
		if err := authorize(other[0], other[1]); !errors.Is(err, ErrForbidden) {
			t.Errorf("%v: %v", other, err)
		}
	}
	another := caller
	another.UID = "u2"
	s.allowed = map[string]bool{}
	if err := r.Authorize(t.Context(), another, "support", "refund"); !errors.Is(err, ErrForbidden) {
		t.Errorf("another UID shares the answer: %v", err)
	}
	c.step(6 * time.Second)
	if err := authorize("support", "refund"); !errors.Is(err, ErrForbidden) {
		t.Errorf("a permission that was taken away: %v", err)
	}
	s.away = true
	c.step(3 * time.Second)
	if err := authorize("support", "refund"); !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrForbidden) {
		t.Errorf("while the API server is away: %v", err)
	}
}
