// What starts a server takes the volume's lock, or does not start it: the rendered scripts, with
// programs in the image's place that do what they are told. Two servers on one volume are tested with
// real ones, in package controller.

package workload

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-dev/holdfast/api/v1alpha1"
)

func TestStartWithoutTheLock(t *testing.T) {
	real, err := exec.LookPath("flock")
	if err != nil {
		t.Fatalf("flock, of the package util-linux: %v", err)
	}
	for store, s := range map[string]*v1alpha1.IdempotencyStore{
		"redis": redisStore(v1alpha1.RedisDeployment{}), "postgres": postgresStore(v1alpha1.PostgresDeployment{}),
	} {
		for name, c := range map[string]struct {
			// flock is the image's; "": it has none.
			flock string
			// removed: there is no directory of the volume.
			removed bool
			// says has it refused; "": it is started.
			says string
		}{
			"free":                      {flock: `exec ` + real + ` "$@"`},
			"somebody had it":           {flock: `[ "$1" != -n ] || exit 1; exec ` + real + ` "$@"`},
			"no flock":                  {says: "the image has no flock"},
			"no volume":                 {flock: "exit 0", removed: true, says: "holdfast.lock cannot be written"},
			"no locks":                  {flock: `echo "flock: 9: No locks available" >&2; exit 71`, says: "cannot be locked: flock: 9: No locks available"},
			"no locks, found out later": {flock: `exit 1`, says: "cannot be locked"},
			"replaced meanwhile":        {flock: `[ "$1" != -n ] || exit 1; rm "$VOLUME/holdfast.lock"; : >"$VOLUME/holdfast.lock"`, says: "was removed or replaced"},
		} {
			t.Run(store+", "+name, func(t *testing.T) {
				dir := t.TempDir()
				data, bin := filepath.Join(dir, "data"), filepath.Join(dir, "bin")
				o, err := Render(Inputs{Store: s, OperatorNamespace: "holdfast-system"})
				if err != nil {
					t.Fatal(err)
				}
				here := strings.NewReplacer(contentDir, dir, "volume="+DataDir(s), "volume="+data).Replace
				for file, text := range o.ConfigMap.Data {
					write(t, filepath.Join(dir, file), here(text))
				}
				for _, d := range []string{data, bin} {
					if err := os.Mkdir(d, 0o700); err != nil {
						t.Fatal(err)
					}
				}
				// Whatever starts says whether it has the lock: nobody else gets it while it is open.
				server := "#!/bin/sh\n" + real + " -n " + data + "/holdfast.lock true && exit 3; echo RUNS\n"
				for _, program := range []string{"valkey-server", "docker-entrypoint.sh"} {
					write(t, filepath.Join(bin, program), server)
				}
				for _, program := range []string{"id", "rm"} {
					at, err := exec.LookPath(program)
					if err != nil {
						t.Fatal(err)
					}
					if err := os.Symlink(at, filepath.Join(bin, program)); err != nil {
						t.Fatal(err)
					}
				}
				if c.flock != "" {
					write(t, filepath.Join(bin, "flock"), "#!/bin/sh\n"+c.flock+"\n")
				}
				if c.removed {
					if err := os.Remove(data); err != nil {
						t.Fatal(err)
					}
				}
				shell, err := exec.LookPath("sh")
				if err != nil {
					t.Fatal(err)
				}
				command := o.StatefulSet.Spec.Template.Spec.Containers[0].Command
				if len(command) != 2 || command[0] != "sh" {
					t.Fatalf("the container's command is %q", command)
				}
				cmd := exec.Command(shell, here(command[1]), "postgres")
				cmd.Env = []string{"PATH=" + bin, "VOLUME=" + data}
				out, err := cmd.CombinedOutput()
				if started := strings.Contains(string(out), "RUNS"); started != (c.says == "") || started != (err == nil) {
					t.Errorf("started: %v, %v\n%s", started, err, out)
				}
				if !strings.Contains(string(out), c.says) {
					t.Errorf("it should say %q, and says\n%s", c.says, out)
				}
			})
		}
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
}

// A server that waits for one which ends within its grace is not ended meanwhile by its own startup probe, after which
// it would begin again later and later.
func TestWaitIsNotCutShort(t *testing.T) {
	for _, s := range []*v1alpha1.IdempotencyStore{redisStore(v1alpha1.RedisDeployment{}), postgresStore(v1alpha1.PostgresDeployment{})} {
		o, err := Render(Inputs{Store: s, OperatorNamespace: "holdfast-system"})
		if err != nil {
			t.Fatal(err)
		}
		pod := o.StatefulSet.Spec.Template.Spec
		probe := pod.Containers[0].StartupProbe
		if start, grace := int64(*probe.PeriodSeconds)*int64(*probe.FailureThreshold), *pod.TerminationGracePeriodSeconds; start < grace+30 {
			t.Errorf("%s: a server has %d s to begin, and the one before it has %d s to end", Name(s), start, grace)
		}
	}
}
