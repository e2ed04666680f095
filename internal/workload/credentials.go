// This file is the Secret of a deployed store: the passwords, and what follows from them.
//
// What must hold: a password is in the Secret before the server accepts it, and the server
// accepts every password that the Secret shows to clients. So a rotation has three writes:
// the next password beside the present one; then, once the server accepts it, in the place
// of the present one, which stays as the previous; then the previous is taken away.

package workload

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

// The keys of the Secret.
const (
	KeyUsername = "username"
	KeyPassword = "password"
	// KeyPreviousPassword is the one before, while clients may still hold it.
	KeyPreviousPassword = "previous-password"
	// keyNextPassword is not for clients: the server may not accept it yet.
	keyNextPassword = "next-password"
	// KeyAdminPassword is the operator's own, to set the others.
	KeyAdminPassword = "admin-password"
	// KeyProbePassword is that of the probes of a Redis.
	KeyProbePassword = "probe-password"
	// KeyUsersACL is the file of users of a Redis, with hashes for passwords.
	KeyUsersACL = "users.acl"
	// DSNKey is all that a client of PostgreSQL needs.
	DSNKey = "dsn"
	// KeyCA is where cert-manager puts the authority's certificate.
	KeyCA = "ca.crt"
)

// The annotations of the Secret.
const (
	// acceptedAnnotation tells which server has accepted which passwords.
	acceptedAnnotation = v1alpha1.GroupName + "/accepted"
	// rotatedAnnotation is when the password was exchanged.
	rotatedAnnotation = v1alpha1.GroupName + "/rotated-at"
	// What is remembered of the store: which one it is, the epoch and key domain of its records, the
	// last loss of them that was accepted, how far it had come, and an acceptance that was there
	// before the loss.
	memoryOfAnnotation  = v1alpha1.GroupName + "/memory-of"
	epochAnnotation     = v1alpha1.GroupName + "/epoch"
	KeyDomainAnnotation = v1alpha1.GroupName + "/key-domain"
	lossAnnotation      = v1alpha1.GroupName + "/loss"
	seenAnnotation      = v1alpha1.GroupName + "/seen"
	spentAnnotation     = v1alpha1.GroupName + "/spent"
)

// StoreUser is the name under which clients connect, and that of the database.
const StoreUser = "holdfast"

// PreviousFor is how long the previous password is accepted after a rotation: clients have
// seen the new one by then, and so has the kubelet, which shows the file of users to the pod.
const PreviousFor = 2 * time.Minute

// password has 32 random characters, about 160 bits, none of which needs escaping anywhere.
func password() string { return (rand.Text() + rand.Text())[:32] }

// Credentials are the Secret of one store.
type Credentials struct {
	store  *v1alpha1.IdempotencyStore
	Secret *corev1.Secret
}

// NewCredentials makes the Secret of a store that has none. A rotation that was asked for
// before there was a password is done with it.
func NewCredentials(store *v1alpha1.IdempotencyStore) Credentials {
	labels := Labels(store)
	labels[v1alpha1.CredentialsLabel] = "true"
	c := Credentials{store: store, Secret: &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: store.Namespace, Name: SecretName(store), Labels: labels, Annotations: map[string]string{}},
		Type:       corev1.SecretTypeOpaque,
		Data: map[string][]byte{
			KeyUsername: []byte(StoreUser), KeyPassword: []byte(password()), KeyAdminPassword: []byte(password()),
		},
	}}
	if c.redis() {
		c.Secret.Data[KeyProbePassword] = []byte(password())
	}
	if value := store.Annotations[v1alpha1.RotatePasswordAnnotation]; value != "" {
		c.Secret.Annotations[v1alpha1.RotatePasswordAnnotation] = value
	}
	c.Derive()
	return c
}

