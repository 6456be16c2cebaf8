package node

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// runscState is where the shim keeps runsc's state: /run/containerd/runsc and the namespace in containerd.
const runscState = "/run/containerd/runsc/sandbox-agent"

// guests are the folders of the containerds that this process has started for sandboxes under gVisor.
var guests struct {
	sync.Mutex
	folders []string
}

// OnGVisor says whether RuntimeEnv names gVisor: what a test expects there may be what docs/gvisor.md says.
func OnGVisor() bool { return os.Getenv(RuntimeEnv) == "gvisor" }

func addGuests(folder string) {
	guests.Lock()
	defer guests.Unlock()
	guests.folders = append(guests.folders, folder)
}

// listArguments names the arguments of every thread in a sandbox, as its outermost PID namespace shows them.
const listArguments = `for f in /proc/[0-9]*/task/[0-9]*/cmdline; do tr '\0' '\n' <$f; echo; done 2>/dev/null; true`

// GuestArguments are the arguments of all that runs in sandboxes under gVisor, which the node's /proc doesn't show: runsc looks
// into them for it. None without gVisor.
func GuestArguments(t testing.TB) (out []string) {
	t.Helper()
	guests.Lock()
	defer guests.Unlock()
	for _, id := range runningGuests(t) {
		b, err := runsc(t, "exec", id, "/usr/bin/bash", "-c", listArguments)
		if err != nil {
			require.NotContains(t, runningGuests(t), id, "runsc can't look into the sandbox: %v: %s", err, b)
		}
		out = append(out, strings.Split(string(b), "\n")...)
	}
	return out
}

// runningGuests are the ids of this process's sandboxes.
func runningGuests(t testing.TB) (ids []string) {
	t.Helper()
	if len(guests.folders) == 0 {
		return nil
	}
	b, err := runsc(t, "list", "--format=json")
	require.NoError(t, err, "%s", b)
	var all []struct{ ID, Status, Bundle string }
	require.NoError(t, json.Unmarshal(b, &all), "%s", b)
	for _, c := range all {
		for _, folder := range guests.folders {
			if c.Status == "running" && strings.HasPrefix(c.Bundle, folder+"/") {
				ids = append(ids, c.ID)
			}
		}
	}
	return ids
}

func runsc(t testing.TB, args ...string) ([]byte, error) {
	program := filepath.Join(containerd.Folder(t, "gvisor"), "runsc")
	return exec.Command(program, append([]string{"--root=" + runscState}, args...)...).CombinedOutput()
}

// SandboxProcess is the process of the node that is the sandbox's init to it: receiptd, or under gVisor the guest's kernel.
func SandboxProcess(t testing.TB, sandbox string) int {
	t.Helper()
	file, name := "comm", "receiptd\n"
	if OnGVisor() {
		file, name = "cmdline", "runsc-sandbox\x00"
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(t, err)
	for _, p := range processes {
		is, _ := os.ReadFile(filepath.Join(p, file)) // what has ended has neither
		cgroup, _ := os.ReadFile(filepath.Join(p, "cgroup"))
		if strings.HasPrefix(string(is), name) && strings.Contains(string(cgroup), sandbox) {
			pid, err := strconv.Atoi(filepath.Base(p))
			require.NoError(t, err)
			return pid
		}
	}
	require.FailNow(t, "it is not to be found", "%q of the sandbox %s", name, sandbox)
	return 0
}

// InNetworkOf is what starts a program, given with its arguments, on the node and in a sandbox's network: under gVisor, whose
// network is none of the node's, in the guest, as its root and beside every command.
func InNetworkOf(t testing.TB, sandbox string) []string {
	t.Helper()
	if OnGVisor() {
		return []string{filepath.Join(containerd.Folder(t, "gvisor"), "runsc"), "--root=" + runscState, "exec", sandbox, "/usr/bin/env"}
	}
	return []string{"nsenter", "-t", strconv.Itoa(SandboxProcess(t, sandbox)), "-n"}
}
