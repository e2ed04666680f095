// Deduplication: one key, one entry, within the window.

package provider_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func (s *service) keyed(body string, headers ...string) answer {
	s.t.Helper()
	return s.do("POST", "/charges", body, append(headers, provider.HeaderKey, "k")...)
}

func TestAKeyDeduplicatesWithinItsWindow(t *testing.T) {
	at := newClock()
	s := start(t, provider.Options{Now: at.Now, Window: 24 * time.Hour})
	first := s.keyed(order("9"))
	s.Expect(first.header).NotTo(HaveKey(provider.HeaderReplayed))

	at.step(24*time.Hour - 1)
	second := s.keyed(order("9"))
	s.Expect(second.status).To(Equal(http.StatusCreated))
	s.Expect(second.header.Get(provider.HeaderReplayed)).To(Equal("true"))
	s.Expect(second.body).To(Equal(first.body))
	s.Expect(s.count()).To(Equal(1))

	other := s.keyed(order("10"))
	s.Expect(other.status).To(Equal(http.StatusUnprocessableEntity))
	s.Expect(s.do("POST", "/refunds", order("9"), provider.HeaderKey, "k").status).To(Equal(http.StatusUnprocessableEntity))
	s.Expect(s.do("POST", "/charges", order("9"), provider.HeaderKey, "K").header).NotTo(HaveKey(provider.HeaderReplayed))
	s.Expect(s.count()).To(Equal(2))

	at.step(1)
	s.Expect(s.keyed(order("9")).header).NotTo(HaveKey(provider.HeaderReplayed), "the window is over")
	s.Expect(s.count()).To(Equal(3))
	at.step(23 * time.Hour)
	s.Expect(s.keyed(order("9")).header.Get(provider.HeaderReplayed)).To(Equal("true"), "of the newest entry")
	s.Expect(s.count()).To(Equal(3))
}

func TestTheWindowCanBeSet(t *testing.T) {
	s := start(t, provider.Options{})
	s.keyed(order("9"))
	s.keyed(order("9"))
	s.Expect(s.count()).To(Equal(2), "off by default")
	s.Expect(string(s.do("PUT", "/deduplication", `{"window":"24h"}`).body)).To(MatchJSON(`{"window":"24h0m0s"}`))
	s.keyed(order("9"))
	s.Expect(s.count()).To(Equal(2))
	s.do("POST", "/charges", order("9"))
	s.do("POST", "/charges", order("9"))
	s.Expect(s.count()).To(Equal(4), "without a key nothing is deduplicated")
	s.do("PUT", "/deduplication", `{"window":"0s"}`)
	s.keyed(order("9"))
	s.Expect(s.count()).To(Equal(5))
	s.Expect(s.do("PUT", "/deduplication", `{"window":"-1s"}`).status).To(Equal(http.StatusBadRequest))
}

func TestARequestInProgressHoldsItsKey(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour})
	first := make(chan answer, 1)
	go func() { first <- s.keyed(order("9"), provider.HeaderFault, "hold") }()
	s.Eventually(s.Held, soon, often).Should(HaveLen(1))
	s.Expect(s.keyed(order("9")).status).To(Equal(http.StatusConflict))
	s.Expect(s.keyed(order("10")).status).To(Equal(http.StatusUnprocessableEntity))
	s.Release(nil)
	id := (<-first).json(t)["id"]
	s.Expect(s.keyed(order("9")).json(t)["id"]).To(Equal(id))
	s.Expect(s.count()).To(Equal(1))
}

func TestARequestThatWasDroppedFreesItsKey(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour, MaxHang: 10 * time.Millisecond})
	s.Expect(s.keyed(order("9"), provider.HeaderFault, "hold").sendErr).To(HaveOccurred())
	s.Eventually(func() int { return s.keyed(order("9")).status }, soon, often).Should(Equal(http.StatusCreated))
	s.Expect(s.count()).To(Equal(1))
}

func TestFaultsMeetDeduplicatedRequestsToo(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour})
	s.Expect(s.AddFault(provider.Fault{Fault: "error-500-after-commit", Times: 3})).To(Succeed())
	for range 3 {
		s.Expect(s.keyed(order("9")).status).To(Equal(http.StatusInternalServerError))
	}
	s.Expect(s.keyed(order("9"), provider.HeaderFault, "decline-402").status).To(Equal(http.StatusPaymentRequired))
	s.Expect(s.keyed(order("9"), provider.HeaderFault, "reset-after-commit").sendErr).To(HaveOccurred())
	a := s.keyed(order("9"))
	s.Expect(a.status).To(Equal(http.StatusCreated))
	s.Expect(a.header.Get(provider.HeaderReplayed)).To(Equal("true"))
	s.Expect(s.count()).To(Equal(1))

	// A definite refusal is not remembered: nothing was paid under the key.
	s.Expect(s.do("POST", "/charges", order("7"), provider.HeaderKey, "k7", provider.HeaderFault, "decline-402").status).To(Equal(402))
	s.Expect(s.do("POST", "/charges", order("7"), provider.HeaderKey, "k7").status).To(Equal(201))
}

func TestALostAnswerIsReplayedWhileItsClientStillWaits(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour})
	s.leave(order("9"), "lost-answer", provider.HeaderKey, "k")
	s.Eventually(func() int { return s.keyed(order("9")).status }, soon, often).Should(Equal(http.StatusCreated))
	s.Expect(s.count()).To(Equal(1))
}

func TestAnAcceptedPaymentHoldsItsKey(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour})
	first := s.keyed(order("9"), provider.HeaderFault, "accepted-202:3s")
	second := s.keyed(order("9"))
	s.Expect(second.status).To(Equal(http.StatusAccepted))
	s.Expect(second.header.Get(provider.HeaderReplayed)).To(Equal("true"))
	s.Expect(second.body).To(Equal(first.body))
	s.Expect(s.keyed(order("10")).status).To(Equal(http.StatusUnprocessableEntity))
	s.Eventually(func() int { return s.keyed(order("9")).status }, soon, often).Should(Equal(http.StatusCreated))
	s.Expect(s.count()).To(Equal(1))

	never := func(headers ...string) int {
		return s.do("POST", "/charges", order("8"), append(headers, provider.HeaderKey, "never")...).status
	}
	s.Expect(never(provider.HeaderFault, "accepted-202:never")).To(Equal(202))
	s.Expect(never()).To(Equal(202))
	s.Expect(s.Reset()).To(Succeed())
	s.Expect(never()).To(Equal(201))
}

func TestFiftyWithOneKeyAtOnce(t *testing.T) {
	s := start(t, provider.Options{Window: time.Hour})
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if a := s.keyed(order("9")); a.status != http.StatusCreated && a.status != http.StatusConflict {
				t.Errorf("%d %s %v", a.status, a.body, a.sendErr)
			}
		})
	}
	all.Wait()
	l := s.judge()
	s.Expect(l.Count).To(Equal(1))
	s.Expect(l.Requests).To(HaveKeyWithValue("POST /charges", 50))
}
