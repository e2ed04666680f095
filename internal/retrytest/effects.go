// This file counts effects: it asks whoever moved the money, never the gateway. What
// is no whole number is no count, and an answer that was an error is none either.

package retrytest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"github.com/google/cel-go/ext"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	// countLimit is how long one count may take.
	countLimit = 30 * time.Second
	maxCounted = 8 << 20
	// shownItems is how many of what was found the report shows.
	shownItems = 5
)

// found is what a count came to.
type found struct {
	n int
	// items are what was found, as far as it was shown.
	items []string
}

// counter counts the effects of a trial.
type counter func(ctx context.Context, v values, scenario string) (found, error)

// newCounter makes one of the command of the flag, or of the file's effects.
func newCounter(spec *EffectsSpec, shell string, pool *x509.CertPool) (counter, error) {
	var count counter
	switch {
	case shell != "":
		count = command([]string{"sh", "-c", shell})
	case spec.HTTP != nil:
		var err error
		if count, err = query(spec.HTTP, pool); err != nil {
			return nil, err
		}
	default:
		count = command(spec.Command)
	}
	return func(ctx context.Context, v values, scenario string) (found, error) {
		ctx, cancel := context.WithTimeout(ctx, countLimit)
		defer cancel()
		f, err := count(ctx, v, scenario)
		if err != nil {
			return found{}, fmt.Errorf("count the effects: %w", err)
		}
		if f.n < 0 {
			return found{}, fmt.Errorf("count the effects: there are %d, which is no count", f.n)
		}
		return f, nil
	}, nil
}

// command counts by what a program prints.
func command(argv []string) counter {
	return func(ctx context.Context, v values, scenario string) (found, error) {
		filled := make([]string, len(argv))
		for i, arg := range argv {
			var err error
			if i == 2 && argv[0] == "sh" && argv[1] == "-c" {
				filled[i] = arg // a shell has its own way to say it
				continue
			}
			if filled[i], err = v.fill(where{field: kindTest + ": spec.effects.command", env: true}, arg); err != nil {
				return found{}, err
			}
		}
		cmd := exec.CommandContext(ctx, filled[0], filled[1:]...)
		cmd.Env = append(os.Environ(),
			"HOLDFAST_RETRY_ORDER="+v.order, "HOLDFAST_RETRY_INTENT="+v.intent, "HOLDFAST_RETRY_DIGITS="+v.digits, "HOLDFAST_RETRY_SCENARIO="+scenario)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.WaitDelay = time.Second
		if err := cmd.Run(); err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("it took longer than %s", countLimit)
			}
			return found{}, fmt.Errorf("the command %s: %w: %s", clip(argv[0]), err, clip(stderr.String()))
		}
		text := strings.TrimSpace(stdout.String())
		if n, err := strconv.Atoi(text); err == nil {
			return found{n: n}, nil
		}
		var items []json.RawMessage
		if err := json.Unmarshal([]byte(text), &items); err == nil && items != nil {
			f := found{n: len(items)}
			for _, item := range items[:min(len(items), shownItems)] {
				f.items = append(f.items, clip(string(item)))
			}
			return f, nil
		}
		return found{}, fmt.Errorf("the command printed %q: it must print a whole number, or a JSON list of what it found", clip(text))
	}
}

