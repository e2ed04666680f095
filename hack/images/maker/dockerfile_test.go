// This file compares the Dockerfile at the root with what is built here.

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// stage is one FROM and what follows.
type stage struct {
	from  string
	steps [][2]string
}

// stages reads a Dockerfile: instructions, with lines that go on.
func stages(t *testing.T, text string) map[string]stage {
	t.Helper()
	all := map[string]stage{}
	last := ""
	for _, line := range strings.Split(strings.ReplaceAll(text, "\\\n", " "), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		word, rest, _ := strings.Cut(line, " ")
		if word == "FROM" {
			fields := strings.Fields(rest)
			if len(fields) != 3 || fields[1] != "AS" {
				t.Fatalf("FROM %s: a stage must have a name", rest)
			}
			last = fields[2]
			all[last] = stage{from: fields[0]}
			continue
		}
		s := all[last]
		s.steps = append(s.steps, [2]string{word, strings.TrimSpace(rest)})
		all[last] = s
	}
	return all
}

func (s stage) has(word string) []string {
	var all []string
	for _, step := range s.steps {
		if step[0] == word {
			all = append(all, step[1])
		}
	}
	return all
}

func TestDockerfileMakesTheSame(t *testing.T) {
	text, err := os.ReadFile("../../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	all := stages(t, string(text))
	if got := all["base"].from; got != "scratch" {
		t.Errorf("the images are made from %q, which should be nothing", got)
	}
	if got := all["base"].has("USER"); !slices.Equal(got, []string{fmt.Sprintf("%d:%d", nonRoot, nonRoot)}) {
		t.Errorf("USER is %q", got)
	}
	build := all["build"]
	if !strings.Contains(strings.Join(build.has("ENV"), " "), "CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off") {
		t.Errorf("the build's ENV is %q", build.has("ENV"))
	}
	for _, p := range programs {
		flags := buildFlags("$VERSION")
		for i, f := range flags {
			if strings.Contains(f, " ") {
				flags[i] = `"` + f + `"`
			}
		}
		want := fmt.Sprintf("go build %s -o /out/%s %s", strings.Join(flags, " "), p.name, p.pkg)
		if !slices.Contains(build.has("RUN"), want) {
			t.Errorf("the Dockerfile has no RUN %s", want)
		}
		s, ok := all[p.name]
		if !ok || s.from != "base" {
			t.Errorf("the stage of %s is %+v", p.name, s)
			continue
		}
		entry, err := json.Marshal([]string{path.Join("/", p.name)})
		if err != nil {
			t.Fatal(err)
		}
		if got := s.has("ENTRYPOINT"); !slices.Equal(got, []string{string(entry)}) {
			t.Errorf("%s: ENTRYPOINT is %q", p.name, got)
		}
		copies := []string{fmt.Sprintf("--from=build /out/%s /%s", p.name, p.name)}
		for _, d := range p.dirs {
			copies = append(copies, fmt.Sprintf("--from=build --chown=%d:%d /out/state %s", nonRoot, nonRoot, d))
		}
		got := s.has("COPY")
		slices.Sort(got)
		slices.Sort(copies)
		if !slices.Equal(got, copies) {
			t.Errorf("%s: COPY is %q, which should be %q", p.name, got, copies)
		}
	}
	if !strings.HasSuffix(strings.TrimSpace(string(text)), "ENTRYPOINT [\"/manager\"]") {
		t.Error("the last stage, which is built where none is named, is not the manager's")
	}
	// The same users and the same place of the certificates.
	base, err := base()
	if err != nil {
		t.Fatal(err)
	}
	run := strings.Join(build.has("RUN"), "\n")
	for name, f := range base {
		switch {
		case name == clean(authorities):
			if !strings.Contains(run, " /out/base"+path.Dir(authorities)+"/") {
				t.Errorf("the Dockerfile puts no certificates into %s", path.Dir(authorities))
			}
		case f.mode.IsDir():
			if !strings.Contains(run, "/out/base/"+name) {
				t.Errorf("the Dockerfile makes no /%s", name)
			}
		default:
			want := fmt.Sprintf("printf '%s' >/out/base/%s", strings.ReplaceAll(string(f.data), "\n", `\n`), name)
			if !strings.Contains(run, want) {
				t.Errorf("the Dockerfile does not write %s as %q", name, f.data)
			}
		}
	}
}
