// This file is about time as one process sees it: when it must stop sending, and
// how long it has watched somebody else's attempt.

package guard

import (
	"time"

	"golang.org/x/sys/unix"
)

// Reading is one look at the process's clocks.
type Reading struct {
	// Boot is CLOCK_BOOTTIME: it never steps, and goes on while the machine is suspended.
	Boot time.Duration
	// Wall is the wall clock, without Go's monotonic part.
	Wall time.Time
}

// Clock is where a process reads its own time.
type Clock interface {
	Now() Reading
}

// SystemClock reads the machine's clocks.
type SystemClock struct{}

// Now reads both clocks.
func (SystemClock) Now() Reading {
	var ts unix.Timespec
	// CLOCK_BOOTTIME cannot fail with a valid pointer on Linux ≥ 2.6.39.
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("CLOCK_BOOTTIME is not readable: " + err.Error())
	}
	return Reading{Boot: time.Duration(ts.Nano()), Wall: time.Now().Round(0)}
}

// after is the reading that a clock which started here will show after d.
func (r Reading) after(d time.Duration) Reading {
	return Reading{Boot: r.Boot + d, Wall: r.Wall.Add(d)}
}

// before says that neither clock has reached the deadline: late by either is late.
func (r Reading) before(deadline Reading) bool {
	return r.Boot < deadline.Boot && r.Wall.Before(deadline.Wall)
}

// left is the time until the first of both clocks reaches the deadline.
func (r Reading) left(deadline Reading) time.Duration {
	return min(deadline.Boot-r.Boot, deadline.Wall.Sub(r.Wall))
}
