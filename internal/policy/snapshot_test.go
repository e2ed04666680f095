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
	current.Refuse(&NotServedError{Namespace: "support", Tool: "issue-refund", Reason: "InvalidSpec", Message: "spec.identity.scope[0]: no"})
	var why *NotServedError
	if got, err := current.Load().Tool("support", "issue-refund"); got != nil || !errors.As(err, &why) || why.Reason != "InvalidSpec" || why.Message != "spec.identity.scope[0]: no" {
		t.Errorf("got %v, %v", got, err)
	}
	_, waiting := Compile(refundTool(), nil)
	if !errors.As(waiting, &why) {
		t.Fatalf("a tool without its budget compiles to %v", waiting)
	}
	current.Refuse(why)
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

// A tool that changes, one that comes and goes, and calls that go on meanwhile: no
// change is lost, and nothing that is served changes under a call.
func TestReadersAndWriters(t *testing.T) {
	var current Current
	set := func(generation int64) { current.Set(&Tool{Namespace: "a", Name: "x", Generation: generation}) }
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
				x, err := s.Tool("a", "x")
				if again, _ := s.Tool("a", "x"); err != nil || again != x {
					t.Errorf("one snapshot says %v and %v, %v", x, again, err)
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
