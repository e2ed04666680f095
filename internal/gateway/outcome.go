// This file reads what an attempt came to. When in doubt it is unknown: only an
// upstream's clear word, or the certainty that nothing was sent, says more.

package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// maxRetryAfter bounds what an upstream may ask for.
const maxRetryAfter = 24 * time.Hour

// outcomeOf reads a final status.
func outcomeOf(status int) guard.Outcome {
	switch {
	case status == http.StatusAccepted:
		return guard.AttemptPending
	case status >= 200 && status < 300:
		return guard.AttemptSucceeded
	case status == http.StatusTooManyRequests:
		return guard.AttemptRetryable
	case status == http.StatusRequestTimeout, status == http.StatusConflict, status == http.StatusTooEarly:
		return guard.AttemptUnknown
	case status >= 400 && status < 500:
		return guard.AttemptFailed
	default:
		return guard.AttemptUnknown
	}
}

// result turns an exchange into what the guard takes. What the tool declares is asked of
// complete answers alone.
func result(x exchange, tool *policy.Tool, now time.Time) guard.Result {
	r := guard.Result{LateSend: x.late}
	if x.answer == nil {
		r.Outcome = guard.AttemptUnknown
		if !x.sent {
			r.Outcome = guard.AttemptRetryable
		}
		if x.status != 0 {
			r.Response = &guard.Response{Status: x.status}
		}
		r.Detail = describe(x)
		return r
	}
	a := x.answer
	r.Outcome = outcomeOf(a.status)
	r.Detail = "the upstream answered " + strconv.Itoa(a.status)
	if read, ok := tool.ReadAnswer(policy.Answer{Status: a.status, Header: a.header, Body: a.body, Cut: a.cut}); ok {
		r.Outcome = read.Outcome
		r.Detail += ", and " + read.Why
	}
	body := a.body
	if int64(len(body)) > tool.MaxBodyBytes {
		body = body[:tool.MaxBodyBytes]
	}
	r.Response = &guard.Response{
		Status: a.status, Header: endToEnd(a.header), Body: body,
		Size: a.size, Digest: a.digest, Truncated: int64(len(body)) < a.size,
	}
	switch r.Outcome {
	case guard.AttemptSucceeded, guard.AttemptPending:
		r.ProviderReference = reference(a)
	case guard.AttemptRetryable:
		r.RetryAfter = retryAfter(a.header.Get("Retry-After"), now)
	}
	if r.Outcome == guard.AttemptUnknown && a.status >= 300 && a.status < 400 {
		r.Detail += ", a redirect, which is never followed"
	}
	return r
}

// reference is the provider's own name of the payment: the member id of a JSON object,
// if it is a string of 1 to 128 printable ASCII characters without spaces.
func reference(a *answer) string {
	if kind := a.header.Get("Content-Type"); kind != "application/json" { // as nearly all are
		if media, _, err := mime.ParseMediaType(kind); err != nil || media != "application/json" && !strings.HasSuffix(media, "+json") {
			return ""
		}
	}
	if a.cut || !json.Valid(a.body) {
		return ""
	}
	var id string
	if value := bytes.TrimSpace(member(a.body, "id")); len(value) > 1 && value[0] == '"' && bytes.IndexByte(value, '\\') < 0 {
		id = string(value[1 : len(value)-1]) // as nearly all are
	} else if json.Unmarshal(value, &id) != nil {
		return ""
	}
	if len(id) > 128 {
		return ""
	}
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return ""
		}
	}
	return id
}

// member is the last member of that name of an object, as encoding/json takes it; nil: there
// is none, or body is no object. body must be valid JSON.
func member(body []byte, name string) (value []byte) {
	body = bytes.TrimLeft(body, " \t\r\n")
	if body[0] != '{' {
		return nil
	}
	depth, key, begun := 0, []byte(nil), 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			start := i
			for i++; body[i] != '"'; i++ {
				if body[i] == '\\' {
					i++
				}
			}
			if depth == 1 && begun == 0 {
				key = body[start : i+1]
			}
		case ':':
			if depth == 1 {
				begun = i + 1
			}
		case '{', '[':
			depth++
		case ',', '}', ']':
			if depth == 1 && begun > 0 && isName(key, name) {
				value = body[begun:i]
			}
			if depth == 1 {
				begun = 0
			}
			if body[i] != ',' {
				depth--
			}
		}
	}
	return value
}

// isName says whether a JSON string is this name.
func isName(text []byte, name string) bool {
	if bytes.IndexByte(text, '\\') < 0 {
		return string(text[1:len(text)-1]) == name
	}
	var s string
	return json.Unmarshal(text, &s) == nil && s == name
}

// retryAfter reads the header (RFC 9110, section 10.2.3): seconds or a date.
func retryAfter(value string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	if seconds, err := strconv.ParseUint(value, 10, 32); err == nil {
		return min(time.Duration(seconds)*time.Second, maxRetryAfter)
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), maxRetryAfter)
	}
	return 0
}

// describe says in words why there is no answer. It names no address and quotes nothing.
func describe(x exchange) string {
	var (
		refused *addressError
		dns     *net.DNSError
		cert    *tls.CertificateVerificationError
	)
	what := "the upstream could not be reached"
	switch {
	case errors.As(x.err, &refused):
		return refused.Error() + "; nothing was sent"
	case errors.Is(x.err, errLate):
		what = "the time for sending was over"
	case errors.As(x.err, &dns):
		what = "the upstream's name could not be resolved"
	case errors.As(x.err, &cert):
		what = "the upstream's TLS certificate is not trusted"
	case errors.Is(x.err, context.DeadlineExceeded):
		what = "the upstream did not answer in time"
	case errors.Is(x.err, unix.ECONNREFUSED):
		what = "the upstream refused the connection"
	case errors.Is(x.err, errPanic):
		what = "the attempt ended by a mistake in the gateway"
	case x.status != 0:
		what = "the upstream's answer, status " + strconv.Itoa(x.status) + ", was cut short"
	case x.sent:
		what = "the connection ended without an answer"
	}
	if x.sent {
		return what + "; the request had been sent, at least in part"
	}
	return what + "; nothing was sent"
}
