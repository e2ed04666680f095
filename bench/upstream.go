// This file is the two processes that every call of a layer shares or replaces: the
// upstream, which is the test provider, and the plain proxy, which stands where the
// gateway stands and does no more than a proxy must.

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func upstreamRole([]string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	p := provider.New(provider.Options{})
	address, err := p.Start("")
	if err != nil {
		return err
	}
	fmt.Println(address)
	<-ctx.Done()
	return p.Close()
}

// buffers are reused, as a proxy that is meant for work does.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

func proxyRole(args []string) error {
	flags := flag.NewFlagSet("proxy", flag.ContinueOnError)
	to := flags.String("to", "", "the upstream")
	if err := flags.Parse(args); err != nil {
		return err
	}
	target, err := url.Parse(*to)
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.Path, r.Out.Host = target.Scheme, target.Host, target.Path, target.Host
		},
		Transport: &http.Transport{
			MaxIdleConns: 1024, MaxIdleConnsPerHost: 1024, IdleConnTimeout: 90 * time.Second, DisableCompression: true,
		},
		BufferPool: &buffers{},
	}
	return serveUntilTerm(proxy)
}

// serveUntilTerm serves on a free port and tells its address.
func serveUntilTerm(h http.Handler) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	fmt.Println("http://" + listener.Addr().String())
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	if err := server.Close(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
