package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Wanted is what a caller asked for; the paths' texts have been checked already.
type Wanted struct {
	Repository string
	Worktree   string
	// Branch and BaseRef matter only when the worktree does not exist.
	Branch, BaseRef string
	AllowRootOwned  bool
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
}

// Open checks the repository, then adopts the worktree or creates it.
func Open(ctx context.Context, w Wanted) (Workspace, error) {
	common, owner, err := baseClone(w.Repository)
	if err != nil {
		return Workspace{}, err
	}
	if err := checkOwner("repository", w.Repository, owner, w.AllowRootOwned); err != nil {
		return Workspace{}, err
	}
	base := git{dir: w.Repository, owner: owner, env: []string{"GIT_DIR=" + common}}
	if _, err := base.run(ctx, "rev-parse", "--git-common-dir"); err != nil {
		return Workspace{}, fmt.Errorf("%w: repository %s is not one that Git can read: %w", ErrRefused, w.Repository, err)
	}
	ws := Workspace{Repository: w.Repository, Worktree: w.Worktree, CommonDir: common, Owner: owner, BaseRef: w.BaseRef}
	_, err = statDir("worktree", w.Worktree)
	if errors.Is(err, os.ErrNotExist) {
		if err := create(ctx, base, w); err != nil {
			return Workspace{}, err
		}
		ws.Created = true
	} else if err != nil {
		return Workspace{}, err
	}
	return adopt(ctx, base, ws, w.AllowRootOwned)
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
	owner, err := statDir("repository", repo)
	if err != nil {
		return "", Owner{}, err
	}
	dotGit := filepath.Join(repo, ".git")
	var st unix.Stat_t
	switch err := unix.Lstat(dotGit, &st); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		common, err := statDir("the repository's Git folder", dotGit)
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

// create makes the worktree. Its folder is made first, by descriptor and for the owner, so that Git, which runs as
// that owner, needs no right in the folder above.
func create(ctx context.Context, base git, w Wanted) error {
	args, err := addArgs(ctx, base, w)
	if err != nil {
		return err
	}
	made, err := makeFor(w.Worktree, base.owner)
	if err != nil {
		return err
	}
	checkout := base
	checkout.timeout = checkoutTimeout
	if _, err := checkout.run(ctx, args...); err != nil {
		if made {
			err = errors.Join(err, uncreate(ctx, base, w.Worktree))
		}
		return fmt.Errorf("%w: creating worktree %s of %s: %w", ErrRefused, w.Worktree, w.Repository, err)
	}
	return nil
}

// uncreate takes a half-made worktree away: a later call would adopt it as if it were whole. The branch stays, since by
// now somebody else may use it.
func uncreate(ctx context.Context, base git, worktree string) error {
	// Its failure only says that Git had not begun; what counts is whether the folder goes.
	_, gitErr := base.run(context.WithoutCancel(ctx), "worktree", "remove", "--force", "--", worktree)
	if err := removeMade(worktree); err != nil {
		return errors.Join(gitErr, err)
	}
	if _, err := statDir("worktree", worktree); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the half-made worktree %s is still there: remove it (git worktree remove --force): %w", worktree, errors.Join(gitErr, err))
	}
	return nil
}

func addArgs(ctx context.Context, base git, w Wanted) ([]string, error) {
	if w.Branch == "" {
		return nil, fmt.Errorf("%w: worktree %s does not exist and no branch is named: name workspace.branch to have it created", ErrRefused, w.Worktree)
	}
	if strings.HasPrefix(w.Branch, "-") || strings.HasPrefix(w.BaseRef, "-") {
		return nil, fmt.Errorf("%w: branch %q or base_ref %q begins with a dash", ErrRefused, w.Branch, w.BaseRef)
	}
	if _, err := base.run(ctx, "check-ref-format", "--branch", w.Branch); err != nil {
		return nil, fmt.Errorf("%w: %q is no valid branch name (git help check-ref-format)", ErrRefused, w.Branch)
	}
	if _, err := base.run(ctx, "rev-parse", "--verify", "--quiet", "refs/heads/"+w.Branch); err == nil {
		if w.BaseRef != "" {
			return nil, fmt.Errorf("%w: branch %q exists already in %s: leave base_ref empty to continue on it, or name another branch",
				ErrRefused, w.Branch, w.Repository)
		}
		return []string{"worktree", "add", "--quiet", "--", w.Worktree, w.Branch}, nil
	}
	ref := w.BaseRef
	if ref == "" {
		ref = "HEAD"
	}
	id, err := base.run(ctx, "rev-parse", "--verify", "--quiet", ref+"^{commit}")
	if err != nil {
		return nil, fmt.Errorf("%w: base_ref %q names no commit in %s", ErrRefused, ref, w.Repository)
	}
	return []string{"worktree", "add", "--quiet", "-b", w.Branch, "--", w.Worktree, strings.TrimSpace(id)}, nil
}

// adopt proves, by Git's own words from both sides, that the worktree is a linked worktree of the repository.
func adopt(ctx context.Context, base git, ws Workspace, allowRoot bool) (Workspace, error) {
	owner, err := statDir("worktree", ws.Worktree)
	if err != nil {
		return Workspace{}, err
	}
	if err := checkOwner("worktree", ws.Worktree, owner, allowRoot); err != nil {
		return Workspace{}, err
	}
	if owner != base.owner {
		return Workspace{}, fmt.Errorf("%w: worktree %s belongs to %s, its repository %s to %s: both must have one owner (chown -R)",
			ErrRefused, ws.Worktree, owner, ws.Repository, base.owner)
	}
	ws.Owner = owner
	notLinked := func(why string) error {
		return fmt.Errorf("%w: %s is not a linked worktree of %s (%s): name a path that does not exist and a branch to have one created, or make it with git worktree add",
			ErrRefused, ws.Worktree, ws.Repository, why)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(ws.Worktree, ".git"), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return Workspace{}, notLinked("its .git is not a file")
	}
	in := git{dir: ws.Worktree, owner: owner}
	out, err := in.run(ctx, "rev-parse", "--path-format=absolute", "--git-common-dir", "--git-dir", "--show-toplevel")
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
	list, err := base.run(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return Workspace{}, err
	}
	branch, ok := listedBranch(list, ws.Worktree)
	if !ok {
		return Workspace{}, notLinked("git worktree list does not name it")
	}
	ws.Branch = branch
	return ws, nil
}

// listedBranch finds a worktree in the output of "git worktree list --porcelain -z" and gives its branch, "" when
// HEAD is detached. Records end with an empty field.
func listedBranch(list, worktree string) (branch string, found bool) {
	here := false
	for _, field := range strings.Split(list, "\x00") {
		if path, ok := strings.CutPrefix(field, "worktree "); ok {
			here = path == worktree
			found = found || here
		} else if ref, ok := strings.CutPrefix(field, "branch "); ok && here {
			branch = strings.TrimPrefix(ref, "refs/heads/")
		}
	}
	return branch, found
}

// Recheck looks at a workspace again before a new sandbox is made of it: still there, no link in its path, the same
// owner.
func Recheck(ws Workspace) error {
	for _, p := range []struct{ what, path string }{
		{"worktree", ws.Worktree}, {"the repository's Git folder", ws.CommonDir}, {"the worktree's Git folder", ws.MetaDir},
	} {
		owner, err := statDir(p.what, p.path)
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
