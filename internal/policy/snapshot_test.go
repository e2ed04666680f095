package policy

import (
	"errors"
	"fmt"
	"sync"
	"testing"
)

func TestWhatIsServed(t *testing.T) {
	var current Current
	if _, err := current.Load().Tool("support", "issue-refund"); !errors.Is(err, ErrNoTool) {
		t.Errorf("an empty snapshot says %v", err)
	}

	tool := mustCompile(t)
	current.Set(tool)
	before := current.Load()
	if got, err := before.Tool("support", "issue-refund"); got != tool || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
	for _, other := range [][2]string{{"other", "issue-refund"}, {"support", "issue-refunds"}} {
		if _, err := before.Tool(other[0], other[1]); !errors.Is(err, ErrNoTool) {
			t.Errorf("%v: %v", other, err)
		}
	}

	// A spec that became bad takes the tool out of service, with its reason.
	current.Refuse(NotServed("support", "issue-refund", specError("spec.identity.scope[0]", "line 1, column 3: no")))
	var why *NotServedError
	if got, err := current.Load().Tool("support", "issue-refund"); got != nil || !errors.As(err, &why) || why.Reason != ReasonInvalid || why.Message != "spec.identity.scope[0]: line 1, column 3: no" {
		t.Errorf("got %v, %v", got, err)
	}
	_, waiting := Compile(refundTool(), nil)
	current.Refuse(NotServed("support", "issue-refund", fmt.Errorf("compiling: %w", waiting)))
	if _, err := current.Load().Tool("support", "issue-refund"); !errors.As(err, &why) || why.Reason != ReasonBudgetNotFound {
		t.Errorf("got %v", err)
	}
	// A snapshot that somebody holds does not change under it.
	if got, err := before.Tool("support", "issue-refund"); got != tool || err != nil {
		t.Errorf("a snapshot has changed: %v, %v", got, err)
	}

	current.Set(tool)
	if got, err := current.Load().Tool("support", "issue-refund"); got != tool || err != nil {
		t.Errorf("a mended tool is not served: %v, %v", got, err)
	}
	current.Remove("support", "issue-refund")
	if _, err := current.Load().Tool("support", "issue-refund"); !errors.Is(err, ErrNoTool) {
		t.Errorf("a deleted tool is still there: %v", err)
	}
}

func TestReplaceIsOneStep(t *testing.T) {
	var current Current
	current.Set(&Tool{Namespace: "a", Name: "x"})
	current.Replace(func(b *Builder) {
		b.Set(&Tool{Namespace: "a", Name: "y"})
		b.Refuse(&NotServedError{Namespace: "b", Tool: "x", Reason: ReasonStoreNotFound})
		if _, err := current.Load().Tool("a", "y"); !errors.Is(err, ErrNoTool) {
			t.Error("half a change is served")
		}
		b.Keep(func(namespace, name string) bool { return name != "x" || namespace == "b" })
	})
	for tool, served := range map[[2]string]bool{{"a", "x"}: false, {"a", "y"}: true, {"b", "x"}: false} {
		if _, err := current.Load().Tool(tool[0], tool[1]); (err == nil) != served {
			t.Errorf("%v: %v", tool, err)
		}
	}
	if _, err := current.Load().Tool("b", "x"); errors.Is(err, ErrNoTool) {
		t.Error("a tool that was kept is gone")
	}
}

// Two tools that always change together are never seen apart, and calls go on
// while they change.
func TestReadersAndWriters(t *testing.T) {
	var current Current
	set := func(generation int64) {
		current.Replace(func(b *Builder) {
			b.Set(&Tool{Namespace: "a", Name: "x", Generation: generation})
			b.Set(&Tool{Namespace: "a", Name: "y", Generation: generation})
		})
	}
	set(0)
	tool := mustCompile(t)
	current.Set(tool)
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for w := range 4 {
		writers.Go(func() {
			for i := range 200 {
				set(int64(1000*w + i))
				current.Set(&Tool{Namespace: "w", Name: fmt.Sprint(w)})
				current.Remove("w", fmt.Sprint(w))
			}
		})
	}
	for range 4 {
		readers.Go(func() {
			for {
				s := current.Load()
				x, err1 := s.Tool("a", "x")
				y, err2 := s.Tool("a", "y")
				if err1 != nil || err2 != nil || x.Generation != y.Generation {
					t.Errorf("torn: %v %v, %v %v", x, err1, y, err2)
					return
				}
				served, err := s.Tool("support", "issue-refund")
				if err != nil {
					t.Error(err)
					return
				}
				if id, err := served.Identify(refundCall(refundBody, refundKey)); err != nil || id.IntentID != "k1" {
					t.Errorf("%q, %v", id.IntentID, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
	for w := range 4 {
		if _, err := current.Load().Tool("w", fmt.Sprint(w)); !errors.Is(err, ErrNoTool) {
			t.Errorf("a removed tool came back: %v", err)
		}
	}
}
