package mounts

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func everything(string) bool { return true }

func workspace(layout string) Workspace {
	return Workspace{Worktree: "/home/u/wt", CommonDir: "/home/u/base/.git", MetaDir: "/home/u/base/.git/worktrees/wt", OwnerUID: 1234, OwnerGID: 1235,
		Layout: layout, Private: "/state/key/git"}
}

// inBothLayouts runs a test with the plan of each layout, of a repository that has everything.
func inBothLayouts(t *testing.T, f func(t *testing.T, p Plan)) {
	for _, layout := range []string{Isolated, Shared} {
		t.Run(layout, func(t *testing.T) {
			p, err := New(workspace(layout), everything)
			require.NoError(t, err)
			require.Equal(t, layout, p.Layout)
			require.Empty(t, p.Missing)
			f(t, p)
		})
	}
}

func TestP11TheWorktreeIsMountedAtItsOwnPath(t *testing.T) {
	inBothLayouts(t, func(t *testing.T, p Plan) {
		require.Contains(t, p.Mounts, Mount{Source: "/home/u/wt", Target: "/home/u/wt", Idmap: true})
		require.ElementsMatch(t, []string{"/home/u/wt", "/home/u/base/.git"}, p.Roots())
	})
}

func TestP11InTheIsolatedLayoutNothingOfTheBaseCloneIsWritable(t *testing.T) {
	p, err := New(workspace(Isolated), everything)
	require.NoError(t, err)
	for _, m := range p.Mounts {
		if within(m.Source, "/home/u/base") {
			require.True(t, m.ReadOnly && m.Seal, m)
		}
	}
	require.Contains(t, p.Mounts, Mount{Source: "/home/u/base/.git/objects", Target: "/home/u/base/.git/base-objects", ReadOnly: true, Seal: true, Idmap: true})
}

func TestP11InTheSharedLayoutObjectsRefsLogsAndTheWorktreesFolderAreTheBaseClones(t *testing.T) {
	p, err := New(workspace(Shared), everything)
	require.NoError(t, err)
	var writable []string
	for _, m := range p.Mounts {
		if !m.ReadOnly && within(m.Source, "/home/u/base") {
			require.Equal(t, m.Source, m.Target)
			writable = append(writable, m.Source)
		}
	}
	const c = "/home/u/base/.git/"
	require.ElementsMatch(t, []string{c + "objects", c + "refs", c + "logs", c + "reftable", c + "worktrees/wt"}, writable)
	require.Contains(t, p.Mounts, Mount{Source: "/state/key/git", Target: "/home/u/base/.git", Idmap: true, Sticky: true})
	require.Contains(t, p.Mounts, Mount{Source: c + "worktrees", Target: c + "base/worktrees", ReadOnly: true, Seal: true, Empty: true})
}

func TestP11APlanSealsPointersConfigurationAndHooksAndNothingElse(t *testing.T) {
	const c = "/home/u/base/.git/"
	seals := []string{"/home/u/wt/.git", c + "config", c + "hooks", c + "info", c + "objects/info", c + "worktrees",
		c + "worktrees/wt/commondir", c + "worktrees/wt/gitdir", c + "worktrees/wt/config.worktree"}
	inBothLayouts(t, func(t *testing.T, p Plan) {
		base := []string{c + "base-objects"}
		if p.Layout == Shared {
			base = []string{c + "base", c + "base/worktrees"}
		}
		require.ElementsMatch(t, append(base, seals...), p.Seals())
		for _, m := range p.Mounts {
			require.Equal(t, m.Seal, m.ReadOnly, m.Target)
			if m.Empty {
				continue
			}
			require.True(t, m.Idmap, "a sealed file needs the mapping of its folder: %s", m.Target)
		}
	})
}

func TestP11EveryFolderBetweenAMountAndASealIsAMountPoint(t *testing.T) {
	inBothLayouts(t, func(t *testing.T, p Plan) { requireNoGaps(t, p) })
}

// requireNoGaps: every folder above a mount, up to the outermost one, is a mount.
func requireNoGaps(t *testing.T, p Plan) {
	t.Helper()
	targets := map[string]bool{}
	for _, m := range p.Mounts {
		targets[m.Target] = true
	}
	for _, m := range p.Mounts {
		for _, root := range p.Roots() {
			for dir := filepath.Dir(m.Target); within(dir, root); dir = filepath.Dir(dir) {
				require.True(t, targets[dir], "%s, above %s, is no mount", dir, m.Target)
			}
		}
	}
}

