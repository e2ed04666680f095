// The ledger file: what survives, and what never counted.

package provider_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func open(t *testing.T, path string, o provider.Options) *service {
	t.Helper()
	p, err := provider.Open(path, o)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return serve(t, p)
}

func TestTheLedgerFileIsReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	s := open(t, path, provider.Options{Window: time.Hour})
	s.keyed(`{"accountId":"a","orderId":"gone","amount":1}`)
	s.Expect(s.Reset()).To(Succeed())
	first := s.keyed(`{"accountId":"a<b","orderId":"9","amount":1.50,"memo":"\u00e9 & <","seats":[1,  "<&>"]}`)
	s.do("POST", "/refunds", order("9"))
	before := s.judge()
	_, err := provider.Open(path, provider.Options{})
	s.Expect(err).To(MatchError(ContainSubstring("another provider")))
	s.Expect(s.Shutdown(t.Context())).To(Succeed())
	s.Expect(s.judge().Entries).To(Equal(before.Entries), "also after the end")

	s = open(t, path, provider.Options{Window: time.Hour})
	after := s.judge()
	s.Expect(after.Entries).To(Equal(before.Entries))
	s.Expect(after.Totals).To(Equal(before.Totals))
	again := s.keyed(`{"accountId":"a<b","orderId":"9","amount":1.50,"memo":"\u00e9 & <","seats":[1,  "<&>"]}`)
	s.Expect(again.body).To(Equal(first.body), "a key deduplicates across a restart")
	s.Expect(s.count()).To(Equal(2))
}

func TestAnUnfinishedLineNeverCounted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	s := open(t, path, provider.Options{})
	s.keyed(order("8"))
	s.keyed(`{"accountId":"a","amount":1,"memo":"` + strings.Repeat("longer than the next line", 20) + `"}`)
	s.Expect(s.Close()).To(Succeed())
	text, err := os.ReadFile(path)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(os.WriteFile(path, text[:len(text)-1], 0o600)).To(Succeed())

	s = open(t, path, provider.Options{})
	s.Expect(s.count()).To(Equal(1))
	s.Expect(os.ReadFile(path)).To(WithTransform(func(b []byte) string { return string(b) }, HaveSuffix("\n")), "cut off")
	s.keyed(order("10"))
	s.Expect(s.Close()).To(Succeed())
	s = open(t, path, provider.Options{})
	s.Expect(s.count()).To(Equal(2))
	s.Expect(s.judge().Entries[1].OrderID).To(Equal("10"))
}

func TestAFileThatIsNoLedgerIsRefused(t *testing.T) {
	g := NewWithT(t)
	path := filepath.Join(t.TempDir(), "ledger")
	for _, text := range []string{"hello\n", "{}\n", `{"entry":{"id":"x"},"reset":"2026-01-01T00:00:00Z"}` + "\n", `{"enter":{}}` + "\n"} {
		g.Expect(os.WriteFile(path, []byte(text), 0o600)).To(Succeed())
		_, err := provider.Open(path, provider.Options{})
		g.Expect(err).To(MatchError(ContainSubstring("line 1")), text)
		g.Expect(os.ReadFile(path)).To(BeEquivalentTo(text), "left as it was")
	}
	_, err := provider.Open(filepath.Join(path, "below"), provider.Options{})
	g.Expect(err).To(HaveOccurred())
}

func TestAfterTheEndNothingIsCommitted(t *testing.T) {
	s := start(t, provider.Options{AcceptedDelay: time.Minute})
	s.do("POST", "/charges", order("9"), provider.HeaderFault, "accepted-202")
	goAway := s.leave(order("9"), "delay:1h")
	s.Eventually(s.Received, soon, often).Should(HaveLen(2))
	s.Expect(s.Close()).To(Succeed())
	s.Expect(goAway()).To(HaveOccurred())
	s.Expect(s.count()).To(BeZero())
	s.Expect(s.Reset()).NotTo(Succeed())
}
