// This file is about names: the provider's key, the names of holds, and that no two
// records, marks or meters are taken for one another.

package guard

import (
	"errors"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/holdfast-dev/holdfast/internal/store"
)

// lookalikes are keys that differ, and would be one if their parts were merely joined.
var lookalikes = []Key{
	{"ns", "tool", "caller", "id"},
	{"ns", "tool", "caller", "ID"},
	{"ns", "tool", "caller", "id2"},
	{"ns", "tool", "caller2", "id"},
	{"ns", "tool", "caller", "2id"},
	{"ns", "tool2", "caller", "id"},
	{"ns2", "tool", "caller", "id"},
	{"nst", "ool", "caller", "id"},
	{"n", "stool", "caller", "id"},
	{"ns", "toolcaller", "", "id"},
	{"ns", "tool", "callerid", ""},
	{"ns", "tool", "6:caller", "id"},
	{"ns", "tool", "caller2:id", ""},
	{"2:ns", "tool", "caller", "id"},
}

func TestKeysAreNeverTakenForOneAnother(t *testing.T) {
	for name, text := range map[string]func(Key) string{
		"record":   Key.String,
		"provider": func(k Key) string { return providerKey("domain-1", k, 1) },
		"hold":     func(k Key) string { return HoldName(k, 1) },
	} {
		seen := map[string]Key{}
		for _, k := range lookalikes {
			x := text(k)
			if other, dup := seen[x]; dup {
				t.Errorf("%s: %q and %q are both %q", name, k, other, x)
			}
			if x != text(k) {
				t.Errorf("%s of %q changes", name, k)
			}
			seen[x] = k
		}
	}
}

func TestTheProvidersKey(t *testing.T) {
	k := lookalikes[0]
	one := providerKey("domain-1", k, 1)
	if !regexp.MustCompile(`^hf_[0-9a-f]{48}$`).MatchString(one) {
		t.Errorf("%q: providers take short plain keys", one)
	}
	// It is what providers have remembered: a version that changes it pays twice.
	if want := "hf_8323457a88c49886f5b25f441ab86b9a719320325ffb706d"; one != want {
		t.Errorf("%q, it was %q", one, want)
	}
	for name, other := range map[string]string{
		"domain":               providerKey("domain-2", k, 1),
		"generation":           providerKey("domain-1", k, 2),
		"generation and ID":    providerKey("domain-1", Key{k.Namespace, k.Tool, k.Caller, k.IntentID + "1"}, 1),
		"domain and namespace": providerKey("domain-1n", Key{"s", k.Tool, k.Caller, k.IntentID}, 1),
	} {
		if other == one {
			t.Errorf("the %s makes no difference", name)
		}
	}
}

func TestTheProvidersKeyIsTheSameForEveryAttempt(t *testing.T) {
	s := tell(t)
	c := s.call("intent-1", "order/9")
	first := s.send(c)
	if want := providerKey(s.id.KeyDomain, c.Key, 1); first.ProviderKey != want {
		t.Fatalf("%s, want %s", first.ProviderKey, want)
	}
	s.settle(first, unreachable())
	s.pass(storyWait)
	// Also once the store was accepted with another domain, or a release has come between.
	s.id.KeyDomain = "domain-2"
	s.restart()
	second := s.send(c)
	s.settle(second, lost())
	s.sweep()
	s.pass(storyWait)
	s.sweep()
	s.take(c, Release)
	third := s.send(c)
	if second.ProviderKey != first.ProviderKey || third.ProviderKey != first.ProviderKey {
		t.Fatalf("%s, %s, %s", first.ProviderKey, second.ProviderKey, third.ProviderKey)
	}
}

func TestNamesOfHolds(t *testing.T) {
	k := lookalikes[0]
	for _, k := range append([]Key{{strings.Repeat("n", 63), strings.Repeat("t", 63), strings.Repeat("c", 300), strings.Repeat("/ÄÖ ", 60)}}, lookalikes...) {
		for _, n := range []int{1, 64, 1 << 30} {
			name := HoldName(k, n)
			if bad := validation.IsDNS1123Subdomain(name); len(bad) > 0 {
				t.Errorf("%q: %v", name, bad)
			}
			if strings.Contains(name, ".") {
				t.Errorf("%q has more than one label", name)
			}
			if !strings.HasPrefix(name, k.Tool+"-") {
				t.Errorf("%q does not begin with its tool", name)
			}
		}
	}
	// Objects of this name exist in clusters.
	if got, want := HoldName(k, 3), "tool-ibsssqhhkcwaawkjwfxltdly53-3"; got != want {
		t.Errorf("%q, it was %q", got, want)
	}
}

func TestEngines(t *testing.T) {
	r := NewEngines()
	if _, err := r.Get("support", "payments"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a store that nobody has opened: %v", err)
	}
	a, b := New(nil, store.Identity{Epoch: "a"}, Options{}), New(nil, store.Identity{Epoch: "b"}, Options{})
	r.Put("support", "payments", a)
	r.Put("sales", "payments", b)
	r.Put("support", "other", b)
	r.Fail("sales", "broken", store.ErrMemoryLost)
	if got, err := r.Get("support", "payments"); err != nil || got != a || got.Identity().Epoch != "a" {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := r.Get("sales", "broken"); !errors.Is(err, store.ErrMemoryLost) || got != nil {
		t.Errorf("%v, %v", got, err)
	}
	var all []string
	for _, s := range r.All() {
		all = append(all, s.Namespace+"/"+s.Store)
	}
	if got := strings.Join(all, " "); got != "sales/payments support/other support/payments" {
		t.Errorf("serves %s", got)
	}
	r.Fail("support", "payments", store.ErrUnavailable)
	if got, err := r.Get("support", "payments"); err == nil || got != nil {
		t.Error("a store that failed is still served")
	}
	r.Put("support", "payments", b)
	if got, err := r.Get("support", "payments"); err != nil || got != b {
		t.Errorf("a store that came back: %v, %v", got, err)
	}
	r.Remove("support", "payments")
	if _, err := r.Get("support", "payments"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a store that was closed: %v", err)
	}
}

func TestAPackedHeaderIsTheSame(t *testing.T) {
	sum := strings.Repeat("0123456789abcdef", 4)
	for _, hash := range []string{"", "h", "t", "sha256:", "sha256:" + sum, "sha256:" + strings.ToUpper(sum), "sha256:" + sum + "0", "sha256:" + sum[1:] + "g", "h" + sum[:32], sum[:32], "sha512:" + sum} {
		for _, k := range lookalikes {
			h := header{
				Namespace: k.Namespace, Tool: k.Tool, Caller: k.Caller, IntentID: k.IntentID, CallerUID: "uid-1", State: Held,
				Scope: scopeOf(t, "order/9"), Fingerprint: hash, IdentityHash: hash, AmountHash: hash, RecipientHash: hash,
			}
			packed := h.pack()
			if got, err := decodeHeader(&store.Record{Key: k.String(), Header: packed}); err != nil || !reflect.DeepEqual(got, h) {
				t.Fatalf("%+v became %+v (%v), by %q", h, got, err, packed)
			}
		}
	}
	packed := (&header{CallerUID: "u", State: Held, Fingerprint: "sha256:" + sum}).pack()
	for _, key := range []string{"", "k", "2:ns1:t1:c", "2:ns1:t1:c1:i1:x", "2:ns1:t1:c9:i", "2:ns1:t1:c-1:i"} {
		if _, err := decodeHeader(&store.Record{Key: key, Header: packed}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("under %q: %v", key, err)
		}
	}
}