func TestAParentIsMountedBeforeWhatLiesInIt(t *testing.T) {
	for name, w := range map[string]Workspace{
		"apart": workspace(Isolated),
		"the base clone inside the worktree": {Worktree: "/home/u/wt", CommonDir: "/home/u/wt/vendor/base/.git",
			MetaDir: "/home/u/wt/vendor/base/.git/worktrees/wt", Private: "/state/git"},
		"the worktree inside the base clone": {Worktree: "/home/u/base/wt", CommonDir: "/home/u/base/.git",
			MetaDir: "/home/u/base/.git/worktrees/wt", Private: "/state/git"},
	} {
		for _, w.Layout = range []string{Isolated, Shared} {
			t.Run(name+", "+w.Layout, func(t *testing.T) {
				p, err := New(w, everything)
				require.NoError(t, err)
				for i, later := range p.Mounts {
					for _, earlier := range p.Mounts[:i] {
						require.False(t, within(earlier.Target, later.Target), "%s is mounted after %s", later.Target, earlier.Target)
					}
				}
				requireNoGaps(t, p)
			})
		}
	}
}

func TestP11ABaseCloneInTheWorktreeCantBeMovedAwayFromItsMount(t *testing.T) {
	p, err := New(Workspace{Worktree: "/w", CommonDir: "/w/vendor/base/.git", MetaDir: "/w/vendor/base/.git/worktrees/x", Layout: Isolated, Private: "/s"}, everything)
	require.NoError(t, err)
	require.Contains(t, p.Mounts, Mount{Source: "/w/vendor", Target: "/w/vendor", Idmap: true})
	require.Contains(t, p.Mounts, Mount{Source: "/w/vendor/base", Target: "/w/vendor/base", Idmap: true})
}

func TestP11WhatARepositoryMayLackIsSealedOtherwiseOrListed(t *testing.T) {
	const c = "/home/u/base/.git/"
	lacks := func(path string) bool {
		return path != c+"hooks" && path != c+"logs" && path != c+"reftable" && path != c+"worktrees/wt/config.worktree"
	}
	p, err := New(workspace(Shared), lacks)
	require.NoError(t, err)
	require.Equal(t, []string{c + "worktrees/wt/config.worktree"}, p.Missing)
	require.Contains(t, p.Mounts, Mount{Source: "/state/key/git/hooks", Target: c + "hooks", ReadOnly: true, Seal: true, Idmap: true})
	for _, m := range p.Mounts {
		require.NotContains(t, []string{c + "logs", c + "reftable"}, m.Target)
	}
}

func TestCachesLieBesideTheWorkspaceAndAreNoSeals(t *testing.T) {
	w := workspace(Isolated)
	w.Extra = []Mount{
		{Source: "/state/key/caches/go", Target: "/home/sandbox/.cache/go", Idmap: true},
		{Source: "/srv/npm", Target: "/home/sandbox/.npm", ReadOnly: true},
	}
	p, err := New(w, everything)
	require.NoError(t, err)
	require.Contains(t, p.Mounts, Mount{Source: "/state/key/caches/go", Target: "/home/sandbox/.cache/go", Idmap: true, Cache: true})
	require.Contains(t, p.Roots(), "/home/sandbox/.npm")
	require.NotContains(t, p.Seals(), "/home/sandbox/.npm")
}

func TestBadWorkspacesAreRefusedByName(t *testing.T) {
	change := func(f func(*Workspace)) Workspace { w := workspace(Isolated); f(&w); return w }
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
		{"no layout", change(func(w *Workspace) { w.Layout = "" }), "isolated or shared"},
		{"no private folder", change(func(w *Workspace) { w.Private = "" }), "agent's folder"},
		{"the agent's folder in the worktree", change(func(w *Workspace) { w.Private = "/home/u/wt/state" }), "another state folder"},
		{"a cache over the worktree", change(func(w *Workspace) { w.Extra = []Mount{{Source: "/c", Target: "/home/u"}} }), "choose another place"},
		{"a cache in a cache", change(func(w *Workspace) {
			w.Extra = []Mount{{Source: "/c", Target: "/h/c"}, {Source: "/d", Target: "/h/c/d"}}
		}), "choose another place"},
		{"a sealed cache", change(func(w *Workspace) { w.Extra = []Mount{{Source: "/c", Target: "/h/c", ReadOnly: true, Seal: true}} }), "can't be sealed"},
		{"a relative cache", change(func(w *Workspace) { w.Extra = []Mount{{Source: "/c", Target: "c"}} }), "absolute"},
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

func TestTheSkeletonsUidIsKeptInTheSharedLayoutAlone(t *testing.T) {
	inBothLayouts(t, func(t *testing.T, p Plan) {
		m := Mapping{DiskUID: 1234, HostUID: 70, DiskGID: 1235, HostGID: 71}
		if p.Layout == Shared {
			m.KeepUID = 65534
		}
		require.Equal(t, m, p.Mapping(70, 71))
	})
	require.NotEqual(t, uint32(65534), SkeletonUID(65534))
}
