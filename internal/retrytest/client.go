// This file is the agent: it sends a request, and can be killed, or leave, once the
// request is on its way. A request is never sent again here but by whoever decides to:
// each has a connection of its own, so that the library has none to repeat it on.

package retrytest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// clientArg makes the program the client that is killed.
const clientArg = "client"

const (
	// maxAnswer is how much of an answer is read.
	maxAnswer = 1 << 20
	// sendLimit is how long a request may take to be on its way.
	sendLimit = 30 * time.Second
)

// The lines that the client writes.
const lineSent = "sent"

// wire is a request as it is sent. The client that is killed reads it from its
// standard input: everybody on the machine sees arguments.
type wire struct {
	Method string      `json:"method"`
	URL    string      `json:"url"`
	Header http.Header `json:"header"`
	Body   []byte      `json:"body"`
	CA     []byte      `json:"ca"`
}

// remote is a gateway.
type remote struct {
	url, token string
	ca         []byte
}

// answer is what came back.
type answer struct {
	status                  int
	verdict, intent, reason string
	attempt                 int
	// asked: the provider is asked how an unknown outcome ended, which may end the hold.
	asked bool
	// after is what it says to wait.
	after time.Duration
	body  []byte
}

// sender sends requests.
type sender struct{ http *http.Client }

func newSender(ca []byte) (*sender, error) {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		// One connection for one request, which is closed when the caller leaves.
		DisableKeepAlives:  true,
		TLSNextProto:       map[string]func(string, *tls.Conn) http.RoundTripper{},
		DisableCompression: true,
	}
	if len(ca) > 0 {
		pool, err := poolOf(ca)
		if err != nil {
			return nil, fmt.Errorf("the authorities' certificates: %w", err)
		}
		t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	return &sender{&http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// send sends a request and reads its answer. sent is called once it is on its way.
func (s *sender) send(ctx context.Context, w *wire, sent func()) (*answer, error) {
	if sent != nil {
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(i httptrace.WroteRequestInfo) {
			if i.Err == nil {
				sent()
			}
		}})
	}
	request, err := http.NewRequestWithContext(ctx, w.Method, w.URL, nil)
	if err != nil {
		return nil, err
	}
	request.Header = w.Header.Clone()
	if len(w.Body) > 0 {
		// Without GetBody the library cannot send it twice.
		request.Body, request.ContentLength = io.NopCloser(bytes.NewReader(w.Body)), int64(len(w.Body))
	}
	response, err := s.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	a := &answer{
		status: response.StatusCode, body: body,
		verdict: response.Header.Get("Holdfast-Verdict"), intent: response.Header.Get("Holdfast-Intent"),
	}
	// Absent where it is not known.
	a.attempt, _ = strconv.Atoi(response.Header.Get("Holdfast-Attempt"))
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		a.after = time.Duration(seconds) * time.Second
	}
	if response.Header.Get("Content-Type") == "application/problem+json" {
		var p struct {
			Reason string `json:"reason"`
		}
		if json.Unmarshal(body, &p) == nil {
			a.reason = p.Reason
		}
	}
	return a, nil
}

// text says what an answer was, for the report.
func (a *answer) text() string {
	var p struct {
		Title  string `json:"title"`
		Detail string `json:"detail"`
	}
	out := strconv.Itoa(a.status)
	if a.verdict != "" {
		out = a.verdict + " " + out
	}
	if a.reason != "" {
		out += " " + a.reason
	}
	if json.Unmarshal(a.body, &p) == nil && p.Detail != "" {
		return out + ": " + p.Title + ". " + clip(p.Detail)
	}
	return out + ": " + clip(string(a.body))
}

// short is verdict and status.
func (a *answer) short() string { return strings.TrimSpace(a.verdict + " " + strconv.Itoa(a.status)) }

// leave sends a request and closes the connection so long after it was on its way.
func (s *sender) leave(ctx context.Context, w *wire, after time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, sendLimit+after)
	defer cancel()
	var once sync.Once
	var err error
	sent, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, err = s.send(ctx, w, func() { once.Do(func() { close(sent) }) })
	}()
	select {
	case <-sent:
	case <-ended:
		select {
		case <-sent: // both, at once
		default:
			return fmt.Errorf("the request was not sent: %w", err)
		}
	}
	// It leaves after this time whether an answer has come or not: it was not read.
	_ = pause(ctx, after)
	cancel()
	<-ended
	return nil
}

// die lets a process of its own send a request, and kills it so long after it was on its way.
func die(ctx context.Context, w *wire, after time.Duration) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	input, err := json.Marshal(w)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, sendLimit+after)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "retry-test", clientArg)
	cmd.Stdin = bytes.NewReader(append(input, '\n'))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the client: %w", err)
	}
	line, readErr := bufio.NewReader(stdout).ReadString('\n')
	line = strings.TrimSpace(line)
	if readErr == nil && line == lineSent {
		_ = pause(ctx, after)
	}
	killErr := cmd.Process.Kill()
	waitErr := cmd.Wait()
	if line != lineSent {
		return fmt.Errorf("the client did not send its request: %s", or(line, "it said nothing"))
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL || ctx.Err() != nil {
		return fmt.Errorf("the client was not killed when it should have been: %w", errors.Join(killErr, waitErr, ctx.Err()))
	}
	return nil
}

// client is the process that is killed. It sends, says so, and waits for its end.
func client(ctx context.Context, stdin io.Reader, stdout io.Writer) int {
	var w wire
	err := json.NewDecoder(stdin).Decode(&w)
	var s *sender
	if err == nil {
		s, err = newSender(w.CA)
	}
	if err == nil {
		var once sync.Once
		_, err = s.send(ctx, &w, func() {
			once.Do(func() { _, _ = fmt.Fprintln(stdout, lineSent) })
		})
	}
	if err != nil {
		_, _ = fmt.Fprintln(stdout, strings.ReplaceAll(err.Error(), "\n", " "))
		return CannotTell
	}
	// It was answered. Whoever is to kill it has not done so yet, and will.
	_ = pause(ctx, sendLimit)
	return CannotTell
}

// pause waits, or says why not.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newTraceparent is one of W3C Trace Context, of a trace of its own.
func newTraceparent() string {
	var id [24]byte
	_, _ = rand.Read(id[:]) // never fails
	return "00-" + hex.EncodeToString(id[:16]) + "-" + hex.EncodeToString(id[16:]) + "-00"
}

func newRequestID() string { return strings.ToLower(rand.Text()) }

func or(text, other string) string {
	if text == "" {
		return other
	}
	return text
}

// clip shortens what others wrote.
func clip(text string) string {
	const most = 400
	if text = strings.Join(strings.Fields(text), " "); len(text) > most {
		return strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
