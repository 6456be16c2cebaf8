package escape

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// holdings are what a machine could run out of, as far as the agent and its sandbox hold it.
type holdings struct {
	agentDescriptors, receiptdDescriptors int // the journal's left out: it opens and compacts tables as it likes
	processes                             int // of the sandbox: receiptd, a waiting pid1, its launcher
	namespaces                            int // of every process of the machine
	mounts                                int // in receiptd's mount namespace
	cgroups                               int
}

func (s *session) holdings() holdings {
	s.T.Helper()
	h := holdings{agentDescriptors: s.agentDescriptors()}
	pids := s.sandboxPids()
	h.processes = len(pids)
	for _, pid := range pids {
		if comm, _ := os.ReadFile("/proc/" + pid + "/comm"); string(comm) == "receiptd\n" {
			h.receiptdDescriptors = entries(s.T, "/proc/"+pid+"/fd")
			b, err := os.ReadFile("/proc/" + pid + "/mountinfo")
			require.NoError(s.T, err)
			h.mounts = strings.Count(string(b), "\n")
		}
	}
	h.namespaces = namespacesOf(pids)
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*/sandbox-agent/" + s.first.GetSandbox().GetId() + "/*")
	h.cgroups = len(dirs)
	return h
}

func (s *session) agentDescriptors() (n int) {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.Cmd.Process.Pid))
	require.NoError(s.T, err)
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && !strings.HasPrefix(target, filepath.Join(s.State, "journal")) {
			n++
		}
	}
	return n
}

// sandboxPids are the processes whose cgroup has the sandbox's id in it.
func (s *session) sandboxPids() (pids []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, f := range all {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), s.first.GetSandbox().GetId()) {
			pids = append(pids, filepath.Base(filepath.Dir(f)))
		}
	}
	return pids
}

func namespacesOf(pids []string) int {
	seen := map[string]bool{}
	for _, pid := range pids {
		links, _ := filepath.Glob("/proc/" + pid + "/ns/*")
		for _, l := range links {
			if target, err := os.Readlink(l); err == nil {
				seen[target] = true
			}
		}
	}
	return len(seen)
}

func entries(t testing.TB, dir string) int {
	t.Helper()
	des, err := os.ReadDir(dir)
	require.NoError(t, err)
	return len(des)
}

// resident is a process's resident memory without what it maps from files, KiB.
func resident(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(b), "RssAnon:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(t, err)
	return n
}

func TestAThousandCommandsInARowLeaveNothingGrowing(t *testing.T) {
	s := newSession(t, "")
	run := func(n int) {
		for range n {
			require.Equal(t, sandboxv1.ExecResult_EXITED, s.exec("echo x; (setsid sleep 300 &)", patience).GetStatus())
		}
	}
	run(100)
	before, memory := s.steady(), resident(t, s.Cmd.Process.Pid)
	run(1000)
	s.waiting()
	var after holdings
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if after = s.holdings(); after == before {
			break
		}
	}
	require.Equal(t, before, after)
	require.Less(t, resident(t, s.Cmd.Process.Pid), memory+24<<10, "KiB of the agent's own memory, %d before", memory)
}

// steady is what is held once twenty looks have found the same: receiptd may be making the next pid1, or its connections, when
// there are all of its processes.
func (s *session) steady() (h holdings) {
	s.T.Helper()
	s.waiting()
	same := 0
	s.Until("what is held stays the same", func() bool {
		if now := s.holdings(); now != h {
			h, same = now, 0
		}
		same++
		return same > 20
	})
	return h
}

// waiting waits until a pid1 and a launcher wait for the next command, which is how an idle sandbox is.
func (s *session) waiting() {
	s.Until("a pid1 waits", func() bool { return len(s.sandboxPids()) == 3 })
}

// agentPosture is what the agent has that an attacker would want: compared as a whole, so that what is added is seen.
type agentPosture struct {
	uid, gid, noNewPrivs string
	namespaces           map[string]bool // the machine's own?
	descriptors          []string        // by kind
	mountsLeft           bool            // mounts of a sandbox in the machine's mount namespace
}

func TestThePostureOfTheAgentIsExactlyThis(t *testing.T) {
	s := newSession(t, "")
	s.alive()
	pid := s.Cmd.Process.Pid
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	field := func(name string) string {
		_, rest, _ := strings.Cut(string(status), "\n"+name+":")
		return strings.Join(strings.Fields(strings.SplitN(rest, "\n", 2)[0]), " ")
	}
	got := agentPosture{uid: field("Uid"), gid: field("Gid"), noNewPrivs: field("NoNewPrivs"), namespaces: map[string]bool{}}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		own, err := os.Readlink("/proc/self/ns/" + ns)
		require.NoError(t, err)
		its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		require.NoError(t, err)
		got.namespaces[ns] = own == its
	}
	got.descriptors = s.descriptorKinds(pid)
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	got.mountsLeft = strings.Contains(string(mountinfo), s.State) || strings.Contains(string(mountinfo), "/.sandbox")
	require.Equal(t, agentPosture{
		uid: "0 0 0 0", gid: "0 0 0 0", noNewPrivs: "0",
		namespaces: map[string]bool{"cgroup": true, "ipc": true, "mnt": true, "net": true, "pid": true, "user": true, "uts": true},
		descriptors: []string{
			"/dev/null", "a socket", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "libcontainer's anchors",
			"the Go runtime's CPU limits", "the journal", "the log", "the sandbox's pidfd",
		},
	}, got)
}

// descriptorKinds are the kinds of open files of a process, each named once.
func (s *session) descriptorKinds(pid int) []string {
	s.T.Helper()
	kinds := map[string]bool{}
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, l := range links {
		target, err := os.Readlink(l)
		if err != nil {
			continue
		}
		// What whoever started this test handed down to everything below it is not the agent's.
		if own, err := os.Readlink("/proc/self/fd/" + filepath.Base(l)); err == nil && own == target && strings.HasPrefix(own, "pipe:") {
			continue
		}
		switch {
		case strings.HasPrefix(target, filepath.Join(s.State, "journal")):
			target = "the journal"
		case strings.HasPrefix(target, "/sys/fs/cgroup/"):
			target = "the Go runtime's CPU limits"
		case target == "/sys/fs/cgroup", target == "/":
			target = "libcontainer's anchors"
		case strings.HasPrefix(target, "pipe:"):
			target = "a pipe"
		case target == s.Log:
			target = "the log"
		case strings.HasPrefix(target, "socket:"):
			target = "a socket"
		case target == "anon_inode:[pidfd]", strings.HasPrefix(target, "pidfd:"):
			target = "the sandbox's pidfd"
		}
		kinds[target] = true
	}
	out := make([]string, 0, len(kinds))
	for k := range kinds {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}
