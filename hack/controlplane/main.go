// Command controlplane makes sure that the programs of a local Kubernetes
// control plane are on this machine, and says where.
//
//	go run ./hack/controlplane assets   # prints the directory for KUBEBUILDER_ASSETS
//
// Progress goes to standard error, the answer alone to standard output.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
)

func main() {
	if len(os.Args) != 2 || os.Args[1] != "assets" {
		fmt.Fprintln(os.Stderr, "usage: controlplane assets")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	found, err := assets.Find(ctx, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "controlplane:", err)
		os.Exit(1)
	}
	fmt.Println(found.Dir)
}
