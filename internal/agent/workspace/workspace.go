package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// checkoutTimeout is for git worktree add, which writes every file of the tree.
const checkoutTimeout = 10 * time.Minute

// Owner is who owns a folder on disk.
type Owner = hostfs.Owner

// Wanted is what a caller asked for; the paths' texts have been checked already.
type Wanted struct {
	Repository string
	Worktree   string
	// Branch and BaseRef say what to create; of a worktree that exists they must be true, or be empty.
	Branch, BaseRef string
	AllowRootOwned  bool
	// Base is the jail of BaseGit for this repository, if the caller has one. It stays the caller's.
	Base *gitjail.Kept
}

// Workspace is what was found or made.
type Workspace struct {
	Repository string `json:"repository"`
	Worktree   string `json:"worktree"`
	Branch     string `json:"branch"`
	BaseRef    string `json:"baseRef"`
	// CommonDir is the base clone's Git folder (C in the design's words), MetaDir the worktree's (M = C/worktrees/…).
	CommonDir string `json:"commonDir"`
	MetaDir   string `json:"metaDir"`
	Owner     Owner  `json:"owner"`
	Created   bool   `json:"created"`
	// BranchStart is the commit at which Open made the branch; empty when the branch was there before. It is for Undo, by
	// the caller that had Open create the worktree, and therefore not recorded.
	BranchStart string `json:"-"`
}

// Open checks the repository, then adopts the worktree or creates it. After an error nothing that it made is left, or
// the error says what is. It fails with ErrRefused, where the caller must change something, and ErrGit.
func Open(ctx context.Context, w Wanted) (Workspace, error) {
	if err := errors.Join(checkText("repository", w.Repository), checkText("worktree", w.Worktree)); err != nil {
		return Workspace{}, err
	}
	common, owner, err := baseClone(w.Repository)
	if err != nil {
		return Workspace{}, err
	}
	if err := checkOwner("repository", w.Repository, owner, w.AllowRootOwned); err != nil {
		return Workspace{}, err
	}
	if err := checkGitFolder(common); err != nil {
		return Workspace{}, err
	}
	if err := checkAlternates(w.Repository, common); err != nil {
		return Workspace{}, err
	}
	if err := checkWritable(common, owner); err != nil {
		return Workspace{}, err
	}
	if err := makeSealed(common, owner); err != nil {
		return Workspace{}, err
	}
	base := git{Kept: w.Base, common: common}
	if !isBaseGit(w.Base, w.Repository, owner) {
		base.Kept = BaseGit(ctx, w.Repository, common, owner)
		defer base.Close()
	}
	list, err := base.Run(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return Workspace{}, fmt.Errorf("%w: repository %s is not one that Git can read: %w", ErrRefused, w.Repository, err)
	}
	if on, err := base.Run(ctx, "config", "--type=bool", "--default=false", "--get", "extensions.worktreeConfig"); err != nil {
		return Workspace{}, err
	} else if strings.TrimSpace(on) != "false" {
		return Workspace{}, fmt.Errorf("%w: repository %s has extensions.worktreeConfig on (git sparse-checkout sets it), so a file that a command can write is configuration: use a clone without it (git config --unset extensions.worktreeConfig)",
			ErrRefused, w.Repository)
	}
	ws := Workspace{Repository: w.Repository, Worktree: w.Worktree, CommonDir: common, Owner: owner, BaseRef: w.BaseRef}
	both := worktreeJail(ws, owner).Keep(ctx)
	defer both.Close()
	_, err = hostfs.StatDir("worktree", w.Worktree)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return create(ctx, base, both, ws, w, parseWorktrees(list))
	case err != nil:
		return Workspace{}, err
	}
	if ws, err = adopt(ctx, both, ws, w.AllowRootOwned); err != nil {
		return Workspace{}, err
	}
	return ws, checkAdopted(ctx, base, both, ws, w)
}

// checkAdopted refuses wishes that an existing worktree does not fulfil, rather than to ignore them.
func checkAdopted(ctx context.Context, base git, both *gitjail.Kept, ws Workspace, w Wanted) error {
	on := "on branch " + ws.Branch
	if ws.Branch == "" {
		on = "on no branch (its HEAD is detached, as it is in the middle of a rebase)"
	}
	if w.Branch != "" && w.Branch != ws.Branch {
		return fmt.Errorf("%w: worktree %s exists and is %s, not on %q: leave the branch out to take it as it is, or name a worktree that does not exist",
			ErrRefused, w.Worktree, on, w.Branch)
	}
	if w.BaseRef == "" {
		return nil
	}
	if strings.HasPrefix(w.BaseRef, "-") {
		return fmt.Errorf("%w: base_ref %q begins with a dash", ErrRefused, w.BaseRef)
	}
	id, err := base.commit(ctx, w.BaseRef)
	if err != nil {
		return err
	}
	if _, err := inWorktree(both, ws).Run(ctx, "merge-base", "--is-ancestor", id, "HEAD"); hung(err) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: worktree %s exists and is %s, which does not come from base_ref %q: leave base_ref out to take it as it is, or name a worktree that does not exist",
			ErrRefused, w.Worktree, on, w.BaseRef)
	}
	return nil
}

