// Command agent orders through a gateway, and serves what it sees. It goes on serving when
// its orders are done, until it is told to end.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/test/agent"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(arguments []string) (err error) {
	var o agent.Options
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.StringVar(&o.Gateway, "gateway", "https://holdfast-gateway.holdfast-system.svc", "URL of the gateways")
	flags.StringVar(&o.CAFile, "ca-file", "", "certificates by which theirs is trusted; empty: the system's")
	flags.StringVar(&o.TokenFile, "token-file", "", "file of the token of audience holdfast, read anew for each call")
	flags.StringVar(&o.Namespace, "namespace", "", "namespace of the tool")
	flags.StringVar(&o.Tool, "tool", "", "tool to call")
	flags.StringVar(&o.Account, "account", "", "accountId of all orders; empty: the namespace")
	flags.StringVar(&o.Prefix, "prefix", "", "what the names of all orders begin with: this agent's alone")
	flags.IntVar(&o.Orders, "orders", 0, "how many orders to make; 0: until stopped")
	flags.IntVar(&o.Concurrency, "concurrency", 1, "how many calls are in flight at once")
	flags.DurationVar(&o.Duration, "duration", 0, "after which no order more is begun; 0s: no such time")
	flags.DurationVar(&o.Timeout, "timeout", time.Minute, "how long one call may take")
	flags.DurationVar(&o.Impatience, "impatience", 0, "after how long a call is made again at the latest, also where the answer names a later time; 0s: when it says")
	faults := flags.String("faults", "", "values of the header Provider-Fault, in turn, separated by commas")
	listen := flags.String("listen", "", "TCP address of the report; empty: it is only printed, at the end")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *faults != "" {
		o.Faults = strings.Split(*faults, ",")
	}
	a, err := agent.New(o)
	if err != nil {
		return err
	}
	ctx, end := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer end()
	serving := make(chan error, 1)
	if *listen != "" {
		listener, err := net.Listen("tcp", *listen)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 10 * time.Second}
		go func() { serving <- server.Serve(listener) }()
		defer func() { err = errors.Join(err, server.Close()) }()
	}
	a.Run(ctx)
	if err := json.NewEncoder(os.Stdout).Encode(a.Report()); err != nil {
		return err
	}
	if *listen == "" {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-serving:
		return fmt.Errorf("serve the report: %w", err)
	}
}
