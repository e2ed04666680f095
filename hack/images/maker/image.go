// This file makes an image of trees: its layers, its configuration, and the archive that
// container runtimes load.
//
// What must hold: equal inputs give equal bytes. Layers are not compressed, since what a
// compressor makes of them changes with its version, and a node unpacks them at once.

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// repository is where the images' names begin. A name without a host is what every
// container runtime completes in the same way.
const repository = "holdfast-dev/"

// image is what becomes one.
type image struct {
	name, description string
	layers            []tree
	user              string
	entrypoint, cmd   []string
	env               []string
	workingDir        string
	// stopSignal has the program end; "": SIGTERM.
	stopSignal string
	// parts are listed in the SBOM.
	parts []part
}

// stamp is what tells one build from another.
type stamp struct {
	version string
	// revision is the commit; "": not known.
	revision string
	created  time.Time
}

func reference(name, version string) string { return repository + name + ":" + version }

// build makes the image.
func (i image) build(s stamp) (v1.Image, error) {
	config := &v1.ConfigFile{
		Architecture: runtime.GOARCH, OS: "linux", Created: v1.Time{Time: s.created},
		Config: v1.Config{
			User: i.user, Entrypoint: i.entrypoint, Cmd: i.cmd, Env: i.env, WorkingDir: i.workingDir, StopSignal: i.stopSignal,
			Labels: labels(i, s),
		},
	}
	img, err := mutate.ConfigFile(empty.Image, config)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", i.name, err)
	}
	for _, t := range i.layers {
		content, err := t.layer()
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", i.name, err)
		}
		img, err = mutate.Append(img, mutate.Addendum{
			Layer:   static.NewLayer(content, types.DockerUncompressedLayer),
			History: v1.History{Created: v1.Time{Time: s.created}, CreatedBy: "hack/images"},
		})
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", i.name, err)
		}
	}
	return img, nil
}

func labels(i image, s stamp) map[string]string {
	l := map[string]string{
		"org.opencontainers.image.title":       i.name,
		"org.opencontainers.image.description": i.description,
		"org.opencontainers.image.version":     s.version,
		"org.opencontainers.image.source":      "https://" + module,
	}
	if s.revision != "" {
		l["org.opencontainers.image.revision"] = s.revision
	}
	return l
}

// made is an image that was written.
type made struct {
	Name      string `json:"name"`
	Reference string `json:"reference"`
	// Digest is the image's ID: that of its configuration, which no archive changes.
	Digest  string `json:"digest"`
	Archive string `json:"archive"`
	SBOM    string `json:"sbom"`
}

// write writes the archive and the SBOM beside it.
func (i image) write(s stamp, dir string) (made, error) {
	img, err := i.build(s)
	if err != nil {
		return made{}, err
	}
	ref := reference(i.name, s.version)
	tag, err := name.NewTag(ref, name.WithDefaultRegistry("docker.io"))
	if err != nil {
		return made{}, fmt.Errorf("image %s: %w", i.name, err)
	}
	id, err := img.ConfigName()
	if err != nil {
		return made{}, fmt.Errorf("image %s: %w", i.name, err)
	}
	m := made{
		Name: i.name, Reference: ref, Digest: id.String(),
		Archive: filepath.Join(dir, i.name+".tar"), SBOM: filepath.Join(dir, i.name+".spdx.json"),
	}
	sbom, err := i.sbom(s, id.String())
	if err != nil {
		return made{}, fmt.Errorf("the SBOM of image %s: %w", i.name, err)
	}
	if err := replace(m.SBOM, func(f *os.File) error { _, err := f.Write(sbom); return err }); err != nil {
		return made{}, err
	}
	return m, replace(m.Archive, func(f *os.File) error { return tarball.Write(tag, img, f) })
}

// replace gives a file its name once it is whole.
func replace(path string, write func(*os.File) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// users is an /etc/passwd with root, the image's own user and nobody.
func users(t tree, user, home string, id int) {
	passwd := []string{
		"root:x:0:0:root:/root:/sbin/nologin",
		"nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin",
		fmt.Sprintf("%s:x:%d:%d:%s:%s:/sbin/nologin", user, id, id, user, home),
	}
	group := []string{"root:x:0:", "nogroup:x:65534:", fmt.Sprintf("%s:x:%d:", user, id)}
	t.file("/etc/passwd", 0o644, []byte(strings.Join(passwd, "\n")+"\n"))
	t.file("/etc/group", 0o644, []byte(strings.Join(group, "\n")+"\n"))
}
