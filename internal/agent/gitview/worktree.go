package gitview

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// What base clone keeps of the worktree itself: HEAD, index, and HEAD's log. The session's are written there as regular
// files, so that the base clone's gc keeps what they need, and its worktree list is right.

// logEntry is a line of a reflog: two ids, who, when, and what.
// It is compiled when it is needed: every process that is this program would do it, each jail of Git among them.
var logEntry = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64}) ([0-9a-f]{40}|[0-9a-f]{64}) [^\x00-\x1f\x7f<>]*<[^\x00-\x1f\x7f<>]*> [0-9]{1,19} [+-][0-9]{4}\t[^\x00-\x08\x0a-\x1f\x7f]*$`)
})

// isHex says whether s has only hexadecimal digits; with upper, capital ones too.
func isHex(s string, upper bool) bool {
	digits := "0123456789abcdef"
	if upper {
		digits += "ABCDEF"
	}
	return strings.Trim(s, digits) == ""
}

// isObjectID says whether s is a whole id of an object, SHA-1 or SHA-256.
func isObjectID(s string) bool { return (len(s) == 40 || len(s) == 64) && isHex(s, false) }

// privateHead reads the session's HEAD, as text: "ref: NAME" with a name that Git would make, or an id.
func (v *View) privateHead() (head string, err error) {
	var b []byte
	err = v.inPrivateFolder(func(d folder) error {
		b, err = d.read(v.meta()+"/HEAD", 8192)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("the session's HEAD: %w (git symbolic-ref HEAD refs/heads/… in the session makes it again)", err)
	}
	head = strings.TrimSuffix(string(b), "\n")
	name, isRef := strings.CutPrefix(head, "ref: ")
	switch {
	case isRef && strings.HasPrefix(name, "refs/"):
		if err := gitguard.CheckRefName(name); err != nil {
			return "", fmt.Errorf("the session's HEAD: %w (git symbolic-ref HEAD refs/heads/… in the session makes it again)", err)
		}
		return head, nil
	case isObjectID(head):
		return head, nil
	default:
		return "", errors.New("the session's HEAD is neither a commit nor the name of a ref (git symbolic-ref HEAD refs/heads/… in the session makes it again)")
	}
}

// exportHead writes the worktree's HEAD in the base clone. It names a branch only if that is one that this workspace exports,
// as the session has it, and no other worktree is on it; else it is the commit itself.
func (h *harvest) exportHead(ctx context.Context) error {
	v := h.v
	if h.head == "" || !h.changed[partRefs] && !h.changed[partHead] && !v.state.Pending {
		return nil
	}
	now, err := v.baseHead(ctx, h.j)
	if err != nil {
		return err
	}
	want, err := h.wantedHead(ctx, now)
	switch {
	case err != nil || want == "":
		return err
	case want == now:
		v.state.Head, v.state.BaseHead = h.head, now
		return nil
	case want == v.state.BaseHead: // only the host changed it: the next Refresh brings that in
		return nil
	}
	if now != v.state.BaseHead {
		h.Conflicts = append(h.Conflicts, Conflict{
			Ref: "HEAD", BaseID: withoutRef(now), SessionID: withoutRef(h.head), BeforeID: withoutRef(v.state.BaseHead),
			Remedy: fmt.Sprintf("the worktree's HEAD was changed outside of the session to %s, and is the session's again: git switch to what is meant in the session", withoutRef(now)),
		})
	}
	args := []string{"update-ref", "-m", "sandbox-agent: harvest of session " + v.o.SessionID, "--no-deref", "HEAD", want}
	if name, isRef := strings.CutPrefix(want, "ref: "); isRef {
		args = []string{"symbolic-ref", "HEAD", name}
	}
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	step("before HEAD")
	if _, err := s.RunCall(unbroken(ctx), gitjail.Call{Args: args, Env: v.inMeta()}); err != nil {
		return err
	}
	v.state.Head, v.state.BaseHead, h.wrote = h.head, want, true
	step("after HEAD")
	return nil
}

func withoutRef(head string) string { return strings.TrimPrefix(head, "ref: ") }

// wantedHead is what the base clone's HEAD of the worktree should be; empty: left as it is.
func (h *harvest) wantedHead(ctx context.Context, now string) (string, error) {
	id := h.headID()
	if id == "" {
		h.say("HEAD is on %s, which has no commit yet, and stays as it was in the base clone", withoutRef(h.head))
		return "", nil
	}
	if !h.arrived(heads, id) {
		h.say("HEAD stays as it was in the base clone: its commit %s did not arrive", id)
		return "", nil
	}
	name, isRef := strings.CutPrefix(h.head, "ref: ")
	if !isRef || !strings.HasPrefix(name, heads) || h.exportedValue(name) != id {
		return id, nil
	}
	if h.head == now { // it is on that branch already
		return h.head, nil
	}
	if !h.exports(name) { // it would be taken from everybody else: Git lets a branch be checked out once
		return id, nil
	}
	elsewhere, err := h.elsewhere(ctx)
	if err != nil {
		return "", err
	}
	if elsewhere[name] != "" {
		return id, nil
	}
	return h.head, nil
}

// exports says whether a branch is one that this workspace moves in the base clone.
func (h *harvest) exports(name string) bool {
	v := h.v
	return name == v.branch() || v.state.Created[name] || h.verdict.made[name] ||
		slices.ContainsFunc(v.o.Export, func(p string) bool { return gitguard.Matches(p, name) })
}

// exportedValue is what the base clone has at a ref after this harvest.
func (h *harvest) exportedValue(ref string) string {
	for _, m := range h.verdict.moves {
		if m.ref == ref {
			return m.new
		}
	}
	return h.base.ids[ref]
}

// newIndexIDs are the objects of the index that its last harvest did not have.
func (h *harvest) newIndexIDs() []string {
	if h.listing == nil {
		return nil
	}
	known := map[string]bool{}
	if sum, err := h.v.baseIndexDigest(); err == nil && sum == h.v.state.BaseIndex {
		if b, err := os.ReadFile(h.v.path(listingName)); err == nil {
			if ids, err := gitguard.CheckIndex(b, gitguard.Submodules(b)...); err == nil {
				known = set(ids)
			}
		}
	}
	var fresh []string
	for _, id := range h.indexIDs {
		if !known[id] {
			known[id] = true
			fresh = append(fresh, id)
		}
	}
	return fresh
}

// exportIndex writes the base clone's index of the worktree. It is made anew of the listed entries: what else an index
// can hold (a cache of trees, what was resolved, a name of a second file) could mislead the base clone's own Git.
func (h *harvest) exportIndex(ctx context.Context) error {
	if h.listing == nil {
		return nil
	}
	v := h.v
	if err := h.checkBaseIndex(ctx); err != nil {
		return err
	}
	made, err := h.makeIndex(ctx)
	if err != nil {
		return err
	}
	step("before the index")
	err = v.inMetaFolder(func(m folder) error { return putIndex(m, made) })
	if err != nil {
		return fmt.Errorf("writing the worktree's index in the base clone: %w", err)
	}
	v.state.Listing, v.state.BaseIndex, h.wrote = digest(h.listing), digest(made), true
	step("after the index")
	return writeOwn(v.path(listingName), h.listing)
}

// checkBaseIndex finds an index that somebody changed outside of the session, and keeps it aside.
func (h *harvest) checkBaseIndex(ctx context.Context) error {
	v := h.v
	sum, err := v.baseIndexDigest()
	if err != nil || sum == "" || sum == v.state.BaseIndex {
		return err
	}
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	listing, err := v.listBaseIndex(ctx, s)
	if err != nil {
		return err
	}
	if now := digest(listing); now == v.state.Listing || now == digest(h.listing) {
		return nil
	}
	kept := v.path(asideName) + "/index-" + sum[:12]
	if err := v.setAside(kept); err != nil {
		return err
	}
	h.Conflicts = append(h.Conflicts, Conflict{Ref: "index", Remedy: fmt.Sprintf(
		"the worktree's index was changed outside of the session, and is the session's again; the other is kept: GIT_INDEX_FILE=%s git -C %s ls-files --stage lists it", kept, v.o.Workspace.Repository)})
	return nil
}

func (v *View) setAside(kept string) error {
	if err := os.MkdirAll(filepath.Dir(kept), 0o700); err != nil {
		return fmt.Errorf("keeping the worktree's other index: %w", err)
	}
	var b []byte
	err := v.inMetaFolder(func(m folder) (err error) {
		b, err = m.read("index", mostIndex)
		return err
	})
	if err != nil {
		return err
	}
	return writeOwn(kept, b)
}

// makeIndex has Git make an index of the listed entries.
func (h *harvest) makeIndex(ctx context.Context) ([]byte, error) {
	v := h.v
	owner := v.o.Workspace.Owner
	what := "the workspace's scratch folder"
	if err := inFolder(what, v.path(scratchName), owner, func(d folder) error {
		return errors.Join(d.remove("export"), d.remove("export.lock"))
	}); err != nil {
		return nil, err
	}
	s, err := h.j.inPrivate()
	if err != nil {
		return nil, err
	}
	c := gitjail.Call{
		Args: []string{"update-index", "-z", "--index-info"}, Stdin: bytes.NewReader(h.listing),
		Env: []string{"GIT_INDEX_FILE=" + scratchAt + "/export"},
	}
	if len(h.listing) == 0 {
		// An entry that comes and goes. The index of read-tree --empty names the empty tree, which fsck then misses (Git 2.47
		// does, 2.39 doesn't).
		id, err := s.RunCall(ctx, gitjail.Call{Args: []string{"hash-object", "--stdin"}, Stdin: strings.NewReader("")})
		if err != nil {
			return nil, err
		}
		id = strings.TrimSpace(id)
		c.Stdin = strings.NewReader("100644 " + id + "\tx\x000 " + strings.Repeat("0", len(id)) + "\tx\x00")
	}
	if _, err := s.RunCall(ctx, c); err != nil {
		return nil, err
	}
	var made []byte
	err = inFolder(what, v.path(scratchName), owner, func(d folder) (err error) {
		made, err = d.read("export", mostIndex)
		return err
	})
	return made, err
}

// ownIndex is the name under which a new index is written before it takes its lock: the lock is a second name of that very
// file, which tells it from anybody else's after a kill.
const ownIndex = "sandbox-agent.index"

// putIndex writes an index as Git does, under its lock.
func putIndex(m folder, content []byte) error {
	const lock = "index.lock"
	if err := dropOwnLock(m, lock); err != nil {
		return err
	}
	if err := m.write(ownIndex, content); err != nil {
		return err
	}
	defer func() { _ = m.remove(ownIndex) }() // a later harvest replaces one that stays
	dir := int(m.Fd())
	if err := unix.Linkat(dir, ownIndex, dir, lock, 0); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("%s/%s is there: somebody's Git is at work in the worktree, or was killed; remove it if not (rm): %w", m.Name(), lock, err)
		}
		return m.fail("making", lock, err)
	}
	step("index locked")
	if err := unix.Renameat(dir, lock, dir, "index"); err != nil {
		return m.fail("renaming", lock, err)
	}
	return nil
}

// dropOwnLock removes the lock that a killed harvest left.
func dropOwnLock(m folder, lock string) error {
	own, there, err := m.lstat(ownIndex)
	if err != nil || !there {
		return err
	}
	if st, found, err := m.lstat(lock); err == nil && found && st.Ino == own.Ino && st.Dev == own.Dev {
		return m.remove(lock)
	}
	return nil
}

const (
	// mostLogLine bounds a line of HEAD's log that is brought over, bytes, and mostLogLines how many one harvest brings.
	mostLogLine  = 4 << 10
	mostLogLines = 10_000
	// mostLogTotal is from what size on the base clone's log gets no more lines, bytes: a new workspace copies one as large.
	mostLogTotal = mostSmall
)

// logLine is one line of HEAD's log.
type logLine struct{ old, new, text string }

func isZero(id string) bool { return strings.Trim(id, "0") == "" }

// readLog finds the lines of the session's log of HEAD that the base clone's hasn't. What is no line of a log is left out.
// With the reftable format the base clone's log is no file, and stays its own.
func (h *harvest) readLog() error {
	v := h.v
	if !h.changed[partLogs] && !v.state.Pending || v.hasTables() {
		return nil
	}
	log, err := v.privateLog()
	if err != nil {
		h.say("the log of HEAD is not in the base clone: %v", err)
		return nil
	}
	if h.log = digest(log); h.log == v.state.Log {
		return nil
	}
	base, err := v.baseLog()
	if err != nil {
		h.say("the log of HEAD in the base clone can't be read, and stays as it is: %v", err)
		return nil
	}
	there := map[string]bool{}
	for line := range strings.Lines(string(base)) {
		there[strings.TrimSuffix(line, "\n")] = true
	}
	for line := range strings.Lines(string(log)) {
		if l, ok := parseLogLine(line); ok && !there[l.text] {
			h.logLines = append(h.logLines, l)
		}
	}
	if more := len(h.logLines) - mostLogLines; more > 0 {
		h.say("the oldest %d lines of HEAD's log are not in the base clone: one harvest brings at most %d", more, mostLogLines)
		h.logLines = h.logLines[more:]
	}
	return nil
}

// parseLogLine takes what Git itself would write: whole lines, not overlong, of which at least one id is one.
func parseLogLine(line string) (logLine, bool) {
	text, whole := strings.CutSuffix(line, "\n")
	if !whole || len(text) > mostLogLine {
		return logLine{}, false
	}
	m := logEntry().FindStringSubmatch(text)
	if m == nil || isZero(m[1]) && isZero(m[2]) {
		return logLine{}, false
	}
	return logLine{old: m[1], new: m[2], text: text}, true
}

func (v *View) baseLog() (b []byte, err error) {
	err = v.inMetaFolder(func(m folder) error {
		b, err = m.read("logs/HEAD", mostLog)
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	})
	return b, err
}

func (h *harvest) logIDs() []string {
	ids := map[string]bool{}
	for _, l := range h.logLines {
		ids[l.old], ids[l.new] = true, true
	}
	maps.DeleteFunc(ids, func(id string, _ bool) bool { return isZero(id) })
	return sortedKeys(ids)
}

// exportLog adds the session's lines to the base clone's log of the worktree's HEAD.
func (h *harvest) exportLog(context.Context) error {
	v := h.v
	if len(h.logLines) > 0 {
		if err := h.appendLog(); err != nil {
			return err
		}
	}
	if h.log != "" {
		v.state.Log = h.log
	}
	step("after the log")
	return nil
}

func (h *harvest) appendLog() error {
	v := h.v
	base, err := v.baseLog()
	if err != nil {
		h.say("the log of HEAD in the base clone can't be read, and stays as it is: %v", err)
		return nil
	}
	b := bytes.NewBuffer(base)
	for _, l := range h.logLines {
		b.WriteString(l.text + "\n")
	}
	if b.Len() > mostLogTotal {
		h.say("the log of HEAD in the base clone gets no more lines: it would have more than %d bytes (git reflog expire in the worktree shortens it)", mostLogTotal)
		return nil
	}
	err = v.inMetaFolder(func(m folder) error {
		if err := m.mkdir("logs"); err != nil {
			return err
		}
		return m.writeFrom("logs/HEAD", 0o644, func(w io.Writer) error {
			_, err := w.Write(b.Bytes())
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("writing the log of the worktree's HEAD in the base clone: %w", err)
	}
	h.wrote = true
	return nil
}
