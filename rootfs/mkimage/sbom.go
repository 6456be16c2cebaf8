package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// The parts of SPDX 2.3's JSON that a software bill of materials of an image has (spdx.github.io/spdx-spec/v2.3).
type (
	spdxDocument struct {
		SPDXVersion   string             `json:"spdxVersion"`
		DataLicense   string             `json:"dataLicense"`
		ID            string             `json:"SPDXID"`
		Name          string             `json:"name"`
		Namespace     string             `json:"documentNamespace"`
		Creation      spdxCreation       `json:"creationInfo"`
		Packages      []spdxPackage      `json:"packages"`
		Relationships []spdxRelationship `json:"relationships"`
	}
	spdxCreation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		ID               string         `json:"SPDXID"`
		Name             string         `json:"name"`
		Version          string         `json:"versionInfo,omitempty"`
		Supplier         string         `json:"supplier,omitempty"`
		DownloadLocation string         `json:"downloadLocation"`
		FilesAnalyzed    bool           `json:"filesAnalyzed"`
		Homepage         string         `json:"homepage,omitempty"`
		Checksums        []spdxChecksum `json:"checksums,omitempty"`
		Concluded        string         `json:"licenseConcluded"`
		Declared         string         `json:"licenseDeclared"`
		Copyright        string         `json:"copyrightText"`
		Refs             []spdxRef      `json:"externalRefs,omitempty"`
		Purpose          string         `json:"primaryPackagePurpose,omitempty"`
	}
	spdxChecksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	spdxRef struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	spdxRelationship struct {
		Element string `json:"spdxElementId"`
		Type    string `json:"relationshipType"`
		Related string `json:"relatedSpdxElement"`
	}
)

const unknown = "NOASSERTION"

// sbom lists what an image contains: Debian's packages, and the Go modules that each of its own programs is linked from.
func (b *build) sbom(img image, manifest digest.Digest) ([]byte, error) {
	image := newPackage("Image-"+img.name, repository+img.name, b.version)
	image.Purpose, image.Checksums = "CONTAINER", []spdxChecksum{{"SHA256", manifest.Encoded()}}
	doc := spdxDocument{
		SPDXVersion: "SPDX-2.3", DataLicense: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: img.name,
		// A URI that is unique to this image; nothing lies there.
		Namespace: "https://github.com/sandbox-agent/sandbox-agent/spdx/" + img.name + "/" + manifest.Encoded(),
		Creation:  spdxCreation{b.epoch.Format(time.RFC3339), []string{"Tool: sandbox-agent-mkimage"}},
	}
	doc.add("SPDXRef-DOCUMENT", "DESCRIBES", image)
	for _, p := range img.packages {
		doc.add(image.ID, "CONTAINS", b.ofDebian(p))
	}
	for _, name := range img.programs {
		if err := doc.addProgram(image.ID, filepath.Join(b.bin, name), b.version); err != nil {
			return nil, err
		}
	}
	out, err := json.MarshalIndent(doc, "", "  ")
	return append(out, '\n'), err
}

func newPackage(id, name, version string) spdxPackage {
	return spdxPackage{
		ID: "SPDXRef-" + notInAnID.ReplaceAllString(id, "-"), Name: name, Version: version,
		DownloadLocation: unknown, Concluded: unknown, Declared: unknown, Copyright: unknown,
	}
}

var notInAnID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// add adds a package, once, and how it relates to another element.
func (d *spdxDocument) add(to, how string, p spdxPackage) {
	d.Relationships = append(d.Relationships, spdxRelationship{to, how, p.ID})
	for _, known := range d.Packages {
		if known.ID == p.ID {
			return
		}
	}
	d.Packages = append(d.Packages, p)
}

func (b *build) ofDebian(p debian) spdxPackage {
	out := newPackage("Debian-"+p.name, p.name, p.version)
	out.Supplier, out.Homepage = "Organization: Debian", p.homepage
	out.Checksums = []spdxChecksum{{"SHA256", p.sha256}}
	out.Refs = purl(fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=%s", escape(p.name), escape(p.version), p.arch, b.suite))
	return out
}

// addProgram adds one of the project's programs with the modules in it, which the program itself names.
func (d *spdxDocument) addProgram(image, path, version string) error {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the modules of %s: %w", path, err)
	}
	program := newPackage("Program-"+filepath.Base(path), info.Path, version)
	program.Purpose = "APPLICATION"
	d.add(image, "CONTAINS", program)
	d.add(program.ID, "CONTAINS", ofGo("stdlib", strings.TrimPrefix(info.GoVersion, "go")))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		d.add(program.ID, "CONTAINS", ofGo(m.Path, m.Version))
	}
	return nil
}

func ofGo(module, version string) spdxPackage {
	p := newPackage("Go-"+module+"-"+version, module, version)
	p.Refs = purl("pkg:golang/" + module + "@" + escape(version))
	return p
}

func purl(locator string) []spdxRef { return []spdxRef{{"PACKAGE-MANAGER", "purl", locator}} }

func escape(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "%7E", "~") }
