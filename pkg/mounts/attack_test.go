package mounts_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// undefended is the workspace with nothing but its two folders mounted, writable: in it each attack has to work, or the
// test of the defence means nothing.
func undefended(t *testing.T, seals ...string) applied {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	a := planned(t, mounts.Isolated)
	a.plan.Mounts = []mounts.Mount{{Source: a.wt, Target: a.wt, Idmap: true}, {Source: a.git, Target: a.git, Idmap: true}}
	for _, name := range seals {
		path := filepath.Join(a.git, name)
		a.plan.Mounts = append(a.plan.Mounts, mounts.Mount{Source: path, Target: path, ReadOnly: true, Seal: true, Idmap: true})
	}
	return a
}

// succeeds has an attack work where there is no defence.
func succeeds(t *testing.T, a applied, script string) {
	t.Helper()
	testkit.Attach(t, a.plan, func(in *testkit.Inside) {
		a.Inside = in
		a.Must(a.wt, a.fill(script))
	})
}

// fails has an attack end with an error.
func (a applied) fails(t *testing.T, script string) string {
	t.Helper()
	out, code := a.Run(a.wt, a.fill(script))
	require.NotZero(t, code, "%s\n%s", script, out)
	return out
}

// fill puts the workspace's paths into a script.
func (a applied) fill(script string) string {
	return strings.NewReplacer("$C", a.git, "$M", a.meta, "$W", a.wt).Replace(script)
}

const moveObjects = "mv $C/objects $C/o2 && mkdir -p $C/objects/info && echo /evil > $C/objects/info/alternates"

func TestP11AFolderAboveASealCantBeMovedAndMadeAnew(t *testing.T) {
	attacks := []string{
		moveObjects, "mv $C/worktrees $C/w2 && ln -s /evil $C/worktrees", "mv $M $C/worktrees/x && mkdir $M",
		"mv $C/hooks $C/h && mkdir $C/hooks", "mv $C/info $C/i && mkdir $C/info",
	}
	for _, attack := range attacks {
		succeeds(t, undefended(t), attack)
	}
	succeeds(t, undefended(t, "objects/info"), moveObjects) // the seal alone does not hold
	withPlan(t, func(t *testing.T, a applied) {
		for _, attack := range attacks {
			require.Regexp(t, "busy|Read-only|not permitted", a.fails(t, attack), attack)
		}
		a.Must(a.wt, "git status && git log -1")
	})
}

func TestP11ABaseCloneInTheWorktreeCantBeMovedFromUnderItsMount(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	const attack = "mv $W/vendor $W/v2 && mkdir -p $W/vendor/repo"
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) {
			testkit.Leaks(t)
			repo := testkit.Repo(t, disk)
			wt := testkit.Worktree(t, disk, repo, "topic")
			inside := filepath.Join(wt, "vendor", "repo")
			testkit.GitAs(t, disk, wt, "init", "-q", "vendor")
			require.NoError(t, os.Rename(repo, inside))
			testkit.GitAs(t, disk, inside, "worktree", "repair", wt)
			plan := testkit.Plan(t, disk, inside, wt, layout)
			a := applied{wt: wt, git: filepath.Join(inside, ".git"), plan: plan}
			testkit.Attach(t, plan, func(in *testkit.Inside) {
				a.Inside = in
				require.Contains(t, a.fails(t, attack), "busy")
				require.Contains(t, a.fails(t, "mv -T $W/vendor/repo $W/vendor/v2"), "busy")
				a.Must(wt, "git log -1")
			})
			control := plan // the same without the mounts in between
			control.Mounts = slices.DeleteFunc(slices.Clone(plan.Mounts), func(m mounts.Mount) bool {
				return m.Target == inside || m.Target == filepath.Dir(inside)
			})
			testkit.Attach(t, control, func(in *testkit.Inside) { in.Must(wt, a.fill(attack)) })
		})
	}
}

func TestP11NoMountOfAPlanCanBeRenamedRemovedOrReplaced(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		a.Must(a.wt, "mkdir d && echo > f")
		attacks := []string{"mv -T $T $T.x", "rmdir $T", "rm -f $T", "mv -T d $T", "mv -Tf f $T", "{ ln -sfn d $T && test -L $T; }"}
		require.Empty(t, a.Must(a.wt, each(a.targets(), attacks)))
		for i, m := range a.plan.Mounts {
			s := a.readBack(t, m.Target)
			require.Equal(t, a.States[i], s)
		}
	})
}

func (a applied) targets() []string {
	var out []string
	for _, m := range a.plan.Mounts {
		out = append(out, m.Target)
	}
	return out
}

// each tries every attack on every path, and prints those that worked.
func each(paths, attacks []string) string {
	var script strings.Builder
	for _, path := range paths {
		for _, attack := range attacks {
			attack = strings.ReplaceAll(attack, "$T", path)
			fmt.Fprintf(&script, "%s 2>/dev/null && echo '%s'\n", attack, attack)
		}
	}
	return script.String() + "true"
}

func (a applied) readBack(t *testing.T, path string) mounts.State {
	t.Helper()
	root, err := mounts.OpenSource("/")
	require.NoError(t, err)
	defer root.Close()
	s, err := mounts.ReadBack(root, path)
	require.NoError(t, err)
	return s
}

