package gitwork

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// clean brings a pair back to where each row of a table begins.
const clean = "git checkout -q -f -B work main; git clean -ffdq"

// promised is every command of everyday work, with a word of what must come of it on both sides.
var promised = []struct {
	name     string
	commands []string
	want     []string
}{
	{"status", []string{"echo more >> a; touch new", "git status"}, []string{"modified:   a", "new"}},
	{"add", []string{"echo more >> a; touch new", "git add -A", "git status --short"}, []string{"M  a", "A  new"}},
	{"commit", []string{"echo more >> a", "git commit -qam Committed", "git log -1 --format='%an: %s'"}, []string{"Author: Committed"}},
	{"amend", []string{"echo more >> a", "git commit -qa --amend -m Amended", "git log -1 --format='%an: %s'"}, []string{"Author: Amended"}},
	{"branch", []string{"git branch made", "git branch --list", "git branch -d made", "git branch --list 'm*'"}, []string{"  made", "* work"}},
	{"checkout", []string{"git checkout -q -b another", "git checkout -q side", "git checkout work -- a", "git status --short"}, []string{"M  a"}},
	{"switch", []string{"git switch -q -c switched other", "git switch -q -", "git branch --list 's*'"}, []string{"switched"}},
	{"merge", []string{"git merge --no-ff -m Merged other", "git log -1 --format='%s %p'", "git show --stat HEAD^2"}, []string{"Merged", "dir/c | 1 +"}},
	{"merge with a conflict", []string{"git merge -q side || git diff", "echo resolved > a; git add a", "git merge --continue", "git log -1 --format=%s"}, []string{"<<<<<<<", "Merge branch 'side' into work"}},
	{"rebase", []string{"git checkout -q -b rebased other", "git rebase -q main", "git log --oneline --graph -3", "git range-diff main~1 other rebased"}, []string{"Other changes c"}},
	{"rebase with a conflict", []string{"git checkout -q -b again side", "git rebase main", "git status", "echo resolved > a; git add a; git rebase --continue", "git log -3 --format='%an: %s'"}, []string{"rebase in progress", "Side adds s"}},
	{"cherry-pick with a conflict", []string{"git cherry-pick side~1", "git status", "git cherry-pick --abort", "git status --short"}, []string{"You are currently cherry-picking"}},
	{"stash", []string{"echo one >> a", "git stash push -qm First", "echo two >> b; touch new", "git stash push -qu -m Second", "git stash list", "git stash pop -q stash@{1}", "git diff --stat", "git stash drop -q"}, []string{"stash@{0}: On work: Second", "a | 1 +"}},
	{"reset", []string{"git reset -q --soft HEAD~1", "git status --short", "git reset -q", "git status --short", "git reset -q --hard ORIG_HEAD"}, []string{"M  b", " M b"}},
	{"tag", []string{"git tag light", "git tag -a -m Heavy heavy", "git tag -n --list '*y'", "git tag -d light heavy"}, []string{"heavy", "Heavy"}},
	{"log", []string{"git log --graph --oneline --all", "git log -p -1 -- b", "git reflog -2"}, []string{"+four"}},
	{"diff", []string{"echo more >> a", "git diff", "git diff --stat side...other", "git diff --no-index a b"}, []string{"+more", "dir/c | 1 +"}},
	{"blame", []string{"git blame -s a", "git blame --porcelain b"}, []string{"two of main", "author Author"}},
	{"worktree list", []string{"git worktree list", "git worktree list --porcelain"}, []string{"/base ", "/inside ", "branch refs/heads/main"}},
	{"fetch from a file remote", []string{
		"git clone -q --bare . far.git", "git -C far.git update-ref refs/heads/there other", "git fetch ./far.git there:fetched", "git log -1 --format=%s FETCH_HEAD",
		"git fetch -q ./far.git '+refs/heads/*:refs/remotes/far/*'", "git branch -r", "git push -q ./far.git HEAD:pushed", "git ls-remote ./far.git pushed", "git pull -q --rebase ./far.git main",
	}, []string{"Other changes c", "far/there", "refs/heads/pushed"}},
	{"mv and rm", []string{"git mv a moved; git rm -q b", "git commit -qm Moved", "git log --follow --oneline moved"}, []string{"Main changes a", "Moved"}},
	{"revert and bisect", []string{"git revert --no-edit HEAD", "git bisect start HEAD v1", "git bisect good", "git bisect reset", "git log -1 --format=%s work"}, []string{`Revert "Main changes b"`}},
	{"notes, archive, describe", []string{"git notes add -m Noted", "git log -1 --format=%N", "git archive HEAD | tar t", "git describe --always"}, []string{"Noted", "dir/c"}},
}

type rewritten struct {
	name, command string
	shows         string // the ref that must be gone
}

