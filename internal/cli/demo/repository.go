package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// repository is the real clone that the demo works on. Git runs in it as its owner, never as root in somebody else's
// clone, with a fixed environment and without hooks.
type repository struct {
	path     string
	uid, gid uint32
}

// openRepository finds the clone that path belongs to.
func openRepository(ctx context.Context, path string) (*repository, error) {
	abs, err := filepath.Abs(path)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the repository: %w", err)
	}
	r := &repository{path: abs}
	if err := r.readOwner(); err != nil {
		return nil, err
	}
	common, err := r.git(ctx, "rev-parse", "--path-format=absolute", "--git-common-dir")
	if err != nil {
		return nil, fmt.Errorf("opening the repository %s: it is no Git clone: give one with REPO=/path or --repo: %w", abs, err)
	}
	if filepath.Base(common) != ".git" {
		return nil, fmt.Errorf("opening the repository %s: its Git folder is %s: the demo wants an ordinary clone, whose Git folder is named .git", abs, common)
	}
	r.path = filepath.Dir(common)
	if filepath.Dir(r.path) == "/" {
		return nil, fmt.Errorf("opening the repository %s: it lies directly under /, and / can't be a workspace root: clone it one folder deeper", r.path)
	}
	if p := config.SystemFolder(r.path); p != "" {
		return nil, fmt.Errorf("opening the repository %s: it lies under %s, where no workspace is accepted: move the clone, for example to /srv, or name another with REPO=/path or --repo", r.path, p)
	}
	if err := r.readOwner(); err != nil {
		return nil, err
	}
	if _, err := r.git(ctx, "rev-parse", "--verify", "--quiet", "HEAD^{commit}"); err != nil {
		return nil, fmt.Errorf("opening the repository %s: it has no commit yet: make one first", r.path)
	}
	return r, nil
}

func (r *repository) readOwner() error {
	st, err := os.Stat(r.path)
	if err != nil {
		return fmt.Errorf("opening the repository: %w", err)
	}
	sys := st.Sys().(*syscall.Stat_t)
	r.uid, r.gid = sys.Uid, sys.Gid
	return nil
}

// git runs one Git command as the clone's owner and gives its trimmed output.
func (r *repository) git(ctx context.Context, args ...string) (string, error) {
	fixed := []string{
		"-C", r.path, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "gc.auto=0", "-c", "safe.directory=*",
	}
	cmd := exec.CommandContext(ctx, "git", append(fixed, args...)...)
	cmd.Env = []string{
		"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0",
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: r.uid, Gid: r.gid},
		Setpgid:    true, // Ctrl-C is for the demo, which then cleans up
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// forget removes the demo's worktree and branch; nothing else of the clone has changed. --force stands twice because Git
// leaves a worktree locked when it is cut short while making it.
func (r *repository) forget(ctx context.Context, worktree, branch string) error {
	var errs []error
	if _, err := os.Lstat(worktree); err == nil {
		if _, err := r.git(ctx, "worktree", "remove", "--force", "--force", worktree); err != nil {
			errs = append(errs, err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	ref := "refs/heads/" + branch
	if found, err := r.git(ctx, "for-each-ref", "--format=%(refname)", ref); err != nil {
		errs = append(errs, err)
	} else if found == ref {
		if _, err := r.git(ctx, "branch", "-D", branch); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// keptRefs is where the base clone keeps a session's work.
func keptRefs(session string) string { return "refs/sandboxes/" + session + "/" }

// forgetKept removes what the base clone keeps of a session's work, should the agent not have come to it.
func (r *repository) forgetKept(ctx context.Context, session string) error {
	found, err := r.git(ctx, "for-each-ref", "--format=%(refname)", keptRefs(session))
	for _, ref := range strings.Fields(found) {
		if err == nil {
			_, err = r.git(ctx, "update-ref", "-d", ref)
		}
	}
	return err
}
