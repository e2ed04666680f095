// Command local-tool pays for an order in its own process, once: however often it is run,
// and wherever it is killed. It is an example of a tool that runs inside its agent; its
// AgentTool is config/samples/tool-local.yaml, and docs/local-tools.md explains it.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/holdfast-dev/holdfast/pkg/client"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		if errors.Is(err, client.ErrHeld) {
			os.Exit(3) // a person must decide; run it again afterwards
		}
		os.Exit(1)
	}
}

// payer pays through a payment provider.
type payer struct {
	url   string
	fault string
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("local-tool", flag.ContinueOnError)
	holdfast := flags.String("holdfast", os.Getenv("HOLDFAST_URL"), "Holdfast's URL")
	tokenFile := flags.String("token-file", os.Getenv("HOLDFAST_TOKEN_FILE"), "file with a token of the audience holdfast")
	namespace := flags.String("namespace", "support", "namespace of the AgentTool")
	tool := flags.String("tool", "pay-supplier", "name of the AgentTool")
	outbox := flags.String("outbox", "outbox.db", "file that remembers what was begun")
	provider := flags.String("provider", os.Getenv("PROVIDER_URL"), "the payment provider's URL")
	fault := flags.String("provider-fault", "", "what goes wrong at the test provider")
	order := flags.String("order", "", "the order to pay for; empty: only go on with what was begun")
	amount := flags.String("amount", "49.99", "how much, in USD")
	patience := flags.Duration("patience", 2*time.Minute, "how long to try")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *patience)
	defer cancel()

	p := &payer{url: *provider, fault: *fault}
	file, err := filepath.Abs(*outbox)
	if err != nil {
		return err
	}
	c, err := client.Open(client.Options{URL: *holdfast, Namespace: *namespace, TokenFile: *tokenFile, Outbox: file, LookUp: p.lookUp})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()

	// First what an earlier process has left.
	if err := c.Recover(ctx, p.pay); err != nil {
		if err = fmt.Errorf("of what was begun earlier: %w", err); *order == "" {
			return err
		}
		fmt.Fprintln(os.Stderr, err) // it keeps no other payment
	}
	if *order == "" {
		return nil
	}
	body, err := json.Marshal(map[string]string{"accountId": "a1", "orderId": *order, "amount": *amount})
	if err != nil {
		return err
	}
	// The ID is of the purchase, not of this run: it is the same every time.
	res, err := c.Do(ctx, client.Intent{Tool: *tool, ID: "supplier-order-" + *order, Body: body}, p.pay)
	if err != nil {
		return err
	}
	again := ""
	if res.Replayed {
		again = " (it was paid before)"
	}
	_, err = fmt.Fprintf(out, "order %s is paid%s: %s\n", *order, again, res.Body)
	return err
}

// pay moves the money. It sends with its context, which ends with the attempt's time.
func (p *payer) pay(ctx context.Context, a *client.Attempt) (client.Result, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/charges", bytes.NewReader(a.Intent.Body))
	if err != nil {
		return client.Result{}, &client.NothingMoved{Reason: "the request cannot be made", Err: err}
	}
	req.GetBody = nil // nothing sends it again by itself
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", a.ProviderKey)
	if p.fault != "" {
		req.Header.Set("Provider-Fault", p.fault)
	}
	if !a.InTime() {
		return client.Result{}, &client.NothingMoved{Reason: "its time was over before it was sent", Again: true}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return client.Result{}, err // it may have arrived: nobody knows
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return client.Result{}, err
	}
	switch resp.StatusCode {
	case http.StatusCreated:
		return receipt(body)
	case http.StatusPaymentRequired:
		return client.Result{}, &client.NothingMoved{Reason: "declined", Result: &client.Result{Status: 402, ContentType: "application/json", Body: body}}
	case http.StatusTooManyRequests:
		return client.Result{}, &client.NothingMoved{Reason: "too many requests", Again: true, After: time.Second}
	case http.StatusAccepted:
		return client.Result{}, &client.Accepted{}
	}
	return client.Result{}, fmt.Errorf("the provider answered %d", resp.StatusCode)
}

// lookUp asks the provider whether it has the payment of an attempt whose process is gone.
// That it has none says nothing: it may be on its way.
func (p *payer) lookUp(ctx context.Context, b client.Begun) (client.Result, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/charges/"+b.ProviderKey, nil)
	if err != nil {
		return client.Result{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return client.Result{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return client.Result{}, errors.Join(fmt.Errorf("the provider answered %d", resp.StatusCode), err)
	}
	return receipt(body)
}

func receipt(body []byte) (client.Result, error) {
	var r struct{ ID, Status string }
	if err := json.Unmarshal(body, &r); err != nil {
		return client.Result{}, err
	}
	if r.Status == "processing" {
		return client.Result{}, &client.Accepted{Reference: r.ID}
	}
	return client.Result{Status: http.StatusCreated, ContentType: "application/json", Body: body, ProviderReference: r.ID}, nil
}
