// This file is how much of the gateway one caller can take: a call needs a place to
// send its body, one to be worked on, and one to wait for another call of its intent.
// There are so many places of each, and no caller has more than a share of them.

package gateway

import (
	"net/http"
	"sync"
	"time"
)

// slots are the places of one kind.
type slots struct {
	total, each int

	mu    sync.Mutex
	taken int
	of    map[string]int
}

func newSlots(total int) *slots {
	return &slots{total: total, each: max(1, total/4), of: map[string]int{}}
}

// take gives the caller a place. own: the caller has its share already.
func (s *slots) take(caller string) (ok, own bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.of[caller] >= s.each:
		return false, true
	case s.taken >= s.total:
		return false, false
	}
	s.taken++
	s.of[caller]++
	return true, false
}

// give takes a place back.
func (s *slots) give(caller string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
	if s.of[caller]--; s.of[caller] == 0 {
		delete(s.of, caller)
	}
}

// count is how many places are taken.
func (s *slots) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}

// move goes from the place that the call has to one of another kind; nil: to none. If
// there is none, the call keeps what it has.
func (c *call) move(to *slots) (ok, own bool) {
	if to != nil {
		if ok, own = to.take(c.caller.Username); !ok {
			return false, own
		}
	}
	if c.place != nil {
		c.place.give(c.caller.Username)
	}
	c.place = to
	return true, false
}

// busy is the refusal of a call for which there is no place.
func busy(most int, own bool) *problem {
	if own {
		return refusal(http.StatusServiceUnavailable, "busy", "Too many calls of this caller at once", actRetryLater,
			"This caller, a ServiceAccount, has %d calls in progress, which is its share of the gateway. Nothing was sent. "+
				"Wait for their answers, then send the same request with the same intent ID again.", most).deny(time.Second)
	}
	return refusal(http.StatusServiceUnavailable, "busy", "Too many calls at once", actRetryLater,
		"The gateway has too many calls in progress. Nothing was sent. Send the same request with the same intent ID again.").deny(time.Second)
}
