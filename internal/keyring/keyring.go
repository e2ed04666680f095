// Package keyring seals the requests that are kept with records, so that whoever reads a
// store, its backups or its replicas learns nothing of them, and nobody can have another
// request sent in their place.
//
// A ring is a set of keys with names, of which one is current: it seals. All of them open,
// so that a key can be replaced while something that it sealed is still kept. What is sealed
// names its key, and is bound to what it was sealed for. Each sealing has a key of its own,
// derived with random bytes, so that there is no number of them after which a key must be
// replaced (NIST SP 800-38D, section 8.3, bounds those under one key of AES-GCM).
package keyring

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"regexp"
	"slices"
)

const (
	// CurrentEntry names the key that seals.
	CurrentEntry = "current"
	// FirstKey is the name of the key that Generate makes.
	FirstKey = "key-1"
	// KeySize is the length of every key, in bytes: AES-256.
	KeySize = 32

	maxKeys  = 64
	format   = 1
	saltSize = 32
	// What the derived keys are for.
	forRequest    = "holdfast request"
	forCredential = "holdfast credential"
)

var (
	// ErrUnusable: these are no keys with which anything could be sealed.
	ErrUnusable = errors.New("the request keys cannot be used")
	// ErrNoKey: the key with which it was sealed is not in the ring.
	ErrNoKey = errors.New("the key with which the request was sealed is not known")
	// ErrNotSealed: it was not sealed for this, or has been changed since.
	ErrNotSealed = errors.New("the kept request is not what was sealed for this")

	namePattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
)

// Ring never changes.
type Ring struct {
	current string
	keys    map[string][]byte
}

// Generate makes the entries of a new ring.
func Generate() map[string][]byte {
	key := make([]byte, KeySize)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	return map[string][]byte{CurrentEntry: []byte(FirstKey), FirstKey: key}
}

// New reads the entries of a ring: the name of the current key, and all keys by their names.
func New(entries map[string][]byte) (*Ring, error) {
	r := &Ring{current: string(bytes.TrimSpace(entries[CurrentEntry])), keys: map[string][]byte{}}
	if len(entries) > maxKeys+1 {
		return nil, fmt.Errorf("%w: there are more than %d", ErrUnusable, maxKeys)
	}
	for name, key := range entries {
		switch {
		case name == CurrentEntry:
		case !namePattern.MatchString(name):
			return nil, fmt.Errorf("%w: %q is not the name of a key", ErrUnusable, name)
		case len(key) != KeySize:
			return nil, fmt.Errorf("%w: the key %q has %d bytes, and must have %d", ErrUnusable, name, len(key), KeySize)
		default:
			r.keys[name] = slices.Clone(key)
		}
	}
	if r.keys[r.current] == nil {
		return nil, fmt.Errorf("%w: the entry %q must name one of the keys, and names %q", ErrUnusable, CurrentEntry, r.current)
	}
	return r, nil
}

// Seal seals a request together with a mark of the credential with which it is sent, bound
// to what it is for.
func (r *Ring) Seal(request []byte, credential string, bound []byte) ([]byte, error) {
	head := make([]byte, 0, 2+len(r.current)+saltSize)
	head = append(append(head, format, byte(len(r.current))), r.current...)
	salt := make([]byte, saltSize)
	_, _ = rand.Read(salt) // never fails (crypto/rand)
	head = append(head, salt...)
	aead, err := derived(r.keys[r.current], salt)
	if err != nil {
		return nil, err
	}
	mark, err := markOf(r.keys[r.current], salt, credential)
	if err != nil {
		return nil, err
	}
	plain := append(mark, request...)
	// The key is this sealing's own, so its one nonce may be any.
	return aead.Seal(head, make([]byte, aead.NonceSize()), plain, append(bytes.Clone(head), bound...)), nil
}

// Open gives the request back. same says that this is the credential with which it was sent.
func (r *Ring) Open(sealed []byte, credential string, bound []byte) (request []byte, same bool, err error) {
	if len(sealed) < 2 || sealed[0] != format || len(sealed) < 2+int(sealed[1])+saltSize {
		return nil, false, ErrNotSealed
	}
	at := 2 + int(sealed[1])
	name, head, salt := string(sealed[2:at]), sealed[:at+saltSize], sealed[at:at+saltSize]
	key := r.keys[name]
	if key == nil {
		return nil, false, fmt.Errorf("%w: %q", ErrNoKey, name)
	}
	aead, err := derived(key, salt)
	if err != nil {
		return nil, false, err
	}
	plain, err := aead.Open(nil, make([]byte, aead.NonceSize()), sealed[len(head):], append(bytes.Clone(head), bound...))
	if err != nil || len(plain) < sha256.Size {
		return nil, false, ErrNotSealed
	}
	mark, err := markOf(key, salt, credential)
	if err != nil {
		return nil, false, err
	}
	return plain[sha256.Size:], hmac.Equal(mark, plain[:sha256.Size]), nil
}

func derived(key, salt []byte) (cipher.AEAD, error) {
	own, err := hkdf.Key(sha256.New, key, salt, forRequest, KeySize)
	if err != nil {
		return nil, fmt.Errorf("derive the key of a request: %w", err)
	}
	block, err := aes.NewCipher(own)
	if err != nil {
		return nil, fmt.Errorf("make the cipher of a request: %w", err)
	}
	return cipher.NewGCM(block)
}

// markOf tells credentials apart and says nothing of them.
func markOf(key, salt []byte, credential string) ([]byte, error) {
	own, err := hkdf.Key(sha256.New, key, salt, forCredential, KeySize)
	if err != nil {
		return nil, fmt.Errorf("derive the key of a credential's mark: %w", err)
	}
	h := hmac.New(sha256.New, own)
	_, _ = h.Write([]byte(credential)) // a hash takes all
	return h.Sum(nil), nil
}

// Fixed is a ring that is never replaced, where the store does not outlive the process.
type Fixed struct{ Keys *Ring }

// Ring gives it.
func (f Fixed) Ring(context.Context) (*Ring, error) { return f.Keys, nil }

// Reread gives it.
func (f Fixed) Reread(context.Context) (*Ring, error) { return f.Keys, nil }
