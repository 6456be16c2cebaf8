package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// guard judges a repository before any Git runs in it for a session's sake: even a checkout runs programs that a
// configuration names. It gives what does not refuse the layout but will be different in the sandbox. What is no base
// clone, and has no jail therefore, is left to workspace.Open, which says what is wrong with it.
func guard(ctx context.Context, w *sandboxv1.Workspace, base *gitjail.Kept) ([]gitguard.Finding, error) {
	repository, layout := w.GetRepository(), w.GetGitLayout()
	if base == nil {
		return nil, nil
	}
	_, _ = base.Session() // it is made while the configuration is read; what is wrong with it is said when it is needed
	report, err := gitguard.CheckRepository(ctx, repository, base.Run, checkedOut(w))
	if err != nil {
		return nil, guardError(err)
	}
	return acceptable(repository, layout, report.Findings)
}

// baseGit is the jail in which a new session's repository is judged, its worktree made, and its view; nil, if the repository
// is no base clone. The caller closes it.
func baseGit(ctx context.Context, repository string) (*gitjail.Kept, error) {
	owner, err := hostfs.StatDir("repository", repository)
	if err != nil {
		return nil, workspaceError(err)
	}
	common := commonDir(repository)
	if common == "" {
		return nil, nil
	}
	return workspace.BaseGit(ctx, repository, common, owner), nil
}

// checkedOut names the commit that the worktree has, or will be made from: of a branch that exists it is the branch's, and
// a base_ref that is named must be the same. Empty: the repository's HEAD.
func checkedOut(w *sandboxv1.Workspace) string {
	if head := gitguard.WorktreeHead(w.GetWorktree()); head != "" {
		return head
	}
	if w.GetBaseRef() != "" || w.GetBranch() == "" {
		return w.GetBaseRef()
	}
	return "refs/heads/" + w.GetBranch()
}

// commonDir is the Git folder of a base clone, plain or bare; empty when it is neither.
func commonDir(repository string) string {
	var st unix.Stat_t
	dotGit := filepath.Join(repository, ".git")
	switch err := unix.Lstat(dotGit, &st); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return dotGit
	case err == nil:
		return ""
	}
	for _, need := range []string{"objects", "HEAD"} {
		if !mounts.Exists(filepath.Join(repository, need)) {
			return ""
		}
	}
	return repository
}

// guardError keeps what the guard says of a repository apart from what went wrong on the node.
func guardError(err error) error {
	if errors.Is(err, gitguard.ErrConfig) || errors.Is(err, gitguard.ErrNoRepository) || errors.Is(err, gitguard.ErrIndex) {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return workspaceError(err)
}

// acceptable refuses a repository for the first finding that refuses it, and counts the others.
func acceptable(repository, layout string, findings []gitguard.Finding) ([]gitguard.Finding, error) {
	var rest, refusing []gitguard.Finding
	for _, f := range findings {
		if f.Refuses(layout) {
			refusing = append(refusing, f)
		} else {
			rest = append(rest, f)
		}
	}
	if len(refusing) == 0 {
		return rest, nil
	}
	more := ""
	if n := len(refusing) - 1; n > 0 {
		more = fmt.Sprintf(" (and %d more: sandbox-agent guard %s lists them)", n, repository)
	}
	return nil, fmt.Errorf("%w: repository %s can't be shared with commands (git_layout %s): %s%s",
		ErrInvalid, repository, layout, findingText(refusing[0]), more)
}

// findingText is a finding in one sentence: key, file and line, why, and the remedy.
func findingText(f gitguard.Finding) string {
	where := f.File
	if f.Line > 0 {
		where = fmt.Sprintf("%s:%d", f.File, f.Line)
	}
	var head []string
	for _, s := range []string{f.Key, where} {
		if s != "" {
			head = append(head, s)
		}
	}
	text := strings.TrimSuffix(f.Why, ".")
	if len(head) > 0 {
		text = strings.Join(head, ", ") + ": " + text
	}
	if f.Remedy != "" {
		text += "; " + strings.TrimSuffix(f.Remedy, ".")
	}
	return text
}

// checkConfig judges the base clone's configuration again when it is not the one that was judged last: whoever can
// write it may have made it say something else since. Comparing costs some microseconds. It runs on the session's
// goroutine, before each trusted operation on the base clone.
func (s *session) checkConfig(ctx context.Context) error {
	ws := s.workspace()
	path := filepath.Join(ws.CommonDir, "config")
	if sum, err := fileSum(path); err == nil && sum == s.judged.SHA256 {
		return nil
	}
	cfg, err := gitguard.ReadConfig(ctx, path)
	if err != nil {
		return fmt.Errorf("%w: the base clone's configuration was changed: %w", ErrPrecondition, err)
	}
	s.mu.Lock()
	layout := s.rec.GitLayout
	s.mu.Unlock()
	if _, err := acceptable(ws.Repository, layout, cfg.Locate(ctx, cfg.Judge())); err != nil {
		return fmt.Errorf("%w: the base clone's configuration was changed: %s", ErrPrecondition, strings.TrimPrefix(err.Error(), ErrInvalid.Error()+": "))
	}
	s.judged = cfg
	return nil
}

// configMoved says whether the sandbox has the base clone's own configuration (git_layout shared), and that is not what it
// was when the sandbox was made: its seal would not hold. In the isolated layout the next sandbox has the new one.
func (s *session) configMoved() bool {
	s.mu.Lock()
	layout, had, common := s.rec.GitLayout, s.rec.ConfigSHA256, s.rec.Workspace.CommonDir
	s.mu.Unlock()
	if layout != config.SharedLayout || had == "" {
		return false
	}
	sum, err := fileSum(filepath.Join(common, "config"))
	return err != nil || sum != had
}

// maxConfig is as much of a configuration as the guard reads.
const maxConfig = 1 << 20

// fileSum is the SHA-256 of a regular file that is reached over no link, in lower-case hex.
func fileSum(path string) (string, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return "", fmt.Errorf("opening %s: openat2: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return "", fmt.Errorf("reading %s: it is not a file (%v)", path, err)
	}
	h := sha256.New()
	if n, err := io.Copy(h, io.LimitReader(f, maxConfig+1)); err != nil || n > maxConfig {
		return "", fmt.Errorf("reading %s: it has more than %d bytes, or can't be read (%v)", path, maxConfig, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (s *session) workspace() workspace.Workspace {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Workspace
}