// BaseGit is trusted Git in a base clone: it works in repository, and sees the clone's Git folder common and nothing else.
// ctx bounds it; the caller closes it.
func BaseGit(ctx context.Context, repository, common string, owner Owner) *gitjail.Kept {
	return gitjail.Jail{Dir: repository, Owner: owner, Env: pinned(common), Mounts: []gitjail.Mount{gitjail.Same(common)}}.Keep(ctx)
}

func isBaseGit(k *gitjail.Kept, repository string, owner Owner) bool {
	return k != nil && k.Dir == repository && k.Owner == owner
}

// pinned names both of a base clone's folders, so that no file in the repository says where they are (C/commondir would).
func pinned(common string) []string { return []string{"GIT_DIR=" + common, "GIT_COMMON_DIR=" + common} }

// worktreeJail sees a base clone's Git folder and the worktree; one that is not there yet when the jail is made is not there.
func worktreeJail(ws Workspace, owner Owner) gitjail.Jail {
	return gitjail.Jail{
		Dir: ws.Repository, Owner: owner, Mounts: []gitjail.Mount{gitjail.Same(ws.CommonDir), gitjail.Same(ws.Worktree)},
	}
}

// forWorktree is Git in a base clone, for the sake of a worktree.
func forWorktree(both *gitjail.Kept, ws Workspace) git {
	return git{Kept: both, common: ws.CommonDir, env: pinned(ws.CommonDir)}
}

// inWorktree is Git in a worktree, which finds its folders as any Git would.
func inWorktree(both *gitjail.Kept, ws Workspace) git {
	return git{Kept: both, common: ws.CommonDir, dir: ws.Worktree}
}

// git is trusted Git with the questions that this package asks.
type git struct {
	*gitjail.Kept
	common string   // the base clone's Git folder
	dir    string   // where it works; empty: in the jail's folder
	env    []string // besides the jail's
}

// Run is Git's answer. Where its time was up the error says what it may have waited for.
func (g git) Run(ctx context.Context, args ...string) (string, error) {
	return g.RunCall(ctx, gitjail.Call{Args: args})
}

// RunCall is Run with everything that a call can have.
func (g git) RunCall(ctx context.Context, c gitjail.Call) (string, error) {
	c.Dir, c.Env = g.dir, g.env
	out, err := g.Kept.RunCall(ctx, c)
	if errors.Is(err, context.DeadlineExceeded) {
		err = explainHang(g.common, err)
	}
	return out, err
}

// hung says that Git gave no answer, which is neither yes nor no.
func hung(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// makeSealed makes the folders of a base clone that commands may not write and that Git works without, where a template
// left them out: what is not there can't be sealed, and a command could make it.
func makeSealed(common string, owner Owner) error {
	for _, name := range []string{"hooks", "info", "objects/info"} {
		path := filepath.Join(common, name)
		if mounts.Exists(path) {
			continue
		}
		if _, err := hostfs.MakeFor(path, owner); err != nil {
			return err
		}
	}
	return nil
}

// checkGitFolder refuses what has no place in a Git folder and would mislead Git or make it hang: a link, a FIFO, a
// device, and in a base clone a commondir, which names another repository's.
func checkGitFolder(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("looking into the Git folder %s: %w", dir, err)
	}
	linked := filepath.Base(filepath.Dir(dir)) == "worktrees"
	for _, e := range entries {
		if !e.IsDir() && !e.Type().IsRegular() {
			return fmt.Errorf("%w: %s is neither a file nor a folder (a command may have made it): look at it, and remove it",
				ErrRefused, filepath.Join(dir, e.Name()))
		}
		if e.Name() == "commondir" && !linked {
			return fmt.Errorf("%w: %s makes this repository a part of another one (a command may have written it): look at it, and remove it",
				ErrRefused, filepath.Join(dir, e.Name()))
		}
	}
	return nil
}

// MakeRoot makes a workspace root that does not exist, for root alone to write: worktrees in it are given to their
// owners one by one.
func MakeRoot(root string) error {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("making the workspace root %s: %w", root, err)
	}
	return nil
}

