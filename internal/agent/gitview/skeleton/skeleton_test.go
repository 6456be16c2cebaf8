package skeleton_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview/skeleton"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const disk = 1234 // the uid and gid that own a test's repository

var owner = hostfs.Owner{UID: disk, GID: disk}

// shared is a repository with a linked worktree in the shared layout.
type shared struct {
	repo, wt, git, dir string
	plan               mounts.Plan
}

// newShared has prepare change the repository before anything is made of it.
func newShared(t *testing.T, prepare func(s shared)) shared {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	testkit.Leaks(t)
	s := shared{repo: testkit.Repo(t, disk)}
	s.wt, s.git = testkit.Worktree(t, disk, s.repo, "topic"), filepath.Join(s.repo, ".git")
	if prepare != nil {
		prepare(s)
	}
	w := testkit.Workspace(t, disk, s.repo, s.wt, mounts.Shared)
	s.dir = w.Private
	var err error
	s.plan, err = mounts.New(w, mounts.Exists)
	require.NoError(t, err)
	return s
}

func (s shared) host(t *testing.T, args ...string) string {
	t.Helper()
	return strings.TrimSpace(testkit.GitAs(t, disk, s.repo, args...))
}

// refs are all refs of the repository, with what they name, as the node sees them.
func (s shared) refs(t *testing.T) string { return s.host(t, "show-ref") }

func TestP12AfterAConflictedCherryPickTheNextCommitHasItsOwnAuthor(t *testing.T) {
	s := newShared(t, func(s shared) {
		for _, c := range []string{"other", "main"} { // two branches that change the same line
			testkit.GitAs(t, disk, s.repo, "checkout", "-q", "-B", c, "topic")
			require.NoError(t, os.WriteFile(filepath.Join(s.repo, "README"), []byte(c+"\n"), 0o644))
			testkit.GitAs(t, disk, s.repo, "commit", "-q", "-a", "-m", c)
		}
		testkit.GitAs(t, disk, s.wt, "reset", "-q", "--hard", "main")
	})
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		_, code := in.Run(s.wt, "git cherry-pick other")
		require.Equal(t, 1, code)
		require.Equal(t, "Tester", in.Must(s.wt, "echo both > README && git add README && git commit -q -m picked && git log -1 --format=%an"))
		require.Equal(t, "Agent", in.Must(s.wt, "echo more > README && git commit -q -a -m mine && git log -1 --format=%an"))
		_, code = in.Run(s.wt, "git rev-parse -q --verify CHERRY_PICK_HEAD || git rev-parse -q --verify AUTO_MERGE")
		require.Equal(t, 1, code)
		in.Must(s.wt, "git status --porcelain && git fsck")
	})
	require.Equal(t, "mine", s.host(t, "log", "-1", "--format=%s", "topic"))
}

func TestP12ARefOfWhichNothingIsPackedCanBeDeletedInTheSharedLayout(t *testing.T) {
	s := newShared(t, func(s shared) { testkit.GitAs(t, disk, s.repo, "pack-refs", "--all") })
	before := s.refs(t)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.wt, "git branch loose && git update-ref -d refs/heads/loose")
	})
	require.Equal(t, before, s.refs(t))
}

// Before version 2.44 git branch -d and git tag -d rewrite packed-refs whether the ref is in it or not.
func TestP12DeletingALooseBranchOrTagInTheSharedLayoutWorksOrFailsAloud(t *testing.T) {
	s := newShared(t, nil)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.wt, "git branch loose && git tag loose")
		before := in.Must(s.wt, "git show-ref")
		for _, script := range []string{"git branch -d loose", "git tag -d loose"} {
			out, code := in.Run(s.wt, script)
			if gitIsOlderThan(t, 2, 44) {
				require.NotZero(t, code, out)
				require.Contains(t, out, "packed-refs")
				require.Equal(t, before, in.Must(s.wt, "git show-ref"))
			} else {
				require.Zero(t, code, out)
			}
		}
	})
}

func gitIsOlderThan(t *testing.T, major, minor int) bool {
	t.Helper()
	var m, n int
	_, err := fmt.Sscanf(testkit.GitAs(t, disk, "/", "version"), "git version %d.%d", &m, &n)
	require.NoError(t, err)
	return m < major || m == major && n < minor
}

func TestEverydayGitWorksInTheSharedLayout(t *testing.T) {
	s := newShared(t, func(s shared) {
		testkit.GitAs(t, disk, s.repo, "tag", "start")
		testkit.GitAs(t, disk, s.repo, "pack-refs", "--all")
	})
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.wt, `set -e
			echo a > a && git add a && git commit -q -m a && git commit -q --amend -m b && git tag t
			git checkout -q -b two && echo b > b && git add b && git stash -q && git stash pop -q && git commit -q -m two
			git switch -q topic && git merge -q --no-edit two && git reset -q --hard HEAD~1
			git checkout -q two && git rebase -q start && git log --oneline && git diff HEAD~1 && git blame a
			git init -q --bare r.git && git push -q ./r.git two && git fetch -q ./r.git two && git log FETCH_HEAD && rm -r r.git
			git switch -q topic && git worktree list && git reflog && git fsck --strict`)
	})
	require.Equal(t, s.host(t, "rev-parse", "t"), s.host(t, "rev-parse", "topic"))
	s.host(t, "fsck", "--strict")
}