func TestP12TheWorktreesPointerCantBeReplaced(t *testing.T) {
	attacks := []string{
		"rm -f $W/.git && echo 'gitdir: /evil' > $W/.git", "mv -f $W/.git $W/g && mkdir $W/.git", "ln -sfn /evil $W/.git && test -L $W/.git",
		"echo 'gitdir: /evil' > $W/g && mv -f $W/g $W/.git", "echo 'gitdir: /evil' > $W/.git",
	}
	for _, attack := range attacks {
		succeeds(t, undefended(t), attack)
	}
	withPlan(t, func(t *testing.T, a applied) {
		for _, attack := range attacks {
			require.Regexp(t, "busy|Read-only", a.fails(t, attack), attack)
		}
		require.Equal(t, "gitdir: "+a.meta, a.Must(a.wt, "cat .git"))
	})
}

func TestP11ASealCantBeUnmountedOrMadeWritableFromAUserNamespace(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		attacks := []string{"umount $T", "umount -l $T", "mount -o remount,bind,rw $T", "mount -o remount,rw $T"}
		out := a.Must(a.wt, "unshare -Urm sh <<'EOF'\nid -u\nmount -t tmpfs none /mnt && echo tmpfs\n"+each(a.plan.Seals(), attacks)+"\nEOF")
		require.Equal(t, "0\ntmpfs", out, "root of its namespace, who can mount and can't take a seal away")
		for _, seal := range a.plan.Seals() {
			require.True(t, a.readBack(t, seal).ReadOnly)
			// The control: whoever owns the mount namespace can.
			require.NoError(t, unix.Mount("", seal, "", unix.MS_REMOUNT|unix.MS_BIND, ""))
			require.False(t, a.readBack(t, seal).ReadOnly)
		}
	})
}

// git config replaces the file by a rename. From another mount namespace that takes the mount off what was replaced.
func TestP12TheNodeChangesTheConfigurationAndACommandStillCantWriteIt(t *testing.T) {
	const attack = "printf '[core]\\n\\tfsmonitor = /evil\\n' >> $C/config"
	hostSets := func(a applied) {
		a.Outside(func() { testkit.GitAs(t, disk, a.repo, "config", "user.name", "Host") })
	}
	control := undefended(t, "config")
	testkit.Attach(t, control.plan, func(in *testkit.Inside) {
		control.Inside = in
		control.fails(t, attack)
		hostSets(control)
		control.Must(control.wt, control.fill(attack))
	})
	require.Contains(t, read(t, filepath.Join(control.git, "config")), "fsmonitor")

	withPlan(t, func(t *testing.T, a applied) {
		config := filepath.Join(a.git, "config")
		hostSets(a)
		a.fails(t, attack)
		a.fails(t, "echo > $C/x && mv -f $C/x $C/config")
		s := a.readBack(t, config)
		require.True(t, s.MountPoint && s.ReadOnly)
		a.Outside(func() {
			require.NotContains(t, read(t, config), "fsmonitor")
			require.Contains(t, read(t, config), "Host")
			var st unix.Stat_t
			require.NoError(t, unix.Stat(config, &st))
			// What is sealed is not what the node has now: a check by inode or digest against the node's tells it.
			require.NotEqual(t, st.Ino, s.Inode)
		})
	})
}

func TestP12APointerThatTheNodeReplacesIsNoticedInTheSharedLayout(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		gitdir := filepath.Join(a.meta, "gitdir")
		a.Outside(func() {
			require.NoError(t, os.WriteFile(gitdir+".new", []byte(a.wt+"/.git\n"), 0o644))
			require.NoError(t, os.Chown(gitdir+".new", disk, disk))
			require.NoError(t, os.Rename(gitdir+".new", gitdir))
		})
		s := a.readBack(t, gitdir)
		if a.plan.Layout == mounts.Shared {
			require.False(t, s.MountPoint, "it is the base clone's own: the mount is gone, and the check sees it")
			return
		}
		require.True(t, s.MountPoint && s.ReadOnly)
		a.fails(t, "echo > $M/gitdir")
	})
}

func TestP12WhateverACommandDoesInTheIsolatedLayoutTheBaseCloneStaysAsItWas(t *testing.T) {
	const attack = `rm -rf $C/objects/* $C/refs/* $C/logs $C/packed-refs $M/index $M/HEAD; rm -rf $C/base-objects/*
		mkfifo $M/HEAD; echo 'ref: refs/heads/main' > $C/HEAD; echo x > $C/commondir; mkdir $C/remotes; chmod -R 0 $C; true`
	control := undefended(t)
	before := tree(t, control.git)
	succeeds(t, control, attack)
	require.NotEqual(t, before, tree(t, control.git))

	testkit.Leaks(t)
	a := planned(t, mounts.Isolated)
	before = tree(t, a.git)
	testkit.Attach(t, a.plan, func(in *testkit.Inside) {
		in.Must(a.wt, "git commit -q --allow-empty -m x && git branch y && git pack-refs --all && git gc -q --prune=now && git fsck && git branch -D y")
		in.Must(a.wt, a.fill(attack))
	})
	require.Equal(t, before, tree(t, a.git))
	testkit.GitAs(t, disk, a.repo, "fsck", "--strict")
}

func TestP12NoLinkOfACommandsLeadsOutOfItsMounts(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		// The folders above are the node's: what is not mounted writable can't be written, whatever path leads there.
		a.Must(a.wt, a.fill("ln -s $C/config $W/l && ln -s $C/base $C/l2 && ln -s $W/.git $C/l3"))
		a.fails(t, "echo x >> $W/l")
		a.fails(t, "echo x >> $C/l3")
		a.fails(t, "touch $C/l2/x")
	})
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// tree is everything below a folder: modes, and what files hold.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		out[path] = info.Mode().String()
		if info.Mode().IsRegular() {
			out[path] += fmt.Sprintf(" %x", sha256.Sum256([]byte(read(t, path))))
		}
		return nil
	}))
	return out
}
