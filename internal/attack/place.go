package attack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
)

// Place is where commands are run: a session of an agent, or what has no defence, to see that the attacks are some.
type Place interface {
	// Exec runs one command. An error says that it certainly did not run; of whatever else there is an answer.
	Exec(ctx context.Context, command string, timeout time.Duration) (Answer, error)
	// Git has the trusted side run Git in the worktree. Its exit code and output don't matter.
	Git(ctx context.Context, args []string) error
	// Known says whether there is an answer for this exec id, which no caller has used.
	Known(ctx context.Context, execID string) (bool, error)
	// Same says what became of the sandbox since the last call; empty: it is the same, and works.
	Same(ctx context.Context) (string, error)
}

// session is a Place: a session of the agent that is asked.
type session struct {
	client *client.Client
	id     string
	// sandbox and generation are those of the last call of Same.
	sandbox    string
	generation uint64
}

func (s *session) Exec(ctx context.Context, command string, timeout time.Duration) (Answer, error) {
	req := &sandboxv1.ExecRequest{SessionId: s.id, Command: command, Text: true}
	if timeout > 0 {
		seconds := timeout.Seconds()
		req.TimeoutSeconds = &seconds
	}
	r, err := s.client.Exec(ctx, req)
	switch {
	case err != nil && errors.Is(err, client.ErrUncertain):
		// Also of an answer that does not verify: the error says which.
		return Answer{Status: sandboxv1.ExecResult_UNCERTAIN, Reason: err.Error()}, nil
	case err != nil:
		return Answer{}, err
	}
	return Answer{
		Status: r.GetStatus(), Reason: r.GetReason(), Verified: r.Verified != nil, OOM: r.GetOom(), Stdout: r.GetStdoutText(), Stderr: r.GetStderrText(),
		Bytes: r.GetStdoutInfo().GetBytes(), SHA256: r.GetStdoutInfo().GetSha256(),
	}, nil
}

func (s *session) Git(ctx context.Context, args []string) error {
	_, err := s.client.Git(ctx, &sandboxv1.GitRequest{SessionId: s.id, Args: args})
	return err
}

func (s *session) Known(ctx context.Context, execID string) (bool, error) {
	_, _, err := s.client.GetExec(ctx, s.id, execID)
	if errors.Is(err, client.ErrNotFound) {
		return false, nil
	}
	return true, err
}

func (s *session) Same(ctx context.Context) (string, error) {
	r, err := s.Exec(ctx, "echo works", 0)
	if err != nil {
		return "", err
	}
	record, err := s.client.GetSession(ctx, s.id)
	if err != nil {
		return "", err
	}
	was, generation := s.sandbox, s.generation
	s.sandbox, s.generation = record.GetSandbox().GetId(), record.GetGeneration()
	switch {
	case r.Status != sandboxv1.ExecResult_EXITED || r.Stdout != "works\n":
		return strings.TrimSuffix(fmt.Sprintf("the sandbox does not work afterwards: %s: %s", r.Status, r.Reason), ": "), nil
	case was != s.sandbox || generation != s.generation:
		return fmt.Sprintf("the sandbox %s ended, and %s took its place", was, s.sandbox), nil
	}
	return "", nil
}

// grounds are a throw-away repository with what is looked at beside it, below a workspace root.
type grounds struct {
	dir string
	// repo and worktree are a clone and a linked worktree of it; secret and beside lie beside them: a file that everybody on the
	// node may read, and a folder that everybody may write.
	repo, worktree, secret, beside string
	// owner has the repository and the worktree.
	uid, gid int
}

// newGrounds makes them below root, owned by uid and gid, by Git itself.
func newGrounds(ctx context.Context, root string, uid, gid int) (g *grounds, err error) {
	dir, err := os.MkdirTemp(root, "sandbox-agent-selftest-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for the attacks: %w", err)
	}
	g = &grounds{dir: dir, repo: filepath.Join(dir, "repo"), worktree: filepath.Join(dir, "worktree"), secret: filepath.Join(dir, "secret"), beside: filepath.Join(dir, "beside"), uid: uid, gid: gid}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if err := g.own(dir, 0o755, ""); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{g.repo, 0o755}, {g.beside, 0o777}} {
		if err := os.Mkdir(d.path, 0o700); err != nil {
			return nil, err
		}
		if err := g.own(d.path, d.mode, ""); err != nil {
			return nil, err
		}
	}
	for path, content := range map[string]string{g.secret: "the node's\n", filepath.Join(g.repo, "README"): "attacked\n"} {
		if err := g.own(path, 0o666, content); err != nil {
			return nil, err
		}
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "README"}, {"commit", "-q", "-m", "First"}, {"worktree", "add", "-q", "-b", "attacked", g.worktree}} {
		if err := g.git(ctx, args...); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// own writes a file, unless path is a folder, and gives it to the owner.
func (g *grounds) own(path string, mode os.FileMode, content string) error {
	var f *os.File
	st, err := os.Lstat(path)
	if err == nil && st.IsDir() {
		f, err = os.Open(path)
	} else {
		f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if content != "" {
		if _, err := f.WriteString(content); err != nil {
			return err
		}
	}
	return errors.Join(f.Chown(g.uid, g.gid), f.Chmod(mode))
}

func (g *grounds) git(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = g.repo
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "LC_ALL=C",
		"GIT_AUTHOR_NAME=Attacked", "GIT_AUTHOR_EMAIL=attacked@example.com", "GIT_COMMITTER_NAME=Attacked", "GIT_COMMITTER_EMAIL=attacked@example.com",
	}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(g.uid), Gid: uint32(g.gid)}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, printable(string(out)))
	}
	return nil
}

func (g *grounds) remove() error { return os.RemoveAll(g.dir) }
