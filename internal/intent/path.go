// This file is about paths: the hierarchical names that scopes and lineages
// are made of. A path is kept as its canonical text. "/" only ever stands
// between two segments, so comparing by prefix up to a "/" is comparing by
// segment.

package intent

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of paths and scopes. A segment is measured in bytes of its canonical
// text, so a path has at most MaxPathBytes.
const (
	MaxSegments     = 8
	MaxSegmentBytes = 253
	MaxPathBytes    = MaxSegments*(MaxSegmentBytes+1) - 1
	MaxScopePaths   = 16
)

// Path is the canonical text of a path: its segments from the root down,
// joined by "/". Within a segment "/" is written %2F and "%" is written %25;
// nothing else is escaped, and no letter is changed. The empty Path is absent:
// it contains nothing and nothing contains it.
type Path string

var (
	escapeSegment   = strings.NewReplacer("%", "%25", "/", "%2F")
	unescapeSegment = strings.NewReplacer("%25", "%", "%2F", "/")
)

// NewPath builds a path of 1 to MaxSegments segments, given as they are,
// unescaped. No segment is empty or longer than MaxSegmentBytes, and none
// holds control characters or invalid UTF-8.
func NewPath(segments ...string) (Path, error) {
	if err := checkDepth(len(segments)); err != nil {
		return "", err
	}
	var escaped [MaxSegments]string
	for i, s := range segments {
		// Measured before it is escaped too, so that a huge one costs nothing.
		if len(s) > MaxSegmentBytes {
			return "", segmentTooLong(i)
		}
		escaped[i] = escapeSegment.Replace(s)
		if err := checkSegment(i, escaped[i]); err != nil {
			return "", err
		}
	}
	return Path(strings.Join(escaped[:len(segments)], "/")), nil
}

// ParsePath checks a canonical text. A text that NewPath would write in
// another way is refused, never rewritten.
func ParsePath(s string) (Path, error) {
	if len(s) > MaxPathBytes {
		return "", invalid("path", "has more than %d bytes: use a shorter one", MaxPathBytes)
	}
	if s == "" {
		return "", checkDepth(0)
	}
	if err := checkDepth(1 + strings.Count(s, "/")); err != nil {
		return "", err
	}
	i := -1
	for segment := range strings.SplitSeq(s, "/") {
		i++
		if err := checkSegment(i, segment); err != nil {
			return "", err
		}
		if strings.Contains(segment, "%") && escapeSegment.Replace(unescapeSegment.Replace(segment)) != segment {
			return "", invalid("path", `segment %d has a "%%" that is neither %%2F nor %%25: write %%25 for "%%"`, i+1)
		}
	}
	return Path(s), nil
}

func checkDepth(n int) error {
	if n == 0 {
		return invalid("path", "has no segment: give 1 to %d", MaxSegments)
	}
	if n > MaxSegments {
		return invalid("path", "has %d segments: give at most %d", n, MaxSegments)
	}
	return nil
}

// checkSegment checks the i-th segment in its escaped form.
func checkSegment(i int, s string) error {
	switch {
	case s == "":
		return invalid("path", "segment %d is empty: every segment needs a value", i+1)
	case len(s) > MaxSegmentBytes:
		return segmentTooLong(i)
	case !utf8.ValidString(s):
		return invalid("path", "segment %d is not valid UTF-8: send UTF-8", i+1)
	case strings.ContainsFunc(s, unicode.IsControl):
		return invalid("path", "segment %d holds a control character: remove it", i+1)
	}
	return nil
}

func segmentTooLong(i int) error {
	return invalid("path", `segment %d has more than %d bytes ("/" and "%%" count as 3): use a shorter one`, i+1, MaxSegmentBytes)
}

// Segments gives the path's segments, unescaped, from the root down.
func (p Path) Segments() []string {
	if p == "" {
		return nil
	}
	segments := strings.Split(string(p), "/")
	for i, s := range segments {
		segments[i] = unescapeSegment.Replace(s)
	}
	return segments
}

// Ancestors gives the path's proper ancestors, from the root down.
func (p Path) Ancestors() []Path {
	n := strings.Count(string(p), "/")
	if n == 0 {
		return nil
	}
	out := make([]Path, 0, n)
	for i := range len(p) {
		if p[i] == '/' {
			out = append(out, p[:i])
		}
	}
	return out
}

// Contains says whether q is p or lies under it, by segment: customer/c1
// contains customer/c1/order/9 and does not contain customer/c10.
func (p Path) Contains(q Path) bool {
	if p == "" || q == "" {
		return false
	}
	rest, under := strings.CutPrefix(string(q), string(p))
	return under && (rest == "" || rest[0] == '/')
}
