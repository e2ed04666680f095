// What is written of a record is read again, whole or not at all.

package guard

import (
	"bytes"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// fill sets what v holds: every field if often is 1, otherwise every second or third.
func fill(r *rand.Rand, v reflect.Value, often int) {
	if v.Kind() != reflect.Struct && r.IntN(often) > 0 {
		return
	}
	switch v.Interface().(type) {
	case time.Time:
		t := time.Unix([]int64{0, 1, -1, 1 << 40, r.Int64N(4e9), r.Int64N(4e9)}[r.IntN(6)], r.Int64N(1e9)).UTC()
		if r.IntN(4) == 0 {
			t = t.Truncate(time.Microsecond)
		}
		v.Set(reflect.ValueOf(t))
		return
	case []byte:
		b := make([]byte, 1+r.IntN(40))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		v.SetBytes(b)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(r, v.Field(i), often)
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(r, v.Elem(), often)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1+r.IntN(3), 3))
		for i := range v.Len() {
			fill(r, v.Index(i), often)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 1 + r.IntN(3) {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(r, key, 1)
			fill(r, value, often)
			v.SetMapIndex(key, value)
		}
	case reflect.String:
		texts := []string{"a", "customer/c1/order/9", `"quoted" \ back`, "<&>", "ümlaut \u2028", "line\nbreak\x00", "bad \xff", "{[,:]}", strings.Repeat("x", 300)}
		v.SetString(texts[r.IntN(len(texts))])
	case reflect.Int, reflect.Int64:
		v.SetInt([]int64{1, 42, -7, 1 << 40, -1 << 63, 1<<63 - 1}[r.IntN(6)])
	case reflect.Bool:
		v.SetBool(true)
	default:
		panic("a field of kind " + v.Kind().String() + ": let it be filled here")
	}
}

// TestEveryFieldOfARecordIsKept fails too if a struct has a field that its list lacks.
func TestEveryFieldOfARecordIsKept(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 5000 {
		var h, gotHeader header
		var b, gotBody body
		often := 1 + i%3
		fill(r, reflect.ValueOf(&h).Elem(), often)
		h.Namespace, h.Tool, h.Caller, h.IntentID = "", "", "", "" // the key says them
		fill(r, reflect.ValueOf(&b).Elem(), often)
		if err := unpack(h.pack(), &gotHeader, (*header).fields); err != nil || !reflect.DeepEqual(gotHeader, h) {
			t.Fatalf("%v:\n%+v\nwant:\n%+v", err, gotHeader, h)
		}
		packed := b.pack()
		if err := unpack(packed, &gotBody, (*body).fields); err != nil || !reflect.DeepEqual(gotBody, b) {
			t.Fatalf("%v:\n%+v\nwant:\n%+v", err, gotBody, b)
		}
		if again := gotBody.pack(); !bytes.Equal(again, packed) {
			t.Fatalf("%q, and written again %q", packed, again)
		}
	}
}

// some is a body with something of every kind.
func some() *body {
	return &body{
		ProviderKey: "k", Attempts: []attempt{{Number: 1, Nonce: "n"}, {Number: 2, Started: time.Unix(1, 2)}}, Expired: true, Winner: -3,
		Current:  &hold{Reasons: []Reason{ExactMatch, ""}},
		Response: &Response{Status: 200, Header: map[string][]string{"A": {"b", "c"}}, Body: []byte("x"), Digest: "sha256:" + strings.Repeat("0a", 32)},
	}
}

func TestADamagedRecordIsRefused(t *testing.T) {
	whole := some().pack()
	var b body
	for i := range whole {
		other := bytes.Clone(whole)
		other[i] ^= 0x40
		for name, damaged := range map[string][]byte{"cut": whole[:i], "longer": append(bytes.Clone(whole), whole[:i+1]...), "changed": other} {
			if unpack(damaged, &b, (*body).fields) == nil {
				t.Errorf("%s at %d was read", name, i)
			}
		}
	}
	if unpack(nil, &b, (*body).fields) == nil {
		t.Error("nothing was read")
	}
}

// Whatever the bytes are, if their checksum is right, they are read or refused, and
// what was read is written in the same way again.
func TestBytesThatAreNoRecord(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	whole, read := some().pack(), 0
	for range 100_000 {
		damaged := bytes.Clone(whole)
		for range 1 + r.IntN(3) {
			switch at := contentAt + r.IntN(len(damaged)-contentAt); r.IntN(3) {
			case 0:
				damaged[at] = byte(r.Uint32())
			case 1:
				damaged = damaged[:at+1]
			default:
				damaged = append(damaged[:at:at], append([]byte{byte(r.Uint32())}, damaged[at:]...)...)
			}
		}
		var b, again body
		if unpack(seal(damaged), &b, (*body).fields) != nil {
			continue
		}
		read++
		if err := unpack(b.pack(), &again, (*body).fields); err != nil || !bytes.Equal(b.pack(), again.pack()) {
			t.Fatalf("%+v became %+v, %v", b, again, err)
		}
	}
	if read < 1000 {
		t.Errorf("only %d were read", read)
	}
}

func TestWhatAnotherVersionWrites(t *testing.T) {
	build := func(parts ...[]byte) []byte {
		return seal(append(make([]byte, contentAt), bytes.Join(parts, nil)...))
	}
	number := func(num protowire.Number, n uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, num, protowire.VarintType), n)
	}
	text := func(num protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(nil, num, protowire.BytesType), s)
	}
	for name, b := range map[string][]byte{
		"nothing":                build(),
		"a field that is new":    build(number(5, 2), text(900, "new"), text(900, "and again"), number(901, 1)),
		"one within":             build(text(4, string(append(number(1, 2), number(900, 7)...)))),
		"a zero that is written": build(number(5, 0), text(13, "")),
	} {
		var got body
		if err := unpack(b, &got, (*body).fields); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	format := build()
	format[0]++
	for name, b := range map[string][]byte{
		"another format":         format,
		"an order of its own":    build(number(14, 2), number(5, 2)),
		"a field that is twice":  build(number(5, 2), number(5, 2)),
		"twice, with one behind": build(number(5, 2), number(5, 2), number(14, 2)),
		"a number for a text":    build(number(3, 2)),
		"a text for a number":    build(text(5, "2")),
		"a text for a struct":    build(text(1, "text")),
		"a time that is none":    build(text(10, "\x02\xff\xff\xff\xff\x7f")),
		"a time with more":       build(text(10, "\x02\x02\x02")),
		"a hash that is none":    build(text(9, string(text(5, "habc")))),
		"a length beyond itself": build([]byte{4<<3 | 2, 9, 1}),
	} {
		var got body
		if err := unpack(b, &got, (*body).fields); err == nil {
			t.Errorf("%s: read as %+v", name, got)
		}
	}
}
