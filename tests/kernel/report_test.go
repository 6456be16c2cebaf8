package kernel

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
)

// document is written by a run with -write, from the module's folder.
const document = "docs/kernels.md"

type counts vm.Counts

func (c counts) String() string {
	if c.Failed > 0 {
		return fmt.Sprintf("**%d failed**, %d passed, %d skipped", c.Failed, c.Passed, c.Skipped)
	}
	return fmt.Sprintf("%d passed, %d skipped", c.Passed, c.Skipped)
}

// result is what came of one kernel.
type result struct {
	kernel chosenKernel
	began  time.Time
	full   bool

	mu         sync.Mutex
	suites     map[string]counts
	variations map[string]string
}

func (r *result) add(pkg string, c counts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.suites[pkg] = c
}

func (r *result) vary(name, verdict string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.variations[name] = verdict
}

// section is a kernel's in the document. What was not run now stays as it was, if it was the same kernel.
func (r *result) section(was string) string {
	var b strings.Builder
	linux := fmt.Sprintf("Linux %s.", r.kernel.Version)
	if !strings.Contains(was, "\n"+linux+"\n") {
		was = ""
	}
	fmt.Fprintf(&b, "## %s\n\n%s\n\n", r.kernel.Name, linux)
	b.WriteString("| package | suite | version | SHA-256 |\n|---|---|---|---|\n")
	for _, p := range r.kernel.Packages {
		fmt.Fprintf(&b, "| %s | %s | %s | `%s` |\n", p.Name, p.Suite, p.Version, p.SHA256)
	}
	day := r.began.UTC().Format(time.DateOnly)
	row := func(name, text string) {
		switch old := rowOf(was, name); {
		case text != "":
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, text, day)
		case old != "":
			fmt.Fprintln(&b, old)
		default:
			fmt.Fprintf(&b, "| %s | not run | – |\n", name)
		}
	}
	b.WriteString("\n| tests of | result | on |\n|---|---|---|\n")
	for _, s := range suites {
		text := ""
		if c, ran := r.suites[s.pkg]; ran {
			text = c.String()
			if !r.full {
				text += " (the part of every run)"
			}
		}
		row(s.pkg, text)
	}
	b.WriteString("\n| node | result | on |\n|---|---|---|\n")
	for _, v := range variations {
		row(v.Name, r.variations[v.Name])
	}
	b.WriteString("\n")
	return b.String()
}

