// Command cluster runs a real Kubernetes cluster with nodes on this Linux machine, as
// root and without containers, and breaks it.
//
//	go run ./hack/cluster up [--nodes 2]      # start it and wait; data of an earlier one is gone
//	go run ./hack/cluster load ARCHIVE...     # bring docker-archives into every node
//	go run ./hack/cluster crash NODE          # end a node as a pulled plug does
//	go run ./hack/cluster boot NODE           # start it again on its disk
//	go run ./hack/cluster cut NODE PEER...    # drop packets between a node and addresses, nodes or control-plane
//	go run ./hack/cluster mend NODE           # let them pass again
//	go run ./hack/cluster exec NODE CMD...    # run a command in a node's box
//	go run ./hack/cluster env                 # what a shell needs: . <(go run ./hack/cluster env)
//	go run ./hack/cluster down                # end and remove it
//
// With CLUSTER=kind, up makes it with kind and Docker instead.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/holdfast-dev/holdfast/hack/cluster/nodes"
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
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("say what to do: up, load, crash, boot, cut, mend, exec, env or down")
	}
	flags := flag.NewFlagSet("cluster "+args[0], flag.ContinueOnError)
	dir := flags.String("dir", "", "state directory; .dev/cluster in the clone unless named")
	count := 0
	if args[0] == "up" {
		flags.IntVar(&count, "nodes", 2, "how many nodes")
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	rest := flags.Args()
	want := func(least, most int, what string) error {
		if len(rest) < least || most >= 0 && len(rest) > most {
			return fmt.Errorf("usage: cluster %s %s", args[0], what)
		}
		return nil
	}
	switch args[0] {
	case "up":
		if err := want(0, 0, "[--nodes N]"); err != nil {
			return err
		}
		start := time.Now()
		c, err := nodes.Up(ctx, nodes.Options{Dir: *dir, Nodes: count, Log: os.Stderr})
		if err != nil {
			return err
		}
		fmt.Printf("The cluster is up after %s.\n  kubeconfig  %s\n", time.Since(start).Round(100*time.Millisecond), c.Kubeconfig())
		for _, node := range c.Names() {
			fmt.Printf("  %s      %s\n", node, c.Address(node))
		}
		return nil
	case "down":
		if err := want(0, 0, ""); err != nil {
			return err
		}
		return nodes.Down(ctx, *dir)
	}

	commands := map[string]struct {
		least, most int
		usage       string
		do          func(*nodes.Cluster) error
	}{
		"load": {1, -1, "ARCHIVE...", func(c *nodes.Cluster) error {
			for _, archive := range rest {
				if err := c.Load(ctx, archive); err != nil {
					return err
				}
			}
			return nil
		}},
		"crash": {1, 1, "NODE", func(c *nodes.Cluster) error { return c.Crash(ctx, rest[0]) }},
		"boot":  {1, 1, "NODE", func(c *nodes.Cluster) error { return c.Boot(ctx, rest[0]) }},
		"cut":   {2, -1, "NODE PEER...", func(c *nodes.Cluster) error { return c.Cut(ctx, rest[0], rest[1:]...) }},
		"mend":  {1, 1, "NODE", func(c *nodes.Cluster) error { return c.Mend(ctx, rest[0]) }},
		"exec": {2, -1, "NODE CMD...", func(c *nodes.Cluster) error {
			out, err := c.Exec(ctx, rest[0], rest[1:]...)
			fmt.Print(out)
			return err
		}},
		"env": {0, 0, "", func(c *nodes.Cluster) error {
			fmt.Printf("export KUBECONFIG=%s\n", c.Kubeconfig())
			return nil
		}},
	}
	command, known := commands[args[0]]
	if !known {
		return fmt.Errorf("%q is none of up, load, crash, boot, cut, mend, exec, env and down", args[0])
	}
	if err := want(command.least, command.most, command.usage); err != nil {
		return err
	}
	c, err := nodes.Attach(ctx, *dir)
	if err != nil {
		return err
	}
	return command.do(c)
}
