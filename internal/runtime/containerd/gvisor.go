package containerd

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// gvisorGuest is what runsc needs.
var gvisorGuest = guest{
	// What its shim takes for a sandbox of its own; without it a creation waits for ever.
	annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox"},
	// In gVisor the files of a process in a new user namespace belong to that one's root as soon as there is one, also when
	// the process shares the memory of an undumpable parent: without this receiptd can't write a pid1's gid map.
	capabilities: []string{"CAP_DAC_OVERRIDE"},
	change:       completeForGVisor,
}

func completeForGVisor(_ *Runtime, oci *specs.Spec, in input) error {
	dropInodeLimits(oci)
	limitGVisor(oci, in.spec.Resources)
	return showOOM(oci, in)
}

// oomName is the name of that file in receiptd's control folder, where cmd/receiptd looks for it.
const oomName = "oom"

// showOOM gives receiptd the file in which the node's kernel counts what the sandbox's memory limit has killed: gVisor has no
// such count, and takes the end of a process of its own on the node for a signal to the command that it stood for.
func showOOM(oci *specs.Spec, in input) error {
	all, err := hostkernel.Hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if in.spec.Resources.MemoryBytes == 0 || !h.Has("memory") {
			continue
		}
		file := "memory.oom_control"
		if h.V2 {
			file = "memory.events"
		}
		oci.Mounts = append(oci.Mounts, specs.Mount{
			Source: filepath.Join(h.Path(in.cgroup), hostkernel.InitCgroup, file), Destination: runtime.ControlPath + "/" + oomName,
			Type: "bind", Options: []string{"nosuid", "nodev", "noexec", "rprivate", "bind", "ro"},
		})
		oci.Process.Args = append(oci.Process.Args, "--oom")
		break
	}
	return nil
}

// gvisorsOwn is what runsc's own processes take of a sandbox's memory, at most, beside its commands: its kernel and its gofer,
// receiptd and two pid1s.
const gvisorsOwn = 256 << 20

// limitGVisor holds the whole sandbox to a command's limits, and what runsc takes itself: on the node no cgroup has a command
// alone. Nothing of it goes to swap where cgroups count that: its grants are in its memory. The number of processes is
// receiptd's to limit, inside: on the node there are threads of runsc's, which it can't do without.
func limitGVisor(oci *specs.Spec, r runtime.Resources) {
	oci.Process.Args = append(oci.Process.Args, "--own-cgroups", fmt.Sprintf("--pids=%d", r.Pids))
	if r.MemoryBytes > 0 {
		limit := r.MemoryBytes + gvisorsOwn
		oci.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &limit}
	}
	if r.CPUs > 0 {
		quota, period := hostkernel.CPUQuota(r.CPUs)
		oci.Linux.Resources.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
}

// dropInodeLimits takes an option away that gVisor's tmpfs doesn't know and refuses.
func dropInodeLimits(oci *specs.Spec) {
	for i := range oci.Mounts {
		m := &oci.Mounts[i]
		m.Options = slices.DeleteFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "nr_inodes=") })
	}
}

// gvisorConcedes is what can't hold under gVisor: what a sandbox's proof shows there, and what commands have shown.
var gvisorConcedes = []runtime.Concession{
	{
		Promise: "P3", What: runtime.ConcedesSockets,
		Why: "gVisor's network stack still delivers what a closed TCP connection holds, and has no call to count or destroy such connections. " +
			"Without a network (network.default none) that reaches nobody but the sandbox itself; where it matters, retire the sandbox after the command.",
	},
	{
		Promise: "P9", What: "pid1 is not visible",
		Why: "gVisor's /proc has no hidepid: a command sees that there is a process 1, its name, the numbers of its descriptors and of its namespaces. It has another uid, " +
			"so a command can't signal or trace it, nor read its memory or environment, nor see what its descriptors lead to.",
	},
	{
		Promise: "P16", What: "a command that reaches its memory limit ends alone",
		Why: "no limit of memory holds inside gVisor: the limit, and 256 MiB for gVisor itself, is the sandbox's on the node. Beyond it the node's kernel may end the " +
			"sandbox: the command is UNCERTAIN then, with evidence, and the next one gets a new sandbox. It may also be the command alone that ends: SIGNALED, and its " +
			"receipt says that it was for memory.",
	},
	{
		Promise: "P16", What: "the files of /tmp, HOME and /dev/shm are bounded in number",
		Why: "runsc takes no such limit. Their bytes are bounded, and what an empty file takes counts as the sandbox's memory.",
	},
}

// gvisorOptions name a configuration to the shim, which takes them in no other way.
func gvisorOptions(r *Runtime, oci *specs.Spec) (typeurl.Any, error) {
	name := "runsc.toml"
	alone := !joinsNetwork(oci)
	if alone {
		name = "runsc-none.toml"
	}
	path := filepath.Join(r.opts.StateDir, name)
	if err := writeIfOther(path, gvisorConfig(r.opts.Binary, alone)); err != nil {
		return nil, err
	}
	return typeurl.MarshalAnyToProto(&runtimeoptions.Options{TypeUrl: "io.containerd.runsc.v1.options", ConfigPath: path})
}

// joinsNetwork says whether a container has a network namespace that was made for it.
func joinsNetwork(oci *specs.Spec) bool {
	return slices.ContainsFunc(oci.Linux.Namespaces, func(ns specs.LinuxNamespace) bool { return ns.Type == specs.NetworkNamespace && ns.Path != "" })
}

// gvisorConfig is that of the shim; binary is runsc's path, empty for what is in the shim's PATH. Usually runsc takes its
// interfaces and their addresses from a network namespace of the node, and of a new one nothing, as there the loopback is down. A
// sandbox that is alone has only gVisor's own loopback.
func gvisorConfig(binary string, alone bool) []byte {
	var b bytes.Buffer
	if binary != "" {
		fmt.Fprintf(&b, "binary_name = %q\n", binary)
	}
	if alone {
		b.WriteString("[runsc_config]\nnetwork = \"none\"\n")
	}
	return b.Bytes()
}

// writeIfOther writes a file whole or not at all, unless it has that content.
func writeIfOther(path string, content []byte) error {
	if was, err := os.ReadFile(path); err == nil && bytes.Equal(was, content) {
		return nil
	}
	if err := os.WriteFile(path+"~", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+"~", path)
}