func TestTrustedGitWorksInTheJailOfTheSharedLayout(t *testing.T) {
	s := newShared(t, func(s shared) { testkit.GitAs(t, disk, s.repo, "pack-refs", "--all") })
	jail := gitjail.Jail{Owner: owner, Dir: s.wt, Mounts: gitjail.FromPlan(s.plan, nil)}
	before := s.refs(t)
	for _, args := range [][]string{{"status", "--porcelain"}, {"update-ref", "refs/heads/x", "HEAD"}, {"update-ref", "-d", "refs/heads/x"}, {"show-ref"}} {
		out, err := jail.Run(t.Context(), args...)
		require.NoError(t, err, args)
		if args[0] == "show-ref" {
			require.Equal(t, before, strings.TrimSpace(out))
		}
	}
	_, err := jail.Run(t.Context(), "config", "user.name", "x")
	require.ErrorIs(t, err, gitjail.ErrGit)
	require.Equal(t, before, s.refs(t))
}

func TestP12DeletingAPackedRefOrPackingFailsInTheSharedLayoutAndChangesNothing(t *testing.T) {
	s := newShared(t, func(s shared) {
		testkit.GitAs(t, disk, s.repo, "branch", "packed")
		testkit.GitAs(t, disk, s.repo, "pack-refs", "--all")
		testkit.GitAs(t, disk, s.repo, "branch", "loose")
		// Packed and loose, with different values: were only the loose one deleted, the old value would come back.
		testkit.GitAs(t, disk, s.repo, "commit", "-q", "--allow-empty", "-m", "next")
		testkit.GitAs(t, disk, s.repo, "branch", "-f", "packed", "main")
	})
	before := s.refs(t)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		for _, script := range []string{"git branch -D packed", "git update-ref -d refs/heads/packed", "git pack-refs --all", "git pack-refs --all --prune"} {
			out, code := in.Run(s.wt, script)
			require.NotZero(t, code, "%s: %s", script, out)
			require.Equal(t, before, in.Must(s.wt, "git show-ref"), script)
		}
		require.Empty(t, in.Must(s.git, "ls -A | grep -e lock -e new || true"), "a lock that stays would fail what comes next")
		in.Must(s.wt, "git update-ref refs/heads/after HEAD && git update-ref -d refs/heads/after")
	})
	require.Equal(t, before, s.refs(t))
	require.NotEqual(t, s.host(t, "rev-parse", "packed"), s.host(t, "rev-parse", "topic"))
}

func TestP12PackingFailsInTheSharedLayoutAlsoWhereNothingIsPackedYet(t *testing.T) {
	s := newShared(t, nil)
	before := s.refs(t)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		_, code := in.Run(s.wt, "git pack-refs --all")
		require.NotZero(t, code)
		in.Must(s.wt, "git branch x && git update-ref -d refs/heads/x")
	})
	require.Equal(t, before, s.refs(t))
	require.NoFileExists(t, filepath.Join(s.git, "packed-refs"))
}

func TestTheNodePacksRefsAndCommandsGoOnSeeingThem(t *testing.T) {
	s := newShared(t, nil)
	before := s.refs(t)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		for range 2 { // the first makes the file, the second replaces it
			in.Outside(func() { s.host(t, "pack-refs", "--all", "--prune") })
			require.Equal(t, before, in.Must(s.wt, "git show-ref"))
		}
		in.Outside(func() { require.NoFileExists(t, filepath.Join(s.git, "refs", "heads", "main")) })
		in.Must(s.wt, "git commit -q --allow-empty -m mine")
	})
	require.Equal(t, "mine", s.host(t, "log", "-1", "--format=%s", "topic"))
}

func TestP12WhatIsPlantedBesideTheRepositoryIsNotSeenByTheNode(t *testing.T) {
	s := newShared(t, nil)
	const plant = `printf '../evil\n' > commondir; mkdir remotes; printf 'URL: /evil\n' > remotes/x; printf '[core]\n' > config.worktree; echo > gc.pid`
	control := filepath.Join(s.repo, "control") // the same without the layout: a commondir there takes the repository over
	require.NoError(t, os.Mkdir(control, 0o755))
	require.NoError(t, os.Chown(control, disk, disk))
	testkit.GitAs(t, disk, control, "init", "-q")
	require.NoError(t, os.WriteFile(filepath.Join(control, ".git", "commondir"), []byte("../../.git\n"), 0o644))
	require.Equal(t, s.host(t, "rev-parse", "main"), strings.TrimSpace(testkit.GitAs(t, disk, control, "rev-parse", "main")))

	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.git, plant)
		in.Outside(func() {
			for _, name := range []string{"commondir", "remotes", "config.worktree", "gc.pid"} {
				require.NoFileExists(t, filepath.Join(s.git, name))
				require.NoDirExists(t, filepath.Join(s.git, name))
			}
			s.host(t, "fsck")
		})
	})
}

