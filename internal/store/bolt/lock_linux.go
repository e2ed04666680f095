package bolt

// Who holds a file's lock, for the error that tells whom to stop. Linux lists
// all flocks with process and inode.

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// lockHolder describes the process that has the file at path locked, as well as
// it can be told: one in another container or on another node is not listed.
func lockHolder(path string) string {
	const unknown = "another process, maybe of another container or still shutting down"
	info, err := os.Stat(path)
	if err != nil {
		return unknown
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return unknown
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return unknown
	}
	// 1: FLOCK  ADVISORY  WRITE 3504 fe:00:1836029 0 EOF
	inode := fmt.Sprintf(":%d", stat.Ino)
	for line := range strings.Lines(string(locks)) {
		f := strings.Fields(line)
		if len(f) < 6 || f[1] != "FLOCK" || !strings.HasSuffix(f[5], inode) || f[4] == "0" || f[4] == "-1" {
			continue
		}
		name, err := os.ReadFile("/proc/" + f[4] + "/comm")
		if err != nil {
			return "process " + f[4]
		}
		return fmt.Sprintf("process %s (%s)", f[4], strings.TrimSpace(string(name)))
	}
	return unknown
}
