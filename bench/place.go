package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview/skeleton"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	// ownerUID owns the repository and the worktrees on disk (and so does the gid of this number).
	ownerUID = 4321
	// The repository's size: a small project.
	folders, filesPerFolder = 40, 25
	cleanupTime             = time.Minute
)

// place is everything that one run makes on the machine, and how it goes away again.
type place struct {
	dir    string
	bin    string // copies of the programs: a build beside this run must not change what is measured
	repo   string
	cgroup string // path of this run's own cgroups, in each hierarchy
	null   *os.File
	undo   []func(context.Context) error
	trees  int
}

func (p *place) path(name ...string) string {
	return filepath.Join(append([]string{p.dir}, name...)...)
}

// onClose has f run before everything that was registered earlier.
func (p *place) onClose(f func(context.Context) error) { p.undo = append(p.undo, f) }

func newPlace(ctx context.Context, o options) (_ *place, err error) {
	dir, err := os.MkdirTemp(o.dir, "sandbox-agent-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a folder for this run: %w: name another with -dir", err)
	}
	p := &place{dir: dir, bin: filepath.Join(dir, "bin"), repo: filepath.Join(dir, "work", "repo"), cgroup: fmt.Sprintf("/sandbox-agent-bench-%d", os.Getpid())}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	p.onClose(func(context.Context) error { return os.RemoveAll(dir) })
	p.onClose(func(context.Context) error { return removeCgroups(p.cgroup) })
	if p.null, err = os.OpenFile("/dev/null", os.O_RDWR, 0); err != nil {
		return nil, err
	}
	p.onClose(func(context.Context) error { return p.null.Close() })
	// A container's root isn't root on the node: it passes through every folder above its own.
	if err := os.Chmod(dir, 0o711); err != nil {
		return nil, err
	}
	if err := p.copyPrograms(o.bin); err != nil {
		return nil, err
	}
	return p, p.makeRepository(ctx)
}

// Close removes everything, the newest first, and looks whether anything is left.
func (p *place) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	var errs []error
	for _, f := range slices.Backward(p.undo) {
		errs = append(errs, f(ctx))
	}
	return errors.Join(append(errs, p.leftBehind())...)
}

// leftBehind names what should be gone and isn't.
func (p *place) leftBehind() error {
	var left []string
	if mountinfo, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mountinfo), p.dir+"/") {
		left = append(left, "mounts below "+p.dir)
	}
	if dirs := cgroupFolders(p.cgroup); len(dirs) > 0 {
		left = append(left, strings.Join(dirs, ", "))
	}
	if children := descendants(os.Getpid()); len(children) > 0 {
		left = append(left, fmt.Sprintf("processes %v", children))
	}
	if len(left) > 0 {
		return fmt.Errorf("left behind: %s", strings.Join(left, "; "))
	}
	return nil
}

var programs = []string{"sandbox-agent", "receiptd", "pid1"}

func (p *place) copyPrograms(from string) error {
	if err := os.Mkdir(p.bin, 0o755); err != nil {
		return err
	}
	for _, name := range programs {
		if err := copyFile(filepath.Join(from, name), filepath.Join(p.bin, name)); err != nil {
			return fmt.Errorf("copying %s: %w: build it with \"make build\", or name the folder with -bin", name, err)
		}
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// makeRepository makes a repository of a thousand files with one commit.
func (p *place) makeRepository(ctx context.Context) error {
	dirs := []string{p.path("work"), p.repo}
	for i := range folders {
		dirs = append(dirs, filepath.Join(p.repo, "folder-"+strconv.Itoa(i)))
	}
	for i, dir := range dirs {
		if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, ownerUID, ownerUID)); err != nil {
			return fmt.Errorf("making the repository: %w", err)
		}
		if i < 2 {
			continue
		}
		for k := range filesPerFolder {
			name := filepath.Join(dir, fmt.Sprintf("file-%d.txt", k))
			if err := errors.Join(os.WriteFile(name, []byte(strings.Repeat(name+"\n", 20)), 0o644), os.Chown(name, ownerUID, ownerUID)); err != nil {
				return fmt.Errorf("making the repository: %w", err)
			}
		}
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "."}, {"commit", "-q", "-m", "First"}} {
		if err := p.git(ctx, args...); err != nil {
			return fmt.Errorf("making the repository: %w", err)
		}
	}
	return nil
}

// gitIdentity is the environment of this program's own Git: nothing of its caller's.
var gitIdentity = []string{
	"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1",
	"GIT_AUTHOR_NAME=Bench", "GIT_AUTHOR_EMAIL=bench@localhost", "GIT_COMMITTER_NAME=Bench", "GIT_COMMITTER_EMAIL=bench@localhost",
}

func (p *place) git(ctx context.Context, args ...string) error {
	g, err := find("git", args...)
	if err != nil {
		return err
	}
	g.dir, g.env, g.uid = p.repo, gitIdentity, ownerUID
	return g.try(ctx)
}

// worktree adds a linked worktree on a branch of its own, with the scratch folder that commands have.
func (p *place) worktree(ctx context.Context) (path string, plan mounts.Plan, err error) {
	p.trees++
	name := "wt-" + strconv.Itoa(p.trees)
	path = p.path("work", name)
	if err := p.git(ctx, "worktree", "add", "-q", "-b", name, path); err != nil {
		return "", plan, fmt.Errorf("adding a worktree: %w", err)
	}
	if err := workspace.MakeScratch(path, workspace.Owner{UID: ownerUID, GID: ownerUID}); err != nil {
		return "", plan, err
	}
	common, private := filepath.Join(p.repo, ".git"), p.path("private", name)
	if err := os.MkdirAll(private, 0o711); err != nil {
		return "", plan, err
	}
	private = filepath.Join(private, "git")
	if err := skeleton.Make(private, common, workspace.Owner{UID: ownerUID, GID: ownerUID}); err != nil {
		return "", plan, err
	}
	plan, err = mounts.New(mounts.Workspace{
		Worktree: path, CommonDir: common, MetaDir: filepath.Join(common, "worktrees", name), OwnerUID: ownerUID, OwnerGID: ownerUID,
		Layout: mounts.Shared, Private: private,
	}, mounts.Exists)
	return path, plan, err
}

// cgroupFolders are the folders of a cgroup path in every hierarchy, the deepest first.
func cgroupFolders(path string) []string {
	table, _ := os.ReadFile("/proc/self/mounts")
	var dirs []string
	for _, line := range strings.Split(string(table), "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] != "cgroup" && f[2] != "cgroup2" {
			continue
		}
		_ = filepath.WalkDir(f[1]+path, func(dir string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, dir)
			}
			return nil
		})
	}
	slices.Reverse(dirs)
	return dirs
}

// removeCgroups removes what sandboxes and containers leave empty; one that isn't is named.
func removeCgroups(path string) error {
	var errs []error
	for _, dir := range cgroupFolders(path) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
