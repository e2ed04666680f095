// Keys, arguments, money.

package e2e

import (
	"fmt"
	"net/http"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

var _ = Describe("Keys, arguments and money", func() {
	var w *world
	BeforeEach(func(ctx SpecContext) { w = newWorld(ctx) })

	// body is a payment for order 9 with further fields, as text.
	body := func(fields string) string {
		return fmt.Sprintf(`{"accountId":%q,"orderId":"9",%s}`, w.namespace, fields)
	}

	It("K01: a call that names no intent is refused", func(ctx SpecContext) {
		nothingSent(ctx, func() {
			for _, c := range []call{
				{body: w.order("9", "10")},
				{session: "s1", body: w.order("9", "10")},
				{index: "4", body: w.order("9", "10")},
				{id: " ", body: w.order("9", "10")},
			} {
				p := w.pay(ctx, c, 400, none).problem()
				Expect(p.Reason).To(Equal("invalid_request"))
				Expect(p.Detail).To(ContainSubstring("names no intent"))
				Expect(p.SuggestedAction).To(Equal("fix_request"))
			}
		})
	})

	It("K02: one key however its header and its value are written", func(ctx SpecContext) {
		w.pay(ctx, call{header: map[string]string{"idempotency-key": "abc"}, body: w.order("9", "10")}, 201, allow)
		w.pay(ctx, call{header: map[string]string{"IDEMPOTENCY-KEY": `"abc"`}, body: w.order("9", "10")}, 201, replay)
		w.pay(ctx, call{id: "ABC", body: w.order("10", "10")}, 201, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
		Expect(w.charged(ctx, "10")).To(Equal(1))
	})

	It("K03: one client key on two tools is two intents with two provider keys", func(ctx SpecContext) {
		refund := w.paymentTool("refund", "/refunds")
		refund.Spec.Identity.Scope = []v1alpha1.Expression{`path("refund", call.body.accountId, "order", call.body.orderId)`}
		w.add(ctx, refund)
		w.pay(ctx, call{id: "k1", body: w.order("9", "10")}, 201, allow)
		w.pay(ctx, call{tool: "refund", id: "k1", body: w.order("9", "10")}, 201, allow)
		entries := w.entries(ctx)
		Expect(entries).To(HaveLen(2))
		Expect(entries[0].Kind).NotTo(Equal(entries[1].Kind))
		for _, e := range entries {
			Expect(e.Key).NotTo(BeElementOf("", "k1"))
		}
		Expect(entries[0].Key).NotTo(Equal(entries[1].Key))
	})

	It("K04: fields that are new in each try are not part of the payment", func(ctx SpecContext) {
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) {
			tool.Spec.Identity.Volatile = []v1alpha1.JSONPointer{"/createdAt", "/attempt/id", "/card/encrypted"}
		})
		try := func(n int, holder string) string {
			return body(fmt.Sprintf(`"amount":10,"createdAt":"2026-01-01T00:00:0%dZ","attempt":{"id":"a%d"},"card":{"encrypted":"x%d==","holder":%q}`, n, n, n, holder))
		}
		w.pay(ctx, call{id: "k1", body: try(1, "A. Agent")}, 201, allow)
		w.pay(ctx, call{id: "k1", body: try(2, "A. Agent")}, 201, replay)
		// All else is.
		w.pay(ctx, call{id: "k1", body: try(3, "Somebody Else")}, 422, conflict)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("K05: an amount is exact, in major and in minor units", func(ctx SpecContext) {
		minor := w.paymentTool("minor", "/charges")
		minor.Spec.Identity.Amount.Unit = v1alpha1.UnitMinor
		w.add(ctx, minor)
		for i, row := range []struct{ tool, value, currency, amount string }{
			{charge, "10000", "JPY", "10000"},
			{"minor", "10000", "JPY", "10000"},
			{charge, "705.00", "JPY", "705"},
			{charge, `"705.00"`, "JPY", "705"},
			{charge, "1.234", "KWD", "1.234"},
			{"minor", "1234", "KWD", "1.234"},
			{charge, "10.5", "JPY", ""},
			{"minor", "10.5", "JPY", ""},
			{charge, "1.2345", "KWD", ""},
			{charge, "-1", "USD", ""},
			{charge, `"ten"`, "USD", ""},
			{charge, "1", "NOPE", ""},
		} {
			id := fmt.Sprint("k", i)
			c := call{tool: row.tool, id: id, body: fmt.Sprintf(`{"accountId":%q,"orderId":%q,"amount":%s,"currency":%q}`, w.namespace, id, row.value, row.currency)}
			if row.amount == "" {
				nothingSent(ctx, func() { w.pay(ctx, c, 400, none) })
				continue
			}
			w.pay(ctx, c, 201, allow)
			doc := w.poll(ctx, row.tool, id, "")
			Expect(doc.Amount).NotTo(BeNil())
			Expect([]string{doc.Amount.Value, doc.Amount.Currency}).To(Equal([]string{row.amount, row.currency}), "%v", row)
		}
	})

	It("K06: numbers are compared exactly", func(ctx SpecContext) {
		const big = "100000000000000000"
		w.pay(ctx, call{id: "big", body: body(`"amount":1,"asset":` + big + `1`)}, 201, allow)
		w.pay(ctx, call{id: "big", body: body(`"amount":1,"asset":` + big + `0`)}, 422, conflict)
		w.pay(ctx, call{id: "big", body: body(`"amount":1,"asset":` + big + `1.0`)}, 201, replay)
		ten := func(text, zero string) string {
			return fmt.Sprintf(`{"accountId":%q,"orderId":"10","amount":%s,"discount":%s}`, w.namespace, text, zero)
		}
		w.pay(ctx, call{id: "ten", body: ten("10", "0")}, 201, allow)
		for _, same := range []string{ten("10.0", "-0"), ten("1e1", "0.00"), ten("0.1E+2", "-0.0e3")} {
			w.pay(ctx, call{id: "ten", body: same}, 201, replay)
		}
		w.pay(ctx, call{id: "ten", body: ten("10.01", "0")}, 422, conflict)
		Expect(w.entries(ctx)).To(HaveLen(2))
	})

	It("K07: a field that comes twice is refused", func(ctx SpecContext) {
		nothingSent(ctx, func() {
			p := w.pay(ctx, call{id: "k1", body: body(`"amount":1,"amount":999`)}, 400, none).problem()
			Expect(p.Detail).To(ContainSubstring("twice"))
			w.pay(ctx, call{id: "k1", body: body(`"amount":1,"to":{"a":1,"\u0061":2}`)}, 400, none)
		})
	})

	It("K08: letter case means nothing in a field that is declared an address, and all elsewhere", func(ctx SpecContext) {
		w.change(ctx, charge, func(tool *v1alpha1.AgentTool) { tool.Spec.Identity.Addresses = []v1alpha1.JSONPointer{"/to"} })
		w.pay(ctx, call{id: "k1", body: body(`"amount":10,"to":"0xAbCdEf0123","note":"x"`)}, 201, allow)
		w.pay(ctx, call{id: "k1", body: body(`"amount":10,"to":"0xabcdef0123","note":"x"`)}, 201, replay)
		w.pay(ctx, call{id: "k1", body: body(`"amount":10,"to":"0xabcdef0123","note":"X"`)}, 422, conflict)
		w.pay(ctx, call{id: "k1", body: body(`"amount":10,"to":"0xabcdef0124","note":"x"`)}, 422, conflict)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})

	It("K11: a declined card is final for its ID, and another ID is allowed", func(ctx SpecContext) {
		c := call{id: "k1", body: w.order("9", "10"), fault: "decline-402"}
		declined := w.pay(ctx, c, 402, allow)
		nothingSent(ctx, func() {
			again := w.pay(ctx, c, 402, replay)
			Expect(again.body).To(Equal(declined.body))
			Expect(again.header.Get("Idempotent-Replayed")).To(Equal("true"))
		})
		Expect(w.charged(ctx, "9")).To(BeZero())
		w.pay(ctx, call{id: "k2", body: w.order("9", "10")}, http.StatusCreated, allow)
		Expect(w.charged(ctx, "9")).To(Equal(1))
	})
})
