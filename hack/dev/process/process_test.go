// These tests run real processes: what they are about is what the system does.
package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// sleeper starts a process that would live for long, and ends it with the test.
func sleeper(t *testing.T, s Set, name string) int {
	t.Helper()
	if err := s.Start(name, []string{"sleep", "600"}, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background(), name); err != nil {
			t.Error(err)
		}
	})
	pid, err := s.PID(name)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); !done(); {
		if time.Now().After(limit) {
			t.Fatalf("not within 10s: %s", what)
		}
		<-time.After(poll)
	}
}

func TestAProcessIsFoundAgainAndEnded(t *testing.T) {
	dir := t.TempDir()
	sleeper(t, In(dir), "sleeper")

	again := In(dir) // as another command would
	if !again.Running("sleeper") {
		t.Fatal("it is not found again")
	}
	if err := again.Start("sleeper", []string{"sleep", "600"}, nil); err == nil {
		t.Error("a second one was started under the same name")
	}
	if err := again.Stop(context.Background(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	if again.Running("sleeper") {
		t.Error("it runs after Stop")
	}
	if err := again.Stop(context.Background(), "sleeper"); err != nil {
		t.Errorf("stopping it twice: %v", err)
	}
	if names, err := again.Names(); err != nil || len(names) != 0 {
		t.Errorf("left over: %v, %v", names, err)
	}
}

func TestItHasASessionOfItsOwn(t *testing.T) {
	pid := sleeper(t, In(t.TempDir()), "sleeper")
	group, err := syscall.Getpgid(pid)
	if err != nil {
		t.Fatal(err)
	}
	if group != pid {
		t.Errorf("its process group is %d, so a signal to the starter's group reaches it (pid %d)", group, pid)
	}
}

func TestARecycledPIDIsNeverSignalled(t *testing.T) {
	s := In(t.TempDir())
	pid := sleeper(t, s, "stranger")

	// The record of a process of the same pid that started at another time.
	if err := s.write("ours", record{PID: pid, Started: "another boot/1"}); err != nil {
		t.Fatal(err)
	}
	if s.Running("ours") {
		t.Error("the stranger is taken for ours")
	}
	if err := s.Kill("ours", syscall.SIGKILL); !errors.Is(err, ErrNotRunning) {
		t.Errorf("Kill says %v, want ErrNotRunning", err)
	}
	if err := s.Stop(context.Background(), "ours"); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if !s.Running("stranger") {
		t.Error("the stranger was ended")
	}
}

func TestAKilledProcessIsNotRunning(t *testing.T) {
	s := In(t.TempDir())
	sleeper(t, s, "sleeper")
	if err := s.Kill("sleeper", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "gone after SIGKILL", func() bool { return !s.Running("sleeper") })
	if err := s.Kill("sleeper", syscall.SIGKILL); !errors.Is(err, ErrNotRunning) {
		t.Errorf("a second Kill says %v, want ErrNotRunning", err)
	}
}

func TestAnUncollectedProcessIsNotRunning(t *testing.T) {
	// Its parent is this test, which does not collect its exit status.
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	born, ok := startOf(cmd.Process.Pid)
	if !ok {
		t.Fatal("a running process is not seen")
	}
	r := record{PID: cmd.Process.Pid, Started: born}
	if err := r.signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "gone though nobody has collected it", func() bool { return !r.alive() })
	if err := cmd.Wait(); err == nil {
		t.Error("it was not killed")
	}
}

func TestAStoppedProcessCanBeEnded(t *testing.T) {
	s := In(t.TempDir())
	sleeper(t, s, "sleeper")
	if err := s.Pause(context.Background(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	pid, err := s.PID("sleeper")
	if err != nil {
		t.Fatal(err)
	}
	if still, err := stopped(pid); err != nil || !still {
		t.Errorf("it stands still: %t, %v", still, err)
	}
	start := time.Now()
	if err := s.Stop(context.Background(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took >= grace {
		t.Errorf("took %s: SIGTERM did not reach it", took)
	}
}

func TestEnsureRestartsOnlyWhatDiffers(t *testing.T) {
	s := In(t.TempDir())
	program := filepath.Join(t.TempDir(), "program")
	install := func(content string) {
		t.Helper()
		// As the go command does: a new file under the old name.
		if err := os.WriteFile(program+".new", []byte("#!/bin/sh\n"+content+"\nexec sleep 600\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
	}
	ensure := func(want bool, arg, env string) {
		t.Helper()
		started, err := s.Ensure("it", []string{program, arg}, []string{env})
		if err != nil {
			t.Fatal(err)
		}
		if started != want {
			t.Errorf("started is %v, want %v", started, want)
		}
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background(), "it"); err != nil {
			t.Error(err)
		}
	})
	install("# one")
	ensure(true, "a", "E=1")
	ensure(false, "a", "E=1")
	ensure(true, "b", "E=1")
	ensure(true, "b", "E=2")
	install("# two")
	ensure(true, "b", "E=2")
	ensure(false, "b", "E=2")
	if err := s.Kill("it", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "gone after SIGKILL", func() bool { return !s.Running("it") })
	ensure(true, "b", "E=2")
}

func TestAwaitGivesUpWhenTheProcessEnds(t *testing.T) {
	s := In(t.TempDir())
	if err := s.Start("it", []string{"sh", "-c", "echo the reason; exec sleep 0.2"}, nil); err != nil {
		t.Fatal(err)
	}
	never := func(context.Context) error { return errors.New("not yet") }
	err := s.Await(t.Context(), "it", "it was ready", never)
	if err == nil || !strings.Contains(err.Error(), "the reason") {
		t.Errorf("the error must have the end of the log, it is: %v", err)
	}
}
