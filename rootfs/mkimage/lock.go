package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// debian is a package of the lock.
type debian struct {
	name, version, arch, source, maintainer, homepage, sha256, stanza string
}

// readLock reads the index that scripts/image-lock.sh made.
func readLock(name string) ([]debian, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var all []debian
	for _, stanza := range strings.Split(string(b), "\n\n") {
		stanza = strings.TrimSpace(stanza)
		if stanza == "" || strings.HasPrefix(stanza, "#") {
			continue
		}
		p := debian{stanza: stanza}
		for key, at := range map[string]*string{
			"Package": &p.name, "Version": &p.version, "Architecture": &p.arch, "Source": &p.source,
			"Maintainer": &p.maintainer, "Homepage": &p.homepage, "SHA256": &p.sha256,
		} {
			*at = fieldOf(stanza, key)
		}
		if p.name == "" || p.version == "" || p.sha256 == "" {
			return nil, fmt.Errorf("%s: a package without name, version or checksum: make it with scripts/image-lock.sh", name)
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b debian) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

func fieldOf(stanza, key string) string {
	for line := range strings.Lines(stanza) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// status is the package's record where there is no dpkg, by the convention that scanners of images know.
func (p debian) status() string {
	s := fmt.Sprintf("Package: %s\nStatus: install ok installed\nMaintainer: %s\nArchitecture: %s\n", p.name, p.maintainer, p.arch)
	if p.source != "" {
		s += "Source: " + p.source + "\n"
	}
	return s + "Version: " + p.version + "\n"
}

// list is the image's list of packages: name, version, architecture and the checksum of the package's archive.
func list(packages []debian) string {
	var b strings.Builder
	for _, p := range packages {
		fmt.Fprintf(&b, "%s %s %s %s\n", p.name, p.version, p.arch, p.sha256)
	}
	return b.String()
}