// baseClone finds the Git folder of a base clone, plain or bare, without running Git.
func baseClone(repo string) (string, Owner, error) {
	owner, err := hostfs.StatDir("repository", repo)
	if err != nil {
		return "", Owner{}, err
	}
	dotGit := filepath.Join(repo, ".git")
	var st unix.Stat_t
	switch err := unix.Lstat(dotGit, &st); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		common, err := hostfs.StatDir("the repository's Git folder", dotGit)
		if err != nil {
			return "", Owner{}, err
		}
		if common != owner {
			return "", Owner{}, fmt.Errorf("%w: repository %s belongs to %s but its .git to %s: give both to one owner (chown -R)",
				ErrRefused, repo, owner, common)
		}
		return dotGit, owner, nil
	case err == nil:
		return "", Owner{}, fmt.Errorf("%w: %s is a file or a link, so %s is a linked worktree or a submodule: name the base clone as repository",
			ErrRefused, dotGit, repo)
	case !errors.Is(err, unix.ENOENT):
		return "", Owner{}, fmt.Errorf("looking at %s: lstat: %w", dotGit, err)
	}
	for _, need := range []string{"objects", "HEAD"} {
		if err := unix.Lstat(filepath.Join(repo, need), &st); err != nil {
			return "", Owner{}, fmt.Errorf("%w: repository %s is no Git repository: neither a .git folder nor a bare clone's %s is in it",
				ErrRefused, repo, need)
		}
	}
	return repo, owner, nil
}

func checkOwner(what, path string, o Owner, allowRoot bool) error {
	if o.UID == 0 && !allowRoot {
		return fmt.Errorf("%w: %s %s belongs to root: give it to the user whose work it is (chown -R), or set workspace.allow_root_owned: true",
			ErrRefused, what, path)
	}
	return nil
}

// create makes the branch, if it is new, and the worktree. The worktree's folder is made first, by descriptor and for the
// owner, so that Git, which runs as that owner, needs no right in the folder above. others are the repository's worktrees.
func create(ctx context.Context, base git, both *gitjail.Kept, ws Workspace, w Wanted, others []listed) (Workspace, error) {
	if w.Worktree == ws.CommonDir || strings.HasPrefix(w.Worktree, ws.CommonDir+"/") {
		return Workspace{}, fmt.Errorf("%w: worktree %s would lie inside the repository's Git folder %s: name a path outside of it",
			ErrRefused, w.Worktree, ws.CommonDir)
	}
	if err := checkBranch(ctx, base, w, others); err != nil {
		return Workspace{}, err
	}
	ws.Branch = w.Branch
	var err error
	if ws.BranchStart, err = makeBranch(ctx, base, w); err != nil {
		return Workspace{}, err
	}
	made, err := hostfs.MakeFor(w.Worktree, base.Owner)
	ws.Created = made
	if err == nil {
		add := gitjail.Call{Args: []string{"worktree", "add", "--quiet", "--", w.Worktree, w.Branch}, Timeout: checkoutTimeout}
		if _, err = forWorktree(both, ws).RunCall(ctx, add); err != nil {
			err = fmt.Errorf("%w: creating worktree %s of %s: %w (if objects are missing: git -C %[3]s fsck names them)", ErrRefused, w.Worktree, w.Repository, err)
		}
	}
	out := ws
	if err == nil {
		out, err = adopt(ctx, both, ws, w.AllowRootOwned)
	}
	if err == nil {
		return out, nil
	}
	if left := Undo(ctx, ws); left != nil {
		err = fmt.Errorf("%w; %w", err, left)
	}
	return Workspace{}, err
}

// checkBranch refuses a branch that can't be what the new worktree is on.
func checkBranch(ctx context.Context, base git, w Wanted, others []listed) error {
	if w.Branch == "" {
		return fmt.Errorf("%w: worktree %s does not exist and no branch is named: name workspace.branch to have it created", ErrRefused, w.Worktree)
	}
	if strings.HasPrefix(w.Branch, "-") || strings.HasPrefix(w.BaseRef, "-") {
		return fmt.Errorf("%w: branch %q or base_ref %q begins with a dash", ErrRefused, w.Branch, w.BaseRef)
	}
	if _, err := base.Run(ctx, "check-ref-format", "--branch", w.Branch); hung(err) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %q is no valid branch name (git help check-ref-format)", ErrRefused, w.Branch)
	}
	for _, x := range others {
		if x.branch != w.Branch {
			continue
		}
		remedy := fmt.Sprintf("choose another branch (--branch), or adopt that worktree (--worktree %s)", x.path)
		switch {
		case !mounts.Exists(x.path): // not as Git says: it doesn't see other worktrees
			remedy = fmt.Sprintf("that folder is gone; git -C %s worktree prune forgets it", w.Repository)
		case x.path == w.Repository:
			remedy = "that is the base clone itself; choose another branch (--branch)"
		}
		return fmt.Errorf("%w: branch %q is checked out in %s already: %s", ErrRefused, w.Branch, x.path, remedy)
	}
	return nil
}

