// CASES.md says which test shows what. Here it is held to that.

package e2e

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestEveryCaseHasItsTests(t *testing.T) {
	document, err := os.ReadFile("CASES.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| ([AKLRSOP]\d\d) \| ([^|]+) \| ([^|]+) \|$`)
	named := regexp.MustCompile("`([^`]+_test\\.go)` `([^`]+)`")
	files := map[string][]string{}
	var found []string
	for _, m := range row.FindAllStringSubmatch(string(document), -1) {
		found = append(found, m[1])
		tests := named.FindAllStringSubmatch(m[3], -1)
		if len(tests) == 0 {
			t.Errorf("%s names no test", m[1])
		}
		for _, test := range tests {
			path, name := test[1], test[2]
			if files[path] == nil {
				files[path] = testsIn(t, filepath.Join("..", "..", filepath.FromSlash(path)))
			}
			if !slices.ContainsFunc(files[path], func(has string) bool {
				return has == name || !strings.HasPrefix(name, "Test") && strings.HasPrefix(has, name)
			}) {
				t.Errorf("%s: %s has no test %q", m[1], path, name)
			}
		}
	}
	var wanted []string
	for _, of := range []struct {
		letter     string
		from, to   int
		additional []int
	}{
		{letter: "A", from: 1, to: 14},
		{letter: "K", from: 1, to: 11},
		{letter: "R", from: 1, to: 37},
		{letter: "L", from: 1, to: 4},
		{letter: "S", from: 1, to: 6},
		{letter: "O", from: 1, to: 7, additional: []int{10}},
		{letter: "P", from: 2, to: 3},
	} {
		for n := of.from; n <= of.to; n++ {
			wanted = append(wanted, fmt.Sprintf("%s%02d", of.letter, n))
		}
		for _, n := range of.additional {
			wanted = append(wanted, fmt.Sprintf("%s%02d", of.letter, n))
		}
	}
	if !slices.Equal(found, wanted) {
		t.Errorf("the table has the cases\n%v, want\n%v", found, wanted)
	}
	// And the other way round: a spec that bears the name of a case is in the table.
	specs, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	ofCase := regexp.MustCompile(`^[AKLRSOP]\d\d\b`)
	for _, path := range specs {
		for _, name := range testsIn(t, path) {
			if !ofCase.MatchString(name) {
				continue
			}
			listed := slices.ContainsFunc(named.FindAllStringSubmatch(string(document), -1), func(m []string) bool {
				return m[1] == "test/e2e/"+path && strings.HasPrefix(name, m[2])
			})
			if !listed {
				t.Errorf("%s has a spec %q that CASES.md does not name", path, name)
			}
		}
	}
}

// testsIn are the names of the test functions and the texts of the specs of a file. Of a
// text that is put together it is the first piece.
func testsIn(t *testing.T, path string) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if n.Recv == nil && strings.HasPrefix(n.Name.Name, "Test") {
				names = append(names, n.Name.Name)
			}
		case *ast.CallExpr:
			if called, ok := n.Fun.(*ast.Ident); ok && called.Name == "It" && len(n.Args) > 0 {
				names = append(names, firstText(t, n.Args[0]))
			}
		}
		return true
	})
	return names
}

func firstText(t *testing.T, e ast.Expr) string {
	t.Helper()
	text := ""
	ast.Inspect(e, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING && text == "" {
			var err error
			if text, err = strconv.Unquote(literal.Value); err != nil {
				t.Fatal(err)
			}
		}
		return text == ""
	})
	return text
}
