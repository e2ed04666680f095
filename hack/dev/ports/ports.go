// Package ports chooses ports of the loopback address for servers that are started later,
// such as other processes.
//
// A port that is free when it is chosen may have been taken when its server starts. Who
// chooses one here keeps it from all others that choose here, of this user, until the
// process ends; and the system gives none of these to connections that go out.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// The ports that Free picks from. The system gives those above to connections that go
// out, and one of them would soon be taken while its server is down for a moment.
const first, last = 20000, 32767

// perPort is how many are looked at for each that is wanted.
const perPort = 100

var (
	mu sync.Mutex
	// chosen are the locks of what this process has chosen. The system takes them back
	// when it ends, however it does.
	chosen []*os.File
)

// Free returns ports on which nobody listens now, and that nobody else is given by Free
// as long as this process lives.
func Free(n int) ([]int, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("holdfast-ports-%d", os.Geteuid()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("find a free port: %w", err)
	}
	mu.Lock()
	defer mu.Unlock()
	ports := make([]int, 0, n)
	var why error
	for looked := 0; len(ports) < n; looked++ {
		if looked == n*perPort {
			return nil, fmt.Errorf("find %d free ports from %d to %d: %w", n, first, last, why)
		}
		port := first + rand.IntN(last-first+1)
		lock, err := take(dir, port)
		if err != nil {
			why = err
			continue
		}
		chosen = append(chosen, lock)
		ports = append(ports, port)
	}
	return ports, nil
}

// take locks the port, if nobody else has and nobody listens there.
func take(dir string, port int) (lock *os.File, err error) {
	lock, err = os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("port %d is somebody else's: %w", port, err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	return lock, l.Close()
}
