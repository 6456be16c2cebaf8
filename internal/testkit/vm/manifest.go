package vm

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

//go:embed kernels.txt
var table string

// Listed is a line of kernels.txt: a kernel that scripts/kernels.sh fetches.
type Listed struct {
	Name string
	// Always: it is one of those of every run.
	Always         bool
	Suite, Package string
}

// List are the lines of kernels.txt, in their order.
func List() []Listed {
	var out []Listed
	for line := range strings.Lines(table) {
		if f := strings.Fields(line); len(f) == 4 && f[0] != "#" {
			out = append(out, Listed{Name: f[0], Always: f[1] == "ci", Suite: f[2], Package: f[3]})
		}
	}
	return out
}

// Package is one that a kernel came in.
type Package struct{ Suite, Name, Version, SHA256 string }

// Fetched is a kernel that is in a cache, and what scripts/kernels.sh noted about it.
type Fetched struct {
	Kernel
	Packages []Package
}

// Fetched looks for a kernel in a cache, by the manifest there.
func (l Listed) Fetched(cache string) (Fetched, error) {
	f := Fetched{Kernel: Kernel{Cache: cache}}
	b, err := os.ReadFile(filepath.Join(cache, "manifest.tsv"))
	if err != nil {
		return f, fmt.Errorf("looking for the kernel %s: %w: fetch it with scripts/kernels.sh", l.Name, err)
	}
	for line := range strings.Lines(string(b)) {
		if c := strings.Split(strings.TrimSpace(line), "\t"); len(c) == 6 && c[0] == l.Name {
			f.Version = c[1]
			f.Packages = append(f.Packages, Package{Suite: c[2], Name: c[3], Version: c[4], SHA256: c[5]})
		}
	}
	if f.Version == "" {
		return f, fmt.Errorf("the kernel %s is not in %s: fetch it with scripts/kernels.sh (--set all)", l.Name, cache)
	}
	return f, nil
}
