// Records are written and read by a library that is faster than encoding/json. What it writes
// and reads must be the same, also of texts that are damaged.

package guard

import (
	"bytes"
	stdjson "encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	json "github.com/goccy/go-json"
)

// fill sets what v holds: every field if often is 1, otherwise every second or third.
func fill(r *rand.Rand, v reflect.Value, often int) {
	if v.Kind() != reflect.Struct && r.IntN(often) > 0 {
		return
	}
	switch v.Interface().(type) {
	case time.Time:
		t := time.Unix(r.Int64N(4e9), r.Int64N(1e9)).UTC()
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

func compare[T any](t *testing.T, v *T) {
	t.Helper()
	want, err := stdjson.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(v)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("written (%v):\n%s\nwant:\n%s", err, got, want)
	}
	var read, again T
	if err := stdjson.Unmarshal(want, &read); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(want, &again); err != nil || !reflect.DeepEqual(read, again) {
		t.Fatalf("read (%v):\n%+v\nwant:\n%+v\nof %s", err, again, read, want)
	}
}

func TestRecordsAreWrittenAndReadAsJSON(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 3000 {
		var h header
		var b body
		often := 1 + i%3
		fill(r, reflect.ValueOf(&h).Elem(), often)
		fill(r, reflect.ValueOf(&b).Elem(), often)
		compare(t, &h)
		compare(t, &b)
	}
}

// What is not as it was written here is read all the same, or refused as ever.
func TestOtherTextsAreLeftToJSON(t *testing.T) {
	whole, err := json.Marshal(&body{ProviderKey: "k", Attempts: []attempt{{Number: 1, Nonce: "n"}}, Response: &Response{Status: 200, Body: []byte("x")}})
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{
		"", "null", "{}", " {}", "{} ", `{"generation":1.0}`, `{"generation":1e1}`, `{"generation":01}`, `{"generation":-0}`, `{"generation":"1"}`,
		`{"unknown":{"a":[1,"]"]},"winner":2}`, `{"winner": 2}`, `{"winner":2,}`, `{"winner":2}{}`, `{"WINNER":2}`, `{"w\u0069nner":2}`, `{"attempts":null}`,
		`{"attempts":[]}`, `{"attempts":[{"n":1},{"n":2}]}`, `{"response":null}`, `{"response":{"body":"eA"}}`, `{"response":{"body":"eA=="}}`, `{"response":{"body":""}}`,
		`{"response":{"header":{"A":null,"B":[],"C":["d"]}}}`, `{"response":{"header":null}}`, `{"settledAt":"2026-01-02T03:04:05+01:00"}`, `{"settledAt":"x"}`,
		`{"settledAt":null}`, `{"current":{"k":1,"words":"}\"{"},"winner":3}`, `{"current":null}`, `{"current":`, `{"ended":[{"k":1}]}`, `{"memory":"\ud800"}`, "{\"memory\":\"\xff\"}",
		"{\"memory\":\"a\nb\"}", `{"memory":"`, `{"memory":"\`, `{"memory"`, `{"memory":`, `{`, `{"markedPaid":falsy}`, `{"markedPaid":false}`,
	}
	for i := range whole {
		texts = append(texts, string(whole[:i]), string(whole[:i])+"x"+string(whole[i:]))
	}
	for _, text := range texts {
		var want, got body
		wantErr := stdjson.Unmarshal([]byte(text), &want)
		err := json.Unmarshal([]byte(text), &got)
		if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v, want %+v, %v", text, got, err, want, wantErr)
		}
	}
}
