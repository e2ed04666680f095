package storetest

// One case for each rule of the contract.

import (
	"bytes"
	"context"
	"fmt"
	"math/big"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var rules = []testCase{
	// Identity.
	{"the identity is set once", identitySetOnce},
	{"another epoch is memory lost and writes nothing", anotherEpoch},
	{"the identity survives a restart", identitySurvives},
	{"the standing tells the highest version ever given, and the time", standing},
	{"a store is disowned by who names its epoch, and keeps its records", disown},

	// Versions, nonces, records.
	{"a record is kept as it was written", recordIsKept},
	{"a record is replaced whole", recordIsReplaced},
	{"an unexpected version is a mismatch with the record and its body", mismatch},
	{"a version is never used twice, not even after a delete and a restart", versionsNeverRepeat},
	{"a repeated write is answered as written and changes nothing", repeatedWrite},
	{"a repeated write is recognised after a restart", repeatedAfterRestart},
	{"a nonce is recognised on its own record only", nonceOfAnotherRecord},
	{"a repeated delete finds the record absent", repeatedDelete},
	{"what is returned belongs to the caller", noSharedMemory},
	{"times are kept in whole milliseconds", timeRounding},

	// Marks and probes.
	{"a probe hits the marks of others with its string", probeHits},
	{"strings are any bytes and compared whole", anyBytes},
	{"a record's own marks are not hit", ownMarks},
	{"a mark with the excepted tag is not hit", exceptTag},
	{"a tag is excepted where it is that of many marks, and of many excepted tags none is mistaken", exceptOfMany},
	{"a record is hit if one of its marks is, whatever the others", oneOfSeveralMarks},
	{"a mark is hit until its end", markUntil},
	{"of two equal marks the later end counts", equalMarks},
	{"marks are replaced by every write that does not keep them", marksReplaced},
	{"KeepMarks keeps marks and their stamps", keepMarks},
	{"RenewMarks keeps strings and tags, and sets the end of all", renewMarks},
	{"RenewMarks gives back an end that was kept, over or is never", renewEnds},
	{"RenewMarks is refused as any write is, and then changes no mark", renewRefused},
	{"a delete takes the marks away", deleteMarks},
	{"a blocked Reserve writes nothing", blockedWritesNothing},
	{"hits come in order: first, unsettled, newest", hitOrder},
	{"of more than 64 hits the most telling are returned and all are counted", hitBound},
	{"ten thousand hits are counted in bounded memory", tenThousandHits},

	// Watermarks.
	{"a watermark covers what its Reserve could see, and nothing later", watermarkCovers},
	{"a mark that is stamped anew is no longer covered", restamped},
	{"a mark that is renewed is no longer covered", renewedStamps},
	{"several watermarks add up", watermarksAddUp},
	{"a watermark holds after a restart", watermarkAfterRestart},

	// Meters.
	{"meters are exact", metersExact},
	{"an entry is set, not added, and the others are left", entriesAreSet},
	{"only a raise above the limit is refused", onlyRaises},
	{"a write over the limit writes nothing", overLimitWritesNothing},
	{"the first full meter is named", firstFullMeter},
	{"a delete returns what the record counted for", deleteMeters},

	// The order of checks.
	{"version, then probes, then meters are checked", checkOrder},

	// Lists.
	{"due records are listed earliest first, up to a time", listDue},
	{"held records are listed by key", listHeld},
	{"a list follows every change of a record", listsFollow},
	{"pages are full, and a record that stays comes once", pagesWhileChanging},

	// Refusals.
	{"a request that breaks the contract is invalid and writes nothing", invalidRequests},
	{"a caller that has left is answered unavailable", callerLeft},
	{"after Close everything is unavailable", afterClose},
}

func identitySetOnce(f *fixture) {
	ctx, cancel := f.ctx()
	defer cancel()
	have, err := f.s.Initialise(ctx, store.Identity{Epoch: "another", KeyDomain: "another"})
	if err != nil || have != identity {
		f.Errorf("a second Initialise: %v, %v", have, err)
	}
	if have, err := f.s.Standing(ctx); err != nil || have.Identity != identity {
		f.Errorf("Standing: %+v, %v", have, err)
	}
}

func anotherEpoch(f *fixture) {
	ctx, cancel := f.ctx()
	defer cancel()
	version := f.put(f.write("k", 0))
	for _, expected := range []uint64{0, version} {
		w := f.write("k", expected)
		w.Epoch = "epoch-2"
		_, err := f.s.Update(ctx, w)
		f.fails(err, store.ErrMemoryLost, "Update under another epoch")
		_, err = f.s.Reserve(ctx, store.Reserve{Write: w})
		f.fails(err, store.ErrMemoryLost, "Reserve under another epoch")
		w.RenewMarks = true
		_, err = f.s.Update(ctx, w)
		f.fails(err, store.ErrMemoryLost, "RenewMarks under another epoch")
	}
	// Nor is a write recognised there.
	r := f.mustGet("k")
	w := f.write("k", 0)
	w.Epoch, w.Nonce = "epoch-2", r.Nonce
	_, err := f.s.Update(ctx, w)
	f.fails(err, store.ErrMemoryLost, "repeated Update under another epoch")
	if have := f.mustGet("k"); have.Version != version {
		f.Errorf("the record was written: version %d, was %d", have.Version, version)
	}
}

func identitySurvives(f *fixture) {
	f.restart()
	ctx, cancel := f.ctx()
	defer cancel()
	if have, err := f.s.Standing(ctx); err != nil || have.Identity != identity {
		f.Errorf("Standing: %+v, %v", have, err)
	}
	if have, err := f.s.Initialise(ctx, store.Identity{Epoch: "another", KeyDomain: "another"}); err != nil || have != identity {
		f.Errorf("Initialise: %v, %v", have, err)
	}
}

func (f *fixture) standing(s store.Store) store.Standing {
	f.Helper()
	ctx, cancel := f.ctx()
	defer cancel()
	have, err := s.Standing(ctx)
	if err != nil {
		f.Fatalf("Standing: %v", err)
	}
	return have
}

func standing(f *fixture) {
	is := func(when string, highest uint64) {
		f.Helper()
		before := f.now()
		have := f.standing(f.s)
		after := f.now()
		if have.Identity != identity || have.Sequence != highest {
			f.Errorf("%s: %+v, want %+v and sequence %d", when, have, identity, highest)
		}
		if have.Now.Before(before) || have.Now.After(after) {
			f.Errorf("%s: at %s, it is between %s and %s", when, have.Now, before, after)
		}
	}
	is("before the first write", 0)
	first := f.put(f.write("a", 0))
	is("after a write", first)
	second := f.put(f.write("b", 0))
	is("after a second one", second)
	if first >= second {
		f.Errorf("versions %d and %d", first, second)
	}
	f.outcome(f.update(f.write("a", second)), store.Mismatch)
	is("after a mismatch", second)
	f.remove("b", second)
	if after := f.standing(f.s).Sequence; after < second {
		f.Errorf("after a delete: sequence %d, was %d", after, second)
	}
	last := f.put(f.write("b", 0))
	is("after the next write", last)
	f.restart()
	// A crash may leave numbers out.
	after := f.standing(f.s).Sequence
	if after < last {
		f.Errorf("after a restart: sequence %d, was %d", after, last)
	}
	if next := f.put(f.write("c", 0)); next <= after {
		f.Errorf("version %d after a restart, the sequence was %d", next, after)
	}
}

func disown(f *fixture) {
	ctx, cancel := f.ctx()
	defer cancel()
	version := f.put(f.write("k", 0))
	other := f.h.Connect(f)
	must := func(epoch, next string) {
		f.Helper()
		if err := f.s.Disown(ctx, epoch, next); err != nil {
			f.Fatalf("Disown %q: %v", epoch, err)
		}
	}
	is := func(when string, s store.Store, epoch string) {
		f.Helper()
		have := f.standing(s)
		if have.Identity != (store.Identity{Epoch: epoch, KeyDomain: identity.KeyDomain}) || have.Sequence < version {
			f.Errorf("%s: %+v, want epoch %q and sequence %d at least", when, have, epoch, version)
		}
	}
	must("epoch-2", "epoch-3")
	is("disowned under another epoch", other, identity.Epoch)
	must(identity.Epoch, "epoch-2")
	is("disowned", other, "epoch-2")
	must(identity.Epoch, "epoch-4")
	is("disowned by another one", other, "epoch-2")
	for _, s := range []store.Store{f.s, other} {
		_, err := s.Update(ctx, f.write("k", version))
		f.fails(err, store.ErrMemoryLost, "Update of a store that was disowned")
		w := f.write("k", version)
		w.RenewMarks = true
		_, err = s.Update(ctx, w)
		f.fails(err, store.ErrMemoryLost, "RenewMarks in a store that was disowned")
		_, err = s.Reserve(ctx, store.Reserve{Write: f.write("new", 0)})
		f.fails(err, store.ErrMemoryLost, "Reserve in a store that was disowned")
	}
	if r := f.mustGet("k"); r.Version != version {
		f.Errorf("the record has version %d, had %d", r.Version, version)
	}
	f.restart()
	is("after a restart", f.s, "epoch-2")
	w := f.write("k", version)
	w.Epoch = "epoch-2"
	if next := f.put(w); next <= version {
		f.Errorf("version %d after the epoch changed, %d before", next, version)
	}
	for _, e := range [][2]string{{"", "next"}, {"epoch-2", ""}, {"epoch-2", "epoch-2"}, {strings.Repeat("e", store.MaxString+1), "next"}, {"epoch-2", strings.Repeat("e", store.MaxString+1)}} {
		f.fails(f.s.Disown(ctx, e[0], e[1]), store.ErrInvalid, "Disown of or by an epoch that is none")
	}
	is("after what was invalid", f.s, "epoch-2")
}

func recordIsKept(f *fixture) {
	w := f.write("k", 0)
	w.Record = &store.Record{
		Key: "ignored", Version: 99, Nonce: "ignored", At: time.Unix(1, 0),
		Due: f.now().Add(time.Hour).Truncate(time.Millisecond), Held: true, Unsettled: true,
		Header: []byte{0, 1, 255}, Body: bytes.Repeat([]byte{0, 200}, 300_000),
	}
	result := f.update(w)
	f.outcome(result, store.Written)
	want := *w.Record
	want.Key, want.Version, want.Nonce, want.At = "k", result.Version, w.Nonce, result.Now
	for range 2 {
		if err := sameRecord(&want, f.mustGet("k")); err != nil {
			f.Error(err)
		}
		f.restart()
	}
	if w.Record.Key != "ignored" || w.Record.Version != 99 {
		f.Error("the caller's record was changed")
	}
	if r, now := f.get("absent"); r != nil || now.IsZero() {
		f.Errorf("an absent record: %v at %v", r, now)
	}
}

func recordIsReplaced(f *fixture) {
	w := f.write("k", 0)
	w.Record.Held, w.Record.Unsettled, w.Record.Due = true, true, f.now()
	version := f.put(w)
	w = f.write("k", version)
	w.Record = &store.Record{}
	f.put(w)
	r := f.mustGet("k")
	if r.Held || r.Unsettled || !r.Due.IsZero() || len(r.Header) > 0 || len(r.Body) > 0 {
		f.Errorf("something of the earlier record is left: %+v", r)
	}
}

func mismatch(f *fixture) {
	for _, expected := range []uint64{1, 1 << 40} {
		result := f.update(f.write("k", expected))
		f.outcome(result, store.Mismatch)
		if result.Record != nil || result.Now.IsZero() {
			f.Errorf("on an absent record: %+v", result)
		}
	}
	version := f.put(f.write("k", 0))
	want := f.mustGet("k")
	for _, expected := range []uint64{0, version - 1, version + 1} {
		w := f.write("k", expected)
		for name, result := range map[string]store.Result{
			"Update":  f.update(w),
			"Reserve": f.reserve(store.Reserve{Write: w}),
		} {
			f.outcome(result, store.Mismatch)
			if err := sameRecord(want, result.Record); err != nil {
				f.Errorf("%s expecting %d: %v", name, expected, err)
			}
		}
		if expected != 0 {
			w.Record = nil
			f.outcome(f.update(w), store.Mismatch)
		}
	}
	if err := sameRecord(want, f.mustGet("k")); err != nil {
		f.Errorf("after mismatches: %v", err)
	}
	f.put(f.write("k", version))
}

func versionsNeverRepeat(f *fixture) {
	var last uint64
	rises := func(version uint64) {
		f.Helper()
		if version <= last {
			f.Fatalf("version %d after %d", version, last)
		}
		last = version
	}
	for range 3 {
		for _, key := range []string{"a", "b"} {
			version := f.put(f.write(key, 0))
			rises(version)
			version = f.put(f.write(key, version))
			rises(version)
			f.remove(key, version)
		}
		if r, _ := f.get("a"); r != nil {
			f.Fatalf("a deleted record is there: %+v", r)
		}
		f.restart()
	}
}

func repeatedWrite(f *fixture) {
	r := store.Reserve{Write: f.write("k", 0), Probes: []store.Probe{{String: "m"}}}
	r.Marks = []store.Mark{{String: "n"}}
	r.Meters = []store.MeterEntry{{Meter: "sum", Amount: "2", Limit: "3"}}
	first := f.reserve(r)
	f.outcome(first, store.Written)
	want := f.mustGet("k")
	// By now its probe would be hit and its meter full; the write stands all the same.
	blocker := f.write("other", 0)
	blocker.Marks = []store.Mark{{String: "m"}}
	blocker.Meters = []store.MeterEntry{{Meter: "sum", Amount: "5"}}
	f.put(blocker)
	watermark := f.probe(nil, store.Probe{String: "n"}).Watermark
	r.Record.Body = []byte("the repetition carries the same nonce; its content is not looked at")
	for _, result := range []store.Result{f.reserve(r), f.update(r.Write)} {
		f.outcome(result, store.Written)
		if result.Version != first.Version {
			f.Errorf("repeated write has version %d, the first one %d", result.Version, first.Version)
		}
	}
	if err := sameRecord(want, f.mustGet("k")); err != nil {
		f.Errorf("after repetition: %v", err)
	}
	f.hits(f.probe([]store.Watermark{watermark}, store.Probe{String: "n"}))
	f.sum("sum", "7")
}

func repeatedAfterRestart(f *fixture) {
	w := f.write("k", 0)
	version := f.put(w)
	f.restart()
	result := f.update(w)
	f.outcome(result, store.Written)
	if result.Version != version {
		f.Errorf("version %d, was %d", result.Version, version)
	}
}

func nonceOfAnotherRecord(f *fixture) {
	w := f.write("a", 0)
	f.put(w)
	w.Key = "b"
	f.put(w)
	f.mustGet("b")
	// Once another write has come in between, the earlier nonce is not the record's any more.
	a := f.mustGet("a")
	f.put(f.write("a", a.Version))
	w.Key = "a"
	f.outcome(f.update(w), store.Mismatch)
}

func repeatedDelete(f *fixture) {
	version := f.put(f.write("k", 0))
	w := store.Write{Epoch: identity.Epoch, Key: "k", Expected: version, Nonce: f.nonce()}
	result := f.update(w)
	f.outcome(result, store.Written)
	if result.Version != 0 {
		f.Errorf("a delete has version %d", result.Version)
	}
	result = f.update(w)
	f.outcome(result, store.Mismatch)
	if result.Record != nil {
		f.Errorf("a deleted record is there: %+v", result.Record)
	}
}

func noSharedMemory(f *fixture) {
	w := f.write("k", 0)
	header, body := []byte("header"), []byte("body")
	w.Record.Header, w.Record.Body, w.Record.Held = header, body, true
	w.Marks = []store.Mark{{String: "m"}}
	f.put(w)
	copy(header, "xxxxxx")
	copy(body, "xxxx")
	spoil := func(r *store.Record) {
		copy(r.Header, "yyyyyy")
		copy(r.Body, "yyyy")
	}
	spoil(f.mustGet("k"))
	spoil(&f.list(store.List{What: store.ListHeld})[0])
	spoil(&f.probe(nil, store.Probe{String: "m"}).Hits[0].Record)
	spoil(f.update(f.write("k", 0)).Record)
	if r := f.mustGet("k"); string(r.Header) != "header" || string(r.Body) != "body" {
		f.Errorf("somebody else's write came through: %q %q", r.Header, r.Body)
	}
}

func timeRounding(f *fixture) {
	base := f.now().Truncate(time.Second).Add(time.Hour)
	version := uint64(0)
	for _, c := range []struct{ given, kept time.Duration }{
		{0, 0},
		{time.Nanosecond, 0},
		{time.Millisecond - 1, 0},
		{time.Millisecond, time.Millisecond},
		{1999*time.Microsecond + 999, time.Millisecond},
	} {
		w := f.write("k", version)
		w.Record.Due = base.Add(c.given).In(time.FixedZone("elsewhere", 3600))
		version = f.put(w)
		r := f.mustGet("k")
		if want := base.Add(c.kept); !r.Due.Equal(want) {
			f.Errorf("due %s is kept as %s, want %s", base.Add(c.given), r.Due, want)
		}
		if !r.At.Equal(r.At.Truncate(time.Microsecond)) {
			f.Errorf("written at %s", r.At)
		}
	}
}

func probeHits(f *fixture) {
	f.mark("a", store.Mark{String: "m"}, store.Mark{String: "n"})
	f.mark("b", store.Mark{String: "n"})
	f.mark("c", store.Mark{String: "o"})
	result := f.probe(nil, store.Probe{String: "n"}, store.Probe{String: "absent"}, store.Probe{String: "m"}, store.Probe{String: "n"})
	f.hits(result, "b", "a")
	if !slices.Equal(result.ProbeHits, []bool{true, false, true, true}) {
		f.Errorf("ProbeHits %v", result.ProbeHits)
	}
	if !slices.Equal(result.Hits[0].Probes, []int{0, 3}) || !slices.Equal(result.Hits[1].Probes, []int{0, 2, 3}) {
		f.Errorf("Probes %v and %v", result.Hits[0].Probes, result.Hits[1].Probes)
	}
	hit := result.Hits[0].Record
	if string(hit.Header) != "header of b" || hit.Body != nil || hit.Version == 0 || hit.Nonce == "" || hit.At.IsZero() {
		f.Errorf("the hit carries %+v", hit)
	}
	f.hits(f.probe(nil, store.Probe{String: "absent"}))
	f.hits(f.probe(nil))
}

func anyBytes(f *fixture) {
	strange := []string{
		"\x00", "\x00\x00", "a", "a\x00", "a\x00b", "ab", "A", "\xff", "\xff\xff", "a%", "a_", "a*", "{a}", "é", "e\u0301",
		"'; --", strings.Repeat("a", store.MaxString), strings.Repeat("a", store.MaxString-1), "a\x00\x00\x00\x00\x00\x00\x00\x01",
	}
	for i, s := range strange {
		w := f.write(s, 0)
		w.Nonce = s
		w.Record.Held = true
		w.Marks = []store.Mark{{String: s, Tag: s}}
		w.Meters = []store.MeterEntry{{Meter: s, Amount: fmt.Sprint(i + 1)}}
		f.put(w)
	}
	f.restart()
	for i, s := range strange {
		if r := f.mustGet(s); r.Nonce != s || r.Key != s {
			f.Errorf("%q came back as key %q, nonce %q", s, r.Key, r.Nonce)
		}
		f.hits(f.probe(nil, store.Probe{String: s}), s)
		f.hits(f.probe(nil, store.Probe{String: s, Except: s}))
		f.sum(s, fmt.Sprint(i+1))
	}
	slices.Sort(strange)
	if have := recordKeys(f.list(store.List{What: store.ListHeld, Limit: 2})); !slices.Equal(have, strange) {
		f.Errorf("held: %q, want %q", have, strange)
	}
	for _, s := range strange {
		f.remove(s, f.mustGet(s).Version)
		f.hits(f.probe(nil, store.Probe{String: s}))
		f.sum(s, "0")
	}
}

func ownMarks(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"})
	r := store.Reserve{Write: f.write("a", version), Probes: []store.Probe{{String: "m"}}}
	r.Marks = []store.Mark{{String: "m"}}
	result := f.reserve(r)
	f.outcome(result, store.Written)
	f.mark("b", store.Mark{String: "m"})
	r.Write = f.write("a", result.Version)
	result = f.reserve(r)
	f.hits(result, "b")
}

func exceptOfMany(f *fixture) {
	const many = 70
	for i := range many {
		f.mark(fmt.Sprint("one of many ", i), store.Mark{String: "m", Tag: "x"})
	}
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "x"}))
	for _, other := range []string{"", "y"} {
		result := f.probe(nil, store.Probe{String: "m", Except: other})
		f.outcome(result, store.Blocked)
		if result.HitCount != many {
			f.Errorf("%d marks are hit by a probe except %q, want %d", result.HitCount, other, many)
		}
	}
	probes := make([]store.Probe, 300)
	for i := range probes {
		probes[i] = store.Probe{String: fmt.Sprint("s ", i), Except: fmt.Sprint("tag ", i)}
	}
	for _, i := range []int{0, 1, 251, 252, 253, 254, 255, 256, 299} {
		for tag, hit := range map[string]bool{probes[i].Except: false, probes[(i+1)%len(probes)].Except: true} {
			key := fmt.Sprint("marked ", i, tag)
			version := f.mark(key, store.Mark{String: probes[i].String, Tag: tag})
			result := f.probe(nil, probes...)
			if !hit {
				f.hits(result)
			} else if f.hits(result, key); !slices.Equal(result.Hits[0].Probes, []int{i}) {
				f.Errorf("hit by the probes %v, want %d", result.Hits[0].Probes, i)
			}
			f.remove(key, version)
		}
	}
}

