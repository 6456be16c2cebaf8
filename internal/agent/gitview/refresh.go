package gitview

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// manyRefs is from how many changed refs on they are written as one file instead of one by one.
const manyRefs = 500

// Refresh brings in what changed in the base clone, before a command. It costs a few stats when nothing did. What the
// session changed as well is left as the session has it: the harvest says what to do about it. It fails when the base
// clone can't be read; a private folder that Git can't work in any more is the next harvest's to report, since only a
// command can repair it.
func (v *View) Refresh(ctx context.Context) error {
	if v.o.Layout == mounts.Shared {
		return v.noteLocks()
	}
	if err := v.noteUnharvested(); err != nil {
		return err
	}
	now, err := v.printBase()
	if err != nil {
		return err
	}
	if changed := v.state.Base.changed(now); len(changed) > 0 {
		if err := v.bringIn(ctx, changed[partRefs] && !v.onlyOwn(), now); err != nil {
			return fmt.Errorf("bringing the base clone's changes into the workspace: %w", err)
		}
	}
	v.before, err = v.printPrivate()
	v.settled = false
	return err
}

// noteUnharvested finds what a command left that no harvest has seen: the agent was killed, or the harvest failed.
func (v *View) noteUnharvested() error {
	if v.settled {
		return nil
	}
	now, err := v.printPrivate()
	if err == nil && len(v.state.Clean.changed(now)) > 0 {
		v.state.Pending = true
	}
	return err
}

// bringIn makes the private folder follow the base clone, which had the print now or a later one; alsoRefs says whether
// that one's refs may have changed.
func (v *View) bringIn(ctx context.Context, alsoRefs bool, now print) error {
	j := v.jails(ctx)
	defer j.close()
	var err error
	if alsoRefs {
		err = v.bringInRefs(ctx, j)
	}
	if err == nil {
		err = v.bringInWorktree(ctx, j)
	}
	var private privateError
	switch {
	case errors.As(err, &private) && ctx.Err() == nil:
		v.state.HeldBack, v.state.Pending = private.Error(), true
	case err != nil:
		return err
	default:
		v.state.HeldBack, v.state.Base = "", now
	}
	if v.settled && !v.state.Pending {
		if v.state.Clean, err = v.printPrivate(); err != nil {
			return err
		}
	}
	return v.save(alsoRefs)
}

// privateError is a failure of what a command can break.
type privateError struct{ error }

func (e privateError) Unwrap() error { return e.error }

// bringInRefs gives the private folder the refs that the base clone changed and the session didn't.
func (v *View) bringInRefs(ctx context.Context, j *jails) error {
	inBase, err := j.inBase()
	if err != nil {
		return err
	}
	text, err := v.listBase(ctx, inBase)
	if err != nil {
		return err
	}
	v.own = nil
	apart := refs{}
	if v.known == nil && bytes.Equal(text.lines, v.text.lines) {
		v.setApart(apart)
		return nil
	}
	base, known := text.decode(), v.snapshot()
	if maps.Equal(base.ids, known.ids) && maps.Equal(base.symbolic, known.symbolic) {
		v.setApart(apart)
		return nil
	}
	s, err := j.inPrivate()
	if err != nil {
		return err
	}
	private, err := v.listPrivateRefs(ctx, s)
	if err != nil {
		return privateError{err}
	}
	var moves, gone []move
	agreed := refs{}
	for _, name := range changedRefs(known.ids, base.ids) {
		was, is, has := known.ids[name], base.ids[name], private.ids[name]
		switch {
		case has == is:
			agreed[name] = is
			if is == "" && known.symbolic[name] == "" {
				gone = append(gone, move{ref: name, old: was})
			}
		case has == was:
			agreed[name] = is
			moves = append(moves, move{ref: name, old: has, new: is})
		default:
			apart[name] = is
		}
	}
	if err := v.dropDangling(ctx, s, gone); err != nil {
		return privateError{err}
	}
	if len(moves) > manyRefs {
		err = v.rewriteRefs(ctx, s, private, moves)
	} else {
		err = runMoves(ctx, s, []string{"GIT_DIR=" + v.o.Workspace.CommonDir}, "sandbox-agent: changed in the base clone", moves)
	}
	if err == nil {
		err = v.bringInSymbolic(ctx, s, base.symbolic, private.symbolic)
	}
	if err != nil {
		return privateError{err}
	}
	step("refs brought in")
	for name, id := range agreed {
		known.set(name, id)
	}
	v.setApart(apart)
	return nil
}

