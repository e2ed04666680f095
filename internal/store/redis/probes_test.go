package redis_test

// Requests with so many probes, tags, marks or meters that their numbers do not fit in a byte.

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

func TestMoreThanABytes(t *testing.T) {
	const most = 600
	s := newServer(t)
	st := s.open(t)
	if _, err := st.Initialise(background, costID); err != nil {
		t.Fatal(err)
	}
	text := func(kind string, i int) string { return fmt.Sprintf("%s %d", kind, i) }
	// A number on each side of what a byte holds, and the same of tags.
	for _, n := range []int{252, 253, 254, 255, 256, 257, most} {
		key := func(name string) string { return fmt.Sprintf("%s of %d", name, n) }
		had := plain(key("had"), 0)
		for i := range n {
			had.Marks = append(had.Marks, store.Mark{String: key(text("string", i)), Tag: text("tag", i)})
			had.Meters = append(had.Meters, store.MeterEntry{Meter: key(text("meter", i)), Amount: "1"})
		}
		result, err := st.Update(background, had)
		if err != nil || result.Outcome != store.Written {
			t.Fatalf("%d: %+v, %v", n, result, err)
		}
		if sum, err := st.Meter(background, key(text("meter", n-1))); err != nil || sum != "1" {
			t.Errorf("%d: the last meter has %q, %v", n, sum, err)
		}
		probes := make([]store.Probe, n)
		for i := range probes {
			probes[i] = store.Probe{String: key(text("string", i)), Except: text("tag", i)}
		}
		if result, err = st.Reserve(background, store.Reserve{Write: plain(key("excepted"), 0), Probes: probes}); err != nil || result.Outcome != store.Written {
			t.Fatalf("%d: all tags are excepted: %+v, %v", n, result, err)
		}
		for _, spoilt := range []int{0, n / 2, n - 1} {
			// It asks for the string of the probe before it, but excepts its own tag.
			wrong := append([]store.Probe(nil), probes...)
			wrong[spoilt].String = key(text("string", (spoilt+n-1)%n))
			result, err := st.Reserve(background, store.Reserve{Write: plain(key("hit"), 0), Probes: wrong})
			if err != nil || result.Outcome != store.Blocked || len(result.Hits) != 1 || result.Hits[0].Record.Key != had.Key ||
				fmt.Sprint(result.Hits[0].Probes) != fmt.Sprintf("[%d]", spoilt) {
				t.Fatalf("%d: probe %d excepts a tag that is another one's: %+v, %v", n, spoilt, result, err)
			}
			for i, hit := range result.ProbeHits {
				if hit != (i == spoilt) {
					t.Errorf("%d: probe %d hits: %t", n, i, hit)
				}
			}
		}
		// One string, probed for with each tag excepted: all probes hit but one.
		for i := range probes {
			probes[i] = store.Probe{String: key(text("string", 7)), Except: text("tag", i)}
		}
		if result, err = st.Reserve(background, store.Reserve{Write: plain(key("hit"), 0), Probes: probes}); err != nil || result.Outcome != store.Blocked {
			t.Fatalf("%d: one string: %+v, %v", n, result, err)
		}
		for i, hit := range result.ProbeHits {
			if hit != (i != 7) {
				t.Errorf("%d: one string, probe %d hits: %t", n, i, hit)
			}
		}
		// What is renewed to an end that is over is not hit.
		record, _, err := st.Get(background, had.Key)
		if err != nil || record == nil {
			t.Fatalf("%d: %+v, %v", n, record, err)
		}
		renewed := plain(had.Key, record.Version)
		renewed.Marks, renewed.RenewMarks, renewed.Until = nil, true, time.Unix(1e9, 0)
		if result, err = st.Update(background, renewed); err != nil || result.Outcome != store.Written {
			t.Fatalf("%d: %+v, %v", n, result, err)
		}
		if result, err = st.Reserve(background, store.Reserve{Write: plain(key("hit"), 0), Probes: probes}); err != nil || result.Outcome != store.Written {
			t.Fatalf("%d: what is over: %+v, %v", n, result, err)
		}
	}
}