func exceptTag(f *fixture) {
	f.mark("a", store.Mark{String: "m", Tag: "x"})
	f.mark("b", store.Mark{String: "m", Tag: "y"})
	f.mark("c", store.Mark{String: "m"})
	f.hits(f.probe(nil, store.Probe{String: "m"}), "c", "b", "a")
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "x"}), "c", "b")
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "y"}), "c", "a")
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "z"}), "c", "b", "a")
	result := f.probe(nil, store.Probe{String: "m", Except: "x"}, store.Probe{String: "m", Except: "y"})
	f.hits(result, "c", "b", "a")
	if !slices.Equal(result.Hits[1].Probes, []int{0}) || !slices.Equal(result.Hits[2].Probes, []int{1}) {
		f.Errorf("Probes %+v", result.Hits)
	}
}

func oneOfSeveralMarks(f *fixture) {
	f.mark("a", store.Mark{String: "m", Tag: "x"}, store.Mark{String: "m", Tag: "y"})
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "x"}), "a")
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "y"}), "a")
	result := f.probe(nil, store.Probe{String: "m"})
	f.hits(result, "a")
	if !slices.Equal(result.Hits[0].Probes, []int{0}) {
		f.Errorf("Probes %v", result.Hits[0].Probes)
	}
}

func markUntil(f *fixture) {
	now := f.now()
	soon := now.Add(400 * time.Millisecond).Truncate(time.Millisecond)
	f.mark("over", store.Mark{String: "m", Until: now.Add(-time.Second)})
	f.mark("soon", store.Mark{String: "m", Until: soon})
	f.mark("later", store.Mark{String: "m", Until: now.Add(24 * time.Hour)})
	f.mark("never", store.Mark{String: "m"})
	// A slow store may answer only after that; its answer says so.
	if result := f.probe(nil, store.Probe{String: "m"}); result.Now.Before(soon) {
		f.hits(result, "never", "later", "soon")
	}
	if f.h.Advance != nil {
		f.reach(soon.Add(-time.Microsecond))
		f.hits(f.probe(nil, store.Probe{String: "m"}), "never", "later", "soon")
	}
	f.reach(soon)
	f.hits(f.probe(nil, store.Probe{String: "m"}), "never", "later")
	if f.h.Advance != nil {
		end := f.now().Truncate(time.Millisecond).Add(time.Second)
		f.mark("rounded", store.Mark{String: "r", Until: end.Add(time.Nanosecond)})
		f.reach(end.Add(time.Millisecond - time.Microsecond))
		f.hits(f.probe(nil, store.Probe{String: "r"}), "rounded")
		f.reach(end.Add(time.Millisecond))
		f.hits(f.probe(nil, store.Probe{String: "r"}))
	}
}

