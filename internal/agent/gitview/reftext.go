package gitview

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
)

// refText is refs as text: a line "ID NAME" for each, which is a line of a packed-refs file too, then a line "@TARGET NAME"
// for each symbolic one, both in the order of the names' bytes. A hundred thousand refs are 7 MB of it. As maps they are
// several times that, and the garbage collector looks at each: only what has to look names up makes those.
type refText struct {
	lines []byte
	// plain is how many bytes the lines of those take that are not symbolic.
	plain int
}

// parseRefText checks what was kept as a file.
func parseRefText(b []byte) (refText, error) {
	t := refText{lines: b}
	for line := range bytes.Lines(b) {
		switch {
		case !bytes.Contains(line, []byte(" ")) || line[len(line)-1] != '\n':
			return t, fmt.Errorf("line %q is no ref", line)
		case line[0] != '@':
			t.plain += len(line)
		}
	}
	return t, nil
}

// packed are the lines of a packed-refs file.
func (t refText) packed() []byte { return t.lines[:t.plain] }

// decode makes maps of it.
func (t refText) decode() snapshot {
	text := string(t.lines) // the maps' words are parts of it
	s := snapshot{ids: make(refs, bytes.Count(t.packed(), []byte("\n"))), symbolic: refs{}}
	for line := range strings.Lines(text) {
		value, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if target, isSymbolic := strings.CutPrefix(value, "@"); isSymbolic {
			s.symbolic[name] = target
		} else {
			s.ids[name] = value
		}
	}
	return s
}

// encode is what decode makes maps of.
func (s snapshot) encode() refText {
	var b bytes.Buffer
	b.Grow(len(s.ids) * 80) // an id and a name of some length
	line := func(words ...string) {
		for _, w := range words {
			b.WriteString(w)
		}
		b.WriteByte('\n')
	}
	for _, name := range sortedKeys(s.ids) {
		line(s.ids[name], " ", name)
	}
	plain := b.Len()
	for _, name := range sortedKeys(s.symbolic) {
		line("@", s.symbolic[name], " ", name)
	}
	return refText{lines: b.Bytes(), plain: plain}
}

// refFormat is how for-each-ref prints a ref for refLines; what is no symbolic ref has nothing after the last blank.
const refFormat = "%(objectname) %(refname) %(symref)"

// refLines takes what for-each-ref prints, as it comes. It takes all of it, so that Git never waits.
type refLines struct {
	// left says which refs are counted and nothing else.
	left func(name []byte) bool
	// most bounds what is kept, bytes.
	most int

	plain, symbolic bytes.Buffer
	rest            []byte // the beginning of a line
	last            []byte // the name before
	disorder        bool   // a packed-refs file that is not sorted, and says that it is, is printed as it is
	counted         int
	err             error
}

func (l *refLines) Write(p []byte) (int, error) {
	n := len(p)
	for l.err == nil {
		line, after, whole := bytes.Cut(p, []byte("\n"))
		if !whole {
			l.rest = append(l.rest, p...)
			l.err = l.full()
			break
		}
		if len(l.rest) > 0 {
			line = append(l.rest, line...)
			l.rest = line[:0]
		}
		l.err = l.line(line)
		p = after
	}
	return n, nil
}

func (l *refLines) line(line []byte) error {
	id, rest, ok := bytes.Cut(line, []byte(" "))
	name, symref, ok2 := bytes.Cut(rest, []byte(" "))
	switch {
	case !ok || !ok2:
		return fmt.Errorf("%w: for-each-ref printed the line %q", gitjail.ErrGit, line)
	case l.left(name):
		l.counted++
	case len(symref) > 0:
		writeRef(&l.symbolic, "@", symref, name)
	default:
		l.disorder = l.disorder || bytes.Compare(name, l.last) <= 0
		l.last = append(l.last[:0], name...)
		writeRef(&l.plain, "", id, name)
	}
	return l.full()
}

// full says whether more was printed than is kept.
func (l *refLines) full() error {
	if l.plain.Len()+l.symbolic.Len()+len(l.rest) > l.most {
		return fmt.Errorf("%w: for-each-ref printed more than is kept (%d bytes)", gitjail.ErrGit, l.most)
	}
	return nil
}

func writeRef(b *bytes.Buffer, mark string, value, name []byte) {
	b.WriteString(mark)
	b.Write(value)
	b.WriteByte(' ')
	b.Write(name)
	b.WriteByte('\n')
}

// text is all that was printed.
func (l *refLines) text() (refText, error) {
	if l.err == nil && len(l.rest) > 0 {
		l.err = fmt.Errorf("%w: for-each-ref ended within the line %q", gitjail.ErrGit, l.rest)
	}
	if l.err != nil {
		return refText{}, l.err
	}
	plain := l.plain.Len()
	l.plain.Write(l.symbolic.Bytes())
	t := refText{lines: l.plain.Bytes(), plain: plain}
	if l.disorder {
		t = t.decode().encode()
	}
	return t, nil
}

func isSandboxes(name []byte) bool { return bytes.HasPrefix(name, []byte(sandboxes)) }

// notShared are the base clone's refs that a workspace does not share. Stashes it has of its own, for the base's reflog of
// them is not here, and so has every worktree the refs of its unfinished operations (git-worktree(1), refs).
func notShared(name []byte) bool {
	return isSandboxes(name) || string(name) == stashRef || perWorktree(string(name))
}

// listText has Git list refs. room is about how many bytes they are, if that is known.
func listText(ctx context.Context, s *gitjail.Session, l *refLines, room int, env []string, options ...string) (refText, error) {
	l.plain.Grow(min(room, l.most))
	r, err := s.Do(ctx, gitjail.Call{
		Args: append([]string{"for-each-ref", "--format=" + refFormat}, options...), Stdout: l, Env: env,
	})
	switch {
	case err != nil:
		return refText{}, err
	case r.ExitCode != 0:
		return refText{}, fmt.Errorf("%w: git for-each-ref: exit code %d: %s", gitjail.ErrGit, r.ExitCode, r.Stderr)
	}
	return l.text()
}

// listBase lists the refs that the workspace shares with the base clone.
func (v *View) listBase(ctx context.Context, s *gitjail.Session) (refText, error) {
	room := 0
	err := v.inBaseFolder(func(d folder) error {
		st, _, err := d.lstat("packed-refs") // its lines are as long as ours
		room = int(min(max(st.Size, 0), keptOutput)) + 4096
		return err
	})
	if err != nil {
		return refText{}, err
	}
	return listText(ctx, s, &refLines{left: notShared, most: keptOutput}, room, nil)
}