// query counts by what a GET answers.
func query(spec *QuerySpec, pool *x509.CertPool) (counter, error) {
	const field = kindTest + ": spec.effects.http."
	bad := func(err error) error { return fmt.Errorf("%scount: %w", field, err) }
	env, err := cel.NewEnv(
		cel.Variable("body", cel.DynType), cel.Variable("order", cel.StringType), cel.Variable("intent", cel.StringType), cel.Variable("digits", cel.StringType),
		cel.OptionalTypes(), ext.Strings(),
	)
	if err != nil {
		return nil, bad(err)
	}
	if spec.Count == "" {
		return nil, bad(errors.New("is missing: give a CEL expression over body that yields a number, or the list of what was found"))
	}
	ast, issues := env.Compile(spec.Count)
	if issues.Err() != nil {
		return nil, bad(issues.Err())
	}
	program, err := env.Program(ast, cel.CostLimit(100_000_000))
	if err != nil {
		return nil, bad(err)
	}
	noURL := fmt.Errorf("%surl: must begin with http:// or https://, or with a placeholder for that", field)
	isURL := func(text string) bool {
		return strings.HasPrefix(text, "http://") || strings.HasPrefix(text, "https://")
	}
	if !isURL(spec.URL) && !strings.HasPrefix(spec.URL, "{{") {
		return nil, noURL
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, IdleConnTimeout: time.Minute}
	if pool != nil {
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	c := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context, v values, _ string) (found, error) {
		to, err := v.fill(where{field: field + "url", env: true}, spec.URL)
		if err != nil {
			return found{}, err
		}
		if !isURL(to) {
			return found{}, noURL
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, to, nil)
		if err != nil {
			return found{}, errors.New("its URL cannot be read") // the error would show what came from the environment
		}
		request.Header.Set("Accept", "application/json")
		for name, value := range spec.Headers {
			if value, err = v.fill(where{field: field + "headers", env: true}, value); err != nil {
				return found{}, err
			}
			request.Header.Set(name, value)
		}
		response, err := c.Do(request)
		if err != nil {
			// What stands around it is the URL, which may hold what came from the environment.
			return found{}, fmt.Errorf("GET %s: %w", spec.URL, errors.Unwrap(err))
		}
		defer func() { _ = response.Body.Close() }()
		text, err := io.ReadAll(io.LimitReader(response.Body, maxCounted+1))
		switch {
		case err != nil:
			return found{}, fmt.Errorf("GET %s: read the answer: %w", spec.URL, err)
		case response.StatusCode < 200 || response.StatusCode > 299:
			return found{}, fmt.Errorf("GET %s: answered %d: %s", spec.URL, response.StatusCode, clip(string(text)))
		case len(text) > maxCounted:
			return found{}, fmt.Errorf("GET %s: answered more than %d bytes: ask for less", spec.URL, maxCounted)
		}
		var body any
		if err := json.Unmarshal(text, &body); err != nil {
			return found{}, fmt.Errorf("GET %s: answered no JSON: %w: %s", spec.URL, err, clip(string(text)))
		}
		out, _, err := program.ContextEval(ctx, map[string]any{"body": body, "order": v.order, "intent": v.intent, "digits": v.digits})
		if err != nil {
			return found{}, fmt.Errorf("%scount: %w; the answer was %s", field, err, clip(string(text)))
		}
		f, err := counted(out)
		if err != nil {
			return found{}, fmt.Errorf("%scount: %w; the answer was %s", field, err, clip(string(text)))
		}
		return f, nil
	}, nil
}

// counted reads what an expression has yielded.
func counted(v ref.Val) (found, error) {
	switch v := v.(type) {
	case types.Int:
		if int64(v) == int64(int(v)) {
			return found{n: int(v)}, nil
		}
	case types.Uint:
		if v <= math.MaxInt32 {
			return found{n: int(v)}, nil
		}
	case types.Double:
		if f := float64(v); f == math.Trunc(f) && math.Abs(f) <= math.MaxInt32 {
			return found{n: int(f)}, nil
		}
	case traits.Lister:
		size, ok := v.Size().(types.Int)
		if !ok {
			break
		}
		f := found{n: int(size)}
		for i := types.Int(0); i < min(size, shownItems); i++ {
			text := "?"
			if native, err := v.Get(i).ConvertToNative(reflect.TypeFor[*structpb.Value]()); err == nil {
				if raw, err := json.Marshal(native.(*structpb.Value).AsInterface()); err == nil {
					text = string(raw)
				}
			}
			f.items = append(f.items, clip(text))
		}
		return f, nil
	}
	return found{}, fmt.Errorf("yields %v, a %s: it must be a whole number, or the list of what was found", v.Value(), v.Type().TypeName())
}
