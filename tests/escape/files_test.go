package escape

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP11ACommandWritesNowhereButInItsOwnPlaces(t *testing.T) {
	s := newSession(t, "")
	// access(2) answers for the mount as well as for the mode.
	writable := s.output(`find / -path /proc -prune -o -path "$PWD" -prune -o -writable -not -type l -print 2>/dev/null | sort`)
	own := []string{"/tmp", "/home/sandbox", "/dev/shm", "/dev/pts", "/dev/ptmx", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", filepath.Join(s.repo, ".git")}
	for _, path := range strings.Fields(writable) {
		inside := slices.ContainsFunc(own, func(o string) bool { return path == o || strings.HasPrefix(path, o+"/") })
		require.True(t, inside, "%s is writable", path)
	}
	require.Contains(t, writable, "/home/sandbox\n", "the control case: what may be written is found")
	// A masked file is /dev/null and takes anything.
	res := s.exec(`for p in / /usr /usr/bin /etc /etc/passwd /etc/ld.so.cache /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger /proc/sys/vm/drop_caches /sys/kernel/uevent_helper /lib /bin/bash /.sandbox /home /var /run; do
  [ $p -ef /dev/null ] && continue
  { echo x > $p/x || echo x >> $p; } 2>/dev/null && echo "wrote $p"
  mv $p $p.x 2>/dev/null && echo "moved $p"
done; true`, 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.Empty(t, res.GetStdoutText())
}

func TestP9NothingElseOfTheNodeIsSeen(t *testing.T) {
	a := newAgent(t, "")
	s, other := a.session(owner), a.session(owner+1)
	other.put("secret", "of another session", 0o644)
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("x"), 0o644))
	beside := filepath.Join(filepath.Dir(s.worktree), "beside")
	require.NoError(t, os.WriteFile(beside, []byte("x"), 0o644))
	for _, p := range []string{other.worktree, other.repo, secret, beside, "/root", "/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/machine-id", "/boot", "/run/user", "/var/log", "/var/lib", "/var/spool",
		"/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/fuse", "/dev/net/tun", "/dev/vsock", "/dev/kvm", "/dev/loop0", "/dev/userfaultfd", "/sys/kernel/debug", "/sys/fs/cgroup/memory", "/proc/1/root/etc"} {
		res := s.exec(fmt.Sprintf(`[ -d %[1]q ] && ls -A %[1]q 2>/dev/null; [ -f %[1]q ] && cat %[1]q 2>/dev/null; [ -b %[1]q -o -c %[1]q ] && echo device; true`, p), 0)
		require.Empty(t, res.GetStdoutText(), p)
	}
	for _, p := range []string{"/proc/kcore", "/proc/keys", "/proc/kallsyms", "/proc/kmsg", "/proc/timer_list"} {
		require.Empty(t, s.exec("head -c 100 "+p+" 2>/dev/null; true", 0).GetStdoutText(), p)
	}
	require.Equal(t, "of another session", other.output("cat secret"), "the control case")
	// Their processes see nothing of each other either.
	word := fmt.Sprintf("neighbour-%d", os.Getpid())
	other.put("gate", "", 0o644)
	_, answer := other.start(strings.ReplaceAll(`(exec -a WORD sleep 1000) & while [ -e gate ]; do :; done`, "WORD", word), patience)
	s.Until("the neighbour runs", func() bool { return len(processes(s.T, word)) > 0 })
	require.NotContains(t, s.output("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'"), word+"\n")
	require.NoError(t, os.Remove(filepath.Join(other.worktree, "gate")))
	require.NotNil(t, <-answer)
}

