package vm

import (
	"bytes"
	"debug/elf"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// libraries are what the dynamic linker loads for programs and libraries: the linker itself, and what they name, each by its path
// here. A script and a static program need none. (ldd(1) says the same, and starts some programs for each.)
func libraries(paths []string) []string {
	var found []string
	for todo := slices.Clone(paths); len(todo) > 0; todo = todo[1:] {
		for _, lib := range needed(todo[0]) {
			if !slices.Contains(found, lib) {
				found = append(found, lib)
				todo = append(todo, lib)
			}
		}
	}
	return found
}

// needed are the libraries that one file names itself.
func needed(path string) []string {
	f, err := elf.Open(path)
	if err != nil {
		return nil // no ELF
	}
	defer f.Close()
	var out []string
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, _ := io.ReadAll(p.Open())
			out = append(out, string(bytes.TrimRight(b, "\x00")))
		}
	}
	names, _ := f.ImportedLibraries()
	runpath, _ := f.DynString(elf.DT_RUNPATH)
	for _, name := range names {
		if lib := where(name, filepath.Dir(path), runpath); lib != "" {
			out = append(out, lib)
		}
	}
	return out
}

// where is the path of a library: in the folders that the file names which needs it, or where ldconfig(8) has found it.
func where(name, origin string, runpath []string) string {
	for _, list := range runpath {
		for dir := range strings.SplitSeq(list, ":") {
			at := filepath.Join(strings.ReplaceAll(dir, "$ORIGIN", origin), name)
			if f, err := elf.Open(at); err == nil {
				f.Close()
				return at
			}
		}
	}
	return cached()[name]
}

// cached is the dynamic linker's cache, of this machine's own kind of programs.
var cached = sync.OnceValue(func() map[string]string {
	paths := map[string]string{}
	out, _ := exec.Command("ldconfig", "-p").Output()
	for line := range strings.Lines(string(out)) {
		// "\tNAME (libc6,x86-64) => PATH"
		name, path, ok := strings.Cut(strings.TrimSpace(line), " => ")
		name, kind, _ := strings.Cut(name, " ")
		if ok && strings.Contains(kind, "64") && paths[name] == "" {
			paths[name] = path
		}
	}
	return paths
})