// ReadCredentials takes a copy of a Secret that is there.
func ReadCredentials(store *v1alpha1.IdempotencyStore, secret *corev1.Secret) (Credentials, error) {
	c := Credentials{store: store, Secret: secret.DeepCopy()}
	keys := []string{KeyUsername, KeyPassword, KeyAdminPassword}
	if c.redis() {
		keys = append(keys, KeyProbePassword)
	}
	for _, key := range keys {
		if len(secret.Data[key]) == 0 {
			return Credentials{}, fmt.Errorf("it has no value under the key %q", key)
		}
	}
	if u := c.text(KeyUsername); u != StoreUser {
		return Credentials{}, fmt.Errorf("its %s is %q, and the server's is %q", KeyUsername, u, StoreUser)
	}
	if secret.Labels[v1alpha1.CredentialsLabel] != "true" {
		return Credentials{}, fmt.Errorf("it does not carry the label %s: \"true\"", v1alpha1.CredentialsLabel)
	}
	for _, key := range []string{KeyPassword, KeyPreviousPassword, keyNextPassword, KeyAdminPassword, KeyProbePassword} {
		if strings.ContainsFunc(c.text(key), func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return Credentials{}, fmt.Errorf("its %s has a control character", key)
		}
	}
	return c, nil
}

// Kept is what the Secret says of the store's memory. The Secret outlives the store's object, and
// the operator's namespace. It is the word of whoever can write in the store's namespace, and
// counts for that store alone.
type Kept struct{ Epoch, KeyDomain, Loss, Seen, Spent string }

// Kept reads it. What a copy of another store's Secret says is of that store, and is not read.
func (c Credentials) Kept() Kept {
	of := c.Secret.Annotations
	if of[memoryOfAnnotation] != c.memoryOf() {
		return Kept{}
	}
	return Kept{Epoch: of[epochAnnotation], KeyDomain: of[KeyDomainAnnotation], Loss: of[lossAnnotation], Seen: of[seenAnnotation], Spent: of[spentAnnotation]}
}

// Keep writes it. A loss of the store's own is never taken away: it stays where k has none.
func (c Credentials) Keep(k Kept) {
	if k.Loss == "" {
		k.Loss = c.Kept().Loss
	}
	for name, value := range map[string]string{
		memoryOfAnnotation: c.memoryOf(), epochAnnotation: k.Epoch, KeyDomainAnnotation: k.KeyDomain,
		lossAnnotation: k.Loss, seenAnnotation: k.Seen, spentAnnotation: k.Spent,
	} {
		if c.annotate(name, value); value == "" {
			delete(c.Secret.Annotations, name)
		}
	}
}

// Identity is k without what changes as the store goes on.
func (k Kept) Identity() Kept {
	k.Seen = ""
	return k
}

// Says says whether k has all of o: a loss in k stays where o has none.
func (k Kept) Says(o Kept) bool {
	if o.Loss == "" {
		o.Loss = k.Loss
	}
	return k == o
}

func (c Credentials) memoryOf() string { return c.store.Namespace + "/" + c.store.Name }

func (c Credentials) redis() bool { return c.store.Spec.Redis != nil }

func (c Credentials) text(key string) string { return string(c.Secret.Data[key]) }

// Derive writes what follows from the passwords, and says whether that was not there.
func (c Credentials) Derive() bool {
	key, value := DSNKey, c.dsn()
	if c.redis() {
		key, value = KeyUsersACL, c.usersACL()
	}
	if c.text(key) == value {
		return false
	}
	c.Secret.Data[key] = []byte(value)
	return true
}

func (c Credentials) dsn() string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(StoreUser, c.text(KeyPassword)), Host: Endpoint(c.store), Path: "/" + StoreUser,
		// Behind the NetworkPolicy: the server has no certificate.
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// usersACL is what a Redis reads at its start.
func (c Credentials) usersACL() string {
	var b strings.Builder
	// Nobody is it: it is off, and has no password. But the server itself is it while it reads its log at the start,
	// and leaves out of a transaction what this user may not do: of all records nothing would be left.
	fmt.Fprintf(&b, "user default off resetpass %s\n", logRights)
	fmt.Fprintf(&b, "user %s on %s %s\n", StoreUser, strings.Join(c.AcceptedHashes(), " "), storeRights)
	fmt.Fprintf(&b, "user %s on #%s %s\n", redisAdmin, hash(c.text(KeyAdminPassword)), adminRights)
	fmt.Fprintf(&b, "user %s on #%s %s\n", redisProbeUser, hash(c.text(KeyProbePassword)), probeRights)
	return b.String()
}

