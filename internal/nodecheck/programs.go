package nodecheck

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	daemon "github.com/sandbox-agent/sandbox-agent/internal/runtime/containerd"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// run gives what a program says of its version: its first line, and nothing of this process's environment but PATH.
func run(ctx context.Context, program string, args ...string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Env = "/", []string{"PATH=" + os.Getenv("PATH"), "LANG=C", "HOME=/nonexistent"}
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", path, strings.Join(args, " "), err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return path + ": " + line, nil
}

var gitVersion = regexp.MustCompile(`git version (\d+)\.(\d+)`)

func lookAtGit(ctx context.Context) Fact {
	said, err := run(ctx, "git", "version")
	if err != nil {
		return no(err)
	}
	return judgeGit(said)
}

// judgeGit: 2.39 is the oldest that the tests are run with.
func judgeGit(said string) Fact { return tried(said, gitVersion, 2, 39) }

// runcVersion is in the first line of "runc --version". gVisor's versions are dates, and are not compared.
var runcVersion = regexp.MustCompile(`runc version (\d+)\.(\d+)`)

// tried judges what a program says of its version: what is older than anything that the tests are run with may do, and nobody knows.
func tried(said string, version *regexp.Regexp, major, minor int) Fact {
	m := version.FindStringSubmatch(said)
	if m == nil {
		return unsure("%q names no version", said)
	}
	x, _ := strconv.Atoi(m[1])
	y, _ := strconv.Atoi(m[2])
	if x < major || x == major && y < minor {
		return unsure("%s; nothing older than %d.%d has been tried", said, major, minor)
	}
	return yes("%s", said)
}

// shimmed is a runtime of containerd's: the program that its shim starts, and the shim. containerd finds the shim in its own PATH, and
// the shim the program, unless that is configured.
type shimmed struct{ program, shim string }

var (
	runcShimmed   = shimmed{"runc", "containerd-shim-runc-v2"}
	gvisorShimmed = shimmed{"runsc", "containerd-shim-runsc-v1"}
)

// look asks the program for its version. binary is its configured path, or empty. path is containerd's PATH; where it is empty
// that is not known, and this process's is the best guess: what isn't there may be in containerd's.
func (s shimmed) look(ctx context.Context, binary, path string) Fact {
	known := path != ""
	if !known {
		path = os.Getenv("PATH")
	}
	program := binary
	if program == "" {
		program = inPATH(path, s.program)
	}
	if program == "" {
		return absent(s.program, known)
	}
	said, err := run(ctx, program, "--version")
	if err != nil {
		return no(err)
	}
	shim := inPATH(path, s.shim)
	if shim == "" {
		fact := absent(s.shim, known)
		fact.Detail = said + "; " + fact.Detail
		return fact
	}
	fact := yes("%s", said)
	if s == runcShimmed {
		fact = tried(said, runcVersion, 1, 5)
	}
	fact.Detail += "; " + shim
	return fact
}

func absent(program string, known bool) Fact {
	if known {
		return nof("%s is not in containerd's PATH", program)
	}
	return unsure("%s is not in this process's PATH, and may be in containerd's, which is not known here", program).
		do("start containerd, and run the check where its process can be seen (as root, in its PID namespace)")
}

// inPATH is the first executable file of this name in the absolute folders of a PATH; empty: none.
func inPATH(path, program string) string {
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		if found, err := exec.LookPath(filepath.Join(dir, program)); err == nil {
			return found
		}
	}
	return ""
}

// lookAtShimmed finds containerd's PATH first.
func lookAtShimmed(ctx context.Context, s shimmed, c config.ContainerdRuntime, address string) Fact {
	path := daemonPATH(ctx, address)
	if path == "" {
		if root, theirs, err := daemon.DaemonElsewhere(ctx, address); err == nil {
			defer root.Close()
			return s.lookIn(root, c.Binary, theirs)
		}
	}
	return s.look(ctx, c.Binary, path)
}

// lookIn looks for both programs in the root folder of a containerd with mounts of its own, as an agent in a pod finds it. Programs of
// another file system are not run: what they need is there, and not here.
func (s shimmed) lookIn(root *os.File, binary, path string) Fact {
	program := binary
	if program == "" {
		program = s.program
	}
	var found []string
	for _, name := range []string{program, s.shim} {
		at := inRoot(root, name, path)
		if at == "" {
			return absent(name, true)
		}
		found = append(found, at)
	}
	return yes("%s; %s; in containerd's own file system: not run", found[0], found[1])
}

// inRoot is where a program is, which is an absolute path or in an absolute folder of a PATH, in another root folder; empty: nowhere.
func inRoot(root *os.File, program, path string) string {
	candidates := []string{program}
	if !filepath.IsAbs(program) {
		candidates = nil
		for _, dir := range filepath.SplitList(path) {
			if filepath.IsAbs(dir) {
				candidates = append(candidates, filepath.Join(dir, program))
			}
		}
	}
	for _, c := range candidates {
		if f, err := runtime.ProgramIn(root, c); err == nil {
			f.Close()
			return c
		}
	}
	return ""
}

