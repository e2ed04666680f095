// Command images makes the container images of Holdfast, and of the stores' servers for
// tests, without Docker.
//
//	go run ./hack/images -o DIR [-version V] [-commit COMMIT] [manager|provider|agent|redis|postgres…]
//
// DIR gets NAME.tar, which container runtimes load (docker load, ctr images import), and
// NAME.spdx.json, what the image is made of. For each image it prints a line of JSON.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/holdfast-dev/holdfast/hack/images/build"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := build.Run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}
