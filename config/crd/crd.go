// Package crd holds the schemas of the kinds, as they are applied to a cluster, for
// programs that check an object where there is no API server.
package crd

import "embed"

// Bases are the generated CRDs, in bases/.
//
//go:embed bases/*.yaml
var Bases embed.FS
