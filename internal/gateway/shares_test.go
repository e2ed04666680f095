package gateway

import (
	"fmt"
	"sync"
	"testing"
)

// jobs are things that take a place until they are let go.
type jobs struct {
	t  *testing.T
	s  *shares
	mu sync.Mutex
	// doing are those that are being done, in the order in which they began.
	doing []string
	goOn  map[string]chan struct{}
}

func newJobs(t *testing.T, total int) *jobs {
	return &jobs{t: t, s: newShares(total), goOn: map[string]chan struct{}{}}
}

func (j *jobs) add(namespace string, n int) { j.put(namespace, n, false) }

func (j *jobs) put(namespace string, n int, first bool) {
	id := fmt.Sprintf("%s-%d", namespace, n)
	goOn := make(chan struct{})
	j.mu.Lock()
	if j.goOn[id] == nil {
		j.goOn[id] = goOn
	}
	j.mu.Unlock()
	j.s.add(namespace, job{id: id, first: first, do: func() {
		j.mu.Lock()
		j.doing = append(j.doing, id)
		j.mu.Unlock()
		<-goOn
	}})
}

// wait waits until so many have begun, and says how many of each namespace.
func (j *jobs) wait(want int) map[string]int {
	j.t.Helper()
	of := map[string]int{}
	eventually(j.t, fmt.Sprintf("%d have begun", want), func() bool {
		j.mu.Lock()
		defer j.mu.Unlock()
		return len(j.doing) >= want
	})
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.doing) != want {
		j.t.Fatalf("%d have begun, want %d: %v", len(j.doing), want, j.doing)
	}
	for _, id := range j.doing {
		of[id[:1]]++
	}
	return of
}

func (j *jobs) letGo(id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	close(j.goOn[id])
}

// end has nothing more begin. What it gives is closed once all that was begun has ended.
func (j *jobs) end() <-chan struct{} {
	j.t.Helper()
	ended := make(chan struct{})
	go func() {
		j.s.end()
		close(ended)
	}()
	eventually(j.t, "no more is taken", func() bool {
		j.s.mu.Lock()
		defer j.s.mu.Unlock()
		return j.s.ended
	})
	return ended
}

// Namespaces whose providers hang leave places to the others, and they are served in turn.
func TestNamespacesShareThePlaces(t *testing.T) {
	j := newJobs(t, 8)
	for n := range 20 {
		j.add("a", n)
	}
	if of := j.wait(6); of["a"] != 6 {
		t.Fatalf("the one that hangs has %d of 8 places", of["a"])
	}
	for n := range 4 {
		j.add("b", n)
	}
	if of := j.wait(7); of["b"] != 1 {
		t.Fatalf("two that hang leave no place: %v", of)
	}
	// The last one is for who has none.
	j.add("c", 0)
	if of := j.wait(8); of["c"] != 1 {
		t.Fatalf("begun: %v", of)
	}
	// What becomes free is the last one again, and then goes to who has fewest.
	j.letGo("a-0")
	eventually(t, "the place is free", func() bool {
		j.s.mu.Lock()
		defer j.s.mu.Unlock()
		return j.s.taken == 7
	})
	j.wait(8)
	j.letGo("a-1")
	if of := j.wait(9); of["b"] != 2 {
		t.Fatalf("begun: %v", of)
	}
	j.add("d", 0)
	if of := j.wait(10); of["d"] != 1 {
		t.Fatalf("begun: %v", of)
	}
	// What waits or is being done is not taken a second time.
	j.add("b", 3)
	j.add("b", 0)
	j.s.mu.Lock()
	waiting := len(j.s.waiting["b"].rest)
	j.s.mu.Unlock()
	if waiting != 2 {
		t.Errorf("%d of b wait", waiting)
	}
	// At the end nothing more begins, and what was begun is waited for.
	ended := j.end()
	j.mu.Lock()
	doing := append([]string(nil), j.doing...)
	j.mu.Unlock()
	for _, id := range doing {
		if id != "a-0" && id != "a-1" {
			j.letGo(id)
		}
	}
	<-ended
	if n := len(j.wait(10)); n != 4 {
		t.Errorf("%d namespaces had a place", n)
	}
}

// What waits is bounded: the next sweep finds the rest.
func TestWhatWaitsForAPlaceIsBounded(t *testing.T) {
	j := newJobs(t, 1)
	for n := range maxQueued + 10 {
		j.add("a", n)
	}
	j.wait(1)
	j.s.mu.Lock()
	n := len(j.s.waiting["a"].rest)
	j.s.mu.Unlock()
	if n != maxQueued {
		t.Errorf("%d wait", n)
	}
	j.letGo("a-0")
	j.wait(2)
	ended := j.end()
	j.letGo("a-1")
	<-ended
	j.wait(2)
}

// A resume has a window: it does not stand behind the checks of its namespace, nor is it left out for them.
func TestResumesComeBeforeChecks(t *testing.T) {
	j := newJobs(t, 1)
	for n := range maxQueued + 10 {
		j.add("a", n)
	}
	j.wait(1)
	j.put("a", 1000, true)
	j.put("a", 1001, true)
	j.letGo("a-0")
	j.wait(2)
	j.letGo("a-1000")
	j.wait(3)
	j.letGo("a-1001")
	j.wait(4)
	ended := j.end()
	j.letGo("a-1")
	<-ended
	if want := "[a-0 a-1000 a-1001 a-1]"; fmt.Sprint(j.doing) != want {
		t.Errorf("done were %v, want %s", j.doing, want)
	}
}
