package gitwork

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// side is where a script runs: inside a session, or in an ordinary worktree.
type side interface {
	run(t require.TestingT, script string) (stdout string, code int)
	said() string
}

// plain is a folder on the node, with commands run as its owner and without any sandbox.
type plain struct {
	dir    string
	stderr bytes.Buffer
}

func (p *plain) run(t require.TestingT, script string) (string, int) {
	out, code, err := p.start(script)
	require.NoError(t, err, script)
	return out, code
}

// start is run for another goroutine than the test's.
func (p *plain) start(script string) (stdout string, code int, err error) {
	cmd := exec.Command("bash", "-c", script)
	p.stderr.Reset()
	var out bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, &out, &p.stderr
	cmd.Env = []string{
		"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "LANG=C.UTF-8",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0",
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner, Gid: owner}}
	if err := cmd.Run(); cmd.ProcessState == nil {
		return "", 0, err
	}
	return out.String(), cmd.ProcessState.ExitCode(), nil
}

func (p *plain) said() string { return p.stderr.String() }

// must runs a script that has to succeed.
func must(t require.TestingT, s side, script string) string {
	out, code := s.run(t, script)
	require.Zero(t, code, "%s\n%s%s", script, out, s.said())
	return out
}

// format is what a repository is made with.
type format struct {
	name string
	init string // options of git init
	// packed: the refs that the clone begins with are packed.
	packed bool
}

var (
	filesFormat    = format{name: "files"}
	packedFormat   = format{name: "packed refs", packed: true}
	sha256Format   = format{name: "SHA-256", init: "--object-format=sha256", packed: true}
	reftableFormat = format{name: "reftable", init: "--ref-format=reftable"}
)