func equalMarks(f *fixture) {
	now := f.now()
	past, future := now.Add(-time.Hour), now.Add(time.Hour)
	for key, untils := range map[string][2]time.Time{
		"past and future": {past, future}, "future and past": {future, past},
		"past and never": {past, {}}, "never and past": {{}, past},
	} {
		f.mark(key, store.Mark{String: key, Until: untils[0]}, store.Mark{String: key, Until: untils[1]})
		f.hits(f.probe(nil, store.Probe{String: key}), key)
	}
}

func marksReplaced(f *fixture) {
	version := f.mark("a", store.Mark{String: "m", Tag: "x"}, store.Mark{String: "n"})
	w := f.write("a", version)
	w.Marks = []store.Mark{{String: "n"}, {String: "m", Tag: "y"}, {String: "o"}}
	version = f.put(w)
	f.hits(f.probe(nil, store.Probe{String: "m", Except: "y"}))
	for _, s := range []string{"m", "n", "o"} {
		f.hits(f.probe(nil, store.Probe{String: s}), "a")
	}
	f.put(f.write("a", version))
	for _, s := range []string{"m", "n", "o"} {
		f.hits(f.probe(nil, store.Probe{String: s}))
	}
}

func keepMarks(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"})
	watermark := f.probe(nil, store.Probe{String: "m"}).Watermark
	w := f.write("a", version)
	w.KeepMarks = true
	w.Record.Unsettled = true
	w.Record.Header = []byte("new")
	version = f.put(w)
	result := f.probe(nil, store.Probe{String: "m"})
	f.hits(result, "a")
	if hit := result.Hits[0].Record; !hit.Unsettled || string(hit.Header) != "new" || hit.Version != version {
		f.Errorf("the hit carries the record as it was: %+v", hit)
	}
	f.hits(f.probe([]store.Watermark{watermark}, store.Probe{String: "m"}))
	// A new record has none to keep.
	w = f.write("b", 0)
	w.KeepMarks = true
	f.put(w)
	f.hits(f.probe(nil, store.Probe{String: "m"}), "a")
}

