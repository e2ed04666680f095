// This file is what a client does about everything but a crash: long runs, lost leases,
// failures of each kind, and a Holdfast that is away.

package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/pkg/client"
	"github.com/holdfast-dev/holdfast/test/localagent"
)

// wire sees the requests to the gateway, and can lose them.
type wire struct {
	mu    sync.Mutex
	count map[string]int
	lose  func(what string) bool // the request arrives, its answer does not
	block func(what string) bool // the request does not arrive
}

var errLost = errors.New("lost on the way")

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	what := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	w.mu.Lock()
	w.count[what]++
	lose, block := w.lose, w.block
	w.mu.Unlock()
	if block != nil && block(what) {
		return nil, errLost
	}
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err == nil && lose != nil && lose(what) {
		_ = resp.Body.Close()
		return nil, errLost
	}
	return resp, err
}

func (w *wire) sent(what string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count[what]
}

func (w *wire) set(lose, block func(string) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lose, w.block = lose, block
}

// first is true for the first n requests of a kind.
func first(what string, n int32) func(string) bool {
	var seen atomic.Int32
	return func(w string) bool { return w == what && seen.Add(1) <= n }
}

func only(what string) func(string) bool { return func(w string) bool { return w == what } }

type bench struct {
	*localagent.Rig
	*client.Client
	wire   *wire
	outbox string
}

