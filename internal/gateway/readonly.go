// This file passes calls of read-only tools through. Nothing is at stake but the
// upstream's load, so connections are shared and a short cache may answer.

package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// cachedAnswer is an earlier answer. It belongs to one caller.
type cachedAnswer struct {
	status int
	header http.Header
	body   []byte
	at     time.Time
}

// read passes a call through.
func (c *call) read(tool *policy.Tool, t target) *problem {
	key := cacheKey(tool, c.caller.UID, t)
	if tool.CacheTTL > 0 {
		if v, ok := c.g.cached.Get(key); ok {
			old := v.(*cachedAnswer)
			c.verdict, c.reason = guard.Replay, "cache"
			header := old.header.Clone()
			header.Set("Age", strconv.Itoa(int(time.Since(old.at).Seconds())))
			c.write(old.status, header, old.body, 0)
			return nil
		}
	}
	if p := c.equip(tool, &t); p != nil {
		return p
	}
	ctx, cancel := context.WithTimeout(c.r.Context(), tool.Upstream.Timeout)
	defer cancel()
	ctx, span := c.sends(ctx, "read", t.header)
	if span != nil {
		defer span.End()
	}
	var body io.Reader
	if len(t.body) > 0 {
		body = bytes.NewReader(t.body)
	}
	req, err := http.NewRequestWithContext(ctx, t.method, t.url.String(), body)
	if err != nil {
		return c.unread(err)
	}
	// The address that is dialled has no search list; the Host header is the tool's own.
	req.Header = t.header
	resp, err := c.g.reader(tool.Namespace).RoundTrip(req) // follows no redirect
	if err != nil {
		return c.unread(err)
	}
	defer func() { _ = resp.Body.Close() }()
	header := endToEnd(resp.Header)
	c.verdict = guard.Allow
	if tool.CacheTTL > 0 && mayCache(resp) {
		start, err := io.ReadAll(io.LimitReader(resp.Body, maxCachedBody+1))
		if err != nil {
			return c.unread(err)
		}
		if len(start) <= maxCachedBody {
			c.g.cached.Add(key, &cachedAnswer{status: resp.StatusCode, header: header, body: start, at: time.Now()}, tool.CacheTTL)
			c.write(resp.StatusCode, header, start, 0)
			return nil
		}
		c.stream(resp.StatusCode, header, io.MultiReader(bytes.NewReader(start), resp.Body))
		return nil
	}
	c.stream(resp.StatusCode, header, resp.Body)
	return nil
}

// stream passes an answer on as it comes. If it ends too early, so does the caller's.
func (c *call) stream(status int, header http.Header, body io.Reader) {
	h := c.w.Header()
	maps.Copy(h, header)
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil
	}
	c.status = status
	c.headers()
	c.deadline()
	c.w.WriteHeader(status)
	conn := http.NewResponseController(c.w)
	piece := make([]byte, 32<<10)
	for {
		n, err := body.Read(piece)
		if n > 0 {
			c.deadline()
			if _, err := c.w.Write(piece[:n]); err != nil {
				c.cause = errGone
				return
			}
			if err := conn.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
				c.cause = errGone
				return
			}
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			c.cause = err
			panic(http.ErrAbortHandler) // the one way to tell the caller that this is not the whole
		}
	}
}

func (c *call) unread(err error) *problem {
	c.cause = err
	// A read that was asked and not answered has changed nothing either.
	p := refusal(http.StatusBadGateway, "upstream-unreachable", "The upstream gave no answer", actRetryLater,
		"Nothing was changed: %s. Send the same request again later.", strings.TrimSuffix(describe(exchange{err: err}), "; nothing was sent")).deny(later)
	c.verdict, c.reason = "", ""
	return p
}

// mayCache: a plain success that the upstream does not forbid to keep.
func mayCache(resp *http.Response) bool {
	control := strings.ToLower(strings.Join(resp.Header.Values("Cache-Control"), ","))
	return resp.StatusCode == http.StatusOK && len(resp.Header.Values("Set-Cookie")) == 0 &&
		!strings.Contains(control, "no-store") && !strings.Contains(control, "no-cache") && !slices.Contains(resp.Header.Values("Vary"), "*") &&
		!strings.HasPrefix(strings.ToLower(resp.Header.Get("Content-Type")), "text/event-stream")
}

// cacheKey tells apart whatever could be answered differently: the tool as it is now,
// the caller, and all that goes upstream.
func cacheKey(tool *policy.Tool, callerUID string, t target) [sha256.Size]byte {
	h := sha256.New()
	part := func(s string) { _, _ = fmt.Fprintf(h, "%d:%s", len(s), s) } // a hash takes all
	for _, s := range []string{tool.Namespace, tool.Name, strconv.FormatInt(tool.Generation, 10), callerUID, t.method, t.url.String(), string(t.body)} {
		part(s)
	}
	for _, name := range slices.Sorted(maps.Keys(t.header)) {
		part(name)
		part(strconv.Itoa(len(t.header[name])))
		for _, v := range t.header[name] {
			part(v)
		}
	}
	return [sha256.Size]byte(h.Sum(nil))
}
