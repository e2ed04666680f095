package storetest

// Many writers at once, over two connections. Whatever the order that the store
// puts them in, some things must come out.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-dev/holdfast/internal/store"
)

var races = []testCase{
	{"of many first writes of one key one wins", raceOneKey},
	{"of many records that overlap one wins in each clique", raceCliques},
	{"no two neighbours win, and no loser lacks a winning neighbour", raceNeighbours},
	{"two that were released over a third do not both win", raceReleases},
	{"a meter never overflows", raceMeters},
	{"compare-and-set loses no write", raceIncrements},
	{"a watermark covers exactly what its Reserve saw among writers", raceWatermarks},
	{"writers that leave and repeat make each write once", raceLostReplies},
	{"a list among writers has every record that stays once", raceLists},
}

// each runs fn in n goroutines and waits for them.
func each(n int, fn func(i int)) {
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { fn(i) })
	}
	group.Wait()
}

// connections are two, to be used by turns.
func (f *fixture) connections() [2]store.Store {
	f.Helper()
	return [2]store.Store{f.s, f.h.Connect(f)}
}

// reserveOn is for goroutines: an error fails the test and is no outcome.
func (f *fixture) reserveOn(s store.Store, r store.Reserve) store.Result {
	ctx, cancel := f.ctx()
	defer cancel()
	result, err := s.Reserve(ctx, r)
	if err != nil {
		f.Errorf("Reserve %q: %v", r.Key, err)
	}
	return result
}

func (f *fixture) updateOn(s store.Store, w store.Write) store.Result {
	ctx, cancel := f.ctx()
	defer cancel()
	result, err := s.Update(ctx, w)
	if err != nil {
		f.Errorf("Update %q: %v", w.Key, err)
	}
	return result
}

func raceOneKey(f *fixture) {
	conns := f.connections()
	const keys, writers = 20, 20
	var mu sync.Mutex
	won := map[string]string{}
	each(keys*writers, func(i int) {
		r := store.Reserve{Write: f.write(fmt.Sprintf("k%d", i%keys), 0)}
		result := f.reserveOn(conns[i/keys%2], r)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case result.Outcome == store.Written && won[r.Key] == "":
			won[r.Key] = r.Nonce
		case result.Outcome == store.Written:
			f.Errorf("%q was written twice", r.Key)
		case result.Outcome != store.Mismatch || result.Record == nil:
			f.Errorf("a loser of %q: %+v", r.Key, result)
		}
	})
	for key, nonce := range won {
		if r := f.mustGet(key); r.Nonce != nonce {
			f.Errorf("%q has the nonce of another writer", key)
		}
	}
	if len(won) != keys {
		f.Errorf("%d of %d keys were written", len(won), keys)
	}
}

func raceCliques(f *fixture) {
	conns := f.connections()
	const cliques, members = 25, 20
	var mu sync.Mutex
	won := map[int][]string{}
	lost := map[int][]store.Result{}
	each(cliques*members, func(i int) {
		clique := i % cliques
		r := store.Reserve{Write: f.write(fmt.Sprintf("c%d/m%d", clique, i/cliques), 0)}
		r.Record.Unsettled = true
		// Each also marks and probes what is its own, before and after the common one.
		r.Marks = []store.Mark{{String: "a" + r.Key}, {String: fmt.Sprintf("clique %d", clique)}, {String: "z" + r.Key}}
		r.Probes = []store.Probe{{String: "a" + r.Key}, {String: fmt.Sprintf("clique %d", clique)}, {String: "z" + r.Key}}
		result := f.reserveOn(conns[i/cliques%2], r)
		mu.Lock()
		defer mu.Unlock()
		switch result.Outcome {
		case store.Written:
			won[clique] = append(won[clique], r.Key)
		case store.Blocked:
			lost[clique] = append(lost[clique], result)
		default:
			f.Errorf("%+v", result)
		}
	})
	for clique := range cliques {
		if len(won[clique]) != 1 {
			f.Errorf("clique %d was won by %q", clique, won[clique])
			continue
		}
		for _, result := range lost[clique] {
			if !slices.Equal(hitKeys(result), won[clique]) || !slices.Equal(result.ProbeHits, []bool{false, true, false}) {
				f.Errorf("clique %d: a loser was told of %q", clique, hitKeys(result))
			}
		}
	}
}

