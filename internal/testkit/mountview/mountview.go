// Package mountview says which mounts a sandbox has to show and which it shows, for the tests of every runtime that makes them on the
// node's kernel.
package mountview

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Planned are all mounts of a sandbox, as Of gives them. root is that of the root file system.
func Planned(t testing.TB, spec runtime.Spec, root string) map[string]string {
	t.Helper()
	want := map[string]string{
		"/":                           root,
		"/proc":                       "proc rw,nosuid,nodev,noexec",
		"/dev":                        "tmpfs ro,nosuid,nodev,noexec",
		"/dev/pts":                    "devpts rw,nosuid,noexec",
		"/dev/shm":                    "tmpfs rw,nosuid,nodev,noexec",
		"/tmp":                        "tmpfs rw,nosuid,nodev",
		runtime.HomePath:              "tmpfs rw,nosuid,nodev",
		runtime.InternalDir:           "tmpfs ro,nosuid,nodev,noexec",
		runtime.ReceiptsPath:          "disk rw,nosuid,nodev,noexec,idmapped",
		runtime.ControlPath:           "disk rw,nosuid,nodev,noexec,idmapped",
		runtime.BinPath + "/receiptd": "disk ro,nosuid,nodev",
		runtime.BinPath + "/pid1":     "disk ro,nosuid,nodev",
	}
	for _, d := range hostkernel.DeviceNodes {
		want[d.Path] = "devtmpfs rw,nosuid,noexec"
	}
	for _, m := range spec.Workspace.Mounts {
		want[m.Target] = "disk rw,nosuid,nodev,idmapped"
		if m.ReadOnly {
			want[m.Target] = "disk ro,nosuid,nodev,idmapped"
		}
		if m.Empty {
			want[m.Target] = "tmpfs ro,nosuid,nodev,noexec"
		}
	}
	skeleton, _, err := hostkernel.PlanRoot(spec)
	require.NoError(t, err)
	for _, p := range skeleton.BindPaths() {
		want[p] = "disk ro,nosuid,nodev"
	}
	return want
}

// Of is what counts of each mount that a process sees, by its target: the kind of its file system and its flags.
func Of(t testing.TB, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	require.NoError(t, err)
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		f := strings.Fields(before)
		require.Len(t, f, 6, "a private mount has no fields of propagation: %s", line)
		var flags []string
		for o := range strings.SplitSeq(f[5], ",") {
			switch o {
			case "ro", "rw", "nosuid", "nodev", "noexec", "idmapped":
				flags = append(flags, o)
			}
		}
		kind, _, _ := strings.Cut(after, " ")
		switch kind {
		case "proc", "tmpfs", "devpts", "devtmpfs":
		default:
			kind = "disk"
		}
		out[f[4]] = kind + " " + strings.Join(flags, ",")
	}
	return out
}
