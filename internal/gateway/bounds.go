// This file bounds in time what nobody waits for any more.

package gateway

import (
	"context"
	"sync/atomic"
	"time"
)

// bounds gives contexts that end after the timeout, or later by less than the spread: all who
// begin within the spread have one in common. One for each, with its timer and its channel,
// costs more than whoever has it does with it.
type bounds struct {
	timeout, spread time.Duration
	latest          atomic.Pointer[bound]
}

type bound struct {
	of    context.Context
	since time.Time
}

// context is for what begins now.
func (b *bounds) context(now time.Time) context.Context {
	if latest := b.latest.Load(); latest != nil && now.Sub(latest.since) < b.spread {
		return latest.of
	}
	ctx, cancel := context.WithTimeout(context.Background(), b.timeout+b.spread)
	context.AfterFunc(ctx, cancel) // it ends by nothing else
	b.latest.Store(&bound{ctx, now})
	return ctx
}
