// This file loads settled records in bulk. Each is made by the real policy and the
// real engine, whose writes are caught on their way; the last one, the settlement, is
// then written into the store as the record's first. So what lies there is what a
// gateway would have left, at half the writes. The store need not sync meanwhile.

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
	"github.com/holdfast-dev/holdfast/internal/store"
)

// catcher is a store in which every write succeeds and only the last one is kept.
type catcher struct {
	store.Store
	first, last store.Write
}

func (c *catcher) Standing(context.Context) (store.Standing, error) {
	return store.Standing{Identity: identity, Now: time.Now()}, nil
}

func (c *catcher) List(context.Context, store.List) (store.Page, error) {
	return store.Page{Now: time.Now()}, nil
}

func (c *catcher) Reserve(_ context.Context, r store.Reserve) (store.Result, error) {
	c.first = r.Write
	return store.Result{Outcome: store.Written, Now: time.Now(), Version: 1}, nil
}

func (c *catcher) Update(_ context.Context, w store.Write) (store.Result, error) {
	c.last = w
	return store.Result{Outcome: store.Written, Now: time.Now(), Version: 2}, nil
}

// maker makes settled records.
type maker struct {
	tool   *policy.Tool
	caught catcher
	engine *guard.Engine
	tokens []string
}

// nowhere is the upstream of what is only written down: its address is no part of a record.
const nowhere = "http://127.0.0.1"

func newMaker(tool *policy.Tool) *maker {
	m := &maker{tool: tool}
	m.engine = guard.New(&m.caught, identity, guard.Options{})
	for n := range int64(callers) {
		m.tokens = append(m.tokens, token(n))
	}
	return m
}

// settled gives the writes that call number i would come to: the claim and the settlement.
func (m *maker) settled(i int64) (claim, settlement store.Write, err error) {
	c := callOf(i)
	id, err := m.tool.Identify(policy.CallInput{Method: "POST", Header: c.header(m.tokens[i%callers]), Body: c.body, Agent: callerName(i)})
	if err != nil {
		return claim, settlement, err
	}
	a, err := m.engine.Admit(context.Background(), guard.Call{
		Key:       guard.Key{Namespace: namespace, Tool: toolName, Caller: callerName(i), IntentID: id.IntentID},
		CallerUID: callerUID(i), Scope: id.Scope, Lineage: id.Lineage, Amount: id.Amount, Recipient: id.Recipient,
		Fingerprint: id.Fingerprint, IdentityHash: id.IdentityHash, AmountHash: id.AmountHash, RecipientHash: id.RecipientHash,
	}, m.tool.Guard)
	if err != nil {
		return claim, settlement, err
	}
	reference := fmt.Sprintf("ch_%016x", i)
	now := time.Now().UTC()
	body := fmt.Appendf(nil, `{"id":%q,"kind":"charge","accountId":"acct_%04d","orderId":"order_%010d","amount":"49.99","currency":"USD","key":%q,"created":%q}`,
		reference, i%accounts, i, a.Ticket.ProviderKey, now.Format(time.RFC3339Nano))
	_, err = m.engine.Settle(context.Background(), a.Ticket, guard.Result{
		Outcome: guard.AttemptSucceeded, ProviderReference: reference, Detail: "the upstream answered 201",
		Response: &guard.Response{
			Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}, "Date": {now.Format(time.RFC1123)}},
			Body: body, Size: int64(len(body)), Digest: "sha256:5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
		},
	})
	claim, settlement = m.caught.first, m.caught.last
	settlement.Expected = 0
	if settlement.RenewMarks {
		// There will be no record to have them from.
		for _, mark := range claim.Marks {
			mark.Until = settlement.Until
			settlement.Marks = append(settlement.Marks, mark)
		}
		settlement.RenewMarks, settlement.Until = false, time.Time{}
	}
	return claim, settlement, err
}

func fillRole(args []string) error {
	var at place
	flags := flag.NewFlagSet("fill", flag.ContinueOnError)
	at.bind(flags)
	count := flags.Int64("count", 0, "how many records")
	workers := flags.Int("workers", 128, "how many writes at once")
	if err := flags.Parse(args); err != nil {
		return err
	}
	st, err := at.open(true)
	if err != nil {
		return err
	}
	err = fill(st, *count, *workers)
	if err := errors.Join(err, st.Close()); err != nil {
		return err
	}
	if at.kind == "bolt" { // which has left that to whoever asked for no sync
		f, err := os.OpenFile(at.at, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

func fill(st store.Store, count int64, workers int) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if _, err := st.Initialise(ctx, identity); err != nil {
		return err
	}
	tool, err := compiled(nowhere)
	if err != nil {
		return err
	}
	var next atomic.Int64
	var group sync.WaitGroup
	failed := make(chan error, workers)
	for range workers {
		m := newMaker(tool)
		group.Go(func() {
			for i := next.Add(1) - 1; i < count && ctx.Err() == nil; i = next.Add(1) - 1 {
				_, w, err := m.settled(i)
				if err == nil {
					var res store.Result
					if res, err = st.Update(ctx, w); err == nil && res.Outcome != store.Written {
						err = fmt.Errorf("record %d was not written: %s", i, res.Outcome)
					}
				}
				if err != nil {
					failed <- err
					cancel()
					return
				}
			}
		})
	}
	group.Wait()
	close(failed)
	return <-failed
}