// dropDangling deletes refs that the base clone has no more, and its gc took the objects of: Git does not list such a ref,
// but it stops a gc in the session. Those that the session deleted itself are not there, and not missed.
func (v *View) dropDangling(ctx context.Context, s *gitjail.Session, gone []move) error {
	for _, m := range gone[:min(len(gone), manyRefs)] {
		if _, err := s.Do(ctx, gitjail.Call{Args: []string{"update-ref", "-d", m.ref, m.old}}); err != nil {
			return err
		}
	}
	return nil
}

// setApart takes note of what the base clone has otherwise; where that is news, the harvest looks at it.
func (v *View) setApart(apart refs) {
	if !maps.Equal(apart, v.state.Apart) {
		v.state.Pending = true
	}
	v.state.Apart = apart
}

func (s snapshot) set(name, id string) {
	if id == "" {
		delete(s.ids, name)
	} else {
		s.ids[name] = id
	}
}

// rewriteRefs writes all private refs as one file, with the moves made.
func (v *View) rewriteRefs(ctx context.Context, s *gitjail.Session, private snapshot, moves []move) error {
	if _, err := s.Run(ctx, "pack-refs", "--all", "--prune"); err != nil {
		return err
	}
	packed := snapshot{ids: maps.Clone(private.ids)}
	maps.DeleteFunc(packed.ids, func(name, _ string) bool { return perWorktree(name) })
	for _, m := range moves {
		packed.set(m.ref, m.new)
	}
	return v.inPrivateFolder(func(d folder) error { return writePackedRefs(d, packed.encode()) })
}

func (v *View) bringInSymbolic(ctx context.Context, s *gitjail.Session, base, private refs) error {
	known := v.snapshot().symbolic
	for _, name := range changedRefs(known, base) {
		was, is, has := known[name], base[name], private[name]
		if has != was && has != is {
			continue
		}
		args := []string{"symbolic-ref", name, is}
		if is == "" {
			args = []string{"symbolic-ref", "-d", name}
		}
		if has != is {
			if _, err := s.Run(ctx, args...); err != nil {
				return err
			}
		}
		if is == "" {
			delete(known, name)
		} else {
			known[name] = is
		}
	}
	return nil
}

// bringInWorktree copies the worktree's HEAD and index where the base clone's were changed and the session's weren't.
func (v *View) bringInWorktree(ctx context.Context, j *jails) error {
	head, err := v.baseHead(ctx, j)
	if err != nil {
		return err
	}
	if head != v.state.BaseHead {
		err := v.bringInHead(head)
		if err != nil {
			return err
		}
	}
	sum, err := v.baseIndexDigest()
	if err != nil || sum == v.state.BaseIndex {
		return err
	}
	return v.bringInIndex(ctx, j, sum)
}

// baseHead is HEAD of the worktree in the base clone. Git is asked only when the file is not as it was.
func (v *View) baseHead(ctx context.Context, j *jails) (string, error) {
	var now []byte
	err := v.inMetaFolder(func(d folder) (err error) {
		now, err = d.read("HEAD", mostSmall)
		return err
	})
	if err == nil && string(now) == v.state.BaseHead+"\n" {
		return v.state.BaseHead, nil
	}
	s, err := j.inBase()
	if err != nil {
		return "", err
	}
	return headOf(ctx, s, v.inMeta())
}

func (v *View) bringInHead(head string) error {
	private, err := v.privateHead()
	if err != nil {
		return privateError{err}
	}
	if private != v.state.Head {
		v.state.Pending = true // the harvest finds the two apart
		return nil
	}
	err = v.inPrivateFolder(func(d folder) error { return d.write(v.meta()+"/HEAD", []byte(head+"\n")) })
	if err != nil {
		return privateError{err}
	}
	step("HEAD brought in")
	v.state.Head, v.state.BaseHead = head, head
	return nil
}

// baseIndexDigest is of the base clone's index file; empty when there is none.
func (v *View) baseIndexDigest() (sum string, err error) {
	err = v.inMetaFolder(func(d folder) error {
		b, err := d.read("index", mostIndex)
		switch {
		case errors.Is(err, unix.ENOENT):
			return nil
		case err == nil:
			sum = digest(b)
		}
		return err
	})
	return sum, err
}

