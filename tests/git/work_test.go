package git

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP12Attack28APipeWhereGitExpectsAFile(t *testing.T) {
	hung := false
	var steps []step
	pipes := map[string]struct {
		path string
		call []string
	}{
		"index":          {"$M/index", []string{"status"}},
		"HEAD":           {"$M/HEAD", []string{"status"}},
		"COMMIT_EDITMSG": {"$M/COMMIT_EDITMSG", []string{"commit", "--allow-empty", "-m", "x"}},
		".gitattributes": {"$W/.gitattributes", []string{"diff"}},
		".gitignore":     {"$W/.gitignore", []string{"status"}},
	}
	for _, name := range slices.Sorted(maps.Keys(pipes)) {
		x := pipes[name]
		steps = append(steps, step{name: name, undo: "rm -f " + x.path + "; mv -f $W/kept " + x.path + "; true", strike: func(p *place) {
			p.command("echo changed >> README; mv -f " + x.path + " $W/kept; mkfifo " + x.path)
			if p.layout != control {
				p.trustedFor(impatience, x.call...) // answers, or the test fails
				p.command("echo next")
				p.goesOn()
				hung = false
				return
			}
			fifo := os.Expand(x.path, func(v string) string { return map[string]string{"M": p.m, "W": p.w}[v] })
			seen := func() bool { return waitsAt(p.t, fifo) }
			if name == "COMMIT_EDITMSG" { // Git writes there
				seen = readsAt(p.t, fifo)
			}
			hung = p.waits(p.as(p.w, "git", x.call...), seen)
		}})
	}
	attack{
		steps:  steps,
		harmed: func(*place) bool { return hung },
		// The next session on that worktree is made, or refused (goOn); it does not hang either.
		inside: func(p *place) { p.command("rm -f $M/index $W/.gitignore; mkfifo $M/index $W/.gitignore") },
	}.run(t)
}

// readsAt gives a question: did anybody write into the FIFO?
func readsAt(t *testing.T, fifo string) func() bool {
	t.Helper()
	fd, err := unix.Open(fifo, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	return func() bool {
		n, _ := unix.Read(fd, make([]byte, 16))
		return n > 0
	}
}

// hostileHome is a HOME of the repository's owner with a configuration of Git, and of the agent itself.
func hostileHome(t *testing.T, configuration string) (home string, harmed func(*place) bool) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	home = testkit.StateDir(t)
	require.NoError(t, os.Chown(home, owner, owner))
	require.NoError(t, os.Chmod(home, 0o755))
	fired := filepath.Join(home, "fired")
	require.NoError(t, os.WriteFile(filepath.Join(home, ".gitconfig"), []byte(strings.ReplaceAll(configuration, "FIRED", fired)), 0o644))
	return home, func(p *place) bool {
		err := os.Remove(fired)
		return err == nil
	}
}

func TestP12Attack29AFilterOfTheUsersConfiguration(t *testing.T) {
	home, harmed := hostileHome(t, "[filter \"lfs\"]\n\tclean = \"touch FIRED; cat\"\n\tsmudge = \"touch FIRED; cat\"\n\trequired = true\n[core]\n\tpager = \"touch FIRED; cat\"\n[diff]\n\texternal = touch FIRED\n")
	attack{
		home: home, env: []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home, "GIT_CONFIG_GLOBAL=" + filepath.Join(home, ".gitconfig")},
		harmed: harmed,
		strike: func(p *place) {
			p.command(`echo '* filter=lfs' > .gitattributes; echo x > big; echo changed >> README`)
			for _, args := range [][]string{{"status"}, {"diff"}, {"add", "-A"}, {"checkout", "--", "."}, {"log", "-p"}} {
				p.trusted(args...)
			}
			if p.layout != control {
				p.works("git add -A && git commit -q -m filtered")
			}
		},
	}.run(t)
}

