package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	// Names of series that aims are about.
	nameTrueShared   = "true, shared"
	nameTrueIsolated = "true, isolated"
	nameCreateRefs   = "session create, 100,000 refs"
	nameCreatePack   = "session create, 1 GiB pack"
	// sessionsEvery: making a session takes much longer than a command, so not every round has one.
	sessionsEvery = 10
	// keptLimit is what the agent may keep on disk for a new session, bytes: the refs, never the objects.
	keptLimit = 16 << 20
)

// create makes a session on a worktree that the agent makes.
func create(ctx context.Context, c *client.Client, repo, worktree, layout string) (*session, error) {
	res, err := c.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{
		Repository: repo, Worktree: worktree, Branch: filepath.Base(worktree), BaseRef: "main", GitLayout: layout,
	}})
	if err != nil {
		return nil, c.Explain("creating a session", err)
	}
	return &session{client: c, id: res.GetSession().GetSessionId(), sandbox: res.GetSession().GetSandbox(), worktree: worktree}, nil
}

// layoutCases are a command that touches nothing of Git, in each layout: what looking for changes costs.
func layoutCases(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	var cases []testCase
	for _, c := range []struct{ name, layout string }{{nameTrueShared, mounts.Shared}, {nameTrueIsolated, mounts.Isolated}} {
		if !o.wants(c.name) {
			continue
		}
		in, err := create(ctx, s.client, p.repo, p.newWorktree(), c.layout)
		if err != nil {
			return nil, err
		}
		cases = append(cases, testCase{group: groupLayout, series: []string{c.name}, baseline: c.layout == mounts.Shared, sample: one(timed(in, "true"))})
	}
	return cases, nil
}

// timed runs a command through the socket.
func timed(s *session, command string) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) {
		began := time.Now()
		_, err := s.exec(ctx, command)
		return time.Since(began), err
	}
}

// commitCases make a commit, which in the layout "isolated" is harvested before the answer. Each has a clone of its own:
// what one commits is to be refreshed by no other case.
func commitCases(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	const bareName, command = "git commit, bare", "echo x >> folder-0/file-0.txt && git commit -qam x"
	var cases []testCase
	if o.wants(bareName) {
		repo, err := p.clone(ctx)
		if err != nil {
			return nil, err
		}
		bash, err := find("bash", "-c", command)
		if err != nil {
			return nil, err
		}
		bash.env, bash.dir, bash.uid = s.env, repo, ownerUID
		cases = append(cases, testCase{group: groupCommit, series: []string{bareName}, baseline: true, sample: one(func(context.Context) (time.Duration, error) {
			return bash.run(p.null)
		})})
	}
	for _, c := range []struct{ name, layout string }{{"git commit, exec, shared", mounts.Shared}, {"git commit, exec, isolated", mounts.Isolated}} {
		if !o.wants(c.name) {
			continue
		}
		repo, err := p.clone(ctx)
		if err != nil {
			return nil, err
		}
		in, err := create(ctx, s.client, repo, p.newWorktree(), c.layout)
		if err != nil {
			return nil, err
		}
		cases = append(cases, testCase{group: groupCommit, series: []string{c.name}, sample: one(timed(in, command))})
	}
	return cases, nil
}

// trustedCase is the status that a trusted caller asks the agent for: Git in a jail, with a copy of the index.
func trustedCase(_ context.Context, o options, _ *place, s *session) ([]testCase, error) {
	const name = "git status, trusted"
	if !o.wants(name) {
		return nil, nil
	}
	return []testCase{{group: groupGit, series: []string{name}, sample: one(func(ctx context.Context) (time.Duration, error) {
		began := time.Now()
		res, err := s.client.Git.Git(ctx, &sandboxv1.GitRequest{SessionId: s.id, Args: []string{"status", "--porcelain"}})
		took := time.Since(began)
		if err == nil && (res.GetExitCode() != 0 || len(res.GetStdout()) > 0) {
			err = fmt.Errorf("git status: exit code %d: %s%s", res.GetExitCode(), res.GetStdout(), res.GetStderr())
		}
		return took, s.client.Explain("running trusted Git", err)
	})}}, nil
}

// createCases make sessions on a small repository, on one with many refs and on one with many objects: neither may be
// copied.
func createCases(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	const small = "session create"
	var cases []testCase
	for _, c := range []struct {
		name string
		make func(context.Context) (string, error)
	}{{small, p.clone}, {nameCreateRefs, p.fixture("many-refs", manyRefs)}, {nameCreatePack, p.fixture("big-pack", bigPack)}} {
		if !o.wants(c.name) {
			continue
		}
		repo, err := c.make(ctx)
		if err != nil {
			return nil, err
		}
		cases = append(cases, testCase{
			group: groupSession, series: []string{c.name}, baseline: c.name == small, every: sessionsEvery,
			sample: one(func(ctx context.Context) (time.Duration, error) { return createAndDelete(ctx, p, s.client, repo) }),
		})
	}
	return cases, nil
}

// createAndDelete times the making of a session until its sandbox has proved itself. The rest is not timed.
func createAndDelete(ctx context.Context, p *place, c *client.Client, repo string) (time.Duration, error) {
	before, err := diskUse(p.path("default-state", "workspaces"))
	if err != nil {
		return 0, err
	}
	began := time.Now()
	s, err := create(ctx, c, repo, p.newWorktree(), mounts.Isolated)
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	after, err := diskUse(p.path("default-state", "workspaces"))
	if err == nil && after-before > keptLimit {
		err = fmt.Errorf("the agent keeps %d bytes for a new session: objects were copied", after-before)
	}
	_, gone := c.Sessions.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: s.id, Force: true})
	return took, errors.Join(err, c.Explain("deleting a workspace", gone))
}

// diskUse is what the regular files below a folder hold, bytes; 0 where there is no such folder.
func diskUse(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	if errors.Is(err, os.ErrNotExist) {
		return sum, nil
	}
	return sum, err
}

// clone makes another clone of the repository, with nothing in it that another case changes.
func (p *place) clone(ctx context.Context) (string, error) {
	p.trees++
	path := p.path("work", "clone-"+strconv.Itoa(p.trees))
	err := errors.Join(os.Mkdir(path, 0o755), os.Chown(path, ownerUID, ownerUID))
	if err == nil {
		err = p.git(ctx, "clone", "-q", "--no-hardlinks", p.repo, path)
	}
	return path, err
}

// newWorktree is the path of a worktree that is yet to be made.
func (p *place) newWorktree() string {
	p.trees++
	return p.path("work", "made-"+strconv.Itoa(p.trees))
}
