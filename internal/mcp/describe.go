package mcp

import (
	"fmt"
	"strings"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// describe is what a model is told before its first call: what holds in this session, from the session's own record. With
// cause there is no record.
func describe(s *sandboxv1.Session, cause error, textBytes int) string {
	d := &description{}
	if cause != nil {
		d.line("Runs `bash -c COMMAND` in a sandbox on a Git worktree, and waits until nothing of it is left running.")
		d.item("Now it can't be used: %v", cause)
		d.outcomes()
		return d.String()
	}
	w := s.GetWorkspace()
	d.line("Runs `bash -c COMMAND` in a sandbox, in the Git worktree %s, and waits until nothing of it is left running. What holds here:", w.GetWorktree())
	if reason := standstill(s); reason != "" {
		d.item("Now no command can run: %s", reason)
	}
	d.item("Each call is a fresh shell in the worktree's folder: cd, variables and functions do not last, files do. What is still running when the command ends is ended with it, in the background too: start a server and use it in one call. One command runs at a time; more wait for their turn.")
	d.item("No standard input (it is /dev/null) and no terminal: nothing can ask a question. Pass -y, --no-pager, -m and the like.")
	d.times(s.GetConditions())
	d.item("%s", network(s.GetNetwork()))
	d.files(s)
	d.git(s)
	d.grants(s)
	d.item("Limits: %s.", limits(s.GetResources()))
	d.output(s.GetConditions(), textBytes)
	d.outcomes()
	return d.String()
}

type description struct{ strings.Builder }

func (d *description) line(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

func (d *description) item(format string, args ...any) { d.line("- "+format, args...) }

// standstill says why no command of the session can run; empty while one can.
func standstill(s *sandboxv1.Session) string {
	switch s.GetState() {
	case sandboxv1.Session_GRANTS_REQUIRED, sandboxv1.Session_UNCERTAIN, sandboxv1.Session_DELETED:
		return strings.TrimSpace(s.GetState().String() + ". " + s.GetReason())
	}
	return ""
}

func (d *description) times(c *sandboxv1.CommandConditions) {
	def, most := c.GetTimeout().AsDuration(), c.GetMaxTimeout().AsDuration()
	if def == 0 || most == 0 {
		return
	}
	d.item("Time: %s, or timeout_seconds, at most %s. Then the command is ended, with everything that it started.", number(def), number(most))
}

// network says where a command can connect to.
func network(n *sandboxv1.Network) string {
	const refused = "what is refused fails at once, and the result lists it"
	switch mode := n.GetMode(); {
	case mode == "" || mode == "none":
		return "Network: none, not even the node's own; only what a command starts itself can be reached, on localhost, and only by itself. Downloads and package installations fail."
	case n.GetEgress() == "none":
		return fmt.Sprintf("Network: %s, and no destination is allowed: every connection is refused.", mode)
	case n.GetEgress() == "allowlist" && len(n.GetAllow()) > 0:
		return fmt.Sprintf("Network: %s, only to %s; %s.", mode, strings.Join(n.GetAllow(), ", "), refused)
	case n.GetEgress() == "allowlist":
		return fmt.Sprintf("Network: %s, only to the destinations that this node's operator has listed, by name; %s.", mode, refused)
	}
	return fmt.Sprintf("Network: %s, to everything but the node itself, cloud metadata and management ports; %s.", n.GetMode(), refused)
}

func (d *description) files(s *sandboxv1.Session) {
	c := s.GetConditions()
	d.item("Files: the worktree can be written. $TMPDIR (%s) is scratch that stays and that Git ignores. /tmp (%s) and HOME (%s, %s) are memory and last only as long as the sandbox: it ends when it is idle, after a cancelled call and on the operator's request. The rest of the system is read-only.",
		c.GetScratch(), size(c.GetTmpBytes()), c.GetHome(), size(c.GetHomeBytes()))
	var caches []string
	for _, x := range s.GetCaches() {
		name := c.GetHome() + "/" + x.GetPath()
		if x.GetReadOnly() {
			name += " (read-only)"
		}
		caches = append(caches, name)
	}
	if len(caches) > 0 {
		d.item("Caches that outlast the sandbox: %s.", strings.Join(caches, ", "))
	}
}

func (d *description) git(s *sandboxv1.Session) {
	hooks := "hooks are off"
	if s.GetConditions().GetHooks() {
		hooks = "hooks run"
	}
	branch := ""
	if b := s.GetWorkspace().GetBranch(); b != "" {
		branch = " on branch " + b
	}
	where := "Commits go to the repository at the end of each command; other worktrees can't be seen."
	if s.GetWorkspace().GetGitLayout() == "shared" {
		where = "Commits and refs go to the repository at once; deleting a packed ref, git pack-refs and git gc fail."
	}
	d.item("Git works%s: %s, and its configuration and hooks are read-only. %s", branch, hooks, where)
}

func (d *description) grants(s *sandboxv1.Session) {
	if names := s.GetGrantNames(); len(names) > 0 {
		d.item("Credentials of this session, as read-only files in /run/grants/NAME and in the environment: %s.", strings.Join(names, ", "))
	}
}

func limits(r *sandboxv1.Resources) string {
	var out []string
	if m := r.GetMemoryBytes(); m > 0 {
		out = append(out, size(m)+" of memory")
	}
	if p := r.GetPids(); p > 0 {
		out = append(out, fmt.Sprintf("%d processes and threads", p))
	}
	if c := r.GetCpus(); c > 0 {
		out = append(out, fmt.Sprintf("%v CPUs", c))
	}
	if len(out) == 0 {
		return "the node's own"
	}
	return strings.Join(out, ", ")
}

func (d *description) output(c *sandboxv1.CommandConditions, textBytes int) {
	more := "What is left out is not kept: have the command write it to a file."
	if n := c.GetSpillBytes(); n > 0 {
		more = fmt.Sprintf("The whole stream (at most its first %s) is then in a file in $TMPDIR that the result names.", size(n))
	}
	d.item("Output: of each of stdout and stderr at most %s are shown, head and tail. %s", size(int64(textBytes)), more)
}

func (d *description) outcomes() {
	d.item("The result's first line says how it ended. EXITED is the command's own end, whatever its exit code. TIMED_OUT, KILLED, CANCELLED and UNCERTAIN: it may have taken effect, wholly or partly; inspect (git status, the files) before you run it again. NOT_STARTED: it certainly did not run.")
}

// size is a number of bytes for a reader.
func size(n int64) string {
	for _, u := range []struct {
		unit int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.unit {
			return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/float64(u.unit)), ".0") + " " + u.name
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

func defaultTimeout(s *sandboxv1.Session) time.Duration {
	return s.GetConditions().GetTimeout().AsDuration()
}
