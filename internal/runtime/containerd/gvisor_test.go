package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// gvisorsVersion is the same in all of them (pkg/sentry/kernel/version.go there).
const gvisorsVersion = "#1 SMP Sun Jan 10 15:06:54 PST 2016"

func TestUnderGVisorACommandRunsToItsReceipt(t *testing.T) {
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) { runUnderGVisor(t, layout) })
	}
}

func runUnderGVisor(t *testing.T, layout string) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.specIn(layout, 0)
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	out, p := a.run("id -u; pwd; cat README; uname -v; echo made > made; git add made && git -c user.name=a -c user.email=a@b commit -qm made && git log --format=%s -1")
	require.Equal(t, "1000\n"+spec.Workspace.Worktree+"\nhello\n"+gvisorsVersion+"\nmade", out)
	require.EqualValues(t, 0, p.ExitCode)
	require.True(t, p.SealsIntact)
	for _, to := range []string{"127.0.0.1", "::1"} {
		out, _ = a.run("exec 3<>/dev/tcp/" + to + "/1")
		require.Contains(t, out, "Connection refused", "a loopback of its own, and nothing else")
	}
	out, _ = a.run("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; exec 3<>/dev/tcp/192.0.2.1/1")
	require.Regexp(t, "^lo\n.*unreachable", out)
	for _, attack := range []string{"touch /x", "echo x >> .git", "rm .git", "mv .git y", "ls /.sandbox/receipts"} {
		out, p := a.run(attack)
		require.NotZero(t, p.ExitCode, "%s: %s", attack, out)
	}
	ev := h.stop(s)
	require.Equal(t, []string{"cgroup_empty", "deleted", "exit_event", "pidfd"}, sources(ev))
}

func TestP15UnderGVisorGrantsAreTheCommandsToReadAndInMemory(t *testing.T) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.spec(0)
	spec.Grants = []runtime.Grant{{Name: "g", Files: []runtime.GrantFile{{Path: "sub/f", Content: []byte("the secret")}, {Path: "e"}}}}
	s := h.create(spec)
	h.nowhereOnDisk("the secret")
	a := h.attach(s, spec, 1)
	out, p := a.run("cd /run/grants && cat g/sub/f; echo; stat -c '%u %a' g g/sub g/sub/f g/e; grep -c ' /run/grants ro,.* tmpfs ' /proc/self/mountinfo; chmod u+w g/sub/f; (echo x > g/sub/f)")
	require.NotZero(t, p.ExitCode)
	require.Equal(t, "the secret\n1000 500\n1000 500\n1000 400\n1000 400\n1\nbash: line 1: g/sub/f: Read-only file system", out)
	h.stop(s)
}

func TestP16UnderGVisorACommandsProcessesAreItsOwn(t *testing.T) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.spec(0)
	spec.Resources.Pids = 20
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	out, p := a.run("for i in $(seq 100); do sleep 60 & done 2>&1 | grep -c -m1 'Resource temporarily unavailable'")
	require.Equal(t, "1", out)
	require.Equal(t, "empty", p.Boundary.Cgroup)
	out, _ = a.run("echo alive; ls -A /.sandbox")
	require.Equal(t, "alive\nls: cannot open directory '/.sandbox': Permission denied", out)
	h.stop(s)
}

func TestP5UnderGVisorTheEndOfItsKernelIsTheEndOfTheSandbox(t *testing.T) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.spec(0)
	s := h.create(spec)
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", s.Identity().Pid))
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(line), "runsc-sandbox\x00"), "the init, as the node sees it, is the guest's kernel: %q", line)
	a := h.attach(s, spec, 1)
	stream := a.begin("long", gated)
	awaitStarted(t, spec)
	require.NoError(t, unix.Kill(s.Identity().Pid, unix.SIGKILL))
	select {
	case <-s.Exited():
	case <-bound(t).Done():
		t.Fatal("the end of runsc was not noticed")
	}
	for err == nil {
		_, err = stream.Recv() // the connection ends, and with it the command's answer
	}
	require.NoFileExists(t, filepath.Join(spec.ReceiptsDir, "long.json"))
	_, err = h.runtime().Load(bound(t), s.Identity())
	require.ErrorIs(t, err, runtime.ErrNotFound)
	require.Equal(t, []string{"cgroup_empty", "deleted", "exit_event", "pidfd"}, sources(h.stop(s)))
}

// What the node's kernel kills for memory is a process of gVisor's: one that stands for the command's memory, and then the
// command ends alone, or gVisor itself.
func TestP16UnderGVisorWhatTheMemoryLimitEndsIsSaid(t *testing.T) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.spec(0)
	spec.Resources.MemoryBytes = 64 << 20
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	out, p := a.run("echo enough")
	require.Equal(t, "enough", out)
	require.False(t, p.OOM)
	require.Equal(t, "0", oomKills(t, s.Identity())[hostkernel.InitCgroup])

	stream := a.begin("hog", "x=$(printf %1000000s); while :; do x+=$x; done")
	var err error
	for done := false; err == nil && !done; {
		var ev *receiptdv1.ExecEvent
		ev, err = stream.Recv()
		done = ev.GetDone() != nil
	}
	if err != nil {
		<-s.Exited()
		require.NoFileExists(t, filepath.Join(spec.ReceiptsDir, "hog.json"), "it ended with its sandbox, and nobody says how")
		h.stop(s)
		return
	}
	require.NotEqual(t, "0", oomKills(t, s.Identity())[hostkernel.InitCgroup])
	p = a.predicate("hog")
	require.Equal(t, receipt.Signaled, p.Status)
	require.True(t, p.OOM)
	require.Equal(t, receipt.ReasonOOM, p.Reason)
	out, p = a.run("echo next")
	require.Equal(t, "next", out)
	require.False(t, p.OOM, "it is said of the command that it happened to alone")
	h.stop(s)
}

// The page, the session and the node check name the same promises in the same words.
func TestThePageHasEachConcession(t *testing.T) {
	const path = "../../../docs/gvisor.md"
	if _, err := os.Stat(path); err != nil {
		t.Skip("the documentation is not beside the package (an emulated guest)")
	}
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	_, list, found := strings.Cut(string(page), "## What is conceded\n")
	require.True(t, found)
	var rows, declared []string
	for line := range strings.Lines(list) {
		if cells := strings.Split(line, "|"); strings.HasPrefix(line, "| P") {
			rows = append(rows, strings.TrimSpace(cells[1])+" "+strings.ReplaceAll(strings.TrimSpace(cells[2]), "`", ""))
		}
	}
	for _, c := range kinds[GVisor].concessions {
		declared = append(declared, c.Promise+" "+c.What)
		require.NotEmpty(t, c.Why, c.What)
	}
	require.Equal(t, declared, rows)
}
