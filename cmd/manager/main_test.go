package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// A process that is told to end goes on for the delay, once others were told to go elsewhere.
func TestTheEndComesLater(t *testing.T) {
	told, tell := context.WithCancel(t.Context())
	began := make(chan time.Time, 1)
	const delay = 300 * time.Millisecond
	ending := later(told, delay, func() { began <- time.Now() })
	select {
	case <-began:
		t.Fatal("it began before it was told")
	case <-ending.Done():
		t.Fatal("it ended before it was told")
	default:
	}
	tell()
	at := <-began
	if ending.Err() != nil {
		t.Error("it ended when it was told to, and served nobody after that")
	}
	<-ending.Done()
	if went := time.Since(at); went < delay {
		t.Errorf("it ended after %s, should after %s", went, delay)
	}
	if same := later(told, 0, nil); same != told {
		t.Error("without a delay it ends at once")
	}
}

func TestFlagsThatDoNotGoTogether(t *testing.T) {
	good := flags{
		controllers: true, gateway: true, namespace: "holdfast-system", dataDir: "/data",
		settlement: minSettlement, margin: minMargin, grace: minGrace, draining: minDrain, storeTimeout: minStore, collectAfter: minCollect,
	}
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for says, change := range map[string]func(*flags){
		"without a role":     func(f *flags) { f.controllers, f.gateway = false, false },
		"cannot be negative": func(f *flags) { f.leaving = -1 },
		"nobody comes":       func(f *flags) { f.gateway, f.leaving = false, time.Second },
		"--gateway-service":  func(f *flags) { f.controllers, f.service = false, "holdfast-gateway" },
		"name the Service":   func(f *flags) { f.serviceNames = "pay.example.com" },
		"--drain-timeout":    func(f *flags) { f.draining = time.Millisecond },
	} {
		f := good
		change(&f)
		if err := f.check(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("should say %q: %v", says, err)
		}
	}
}

// The manifests give flags that there are and that go together, and let a pod live for as long as it may take to end.
func TestTheFlagsOfTheManifests(t *testing.T) {
	for file, gateway := range map[string]bool{"manager/controllers.yaml": false, "gateway/gateway.yaml": true} {
		t.Run(file, func(t *testing.T) {
			content, err := os.ReadFile(filepath.Join("../../config", filepath.FromSlash(file)))
			if err != nil {
				t.Fatal(err)
			}
			first, _, _ := strings.Cut(string(content), "\n---\n")
			var d appsv1.Deployment
			if err := yaml.UnmarshalStrict([]byte(first), &d); err != nil {
				t.Fatal(err)
			}
			pod := d.Spec.Template.Spec
			var args []string
			for _, arg := range pod.Containers[0].Args {
				args = append(args, strings.NewReplacer("$(NAMESPACE)", "holdfast-system", "$(GATEWAY_SERVICE)", "holdfast-gateway").Replace(arg))
			}
			var f flags
			fs := flag.NewFlagSet("manager", flag.ContinueOnError)
			f.bind(fs)
			if err := fs.Parse(args); err != nil {
				t.Fatal(err)
			}
			if err := f.check(); err != nil || fs.NArg() > 0 || strings.Contains(strings.Join(args, " "), "$") {
				t.Fatalf("%v: %v", args, err)
			}
			if f.gateway != gateway || f.controllers == gateway || f.leaderElect == gateway || f.insecureHTTP || f.loopback || !f.metricsSecure || f.metrics == "0" {
				t.Errorf("%+v", f)
			}
			// The longest timeout that a tool may have.
			if longest := 5 * time.Minute; gateway && (f.draining < longest+f.settlement+f.margin || f.leaving == 0 || f.cert == "" || f.key == "") {
				t.Errorf("the longest attempt and its settlement are cut off after %s: %+v", f.draining, f)
			}
			if !gateway && f.service == "" {
				t.Error("nobody makes a certificate")
			}
			if grace := time.Duration(ptr.Deref(pod.TerminationGracePeriodSeconds, 30)) * time.Second; grace < f.leaving+f.draining+hangs+5*time.Second {
				t.Errorf("the pod is killed after %s, and may take %s", grace, f.leaving+f.draining+hangs)
			}
		})
	}
}