func renewMarks(f *fixture) {
	version := f.mark("a", store.Mark{String: "m", Tag: "x"}, store.Mark{String: "m"}, store.Mark{String: "n", Tag: "y"})
	f.mark("other", store.Mark{String: "n"})
	w := f.write("a", version)
	w.RenewMarks, w.Until = true, f.now().Add(time.Hour)
	w.Record.Unsettled, w.Record.Held, w.Record.Due, w.Record.Header = true, true, f.now(), []byte("new")
	version = f.put(w)
	result := f.probe(nil, store.Probe{String: "m", Except: "x"})
	f.hits(result, "a")
	if hit := result.Hits[0].Record; !hit.Unsettled || !hit.Held || string(hit.Header) != "new" || hit.Version != version {
		f.Errorf("the hit carries the record as it was: %+v", hit)
	}
	f.hits(f.probe(nil, store.Probe{String: "n"}), "a", "other")
	f.hits(f.probe(nil, store.Probe{String: "n", Except: "y"}), "other")
	if f.h.Advance != nil {
		// The end is rounded as any mark's.
		end := f.now().Truncate(time.Millisecond).Add(time.Second)
		w = f.write("a", version)
		w.RenewMarks, w.Until = true, end.Add(time.Nanosecond)
		version = f.put(w)
		f.reach(end.Add(time.Millisecond - time.Microsecond))
		f.hits(f.probe(nil, store.Probe{String: "m"}, store.Probe{String: "n"}), "a", "other")
		f.reach(end.Add(time.Millisecond))
		f.hits(f.probe(nil, store.Probe{String: "m"}))
		f.hits(f.probe(nil, store.Probe{String: "n"}), "other")
	}
	w = f.write("a", version)
	w.RenewMarks, w.Until = true, f.now()
	version = f.put(w)
	f.reach(w.Until.Add(time.Millisecond))
	f.hits(f.probe(nil, store.Probe{String: "m"}))
	f.hits(f.probe(nil, store.Probe{String: "n"}), "other")
	// What is over comes back, and goes on without an end.
	w = f.write("a", version)
	w.RenewMarks = true
	version = f.put(w)
	f.hits(f.probe(nil, store.Probe{String: "m"}), "a")
	f.hits(f.probe(nil, store.Probe{String: "n"}), "a", "other")
	f.remove("a", version)
	f.hits(f.probe(nil, store.Probe{String: "m"}))
	// A record without marks has none to renew, nor has a new one.
	for key, version := range map[string]uint64{"bare": f.mark("bare"), "new": 0} {
		w = f.write(key, version)
		w.RenewMarks, w.Until = true, f.now().Add(time.Hour)
		f.put(w)
	}
	f.hits(f.probe(nil, store.Probe{String: "m"}, store.Probe{String: "n"}), "other")
}

func renewEnds(f *fixture) {
	now := f.now()
	past, future := now.Add(-time.Hour), now.Add(time.Hour)
	for name, untils := range map[string][2]time.Time{
		"one end": {future, future}, "two ends": {past, future}, "over": {past, past}, "never": {}, "never and an end": {{}, past},
	} {
		for _, kept := range []bool{false, true} {
			s := fmt.Sprintf("%s, kept %t", name, kept)
			version := f.mark(s, store.Mark{String: s, Until: untils[0]}, store.Mark{String: s, Tag: "x", Until: untils[1]})
			if kept {
				w := f.write(s, version)
				w.KeepMarks = true
				version = f.put(w)
			}
			for _, until := range []time.Time{past, future, past, {}, past} {
				w := f.write(s, version)
				w.RenewMarks, w.Until = true, until
				version = f.put(w)
				for _, except := range []string{"x", "y"} {
					result := f.probe(nil, store.Probe{String: s, Except: except})
					if until.Equal(past) {
						f.hits(result)
					} else {
						f.hits(result, s)
					}
				}
			}
		}
	}
}

func renewRefused(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"})
	f.count("b", store.MeterEntry{Meter: "full", Amount: "1"})
	covered := []store.Watermark{f.probe(nil, store.Probe{String: "m"}).Watermark}
	w := f.write("a", version+1)
	w.RenewMarks, w.Until = true, f.now().Add(-time.Hour)
	f.outcome(f.update(w), store.Mismatch)
	w.Expected, w.Meters = version, []store.MeterEntry{{Meter: "full", Amount: "1", Limit: "1"}}
	f.outcome(f.update(w), store.OverLimit)
	f.hits(f.probe(nil, store.Probe{String: "m"}), "a")
	f.hits(f.probe(covered, store.Probe{String: "m"}))
	// With an entry that fits it is written, and once only.
	w.Meters[0].Limit = "2"
	version = f.put(w)
	f.sum("full", "2")
	f.hits(f.probe(nil, store.Probe{String: "m"}))
	if again := f.put(w); again != version {
		f.Errorf("the same write again has version %d, the first had %d", again, version)
	}
	w.Meters, w.Expected, w.Nonce, w.Until = nil, version, f.nonce(), f.now().Add(time.Hour)
	version = f.put(w)
	covered = append(covered, f.probe(nil, store.Probe{String: "m"}).Watermark)
	if again := f.put(w); again != version {
		f.Errorf("the same write again has version %d, the first had %d", again, version)
	}
	f.hits(f.probe(covered, store.Probe{String: "m"}))
}

func deleteMarks(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"}, store.Mark{String: "n", Tag: "x"})
	f.remove("a", version)
	f.hits(f.probe(nil, store.Probe{String: "m"}, store.Probe{String: "n"}))
	// They do not come back with a record of the same key.
	f.put(f.write("a", 0))
	f.hits(f.probe(nil, store.Probe{String: "m"}, store.Probe{String: "n"}))
}

