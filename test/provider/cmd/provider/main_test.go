// The command as a real process: its ledger survives SIGKILL, and SIGTERM ends
// it in good order.

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/holdfast-dev/holdfast/test/provider"
)

// asCommand makes this test binary run the command instead of its tests.
const asCommand = "PROVIDER_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func command(arguments ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], arguments...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	return cmd
}

// start runs the command and reads its address.
func start(t *testing.T, arguments ...string) (*exec.Cmd, string) {
	t.Helper()
	g := NewWithT(t)
	cmd := command(arguments...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(cmd.Start()).To(Succeed())
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	url, err := bufio.NewReader(out).ReadString('\n')
	g.Expect(err).NotTo(HaveOccurred())
	return cmd, strings.TrimSpace(url)
}

// charge returns the id of a charge that was answered.
func charge(url, order, fault string) (string, error) {
	request, err := http.NewRequest(http.MethodPost, url+"/charges",
		io.NopCloser(strings.NewReader(fmt.Sprintf(`{"accountId":"a","orderId":%q,"amount":"0.10"}`, order))))
	if err != nil {
		return "", err
	}
	request.Header.Set(provider.HeaderFault, fault)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	var got provider.Entry
	if err := json.NewDecoder(response.Body).Decode(&got); err != nil {
		return "", err
	}
	if response.StatusCode != http.StatusCreated {
		return "", fmt.Errorf("status %d", response.StatusCode)
	}
	return got.ID, nil
}

func judge(t *testing.T, url string) provider.Ledger {
	t.Helper()
	g := NewWithT(t)
	response, err := http.Get(url + "/ledger")
	g.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = response.Body.Close() }()
	var l provider.Ledger
	g.Expect(json.NewDecoder(response.Body).Decode(&l)).To(Succeed())
	return l
}

func TestTheLedgerSurvivesSIGKILL(t *testing.T) {
	g := NewWithT(t)
	file := filepath.Join(t.TempDir(), "ledger")
	answered := map[string]bool{}
	sent := 0
	for round := range 3 {
		cmd, url := start(t, "--ledger-file", file)
		l := judge(t, url)
		shown := map[string]bool{}
		for _, e := range l.Entries {
			g.Expect(shown).NotTo(HaveKey(e.ID))
			shown[e.ID] = true
		}
		for id := range answered {
			g.Expect(shown).To(HaveKey(id), "round %d: an answered charge is lost", round)
		}
		g.Expect(l.Count).To(BeNumerically("<=", sent))

		// Four clients charge until the process is killed under them.
		var mu sync.Mutex
		var all sync.WaitGroup
		target := len(answered) + 40
		for client := range 4 {
			all.Go(func() {
				for i := 0; ; i++ {
					mu.Lock()
					sent++
					mu.Unlock()
					id, err := charge(url, fmt.Sprintf("%d-%d-%d", round, client, i), "")
					if err != nil {
						return
					}
					mu.Lock()
					answered[id] = true
					mu.Unlock()
				}
			})
		}
		g.Eventually(func() int {
			mu.Lock()
			defer mu.Unlock()
			return len(answered)
		}, 20*time.Second, time.Millisecond).Should(BeNumerically(">=", target))
		g.Expect(cmd.Process.Signal(syscall.SIGKILL)).To(Succeed())
		all.Wait()
		g.Expect(cmd.Wait()).To(HaveOccurred())
	}

	_, url := start(t, "--ledger-file", file)
	l := judge(t, url)
	g.Expect(len(answered)).To(BeNumerically(">=", 120))
	g.Expect(l.Count).To(BeNumerically(">=", len(answered)))
	g.Expect(l.Count).To(BeNumerically("<=", sent))
	g.Expect(l.Totals[provider.Charge]["USD"]).To(Equal(fmt.Sprintf("%d.%d0", l.Count/10, l.Count%10)))
}

func TestSIGTERMLetsRequestsFinish(t *testing.T) {
	g := NewWithT(t)
	file := filepath.Join(t.TempDir(), "ledger")
	cmd, url := start(t, "--ledger-file", file)
	slow := make(chan error, 1)
	hung := make(chan error, 1)
	go func() { _, err := charge(url, "slow", "delay:2s"); slow <- err }()
	go func() { _, err := charge(url, "hung", "lost-answer"); hung <- err }()
	g.Eventually(func() provider.Ledger { return judge(t, url) }, 10*time.Second, time.Millisecond).Should(And(
		HaveField("Count", 1), HaveField("Requests", HaveKeyWithValue("POST /charges", 2))))
	g.Expect(cmd.Process.Signal(syscall.SIGTERM)).To(Succeed())
	g.Expect(<-hung).To(HaveOccurred())
	g.Expect(<-slow).NotTo(HaveOccurred())
	g.Expect(cmd.Wait()).To(Succeed())

	_, url = start(t, "--ledger-file", file)
	g.Expect(judge(t, url).Count).To(Equal(2))
}

func TestWrongArguments(t *testing.T) {
	g := NewWithT(t)
	for _, arguments := range [][]string{
		{"extra"}, {"--window", "-1s"}, {"--listen", "nowhere:x"}, {"--ledger-file", "/dev/null/x"}, {"--unknown"},
	} {
		out, err := command(arguments...).CombinedOutput()
		g.Expect(err).To(HaveOccurred(), "%v: %s", arguments, out)
		g.Expect(string(out)).To(ContainSubstring("provider:"))
	}
}
