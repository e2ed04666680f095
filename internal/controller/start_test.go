package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/holdfast-dev/holdfast/internal/guard"
	"github.com/holdfast-dev/holdfast/internal/policy"
)

// A tool that cannot be looked at to the end is refused itself, and keeps no other down.
func TestOneToolKeepsNoOtherDown(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	p := start(t, dir)
	w.ready()
	p.stop()

	var cm corev1.ConfigMap
	must(t, admin.Get(w.ctx, types.NamespacedName{Namespace: operatorNamespace, Name: MemoryName}, &cm))
	cm.Immutable = ptr.To(true)
	must(t, admin.Update(w.ctx, &cm))
	t.Cleanup(func() { // once the process has ended: an immutable one is never mutable again
		must(t, admin.Delete(w.ctx, &cm))
		must(t, admin.Create(w.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: cm.Namespace, Name: cm.Name}, Data: cm.Data}))
	})
	w.create(w.tool("stuck", "refunds"))
	p = start(t, dir)
	if late := p.op.beginning.late; len(late) > 0 {
		t.Errorf("the start waited in vain for %s", named(late))
	}
	w.pay(p, "refund", "a", "9", "1", guard.AttemptSucceeded)
	var no *policy.NotServedError
	if _, err := p.op.Served().Tool(w.ns, "stuck"); !errors.As(err, &no) || no.Reason != policy.ReasonPending || !strings.Contains(no.Message, "log") {
		t.Errorf("the tool should be refused, got %v", err)
	}
	if tool, err := p.op.Served().Tool(w.ns, "refund"); err != nil || tool.Name != "refund" {
		t.Errorf("the other should be served, got %v", err)
	}
	if _, err := p.op.Served().Tool(w.ns, "none"); !errors.Is(err, policy.ErrNoTool) {
		t.Errorf("a tool that does not exist should not be there, got %v", err)
	}
	// It exists, and the policy does not have it.
	p.op.Policies.Remove(w.ns, "stuck")
	if _, err := p.op.Served().Tool(w.ns, "stuck"); !errors.As(err, &no) || no.Reason != policy.ReasonPending {
		t.Errorf("a tool that was not looked at should be refused, got %v", err)
	}
}

func TestTheStartWaits(t *testing.T) {
	var looked, gone atomic.Bool
	begin := func(patience time.Duration) (*Operator, <-chan error) {
		b := &beginning{patience: patience, ready: make(chan struct{})}
		b.waits.Store(new("lists"))
		b.list = func(context.Context) ([]awaited, error) {
			var out []awaited
			for i := range maxNamed + 2 {
				a := awaited{kind: "AgentTool", name: types.NamespacedName{Namespace: "a", Name: fmt.Sprint("tool", i)}}
				a.looked = func(types.NamespacedName) bool { return looked.Load() && i > 0 }
				out = append(out, a)
			}
			return out, nil
		}
		b.exists = func(_ context.Context, a awaited) bool { return !gone.Load() || a.name.Name != "tool0" }
		ended := make(chan error, 1)
		go func() { ended <- b.Start(t.Context()) }()
		return &Operator{beginning: b}, ended
	}
	waitsFor := func(o *Operator, parts ...string) {
		t.Helper()
		eventually(t, func() error {
			err := o.Programmed()
			if err == nil {
				return errors.New("it does not wait")
			}
			for _, part := range parts {
				if !strings.Contains(err.Error(), part) {
					return fmt.Errorf("%w should name %q", err, part)
				}
			}
			return nil
		})
	}
	o, ended := begin(time.Hour)
	waitsFor(o, "AgentTool a/tool0, AgentTool a/tool1", "and 2 more")
	looked.Store(true)
	eventually(t, func() error {
		if err := o.Programmed(); err == nil || strings.Contains(err.Error(), "tool1") {
			return fmt.Errorf("it should wait for one alone, got %w", err)
		}
		return nil
	})
	gone.Store(true)
	must(t, <-ended)
	must(t, o.Programmed())
	if len(o.beginning.late) > 0 {
		t.Errorf("late are %s", named(o.beginning.late))
	}
	// What comes later changes nothing.
	looked.Store(false)
	gone.Store(false)
	must(t, o.Programmed())

	// Nothing is waited for without end.
	o, ended = begin(100 * time.Millisecond)
	must(t, <-ended)
	must(t, o.Programmed())
	if len(o.beginning.late) != maxNamed+2 {
		t.Errorf("late are %s", named(o.beginning.late))
	}
}
