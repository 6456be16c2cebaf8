package kata

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Flavour is one of Kata's two runtimes. They share a name and a configuration format, not their faults.
type Flavour string

// The flavours. The Go one is deprecated since 4.0, and not in the release's own archive since 4.1.
const (
	FlavourGo   Flavour = "go"
	FlavourRust Flavour = "runtime-rs"
)

// Version is a release of Kata. Pre sorts before the release it precedes.
type Version struct {
	Major, Minor, Patch int
	Pre                 string
}

func (v Version) String() string {
	s := fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
	if v.Pre != "" {
		s += "-" + v.Pre
	}
	return s
}

// Below says whether v comes before the release w.
func (v Version) Below(w Version) bool {
	for _, d := range []int{v.Major - w.Major, v.Minor - w.Minor, v.Patch - w.Patch} {
		if d != 0 {
			return d < 0
		}
	}
	return v.Pre != "" && w.Pre == ""
}

var versionForm = regexp.MustCompile(`^(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})(-(alpha|beta|rc)\.?(0|[1-9][0-9]{0,2}))?$`)

// ParseVersion reads one of Kata's own versions. A vendor's ("3.19.1.kata2", "3.2.0+fork") is an error: which faults it
// has mended is not to be told from its number.
func ParseVersion(s string) (Version, error) {
	m := versionForm.FindStringSubmatch(s)
	if m == nil {
		return Version{}, fmt.Errorf("%w: %.64q is not one of Kata's own versions, so its known faults can't be told; install a release of Kata Containers", ErrVersion, s)
	}
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(m[i+1]) // at most five digits
	}
	return Version{n[0], n[1], n[2], strings.TrimPrefix(m[4], "-")}, nil
}

// versionLine is what both shims print for --version (Go: cmd/containerd-shim-kata-v2/main.go, %q around the id; Rust:
// crates/shim/src/bin/main.rs).
var versionLine = regexp.MustCompile(`^[\x20-\x7e]{1,64} containerd shim \((Golang|Rust)\): id: "?([A-Za-z0-9._-]{1,64})"?, version: ([^\s,]{1,64}), commit: ([\x20-\x7e]{0,128})$`)

// ParseVersionOutput reads what a shim printed for --version: exactly one line.
func ParseVersionOutput(out string) (Flavour, Version, string, error) {
	line := strings.TrimSuffix(out, "\n")
	m := versionLine.FindStringSubmatch(line)
	if m == nil {
		return "", Version{}, "", fmt.Errorf("%w: --version printed %.200q; a shim of Kata prints \"… containerd shim (Golang or Rust): id: …, version: …, commit: …\"", ErrVersion, out)
	}
	flavour := FlavourGo
	if m[1] == "Rust" {
		flavour = FlavourRust
	}
	v, err := ParseVersion(m[3])
	return flavour, v, strings.Trim(m[4], `"`), err
}
