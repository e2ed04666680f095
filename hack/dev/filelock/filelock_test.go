package filelock

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"
)

func TestOnlyOneHoldsIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	release, err := Take(t.Context(), path, func() { t.Error("it had to wait for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := Take(ctx, path, func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second holder got %v, want a deadline", err)
	}

	waits, got := make(chan struct{}), make(chan error, 1)
	go func() {
		release, err := Take(t.Context(), path, func() { close(waits) })
		if err == nil {
			release()
		}
		got <- err
	}()
	<-waits
	release()
	if err := <-got; err != nil {
		t.Errorf("the lock that was let go cannot be had: %v", err)
	}
}