func blockedWritesNothing(f *fixture) {
	f.mark("a", store.Mark{String: "m"})
	version := f.mark("b", store.Mark{String: "old"})
	want := f.mustGet("b")
	r := store.Reserve{Write: f.write("b", version), Probes: []store.Probe{{String: "m"}}}
	r.Record.Held, r.Record.Due = true, f.now()
	r.Marks = []store.Mark{{String: "new"}}
	r.Meters = []store.MeterEntry{{Meter: "sum", Amount: "1"}}
	f.hits(f.reserve(r), "a")
	r.Key, r.Expected = "absent", 0
	f.hits(f.reserve(r), "a")
	if err := sameRecord(want, f.mustGet("b")); err != nil {
		f.Error(err)
	}
	if have, _ := f.get("absent"); have != nil {
		f.Errorf("written: %+v", have)
	}
	f.hits(f.probe(nil, store.Probe{String: "old"}), "b")
	f.hits(f.probe(nil, store.Probe{String: "new"}))
	f.sum("sum", "0")
	f.nothingListed()
}

func (f *fixture) nothingListed() {
	f.Helper()
	for _, l := range []store.List{{What: store.ListHeld}, {What: store.ListDue, Before: f.now().Add(240 * time.Hour)}} {
		if have := f.list(l); len(have) > 0 {
			f.Errorf("%s: %q", l.What, recordKeys(have))
		}
	}
}

func hitOrder(f *fixture) {
	put := func(key string, unsettled bool, strings ...string) uint64 {
		w := f.write(key, 0)
		w.Record.Unsettled = unsettled
		for _, s := range strings {
			w.Marks = append(w.Marks, store.Mark{String: s})
		}
		return f.put(w)
	}
	put("first, settled", false, "exact")
	put("first, unsettled", true, "exact", "scope")
	put("unsettled 1", true, "scope")
	rewritten := put("settled, written again", false, "scope")
	put("settled 1", false, "scope")
	put("unsettled 2", true, "scope")
	put("settled 2", false, "scope")
	w := f.write("settled, written again", rewritten)
	w.KeepMarks = true
	f.put(w)
	f.hits(f.probe(nil, store.Probe{String: "scope"}, store.Probe{String: "exact", First: true}),
		"first, unsettled", "first, settled", "unsettled 2", "unsettled 1", "settled, written again", "settled 2", "settled 1")
}

func hitBound(f *fixture) {
	const n = 150
	var telling []string
	for i := range n {
		w := f.write(fmt.Sprintf("k%03d", i), 0)
		w.Marks = []store.Mark{{String: "scope"}}
		switch {
		case i == 3:
			w.Marks = append(w.Marks, store.Mark{String: "exact"})
		case i%10 == 5:
			w.Record.Unsettled = true
		case i == 0:
			w.Marks = append(w.Marks, store.Mark{String: "settled long ago"})
		}
		f.put(w)
	}
	telling = append(telling, "k003")
	for i := n - 1; i >= 0; i-- {
		if i%10 == 5 {
			telling = append(telling, fmt.Sprintf("k%03d", i))
		}
	}
	for i := n - 1; len(telling) < store.MaxHits; i-- {
		if i%10 != 5 {
			telling = append(telling, fmt.Sprintf("k%03d", i))
		}
	}
	result := f.probe(nil, store.Probe{String: "settled long ago"}, store.Probe{String: "scope"},
		store.Probe{String: "exact", First: true}, store.Probe{String: "nobody"})
	if have := hitKeys(result); !slices.Equal(have, telling) {
		f.Errorf("hits %q\nwant %q", have, telling)
	}
	if result.HitCount != n {
		f.Errorf("HitCount %d, want %d", result.HitCount, n)
	}
	// The record that the first probe hits is not among those returned.
	if !slices.Equal(result.ProbeHits, []bool{true, true, true, false}) {
		f.Errorf("ProbeHits %v", result.ProbeHits)
	}
}

