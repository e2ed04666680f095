package postgres

// WantLanes lets the store make lanes at once wherever calls meet, for tests.
func WantLanes(s *Store, want bool) {
	l := &s.lanes
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.often = often; want {
		l.often, l.makeAfter = 1, l.makeAfter.AddDate(-1, 0, 0)
	}
}