func open(t *testing.T, r *localagent.Rig, change func(*client.Options)) *bench {
	t.Helper()
	b := &bench{Rig: r, wire: &wire{count: map[string]int{}}, outbox: filepath.Join(t.TempDir(), "outbox.db")}
	o := r.Options(b.outbox)
	o.Transport = b.wire
	if change != nil {
		change(&o)
	}
	var err error
	if b.Client, err = client.Open(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

func intentFor(id string) client.Intent {
	return client.Intent{Tool: localagent.LocalTool, ID: id, Body: localagent.Body(id)}
}

// pay is a function that counts how often it has paid.
func pay(paid *atomic.Int32) client.Func {
	return func(_ context.Context, a *client.Attempt) (client.Result, error) {
		n := paid.Add(1)
		return client.Result{Status: 201, ContentType: "text/plain", Body: fmt.Appendf(nil, "paid %d", n), ProviderReference: fmt.Sprint("pay_", n)}, nil
	}
}

func (b *bench) pending(t *testing.T, want int) []client.Begun {
	t.Helper()
	got, err := b.Pending()
	if err != nil || len(got) != want {
		t.Fatalf("pending: %+v, %v; want %d", got, err, want)
	}
	return got
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestDo(t *testing.T) {
	r := localagent.SetUp(t, func(tool *v1alpha1.AgentTool) {
		// So that nobody waits for long.
		tool.Spec.RetryBudget = &v1alpha1.RetryBudget{Attempts: new(int32(2)), Backoff: &v1alpha1.RetryBackoff{
			Initial: &metav1.Duration{Duration: 10 * time.Millisecond}, Max: &metav1.Duration{Duration: 10 * time.Millisecond}}}
	})
	t.Run("the second time is a replay", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		for n := range 2 {
			res, err := b.Do(within(t, time.Minute), intentFor("twice"), pay(&paid))
			if err != nil || res.Status != 201 || string(res.Body) != "paid 1" || res.ContentType != "text/plain" || res.Replayed != (n > 0) {
				t.Fatalf("%+v, %v", res, err)
			}
		}
		if v := r.State(t, localagent.LocalTool, "twice"); paid.Load() != 1 || v.ProviderReference != "pay_1" {
			t.Fatalf("run %d times; %+v", paid.Load(), v)
		}
		b.pending(t, 0)
	})
	t.Run("at once", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if res, err := b.Do(within(t, time.Minute), intentFor("at-once"), pay(&paid)); err != nil || string(res.Body) != "paid 1" {
					t.Errorf("%+v, %v", res, err)
				}
			})
		}
		all.Wait()
		if paid.Load() != 1 {
			t.Errorf("run %d times", paid.Load())
		}
	})
	t.Run("for longer than its lease", func(t *testing.T) {
		b := open(t, r, nil)
		b.wire.set(first("renew", 1), nil)
		_, err := b.Do(within(t, time.Minute), intentFor("long"), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			until := time.After(2*localagent.Lease + time.Second)
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return client.Result{}, context.Cause(ctx)
				case <-until:
					return client.Result{Body: []byte("done")}, nil
				case <-tick.C:
					if err := r.Engine.Sweep(ctx); err != nil || !a.InTime() {
						return client.Result{}, fmt.Errorf("in time: %v; %w", a.InTime(), err)
					}
				}
			}
		})
		if v := r.State(t, localagent.LocalTool, "long"); err != nil || v.State != guard.Succeeded || v.Attempts[0].SentLate {
			t.Fatalf("%v; %+v", err, v)
		}
	})
	t.Run("its lease is lost", func(t *testing.T) {
		b := open(t, r, nil)
		b.wire.set(nil, only("renew"))
		_, err := b.Do(within(t, time.Minute), intentFor("lost"), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), client.ErrLeaseOver) || a.InTime() {
				t.Errorf("ended by %v, in time: %v", context.Cause(ctx), a.InTime())
			}
			return client.Result{}, ctx.Err()
		})
		v := r.State(t, localagent.LocalTool, "lost")
		if !errors.Is(err, client.ErrHeld) || v.State != guard.Held || !v.Attempts[0].SentLate {
			t.Fatalf("%v; %+v", err, v)
		}
	})
	t.Run("it was judged meanwhile", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		b.wire.set(nil, only("renew"))
		res, err := b.Do(within(t, time.Minute), intentFor("judged"), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			sweepUntil(t, r, "judged", guard.Held)
			b.wire.set(nil, nil)
			return pay(&paid)(ctx, a)
		})
		// R04: it is evidence, and the end of the hold.
		v := r.State(t, localagent.LocalTool, "judged")
		if err != nil || string(res.Body) != "paid 1" || v.State != guard.Succeeded || !v.Attempts[0].Late {
			t.Fatalf("%+v, %v; %+v", res, err, v)
		}
	})
	t.Run("nothing moved, and again", func(t *testing.T) {
		b, paid, runs := open(t, r, nil), atomic.Int32{}, 0
		res, err := b.Do(within(t, time.Minute), intentFor("again"), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			if runs++; runs == 1 {
				return client.Result{}, fmt.Errorf("wrapped: %w", &client.NothingMoved{Reason: "closed", Again: true})
			}
			if a.Number != 2 {
				t.Errorf("attempt %d", a.Number)
			}
			return pay(&paid)(ctx, a)
		})
		if err != nil || string(res.Body) != "paid 1" || runs != 2 {
			t.Fatalf("%+v, %v after %d runs", res, err, runs)
		}
	})
	t.Run("nothing moved, too often", func(t *testing.T) {
		b, runs := open(t, r, nil), 0
		_, err := b.Do(within(t, time.Minute), intentFor("too-often"), func(context.Context, *client.Attempt) (client.Result, error) {
			runs++
			return client.Result{}, &client.NothingMoved{Reason: "closed", Again: true}
		})
		var failed *client.FailedError
		if !errors.As(err, &failed) || failed.Result.Status != 503 || runs != 2 {
			t.Fatalf("%v after %d runs", err, runs)
		}
		b.pending(t, 0)
	})
	t.Run("declined", func(t *testing.T) {
		b, runs := open(t, r, nil), 0
		for range 2 {
			_, err := b.Do(within(t, time.Minute), intentFor("declined"), func(context.Context, *client.Attempt) (client.Result, error) {
				runs++
				return client.Result{}, &client.NothingMoved{Reason: "no money", Result: &client.Result{Status: 402, Body: []byte("declined")}}
			})
			var failed *client.FailedError
			if !errors.As(err, &failed) || failed.Result.Status != 402 || string(failed.Result.Body) != "declined" || runs != 1 {
				t.Fatalf("%v after %d runs", err, runs)
			}
		}
	})
	for name, run := range map[string]client.Func{
		"any error": func(context.Context, *client.Attempt) (client.Result, error) {
			return client.Result{}, io.ErrUnexpectedEOF
		},
		"a failure as success": func(context.Context, *client.Attempt) (client.Result, error) { return client.Result{Status: 402}, nil },
		"accepted": func(context.Context, *client.Attempt) (client.Result, error) {
			return client.Result{}, &client.Accepted{Reference: "p"}
		},
	} {
		t.Run(name+" is unknown", func(t *testing.T) {
			b, runs, id := open(t, r, nil), 0, strings.ReplaceAll(name, " ", "-")
			for range 2 {
				_, err := b.Do(within(t, time.Minute), intentFor(id), func(ctx context.Context, a *client.Attempt) (client.Result, error) {
					runs++
					return run(ctx, a)
				})
				var refusal *client.Refusal
				if !errors.As(err, &refusal) || !errors.Is(err, client.ErrHeld) || refusal.Hold == "" || runs != 1 {
					t.Fatalf("%v after %d runs", err, runs)
				}
			}
			if got := b.pending(t, 1)[0]; got.Ran || got.Finished || got.Intent.ID != id {
				t.Fatalf("pending: %+v", got)
			}
		})
	}
	t.Run("a panic is unknown", func(t *testing.T) {
		b := open(t, r, nil)
		func() {
			defer func() {
				if recover() != "boom" {
					t.Error("the panic was swallowed")
				}
			}()
			_, _ = b.Do(within(t, time.Minute), intentFor("panic"), func(context.Context, *client.Attempt) (client.Result, error) { panic("boom") })
		}()
		if v := r.State(t, localagent.LocalTool, "panic"); v.State != guard.Held {
			t.Fatalf("%+v", v)
		}
	})
	t.Run("a person releases it", func(t *testing.T) {
		b, paid, runs := open(t, r, nil), atomic.Int32{}, 0
		run := func(ctx context.Context, a *client.Attempt) (client.Result, error) {
			if runs++; runs == 1 {
				return client.Result{}, io.EOF
			}
			return pay(&paid)(ctx, a)
		}
		if _, err := b.Do(within(t, time.Minute), intentFor("released"), run); !errors.Is(err, client.ErrHeld) {
			t.Fatal(err)
		}
		release(t, r, "released")
		if err := b.Recover(within(t, time.Minute), run); err != nil || runs != 2 || paid.Load() != 1 {
			t.Fatalf("%v after %d runs", err, runs)
		}
		b.pending(t, 0)
	})
	t.Run("every answer is lost once", func(t *testing.T) {
		for _, what := range []string{"claim", "settle"} {
			b, paid := open(t, r, nil), atomic.Int32{}
			b.wire.set(first(what, 1), nil)
			if res, err := b.Do(within(t, time.Minute), intentFor("no-"+what), pay(&paid)); err != nil || string(res.Body) != "paid 1" || paid.Load() != 1 || b.wire.sent(what) != 2 {
				t.Fatalf("%s: %+v, %v; run %d times, sent %d", what, res, err, paid.Load(), b.wire.sent(what))
			}
			if v := r.State(t, localagent.LocalTool, "no-"+what); len(v.Attempts) != 1 {
				t.Errorf("%+v", v.Attempts)
			}
		}
	})
	t.Run("its result is too long", func(t *testing.T) {
		b := open(t, r, nil)
		res, err := b.Do(within(t, time.Minute), intentFor("too-long"), func(context.Context, *client.Attempt) (client.Result, error) {
			return client.Result{Body: bytes.Repeat([]byte("x"), 2<<20), ProviderReference: "pay_9"}, nil
		})
		v := r.State(t, localagent.LocalTool, "too-long")
		if err != nil || len(res.Body) != 2<<20 || v.State != guard.Succeeded || v.ProviderReference != "pay_9" {
			t.Fatalf("%d bytes, %v; %+v", len(res.Body), err, v)
		}
		b.pending(t, 0)
	})
	t.Run("its caller is gone before it begins", func(t *testing.T) {
		b := open(t, r, nil)
		ctx, cancel := context.WithCancel(t.Context())
		b.wire.set(func(what string) bool {
			if what == "claim" {
				cancel()
			}
			return false
		}, nil)
		_, err := b.Do(ctx, intentFor("left"), func(context.Context, *client.Attempt) (client.Result, error) {
			t.Error("it ran")
			return client.Result{}, nil
		})
		if v := r.State(t, localagent.LocalTool, "left"); !errors.Is(err, context.Canceled) || v.State == guard.Held {
			t.Fatalf("%v; %+v", err, v)
		}
		b.pending(t, 1)
	})
	t.Run("Holdfast is away at the end", func(t *testing.T) {
		b, paid := open(t, r, offersBriefly), atomic.Int32{}
		b.wire.set(nil, only("settle"))
		_, err := b.Do(within(t, time.Minute), intentFor("away"), pay(&paid))
		var unsettled *client.UnsettledError
		if !errors.As(err, &unsettled) || !unsettled.Paid || string(unsettled.Result.Body) != "paid 1" {
			t.Fatal(err)
		}
		if got := b.pending(t, 1)[0]; !got.Finished || got.Attempt != 1 || got.ProviderKey == "" {
			t.Fatalf("pending: %+v", got)
		}
		if err := b.Forget(t.Context(), localagent.LocalTool, "away"); err == nil {
			t.Fatal("what was paid was forgotten")
		}
		b.wire.set(nil, nil)
		if err := b.Recover(within(t, time.Minute), pay(&paid)); err != nil || paid.Load() != 1 {
			t.Fatalf("%v, run %d times", err, paid.Load())
		}
		b.pending(t, 0)
	})
	t.Run("the caller is gone before it begins", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		ctx, cancel := context.WithCancel(t.Context())
		b.wire.set(nil, func(what string) bool {
			cancel()
			return what == "claim"
		})
		if _, err := b.Do(ctx, intentFor("gone"), pay(&paid)); !errors.Is(err, context.Canceled) || !errors.Is(err, errLost) {
			t.Fatal(err)
		}
		if got := b.pending(t, 1)[0]; got.Ran || got.Finished {
			t.Fatalf("pending: %+v", got)
		}
		if err := b.Forget(t.Context(), localagent.LocalTool, "gone"); err != nil {
			t.Fatal(err)
		}
		b.pending(t, 0)
	})
	t.Run("another request under its ID", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		in := intentFor("other")
		if _, err := b.Do(within(t, time.Minute), in, pay(&paid)); err != nil {
			t.Fatal(err)
		}
		in.Body = bytes.Replace(in.Body, []byte("10"), []byte("11"), 1)
		if _, err := b.Do(within(t, time.Minute), in, pay(&paid)); !errors.Is(err, client.ErrConflict) || paid.Load() != 1 {
			t.Fatal(err)
		}
		b.pending(t, 0)
		// The outbox says so before anything is sent.
		b.wire.set(nil, only("claim"))
		in = intentFor("other-here")
		_, _ = b.Do(within(t, 100*time.Millisecond), in, pay(&paid))
		in.Session = "another"
		if _, err := b.Do(within(t, time.Minute), in, pay(&paid)); !errors.Is(err, client.ErrConflict) {
			t.Fatal(err)
		}
	})
	t.Run("a request that is refused", func(t *testing.T) {
		b, paid := open(t, r, nil), atomic.Int32{}
		in := intentFor("bad")
		in.Body = []byte(`{"orderId":"1"}`)
		if _, err := b.Do(within(t, time.Minute), in, pay(&paid)); !errors.Is(err, client.ErrRefused) || paid.Load() != 0 {
			t.Fatal(err)
		}
		b.pending(t, 0)
	})
}

