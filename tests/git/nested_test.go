package git

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// nested makes a repository in the worktree that is a gitlink of the index, as $W/sub, whose configuration runs a program.
const nested = `
git init -q sub && git -C sub commit -q --allow-empty -m x
git update-index --add --cacheinfo 160000,$(git -C sub rev-parse HEAD),sub
git -C sub config core.fsmonitor "touch $OUT/fired; false"; echo changed >> README
`

func TestP12Attack11AProgramOfANestedRepository(t *testing.T) {
	attack{
		steps: intoTheSubmodule([]string{"status"}, []string{"diff"}, []string{"add", "-A"}, []string{"add", "-u"}, []string{"commit", "-am", "x"}, []string{"stash"},
			[]string{"rebase", "--autostash", "HEAD"}),
		inside: func(p *place) { p.host("diff", "topic") },
	}.run(t)
}

// That the daemon is root and trusts the folder itself (safe.directory) makes it worse: Git in the nested repository is
// told where it is, and does not ask whose it is.
func TestP12Attack13AProgramOfANestedRepositoryOfRoots(t *testing.T) {
	attack{
		ofRoot: true, config: "workspace: {roots: [/var/tmp], allow_root_owned: true}\n",
		steps: intoTheSubmodule([]string{"status"}, []string{"add", "-A"}),
	}.run(t)
}

// intoTheSubmodule are calls that look into a gitlink, which runs Git there, with what is configured there.
func intoTheSubmodule(calls ...[]string) (steps []step) {
	for i, args := range calls {
		steps = append(steps, step{name: strings.Join(args, " "), strike: func(p *place) {
			if i == 0 || p.layout == control {
				p.command(nested)
			}
			p.trusted(args...)
		}})
	}
	return steps
}

// Git has the filter run where a file has the size of its entry and another time.
func TestP12Attack12AFilterOfANestedRepository(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`
git init -q sub; cd sub; echo a > f; echo '* filter=x' > .gitattributes; git add .; git commit -q -m x
git config filter.x.clean "touch $OUT/fired; cat"; echo b > f; touch -d @1 f; cd ..
printf '[submodule "sub"]\n\tpath = sub\n\turl = ./sub\n\tignore = none\n' > .gitmodules
git update-index --add --cacheinfo 160000,$(git -C sub rev-parse HEAD),sub`)
			if p.layout == control {
				p.trusted("-c", "diff.ignoreSubmodules=all", "add", "-A") // .gitmodules wins
				return
			}
			for _, args := range [][]string{{"add", "-A"}, {"stash"}, {"status"}, {"diff"}, {"commit", "-am", "x"}} {
				p.trusted(args...)
			}
		},
	}.run(t)
}

func TestP12Attack14ANestedGitFileThatNamesAPrivateRepository(t *testing.T) {
	attack{
		prepare: func(p *place) {
			p.outsideGit("init", "-q", ".")
			p.outsideGit("commit", "-q", "--allow-empty", "-m", "private")
		},
		strike: func(p *place) {
			p.command(`mkdir sub; echo "gitdir: $OUT/.git" > sub/.git`)
			p.trusted("add", "sub")
			p.trusted("add", "-A")
		},
		harmed: func(p *place) bool {
			private := p.outsideGit("rev-parse", "HEAD")
			recorded := p.trusted("ls-files", "--stage").out + p.works("git ls-files --stage") + p.trusted("diff", "--cached").out
			return private != "" && strings.Contains(recorded, private)
		},
	}.run(t)
}

func TestP12Attack15AnEmbeddedBareRepositoryAsWorkingFolder(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`
git init -q --bare bare && cd bare && git config core.bare false && git config core.worktree . && git config core.fsmonitor "touch $OUT/fired; false"`)
			p.trusted("-C", "bare", "status")
			p.trusted("status")
		},
		inside: func(p *place) {
			// Whatever the working folder, it is this repository that trusted Git looks at.
			require.Contains(p.t, p.trusted("status", "--porcelain").out, "?? bare/")
			require.Equal(p.t, p.hostWorks("rev-parse", "topic"), p.works("git rev-parse HEAD | tr -d '\n'"))
		},
	}.run(t)
}
