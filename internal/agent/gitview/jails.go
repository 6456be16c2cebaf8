package gitview

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	stepTimeout     = 30 * time.Second
	transferTimeout = 10 * time.Minute
	// keptOutput bounds what is kept of a list of refs or of index entries, bytes: a million refs.
	keptOutput = 256 << 20
	// scratchAt is where a jail sees the folder for its own files.
	scratchAt = "/sandbox-agent-scratch"
)

// A workspace has two jails. That of the base clone sees the base clone and nothing that a command wrote. That of the
// private folder sees what the command saw: its own Git folder at the base clone's place, the base's objects read-only,
// and where it is needed the worktree.

func (v *View) baseJail() gitjail.Jail {
	c := v.o.Workspace.CommonDir
	return gitjail.Jail{
		Owner: v.o.Workspace.Owner, Dir: c, Timeout: stepTimeout, Output: keptOutput,
		Mounts: []gitjail.Mount{gitjail.Same(c)}, Finish: true,
		Env: []string{"GIT_DIR=" + c, "GIT_COMMON_DIR=" + c},
	}
}

// inMeta makes a call one of the worktree instead of the base clone's own folder.
func (v *View) inMeta() []string { return []string{"GIT_DIR=" + v.o.Workspace.MetaDir} }

func (v *View) privateJail() gitjail.Jail {
	w := v.o.Workspace
	return gitjail.Jail{
		Owner: w.Owner, Dir: w.CommonDir, Timeout: stepTimeout, Output: keptOutput,
		Mounts: append(v.gitMounts(), gitjail.Mount{Source: v.path(scratchName), Target: scratchAt}),
		Env:    []string{"GIT_DIR=" + w.MetaDir, "GIT_COMMON_DIR=" + w.CommonDir},
	}
}

func (v *View) gitMounts() []gitjail.Mount {
	c := v.o.Workspace.CommonDir
	if v.o.Layout == mounts.Shared {
		return []gitjail.Mount{gitjail.Same(c)}
	}
	return []gitjail.Mount{
		{Source: v.Private(), Target: c},
		{Source: c + "/objects", Target: c + "/base-objects", ReadOnly: true},
	}
}

// worktreeJail is the private jail with the worktree in it.
func (v *View) worktreeJail() gitjail.Jail {
	j := v.privateJail()
	w := v.o.Workspace.Worktree
	j.Dir = w
	j.Env = append(j.Env, "GIT_WORK_TREE="+w)
	j.Mounts = append(j.Mounts, gitjail.Same(w))
	sort.SliceStable(j.Mounts, func(a, b int) bool {
		return strings.Count(j.Mounts[a].Target, "/") < strings.Count(j.Mounts[b].Target, "/")
	})
	return j
}

// jails makes a jail when it is first needed, and ends all of them together.
type jails struct {
	v             *View
	ctx           context.Context
	base, private *gitjail.Session
	// lent is the caller's jail of the base clone, which takes the place of base; nil: there is none.
	lent *gitjail.Kept
}

func (v *View) jails(ctx context.Context) *jails { return &jails{v: v, ctx: ctx} }

// inBase is not ended by the caller's context, but by each call's: see unbroken.
func (j *jails) inBase() (*gitjail.Session, error) {
	if j.lent != nil {
		return j.lent.Session()
	}
	return start(context.WithoutCancel(j.ctx), &j.base, j.v.baseJail())
}