func TestP12Attack29AHookOfTheUsersConfiguration(t *testing.T) {
	testkit.Need(t, testkit.Git)
	if olderGit(t, 2, 54) {
		t.Skip("hook.*.command is read by Git from 2.54 on")
	}
	home, harmed := hostileHome(t, "[hook \"x\"]\n\tcommand = touch FIRED\n\tevent = pre-commit\n\tevent = post-index-change\n\tevent = reference-transaction\n")
	attack{
		home: home, env: []string{"HOME=" + home}, harmed: harmed,
		strike: func(p *place) {
			p.command("git commit -q --allow-empty -m inside")
			p.trusted("add", "-A")
			p.trusted("commit", "--allow-empty", "-m", "x")
			p.trusted("status")
		},
		// From here on only the agent has that configuration: the owner's own Git in the base clone runs what the owner says.
		inside: func(p *place) { p.home = filepath.Join(filepath.Dir(p.out), "home") },
	}.run(t)
}

func olderGit(t *testing.T, major, minor int) bool {
	t.Helper()
	out, err := exec.Command("git", "version").Output()
	require.NoError(t, err)
	var x, y int
	_, err = fmt.Sscanf(string(out), "git version %d.%d", &x, &y)
	require.NoError(t, err, string(out))
	return x < major || x == major && y < minor
}

func TestP12Attack29AHooksPathThatLiesInTheWorktree(t *testing.T) {
	attack{
		prepare: func(p *place) { p.hostWorks("config", "core.hooksPath", ".husky") },
		strike: func(p *place) {
			p.command(`mkdir .husky; for h in pre-commit post-index-change reference-transaction post-checkout; do printf '#!/bin/sh\ntouch %s/fired\n' $OUT > .husky/$h; chmod +x .husky/$h; done; git add -A; git commit -q -m x`)
			p.trusted("commit", "--allow-empty", "-m", "x")
			p.trusted("status")
		},
		refusedWhenShared: "core.hookspath",
	}.run(t)
}

// A conflict, its resolution, and one more commit. With the base clone's Git folder read-only, CHERRY_PICK_HEAD can't be
// deleted and the last commit carries the other's name, with exit code 0.
func TestP11Attack30AConflictedCherryPickLeavesNothingBehind(t *testing.T) {
	const work = `
git checkout -q -b side; echo a > f; git add f; git commit -q -m theirs --author 'Other <other@example.com>'
git checkout -q topic; echo b > f; git add f; git commit -q -m ours
git cherry-pick side && exit 1
echo c > f; git add f; git commit -q --no-edit; echo d > f; git commit -q -a -m mine`
	attack{
		strike: func(p *place) {
			if p.layout == control {
				p.readOnly(work)
				return
			}
			p.works("set +e; " + work)
		},
		harmed: func(p *place) bool {
			return p.works("git log --format=%an -2 topic") != "Agent\nOther\n"
		},
		inside: func(p *place) {
			require.Empty(p.t, p.works("ls $M/CHERRY_PICK_HEAD $M/AUTO_MERGE 2>/dev/null || true"))
			require.Equal(p.t, "Agent\nOther", p.hostWorks("log", "--format=%an", "-2", "topic"))
		},
	}.run(t)
}

// readOnly runs a script as the owner where the base clone is mounted read-only but for what a commit writes.
func (p *place) readOnly(script string) {
	p.t.Helper()
	testkit.Need(p.t, testkit.Program("unshare"), testkit.Program("setpriv"))
	cmd := exec.CommandContext(p.bounded(), "unshare", "-m", "bash", "-c", fmt.Sprintf(`set -e
mount --bind $C $C
for d in objects refs logs worktrees/%s; do mount --bind $C/$d $C/$d; done
mount -o remount,bind,ro $C
exec setpriv --reuid %d --regid %[2]d --clear-groups bash -c "$0"`, filepath.Base(p.w), p.uid), script)
	cmd.Dir = p.w
	cmd.Env = append(p.environment(), "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME="+p.home, "GIT_CONFIG_NOSYSTEM=1")
	out, err := cmd.CombinedOutput()
	p.t.Logf("read-only: %s", out)
	require.NoError(p.t, err, string(out))
}

