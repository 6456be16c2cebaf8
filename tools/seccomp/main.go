// Command seccomp writes the generated files of pkg/nsexec/seccomp: the tables of system call numbers, the names of
// containerd's default profile, the programs, and the text that a reviewer reads.
//
//	go run . [-root FOLDER] tables|filters
//
// in this folder. // tables needs the Go module proxy (containerd's sources); filters works on what tables wrote. They are two steps
// because the second is compiled from what the first one writes.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"os"
	"path/filepath"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp/policy"
)

const packageDir = "pkg/nsexec/seccomp"

func main() {
	root := flag.String("root", "../..", "the folder under which to write (a copy of the main module)")
	flag.Parse()
	if err := run(*root, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "seccomp:", err)
		os.Exit(1)
	}
}

func run(root, step string) error {
	var files map[string][]byte
	var err error
	switch step {
	case "tables":
		files, err = tables()
	case "filters":
		files, err = filters()
	default:
		return fmt.Errorf("what to generate is %q: say tables or filters", step)
	}
	if err != nil {
		return err
	}
	for name, content := range files {
		path := filepath.Join(root, packageDir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// filters makes a file of programs for each architecture, and a dump for each program.
func filters() (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, a := range policy.Arches() {
		src, err := policy.GoSource(a)
		if err != nil {
			return nil, err
		}
		if files["zfilter_"+a.GOARCH+".go"], err = format.Source(src); err != nil {
			return nil, fmt.Errorf("formatting the programs for %s: %w", a.GOARCH, err)
		}
		for _, p := range policy.All() {
			var dump bytes.Buffer
			if err := p.Dump(&dump, a); err != nil {
				return nil, err
			}
			files["testdata/"+p.Name+"-"+a.GOARCH+".golden"] = dump.Bytes()
		}
	}
	return files, nil
}
