package containerd

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/mountview"
)

// ofProc is a file of a process in /proc.
func ofProc(t *testing.T, pid int, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	require.NoError(t, err)
	return strings.TrimRight(string(b), "\n")
}

// privileges are the lines of a process's status that say what it may do, and as whom.
func privileges(t *testing.T, pid int) map[string]string {
	t.Helper()
	out := map[string]string{}
	for line := range strings.Lines(ofProc(t, pid, "status")) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Groups":
			out[key] = strings.Join(strings.Fields(value), " ")
		}
	}
	return out
}

// shared are the namespaces that a process shares with this one.
func shared(t *testing.T, pid int) (list []string) {
	t.Helper()
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		require.NoError(t, err)
		own, err := os.Readlink("/proc/self/ns/" + ns)
		require.NoError(t, err)
		if own == theirs {
			list = append(list, ns)
		}
	}
	return list
}

// The embedded runtime's receiptd has the same one (internal/runtime/embedded, TestPostureOfReceiptd).
func TestP9PostureOfReceiptdAndItsAttachUnderRunc(t *testing.T) {
	h := newHost(t, Attach)
	spec := h.spec(2)
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	pid := s.Identity().Pid
	const (
		none = "0000000000000000"
		caps = "00000000002015e0" // hostkernel.Capabilities, by number
	)
	root := strings.TrimSpace(strings.Repeat(fmt.Sprintf(" %d", spec.IDs.HostBase), 4))
	require.Equal(t, map[string]string{
		"CapInh": none, "CapPrm": caps, "CapEff": caps, "CapBnd": caps, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2", "Uid": root, "Gid": root, "Groups": "",
	}, privileges(t, pid))
	require.Equal(t, []string{"time"}, shared(t, pid))
	ids := fmt.Sprintf("0 %d %d", spec.IDs.HostBase, spec.IDs.Size)
	for _, m := range []string{"uid_map", "gid_map"} {
		require.Equal(t, ids, strings.Join(strings.Fields(ofProc(t, pid, m)), " "), m)
	}
	require.Equal(t, "HOME=/\x00", ofProc(t, pid, "environ"))
	for line := range strings.Lines(ofProc(t, pid, "cgroup")) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), ":/")
		require.Equal(t, h.parent+"/"+spec.SandboxID+"/"+hostkernel.InitCgroup, "/"+path, "in no cgroup of a command")
	}

	require.Equal(t, "0", ofProc(t, pid, "oom_score_adj"))
	shims := h.d.Shims()
	require.Len(t, shims, 1)
	require.NotEqual(t, "0", ofProc(t, shims[0], "oom_score_adj"), "control: the shim has another, which it would inherit")

	pids := h.attaches(s.Identity())
	require.Len(t, pids, 1)
	attach := privileges(t, pids[0])
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		require.Equal(t, none, attach[set], "%s of the attach process", set)
	}
	require.Equal(t, "1", attach["NoNewPrivs"])
	require.Equal(t, root, attach["Uid"])
	require.Equal(t, []string{"time"}, shared(t, pids[0]))
	out, _ := a.run("echo of use")
	require.Equal(t, "of use", out)
	h.stop(s)
}

func TestP11PostureOfTheMountsUnderRunc(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	s := h.create(spec)
	require.Equal(t, mountview.Planned(t, spec, "disk ro,nosuid,nodev"), mountview.Of(t, s.Identity().Pid))
	h.stop(s)
}
