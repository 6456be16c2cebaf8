package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
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
