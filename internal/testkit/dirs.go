package testkit

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// scratchRoot is not TMPDIR: a sandbox has a /tmp of its own, and /var/tmp is on a real file system (idmapped mounts,
// fsync), where /tmp may be a tmpfs.
const scratchRoot = "/var/tmp"

// scratches are the folders that this process has made there: others may run tests at the same time.
var scratches sync.Map

func scratch(kind string) (string, error) {
	dir, err := os.MkdirTemp(scratchRoot, "sa-"+kind+"-")
	if err != nil {
		return "", err
	}
	scratches.Store(dir, true)
	// The container's init is not root on the host: it has to get through every ancestor of its root file system.
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", err
	}
	return dir, nil
}

// StateDir makes a short, traversable (0711) folder for state and removes it at the test's end. Short: the path of a
// unix socket has at most 107 bytes (unix(7)).
func StateDir(t testing.TB) string {
	t.Helper()
	dir, err := scratch("s")
	if err != nil {
		t.Fatalf("making a state folder: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("removing the state folder: %v", err)
		}
	})
	return dir
}

var cgroupSeq atomic.Uint64

// CgroupParent is a cgroup path of this test alone, to be given to the embedded runtime; its folders are removed
// at the test's end (Leaks says so if anything is still in them).
func CgroupParent(t testing.TB) string {
	t.Helper()
	parent := fmt.Sprintf("/sandbox-agent-test-%d-%d", os.Getpid(), cgroupSeq.Add(1))
	t.Cleanup(func() {
		for _, dir := range cgroupDirs(parent) {
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				t.Errorf("removing the test's cgroup: %v", err)
			}
		}
	})
	return parent
}

// agentsCgroup is where every agent has its sandboxes; it stays when the agent ends, for those that go on.
const agentsCgroup = "/sandbox-agent"

// foundCgroups are its folders that were there before the tests.
var foundCgroups = cgroupDirs(agentsCgroup)

// removeAgentsCgroup removes what tests have left of it. One that a sandbox is still in stays, and its test has failed.
func removeAgentsCgroup() {
	for _, mount := range cgroupMounts() {
		dir := mount + agentsCgroup
		if slices.Contains(foundCgroups, dir) {
			continue
		}
		if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
			fmt.Fprintln(os.Stderr, "removing the agents' cgroup:", err)
		}
	}
}

// Repo makes a real Git repository with one commit, owned by uid (and the gid of the same number), in a folder all of
// whose ancestors everyone can traverse. It is removed at the test's end.
func Repo(t testing.TB, uid int) string {
	t.Helper()
	top, err := scratch("repo")
	if err != nil {
		t.Fatalf("making a folder for a repository: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	repo := filepath.Join(top, "repo")
	if err := os.Mkdir(repo, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(repo, "README"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{top, repo, filepath.Join(repo, "README")} {
		if err := os.Chown(p, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	GitAs(t, uid, repo, "init", "-q", "-b", "main")
	GitAs(t, uid, repo, "add", "README")
	GitAs(t, uid, repo, "commit", "-q", "-m", "First")
	return repo
}

// Worktree adds a linked worktree on a new branch beside the repository and gives its path.
func Worktree(t testing.TB, uid int, repo, branch string) string {
	t.Helper()
	path := filepath.Join(filepath.Dir(repo), "wt-"+branch)
	GitAs(t, uid, repo, "worktree", "add", "-q", "-b", branch, path)
	return path
}

// GitAs runs git in dir as uid, with nothing of the caller's environment or configuration, and gives its output.
func GitAs(t testing.TB, uid int, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = gitEnv("Tester", "tester@example.com")
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// gitEnv is an environment for git with nothing of the caller's.
func gitEnv(name, email string) []string {
	return []string{
		"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "LANG=C.UTF-8",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0",
		"GIT_AUTHOR_NAME=" + name, "GIT_AUTHOR_EMAIL=" + email,
		"GIT_COMMITTER_NAME=" + name, "GIT_COMMITTER_EMAIL=" + email,
	}
}

// Reftable puts the refs of a repository without linked worktrees into a reftable, or skips the test where the installed
// Git can't: it does since 2.46.
func Reftable(t testing.TB, uid int, repo string) {
	t.Helper()
	const helped = 129 // the exit code of every Git command that knows -h
	err := exec.Command("git", "refs", "-h").Run()
	if e := new(exec.ExitError); !errors.As(err, &e) || e.ExitCode() != helped {
		t.Skip("this test needs a Git that has the reftable format and git refs migrate (2.46 and newer)")
	}
	// Before 2.48 Git migrates no reflog, and refuses where there is one.
	logs := strings.TrimSpace(GitAs(t, uid, repo, "rev-parse", "--path-format=absolute", "--git-path", "logs"))
	if err := os.RemoveAll(logs); err != nil {
		t.Fatal(err)
	}
	GitAs(t, uid, repo, "refs", "migrate", "--ref-format=reftable")
}
