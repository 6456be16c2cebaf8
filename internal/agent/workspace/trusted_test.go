package workspace

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// plant writes a file of the repository as a command would: as its owner.
func plant(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), mode))
	require.NoError(t, os.Chown(filepath.Dir(path), uid, uid))
	require.NoError(t, os.Chown(path, uid, uid))
}

// smudge makes a checkout of the repository run a script, by the repository's own configuration and attributes.
func smudge(t *testing.T, repo, script string) {
	t.Helper()
	plant(t, filepath.Join(repo, ".git/evil.sh"), "#!/bin/sh\n"+script+"\nexec cat\n", 0o755)
	config, err := os.ReadFile(filepath.Join(repo, ".git/config"))
	require.NoError(t, err)
	plant(t, filepath.Join(repo, ".git/config"), string(config)+fmt.Sprintf("[filter \"x\"]\n\tsmudge = %s/.git/evil.sh\n", repo), 0o644)
	plant(t, filepath.Join(repo, ".git/info/attributes"), "* filter=x\n", 0o644)
}

func TestP12WhatARepositoryMakesTrustedGitRunSeesAndReachesNothing(t *testing.T) {
	repo, dir := setUp(t)
	outside := testkit.StateDir(t)
	require.NoError(t, os.Chmod(outside, 0o777))
	canary := filepath.Join(outside, "canary")
	l, err := net.Listen("unix", filepath.Join(outside, "sock"))
	require.NoError(t, err)
	defer l.Close()
	smudge(t, repo, fmt.Sprintf(`echo x > %[1]s
exec 2>&1 >report; echo "etc: $(ls /etc)"; echo "top: $(ls /)"; echo "var: $(ls /var 2>/dev/null)"; echo "home: $(ls /home /root 2>/dev/null)"; echo "dev: $(ls /dev)"
grep -E '^(Uid|Gid|Groups|CapEff|CapBnd|NoNewPrivs):' /proc/self/status
cat /proc/net/dev | sed -nE 's/^ *([a-z0-9]+):.*/interface: \1/p'
echo "processes: $(ls -d /proc/[0-9]* | wc -l)"; [ -e %[2]s ] && echo "sees the outside"; touch /usr/x; touch %[3]s/x
sed -nE 's/^Max (address space|core file size) +([0-9]+).*/limit \1 \2/p' /proc/self/limits; echo "oom: $(cat /proc/self/oom_score_adj)"`, canary, outside, filepath.Dir(repo)))

	testkit.Worktree(t, uid, repo, "control")
	require.FileExists(t, canary, "the control case: without the jail the program runs and reaches what its user may")
	require.NoError(t, os.Remove(canary))
	require.NoError(t, os.Remove(filepath.Join(filepath.Dir(repo), "x")))

	wt := filepath.Join(dir, "wt")
	_, err = Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "new"})
	require.NoError(t, err)
	require.NoFileExists(t, canary)
	b, err := os.ReadFile(filepath.Join(wt, "report"))
	require.NoError(t, err, "the filter ran, in the jail")
	report := string(b)
	require.Contains(t, report, "etc: ld.so.cache\n")
	for _, want := range []string{"var: tmp\n", "home: \n", "dev: null\nurandom\n", fmt.Sprintf("Uid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d", uid), "Groups:\t", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1",
		"limit address space 4294967296", "limit core file size 0", "oom: 1000"} {
		require.Contains(t, report, want)
	}
	require.NotContains(t, report, "outside")
	require.Equal(t, 1, strings.Count(report, "interface: "), "only its own loopback: %s", report)
	require.NoFileExists(t, filepath.Join(filepath.Dir(repo), "x"))
}

func TestP12ARepositoryOfRootGivesItsProgramsNoPrivilege(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, 0)
	script := "#!/bin/sh\n(grep CapEff /proc/self/status; cat /etc/shadow; mount -t tmpfs x /usr && echo mounted) > report 2>/dev/null\nexec cat\n"
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".git/evil.sh"), []byte(script), 0o755))
	testkit.GitAs(t, 0, repo, "config", "filter.x.smudge", filepath.Join(repo, ".git/evil.sh"))
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".git/info/attributes"), []byte("* filter=x\n"), 0o644))
	wt := filepath.Join(filepath.Dir(repo), "wt")
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "new", AllowRootOwned: true})
	require.NoError(t, err)
	report, err := os.ReadFile(filepath.Join(wt, "report"))
	require.NoError(t, err)
	require.Equal(t, "CapEff:\t0000000000000000\n", string(report))
}