// packed is what deletes or rewrites packed refs: right in "isolated", a clear failure in "shared".
var packed = []rewritten{
	{"branch -d of a packed ref", "git branch -D other", "refs/heads/other"},
	{"tag -d of a packed ref", "git tag -d v2", "refs/tags/v2"},
	{"pack-refs", "git pack-refs --all", ""},
	{"gc", gc, ""},
}

const gc = "git gc -q"

func TestP11EveryPromisedCommandGivesWhatItGivesInAnOrdinaryClone(t *testing.T) {
	for _, layout := range layouts {
		for _, f := range []format{packedFormat, reftableFormat} {
			t.Run(layout+", "+f.name, func(t *testing.T) {
				f.need(t)
				p := newPair(t, newAgent(t, ""), clone(t, f), layout)
				for _, c := range promised {
					t.Run(c.name, func(t *testing.T) {
						commands := slices.DeleteFunc(slices.Clone(c.commands), func(command string) bool { return !can(layout, command) })
						said := p.both(t, append([]string{clean}, commands...)...)
						for _, want := range c.want {
							require.Contains(t, said, want)
						}
						p.arrived(t, "refs/heads/work")
					})
				}
				p.sound(t)
			})
		}
	}
}

func TestP11IsolatedDeletesAndRewritesPackedRefs(t *testing.T) {
	p := newPair(t, newAgent(t, ""), clone(t, packedFormat), isolated)
	before := must(t, p.base, "git for-each-ref")
	for _, c := range packed {
		said := p.both(t, clean, "git checkout -q -b topic-"+strings.Fields(c.name)[0], "echo more >> a; git commit -qam More", c.command)
		require.NotContains(t, said, "exit code 1\n", c.name)
		if c.shows != "" {
			require.NotContains(t, said[strings.LastIndex(said, "\n$ "):], c.shows, c.name)
		}
	}
	// Attack 30: what the base clone had is as it was, and it got what is the session's.
	now := must(t, p.base, "git for-each-ref")
	for _, line := range strings.Split(strings.TrimSpace(before), "\n") {
		require.Contains(t, now, line)
	}
	p.arrived(t, "refs/heads/work", "refs/heads/topic-*")
	p.sound(t)
}

// Deleting a packed ref rewrites a file that all sessions share, so the layout "shared" refuses it, and says so.
func TestP11SharedRefusesLoudlyToDeleteOrRewritePackedRefs(t *testing.T) {
	a := newAgent(t, "")
	from := clone(t, packedFormat)
	refused := packed
	if olderGit() {
		refused = append(refused, rewritten{"branch -d of a loose ref", "git branch -D work2", ""}, rewritten{"tag -d of a loose ref", "git tag -d loose", ""})
	}
	p := newPair(t, a, from, shared)
	must(t, p.inside, "git branch work2; git tag loose")
	before := must(t, p.base, "git for-each-ref")
	for _, c := range refused {
		t.Run(c.name, func(t *testing.T) {
			_, code := p.inside.run(t, preamble+c.command)
			if c.command != gc { // a newer one goes on with the rest after it has said so, and exits with 0 (2.53 does, 2.47 doesn't)
				require.NotZero(t, code, c.command)
			}
			require.Contains(t, p.inside.said(), "packed-refs", "the message names what is in the way")
			require.Equal(t, before, must(t, p.base, "git for-each-ref"), "nothing is lost")
		})
	}
	must(t, p.inside, "git update-ref -d refs/heads/work2; git update-ref -d refs/tags/loose") // this way works
	p.both(t, "echo more >> a", "git commit -qam 'Still works'")
	p.sound(t)
}

// Attack 30, for the layouts: an interrupted pick must not leave its author to the commit after the next.
func TestP12Attack30TheCommitAfterAConflictedPickHasItsOwnAuthor(t *testing.T) {
	a := newAgent(t, "")
	from := clone(t, packedFormat)
	// The picked commit has another author than whoever picks it.
	must(t, from, preamble+"at 9; git checkout -q side; git commit -q --amend --author='Picked <picked@example.com>' --no-edit; git checkout -q main; git pack-refs --all")
	must(t, from, preamble+"at 9; git checkout -q --detach main; sed -i 's/two/two of picked/' a; git commit -qa --author='Picked <picked@example.com>' -m 'To be picked'; git branch picked; git checkout -q main; git reset -q --hard HEAD~1; git pack-refs --all")
	for _, layout := range layouts {
		t.Run(layout, func(t *testing.T) {
			p := newPair(t, a, from, layout)
			p.both(t, "sed -i 's/two/two of work/' a; git commit -qam Conflicting", "git cherry-pick picked", "echo resolved > a; git add a", "git commit -q --no-edit", "echo more >> b; git commit -qam Next")
			require.Equal(t, "Author: Next\nPicked: To be picked\nAuthor: Conflicting\n", must(t, p.inside, "git log -3 --format='%an: %s'"))
			_, code := p.inside.run(t, "git rev-parse -q --verify CHERRY_PICK_HEAD")
			require.Equal(t, 1, code)
			p.sound(t)
		})
	}
}