func TestP11Attack30PackedRefsAreDeletedOrTheFailureIsSaid(t *testing.T) {
	const refs = `for-each-ref --format=%(refname)%(objectname) refs/heads refs/tags`
	var before string
	attack{
		prepare: func(p *place) {
			p.hostWorks("branch", "packed")
			p.hostWorks("tag", "v1")
			p.hostWorks("pack-refs", "--all")
			p.hostWorks("branch", "loose")
			before = p.hostWorks(strings.Fields(refs)...)
		},
		strike: func(p *place) {
			p.command("git branch -d packed; git tag -d v1; git pack-refs --all; git branch -D loose")
		},
		harmed: func(p *place) bool { return p.hostWorks(strings.Fields(refs)...) != before },
		inside: func(p *place) {
			const try = `git branch mine && git pack-refs --all && git branch -d mine && git tag t && git pack-refs --all && git tag -d t && echo done`
			said := p.command(try)
			if p.layout == isolated {
				require.Contains(p.t, said, "done\n")
				require.Contains(p.t, p.works("git gc -q && git fsck && echo done"), "done\n")
				return
			}
			require.NotContains(p.t, said, "done\n")
			require.Contains(p.t, said, "packed-refs")
		},
		sharedLimit: func(p *place) {
			now := p.hostWorks(strings.Fields(refs)...)
			require.Contains(p.t, now, "refs/heads/packed", "C/packed-refs can't be written")
			require.Contains(p.t, now, "refs/tags/v1")
			p.works("git update-ref -d refs/heads/loose || true") // done already by a Git that deletes a loose branch alone
			require.NotContains(p.t, p.hostWorks(strings.Fields(refs)...), "refs/heads/loose", "C/refs is the base clone's")
		},
	}.run(t)
}

// setID tries the calls that could make a set-id file in each of the folders that it is given.
const setID = `
import ctypes, os, platform, struct, sys
l = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def fresh(p):
    open(p, "w").close(); return p
def attempt(f):
    try: f()
    except OSError: pass
os.umask(0)
for d in sys.argv[1:]:
    try: os.chdir(d)
    except OSError: continue
    attempt(lambda: os.chmod(fresh("s1"), 0o4755))
    attempt(lambda: os.fchmod(os.open("s2", os.O_CREAT | os.O_RDWR), 0o6755))
    attempt(lambda: (fresh("s3"), l.syscall(452, -100, b"s3", 0o4755, 0)))
    attempt(lambda: os.open("s4", os.O_CREAT | os.O_WRONLY, 0o4755))
    attempt(lambda: l.syscall(437, -100, b"s5", struct.pack("QQQ", os.O_CREAT | os.O_WRONLY, 0o4755, 0), 24))
    attempt(lambda: os.mknod("s6", 0o104755))
    attempt(lambda: os.mkdir("s7", 0o6755))
    attempt(lambda: (os.mkdir("s8"), os.chmod("s8", 0o2755)))
    if x86: attempt(lambda: l.syscall(85, b"s9", 0o4755))
`

func TestP12Attack32SetIDFiles(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	a := attack{
		prepare: func(p *place) { p.file(filepath.Join(p.w, "setid.py"), setID) },
		strike: func(p *place) {
			p.command(`python3 setid.py $W $M $M/logs $C $C/objects $C/refs $C/logs; git init -q --shared=all sub`)
		},
		harmed: func(p *place) bool {
			found := setIDBelow(p.t, filepath.Dir(p.b))
			if p.layout != control {
				found = append(found, setIDBelow(p.t, p.agent.State)...)
			}
			return len(found) > 0
		},
	}
	t.Run("of a user", a.run)
	a.ofRoot, a.config = true, "workspace: {roots: [/var/tmp], allow_root_owned: true}\n"
	t.Run("of root", a.run)
}

func setIDBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := d.Info()
		require.NoError(t, err)
		if info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
			found = append(found, path)
		}
		return nil
	}))
	return found
}

func TestP11Attack35GitAddIsKilled(t *testing.T) {
	attack{
		strike: func(p *place) {
			// The filter's parent is git add, which holds the lock by then.
			p.command(`echo '* filter=x' > .gitattributes; echo a > f; git -c filter.x.clean='kill -9 $PPID' add f; rm -f .gitattributes; ls $M`)
			if p.layout != control {
				require.Contains(p.t, p.harvest.GetStaleLocks(), filepath.Join(p.m, "index.lock"))
			}
		},
		harmed: func(p *place) bool { return !strings.Contains(p.command("git add f && echo added"), "added\n") },
		inside: func(p *place) {
			require.Empty(p.t, p.harvest.GetStaleLocks(), "they are reported once")
			require.Contains(p.t, p.works("git status --porcelain"), "A  f\n")
		},
	}.run(t)
}