// makeBranch makes the branch if it does not exist, and gives the commit at which it did. Git's update-ref creates it or
// fails, in one step, so that Undo never takes a branch away that somebody else made.
func makeBranch(ctx context.Context, base git, w Wanted) (start string, err error) {
	ref := "refs/heads/" + w.Branch
	from := w.BaseRef
	if from == "" {
		from = "HEAD"
	}
	id, err := base.commit(ctx, from)
	if err == nil {
		// The empty old value: the reference must not exist (git-update-ref(1)).
		if _, err = base.Run(ctx, "update-ref", "-m", "branch: Created from "+from, ref, id, ""); err == nil {
			return id, nil
		}
		err = fmt.Errorf("%w: creating branch %q in %s: %w%s", ErrRefused, w.Branch, w.Repository, err, lockRemedy(err))
	}
	if hung(err) {
		return "", err
	}
	// It may be there already. That comes second: most often it isn't.
	tip, tipErr := base.Run(ctx, "rev-parse", "--verify", "--quiet", ref)
	switch {
	case hung(tipErr):
		return "", tipErr
	case tipErr != nil || w.BaseRef != "" && id == "":
		return "", err
	case w.BaseRef != "" && id != strings.TrimSpace(tip):
		return "", fmt.Errorf("%w: branch %q exists already in %s, and not at base_ref %q: leave base_ref empty to continue on it, or name another branch",
			ErrRefused, w.Branch, w.Repository, w.BaseRef)
	}
	return "", nil
}

// lockRemedy is what to do where Git met another one's lock of files or of a reftable. Since 2.55 Git itself doesn't say.
func lockRemedy(err error) string {
	if strings.Contains(err.Error(), ".lock': File exists") || strings.Contains(err.Error(), "cannot lock references") {
		return " (if no Git is at work there, one was killed: remove the .lock file that it left)"
	}
	return ""
}

// commit is the id of the commit that a caller's name stands for.
func (g git) commit(ctx context.Context, ref string) (string, error) {
	id, err := g.Run(ctx, "rev-parse", "--verify", "--quiet", ref+"^{commit}")
	if err == nil {
		return strings.TrimSpace(id), nil
	}
	if hung(err) {
		return "", err
	}
	// Without ^{commit} Git gives an id without looking at the object.
	id, err = g.Run(ctx, "rev-parse", "--verify", "--quiet", ref)
	switch {
	case err == nil:
		return "", fmt.Errorf("%w: base_ref %q is %s in %s, which names no commit that is there: git -C %[4]s fsck says whether objects are missing; else name another base_ref (--base)",
			ErrRefused, ref, strings.TrimSpace(id), g.Dir)
	case hung(err):
		return "", err
	case ref == "HEAD":
		return "", fmt.Errorf("%w: the HEAD of repository %s names no commit (a new repository has none): make one (git commit), or name base_ref (--base)", ErrRefused, g.Dir)
	}
	return "", fmt.Errorf("%w: base_ref %q names no commit in %s", ErrRefused, ref, g.Dir)
}

