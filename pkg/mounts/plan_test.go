package mounts

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func everything(string) bool { return true }

func workspace() Workspace {
	return Workspace{Worktree: "/home/u/wt", CommonDir: "/home/u/base/.git", MetaDir: "/home/u/base/.git/worktrees/wt", OwnerUID: 1234, OwnerGID: 1235}
}

func TestP11EveryMountOfAPlanIsAtItsOwnPath(t *testing.T) {
	p, err := New(workspace(), everything)
	require.NoError(t, err)
	for _, m := range p.Mounts {
		require.Equal(t, m.Source, m.Target)
	}
}

func TestP11APlanSealsPointersConfigurationAndHooksAndNothingElse(t *testing.T) {
	p, err := New(workspace(), everything)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"/home/u/wt/.git", "/home/u/base/.git/config", "/home/u/base/.git/hooks", "/home/u/base/.git/info", "/home/u/base/.git/objects/info",
		"/home/u/base/.git/worktrees", "/home/u/base/.git/worktrees/wt/commondir", "/home/u/base/.git/worktrees/wt/gitdir",
	}, p.Seals())
	for _, m := range p.Mounts {
		require.Equal(t, m.Seal, m.ReadOnly, m.Target)
		if m.Empty {
			continue
		}
		require.True(t, m.Idmap, "a sealed file needs the mapping of its folder: %s", m.Target)
	}
}

func TestP11EveryFolderBetweenAMountAndASealIsAMountPoint(t *testing.T) {
	p, err := New(workspace(), everything)
	require.NoError(t, err)
	var targets []string
	for _, m := range p.Mounts {
		targets = append(targets, m.Target)
	}
	require.Contains(t, targets, "/home/u/base/.git/worktrees")
	require.Contains(t, targets, "/home/u/base/.git/worktrees/wt")
	require.Contains(t, targets, "/home/u/base/.git/objects")
}

func TestAParentIsMountedBeforeWhatLiesInIt(t *testing.T) {
	for name, w := range map[string]Workspace{
		"apart": workspace(),
		"the base clone inside the worktree": {Worktree: "/home/u/wt", CommonDir: "/home/u/wt/vendor/base/.git",
			MetaDir: "/home/u/wt/vendor/base/.git/worktrees/wt"},
		"the worktree inside the base clone": {Worktree: "/home/u/base/wt", CommonDir: "/home/u/base/.git",
			MetaDir: "/home/u/base/.git/worktrees/wt"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := New(w, everything)
			require.NoError(t, err)
			for i, later := range p.Mounts {
				for _, earlier := range p.Mounts[:i] {
					require.False(t, within(earlier.Target, later.Target), "%s is mounted after %s", later.Target, earlier.Target)
				}
			}
		})
	}
}

func TestRootsAreTheMountsThatLieInNoOther(t *testing.T) {
	p, err := New(workspace(), everything)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"/home/u/wt", "/home/u/base/.git"}, p.Roots())
}

func TestP11WhatIsMissingIsListedAndNotSealed(t *testing.T) {
	p, err := New(workspace(), func(path string) bool { return path != "/home/u/base/.git/hooks" })
	require.NoError(t, err)
	require.Equal(t, []string{"/home/u/base/.git/hooks"}, p.Missing)
	require.NotContains(t, p.Seals(), "/home/u/base/.git/hooks")
}

func TestBadWorkspacesAreRefusedByName(t *testing.T) {
	change := func(f func(*Workspace)) Workspace { w := workspace(); f(&w); return w }
	for _, c := range []struct {
		name string
		w    Workspace
		says string
	}{
		{"relative worktree", change(func(w *Workspace) { w.Worktree = "wt" }), "not an absolute path"},
		{"unclean worktree", change(func(w *Workspace) { w.Worktree = "/home/u/../u/wt" }), `"/home/u/wt"`},
		{"root as worktree", change(func(w *Workspace) { w.Worktree = "/" }), "root folder"},
		{"NUL byte", change(func(w *Workspace) { w.Worktree = "/home/u/\x00" }), "NUL"},
		{"worktree inside the common folder", change(func(w *Workspace) { w.Worktree = "/home/u/base/.git/wt" }), "git worktree move"},
		{"another repository's Git folder", change(func(w *Workspace) { w.MetaDir = "/home/u/other/.git/worktrees/wt" }), "git worktree list"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := New(c.w, everything)
			require.ErrorIs(t, err, ErrWorkspace)
			require.ErrorContains(t, err, c.says)
		})
	}
}

func TestOwnershipFallsBackToTheOnDiskOwnerButNeverToRoot(t *testing.T) {
	p := Plan{Worktree: "/w", OwnerUID: 1234, OwnerGID: 1235}
	o, err := DecideOwnership(p, true)
	require.NoError(t, err)
	require.Equal(t, Ownership{Idmap: true}, o)

	o, err = DecideOwnership(p, false)
	require.NoError(t, err)
	require.Equal(t, Ownership{CommandHostUID: 1234, CommandHostGID: 1235}, o)

	for _, root := range []Plan{{Worktree: "/w", OwnerGID: 5}, {Worktree: "/w", OwnerUID: 5}} {
		_, err = DecideOwnership(root, false)
		require.ErrorIs(t, err, ErrWorkspace)
		require.ErrorContains(t, err, "chown")
	}
	o, err = DecideOwnership(Plan{}, true)
	require.NoError(t, err)
	require.True(t, o.Idmap, "with idmapped mounts a root-owned worktree is fine")
}