// rowOf is the line of a table that begins with a name.
func rowOf(part, name string) string {
	for line := range strings.Lines(part) {
		if strings.HasPrefix(line, "| "+name+" | ") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// head is the part of the document before the kernels.
func head() string {
	var b strings.Builder
	b.WriteString(`# Kernels

Written by the tests themselves (` + "`make test-kernel-all`, tests/kernel" + `): what ran on which kernel, when, and what came of it. Each
kernel boots under qemu's software emulation with pure cgroup v2, the product's own programs, the embedded runtime and Git. A
result stays until the same is run again, or the kernel is a newer one.

- ` + "`make test-kernel`" + `: the kernels of every run. ` + "`make test-kernel-all`" + `: all of them, and every variation on each (with KERNELFLAGS=-full: whole suites).
- ` + "`KERNELS=\"6.1 newest-rt\" make test-kernel`" + `: some. ` + "`KERNEL=/path/to/vmlinuz MODULES=/path/to/lib/modules/VERSION make test-kernel`" + `:
  one's own. It needs virtio (PCI, block, console) and ext4, as modules or built in.
- Debian's packages are resolved through each suite's metapackage (internal/testkit/vm/kernels.txt) and verified by apt; the
  checksums are those of the files that were run.

## What is tried on a node

"works": a session is made, a command attacks the promises from inside and reaches nothing, though each attack reaches its aim
from outside of a sandbox; the receipts verify; nothing is left behind. "works, with a weaker layer": the same, and ` + "`sandbox-agent check`" + `
says DEGRADED and what takes the place of what is missing. "refused": no sandbox is made, and both check and agent name what is
missing (in brackets) and the remedy. The expectations are data (tests/kernel/matrix_test.go); another outcome fails the run.
"no seccomp" is a filter around the agent that answers as a kernel without CONFIG_SECCOMP_FILTER does: none of these is built so.

Not run:

`)
	for _, n := range notRun {
		fmt.Fprintf(&b, "- %s: %s.\n", n.name, n.why)
	}
	b.WriteString("\nThe packages whose tests run in the guests, and which of them in every run:\n\n")
	for _, s := range suites {
		once := ""
		if s.once != "" {
			once = fmt.Sprintf("; of that `%s` on %s only, unless kernels are named", s.once, thorough)
		}
		fmt.Fprintf(&b, "- %s: %s (`%s`%s);\n", s.pkg, s.what, s.run, once)
	}
	b.WriteString("\nA test may be skipped in a guest because\n\n")
	for _, l := range guestLacks {
		fmt.Fprintf(&b, "- %s (`%s`);\n", l.why, l.reason)
	}
	b.WriteString("\n")
	return b.String()
}

// sections are the kernels' parts of a document.
func sections(text string) map[string]string {
	out := map[string]string{}
	for _, l := range vm.List() {
		_, after, found := strings.Cut(text, "\n## "+l.Name+"\n")
		if !found {
			continue
		}
		body, _, _ := strings.Cut(after, "\n## ")
		out[l.Name] = "## " + l.Name + "\n" + strings.TrimRight(body, "\n") + "\n\n"
	}
	return out
}

// render makes the document of the kernels' parts.
func render(parts map[string]string) string {
	text := head()
	for _, l := range vm.List() {
		part := parts[l.Name]
		if part == "" {
			part = "## " + l.Name + "\n\nNot run yet.\n\n"
		}
		text += part
	}
	return strings.TrimRight(text, "\n") + "\n"
}

// write writes the document, if that is asked for, with what is known of the kernels that did not run now.
func (b *bench) write(t *testing.T) {
	if !*flagWrite {
		return
	}
	was, _ := os.ReadFile(document)
	parts := sections(string(was))
	for name, r := range b.results {
		parts[name] = r.section(parts[name])
	}
	require.NoError(t, os.WriteFile(document, []byte(render(parts)), 0o644))
}

// cells are what follows on the name in a row of three.
var cells = regexp.MustCompile(`(?m)^\| ([^|]+) \| [^|]+ \| (?:\d{4}-\d{2}-\d{2}|–) \|$`)

// shape is a kernel's part without what a run found.
func shape(part string) string {
	_, after, _ := strings.Cut(part, "\n| tests of |") // the packages are the run's
	return cells.ReplaceAllString(after, "| $1 |")
}

// With -write its first part is written anew, which takes no kernel: go test ./tests/kernel -run TheDocument -write.
func TestTheDocumentIsOfTheseKernelsSuitesAndVariations(t *testing.T) {
	(&bench{}).write(t)
	b, err := os.ReadFile(document)
	require.NoError(t, err)
	text := string(b)
	require.True(t, strings.HasPrefix(text, head()), "docs/kernels.md begins otherwise: run make test-kernel-all, which writes it")
	parts := sections(text)
	require.Equal(t, render(parts), text, "kernels.txt has other kernels, or in another order: run make test-kernel-all")
	want := shape((&result{suites: map[string]counts{}, variations: map[string]string{}}).section(""))
	for name, part := range parts {
		if strings.Contains(part, "\nNot run yet.\n") {
			continue
		}
		require.Regexp(t, `(?m)^Linux \d+\.\d+\S+\.$`, part, name)
		require.Regexp(t, "(?m)^\\| linux-[^|]+ \\| [^|]+ \\| [^|]+ \\| `[0-9a-f]{64}` \\|$", part, name)
		require.Equal(t, want, shape(part), "%s has other suites or variations: run it again", name)
		require.NotContains(t, part, "**", "a failure is none to be shipped")
		require.NotContains(t, part, "FAILED", "a failure is none to be shipped")
	}
}

func TestAResultStaysInTheDocumentUntilItsKernelRunsAgain(t *testing.T) {
	r := &result{kernel: chosenKernel{Listed: vm.List()[1]}, began: time.Unix(0, 0), suites: map[string]counts{"pkg/mounts": {Passed: 3}}, variations: map[string]string{"as it is": "works"}}
	first := render(map[string]string{r.kernel.Name: r.section("")})
	require.Equal(t, first, render(sections(first)))
	require.Contains(t, first, "| pkg/mounts | 3 passed, 0 skipped (the part of every run) | 1970-01-01 |")
	require.Contains(t, first, "| as it is | works | 1970-01-01 |")
	part := sections(first)[r.kernel.Name]
	r.suites["pkg/mounts"], r.variations, r.began, r.full = counts{Passed: 3, Failed: 1}, nil, time.Unix(1e9, 0), true
	second := r.section(part)
	require.Contains(t, second, "| pkg/mounts | **1 failed**, 3 passed, 0 skipped | 2001-09-09 |")
	require.NotContains(t, second, "| pkg/mounts | 3 passed")
	require.Contains(t, second, "| as it is | works | 1970-01-01 |", "what was not run now")
	require.Equal(t, shape(part), shape(second))
	r.kernel.Version += ".1"
	require.NotContains(t, r.section(part), "| as it is | works |", "of another kernel")
}

// What the matrix names is there: a package that has moved, or a choice that no test matches, would run nothing.
func TestTheMatrixNamesWhatThereIs(t *testing.T) {
	for _, s := range suites {
		out, err := exec.Command("grep", "-rhoE", "--include=*_test.go", `^func Test[A-Za-z0-9_]+`, s.pkg).Output()
		require.NoError(t, err, s.pkg)
		everywhere, once := 0, 0
		for name := range strings.FieldsSeq(strings.ReplaceAll(string(out), "func ", "")) {
			switch {
			case !regexp.MustCompile(s.run).MatchString(name):
			case s.once != "" && regexp.MustCompile(s.once).MatchString(name):
				once++
			default:
				everywhere++
			}
		}
		require.Positive(t, everywhere, "%s: no test of it is a part of every run", s.pkg)
		require.Equal(t, s.once != "", once > 0, "%s: what is tried on one kernel only is a part of every run", s.pkg)
	}
	require.True(t, slices.ContainsFunc(vm.List(), func(l vm.Listed) bool { return l.Name == thorough && l.Always }), "every run has the kernel on which the whole part is tried")
}
