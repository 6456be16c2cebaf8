package agent

import (
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// commandPath holds no folder that a command can write.
const commandPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// commandEnv is the whole environment of a session's commands: fixed and small, nothing of the agent's own, then the
// session's variables in the order of their names.
func commandEnv(worktree, layout string, w config.Workspace, session map[string]string) []*receiptdv1.EnvVar {
	tmp := filepath.Join(worktree, workspace.ScratchName)
	env := []*receiptdv1.EnvVar{}
	add := func(name, value string) { env = append(env, &receiptdv1.EnvVar{Name: name, Value: value}) }
	fixed := [][2]string{{"PATH", commandPath}, {"HOME", runtime.HomePath}, {"LANG", "C.UTF-8"}, {"TMPDIR", tmp}, {"TMP", tmp}, {"TEMP", tmp}}
	fixed = append(fixed, gitVariables(layout, w)...)
	for _, kv := range fixed {
		if _, replaced := session[kv[0]]; !replaced {
			add(kv[0], kv[1])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(session)) {
		add(name, session[name])
	}
	return env
}

// gitVariables give commits an identity without a configuration file, and switch off what would ask a person. In the
// isolated layout the rest is in the sandbox's own configuration; in the shared one that is the base clone's.
func gitVariables(layout string, w config.Workspace) [][2]string {
	settings := [][2]string{
		{"user.name", w.Identity.Name}, {"user.email", w.Identity.Email},
		{"commit.gpgSign", "false"}, {"tag.gpgSign", "false"},
	}
	if layout == config.SharedLayout {
		// They would write into objects/info, which is sealed: gc and repack would fail.
		settings = append(settings, [][2]string{
			{"gc.writeCommitGraph", "false"}, {"fetch.writeCommitGraph", "false"}, {"core.commitGraph", "false"}, {"repack.updateServerInfo", "false"},
		}...)
		if w.Hooks == "off" {
			settings = append(settings, [2]string{"core.hooksPath", "/dev/null"})
		}
	}
	vars := [][2]string{
		{"GIT_TERMINAL_PROMPT", "0"},
		{"GIT_CONFIG_COUNT", strconv.Itoa(len(settings))},
	}
	for _, v := range identity(w) {
		name, value, _ := strings.Cut(v, "=")
		vars = append(vars, [2]string{name, value})
	}
	for i, kv := range settings {
		n := strconv.Itoa(i)
		vars = append(vars, [2]string{"GIT_CONFIG_KEY_" + n, kv[0]}, [2]string{"GIT_CONFIG_VALUE_" + n, kv[1]})
	}
	return vars
}

// identity is the author and committer of commits, as variables.
func identity(w config.Workspace) []string {
	n, e := w.Identity.Name, w.Identity.Email
	return []string{"GIT_AUTHOR_NAME=" + n, "GIT_AUTHOR_EMAIL=" + e, "GIT_COMMITTER_NAME=" + n, "GIT_COMMITTER_EMAIL=" + e}
}