// need skips where the installed Git can't make such a repository.
func (f format) need(t *testing.T) {
	t.Helper()
	testkit.Need(t, testkit.Git)
	if f.init == "" {
		return
	}
	out, err := exec.Command("git", "init", "-q", "--bare", f.init, filepath.Join(t.TempDir(), "r")).CombinedOutput()
	if err != nil {
		version, _ := exec.Command("git", "version").Output()
		t.Skipf("%s can't make a repository with %s: %s", strings.TrimSpace(string(version)), f.init, firstLine(string(out)))
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// preamble sets identity and dates: equal work gives equal ids on both sides.
const preamble = `export GIT_AUTHOR_NAME=Author GIT_AUTHOR_EMAIL=author@example.com
export GIT_COMMITTER_NAME=Committer GIT_COMMITTER_EMAIL=committer@example.com
export GIT_EDITOR=: GIT_SEQUENCE_EDITOR=: GIT_PAGER=cat GIT_MERGE_AUTOEDIT=no
at() { export GIT_AUTHOR_DATE="@$((1800000000 + $1 * 60)) +0000" GIT_COMMITTER_DATE="@$((1800000030 + $1 * 60)) +0000"; }
`

// history is what each clone begins with: branches that merge with main, and one that doesn't.
const history = preamble + `set -e; at 0
mkdir dir; printf '%s\n' one two three > a; printf '%s\n' one two three > b; echo inside > dir/c; echo far.git > .gitignore
git add .; git commit -qm First; git tag v1
at 1; git checkout -qb side; sed -i 's/two/two of side/' a; git commit -qam 'Side changes a'; echo side > s; git add s; git commit -qm 'Side adds s'
at 2; git checkout -q main; git checkout -qb other; echo other >> dir/c; git commit -qam 'Other changes c'
at 3; git checkout -q main; sed -i 's/two/two of main/' a; git commit -qam 'Main changes a'; echo four >> b; git commit -qam 'Main changes b'
git tag -a -m 'Annotated' v2
`

// clone makes an ordinary clone of that history below a folder of its own.
func clone(t *testing.T, f format) *plain {
	t.Helper()
	top := filepath.Dir(testkit.Repo(t, owner))
	c := &plain{dir: filepath.Join(top, "clone")}
	require.NoError(t, os.Mkdir(c.dir, 0o755))
	require.NoError(t, os.Chown(c.dir, owner, owner))
	must(t, c, "git init -q -b main "+f.init+" .")
	must(t, c, history)
	if f.packed {
		must(t, c, "git pack-refs --all")
	}
	return c
}

// pair is a session and an ordinary worktree that begin alike.
type pair struct {
	inside        *session
	base          *plain // the session's base clone
	ordinary      *plain
	ordinaryClone *plain
	layout        string
	worktree      string // the session's
	steps         int
	script        []string // what has run, to be shown when the two differ
}

// newPair copies a clone twice. The agent makes the session's worktree.
func newPair(t require.TestingT, a *agent, from *plain, layout string) *pair {
	top, err := os.MkdirTemp(filepath.Dir(from.dir), "pair-")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(top, 0o711))
	p := &pair{layout: layout, worktree: filepath.Join(top, "inside")}
	folder := func(name string) *plain {
		dir := filepath.Join(top, name)
		out, err := exec.Command("cp", "-a", from.dir, dir).CombinedOutput()
		require.NoError(t, err, string(out))
		return &plain{dir: dir}
	}
	// Names of one length: Git pads columns.
	p.base, p.ordinaryClone = folder("base"), folder("orig")
	require.NoError(t, os.Chown(top, owner, owner))
	p.ordinary = &plain{dir: filepath.Join(top, "beside")}
	must(t, p.ordinaryClone, "git worktree add -q -b work "+p.ordinary.dir+" main")
	p.inside = a.open(t, p.base.dir, p.worktree, "work", layout)
	return p
}

// rewriting are commands that rewrite packed-refs in a Git older than 2.44 even for refs that are not in it, which the
// layout "shared" refuses.
var rewriting = regexp.MustCompile(`git branch (-d|-D) |git tag -d |git bisect `)

// can says whether a command is among those that a layout promises, with the installed Git.
func can(layout, command string) bool {
	return layout == isolated || !olderGit() || !rewriting.MatchString(command)
}

// olderGit: the installed Git is older than 2.44.
func olderGit() bool {
	out, _ := exec.Command("git", "version").Output()
	var major, minor int
	_, err := fmt.Sscanf(string(out), "git version %d.%d", &major, &minor)
	return err == nil && (major < 2 || major == 2 && minor < 44)
}

// observe is what is compared after each command: its exit code and output, and what Git then says. An equal id of HEAD
// is an equal tree, history and author of each commit.
const observe = `step() {
  at "$1"; printf '$ %s\n' "$2"; ( eval "$2" ) < /dev/null; echo "exit code $?"
  git for-each-ref --format='%(objectname) %(refname)'
  git stash list --format='%gd %H'
  git status --porcelain=v2 --branch
}
`

// both runs commands on both sides and compares what they say. It gives what they said.
func (p *pair) both(t require.TestingT, commands ...string) string {
	var script strings.Builder
	script.WriteString(preamble + observe)
	for _, c := range commands {
		p.steps++
		fmt.Fprintf(&script, "step %d %s\n", p.steps+10, quote(c))
		p.script = append(p.script, c)
	}
	type answer struct {
		said string
		err  error
	}
	outside := make(chan answer, 1)
	go func() {
		said, _, err := p.ordinary.start(script.String())
		outside <- answer{said, err}
	}()
	got, _ := p.inside.run(t, script.String())
	ordinary := <-outside
	require.NoError(t, ordinary.err)
	// Where a worktree lies is all that may differ.
	want := strings.NewReplacer(p.ordinary.dir, p.worktree, p.ordinaryClone.dir, p.base.dir).Replace(ordinary.said)
	require.Equal(t, want, got, "after these commands, of which the newest are %q:\n%s\noutside, on stderr:\n%s\ninside:\n%s",
		commands, strings.Join(p.script, "\n"), p.ordinary.said(), p.inside.said())
	return got
}

// host runs a command in both base clones, as their owner would between two commands of the session.
func (p *pair) host(t require.TestingT, command string) {
	p.script = append(p.script, "(cd $BASE && "+command+")")
	for _, c := range []*plain{p.base, p.ordinaryClone} {
		c.run(t, preamble+"at 5; "+command) // an exit code that differs shows in what Git then says
	}
}

// arrived compares the branches of the two base clones, right after a command.
func (p *pair) arrived(t require.TestingT, refs ...string) {
	list := "git for-each-ref --format='%(objectname) %(refname)' " + strings.Join(refs, " ")
	require.Equal(t, must(t, p.ordinaryClone, list), must(t, p.base, list), "the base clone after:\n%s\nharvest: %s",
		strings.Join(p.script, "\n"), p.inside.newest.GetHarvest())
}

// sound ends a sequence: nothing is broken in the base clone, and it has the session's history.
func (p *pair) sound(t require.TestingT) {
	for _, command := range []string{"git fsck --strict --no-dangling", "git log --format='%H %an %ae %cn %s' work --", "git show-ref --verify -q refs/heads/work"} {
		want, wantCode := p.ordinaryClone.run(t, command)
		got, code := p.base.run(t, command)
		require.Equal(t, want, got, "%s\n%s", command, p.base.said())
		require.Equal(t, wantCode, code, "%s\n%s", command, p.base.said())
	}
}

// close forgets the session and removes both clones, so that many sequences don't pile up.
func (p *pair) close(t require.TestingT) {
	p.inside.forget(t)
	require.NoError(t, os.RemoveAll(filepath.Dir(p.worktree)))
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
