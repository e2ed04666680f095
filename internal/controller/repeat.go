// This file is what is done again and again until the process ends, and told of once while it
// fails in the same way.

package controller

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"
)

// failing is the last error of what is done again and again; "": it went well.
type failing string

// tell logs an error, unless it is the last one again. nil: it goes well.
func (f *failing) tell(ctx context.Context, err error, message string, keysAndValues ...any) {
	text := failing("")
	if err != nil {
		text = failing(err.Error())
	}
	if text != "" && text != *f && ctx.Err() == nil {
		log.FromContext(ctx).Error(err, message, keysAndValues...)
	}
	*f = text
}

// repeat does something at once and then at each interval, until the process ends. message says what has failed.
func repeat(ctx context.Context, interval time.Duration, message string, do func(context.Context) error) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var failed failing
	for {
		failed.tell(ctx, do(ctx), message)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
