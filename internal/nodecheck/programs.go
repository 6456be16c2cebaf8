package nodecheck

import (
	"context"
	"encoding/json"
	"errors"
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
func judgeGit(said string) Fact {
	m := gitVersion.FindStringSubmatch(said)
	if m == nil {
		return unsure("%q names no version", said)
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	if major < 2 || major == 2 && minor < 39 {
		return unsure("%s; nothing older than 2.39 has been tried", said)
	}
	return yes("%s", said)
}

// lookAtRunc takes the program that the shim will start: the one that is configured, else what containerd finds in its own
// PATH, of which this process's is the best guess.
func lookAtRunc(ctx context.Context, c config.ContainerdRuntime) Fact {
	return lookAtShimmed(ctx, c, "runc", "containerd-shim-runc-v2")
}

func lookAtGVisor(ctx context.Context, c config.ContainerdRuntime) Fact {
	return lookAtShimmed(ctx, c, "runsc", "containerd-shim-runsc-v1")
}

func lookAtShimmed(ctx context.Context, c config.ContainerdRuntime, program, shim string) Fact {
	if c.Binary != "" {
		program = c.Binary
	}
	said, err := run(ctx, program, "--version")
	switch {
	case err != nil && c.Binary == "" && errors.Is(err, exec.ErrNotFound):
		return nof("there is no %s in PATH", program)
	case err != nil:
		return no(err)
	}
	path, err := exec.LookPath(shim)
	if err != nil {
		return unsure("%s; %s is not in this process's PATH, and may be in containerd's", said, shim)
	}
	return yes("%s; %s", said, path)
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

// judgeContainerd: its version 2 is what the runtimes are written for.
func judgeContainerd(address, version string) Fact {
	major, err := strconv.Atoi(strings.TrimPrefix(strings.SplitN(version, ".", 2)[0], "v"))
	switch {
	case err != nil:
		return unsure("%s: version %q", address, version)
	case major < 2:
		return nof("%s: version %s", address, version).do("install containerd 2.4 or newer")
	}
	return yes("%s: version %s", address, version)
}

func lookAtKata(ctx context.Context) map[ID][]Fact { return kataFacts(kata.Check(ctx, kata.Places{})) }

// kataFacts are one for KVM, and one for everything else that Kata needs.
func kataFacts(r kata.Report) map[ID][]Fact {
	seen := map[ID][]Fact{}
	for _, it := range r.Items {
		fact := Fact{Answer: Answer(it.Answer), Detail: it.Detail, Remedy: it.Remedy}
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
	return nof("%s has no configuration %s", c.ConfDir, c.Network)
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
