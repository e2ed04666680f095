package keyring

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

func ring(t *testing.T, entries map[string][]byte) *Ring {
	t.Helper()
	r, err := New(entries)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestWhatIsSealedIsOpened(t *testing.T) {
	entries := Generate()
	r := ring(t, entries)
	request, bound := []byte(`{"amount":"49.99"}`), []byte("record 1")
	sealed, err := r.Seal(request, "secret-1", bound)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(sealed, []byte("49.99")) || bytes.Contains(sealed, []byte("secret-1")) {
		t.Fatal("it can be read")
	}
	again, err := r.Seal(request, "secret-1", bound)
	if err != nil || bytes.Equal(sealed[len(sealed)-40:], again[len(again)-40:]) {
		t.Fatalf("two sealings are alike, %v", err)
	}
	got, same, err := r.Open(sealed, "secret-1", bound)
	if err != nil || !same || !bytes.Equal(got, request) {
		t.Fatalf("%q, %v, %v", got, same, err)
	}
	if _, same, err := r.Open(sealed, "secret-2", bound); err != nil || same {
		t.Fatalf("another credential counts as the same (%v)", err)
	}
	for i := range sealed {
		broken := bytes.Clone(sealed)
		broken[i] ^= 1
		if _, _, err := r.Open(broken, "secret-1", bound); err == nil {
			t.Fatalf("byte %d was changed, and it opens", i)
		}
	}
	for n := range sealed {
		if _, _, err := r.Open(sealed[:n], "secret-1", bound); err == nil {
			t.Fatalf("cut to %d bytes it opens", n)
		}
	}
	if _, _, err := r.Open(sealed, "secret-1", []byte("record 2")); !errors.Is(err, ErrNotSealed) {
		t.Fatalf("bound to another record: %v", err)
	}
}

func TestAKeyIsReplaced(t *testing.T) {
	entries := Generate()
	old := ring(t, entries)
	bound := []byte("record")
	sealed, err := old.Seal([]byte("one"), "", bound)
	if err != nil {
		t.Fatal(err)
	}
	entries["key-2"] = bytes.Repeat([]byte{7}, KeySize)
	both := ring(t, entries)
	if _, err := both.Seal(nil, "", bound); err != nil {
		t.Fatal(err)
	}
	entries[CurrentEntry] = []byte("key-2\n")
	next := ring(t, entries)
	if got, same, err := next.Open(sealed, "", bound); err != nil || !same || string(got) != "one" {
		t.Fatalf("what the old key sealed: %q, %v, %v", got, same, err)
	}
	other, err := next.Seal([]byte("two"), "", bound)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := old.Open(other, "", bound); !errors.Is(err, ErrNoKey) || !strings.Contains(err.Error(), "key-2") {
		t.Fatalf("a ring without the key: %v", err)
	}
	if got, _, err := both.Open(other, "", bound); err != nil || string(got) != "two" {
		t.Fatalf("a ring that has the key and does not seal with it: %q, %v", got, err)
	}
}

func TestWhatIsNoRing(t *testing.T) {
	key := bytes.Repeat([]byte{7}, KeySize)
	for name, entries := range map[string]map[string][]byte{
		"nothing":        nil,
		"no current one": {"key-1": key},
		"another one":    {CurrentEntry: []byte("key-2"), "key-1": key},
		"a short key":    {CurrentEntry: []byte("key-1"), "key-1": key[1:]},
		"a bad name":     {CurrentEntry: []byte("key-1"), "key-1": key, "a/b": key},
	} {
		if _, err := New(entries); !errors.Is(err, ErrUnusable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
