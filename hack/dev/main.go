// Command dev runs all of Holdfast on this machine, in the background.
//
//	go run ./hack/dev up [--store redis|postgres]   # start it, or what of it is not running, and wait
//	go run ./hack/dev down [--keep-data]            # end it, and remove its data
//
// With a store that several processes share, a server of it runs beside the rest, and a
// second gateway, whose address is HOLDFAST_URL_2 in .dev/env.
//
// The gateway listens on 127.0.0.1:18443 and the provider on 127.0.0.1:18080, or
// on the ports in HOLDFAST_PORT and PROVIDER_PORT.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/hack/controlplane/assets"
	"github.com/holdfast-dev/holdfast/hack/dev/whole"
)

func main() {
	// What the client library has to say, it says as an error.
	log.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := run(ctx, os.Args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "dev:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("say what to do: up or down")
	}
	root, err := assets.Root(ctx)
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("dev "+args[0], flag.ContinueOnError)
	dir := flags.String("dir", filepath.Join(root, ".dev"), "state directory")
	keep, store := false, ""
	if args[0] == "up" {
		flags.StringVar(&store, "store", "", "redis or postgres: the records of the samples are on a server of it; a state directory cannot change from one to another")
	}
	if args[0] == "down" {
		flags.BoolVar(&keep, "keep-data", false, "keep what the cluster, the stores and the provider remember")
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	switch args[0] {
	case "up":
		return up(ctx, root, *dir, store)
	case "down":
		if err := whole.Down(ctx, *dir, keep, os.Stderr); err != nil {
			return err
		}
		fmt.Println("Holdfast is down.")
		return nil
	default:
		return fmt.Errorf("%q is neither up nor down", args[0])
	}
}

func up(ctx context.Context, root, dir, store string) error {
	gateway, err := portFromEnv("HOLDFAST_PORT")
	if err != nil {
		return err
	}
	provider, err := portFromEnv("PROVIDER_PORT")
	if err != nil {
		return err
	}
	end := "make down"
	if dir != filepath.Join(root, ".dev") {
		end = "go run ./hack/dev down --dir " + dir
	}
	start := time.Now()
	w, err := whole.Up(ctx, whole.Options{
		Root: root, Dir: dir, GatewayPort: gateway, ProviderPort: provider, Log: os.Stderr,
		Store: store, SecondGateway: store != "",
	})
	if err != nil {
		return fmt.Errorf("%w\nWhat was started is still running: try again, or end it with `%s`", err, end)
	}
	fmt.Printf(`Holdfast is up after %s.
  tools     %s/v1/namespaces/support/tools/NAME
  provider  %s, its money is counted at /ledger
  logs      %s
For your shell:  . %s
To end it:       %s
`, time.Since(start).Round(time.Second), w.GatewayURL(), w.ProviderURL(), filepath.Dir(w.Processes().Log(whole.Manager)), w.EnvFile(), end)
	return nil
}

// portFromEnv is 0 where the variable is not set.
func portFromEnv(name string) (int, error) {
	text := os.Getenv(name)
	if text == "" {
		return 0, nil
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 1 || port > 65535 {
		return 0, fmt.Errorf("%s is %q, it must be a port from 1 to 65535", name, text)
	}
	return port, nil
}