func tenThousandHits(f *fixture) {
	const n, bodySize = 10_000, 2 << 10
	f.fill(n, func(i int) store.Write {
		w := f.write(fmt.Sprintf("customer/c1/order/%d", i), 0)
		w.Marks = []store.Mark{{String: "customer/c1"}, {String: w.Key}}
		w.Record.Body = make([]byte, bodySize)
		return w
	})
	last := f.mark("the latest", store.Mark{String: "customer/c1"})
	r := store.Reserve{Write: f.write("customer/c1", 0), Probes: []store.Probe{
		{String: "customer/c1"}, {String: "customer/c1", Except: "x"}, {String: "customer/c1/order/77"},
	}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	result := f.reserve(r)
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	f.outcome(result, store.Blocked)
	if result.HitCount != n+1 || len(result.Hits) != store.MaxHits || result.Hits[0].Record.Version != last {
		f.Errorf("%d hits, %d returned, the first %q", result.HitCount, len(result.Hits), result.Hits[0].Record.Key)
	}
	if !slices.Equal(result.ProbeHits, []bool{true, true, true}) {
		f.Errorf("ProbeHits %v", result.ProbeHits)
	}
	// 10,000 headers or keys would be megabytes, their bodies 20 of them.
	if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 512<<10 {
		f.Errorf("one Reserve allocated %d bytes", allocated)
	}
	if took > 5*time.Second {
		f.Errorf("one Reserve took %s", took)
	}
	f.Logf("%d hits in %s, %d bytes allocated", result.HitCount, took, after.TotalAlloc-before.TotalAlloc)
	f.hits(f.probe([]store.Watermark{result.Watermark}, store.Probe{String: "customer/c1"}))
}

// fill makes n writes from several goroutines.
func (f *fixture) fill(n int, write func(i int) store.Write) {
	f.Helper()
	each(32, func(worker int) {
		for i := worker; i < n; i += 32 {
			ctx, cancel := f.ctx()
			result, err := f.s.Update(ctx, write(i))
			cancel()
			if err != nil || result.Outcome != store.Written {
				f.Errorf("write %d: %v, %v", i, result, err)
				return
			}
		}
	})
	if f.Failed() {
		f.FailNow()
	}
}

func watermarkCovers(f *fixture) {
	f.mark("a", store.Mark{String: "m"})
	f.mark("a, not probed", store.Mark{String: "n"})
	refused := f.probe(nil, store.Probe{String: "m"})
	covered := []store.Watermark{refused.Watermark}
	f.hits(f.probe(covered, store.Probe{String: "m"}))
	// It covers all that there was, also what was not probed for.
	f.hits(f.probe(covered, store.Probe{String: "n"}))
	f.mark("b", store.Mark{String: "m"})
	f.mark("c", store.Mark{String: "n"})
	f.hits(f.probe(covered, store.Probe{String: "m"}), "b")
	f.hits(f.probe(covered, store.Probe{String: "m"}, store.Probe{String: "n"}), "c", "b")
	f.hits(f.probe(nil, store.Probe{String: "m"}), "b", "a")
}

func restamped(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"})
	covered := []store.Watermark{f.probe(nil, store.Probe{String: "m"}).Watermark}
	f.hits(f.probe(covered, store.Probe{String: "m"}))
	w := f.write("a", version)
	w.Marks = []store.Mark{{String: "m"}}
	version = f.put(w)
	f.hits(f.probe(covered, store.Probe{String: "m"}), "a")
	covered = append(covered, f.probe(nil, store.Probe{String: "m"}).Watermark)
	// Deleted and made again is stamped anew, too.
	f.remove("a", version)
	f.mark("a", store.Mark{String: "m"})
	f.hits(f.probe(covered, store.Probe{String: "m"}), "a")
}

func renewedStamps(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"}, store.Mark{String: "n", Tag: "x"})
	end := f.now().Add(time.Hour)
	// To the same end, too.
	for _, until := range []time.Time{{}, end, end, {}} {
		covered := []store.Watermark{f.probe(nil, store.Probe{String: "m"}).Watermark}
		f.hits(f.probe(covered, store.Probe{String: "m"}, store.Probe{String: "n"}))
		w := f.write("a", version)
		w.RenewMarks, w.Until = true, until
		version = f.put(w)
		f.hits(f.probe(covered, store.Probe{String: "m"}), "a")
		f.hits(f.probe(covered, store.Probe{String: "n"}), "a")
	}
}

func watermarksAddUp(f *fixture) {
	f.mark("a", store.Mark{String: "m"})
	early := f.probe(nil, store.Probe{String: "m"}).Watermark
	f.mark("b", store.Mark{String: "m"})
	late := f.probe([]store.Watermark{early}, store.Probe{String: "m"})
	f.hits(late, "b")
	f.mark("c", store.Mark{String: "m"})
	for _, passedOver := range [][]store.Watermark{{early, late.Watermark}, {late.Watermark, early}, {late.Watermark, late.Watermark, early}} {
		f.hits(f.probe(passedOver, store.Probe{String: "m"}), "c")
	}
	f.hits(f.probe([]store.Watermark{early}, store.Probe{String: "m"}), "c", "b")
}

func watermarkAfterRestart(f *fixture) {
	f.mark("a", store.Mark{String: "m"})
	covered := []store.Watermark{f.probe(nil, store.Probe{String: "m"}).Watermark}
	f.restart()
	f.hits(f.probe(covered, store.Probe{String: "m"}))
	f.mark("b", store.Mark{String: "m"})
	f.hits(f.probe(covered, store.Probe{String: "m"}), "b")
}

// count sets one entry of a new or present record.
func (f *fixture) count(key string, entries ...store.MeterEntry) store.Result {
	f.Helper()
	r, _ := f.get(key)
	var version uint64
	if r != nil {
		version = r.Version
	}
	w := f.write(key, version)
	w.Meters = entries
	return f.update(w)
}

func metersExact(f *fixture) {
	const (
		forty = "1234567890123456789012345678901234567890"
		tiny  = "0.0000000000000000000000000000000000000001"
	)
	f.sum("nobody", "0")
	for i := range 10 {
		f.outcome(f.count(fmt.Sprintf("tenth %d", i), store.MeterEntry{Meter: "tenths", Amount: "0.1", Limit: "1"}), store.Written)
	}
	f.sum("tenths", "1")
	f.outcome(f.count("one more", store.MeterEntry{Meter: "tenths", Amount: tiny, Limit: "1.0"}), store.OverLimit)

	f.outcome(f.count("a", store.MeterEntry{Meter: "long", Amount: forty}), store.Written)
	f.outcome(f.count("b", store.MeterEntry{Meter: "long", Amount: tiny}), store.Written)
	f.sum("long", forty+tiny[1:])
	f.outcome(f.count("c", store.MeterEntry{Meter: "long", Amount: tiny, Limit: forty + tiny[1:]}), store.OverLimit)
	f.outcome(f.count("c", store.MeterEntry{Meter: "long", Amount: tiny, Limit: forty + ".0000000000000000000000000000000000000002"}), store.Written)
	f.outcome(f.count("a", store.MeterEntry{Meter: "long"}), store.Written)
	f.sum("long", ".0000000000000000000000000000000000000002")

	// Above 2^53, where a float would not see the difference.
	f.outcome(f.count("big", store.MeterEntry{Meter: "big", Amount: "9007199254740992"}), store.Written)
	f.outcome(f.count("big 2", store.MeterEntry{Meter: "big", Amount: "1", Limit: "9007199254740992"}), store.OverLimit)
	f.outcome(f.count("big 2", store.MeterEntry{Meter: "big", Amount: "1", Limit: "9007199254740993"}), store.Written)
	f.sum("big", "9007199254740993")

	nines := strings.Repeat("9", store.MaxDecimal)
	f.outcome(f.count("n1", store.MeterEntry{Meter: "nines", Amount: nines}), store.Written)
	f.outcome(f.count("n2", store.MeterEntry{Meter: "nines", Amount: nines}), store.Written)
	want := rat(f, nines)
	want.Add(want, want)
	if have := f.meter("nines"); have.Cmp(want) != 0 {
		f.Errorf("nines: %s", have)
	}
	for i, text := range []string{"007.50", "7.5", "7.500"} {
		f.outcome(f.count("form", store.MeterEntry{Meter: "form", Amount: text}), store.Written)
		if have := f.meter("form"); have.Cmp(big.NewRat(15, 2)) != 0 {
			f.Errorf("%d: %s reads as %s", i, text, have)
		}
	}
}

func entriesAreSet(f *fixture) {
	f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: "5"}, store.MeterEntry{Meter: "n", Amount: "1"}), store.Written)
	f.outcome(f.count("b", store.MeterEntry{Meter: "m", Amount: "3"}), store.Written)
	f.sum("m", "8")
	f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: "6"}), store.Written)
	f.sum("m", "9")
	f.sum("n", "1")
	f.outcome(f.count("a"), store.Written)
	f.sum("m", "9")
	for _, none := range []string{"0", "", "0.000", "00"} {
		f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: none}), store.Written)
		f.sum("m", "3")
		f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: "6"}), store.Written)
		f.sum("m", "9")
	}
	f.restart()
	f.sum("m", "9")
	f.sum("n", "1")
}

func onlyRaises(f *fixture) {
	entry := func(amount, limit string) store.MeterEntry {
		return store.MeterEntry{Meter: "m", Amount: amount, Limit: limit}
	}
	f.outcome(f.count("a", entry("10", "10")), store.Written)
	f.outcome(f.count("b", entry("0.01", "10")), store.OverLimit)
	f.outcome(f.count("b", entry("0", "10")), store.Written)
	f.outcome(f.count("b", entry("5", "")), store.Written)
	// The sum is 15 now. A lower limit does not refuse what lowers it or leaves it.
	f.outcome(f.count("a", entry("9", "10")), store.Written)
	f.outcome(f.count("a", entry("9.0", "10")), store.Written)
	f.outcome(f.count("a", entry("9.1", "10")), store.OverLimit)
	f.sum("m", "14")
	f.outcome(f.count("a", entry("", "0")), store.Written)
	f.sum("m", "5")
	f.outcome(f.count("c", entry("1", "0")), store.OverLimit)
	// Reserve is held to it like Update, and a record's own entry is not counted twice.
	r := store.Reserve{Write: f.write("b", f.mustGet("b").Version)}
	r.Meters = []store.MeterEntry{entry("6", "5.5")}
	f.outcome(f.reserve(r), store.OverLimit)
	r.Meters = []store.MeterEntry{entry("6", "6")}
	f.outcome(f.reserve(r), store.Written)
}

func overLimitWritesNothing(f *fixture) {
	f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: "1"}), store.Written)
	version := f.mark("b", store.Mark{String: "old"})
	want := f.mustGet("b")
	w := f.write("b", version)
	w.Record.Held, w.Record.Due = true, f.now()
	w.Marks = []store.Mark{{String: "new"}}
	w.Meters = []store.MeterEntry{{Meter: "free", Amount: "1"}, {Meter: "m", Amount: "1", Limit: "1"}, {Meter: "free too", Amount: "1"}}
	for _, result := range []store.Result{f.update(w), f.reserve(store.Reserve{Write: w})} {
		f.outcome(result, store.OverLimit)
		if result.Meter != "m" || result.Now.IsZero() {
			f.Errorf("%+v", result)
		}
	}
	w.Key, w.Expected = "absent", 0
	f.outcome(f.update(w), store.OverLimit)
	if err := sameRecord(want, f.mustGet("b")); err != nil {
		f.Error(err)
	}
	if have, _ := f.get("absent"); have != nil {
		f.Errorf("written: %+v", have)
	}
	for meter, sum := range map[string]string{"m": "1", "free": "0", "free too": "0"} {
		f.sum(meter, sum)
	}
	f.hits(f.probe(nil, store.Probe{String: "old"}), "b")
	f.hits(f.probe(nil, store.Probe{String: "new"}))
	f.nothingListed()
}

func firstFullMeter(f *fixture) {
	result := f.count("a",
		store.MeterEntry{Meter: "z", Amount: "1", Limit: "1"},
		store.MeterEntry{Meter: "y", Amount: "2", Limit: "1"},
		store.MeterEntry{Meter: "x", Amount: "2", Limit: "1"})
	f.outcome(result, store.OverLimit)
	if result.Meter != "y" {
		f.Errorf("%q is said to be full", result.Meter)
	}
}