// release has a person let the intent's hold go, once that may be.
func release(t *testing.T, r *localagent.Rig, id string) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := r.Engine.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		h := r.State(t, localagent.LocalTool, id).Hold
		if h != nil && h.State == guard.HoldHeld {
			got, err := r.Engine.Resolve(t.Context(), guard.Resolution{HoldID: h.HoldID, Decision: guard.Release, By: "alice", Reason: "nothing was paid"})
			if err != nil || got.State != guard.HoldResolved {
				t.Fatalf("%+v, %v", got, err)
			}
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the hold is %+v", h)
		}
	}
}

func TestOneProcessHasTheOutbox(t *testing.T) {
	r := localagent.SetUp(t, nil)
	b := open(t, r, nil)
	if _, err := client.Open(r.Options(b.outbox)); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Fatal(err)
	}
}

func TestTheTokenIsReadAgain(t *testing.T) {
	r := localagent.SetUp(t, nil)
	b, paid := open(t, r, nil), atomic.Int32{}
	if err := os.WriteFile(r.TokenFile, []byte("expired"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Do(within(t, time.Minute), intentFor("k1"), pay(&paid)); !errors.Is(err, client.ErrRefused) {
		t.Fatal(err)
	}
	b.pending(t, 1)
	if err := os.WriteFile(r.TokenFile, []byte("agent\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Do(within(t, time.Minute), intentFor("k1"), pay(&paid)); err != nil || paid.Load() != 1 {
		t.Fatal(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	good := client.Options{URL: "https://holdfast.example.com", Namespace: "n", TokenFile: "t", Outbox: filepath.Join(dir, "o")}
	for name, change := range map[string]func(*client.Options){
		"no URL":            func(o *client.Options) { o.URL = "" },
		"no namespace":      func(o *client.Options) { o.Namespace = "" },
		"no token":          func(o *client.Options) { o.TokenFile = "" },
		"no outbox":         func(o *client.Options) { o.Outbox = "" },
		"a URL with a user": func(o *client.Options) { o.URL = "https://u@h" },
		"another scheme":    func(o *client.Options) { o.URL = "ftp://h" },
		"no CA file":        func(o *client.Options) { o.CAFile = filepath.Join(dir, "none") },
		"no directory":      func(o *client.Options) { o.Outbox = filepath.Join(dir, "none", "o") },
		"two trusts":        func(o *client.Options) { o.CAFile, o.Transport = "x", http.DefaultTransport },
	} {
		o := good
		change(&o)
		if c, err := client.Open(o); err == nil {
			_ = c.Close()
			t.Errorf("%s: opened", name)
		}
	}
	c, err := client.Open(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestCall(t *testing.T) {
	r := localagent.SetUp(t, nil)
	b := open(t, r, nil)
	in := client.Intent{Tool: localagent.HTTPTool, ID: "c1", Body: localagent.Body("c1")}
	b.wire.set(first("charge", 1), nil)
	res, err := b.Call(within(t, time.Minute), in)
	if err != nil || res.Status != 201 || !res.Replayed {
		t.Fatalf("%+v, %v", res, err)
	}
	in = client.Intent{Tool: localagent.HTTPTool, ID: "c2", Body: localagent.Body("c2"), Header: http.Header{"Provider-Fault": {"decline-402"}}}
	var failed *client.FailedError
	if _, err = b.Call(within(t, time.Minute), in); !errors.As(err, &failed) || failed.Result.Status != 402 {
		t.Fatal(err)
	}
	in = client.Intent{Tool: localagent.HTTPTool, ID: "c3", Body: localagent.Body("c3"), Header: http.Header{"Provider-Fault": {"error-500-after-commit"}}}
	if _, err = b.Call(within(t, time.Minute), in); !errors.Is(err, client.ErrHeld) {
		t.Fatal(err)
	}
	if got := b.pending(t, 1)[0]; !got.Called || got.Intent.ID != "c3" {
		t.Fatalf("pending: %+v", got)
	}
	if err := b.Recover(within(t, time.Minute), nil); !errors.Is(err, client.ErrHeld) {
		t.Fatal(err)
	}
	for order, want := range map[string]int{"c1": 1, "c2": 0, "c3": 1} {
		if got := r.Paid(t, order); got != want {
			t.Errorf("%s was paid %d times, want %d", order, got, want)
		}
	}
	// What its agent runs is not called, and what Holdfast calls is not run here.
	if _, err := b.Call(within(t, time.Minute), intentFor("c4")); !errors.Is(err, client.ErrRefused) {
		t.Fatal(err)
	}
	if _, err := b.Do(within(t, time.Minute), client.Intent{Tool: localagent.HTTPTool, ID: "c5", Body: localagent.Body("c5")}, func(context.Context, *client.Attempt) (client.Result, error) {
		t.Error("it ran")
		return client.Result{}, nil
	}); !errors.Is(err, client.ErrRefused) {
		t.Fatal(err)
	}
}