// own is what a private copy of the Git folder that nobody refreshes is to a command: the control case.
func (p *place) own() string {
	dir := filepath.Join(filepath.Dir(p.b), "own")
	return fmt.Sprintf("export GIT_COMMON_DIR=%s GIT_DIR=%[1]s/worktrees/%s GIT_WORK_TREE=%s\n", dir, filepath.Base(p.w), p.w)
}

func (p *place) makeOwn() {
	p.t.Helper()
	out, err := p.as(p.w, "cp", "-a", p.c, filepath.Join(filepath.Dir(p.b), "own")).CombinedOutput()
	require.NoError(p.t, err, string(out))
}

// ownIf is a script of the control case's private copy, or of the sandbox.
func (p *place) ownIf(script string) string {
	if p.layout == control {
		return p.own() + script
	}
	return script
}

func TestP11Attack36ACommitOfTheHostBetweenTwoCommands(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.makeOwn()
			p.works(p.ownIf("git status"))
			p.file(filepath.Join(p.w, "README"), "of the host\n")
			for _, args := range [][]string{{"add", "README"}, {"commit", "-q", "-m", "by the host"}, {"branch", "-q", "made-by-host"}} {
				out, err := p.as(p.w, "git", args...).CombinedOutput()
				require.NoError(p.t, err, string(out))
			}
		},
		harmed: func(p *place) bool { return p.works(p.ownIf("git status --porcelain --untracked-files=no")) != "" },
		inside: func(p *place) {
			require.Equal(p.t, "by the host\n", p.works("git log -1 --format=%s"))
			p.works("git rev-parse --verify made-by-host; git commit -q --allow-empty -m inside")
			require.Equal(p.t, "inside\nby the host\nFirst", p.hostWorks("log", "--format=%s", "topic"))
			require.Equal(p.t, "of the host", p.hostWorks("show", "topic:README"))
		},
	}.run(t)
}

func TestP12Attack36ARaceWithTheHostLosesNothing(t *testing.T) {
	var hosts string
	move := func(p *place) {
		hosts = p.hostWorks("commit-tree", "-p", "topic", "-m", "by the host", "topic^{tree}")
		p.hostWorks("update-ref", "refs/heads/topic", hosts)
	}
	attack{
		strike: func(p *place) {
			p.makeOwn()
			if p.layout == control { // a harvest that compares nothing
				move(p)
				p.hostWorks("update-ref", "refs/heads/topic", strings.TrimSpace(p.works(p.own()+"export GIT_OBJECT_DIRECTORY=$C/objects; git commit -q --allow-empty -m inside; git rev-parse HEAD")))
				return
			}
			h := p.hold("git commit -q --allow-empty -m inside")
			move(p)
			p.harvest = h.release().GetHarvest()
		},
		harmed: func(p *place) bool {
			return p.as(p.b, "git", "merge-base", "--is-ancestor", hosts, "topic").Run() != nil
		},
		inside: func(p *place) {
			if p.layout == shared {
				require.Equal(p.t, "inside\nby the host\nFirst", p.hostWorks("log", "--format=%s", "topic"), "one on top of the other")
				return
			}
			require.Equal(p.t, "CONFLICT", p.harvest.GetStatus(), "%v", p.harvest)
			require.NotEmpty(p.t, p.harvest.GetConflicts())
			c := p.harvest.GetConflicts()[0]
			require.Equal(p.t, "refs/heads/topic", c.GetRef())
			require.Equal(p.t, hosts, c.GetBaseId())
			require.NotEmpty(p.t, c.GetRemedy())
			require.Equal(p.t, "inside", p.hostWorks("log", "-1", "--format=%s", c.GetSessionId()))
			p.hostWorks("gc", "-q", "--prune=now")
			require.Equal(p.t, "inside", p.hostWorks("log", "-1", "--format=%s", c.GetSessionId()), "its work is safe")
			require.Equal(p.t, hosts, p.hostWorks("rev-parse", "topic"))
		},
	}.run(t)
}