// daemonPATH is containerd's PATH; empty where it is not known.
func daemonPATH(ctx context.Context, address string) string {
	path, err := daemon.DaemonPATH(ctx, address)
	if err != nil {
		return ""
	}
	return path
}

func askContainerd(ctx context.Context, c config.Containerd) Fact {
	if _, err := os.Stat(c.Address); err != nil {
		return no(err)
	}
	client, err := containerd.New(c.Address, containerd.WithDefaultNamespace(c.Namespace), containerd.WithTimeout(probeTime/2))
	if err != nil {
		return no(fmt.Errorf("%s: %w", c.Address, err))
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, probeTime/2)
	defer cancel()
	v, err := client.Version(ctx)
	if err != nil {
		return no(fmt.Errorf("%s: %w", c.Address, err))
	}
	return judgeContainerd(c.Address, v.Version)
}

// judgeContainerd: its version 2 is what the runtimes are written for, and 2.4 what they are tried with.
func judgeContainerd(address, version string) Fact {
	said := fmt.Sprintf("%s: version %s", address, version)
	fact := tried(said, containerdVersion, 2, 4)
	if m := containerdVersion.FindStringSubmatch(said); m != nil && (m[1] == "0" || m[1] == "1") {
		fact = nof("%s", said)
	}
	if fact.Answer != Yes {
		fact.Remedy = "install containerd 2.4 or newer"
	}
	return fact
}

var containerdVersion = regexp.MustCompile(`version v?(\d+)\.(\d+)`)

// lookAtKata looks for the shim and the configuration that containerd would be given.
func lookAtKata(ctx context.Context, c config.Containerd) map[ID][]Fact {
	p := kata.Places{Handler: c.Runtimes.Kata.Handler, Config: c.Runtimes.Kata.Config, ContainerdPATH: daemonPATH(ctx, c.Address)}
	return kataFacts(kata.Check(ctx, p), p.ContainerdPATH != "")
}

// kataFacts are one for KVM, and one for everything else that Kata needs. known says that the shim was looked for in containerd's PATH.
func kataFacts(r kata.Report, known bool) map[ID][]Fact {
	seen := map[ID][]Fact{}
	for _, it := range r.Items {
		fact := Fact{Answer: Answer(it.Answer), Detail: it.Detail, Remedy: it.Remedy}
		if it.Name == "shim" && it.Answer == kata.No && !known {
			fact.Answer = Inconclusive
			fact.Detail += "; containerd's own PATH, in which one may be, is not known here"
		}
		if it.Name == "kvm" {
			seen[KVM] = append(seen[KVM], fact)
			continue
		}
		seen[Kata] = append(seen[Kata], fact.of(it.Name))
	}
	if err := kata.Refused(r.Findings); err != nil {
		seen[Kata] = append(seen[Kata], no(err).of("what was found").do("mend what is named, see docs/kata.md"))
	}
	return seen
}

// lookAtCNI takes the configuration of the configured name, else the first by file name, as containerd does, and looks for
// its plugins.
func lookAtCNI(c config.NetworkCNI) Fact {
	entries, err := os.ReadDir(c.ConfDir)
	if err != nil {
		return no(err)
	}
	for _, e := range entries { // sorted by name
		if !slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		list, err := readCNI(filepath.Join(c.ConfDir, e.Name()))
		if err != nil {
			return no(err).do("mend the configuration")
		}
		if c.Network == "" || c.Network == list.Name {
			return judgeCNI(list, c.BinDirs)
		}
	}
	return nof("%s has no configuration%s", c.ConfDir, named(c.Network))
}

func named(network string) string {
	if network == "" {
		return ""
	}
	return " named " + network
}

// cniConfiguration is what is looked at of a configuration, a list of plugins or a single one.
type cniConfiguration struct {
	path       string
	Name, Type string
	Plugins    []struct{ Type string }
}

func readCNI(path string) (cniConfiguration, error) {
	c := cniConfiguration{path: path}
	b, err := os.ReadFile(path)
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func judgeCNI(c cniConfiguration, folders []string) Fact {
	types := []string{c.Type}
	for _, p := range c.Plugins {
		types = append(types, p.Type)
	}
	var missing []string
	for _, name := range types {
		there := func(folder string) bool {
			_, err := exec.LookPath(filepath.Join(folder, name))
			return err == nil
		}
		if name != "" && !slices.ContainsFunc(folders, there) {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return nof("%s wants plugins that are in none of %s: %s", c.path, strings.Join(folders, ", "), strings.Join(missing, ", ")).do("install these plugins, or name their folder in network.cni.bin_dirs")
	}
	return yes("%s", c.path)
}
