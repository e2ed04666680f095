// Command peer is the pod of the cluster's own test: it says who it is, asks others, and
// counts on its volume how often it was started.
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

func main() {
	name, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	starts, err := count()
	if err != nil {
		log.Fatal(err)
	}
	// Each request is a connection of its own, so that a Service chooses anew.
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	http.HandleFunc("/name", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, name) })
	http.HandleFunc("/starts", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, starts) })
	http.HandleFunc("/ask", func(w http.ResponseWriter, r *http.Request) {
		answer, err := client.Get(r.URL.Query().Get("url"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer func() { _ = answer.Body.Close() }()
		_, _ = io.Copy(w, answer.Body)
	})
	// Whoever asks for /late is answered when somebody asks for /release.
	var waiting atomic.Int64
	release := make(chan struct{})
	http.HandleFunc("/late", func(w http.ResponseWriter, r *http.Request) {
		waiting.Add(1)
		defer waiting.Add(-1)
		select {
		case <-release:
			_, _ = io.WriteString(w, name)
		case <-r.Context().Done():
		}
	})
	http.HandleFunc("/waiting", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, waiting.Load()) })
	http.HandleFunc("/release", func(http.ResponseWriter, *http.Request) { close(release) })
	log.Print(name, " serves")
	log.Fatal(http.ListenAndServe(":8080", nil))
}

// count adds one to the number in the volume, if there is a volume.
func count() (int, error) {
	const dir, path = "/data", "/data/starts"
	if _, err := os.Stat(dir); err != nil {
		return 0, nil
	}
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return 0, err
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n + 1, os.WriteFile(path, []byte(strconv.Itoa(n+1)), 0o644)
}