func deleteMeters(f *fixture) {
	f.outcome(f.count("a", store.MeterEntry{Meter: "m", Amount: "5"}, store.MeterEntry{Meter: "n", Amount: "0.5"}), store.Written)
	f.outcome(f.count("b", store.MeterEntry{Meter: "m", Amount: "1"}), store.Written)
	f.remove("a", f.mustGet("a").Version)
	f.sum("m", "1")
	f.sum("n", "0")
	f.outcome(f.count("a"), store.Written)
	f.sum("m", "1")
}

func checkOrder(f *fixture) {
	version := f.mark("a", store.Mark{String: "m"})
	r := store.Reserve{Write: f.write("a", version+1), Probes: []store.Probe{{String: "n"}}}
	r.Meters = []store.MeterEntry{{Meter: "sum", Amount: "2", Limit: "1"}}
	f.mark("b", store.Mark{String: "n"})
	f.outcome(f.reserve(r), store.Mismatch)
	r.Expected = version
	f.outcome(f.reserve(r), store.Blocked)
	r.Probes = nil
	f.outcome(f.reserve(r), store.OverLimit)
	r.Meters = nil
	f.outcome(f.reserve(r), store.Written)
}

func (f *fixture) due(key string, version uint64, due time.Time) uint64 {
	f.Helper()
	w := f.write(key, version)
	w.Record.Due = due
	return f.put(w)
}

func listDue(f *fixture) {
	base := f.now().Truncate(time.Second)
	if have := f.list(store.List{What: store.ListDue, Before: base}); have != nil {
		f.Errorf("an empty list: %+v", have)
	}
	f.due("c", 0, base.Add(2*time.Millisecond))
	f.due("a", 0, base.Add(3*time.Millisecond))
	f.due("b", 0, base.Add(time.Millisecond+999*time.Microsecond))
	f.due("never", 0, time.Time{})
	f.due("long ago", 0, time.Date(1971, 1, 1, 0, 0, 0, 0, time.UTC))
	f.due("in an age", 0, time.Date(9998, 12, 31, 23, 59, 59, 0, time.UTC))
	for _, c := range []struct {
		before time.Time
		want   []string
	}{
		{base, []string{"long ago"}},
		{base.Add(time.Millisecond - 1), []string{"long ago"}},
		{base.Add(time.Millisecond), []string{"long ago", "b"}},
		{base.Add(2 * time.Millisecond), []string{"long ago", "b", "c"}},
		{base.Add(time.Hour), []string{"long ago", "b", "c", "a"}},
		{time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), []string{"long ago", "b", "c", "a", "in an age"}},
	} {
		for _, limit := range []int{0, 1, 2, len(c.want)} {
			if have := recordKeys(f.list(store.List{What: store.ListDue, Before: c.before, Limit: limit})); !slices.Equal(have, c.want) {
				f.Errorf("due by %s, pages of %d: %q, want %q", c.before, limit, have, c.want)
			}
		}
	}
	page := f.page(store.List{What: store.ListDue, Before: base.Add(time.Hour), Limit: 4})
	if page.Cursor != "" || page.Now.IsZero() {
		f.Errorf("the page that is the last one has cursor %q, time %s", page.Cursor, page.Now)
	}
	if r := page.Records[1]; string(r.Header) != "header of b" || r.Body != nil || !r.Due.Equal(base.Add(time.Millisecond)) || r.Nonce == "" {
		f.Errorf("the list carries %+v", r)
	}
	// Equal times page as well.
	var want []string
	for i := range 7 {
		key := fmt.Sprintf("same %d", i)
		f.due(key, 0, base.Add(-time.Hour))
		want = append(want, key)
	}
	have := recordKeys(f.list(store.List{What: store.ListDue, Before: base, Limit: 3}))[1:]
	slices.Sort(have)
	if !slices.Equal(have, want) {
		f.Errorf("due at the same time: %q", have)
	}
}

func listHeld(f *fixture) {
	const n = 300
	var want []string
	for i := range n {
		key := fmt.Sprintf("k%03d", i*7%n)
		w := f.write(key, 0)
		w.Record.Held = i%3 != 0
		f.put(w)
		if w.Record.Held {
			want = append(want, key)
		}
	}
	slices.Sort(want)
	for _, limit := range []int{0, 1, 7, 100, 200} {
		if have := recordKeys(f.list(store.List{What: store.ListHeld, Limit: limit})); !slices.Equal(have, want) {
			f.Errorf("pages of %d: %q", limit, have)
		}
	}
	for i := range 100 {
		w := f.write(fmt.Sprintf("more %03d", i), 0)
		w.Record.Held = true
		f.put(w)
	}
	page := f.page(store.List{What: store.ListHeld})
	if len(page.Records) != 256 || page.Cursor == "" || page.Records[0].Body != nil || string(page.Records[0].Header) != "header of k001" {
		f.Errorf("the default page has %d records, the first is %+v", len(page.Records), page.Records[0])
	}
}

func listsFollow(f *fixture) {
	base := f.now().Truncate(time.Second)
	want := func(due, held bool) {
		f.Helper()
		have := f.list(store.List{What: store.ListDue, Before: base.Add(time.Hour)})
		if len(have) > 0 != due {
			f.Errorf("due: %q", recordKeys(have))
		}
		have = f.list(store.List{What: store.ListHeld})
		if len(have) > 0 != held {
			f.Errorf("held: %q", recordKeys(have))
		}
	}
	var version uint64
	write := func(due time.Time, held bool) {
		w := f.write("k", version)
		w.Record.Due, w.Record.Held = due, held
		version = f.put(w)
	}
	write(time.Time{}, true)
	want(false, true)
	write(base, true)
	want(true, true)
	write(base.Add(time.Minute), false)
	want(true, false)
	if have := f.list(store.List{What: store.ListDue, Before: base}); len(have) > 0 {
		f.Errorf("still due at the earlier time: %q", recordKeys(have))
	}
	write(base.Add(2*time.Hour), false)
	want(false, false)
	write(time.Time{}, false)
	want(false, false)
	write(base, true)
	f.restart()
	want(true, true)
	f.remove("k", version)
	want(false, false)
}

func pagesWhileChanging(f *fixture) {
	base := f.now().Truncate(time.Second)
	const n = 60
	versions := map[string]uint64{}
	for i := range n {
		key := fmt.Sprintf("k%02d", i)
		w := f.write(key, 0)
		w.Record.Due, w.Record.Held = base.Add(time.Duration(i/4)*time.Millisecond), true
		versions[key] = f.put(w)
	}
	for _, l := range []store.List{
		{What: store.ListHeld, Limit: 5},
		{What: store.ListDue, Before: base.Add(time.Hour), Limit: 5},
	} {
		seen := map[string]int{}
		for round := 0; ; round++ {
			page := f.page(l)
			for _, r := range page.Records {
				seen[r.Key]++
			}
			if page.Cursor == "" {
				break
			}
			l.Cursor = page.Cursor
			// One that was seen goes, even the one that the page ended with, and one that was not.
			for _, key := range []string{page.Records[len(page.Records)-1].Key, fmt.Sprintf("k%02d", n-1-round)} {
				if version, ok := versions[key]; ok {
					f.remove(key, version)
					delete(versions, key)
				}
			}
		}
		for key := range versions {
			if seen[key] != 1 {
				f.Errorf("%s: %q stayed and came %d times", l.What, key, seen[key])
			}
		}
	}
}

