// This file is how the checks and the resumes of many namespaces share one gateway: a place that
// becomes free goes to a namespace that has fewest, and none has more than its share. So a
// namespace whose provider does not answer slows itself, and leaves places to the others.

package gateway

import "sync"

// maxQueued is how much of one namespace may wait for a place. What does not find room the next
// sweep finds again.
const maxQueued = 512

// shares are the places.
type shares struct {
	total, each int

	mu      sync.Mutex
	taken   int
	of      map[string]int
	waiting map[string][]job
	// known is what waits or is being done: nothing is there twice.
	known map[any]bool
	ended bool

	making sync.WaitGroup
}

// job is something to be done for a namespace; id tells it from others.
type job struct {
	id any
	do func()
}

func newShares(total int) *shares {
	return &shares{total: total, each: max(1, total*3/4), of: map[string]int{}, waiting: map[string][]job{}, known: map[any]bool{}}
}

// add has something done once there is a place for it. It does not wait for that.
func (s *shares) add(namespace string, j job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.known[j.id] || len(s.waiting[namespace]) >= maxQueued {
		return
	}
	s.known[j.id] = true
	s.waiting[namespace] = append(s.waiting[namespace], j)
	s.begin()
}

// begin gives away the places that are free. The caller has the lock.
func (s *shares) begin() {
	for s.taken < s.total {
		namespace, found := "", false
		for name := range s.waiting {
			if s.of[name] < s.each && (!found || s.of[name] < s.of[namespace]) {
				namespace, found = name, true
			}
		}
		if !found {
			return
		}
		j := s.waiting[namespace][0]
		if s.waiting[namespace] = s.waiting[namespace][1:]; len(s.waiting[namespace]) == 0 {
			delete(s.waiting, namespace)
		}
		s.taken++
		s.of[namespace]++
		s.making.Go(func() {
			defer s.done(namespace, j)
			j.do()
		})
	}
}

// done takes the place of a job back.
func (s *shares) done(namespace string, j job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	if s.of[namespace]--; s.of[namespace] == 0 {
		delete(s.of, namespace)
	}
	delete(s.known, j.id)
	s.begin()
}

// end begins nothing more, and waits for what was begun.
func (s *shares) end() {
	s.mu.Lock()
	s.ended = true
	clear(s.waiting)
	s.mu.Unlock()
	s.making.Wait()
}