// adopt proves, by Git's own words from both sides, that the worktree is a linked worktree of the repository.
func adopt(ctx context.Context, both *gitjail.Kept, ws Workspace, allowRoot bool) (Workspace, error) {
	owner, err := hostfs.StatDir("worktree", ws.Worktree)
	if err != nil {
		return Workspace{}, err
	}
	notLinked := func(why string) error {
		return fmt.Errorf("%w: %s is not a linked worktree of %s (%s): name a path that does not exist and a branch to have one created, or make it with git worktree add",
			ErrRefused, ws.Worktree, ws.Repository, why)
	}
	// Before anything is said of owners: whoever named another repository's worktree must not be told to chown it.
	meta, err := readPointer(ws.Worktree, owner)
	if err != nil {
		return Workspace{}, notLinked(err.Error())
	}
	if filepath.Dir(meta) != filepath.Join(ws.CommonDir, "worktrees") {
		return Workspace{}, notLinked(whose(meta))
	}
	if err := checkText("worktree's Git folder", meta); err != nil {
		return Workspace{}, err
	}
	if err := checkOwner("worktree", ws.Worktree, owner, allowRoot); err != nil {
		return Workspace{}, err
	}
	if owner != both.Owner {
		return Workspace{}, fmt.Errorf("%w: worktree %s belongs to %s, its repository %s to %s: both must have one owner (chown -R)",
			ErrRefused, ws.Worktree, owner, ws.Repository, both.Owner)
	}
	if metaOwner, err := hostfs.StatDir("the worktree's Git folder", meta); err != nil {
		return Workspace{}, err
	} else if metaOwner.UID != owner.UID {
		return Workspace{}, fmt.Errorf("%w: worktree %s belongs to %s, its Git folder %s to %s: give both to one owner (chown -R)",
			ErrRefused, ws.Worktree, owner, meta, metaOwner)
	}
	ws.Owner = owner
	if err := checkGitFolder(meta); err != nil {
		return Workspace{}, err
	}
	if err := checkFinished(ws, meta); err != nil {
		return Workspace{}, err
	}
	out, err := inWorktree(both, ws).Run(ctx, "rev-parse", "--path-format=absolute", "--git-common-dir", "--git-dir", "--show-toplevel")
	if err != nil {
		return Workspace{}, notLinked(err.Error())
	}
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 3 {
		return Workspace{}, notLinked(fmt.Sprintf("git answered %d lines instead of 3", len(lines)))
	}
	switch common, meta, top := lines[0], lines[1], lines[2]; {
	case common != ws.CommonDir:
		return Workspace{}, notLinked("its common Git folder is " + common)
	case top != ws.Worktree:
		return Workspace{}, notLinked("it lies inside the worktree " + top)
	case filepath.Dir(meta) != filepath.Join(ws.CommonDir, "worktrees"):
		return Workspace{}, notLinked("its Git folder is " + meta)
	default:
		ws.MetaDir = meta
	}
	list, err := forWorktree(both, ws).Run(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return Workspace{}, err
	}
	for _, x := range parseWorktrees(list) {
		if x.path == ws.Worktree {
			ws.Branch = x.branch
			return ws, checkText("the branch of worktree "+ws.Worktree+",", x.branch)
		}
	}
	return Workspace{}, notLinked("git worktree list does not name it")
}

// checkFinished refuses a worktree that Git had not finished when it was killed, or is at work on: a command would find
// half of the files, and Git would call the others deleted.
func checkFinished(ws Workspace, meta string) error {
	why := ""
	if b, err := os.ReadFile(filepath.Join(meta, "locked")); err == nil && strings.TrimSpace(string(b)) == "initializing" {
		why = "git worktree add did not come to its end"
	} else if mounts.Exists(filepath.Join(meta, "index.lock")) {
		why = "index.lock is there: Git is at work, or was killed"
	} else if !mounts.Exists(filepath.Join(meta, "index")) {
		why = "it has no index yet"
	}
	if why == "" {
		return nil
	}
	return fmt.Errorf("%w: worktree %s is not finished (%s): look at it; to have it made anew, git -C %s worktree remove --force --force %s, and git branch -D its branch",
		ErrRefused, ws.Worktree, why, ws.Repository, ws.Worktree)
}

// listed is one worktree as Git lists it.
type listed struct {
	path   string
	branch string // empty when HEAD is detached
}

// parseWorktrees reads the output of "git worktree list --porcelain -z". Each record begins with its path.
func parseWorktrees(list string) []listed {
	var out []listed
	for _, field := range strings.Split(list, "\x00") {
		if path, ok := strings.CutPrefix(field, "worktree "); ok {
			out = append(out, listed{path: path})
			continue
		}
		if len(out) == 0 {
			continue
		}
		last := &out[len(out)-1]
		if ref, ok := strings.CutPrefix(field, "branch "); ok {
			last.branch = strings.TrimPrefix(ref, "refs/heads/")
		}
	}
	return out
}

// Recheck looks at a workspace again before a new sandbox is made of it: still there, no link in its path, the same
// owner.
func Recheck(ws Workspace) error {
	for _, p := range []struct{ what, path string }{
		{"worktree", ws.Worktree}, {"the repository's Git folder", ws.CommonDir}, {"the worktree's Git folder", ws.MetaDir},
	} {
		owner, err := hostfs.StatDir(p.what, p.path)
		if err != nil {
			return err
		}
		if owner != ws.Owner {
			return fmt.Errorf("%w: %s %s belongs to %s now and belonged to %s when the session was made: give it back (chown -R)",
				ErrRefused, p.what, p.path, owner, ws.Owner)
		}
	}
	return nil
}