func raceNeighbours(f *fixture) {
	conns := f.connections()
	const n = 400
	edge := func(i int) string { return fmt.Sprintf("edge %d", (i+n)%n) }
	results := make([]store.Result, n)
	each(n, func(i int) {
		r := store.Reserve{Write: f.write(fmt.Sprint(i), 0)}
		r.Marks = []store.Mark{{String: edge(i)}, {String: edge(i + 1)}}
		r.Probes = []store.Probe{{String: edge(i)}, {String: edge(i + 1)}}
		results[i] = f.reserveOn(conns[i%2], r)
	})
	for i := range n {
		left, right := results[(i+n-1)%n], results[(i+1)%n]
		if results[i].Outcome == store.Written {
			if right.Outcome == store.Written {
				f.Errorf("%d and its neighbour both won", i)
			}
			continue
		}
		f.outcome(results[i], store.Blocked)
		if left.Outcome != store.Written && right.Outcome != store.Written {
			f.Errorf("%d lost to nobody", i)
		}
	}
}

// raceReleases: B and C are held because of A. Each is released over what it was
// shown, which is A; they overlap each other as well.
func raceReleases(f *fixture) {
	conns := f.connections()
	const rounds = 200
	each(8, func(worker int) {
		for round := worker; round < rounds; round += 8 {
			scope := fmt.Sprintf("scope %d", round)
			a := f.write(scope+" A", 0)
			a.Record.Unsettled = true
			a.Marks = []store.Mark{{String: scope}}
			f.updateOn(f.s, a)
			var held [2]store.Reserve
			for i, name := range []string{" B", " C"} {
				r := store.Reserve{Write: f.write(scope+name, 0), Probes: []store.Probe{{String: scope}}}
				r.Marks = []store.Mark{{String: scope}}
				result := f.reserveOn(f.s, r)
				hold := f.write(scope+name, 0)
				hold.Record.Held = true
				r.Expected, r.Nonce = f.updateOn(f.s, hold).Version, f.nonce()
				r.PassedOver = []store.Watermark{result.Watermark}
				held[i] = r
			}
			var results [2]store.Result
			each(2, func(i int) { results[i] = f.reserveOn(conns[i], held[i]) })
			winner, loser := results[0], results[1]
			if loser.Outcome == store.Written {
				winner, loser = loser, winner
			}
			if winner.Outcome != store.Written || loser.Outcome != store.Blocked || loser.HitCount != 1 {
				f.Errorf("round %d: %+v and %+v", round, results[0], results[1])
			}
		}
	})
}

func raceMeters(f *fixture) {
	conns := f.connections()
	const writers = 300
	var mu sync.Mutex
	written := 0
	each(writers, func(i int) {
		w := f.write(fmt.Sprint(i), 0)
		w.Meters = []store.MeterEntry{{Meter: "m", Amount: "0.1", Limit: "2.55"}}
		var result store.Result
		if i%4 < 2 {
			result = f.updateOn(conns[i%2], w)
		} else {
			result = f.reserveOn(conns[i%2], store.Reserve{Write: w})
		}
		mu.Lock()
		defer mu.Unlock()
		switch result.Outcome {
		case store.Written:
			written++
		case store.OverLimit:
		default:
			f.Errorf("%+v", result)
		}
	})
	if written != 25 {
		f.Errorf("%d were written, 25 fit", written)
	}
	f.sum("m", "2.5")
}

func raceIncrements(f *fixture) {
	conns := f.connections()
	const writers, rounds = 16, 20
	f.put(f.write("k", 0))
	each(writers, func(i int) {
		for range rounds {
			for {
				ctx, cancel := f.ctx()
				r, _, err := conns[i%2].Get(ctx, "k")
				cancel()
				if err != nil || r == nil {
					f.Errorf("Get: %v, %v", r, err)
					return
				}
				w := f.write("k", r.Version)
				w.Record.Body = append(r.Body, 'x')
				result := f.updateOn(conns[i%2], w)
				if result.Outcome == store.Written {
					break
				}
				if result.Outcome != store.Mismatch {
					f.Errorf("%+v", result)
					return
				}
			}
		}
	})
	if have, want := len(f.mustGet("k").Body), len("body of k")+writers*rounds; have != want {
		f.Errorf("the body has %d bytes, want %d", have, want)
	}
}