func invalidRequests(f *fixture) {
	ctx, cancel := f.ctx()
	defer cancel()
	version := f.put(f.write("present", 0))
	want := f.mustGet("present")
	long := strings.Repeat("x", store.MaxString+1)
	for name, spoil := range map[string]func(w *store.Write){
		"no epoch":                  func(w *store.Write) { w.Epoch = "" },
		"no key":                    func(w *store.Write) { w.Key = "" },
		"key too long":              func(w *store.Write) { w.Key = long },
		"no nonce":                  func(w *store.Write) { w.Nonce = "" },
		"nonce too long":            func(w *store.Write) { w.Nonce = long },
		"empty mark":                func(w *store.Write) { w.Marks = []store.Mark{{String: "m"}, {Tag: "x"}} },
		"mark too long":             func(w *store.Write) { w.Marks = []store.Mark{{String: long}} },
		"tag too long":              func(w *store.Write) { w.Marks = []store.Mark{{String: "m", Tag: long}} },
		"end of a mark out of time": func(w *store.Write) { w.Marks = []store.Mark{{String: "m", Until: time.Unix(-1, 0)}} },
		"due out of time":           func(w *store.Write) { w.Record.Due = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"empty meter":               func(w *store.Write) { w.Meters = []store.MeterEntry{{Amount: "1"}} },
		"meter too long":            func(w *store.Write) { w.Meters = []store.MeterEntry{{Meter: long, Amount: "1"}} },
		"meter twice":               func(w *store.Write) { w.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}, {Meter: "m"}} },
	} {
		w := f.write("present", version)
		w.Meters = []store.MeterEntry{{Meter: "sum", Amount: "1"}}
		spoil(&w)
		_, err := f.s.Update(ctx, w)
		f.fails(err, store.ErrInvalid, "Update with "+name)
		_, err = f.s.Reserve(ctx, store.Reserve{Write: w})
		f.fails(err, store.ErrInvalid, "Reserve with "+name)
	}
	for _, bad := range []string{
		"-1", "-0", "+1", "1e3", "1E3", "1.", ".5", ".", "1.2.3", "1,5", " 1", "1 ", "0x10", "NaN", "Inf", "one", "1_000", "١",
		strings.Repeat("1", store.MaxDecimal+1),
	} {
		for _, e := range []store.MeterEntry{{Meter: "m", Amount: bad}, {Meter: "m", Amount: "1", Limit: bad}} {
			w := f.write("present", version)
			w.Meters = []store.MeterEntry{e}
			_, err := f.s.Update(ctx, w)
			f.fails(err, store.ErrInvalid, fmt.Sprintf("meter entry %+v", e))
		}
	}
	for name, w := range map[string]store.Write{
		"absent":      {Expected: 0},
		"with marks":  {Expected: version, Marks: []store.Mark{{String: "m"}}},
		"keeps marks": {Expected: version, KeepMarks: true},
		"renews them": {Expected: version, RenewMarks: true},
		"an end":      {Expected: version, Until: time.Unix(1e9, 0)},
		"with meters": {Expected: version, Meters: []store.MeterEntry{{Meter: "m"}}},
	} {
		w.Epoch, w.Key, w.Nonce = identity.Epoch, "present", f.nonce()
		_, err := f.s.Update(ctx, w)
		f.fails(err, store.ErrInvalid, "delete "+name)
	}
	for name, spoil := range map[string]func(w *store.Write){
		"KeepMarks and marks":             func(w *store.Write) { w.KeepMarks, w.Marks = true, []store.Mark{{String: "m"}} },
		"RenewMarks and marks":            func(w *store.Write) { w.RenewMarks, w.Marks = true, []store.Mark{{String: "m"}} },
		"KeepMarks and RenewMarks":        func(w *store.Write) { w.KeepMarks, w.RenewMarks = true, true },
		"KeepMarks and an end":            func(w *store.Write) { w.KeepMarks, w.Until = true, time.Unix(1e9, 0) },
		"an end without RenewMarks":       func(w *store.Write) { w.Until = time.Unix(1e9, 0) },
		"RenewMarks until the year 10000": func(w *store.Write) { w.RenewMarks, w.Until = true, time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
	} {
		w := f.write("present", version)
		spoil(&w)
		_, err := f.s.Update(ctx, w)
		f.fails(err, store.ErrInvalid, "Update with "+name)
	}
	for name, spoil := range map[string]func(r *store.Reserve){
		"no record":           func(r *store.Reserve) { r.Record = nil },
		"KeepMarks":           func(r *store.Reserve) { r.KeepMarks = true },
		"RenewMarks":          func(r *store.Reserve) { r.RenewMarks = true },
		"an end of no mark":   func(r *store.Reserve) { r.Until = time.Unix(1e9, 0) },
		"empty probe":         func(r *store.Reserve) { r.Probes = []store.Probe{{String: "m"}, {}} },
		"probe too long":      func(r *store.Reserve) { r.Probes = []store.Probe{{String: long}} },
		"excepted too long":   func(r *store.Reserve) { r.Probes = []store.Probe{{String: "m", Except: long}} },
		"foreign watermark":   func(r *store.Reserve) { r.PassedOver = []store.Watermark{"not a watermark"} },
		"an empty watermark":  func(r *store.Reserve) { r.PassedOver = []store.Watermark{""} },
		"a watermark and \\0": func(r *store.Reserve) { r.PassedOver = []store.Watermark{"1\x00"} },
	} {
		r := store.Reserve{Write: f.write("present", version)}
		spoil(&r)
		_, err := f.s.Reserve(ctx, r)
		f.fails(err, store.ErrInvalid, "Reserve with "+name)
	}
	for name, l := range map[string]store.List{
		"nothing":               {},
		"something else":        {What: "Settled"},
		"due without Before":    {What: store.ListDue},
		"held with Before":      {What: store.ListHeld, Before: time.Unix(1e9, 0)},
		"a limit below 0":       {What: store.ListHeld, Limit: -1},
		"a cursor of its own":   {What: store.ListHeld, Cursor: "?"},
		"a cursor of held ones": {What: store.ListDue, Before: time.Unix(1e9, 0), Cursor: f.heldCursor()},
	} {
		_, err := f.s.List(ctx, l)
		f.fails(err, store.ErrInvalid, "List of "+name)
	}
	_, _, err := f.s.Get(ctx, "")
	f.fails(err, store.ErrInvalid, "Get without a key")
	_, _, err = f.s.Get(ctx, long)
	f.fails(err, store.ErrInvalid, "Get with a key too long")
	_, err = f.s.Meter(ctx, "")
	f.fails(err, store.ErrInvalid, "Meter without a name")
	for _, id := range []store.Identity{{}, {Epoch: "e"}, {KeyDomain: "d"}} {
		_, err = f.s.Initialise(ctx, id)
		f.fails(err, store.ErrInvalid, fmt.Sprintf("Initialise with %+v", id))
	}
	if err := sameRecord(want, f.mustGet("present")); err != nil {
		f.Error(err)
	}
	f.sum("sum", "0")
	f.sum("m", "0")
}

// heldCursor is a true cursor of the list of held records.
func (f *fixture) heldCursor() string {
	f.Helper()
	for _, key := range []string{"held 1", "held 2"} {
		w := f.write(key, 0)
		w.Record.Held = true
		f.put(w)
	}
	page := f.page(store.List{What: store.ListHeld, Limit: 1})
	if page.Cursor == "" {
		f.Fatal("no cursor after one of two records")
	}
	return page.Cursor
}

// everyCall tries each method of the contract.
func everyCall(f *fixture, ctx context.Context, want error) {
	f.Helper()
	_, err := f.s.Standing(ctx)
	f.fails(err, want, "Standing")
	_, err = f.s.Initialise(ctx, identity)
	f.fails(err, want, "Initialise")
	f.fails(f.s.Disown(ctx, "of nobody", "next"), want, "Disown")
	_, err = f.s.Reserve(ctx, store.Reserve{Write: f.write("k", 0)})
	f.fails(err, want, "Reserve")
	_, err = f.s.Update(ctx, f.write("k", 0))
	f.fails(err, want, "Update")
	_, _, err = f.s.Get(ctx, "k")
	f.fails(err, want, "Get")
	_, err = f.s.List(ctx, store.List{What: store.ListHeld})
	f.fails(err, want, "List")
	_, err = f.s.Meter(ctx, "m")
	f.fails(err, want, "Meter")
}

func callerLeft(f *fixture) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	everyCall(f, ctx, store.ErrUnavailable)
	everyCall(f, ctx, context.Canceled)
	f.put(f.write("k", 0))
}

func afterClose(f *fixture) {
	f.put(f.write("k", 0))
	if err := f.s.Close(); err != nil {
		f.Fatalf("Close: %v", err)
	}
	ctx, cancel := f.ctx()
	defer cancel()
	everyCall(f, ctx, store.ErrUnavailable)
	if err := f.s.Close(); err != nil {
		f.Errorf("a second Close: %v", err)
	}
	f.restart()
	f.mustGet("k")
}
