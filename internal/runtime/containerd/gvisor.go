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
)

// gvisorGuest is what runsc needs.
var gvisorGuest = guest{
	// What its shim takes for a sandbox of its own; without it a creation waits for ever.
	annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox"},
	// In gVisor the files of a process in a new user namespace belong to that one's root as soon as there is one, also when
	// the process shares the memory of an undumpable parent: without this receiptd can't write a pid1's gid map.
	capabilities: []string{"CAP_DAC_OVERRIDE"},
	change:       dropInodeLimits,
}

// dropInodeLimits takes an option away that gVisor's tmpfs doesn't know and refuses.
func dropInodeLimits(_ *Runtime, oci *specs.Spec, _ input) error {
	for i := range oci.Mounts {
		m := &oci.Mounts[i]
		m.Options = slices.DeleteFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "nr_inodes=") })
	}
	return nil
}

// gvisorConcedes is what can't hold under gVisor: what a sandbox's proof shows there, and what commands have shown.
var gvisorConcedes = []runtime.Concession{
	{
		Promise: "P9", What: "pid1 is not visible",
		Why: "gVisor's /proc has no hidepid: a command sees that there is a process 1, and its name. It has another uid, so a command can't signal or trace it, nor read its memory or environment.",
	},
}

// gvisorOptions name a configuration to the shim, which takes them in no other way.
func gvisorOptions(r *Runtime) (typeurl.Any, error) {
	path := filepath.Join(r.opts.StateDir, "runsc.toml")
	if err := writeIfOther(path, gvisorConfig(r.opts.Binary)); err != nil {
		return nil, err
	}
	return typeurl.MarshalAnyToProto(&runtimeoptions.Options{TypeUrl: "io.containerd.runsc.v1.options", ConfigPath: path})
}

// gvisorConfig is that of the shim; binary is runsc's path, empty for what is in the shim's PATH.
func gvisorConfig(binary string) []byte {
	var b bytes.Buffer
	if binary != "" {
		fmt.Fprintf(&b, "binary_name = %q\n", binary)
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
