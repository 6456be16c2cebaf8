package agent

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

const (
	maxLabels     = 32
	maxLabelKey   = 64
	maxLabelValue = 256
	maxEnv        = 256
	maxEnvBytes   = 64 << 10
)

const (
	digits   = "0123456789"
	wordText = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_" + digits
)

// madeOf says that s has 1 to most characters, all of them among chars. A regular expression would be compiled by every
// process that is this program, each jail of Git and each start of a container among them.
func madeOf(s, chars string, most int) bool {
	return s != "" && len(s) <= most && strings.Trim(s, chars) == ""
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

func checkSessionID(id string) error {
	if !madeOf(id, wordText+".-", 64) || id[0] == '.' {
		return invalid("session_id %q: use 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with a dot", id)
	}
	return nil
}

func checkExecID(id string) error {
	if !madeOf(id, wordText+".-", 128) || id == "." || id == ".." {
		return invalid("exec_id %q: use 1 to 128 of A-Z a-z 0-9 . _ - (it is a file name, so . and .. are refused)", id)
	}
	return nil
}

// checkEnvName refuses what would change which programs a command finds, where Git looks, or what bash runs first.
func checkEnvName(name string, allowed []string) error {
	if !madeOf(name, wordText, len(name)) || strings.Contains(digits, name[:1]) {
		return invalid("env %q: a variable's name is letters, digits and _, not beginning with a digit", name)
	}
	if slices.Contains(allowed, name) {
		return nil
	}
	fixed := []string{"PATH", "HOME", "TMPDIR", "TMP", "TEMP", "BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS"}
	if slices.Contains(fixed, name) || strings.HasPrefix(name, "GIT_") || strings.HasPrefix(name, "LD_") || strings.HasPrefix(name, "BASH_FUNC_") {
		return invalid("env %q can't be set by a session: leave it out, or have the operator list it in workspace.allow_env", name)
	}
	return nil
}

func checkEnv(env map[string]string, allowed []string) error {
	if len(env) > maxEnv {
		return invalid("env has %d variables: at most %d", len(env), maxEnv)
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if err := checkEnvName(name, allowed); err != nil {
			return err
		}
		v := env[name]
		if strings.ContainsRune(v, 0) || !utf8.ValidString(v) {
			return invalid("env %q: its value holds a NUL byte or is not UTF-8", name)
		}
		total += len(name) + len(v) + 2
	}
	if total > maxEnvBytes {
		return invalid("env is %d bytes long: at most %d", total, maxEnvBytes)
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return invalid("labels: %d of them, at most %d", len(labels), maxLabels)
	}
	for k, v := range labels {
		if k == "" || len(k) > maxLabelKey {
			return invalid("labels: key %q has %d bytes, allowed are 1 to %d", k, len(k), maxLabelKey)
		}
		if len(v) > maxLabelValue {
			return invalid("labels: the value of %q has %d bytes, at most %d", k, len(v), maxLabelValue)
		}
	}
	return nil
}

func checkCommand(command string, max int64) error {
	switch {
	case command == "":
		return invalid("command is empty: give what bash -c should run")
	case int64(len(command)) > max:
		return invalid("command has %d bytes, at most %d (limits.command_bytes): put it into a script in the worktree", len(command), max)
	case strings.ContainsRune(command, 0):
		return invalid("command holds a NUL byte, which no argument of a program can: remove it")
	case !utf8.ValidString(command):
		return invalid("command is not valid UTF-8: put it into a script in the worktree")
	}
	return nil
}

// checkTimeout gives the wish in milliseconds (0: none) and what the command gets.
func checkTimeout(seconds *float64, l config.Limits) (wishMS uint64, effective time.Duration, err error) {
	if seconds == nil {
		return 0, l.Timeout.Std(), nil
	}
	s := *seconds
	maxS := l.MaxTimeout.Std().Seconds()
	if math.IsNaN(s) || s < 0.001 || s > maxS {
		return 0, 0, invalid("timeout_seconds is %v: allowed are 0.001 to %v (limits.max_timeout); leave it out for %s", s, maxS, l.Timeout.Std())
	}
	wishMS = uint64(math.Round(s * 1000))
	return wishMS, time.Duration(wishMS) * time.Millisecond, nil
}

// checkExec checks everything of an exec that doesn't depend on the session's state.
func checkExec(r *sandboxv1.ExecRequest, l config.Limits) error {
	if err := checkSessionID(r.GetSessionId()); err != nil {
		return err
	}
	if r.GetExecId() != "" {
		if err := checkExecID(r.GetExecId()); err != nil {
			return err
		}
	}
	if err := checkCommand(r.GetCommand(), l.CommandBytes); err != nil {
		return err
	}
	if _, _, err := checkTimeout(r.TimeoutSeconds, l); err != nil {
		return err
	}
	return checkLabels(r.GetLabels())
}

// bounded gives the default for 0, and refuses what is above the node's bound.
func bounded(what, key string, want, low, bound int64) (int64, error) {
	switch {
	case want == 0:
		return bound, nil
	case want < low || want > bound:
		return 0, invalid("%s is %d: allowed are %d to %d (%s), 0 for the node's default", what, want, low, bound, key)
	}
	return want, nil
}

// checkResources fills in the node's defaults; a caller goes below them, never above (P16).
func checkResources(r *sandboxv1.Resources, l config.Limits) (*sandboxv1.Resources, error) {
	mem, err := bounded("resources.memory_bytes", "limits.memory_bytes", r.GetMemoryBytes(), 16<<20, l.MemoryBytes)
	if err != nil {
		return nil, err
	}
	pids, err := bounded("resources.pids", "limits.pids", r.GetPids(), 4, l.Pids)
	if err != nil {
		return nil, err
	}
	cpus := r.GetCpus()
	switch {
	case cpus == 0:
		cpus = l.CPUs
	case math.IsNaN(cpus) || cpus < 0.01 || (l.CPUs > 0 && cpus > l.CPUs) || cpus > 4096:
		return nil, invalid("resources.cpus is %v: allowed are 0.01 to %v cores, 0 for the node's default", cpus, cmpOr(l.CPUs, 4096))
	}
	return &sandboxv1.Resources{Cpus: cpus, MemoryBytes: mem, Pids: pids}, nil
}

func cmpOr(v, otherwise float64) float64 {
	if v == 0 {
		return otherwise
	}
	return v
}

// choose gives the default for "", and refuses what the node does not allow.
func choose(what, key, want, def string, allowed []string) (string, error) {
	if want == "" {
		return def, nil
	}
	if !slices.Contains(allowed, want) {
		return "", invalid("%s %q is not allowed on this node: use one of %v (%s)", what, want, allowed, key)
	}
	return want, nil
}

// checkCreate checks all of a CreateSession that needs no look at the disk, and gives it with every default filled in.
func checkCreate(r *sandboxv1.CreateSessionRequest, c *config.Config, allowed []hostClass) (*sandboxv1.CreateSessionRequest, error) {
	out := &sandboxv1.CreateSessionRequest{SessionId: r.GetSessionId(), Env: r.GetEnv(), Grants: r.GetGrants(), MinIsolation: r.GetMinIsolation()}
	if err := checkSessionID(out.GetSessionId()); err != nil {
		return nil, err
	}
	if err := checkEnv(r.GetEnv(), c.Workspace.AllowEnv); err != nil {
		return nil, err
	}
	grants, err := newGrantSet(r.GetGrants(), c.Workspace.AllowEnv)
	if err != nil {
		return nil, err
	}
	if err := grants.checkBeside(r.GetEnv()); err != nil {
		return nil, err
	}
	if out.Caches, err = checkCaches(r.GetCaches(), c); err != nil {
		return nil, err
	}
	if out.Resources, err = checkResources(r.GetResources(), c.Limits); err != nil {
		return nil, err
	}
	floor, err := floorOf(r.GetMinIsolation())
	if err != nil {
		return nil, err
	}
	if out.Runtime, err = chooseRuntime(r.GetRuntime(), floor, c.Runtime.Default, allowed); err != nil {
		return nil, err
	}
	if out.Network, err = checkSessionNetwork(r.GetNetwork(), c.Network); err != nil {
		return nil, err
	}
	out.Workspace, err = checkWorkspace(out.GetSessionId(), r.GetWorkspace(), c)
	return out, err
}

func checkWorkspace(sessionID string, w *sandboxv1.Workspace, c *config.Config) (*sandboxv1.Workspace, error) {
	layout, err := choose("workspace.git_layout", "both are", w.GetGitLayout(), c.Workspace.GitLayout, []string{config.IsolatedLayout, config.SharedLayout})
	if err != nil {
		return nil, err
	}
	out := &sandboxv1.Workspace{
		Repository: w.GetRepository(), Worktree: w.GetWorktree(), Branch: w.GetBranch(), BaseRef: w.GetBaseRef(), GitLayout: layout,
	}
	if out.GetWorktree() == "" {
		out.Worktree = c.DefaultWorktree(sessionID)
	}
	for _, p := range []struct{ what, path string }{
		{"workspace.repository", out.GetRepository()}, {"workspace.worktree", out.GetWorktree()},
	} {
		if err := c.CheckWorkspacePath(p.what, p.path); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	if config.Under(out.GetRepository(), out.GetWorktree()) {
		return nil, invalid("workspace.worktree %s is or contains the repository %s: commands would work in the base clone itself; name another folder",
			out.GetWorktree(), out.GetRepository())
	}
	return out, nil
}
