// This file is which Holdfast this is.

package main

import (
	"fmt"
	"io"
	"runtime"
)

// version is set by the linker where an image is made (-X main.version=…).
var version = "dev"

// printVersion writes one line: Holdfast's version, Go's, and what it was built for.
func printVersion(w io.Writer) error {
	_, err := fmt.Fprintf(w, "holdfast %s %s %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}
