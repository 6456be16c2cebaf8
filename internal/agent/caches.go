package agent

import (
	"fmt"
	"os"
	"path/filepath"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// maxCaches is how many caches a session may have.
const maxCaches = 16

// checkCaches checks the caches of a CreateSession and fills in the paths of the operator's.
func checkCaches(list []*sandboxv1.Cache, c *config.Config) ([]*sandboxv1.Cache, error) {
	if len(list) > maxCaches {
		return nil, invalid("caches: %d of them, at most %d", len(list), maxCaches)
	}
	var out []*sandboxv1.Cache
	for _, x := range list {
		cache, err := checkCache(x, c)
		if err != nil {
			return nil, err
		}
		for _, other := range out {
			switch {
			case other.GetName() == cache.GetName():
				return nil, invalid("caches: %q stands there twice", cache.GetName())
			case config.Under("/"+cache.GetPath(), "/"+other.GetPath()), config.Under("/"+other.GetPath(), "/"+cache.GetPath()):
				return nil, invalid("caches: %q at %q and %q at %q would lie in each other: give them separate paths",
					other.GetName(), other.GetPath(), cache.GetName(), cache.GetPath())
			}
		}
		out = append(out, cache)
	}
	return out, nil
}

func checkCache(x *sandboxv1.Cache, c *config.Config) (*sandboxv1.Cache, error) {
	if !config.CheckCacheName(x.GetName()) {
		return nil, invalid("caches: name %q: use 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with a dot or a dash", x.GetName())
	}
	path := x.GetPath()
	if x.GetReadOnly() {
		shared, ok := c.Caches[x.GetName()]
		switch {
		case !ok:
			return nil, invalid("caches: this node has no shared cache %q: leave it out, ask for one of the session's own (read_only false), or have the operator add it to caches", x.GetName())
		case path != "" && path != shared.Path:
			return nil, invalid("caches: the shared cache %q is at %q: leave its path out", x.GetName(), shared.Path)
		}
		path = shared.Path
	}
	if err := config.CheckCachePath(path); err != nil {
		return nil, invalid("caches: path %q of %q: give %v", path, x.GetName(), err)
	}
	return &sandboxv1.Cache{Name: x.GetName(), Path: path, ReadOnly: x.GetReadOnly()}, nil
}

func cacheRecords(list []*sandboxv1.Cache) []cacheRecord {
	var out []cacheRecord
	for _, c := range list {
		out = append(out, cacheRecord{Name: c.GetName(), Path: c.GetPath(), ReadOnly: c.GetReadOnly()})
	}
	return out
}

// cacheMounts makes the folders of the session's own caches, which stay with the workspace, and gives the mounts of all.
func (a *Agent) cacheMounts(list []cacheRecord, worktree string, owner hostfs.Owner) ([]mounts.Mount, error) {
	var out []mounts.Mount
	for _, c := range list {
		m := mounts.Mount{Target: filepath.Join(runtime.HomePath, c.Path), ReadOnly: c.ReadOnly, Idmap: !c.ReadOnly}
		var err error
		if c.ReadOnly {
			m.Source, err = a.sharedCache(c.Name)
		} else {
			m.Source, err = a.ownCache(c.Name, worktree, owner)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

func (a *Agent) sharedCache(name string) (string, error) {
	shared, ok := a.cfg.Caches[name]
	if !ok {
		return "", fmt.Errorf("the shared cache %q is not in the agent's configuration any more: put it back (caches)", name)
	}
	if _, err := hostfs.StatDir("the shared cache "+name, shared.Source); err != nil {
		return "", err
	}
	return shared.Source, nil
}

// ownCache is a folder that only root reaches, of the worktree's owner: the sandbox has it by its mount.
func (a *Agent) ownCache(name, worktree string, owner hostfs.Owner) (string, error) {
	dir := filepath.Join(a.workspaceDir(worktree), cachesName)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("making the folder of the workspace's caches: %w", err)
	}
	path := filepath.Join(dir, name)
	if mounts.Exists(path) {
		return path, nil
	}
	if _, err := hostfs.MakeFor(path, owner); err != nil {
		return "", err
	}
	return path, nil
}

// cachesName is the folder of a workspace's caches, in what the agent keeps for it.
const cachesName = "caches"