func TestP12WhatDoesNotBelongInAGitFolderIsRefusedByName(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, common string) string{
		"another repository named by commondir": func(t *testing.T, common string) string {
			plant(t, filepath.Join(common, "commondir"), "/var/tmp/evil\n", 0o644)
			return "commondir"
		},
		"a FIFO": func(t *testing.T, common string) string {
			require.NoError(t, unix.Mkfifo(filepath.Join(common, "packed-refs"), 0o666))
			return "packed-refs"
		},
		"a link": func(t *testing.T, common string) string {
			require.NoError(t, os.Symlink("/etc/passwd", filepath.Join(common, "shallow")))
			return "shallow"
		},
	} {
		t.Run(name, func(t *testing.T) {
			repo, dir := setUp(t)
			found := spoil(t, filepath.Join(repo, ".git"))
			_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "new"})
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, filepath.Join(repo, ".git", found))
			require.NoDirExists(t, filepath.Join(dir, "wt"))
		})
	}
}

func TestP12ALinkInTheRepositoryLeadsTrustedGitNowhere(t *testing.T) {
	repo, dir := setUp(t)
	outside := testkit.StateDir(t)
	require.NoError(t, os.Chmod(outside, 0o777))
	testkit.GitAs(t, uid, repo, "commit", "-q", "--allow-empty", "-m", "so that there are logs")
	logs := filepath.Join(repo, ".git/logs/refs/heads")
	require.NoError(t, os.RemoveAll(logs))
	require.NoError(t, os.MkdirAll(filepath.Dir(logs), 0o755))
	require.NoError(t, os.Symlink(outside, logs))
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "new"})
	entries, readErr := os.ReadDir(outside)
	require.NoError(t, readErr)
	require.Empty(t, entries, "%v", err)
}

// gitFor is trusted Git as Undo and Remove have it.
func gitFor(t *testing.T, ws Workspace) git {
	t.Helper()
	both := worktreeJail(ws, Owner{UID: uid, GID: uid}).Keep(t.Context())
	t.Cleanup(both.Close)
	return forWorktree(both, ws)
}

func TestTrustedGitAnswersAndFailsAsGitDoes(t *testing.T) {
	repo, _ := setUp(t)
	common := filepath.Join(repo, ".git")
	g := gitFor(t, Workspace{Repository: repo, CommonDir: common})
	out, err := g.Run(t.Context(), "rev-parse", "--git-dir")
	require.NoError(t, err)
	require.Equal(t, common, strings.TrimSpace(out))
	_, err = g.Run(t.Context(), "no-such-command")
	require.ErrorIs(t, err, ErrGit)
	require.ErrorContains(t, err, "no-such-command")
}

func TestP11WhatATemplateLeftOutIsMadeSoThatItCanBeSealed(t *testing.T) {
	repo, dir := setUp(t)
	for _, name := range []string{"hooks", "info", "objects/info"} {
		require.NoError(t, os.RemoveAll(filepath.Join(repo, ".git", name)))
	}
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "new"})
	require.NoError(t, err)
	for _, name := range []string{"hooks", "info", "objects/info"} {
		owner, err := hostfs.StatDir("folder", filepath.Join(repo, ".git", name))
		require.NoError(t, err)
		require.Equal(t, Owner{UID: uid, GID: uid}, owner)
	}
}

func TestP12ConfigurationThatACommandCouldWriteIsRefused(t *testing.T) {
	repo, dir := setUp(t)
	testkit.GitAs(t, uid, repo, "config", "extensions.worktreeConfig", "true")
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "new"})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "extensions.worktreeConfig")
}

func TestAWorktreeThatGitDidNotFinishIsNotTakenOver(t *testing.T) {
	for name, spoil := range map[string]func(meta string) error{
		"killed while it was added": func(meta string) error {
			return os.WriteFile(filepath.Join(meta, "locked"), []byte("initializing\n"), 0o644)
		},
		"killed while it was written": func(meta string) error { return os.WriteFile(filepath.Join(meta, "index.lock"), nil, 0o644) },
		"without an index":            func(meta string) error { return os.Remove(filepath.Join(meta, "index")) },
	} {
		t.Run(name, func(t *testing.T) {
			repo, _ := setUp(t)
			wt := testkit.Worktree(t, uid, repo, "half")
			require.NoError(t, spoil(filepath.Join(repo, ".git/worktrees", filepath.Base(wt))))
			_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, "not finished")
			require.ErrorContains(t, err, "worktree remove")
		})
	}
}
