package gitguard

import (
	"fmt"
	"strconv"
)

// Path is the PATH of trusted Git.
const Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// pinned are configuration values that win over the repository's own: nothing of it may run a program, fetch, or
// start maintenance when trusted Git looks at it. GIT_CONFIG_COUNT beats every file.
var pinned = [][2]string{
	{"core.hooksPath", "/dev/null"},
	{"core.fsmonitor", "false"},
	{"protocol.allow", "never"},
	{"safe.bareRepository", "explicit"},
	{"credential.helper", ""},
	{"commit.gpgSign", "false"},
	{"tag.gpgSign", "false"},
	{"log.showSignature", "false"},
	{"submodule.recurse", "false"},
	{"gc.auto", "0"},
	{"maintenance.auto", "false"},
	{"core.useReplaceRefs", "false"},
	{"advice.graftFileDeprecated", "false"}, // GIT_GRAFT_FILE switches grafts off, and Git advises against using them
}

// hookEvents are the hooks of githooks(5). Since Git 2.54 hook.*.command runs programs for them, which core.hooksPath
// does not stop; hook.<event>.enabled does.
var hookEvents = []string{
	"applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg",
	"commit-msg", "post-commit", "pre-rebase", "post-checkout", "post-merge", "pre-push", "pre-receive", "update",
	"proc-receive", "post-receive", "post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc",
	"post-rewrite", "sendemail-validate", "fsmonitor-watchman", "p4-changelist", "p4-prepare-changelist",
	"p4-post-changelist", "p4-pre-submit", "post-index-change",
}

// Env is the whole environment of trusted Git; nothing of the caller's own comes in. extra are further pinned
// configuration values.
func Env(extra ...[2]string) []string {
	env := []string{
		"PATH=" + Path, "HOME=/nonexistent", "LC_ALL=C",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_ATTR_NOSYSTEM=1",
		"GIT_NO_REPLACE_OBJECTS=1", "GIT_NO_LAZY_FETCH=1", "GIT_OPTIONAL_LOCKS=0", "GIT_ALLOW_PROTOCOL=none",
		"GIT_GRAFT_FILE=/dev/null", "GIT_TERMINAL_PROMPT=0", "GIT_SSH_COMMAND=/bin/false", "GIT_ASKPASS=/bin/false",
		"GIT_EDITOR=:", "GIT_SEQUENCE_EDITOR=:", "GIT_PAGER=cat", "PAGER=cat",
	}
	values := append([][2]string(nil), pinned...)
	for _, event := range hookEvents {
		values = append(values, [2]string{"hook." + event + ".enabled", "false"})
	}
	values = append(values, extra...)
	env = append(env, "GIT_CONFIG_COUNT="+strconv.Itoa(len(values)))
	for i, kv := range values {
		env = append(env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", i, kv[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", i, kv[1]))
	}
	return env
}
