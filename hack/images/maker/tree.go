// This file is what an image has in it: a tree of files, held in memory, and written as a
// layer so that the same tree is the same bytes everywhere.
//
// What must hold: no file belongs to anybody but root unless it says so, none has the rights
// of another than its caller (setuid), and no time but the epoch is in it.

package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// epoch is the time of every file, and of an image that is given none.
var epoch = time.Unix(0, 0).UTC()

// file is one entry of a tree. Its type follows from its mode.
type file struct {
	mode fs.FileMode
	data []byte
	// target of a symbolic link.
	target   string
	uid, gid int
}

// tree is files by their clean path without a leading slash. Parents may be left out.
type tree map[string]file

func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (t tree) file(name string, mode fs.FileMode, data []byte) {
	t[clean(name)] = file{mode: mode, data: data}
}

func (t tree) dir(name string, mode fs.FileMode) {
	t[clean(name)] = file{mode: fs.ModeDir | mode}
}

func (t tree) link(name, target string) {
	t[clean(name)] = file{mode: fs.ModeSymlink | 0o777, target: target}
}

// resolve follows symbolic links to a file of the tree.
func (t tree) resolve(name string) (file, bool) {
	at, hops := "", 0
	left := strings.Split(clean(name), "/")
	for len(left) > 0 {
		step := left[0]
		left = left[1:]
		next := clean(path.Join(at, step))
		f, ok := t[next]
		if ok && f.mode&fs.ModeSymlink != 0 {
			if hops++; hops > 40 {
				return file{}, false
			}
			to := f.target
			if !path.IsAbs(to) {
				to = path.Join(at, to)
			}
			at, left = "", append(strings.Split(clean(to), "/"), left...)
			continue
		}
		at = next
	}
	f, ok := t[at]
	return f, ok
}

// layer is the tree as the uncompressed tar of an image's layer.
func (t tree) layer() ([]byte, error) {
	whole := maps.Clone(t)
	for name := range t {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, ok := whole[dir]; !ok {
				whole[dir] = file{mode: fs.ModeDir | 0o755}
			}
		}
	}
	delete(whole, "")
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range slices.Sorted(maps.Keys(whole)) {
		f := whole[name]
		h := &tar.Header{
			Name: name, Mode: int64(f.mode.Perm()), Uid: f.uid, Gid: f.gid, ModTime: epoch, Format: tar.FormatPAX,
		}
		switch {
		case f.mode.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
			if f.mode&fs.ModeSticky != 0 {
				h.Mode |= 0o1000
			}
		case f.mode&fs.ModeSymlink != 0:
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.target
		case f.mode.IsRegular():
			h.Typeflag, h.Size = tar.TypeReg, int64(len(f.data))
		default:
			return nil, fmt.Errorf("%s: an image has files, directories and symbolic links alone, not %s", name, f.mode)
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write(f.data); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
