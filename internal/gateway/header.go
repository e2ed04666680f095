// This file is about headers: which of the caller's go upstream, which of the
// upstream's come back, and which are kept for a replay.

package gateway

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// The headers that the gateway itself answers with.
const (
	headerVerdict   = "Holdfast-Verdict"
	headerIntent    = "Holdfast-Intent"
	headerAttempt   = "Holdfast-Attempt"
	headerState     = "Holdfast-State"
	headerClaim     = "Holdfast-Claim"
	headerTruncated = "Holdfast-Truncated"
	headerSize      = "Holdfast-Body-Size"
	headerDigest    = "Holdfast-Body-Digest"
	headerReplayed  = "Idempotent-Replayed"
)

// hopByHop belong to one connection (RFC 9110, section 7.6.1, and older practice).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// neverForwarded are the caller's own affair, whatever the tool's list says. The agent's
// key is among them: the upstream receives only Holdfast's own, which is stable.
var neverForwarded = append([]string{
	"Authorization", "Cookie", "Host", "Content-Length", "Expect", "Idempotency-Key", "X-Idempotency-Key",
}, hopByHop...)

// neverAnswered are an upstream's headers that do not reach the caller, live or replayed:
// lengths are made anew, a cookie would bind all callers of a tool to one session, and
// Idempotent-Replayed here speaks of Holdfast's record.
var neverAnswered = append([]string{"Content-Length", "Set-Cookie", "Set-Cookie2", headerReplayed}, hopByHop...)

func isHoldfast(name string) bool {
	const prefix = "Holdfast-"
	return len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix)
}

// named are the header names that a Connection header makes hop-by-hop.
func named(h http.Header) []string {
	var out []string
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = textproto.TrimString(name); name != "" {
				out = append(out, textproto.CanonicalMIMEHeaderKey(name))
			}
		}
	}
	return out
}

// forwarded picks the headers of a call that go upstream. The names are canonical.
func forwarded(call http.Header, allowed []string) http.Header {
	out := make(http.Header, len(allowed)+2) // User-Agent and the provider's key may follow
	gone := named(call)
	for _, name := range allowed {
		if slices.Contains(neverForwarded, name) || slices.Contains(gone, name) || isHoldfast(name) {
			continue
		}
		if values := call[name]; len(values) > 0 {
			out[name] = values // nobody changes them
		}
	}
	return out
}

// endToEnd picks the headers of an upstream's answer that the caller gets and a record keeps.
func endToEnd(answer http.Header) http.Header {
	out := make(http.Header, len(answer))
	gone := named(answer)
	for name, values := range answer {
		if slices.Contains(neverAnswered, name) || slices.Contains(gone, name) || isHoldfast(name) {
			continue
		}
		// What cannot be written again must not be stored: a replay keeps what the first answer had.
		if !httpguts.ValidHeaderFieldName(name) || slices.ContainsFunc(values, func(v string) bool { return !httpguts.ValidHeaderFieldValue(v) }) {
			continue
		}
		out[name] = values // nobody changes them
	}
	return out
}
