package provider_test

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/test/provider"
)

func TestTheStatusOfAPayment(t *testing.T) {
	at := newClock()
	s := start(t, provider.Options{Now: at.Now, Visibility: time.Minute})
	const body = `{"accountId":"a1","orderId":"9","amount":"5","idempotencyKey":"k1"}`
	s.Expect(s.do("GET", "/charges/k1", "").status).To(Equal(http.StatusNotFound))
	s.Expect(s.do("POST", "/charges", body).status).To(Equal(http.StatusCreated))
	s.Expect(s.do("GET", "/charges/k1", "").status).To(Equal(http.StatusNotFound), "it is not visible yet")
	at.step(time.Minute)
	var receipt struct{ ID, Status string }
	got := s.do("GET", "/charges/k1", "")
	s.Expect(got.status).To(Equal(http.StatusOK))
	s.Expect(json.Unmarshal(got.body, &receipt)).To(Succeed())
	s.Expect(receipt.ID).NotTo(BeEmpty())
	s.Expect(receipt.Status).NotTo(Equal("processing"))
	s.Expect(s.do("GET", "/charges/"+receipt.ID, "").status).To(Equal(http.StatusOK))
	s.Expect(s.do("GET", "/refunds/k1", "").status).To(Equal(http.StatusNotFound), "it is no refund")
}

func TestTheStatusOfAnAcceptedPayment(t *testing.T) {
	s := start(t, provider.Options{})
	s.Expect(s.AddFault(provider.Fault{Fault: "accepted-202:never"})).To(Succeed())
	s.Expect(s.do("POST", "/charges", `{"accountId":"a1","amount":"5","idempotencyKey":"k1"}`).status).To(Equal(http.StatusAccepted))
	got := s.do("GET", "/charges/k1", "")
	s.Expect(got.status).To(Equal(http.StatusOK))
	s.Expect(string(got.body)).To(ContainSubstring(`"processing"`))
	s.Expect(s.do("DELETE", "/ledger", "").status).To(Equal(http.StatusNoContent))
	s.Expect(s.do("GET", "/charges/k1", "").status).To(Equal(http.StatusNotFound))
}
