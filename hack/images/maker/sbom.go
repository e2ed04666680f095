// This file is an image's bill of materials, in SPDX 2.3: the modules that are linked into
// its programs, as they say themselves, and the packages that its files came from.

package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

const (
	noAssertion = "NOASSERTION"
	documentID  = common.ElementID("DOCUMENT")
	imageID     = common.ElementID("image")
)

// part is something that the image is made of, with what it is made of in turn.
type part struct {
	name, version string
	// purl names it for those who look for vulnerabilities.
	purl string
	// supplier; "": not known.
	supplier string
	// sha256 of the file that it came in, in hexadecimal; "": not known.
	sha256 string
	parts  []part
}

// sbom lists the parts of the image whose ID is digest.
func (i image) sbom(s stamp, digest string) ([]byte, error) {
	d := &v2_3.Document{
		SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense, SPDXIdentifier: documentID,
		DocumentName: reference(i.name, s.version),
		// Unique, as SPDX wants it: for each image, and equal for equal ones.
		DocumentNamespace: "https://holdfast.dev/sbom/" + i.name + "/" + strings.TrimPrefix(digest, "sha256:"),
		CreationInfo: &v2_3.CreationInfo{
			Created:  s.created.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "holdfast-hack-images"}},
		},
	}
	root := &v2_3.Package{
		PackageName: reference(i.name, s.version), PackageSPDXIdentifier: imageID, PackageVersion: s.version,
		PackageDownloadLocation: noAssertion, PrimaryPackagePurpose: "CONTAINER",
		PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: strings.TrimPrefix(digest, "sha256:")}},
		PackageComment:   "The checksum is the image's ID.",
	}
	d.Packages = append(d.Packages, root)
	relate := func(from, to common.ElementID, how string) {
		d.Relationships = append(d.Relationships, &v2_3.Relationship{
			RefA: common.MakeDocElementID("", string(from)), RefB: common.MakeDocElementID("", string(to)), Relationship: how,
		})
	}
	relate(documentID, imageID, common.TypeRelationshipDescribe)
	// A part that several have is listed once.
	listed := map[common.ElementID]bool{}
	var add func(of common.ElementID, how string, parts []part)
	add = func(of common.ElementID, how string, parts []part) {
		for _, p := range parts {
			sum := sha256.Sum256([]byte(p.purl))
			id := common.ElementID("part-" + hex.EncodeToString(sum[:10]))
			relate(of, id, how)
			if listed[id] {
				continue
			}
			listed[id] = true
			pkg := &v2_3.Package{
				PackageName: p.name, PackageVersion: p.version, PackageSPDXIdentifier: id, PackageDownloadLocation: noAssertion,
				PackageExternalReferences: []*v2_3.PackageExternalReference{{
					Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: p.purl,
				}},
			}
			if p.supplier != "" {
				pkg.PackageSupplier = &common.Supplier{SupplierType: "Organization", Supplier: p.supplier}
			}
			if p.sha256 != "" {
				pkg.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: p.sha256}}
			}
			d.Packages = append(d.Packages, pkg)
			add(id, common.TypeRelationshipDependsOn, p.parts)
		}
	}
	add(imageID, common.TypeRelationshipContains, i.parts)
	var out bytes.Buffer
	err := spdxjson.Write(d, &out, spdxjson.Indent("  "))
	return out.Bytes(), err
}

// programPart is a Go program with the modules that are linked into it. Its own module's
// version is not in it: it is built from a directory.
func programPart(binary []byte, s stamp) (part, error) {
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return part{}, fmt.Errorf("read what it was built of: %w", err)
	}
	sum := sha256.Sum256(binary)
	p := part{
		name: info.Path, version: s.version, sha256: hex.EncodeToString(sum[:]),
		purl: golang(info.Main.Path, s.version) + strings.Replace(strings.TrimPrefix(info.Path, info.Main.Path), "/", "#", 1),
	}
	goVersion, _, _ := strings.Cut(strings.TrimPrefix(info.GoVersion, "go"), " ")
	p.parts = append(p.parts, part{name: "stdlib", version: goVersion, purl: golang("stdlib", goVersion)})
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		if m.Version == "" {
			return part{}, fmt.Errorf("module %s comes from a directory: it has no version", m.Path)
		}
		p.parts = append(p.parts, part{name: m.Path, version: m.Version, purl: golang(m.Path, m.Version)})
	}
	return p, nil
}

// golang is a module's package URL.
func golang(module, version string) string {
	return "pkg:golang/" + strings.ToLower(module) + "@" + url.QueryEscape(version)
}