// unbroken is for a call that writes refs of the base clone: a Git that is killed leaves their locks behind. Its time limit
// ends it all the same.
func unbroken(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

func (j *jails) inPrivate() (*gitjail.Session, error) {
	return start(j.ctx, &j.private, j.v.privateJail())
}

func start(ctx context.Context, s **gitjail.Session, jail gitjail.Jail) (*gitjail.Session, error) {
	if *s != nil {
		return *s, nil
	}
	var err error
	*s, err = jail.Start(ctx)
	return *s, err
}

// dropPrivate lets go of the private jail, which may have ended by itself.
func (j *jails) dropPrivate() {
	if j.private != nil {
		j.private.Close()
		j.private = nil
	}
}

// soon has the jails made that are sure to be needed, while something else is done. What is wrong with one is said when it
// is needed.
func (j *jails) soon(base bool) {
	_, _ = j.inPrivate()
	if base {
		_, _ = j.inBase()
	}
}

func (j *jails) close() {
	var ending sync.WaitGroup
	ending.Go(j.dropPrivate)
	if j.base != nil {
		j.base.Close()
		j.base = nil
	}
	ending.Wait()
}

// moreRefs bounds how many refs a session may have beyond the base clone's.
const moreRefs = 100_000

// errFlood: the session has more refs than are looked at.
var errFlood = errors.New("the session has too many refs")

// listPrivateRefs lists the session's refs. A flood of them is refused, and Git not asked again about the very same one.
func (v *View) listPrivateRefs(ctx context.Context, s *gitjail.Session) (snapshot, error) {
	limit := len(v.snapshot().ids) + len(v.snapshot().symbolic) + moreRefs
	flood := fmt.Errorf("%w: more than the base clone's and %d (remove them in the session: rm -rf the refs, or git update-ref --stdin)", errFlood, moreRefs)
	now, settled, err := v.printFolders()
	if err != nil {
		return snapshot{}, err
	}
	if settled && v.flood == now {
		return snapshot{}, flood
	}
	v.flood = ""
	lines := &refLines{left: isSandboxes, most: keptOutput}
	text, err := listText(ctx, s, lines, 0, nil, "--count="+strconv.Itoa(limit+1))
	if err != nil {
		return snapshot{}, err
	}
	if list := text.decode(); len(list.ids)+len(list.symbolic)+lines.counted <= limit {
		return list, nil
	}
	if settled {
		v.flood = now
	}
	return snapshot{}, flood
}

func perWorktree(name string) bool {
	return strings.HasPrefix(name, "refs/bisect/") || strings.HasPrefix(name, "refs/worktree/") || strings.HasPrefix(name, "refs/rewritten/")
}

// headOf is what a HEAD says: "ref: NAME", or an id.
func headOf(ctx context.Context, s *gitjail.Session, env []string) (string, error) {
	r, err := s.Do(ctx, gitjail.Call{Args: []string{"symbolic-ref", "-q", "HEAD"}, Env: env})
	if err != nil {
		return "", err
	}
	if r.ExitCode == 0 {
		return "ref: " + strings.TrimSuffix(string(r.Stdout), "\n"), nil
	}
	id, err := s.RunCall(ctx, gitjail.Call{Args: []string{"rev-parse", "--verify", "-q", "HEAD"}, Env: env})
	return strings.TrimSuffix(id, "\n"), err
}

// gitFolder is what commands see at the base clone's Git folder, as far as the worktree is concerned.
func (v *View) gitFolder() string {
	if v.o.Layout == mounts.Shared {
		return v.o.Workspace.CommonDir
	}
	return v.Private()
}

// inPrivateFolder works in the private folder by descriptor, as its owner.
func (v *View) inPrivateFolder(f func(d folder) error) error {
	return inFolder("the workspace's Git folder", v.Private(), v.o.Workspace.Owner, f)
}

func (v *View) inMetaFolder(f func(d folder) error) error {
	return inFolder("the worktree's Git folder", v.o.Workspace.MetaDir, v.o.Workspace.Owner, f)
}

func (v *View) printPrivate() (print, error) {
	d, err := hostfs.OpenDir("the workspace's Git folder", v.Private())
	if err != nil {
		return print{}, err
	}
	defer d.Close()
	return printPrivate(d, v.meta()), nil
}

// printFolders is of where the session's refs are, without the files: whoever removes some changes it. settled is false when
// the next change could look the same, or there are too many folders.
func (v *View) printFolders() (sum string, settled bool, err error) {
	d, err := hostfs.OpenDir("the workspace's Git folder", v.Private())
	if err != nil {
		return "", false, err
	}
	defer d.Close()
	p := newPrinter(d)
	p.part(partRefs, "packed-refs")
	for _, name := range []string{"refs", v.meta() + "/refs"} {
		p.folders(d, name, name, 0)
	}
	p.print.Parts[partRefs] = p.sum()
	now := p.done()
	return now.Parts[partRefs], !now.Racy, nil
}

func (v *View) printBase() (print, error) {
	d, err := hostfs.OpenDir("the repository's Git folder", v.o.Workspace.CommonDir)
	if err != nil {
		return print{}, err
	}
	defer d.Close()
	return printBase(d, v.meta()), nil
}

// meta is the worktree's folder in a Git folder.
func (v *View) meta() string {
	return strings.TrimPrefix(v.o.Workspace.MetaDir, v.o.Workspace.CommonDir+"/")
}
