// The images of the cluster's own pods: one program each, in an archive that containerd
// imports, as `docker save` writes it.

package nodes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
)

const (
	// pauseImage keeps the namespaces of a pod.
	pauseImage = "pause"
	dnsImage   = "coredns"
)

// imageReference is what a pod names the image by.
func imageReference(name string) string { return "docker.io/holdfast-dev/cluster-" + name + ":dev" }

// writeImage writes an image whose one file is a program, run with args by nobody.
func writeImage(path, name, program string, args ...string) (err error) {
	data, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	layer, err := archive([]file{{"program", data}})
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"os": "linux", "architecture": runtime.GOARCH,
		"config": map[string]any{"Entrypoint": append([]string{"/program"}, args...), "User": "65532:65532", "WorkingDir": "/"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": sum(config) + ".json", "RepoTags": []string{imageReference(name)}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	whole, err := archive([]file{{sum(config) + ".json", config}, {"layer.tar", layer}, {"manifest.json", manifest}})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, whole, 0o644)
}

type file struct {
	name string
	data []byte
}

func archive(files []file) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o755, Size: int64(len(f.data))})
		if _, writing := w.Write(f.data); err != nil || writing != nil {
			return nil, errors.Join(err, writing)
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}