// What a command leaves in the worktree is looked at by trusted code: at the next command, at the session's end, and
// when the next session adopts the worktree.
func TestP12WhatACommandLeavesInTheWorktreeMisleadsNobody(t *testing.T) {
	testkit.Need(t, testkit.Root)
	outside := t.TempDir()
	require.NoError(t, os.Chmod(outside, 0o777))
	victim := filepath.Join(outside, "victim")
	require.NoError(t, os.WriteFile(victim, []byte("untouched"), 0o666))
	before := owned(t, outside)
	for name, trap := range map[string]string{
		"a link instead of the scratch folder": `rm -rf .sandbox-tmp; ln -s OUTSIDE .sandbox-tmp`,
		"a link to a file":                     `rm -rf .sandbox-tmp; ln -s OUTSIDE/victim .sandbox-tmp`,
		"a pipe instead of it":                 `rm -rf .sandbox-tmp; mkfifo .sandbox-tmp`,
		"a socket instead of it":               `rm -rf .sandbox-tmp; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(".sandbox-tmp")'`,
		"a link in its place of honour":        `rm -rf .sandbox-tmp; mkdir .sandbox-tmp; ln -s OUTSIDE/victim .sandbox-tmp/.gitignore`,
		"a pipe at its .gitignore":             `rm -rf .sandbox-tmp; mkdir .sandbox-tmp; mkfifo .sandbox-tmp/.gitignore`,
		"a folder at its .gitignore":           `rm -rf .sandbox-tmp; mkdir -p .sandbox-tmp/.gitignore/x`,
		"a folder that nobody may enter":       `chmod 0 .sandbox-tmp`,
		"a worktree that nobody may enter":     `chmod 0 .`,
		"a worktree without anything":          `rm -rf ./* ./.sandbox-tmp`,
		"a link at an object folder":           `rm -rf "$(git rev-parse --git-common-dir)/objects/pack"; ln -s OUTSIDE "$(git rev-parse --git-common-dir)/objects/pack"`,
		"a link at a reference":                `ln -s OUTSIDE/victim "$(git rev-parse --git-common-dir)/refs/heads/evil"; ln -s OUTSIDE "$(git rev-parse --git-common-dir)/refs/evil"`,
		"a pipe at the index":                  `rm -f "$(git rev-parse --git-dir)/index"; mkfifo "$(git rev-parse --git-dir)/index"`,
		"a pipe at HEAD":                       `rm -f "$(git rev-parse --git-dir)/HEAD"; mkfifo "$(git rev-parse --git-dir)/HEAD"`,
		"a huge index":                         `truncate -s 100G "$(git rev-parse --git-dir)/index"`,
		"a deep tree": `python3 -c 'import os
for i in range(3000):
    os.mkdir("d"); os.chdir("d")'`,
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "")
			s := a.session(owner)
			s.exec(strings.ReplaceAll(trap, "OUTSIDE", outside), 0)
			// Whatever happens now is an honest answer in bounded time: a result or an error, never a hang.
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			for range 2 {
				_, err := s.Client.Execs.Exec(ctx, s.request("echo next > after", 0))
				require.NoError(t, ctx.Err(), "%v", err)
			}
			_, err := s.Client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: s.id})
			require.NoError(t, err)
			_, err = s.Client.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: s.repo, Worktree: s.worktree}})
			require.NoError(t, ctx.Err(), "%v", err)
			require.Equal(t, before, owned(t, outside))
			require.NoError(t, os.Chmod(s.worktree, 0o755))
		})
	}
}

// owned describes a folder: who owns what, and what is in it.
func owned(t testing.TB, dir string) (all []string) {
	t.Helper()
	require.NoError(t, filepath.Walk(dir, func(p string, _ os.FileInfo, err error) error {
		require.NoError(t, err)
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(p, &st))
		content := ""
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			b, err := os.ReadFile(p)
			require.NoError(t, err)
			content = string(b)
		}
		all = append(all, fmt.Sprintf("%s %o %d:%d %s", p, st.Mode, st.Uid, st.Gid, content))
		return nil
	}))
	return all
}

func TestP11ASealedFileIsReachedByNoOtherName(t *testing.T) {
	s := newSession(t, "")
	git := filepath.Join(s.repo, ".git")
	res := s.exec(strings.ReplaceAll(`
for f in GIT/config GIT/hooks/post-checkout .git; do
  ln $f linked 2>/dev/null && echo "linked $f"
  { echo x >> $f; } 2>/dev/null && echo "appended $f"
  { echo x > /proc/self/cwd/$f; } 2>/dev/null && echo "by cwd $f"
  exec 9<$f 2>/dev/null && { echo x > /proc/self/fd/9; } 2>/dev/null && echo "reopened $f"
  chmod 666 $f 2>/dev/null && echo "chmod $f"
  touch -d @1 $f 2>/dev/null && echo "touched $f"
  truncate -s 0 $f 2>/dev/null && echo "truncated $f"
done; true`, "GIT", git), 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.Empty(t, res.GetStdoutText())
	s.alive()
}
