// Command provider serves the payment provider. Its ledger survives a kill
// when it is given a file for it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/test/provider"
)

const drain = 10 * time.Second

func main() {
	if err := run(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(2)
		}
		fmt.Fprintln(os.Stderr, "provider:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	flags := flag.NewFlagSet("provider", flag.ContinueOnError)
	listen := flags.String("listen", "127.0.0.1:0", "TCP address to serve on; port 0 takes a free one")
	ledgerFile := flags.String("ledger-file", "", "file of the ledger, made if absent; without it the ledger ends with the process")
	window := flags.Duration("window", 0, "how long an idempotency key deduplicates; 0s is never")
	visibility := flags.Duration("visibility", 0, "how long after its commit a look-up shows an entry")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *window < 0 || *visibility < 0 {
		return errors.New("--window and --visibility must not be negative")
	}

	options := provider.Options{
		Window:     *window,
		Visibility: *visibility,
		Log:        slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	p := provider.New(options)
	if *ledgerFile != "" {
		opened, err := provider.Open(*ledgerFile, options)
		if err != nil {
			return err
		}
		p = opened
	}

	// Registered before the address is told: whoever knows it may signal.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	url, err := p.Start(*listen)
	if err != nil {
		return errors.Join(err, p.Close())
	}
	// The one line on standard output: scripts read the address from it.
	fmt.Println(url)

	<-ctx.Done()
	// A second signal ends the process at once.
	stop()
	draining, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	if err := p.Shutdown(draining); err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	return nil
}
