// Command argocd writes config/argocd/argocd-cm.yaml from the Lua scripts beside it: Argo CD
// reads health checks from its ConfigMap, and they are kept, and tested, as one file a kind.
// `make generate` runs it.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const begin = `# Argo CD's health checks of Holdfast's kinds. Made from the scripts in resource_customizations: change those.
#   kubectl patch configmap argocd-cm --namespace argocd --patch-file config/argocd/argocd-cm.yaml
apiVersion: v1
kind: ConfigMap
metadata:
  name: argocd-cm
  labels:
    app.kubernetes.io/name: argocd-cm
    app.kubernetes.io/part-of: argocd
data:
`

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: argocd DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "argocd:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	scripts, err := filepath.Glob(filepath.Join(dir, "resource_customizations", "*", "*", "health.lua"))
	if err != nil {
		return err
	}
	if len(scripts) == 0 {
		return fmt.Errorf("there are no scripts below %s", dir)
	}
	var out strings.Builder
	out.WriteString(begin)
	for _, path := range scripts { // Glob sorts them
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		kind := filepath.Dir(path)
		fmt.Fprintf(&out, "  resource.customizations.health.%s_%s: |\n", filepath.Base(filepath.Dir(kind)), filepath.Base(kind))
		for line := range strings.Lines(string(text)) {
			out.WriteString("    " + line)
		}
	}
	return os.WriteFile(filepath.Join(dir, "argocd-cm.yaml"), []byte(out.String()), 0o644)
}
