// This file is how the checks and the resumes of many namespaces share one gateway: a place that
// becomes free goes to a namespace that has fewest, none has more than its share, and the last one
// is only for a namespace that has none. So namespaces whose providers do not answer slow
// themselves, and leave a place to the others. A resume, which has a window, comes before the checks.

package gateway

import "sync"

// maxQueued is how many checks, and how many resumes, of one namespace may wait for a place. What does not find room the next
// sweep finds again.
const maxQueued = 512

// shares are the places.
type shares struct {
	total, each int

	mu      sync.Mutex
	taken   int
	of      map[string]int
	waiting map[string]*queued
	// known is what waits or is being done: nothing is there twice.
	known map[any]bool
	ended bool

	making sync.WaitGroup
}

// job is something to be done for a namespace; id tells it from others. first: it comes before
// those that are not.
type job struct {
	id    any
	first bool
	do    func()
}

// queued are the jobs of one namespace that wait, in turn.
type queued struct{ first, rest []job }

// of is where a job waits.
func (q *queued) of(first bool) *[]job {
	if first {
		return &q.first
	}
	return &q.rest
}

func (q *queued) empty() bool { return len(q.first) == 0 && len(q.rest) == 0 }

func newShares(total int) *shares {
	return &shares{total: total, each: max(1, total*3/4), of: map[string]int{}, waiting: map[string]*queued{}, known: map[any]bool{}}
}

// add has something done once there is a place for it. It does not wait for that.
func (s *shares) add(namespace string, j job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.known[j.id] {
		return
	}
	q := s.waiting[namespace]
	if q == nil {
		q = &queued{}
		s.waiting[namespace] = q
	}
	line := q.of(j.first)
	if len(*line) >= maxQueued {
		return
	}
	s.known[j.id] = true
	*line = append(*line, j)
	s.begin()
}

// begin gives away the places that are free. The caller has the lock.
func (s *shares) begin() {
	for s.taken < s.total {
		namespace, found := "", false
		for name := range s.waiting {
			if s.may(name) && (!found || s.of[name] < s.of[namespace]) {
				namespace, found = name, true
			}
		}
		if !found {
			return
		}
		q := s.waiting[namespace]
		line := q.of(len(q.first) > 0)
		j := (*line)[0]
		if *line = (*line)[1:]; q.empty() {
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

// may says whether a namespace may have one of the places that are free.
func (s *shares) may(namespace string) bool {
	has := s.of[namespace]
	return has == 0 || has < s.each && s.taken < s.total-1
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
