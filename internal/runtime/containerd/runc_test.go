package containerd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func TestP5ASandboxRunsCommandsAndStopsWithCompleteEvidence(t *testing.T) {
	for _, transport := range []Transport{Socket, Attach} {
		t.Run(string(transport), func(t *testing.T) {
			h := newHost(t, transport)
			spec := h.spec(0)
			s := h.create(spec)
			ids, err := h.r.List(bound(t))
			require.NoError(t, err)
			require.Equal(t, []string{spec.SandboxID}, ids)

			a := h.attach(s, spec, 1)
			out, p := a.run("id -u; pwd; cat README; echo made > made; git add made && git -c user.name=a -c user.email=a@b commit -qm made && git log --format=%s -1")
			require.Equal(t, "1000\n"+spec.Workspace.Worktree+"\nhello\nmade", out)
			require.EqualValues(t, 0, p.ExitCode)
			require.True(t, p.SealsIntact)
			require.Len(t, a.seals, len(spec.Workspace.Seals()))
			st, err := os.Stat(filepath.Join(spec.Workspace.Worktree, "made"))
			require.NoError(t, err)
			require.EqualValues(t, 1234, ownerOf(st), "on disk it belongs to the worktree's owner")

			ev := h.stop(s)
			require.Equal(t, []string{"cgroup_empty", "deleted", "exit_event", "pidfd"}, sources(ev))
			ids, err = h.r.List(bound(t))
			require.NoError(t, err)
			require.Empty(t, ids)
			require.NoDirExists(t, spec.Dir)
			_, err = h.r.Load(bound(t), s.Identity())
			require.ErrorIs(t, err, runtime.ErrNotFound)
		})
	}
}

func TestTheContainerIsMadeAsTheEmbeddedRuntimeMakesIt(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Resources.MemoryBytes, spec.Resources.Pids = 64<<20, 20
	spec.Grants = []runtime.Grant{{Name: "g", Files: []runtime.GrantFile{{Path: "f", Content: []byte("the secret")}}}}
	s := h.create(spec)
	a := h.attach(s, spec, 1)

	t.Run("P15: grants are the command's to read, and in memory", func(t *testing.T) {
		h.nowhereOnDisk("the secret")
		out, p := a.run("cat /run/grants/g/f; grep -c ' /run/grants ro,.* tmpfs ' /proc/self/mountinfo; echo x > /run/grants/g/f")
		require.True(t, strings.HasPrefix(out, "the secret1"), out)
		require.NotZero(t, p.ExitCode)
	})
	t.Run("P9: nothing of receiptd is visible", func(t *testing.T) {
		out, _ := a.run("ls -A /.sandbox; cat /.sandbox/bin/receiptd /.sandbox/control/receiptd.log; true")
		require.Equal(t, "cat: /.sandbox/bin/receiptd: No such file or directory\ncat: /.sandbox/control/receiptd.log: No such file or directory", out, "its folder is empty")
	})
	t.Run("P11: the root and the seals are read-only", func(t *testing.T) {
		for _, attack := range []string{"touch /x", "touch /etc/x", "echo x >> .git", "rm .git", "mv .git y", "mount -o remount,rw /"} {
			out, p := a.run(attack)
			require.NotZero(t, p.ExitCode, "%s: %s", attack, out)
		}
	})
	t.Run("P16: a command's limits are its own", func(t *testing.T) {
		_, p := a.run("head -c 200M /dev/zero | tail -c 150M | wc -c")
		require.True(t, p.OOM, "the memory limit ended it")
		out, _ := a.run("for i in $(seq 100); do sleep 60 & done 2>&1 | grep -c -m1 'Resource temporarily unavailable'")
		require.Equal(t, "1", out)
		out, _ = a.run("head -c 20000000 /dev/zero > /tmp/x || echo full")
		require.Contains(t, out, "full")
	})
	t.Run("every mount is nosuid, and nodev but for the devices", func(t *testing.T) {
		out, _ := a.run("cat /proc/self/mountinfo")
		for _, line := range strings.Split(out, "\n") {
			f := strings.Fields(line)
			require.Contains(t, f[5], "nosuid", line)
			if !strings.HasPrefix(f[4], "/dev") && f[3] != "/null" { // pid1's masks in /proc
				require.Contains(t, f[5], "nodev", line)
			}
		}
	})
	require.Len(t, s.Identity().Provenance.ReceiptdSHA256, 64)
	h.stop(s)
}