func (v *View) bringInIndex(ctx context.Context, j *jails, sum string) error {
	base, err := j.inBase()
	if err != nil {
		return err
	}
	listing, err := v.listBaseIndex(ctx, base)
	if err != nil {
		return err
	}
	if digest(listing) == v.state.Listing { // Git noted other times in it
		v.state.BaseIndex = sum
		return nil
	}
	mine, err := v.listIndex(ctx, j)
	if err != nil {
		return privateError{err}
	}
	if digest(mine) != v.state.Listing {
		v.state.Pending = true // the harvest finds the two apart
		return nil
	}
	// A log that is not the one both had, or is none that can be read, stays as it is: the index does without.
	log, err := v.privateLog()
	sameLog := err == nil && digest(log) == v.state.Log
	err = inBoth(v.o.Workspace.CommonDir, v.Private(), v.o.Workspace.Owner, func(base, d folder) error {
		index, head := v.meta()+"/index", v.meta()+"/logs/HEAD"
		if err := copyTo(base, index, d, index, mostIndex); err != nil {
			return err
		}
		sameLog = sameLog && copyTo(base, head, d, head, mostLog) == nil
		return nil
	})
	if err != nil {
		return privateError{err}
	}
	if sameLog {
		if log, err = v.privateLog(); err != nil {
			return privateError{err}
		}
		v.state.Log = digest(log)
	}
	step("index brought in")
	v.state.Listing, v.state.BaseIndex = digest(listing), sum
	return writeOwn(v.path(listingName), listing)
}

func (v *View) listBaseIndex(ctx context.Context, base *gitjail.Session) ([]byte, error) {
	out, err := base.RunCall(ctx, gitjail.Call{Args: []string{"ls-files", "-z", "--stage"}, Env: v.inMeta()})
	return []byte(out), err
}

// copyTo copies one regular file of at most limit bytes; where there is none, none is left.
func copyTo(from folder, name string, to folder, target string, limit int64) error {
	f, st, err := from.openFile(name)
	if errors.Is(err, unix.ENOENT) {
		return to.remove(target)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if st.Size > limit {
		return from.fail("copying", name, fmt.Errorf("it has %d bytes, more than %d", st.Size, limit))
	}
	return to.writeFrom(target, 0o644, func(w io.Writer) error {
		_, err := io.Copy(w, io.LimitReader(f, limit))
		return err
	})
}

// move is a change of one ref; an empty id is none.
type move struct{ ref, old, new string }

// runMoves makes all moves or none. Where a name that goes is in the way of one that comes ("a" and "a/b"), the former
// go first, by themselves: Git refuses both in one transaction.
func runMoves(ctx context.Context, s *gitjail.Session, env []string, why string, moves []move) error {
	for _, part := range apartByName(moves) {
		if len(part) == 0 {
			continue
		}
		var b strings.Builder
		for _, m := range part {
			b.WriteString(m.line())
		}
		_, err := s.RunCall(ctx, gitjail.Call{Args: []string{"update-ref", "-m", why, "--stdin"}, Stdin: strings.NewReader(b.String()), Env: env})
		if err != nil {
			return err
		}
	}
	return nil
}

// anyOld stands for a ref's old value that doesn't matter.
const anyOld = "any"

func (m move) line() string {
	switch {
	case m.new == "" && m.old == anyOld:
		return "delete " + m.ref + "\n"
	case m.new == "":
		return "delete " + m.ref + " " + m.old + "\n"
	case m.old == anyOld:
		return "update " + m.ref + " " + m.new + "\n"
	case m.old == "":
		return "create " + m.ref + " " + m.new + "\n"
	default:
		return "update " + m.ref + " " + m.new + " " + m.old + "\n"
	}
}

func apartByName(moves []move) [2][]move {
	come, above := map[string]bool{}, map[string]bool{} // names that come, and the folders above them
	for _, m := range moves {
		if m.new != "" {
			come[m.ref] = true
			for dir := range foldersOf(m.ref) {
				above[dir] = true
			}
		}
	}
	var out [2][]move
	for _, m := range moves {
		clashes := above[m.ref]
		for dir := range foldersOf(m.ref) {
			clashes = clashes || come[dir]
		}
		if m.new == "" && clashes {
			out[0] = append(out[0], m)
		} else {
			out[1] = append(out[1], m)
		}
	}
	return out
}

// foldersOf gives the names that can't be refs while ref is one: "refs/a/b/c" has "refs/a/b" and "refs/a".
func foldersOf(ref string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := strings.LastIndexByte(ref, '/'); i > 0; i = strings.LastIndexByte(ref[:i], '/') {
			if !yield(ref[:i]) {
				return
			}
		}
	}
}
