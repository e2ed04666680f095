package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// A process whose every second call is a replay is drawn as one.
func TestThePictureShowsWhatWasScraped(t *testing.T) {
	if err := os.Chdir(".."); err != nil { // as the command is run
		t.Fatal(err)
	}
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		v := n.Add(1)
		_, _ = fmt.Fprintf(w, "# HELP holdfast_calls_total x\n"+ // the caller sees it
			"holdfast_calls_total{namespace=\"support\",reason=\"\",tool=\"refund\",verdict=\"ALLOW\"} %d\n"+
			"holdfast_calls_total{namespace=\"support\",reason=\"\",tool=\"refund\",verdict=\"REPLAY\"} %d\n"+
			"holdfast_calls_in_progress 3\ngo_goroutines 9\n", v, v)
	}))
	defer server.Close()
	out := filepath.Join(t.TempDir(), "picture.svg")
	if err := run(t.Context(), 3*time.Second, 100*time.Millisecond, time.Second, 1, out, []string{server.URL}); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("it is no XML: %v", err)
		}
	}
	for _, want := range []string{">Replay rate<", ">support/refund<", ">50 %<"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("it does not show %s", want)
		}
	}
	if line := regexp.MustCompile(`<path d="M[^"]*L[^"]*"`).Find(svg); len(line) < 50 {
		t.Errorf("the line is %q", line)
	}
}
