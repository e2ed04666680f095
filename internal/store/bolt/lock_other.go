//go:build !linux

package bolt

// Only Linux tells who holds a file's lock.

func lockHolder(string) string {
	return "another process, maybe still shutting down"
}
