package git

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// inTables puts the refs of a place's repository, and of its worktree, into reftables.
func inTables(p *place) {
	p.t.Helper()
	p.hostWorks("worktree", "remove", p.w)
	testkit.Reftable(p.t, p.uid, p.b)
	p.hostWorks("worktree", "add", "-q", p.w, "topic")
}

// The list of a reftable's files holds names, which Git puts behind the folder's as they are, and it removes the files once
// it has written a newer one of the same content.
func TestP12ATableOfRefsThatLiesOutside(t *testing.T) {
	attack{
		prepare: func(p *place) {
			inTables(p)
			list := p.as(p.b, "cat", p.c+"/reftable/tables.list")
			names, err := list.Output()
			require.NoError(p.t, err)
			first, _, _ := strings.Cut(string(names), "\n")
			require.NoError(p.t, p.as(p.b, "cp", p.c+"/reftable/"+first, filepath.Join(p.out, "table.ref")).Run())
		},
		strike: func(p *place) {
			p.command(`for dir in $C/reftable $M/reftable; do
mkdir -p $dir; realpath -m --relative-to=$dir $OUT/table.ref > $dir/new; mv $dir/new $dir/tables.list; done; git branch inside; git pack-refs`)
			p.trusted("branch", "trusted")
			p.trusted("commit", "--allow-empty", "-m", "x")
			if p.layout != shared {
				p.host("branch", "of-the-host")
				p.host("pack-refs")
			}
		},
		sharedLimit: func(p *place) {
			// C/reftable is the base clone's: plain Git there goes by its list. What runs in the jail and in the sandbox does not
			// get outside.
			require.False(p.t, p.outsideChanged())
			p.host("branch", "of-the-host")
			require.True(p.t, p.outsideChanged())
		},
	}.run(t)
}

// Without a base clone's HEAD as a file, a command that shares its refs shares that as well.
func TestP12TheBaseClonesHeadInATable(t *testing.T) {
	head := func(p *place) string { return p.hostWorks("symbolic-ref", "HEAD") }
	attack{
		prepare: inTables,
		strike:  func(p *place) { p.command(`git --git-dir=$C symbolic-ref HEAD refs/heads/topic`) },
		harmed:  func(p *place) bool { return head(p) != "refs/heads/main" },
		sharedLimit: func(p *place) {
			require.Equal(p.t, "refs/heads/topic", head(p), "it is a ref like the branches, which commands may move there")
		},
	}.run(t)
}