func raceWatermarks(f *fixture) {
	conns := f.connections()
	const writers, marks, probers = 8, 60, 4
	f.mark("there from the start", store.Mark{String: "m"})
	const total = writers*marks + 1
	var mu sync.Mutex
	refused := map[store.Watermark]int{}
	each(writers+probers, func(i int) {
		if i < writers {
			for n := range marks {
				w := f.write(fmt.Sprintf("%d/%d", i, n), 0)
				w.Marks = []store.Mark{{String: "m"}}
				f.updateOn(conns[i%2], w)
			}
			return
		}
		for {
			result := f.reserveOn(conns[i%2], store.Reserve{
				Write: f.write("prober", 0), Probes: []store.Probe{{String: "m"}},
			})
			if result.Outcome != store.Blocked {
				f.Errorf("%+v", result)
				return
			}
			mu.Lock()
			if earlier, again := refused[result.Watermark]; again && earlier != result.HitCount {
				f.Errorf("watermark %q came with %d hits and with %d", result.Watermark, earlier, result.HitCount)
			}
			refused[result.Watermark] = result.HitCount
			mu.Unlock()
			if result.HitCount == total || f.Failed() {
				return
			}
		}
	})
	if f.Failed() {
		return
	}
	between := 0
	for watermark, count := range refused {
		if count < total {
			between++
		}
		rest := f.probe([]store.Watermark{watermark}, store.Probe{String: "m"})
		if rest.HitCount != total-count {
			f.Errorf("watermark %q was given with %d of %d hits; %d more are hit over it", watermark, count, total, rest.HitCount)
		}
	}
	if between < 2 {
		f.Errorf("only %d Reserves were refused while there were writers", between)
	}
}

// raceLostReplies has every caller give up at random and repeat until it is answered.
func raceLostReplies(f *fixture) {
	conns := f.connections()
	seed := rand.Uint64()
	f.Logf("seed %d", seed)
	const cliques, members = 20, 12
	results := make([]store.Result, cliques*members)
	each(len(results), func(i int) {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		r := store.Reserve{Write: f.write(fmt.Sprint(i), 0), Probes: []store.Probe{{String: fmt.Sprint("clique ", i%cliques)}}}
		r.Marks = []store.Mark{{String: fmt.Sprint("clique ", i%cliques)}}
		r.Meters = []store.MeterEntry{{Meter: "m", Amount: "1"}}
		for try := 0; ; try++ {
			wait := time.Duration(random.IntN(1<<min(10+try, 25))) * time.Microsecond
			ctx, cancel := context.WithTimeout(context.Background(), min(wait, patience))
			result, err := conns[random.IntN(2)].Reserve(ctx, r)
			cancel()
			if err == nil {
				results[i] = result
				return
			}
			if !errors.Is(err, store.ErrUnavailable) || try > 60 {
				f.Errorf("try %d: %v", try, err)
				return
			}
		}
	})
	for clique := range cliques {
		won := 0
		for i := clique; i < len(results); i += cliques {
			r, _ := f.get(fmt.Sprint(i))
			switch results[i].Outcome {
			case store.Written:
				won++
				if r == nil || r.Version != results[i].Version {
					f.Errorf("%d was answered as written in version %d; there is %+v", i, results[i].Version, r)
				}
			case store.Blocked:
				if r != nil {
					f.Errorf("%d was blocked and is there: %+v", i, r)
				}
			default:
				f.Errorf("%+v", results[i])
			}
		}
		if won != 1 {
			f.Errorf("%d winners in clique %d", won, clique)
		}
	}
	f.sum("m", fmt.Sprint(cliques))
}

func raceLists(f *fixture) {
	conns := f.connections()
	base := f.now()
	const stay, change = 80, 8
	put := func(s store.Store, key string, version uint64, held bool) uint64 {
		w := f.write(key, version)
		w.Record.Held = held
		if held {
			w.Record.Due = base
		}
		return f.updateOn(s, w).Version
	}
	for i := range stay {
		put(f.s, fmt.Sprintf("k%03d stays", i), 0, true)
	}
	stop := make(chan struct{})
	var group sync.WaitGroup
	for i := range change {
		group.Go(func() {
			var version uint64
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
					version = put(conns[i%2], fmt.Sprintf("k%03d changes", i*10), version, n%2 == 0)
				}
			}
		})
	}
	for range 20 {
		for _, l := range []store.List{{What: store.ListHeld, Limit: 7}, {What: store.ListDue, Before: base, Limit: 7}} {
			seen := map[string]int{}
			for _, r := range f.list(l) {
				seen[r.Key]++
			}
			for i := range stay {
				if key := fmt.Sprintf("k%03d stays", i); seen[key] != 1 {
					f.Errorf("%s: %q came %d times", l.What, key, seen[key])
				}
			}
		}
	}
	close(stop)
	group.Wait()
}