// interrupted kills git add, and what that has started, while it holds the index's lock.
const interrupted = `set -m; echo '*.slow filter=slow' > .gitattributes; echo x > f.slow; lock=$(git rev-parse --git-path index.lock)
git -c filter.slow.clean='exec sleep 600' add f.slow > /dev/null 2>&1 & until [ -e "$lock" ]; do sleep 0.01; done
kill -9 -- -$!; wait $!; test -e "$lock"`

func TestP12Attack35AnAddWorksAfterOneThatWasKilled(t *testing.T) {
	a := newAgent(t, "")
	from := clone(t, filesFormat)
	for _, layout := range layouts {
		t.Run(layout, func(t *testing.T) {
			p := newPair(t, a, from, layout)
			must(t, p.ordinary, interrupted)
			_, code := p.ordinary.run(t, "git add a")
			require.Equal(t, 128, code, "control: an ordinary clone keeps the lock")

			must(t, p.inside, interrupted)
			locks := p.inside.newest.GetHarvest().GetStaleLocks()
			require.Len(t, locks, 1)
			require.True(t, strings.HasSuffix(locks[0], "/index.lock"), locks[0])
			must(t, p.inside, "echo more >> a; git add a; git commit -qm After")
		})
	}
}

// The configuration is read-only inside. What can't do without writing it fails, or says nothing and stores nothing.
func TestP11WhatWritesTheConfigurationDoesNotStoreIt(t *testing.T) {
	a := newAgent(t, "")
	from := clone(t, packedFormat)
	for _, layout := range layouts {
		t.Run(layout, func(t *testing.T) {
			p := newPair(t, a, from, layout)
			before := must(t, p.base, "git config --list --local")
			for _, c := range []string{"git config user.name Me", "git config alias.x '!touch /tmp/x'", "git remote add up ./far.git", "git config core.hooksPath hooks", "git worktree add ../another"} {
				_, code := p.inside.run(t, c)
				require.NotZero(t, code, c)
				require.NotEmpty(t, p.inside.said(), c)
			}
			must(t, p.inside, "git checkout -q --track -b tracking main")
			_, code := p.inside.run(t, "git rev-parse tracking@{upstream}")
			require.NotZero(t, code, "there is no upstream")
			_, code = p.inside.run(t, "git branch -m tracking renamed")
			require.Equal(t, 128, code)
			require.Contains(t, p.inside.said(), "Branch is renamed, but update of config-file failed")
			must(t, p.inside, "git rev-parse -q --verify renamed")
			require.Equal(t, before, must(t, p.base, "git config --list --local"))
			require.NoDirExists(t, p.worktree+"/../another")
		})
	}
}

// git is what a trusted person or program asks through the agent.
func (s *session) git(t require.TestingT, args ...string) string {
	res, err := s.Client.Git.Git(context.Background(), &sandboxv1.GitRequest{SessionId: s.id, Args: args})
	require.NoError(t, err, args)
	require.Zero(t, res.GetExitCode(), "%v: %s", args, res.GetStderr())
	require.False(t, res.GetTruncated())
	return string(res.GetStdout())
}

func TestP11TrustedGitSeesWhatACommandDid(t *testing.T) {
	a := newAgent(t, "")
	for _, f := range []format{packedFormat, sha256Format, reftableFormat} {
		for _, layout := range layouts {
			if layout == shared && f == sha256Format {
				continue // nothing in that layout knows ids
			}
			t.Run(layout+", "+f.name, func(t *testing.T) {
				f.need(t)
				p := newPair(t, a, clone(t, f), layout)
				p.both(t, "echo more >> a; git commit -qam Committed", "echo staged >> b; git add b", "echo dirty >> dir/c; touch untracked", "git mv a moved")
				for _, args := range [][]string{
					{"status", "--porcelain"}, {"status", "--porcelain=v2", "--branch"}, {"diff", "--cached"}, {"diff"}, {"log", "--oneline", "-3"},
					{"show", "--stat", "HEAD"}, {"branch", "--list"}, {"rev-parse", "HEAD"}, {"for-each-ref"}, {"ls-files", "--stage"},
				} {
					want := must(t, p.ordinary, "git "+strings.Join(args, " "))
					require.NotEmpty(t, want)
					require.Equal(t, want, p.inside.git(t, args...), args)
				}
				p.both(t, "git status --short") // and it left everything as it was
			})
		}
	}
}
