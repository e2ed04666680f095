package gateway

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bounds{timeout: 15 * time.Second, spread: time.Second}
		first := b.context(time.Now())
		began := time.Now()
		time.Sleep(time.Second - time.Nanosecond)
		if b.context(time.Now()) != first {
			t.Error("who begins within the spread has a context of its own")
		}
		last := time.Now()
		time.Sleep(time.Nanosecond)
		second := b.context(time.Now())
		if second == first {
			t.Error("who begins after the spread has the context of before")
		}
		<-first.Done()
		if took := time.Since(began); took < 15*time.Second || took > 16*time.Second {
			t.Errorf("who began first had %s", took)
		}
		if took := time.Since(last); took < 15*time.Second {
			t.Errorf("who began last had %s", took)
		}
		if !errors.Is(first.Err(), context.DeadlineExceeded) || second.Err() != nil {
			t.Errorf("the first ended with %v, the second with %v", first.Err(), second.Err())
		}
		<-second.Done()
	})
}