func hash(password string) string {
	sum := sha256.Sum256([]byte(password))
	return hex.EncodeToString(sum[:])
}

// AcceptedHashes are those of all passwords that a Redis is to accept, as ACL rules.
func (c Credentials) AcceptedHashes() []string {
	var out []string
	for _, key := range []string{keyNextPassword, KeyPassword, KeyPreviousPassword} {
		if p := c.text(key); p != "" {
			if h := "#" + hash(p); !slices.Contains(out, h) {
				out = append(out, h)
			}
		}
	}
	slices.Sort(out)
	return out
}

// Newest is the one password that a PostgreSQL is to accept.
func (c Credentials) Newest() string {
	if next := c.text(keyNextPassword); next != "" {
		return next
	}
	return c.text(KeyPassword)
}

// Admin is the operator's own user and password.
func (c Credentials) Admin() (user, password string) {
	if c.redis() {
		return redisAdmin, c.text(KeyAdminPassword)
	}
	return PostgresSuperuser, c.text(KeyAdminPassword)
}

// accepted names the passwords that are to be accepted, and the server that is to accept them.
// It tells nothing of the passwords, which are too long to be guessed.
func (c Credentials) accepted(server string) string {
	passwords := []string{c.Newest()}
	if c.redis() {
		passwords = c.AcceptedHashes()
	}
	return hash(fmt.Sprintf("%q of %q", passwords, server))
}

// Accepted says whether this server is known to accept what it is to accept.
func (c Credentials) Accepted(server string) bool {
	return c.Secret.Annotations[acceptedAnnotation] == c.accepted(server)
}

// Accept notes that this server accepts it now. A next password takes its place.
func (c Credentials) Accept(server string, now time.Time) {
	c.annotate(acceptedAnnotation, c.accepted(server))
	next := c.Secret.Data[keyNextPassword]
	if len(next) == 0 {
		return
	}
	c.Secret.Data[KeyPreviousPassword] = c.Secret.Data[KeyPassword]
	c.Secret.Data[KeyPassword] = next
	delete(c.Secret.Data, keyNextPassword)
	c.annotate(rotatedAnnotation, now.UTC().Format(time.RFC3339))
	c.Derive()
}

// Rotating says whether a rotation has begun and is not at its end.
func (c Credentials) Rotating() bool {
	return c.text(keyNextPassword) != "" || c.text(KeyPreviousPassword) != ""
}

// Rotate takes the next step of a rotation that a write alone can take, and says whether there
// was one: it begins, or it takes the previous password away.
func (c Credentials) Rotate(now time.Time) bool {
	if c.text(keyNextPassword) != "" {
		return false // the server comes first
	}
	if c.text(KeyPreviousPassword) != "" {
		at, err := time.Parse(time.RFC3339, c.Secret.Annotations[rotatedAnnotation])
		if err == nil && now.Sub(at) < PreviousFor {
			return false
		}
		delete(c.Secret.Data, KeyPreviousPassword)
		delete(c.Secret.Annotations, rotatedAnnotation)
		c.Derive()
		return true
	}
	wanted := c.store.Annotations[v1alpha1.RotatePasswordAnnotation]
	if wanted == "" || c.Secret.Annotations[v1alpha1.RotatePasswordAnnotation] == wanted {
		return false
	}
	c.Secret.Data[keyNextPassword] = []byte(password())
	// With the next password in the Secret the wish is taken up: a newer one is another rotation.
	c.annotate(v1alpha1.RotatePasswordAnnotation, wanted)
	c.Derive()
	return true
}

func (c Credentials) annotate(name, value string) {
	if c.Secret.Annotations == nil {
		c.Secret.Annotations = map[string]string{}
	}
	c.Secret.Annotations[name] = value
}

// CheckOwn says why a Secret of this name is not one that was made for a store of this name.
func CheckOwn(store *v1alpha1.IdempotencyStore, secret *corev1.Secret) error {
	if secret.Labels[ManagedByLabel] != ManagedBy || secret.Labels[StoreLabel] != store.Name {
		return errors.New("it was not made by the operator for this store")
	}
	return nil
}
