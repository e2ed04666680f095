// The status of one payment, by its key or its id, as payment services show it: after a
// lag, and before that as if it had never been. What was accepted is processing until it
// is committed and visible.

package provider

import "net/http"

// status answers for one payment: 404 if nothing is visible under this name.
func (p *Provider) status(kind Kind) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		p.note(r, nil)
		name := r.PathValue("name")
		entries, err := p.ledger.all()
		if err != nil {
			p.fail(w, err)
			return
		}
		p.mu.Lock()
		lag := p.visibility
		promised, accepted := p.accepted[name]
		p.mu.Unlock()
		now := p.options.Now()
		for i := len(entries) - 1; i >= 0; i-- {
			e := entries[i]
			if e.Kind == kind && (e.Key == name || e.ID == name) && !now.Before(e.Created.Add(lag)) {
				writeJSON(w, http.StatusOK, receiptOf(e))
				return
			}
		}
		if accepted && promised.Kind == kind {
			receipt := receiptOf(promised)
			receipt.Status = "processing"
			writeJSON(w, http.StatusOK, receipt)
			return
		}
		writeError(w, http.StatusNotFound, "not_found", "no payment is known under this key or id")
	}
}

// promise remembers a payment that was accepted, by its key and its id.
func (p *Provider) promise(e Entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accepted[e.ID] = e
	if e.Key != "" {
		p.accepted[e.Key] = e
	}
}
