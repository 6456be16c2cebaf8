package git

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// commits makes n commits on the current branch, each with a file of its own.
const commits = `
commits() { for i in $(seq $2); do echo $1$i > $1$i; git add $1$i; git commit -q -m $1$i; done; }
`

func TestP12Attack16AnExecLineInAnUnfinishedRebase(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(commits + `
commits a 3; GIT_SEQUENCE_EDITOR='sed -i 1s/pick/edit/' git rebase -q -i HEAD~2
echo "exec touch $OUT/fired" >> $M/rebase-merge/git-rebase-todo`)
			p.trusted("rebase", "--continue")
			if p.layout != control { // these are allowed, and run
				p.trusted("commit", "--allow-empty", "-m", "in the middle")
				p.trusted("rebase", "--abort")
			}
		},
	}.run(t)
}

// A strategy is the program git-merge-STRATEGY, and one with a slash is a path in the worktree.
func TestP12Attack17AStrategyInAnUnfinishedCherryPick(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(commits + `
git checkout -q -b side; commits s 3; git checkout -q topic; echo other > s1; git add s1; git commit -q -m other
git cherry-pick side~2 side~1 side; echo settled > s1; git add s1
mkdir git-merge-x; printf '#!/bin/sh\ntouch %s/fired\nexit 1\n' $OUT > git-merge-x/evil; chmod +x git-merge-x/evil
printf '[options]\n\tstrategy = x/evil\n' > $M/sequencer/opts`)
			p.trusted("cherry-pick", "--continue")
			if p.layout != control { // these are allowed, and run
				p.trusted("commit", "-m", "settled")
				p.trusted("cherry-pick", "side")
				p.trusted("cherry-pick", "--abort")
			}
		},
	}.run(t)
}

func TestP12Attack18AnUnfinishedRebaseThatIsALinkOutside(t *testing.T) {
	attack{
		prepare: func(p *place) { p.file(filepath.Join(p.out, "victim"), "x") },
		strike: func(p *place) {
			p.command(`ln -s $OUT $M/rebase-merge; ln -s $OUT $M/rebase-apply; ln -s $OUT $M/sequencer`)
			p.trusted("rebase", "--quit")
			p.trusted("cherry-pick", "--quit")
			p.trusted("am", "--quit")
		},
	}.run(t)
}

func TestP12Attack19AReflogThatIsALinkOutside(t *testing.T) {
	attack{
		prepare: func(p *place) { p.file(filepath.Join(p.out, "profile"), "x\n") },
		strike: func(p *place) {
			p.command(`
rm -f $M/logs/HEAD $C/logs/refs/heads/topic; mkdir -p $C/logs/refs/heads
ln -s $OUT/profile $M/logs/HEAD; ln -s $OUT/profile $C/logs/refs/heads/topic; git commit -q --allow-empty -m inside`)
			p.trusted("commit", "--allow-empty", "-m", "touch /fired")
		},
		sharedLimit: func(p *place) {
			// C/logs is the base clone's: plain Git there follows the link. What runs in the jail and in the sandbox does not.
			require.False(p.t, p.outsideChanged())
			requireLink(p, "logs/refs/heads/topic")
			p.hostWorks("update-ref", "-m", "touch /fired", "refs/heads/topic", p.hostWorks("commit-tree", "-m", "x", "HEAD^{tree}"))
			require.True(p.t, p.outsideChanged())
		},
	}.run(t)
}

func TestP12Attack20MessagesThatAreLinksOutside(t *testing.T) {
	calls := map[string][]string{
		"COMMIT_EDITMSG": {"commit", "--allow-empty", "-m", "by trusted code"},
		"SQUASH_MSG":     {"merge", "--squash", "side"},
		"MERGE_MSG":      {"merge", "side"},
	}
	var steps []step
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		steps = append(steps, step{name: name, strike: func(p *place) {
			p.command(commits + `
git checkout -q -b side; commits s 1; git checkout -q topic; echo other > s1; git add s1; git commit -q -m other; rm -f $M/*MSG
ln -sf $OUT/` + name + ` $M/` + name)
			p.trusted(calls[name]...)
		}, undo: "git merge --squash side; git commit -q --allow-empty -m again; git reset -q --hard; git merge --abort; git branch -D side; rm -f $M/*MSG"})
	}
	attack{
		prepare: func(p *place) {
			for name := range calls {
				p.file(filepath.Join(p.out, name), "x\n")
			}
		},
		steps: steps,
	}.run(t)
}

func TestP12Attack21AFetchHeadThatIsALinkOutside(t *testing.T) {
	attack{
		prepare: func(p *place) { p.file(filepath.Join(p.out, "victim"), "x\n") },
		strike: func(p *place) {
			p.command(`git clone -q $B other; git -C other commit -q --allow-empty -m x; ln -sf $OUT/victim $M/FETCH_HEAD; ln -sf $OUT/victim $C/FETCH_HEAD`)
			p.trusted("fetch", "./other")
			p.host("fetch", "-q", p.w+"/other")
		},
		inside: func(p *place) {
			info, err := os.Lstat(filepath.Join(p.c, "FETCH_HEAD"))
			require.True(p.t, err != nil || info.Mode().IsRegular(), "the base clone has a FETCH_HEAD of its own or none")
		},
	}.run(t)
}

func TestP12Attack24ABranchNameThatLeadsOutside(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`echo 'ref: refs/heads/../../../../out/new' > $M/HEAD`)
			p.trusted("commit", "--allow-empty", "-m", "x")
		},
		inside: func(p *place) {
			p.command("true") // refreshed and harvested again
			head, err := os.ReadFile(filepath.Join(p.m, "HEAD"))
			require.NoError(p.t, err)
			if p.layout == isolated {
				require.Equal(p.t, "ref: refs/heads/topic\n", string(head), "what can't be a branch is not harvested")
			}
		},
	}.run(t)
}

// requireLink asserts the limit of the layout shared: the command's link lies in the base clone.
func requireLink(p *place, name string) {
	p.t.Helper()
	info, err := os.Lstat(filepath.Join(p.c, name))
	require.NoError(p.t, err)
	require.NotZero(p.t, info.Mode()&os.ModeSymlink, name)
}
