package postgres

// A watermark's text: the era, a point, and a snapshot of PostgreSQL, which is
// xmin:xmax:xip,xip,… — the transactions below xmin and those below xmax that are
// not among xip could be seen.

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/holdfast-dev/holdfast/internal/store"
)

type watermark struct {
	era      int32
	snapshot string
}

// parseWatermark is as strict as PostgreSQL is, so that a strange one is the
// caller's error and not the server's.
func parseWatermark(w store.Watermark) (watermark, error) {
	bad := fmt.Errorf("%w: %q is not a watermark of this store", store.ErrInvalid, w)
	eraText, snapshot, _ := strings.Cut(string(w), ".")
	era, err := strconv.ParseInt(eraText, 10, 32)
	if err != nil || era < 1 || eraText != strconv.FormatInt(era, 10) {
		return watermark{}, bad
	}
	parts := strings.Split(snapshot, ":")
	if len(parts) != 3 {
		return watermark{}, bad
	}
	xmin, okMin := transaction(parts[0])
	xmax, okMax := transaction(parts[1])
	if !okMin || !okMax || xmin > xmax {
		return watermark{}, bad
	}
	if parts[2] != "" {
		last := uint64(0)
		for _, text := range strings.Split(parts[2], ",") {
			xip, ok := transaction(text)
			if !ok || xip < xmin || xip >= xmax || xip <= last {
				return watermark{}, bad
			}
			last = xip
		}
	}
	return watermark{era: int32(era), snapshot: snapshot}, nil
}

func transaction(text string) (uint64, bool) {
	n, err := strconv.ParseUint(text, 10, 63)
	return n, err == nil && n > 0 && text == strconv.FormatUint(n, 10)
}