func TestP12WhatTheSkeletonWasMadeWithCantBeReplaced(t *testing.T) {
	s := newShared(t, func(s shared) { testkit.GitAs(t, disk, s.repo, "pack-refs", "--all") })
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.git, "echo evil > x && mkdir d")
		for _, name := range []string{"HEAD", "packed-refs", ".packed-refs-1", ".packed-refs-5", ".packed-refs-6", "config"} {
			for _, script := range []string{"mv -Tf x NAME", "mv -T NAME y", "rm -f NAME", "ln -sfn x NAME", "chmod 777 NAME && test ! -L NAME"} {
				out, code := in.Run(s.git, strings.ReplaceAll(script, "NAME", name))
				require.NotZero(t, code, "%s %s: %s", name, script, out)
			}
		}
		for _, name := range []string{"hooks", "info", "objects", "refs", "logs", "worktrees", "base"} {
			for _, script := range []string{"mv -Tf d NAME", "mv -T NAME y", "rmdir NAME"} {
				out, code := in.Run(s.git, strings.ReplaceAll(script, "NAME", name))
				require.NotZero(t, code, "%s %s: %s", name, script, out)
			}
		}
		in.Must(s.wt, "git show-ref && git worktree list && git log -1")
	})
}

func TestLinksInTheSkeletonAreFollowedWithProtectedSymlinks(t *testing.T) {
	s := newShared(t, nil)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(s.dir, &st))
	// fs.protected_symlinks and fs.protected_regular=1 look at sticky folders that everyone may write (sysctl fs(5)).
	require.Zero(t, st.Mode&unix.S_IWOTH)
	require.Equal(t, uint32(unix.S_IFDIR|unix.S_ISVTX|0o775), st.Mode)
}

func TestTheBaseClonesOtherWorktreesAreHidden(t *testing.T) {
	s := newShared(t, func(s shared) { testkit.Worktree(t, disk, s.repo, "other") })
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		require.Equal(t, "wt-topic", in.Must(s.git, "ls worktrees"))
		require.Empty(t, in.Must(s.git, "ls base/worktrees"))
		_, code := in.Run(s.git, "touch base/x || touch base/refs/x || touch base/objects/x")
		require.NotZero(t, code)
	})
}

func TestMakingASkeletonAgainRemovesWhatCommandsLeftAndKeepsTheRest(t *testing.T) {
	s := newShared(t, nil)
	before := inodes(t, s.dir)
	testkit.Attach(t, s.plan, func(in *testkit.Inside) {
		in.Must(s.git, "mkdir -p a/b && chmod 0 a/b && ln -s /etc c && mkfifo f && touch gc.pid packed-refs.lock")
		in.Outside(func() { require.NoError(t, skeleton.Make(s.dir, s.git, owner)) })
		in.Must(s.wt, "git status && git show-ref") // the same mount points: a sandbox that lives goes on
	})
	require.Equal(t, before, inodes(t, s.dir))
}

func TestMakingASkeletonAgainPutsRightWhatIsWrong(t *testing.T) {
	s := newShared(t, nil)
	for _, name := range []string{"HEAD", "packed-refs", "hooks"} {
		require.NoError(t, os.RemoveAll(filepath.Join(s.dir, name)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "hooks"), nil, 0o644))
	require.NoError(t, os.Symlink("/etc/nothing", filepath.Join(s.dir, "HEAD")))
	s.host(t, "checkout", "-q", "-b", "elsewhere")
	require.NoError(t, skeleton.Make(s.dir, s.git, owner))
	head, err := os.ReadFile(filepath.Join(s.dir, "HEAD"))
	require.NoError(t, err)
	require.Equal(t, "ref: refs/heads/elsewhere\n", string(head))
	target, err := os.Readlink(filepath.Join(s.dir, "packed-refs"))
	require.NoError(t, err)
	require.Equal(t, ".packed-refs-1", target)
	require.DirExists(t, filepath.Join(s.dir, "hooks"))
}

func TestAFolderThatIsNoSkeletonIsRefusedAndKept(t *testing.T) {
	s := newShared(t, nil)
	dir := filepath.Join(testkit.StateDir(t), "git")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "work"), nil, 0o644))
	err := skeleton.Make(dir, s.git, owner)
	require.ErrorIs(t, err, hostfs.ErrRefused)
	require.FileExists(t, filepath.Join(dir, "work"))
}

func TestAHeadThatIsNoFileIsRefused(t *testing.T) {
	s := newShared(t, nil)
	head := filepath.Join(s.git, "HEAD")
	require.NoError(t, os.Remove(head))
	require.NoError(t, unix.Mkfifo(head, 0o644))
	err := skeleton.Make(s.dir, s.git, owner)
	require.ErrorIs(t, err, hostfs.ErrRefused)
	require.ErrorContains(t, err, head)
}

// inodes are the skeleton's names with what makes each the same file.
func inodes(t *testing.T, dir string) map[string]uint64 {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	out := map[string]uint64{}
	for _, e := range entries {
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(filepath.Join(dir, e.Name()), &st))
		out[e.Name()] = st.Ino
	}
	return out
}
