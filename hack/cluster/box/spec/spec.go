// Package spec is what a box is told: the contract between who starts it and the box.
package spec

import "os"

// Home is where, in the box, all is that it is given: etc, log, disk and bin; and the
// files that say how far it is.
const Home = "/run/holdfast"

// Spec is one box.
type Spec struct {
	// Name is its host name.
	Name string `json:"name"`
	// Dir is its directory on the machine: etc, log, and disk, which is the box's /var. It
	// has an empty directory run, which /run is made on.
	Dir string `json:"dir"`
	// PIDFile is where the pid of its pid 1 is written, as the machine sees it.
	PIDFile string `json:"pidFile"`
	// Cgroups are the directories that the box's groups are below, one a hierarchy.
	Cgroups []string `json:"cgroups"`
	// Hierarchies are what /sys/fs/cgroup shows: controllers, or name=NAME.
	Hierarchies []string `json:"hierarchies"`
	// Binaries are programs of the machine that are bound to Home/bin.
	Binaries []string `json:"binaries"`
	// Programs are started in this order and kept running.
	Programs []Program `json:"programs"`
}

// Program is one program in the box. What it writes goes to Home/log/NAME.log.
type Program struct {
	Name string   `json:"name"`
	Argv []string `json:"argv"`
}

// Replace writes a file as a whole: whoever reads it sees the old content or the new one.
func Replace(path string, data []byte) error {
	tmp := path + ".partial"
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
