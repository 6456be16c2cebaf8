package gitview

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
)

const (
	// fewObjects is up to how many objects are written one by one; more become a pack (git-config(1), receive.unpackLimit).
	fewObjects = 100
	// mostNegatives bounds how many ids tell Git what the base clone has.
	mostNegatives = 1000
	// mostParts bounds how many tips are tried by themselves when all together fail.
	mostParts = 64
)

// objectTypes asks a repository which of the ids it has, and of which type they are.
func objectTypes(ctx context.Context, s *gitjail.Session, ids []string) (map[string]string, error) {
	types := map[string]string{}
	if len(ids) == 0 {
		return types, nil
	}
	out, err := s.RunCall(ctx, gitjail.Call{
		Args: []string{"cat-file", "--batch-check=%(objectname) %(objecttype)", "--buffer"}, Stdin: strings.NewReader(strings.Join(ids, "\n") + "\n"),
	})
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(out) {
		id, kind, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if kind == "missing" {
			kind = ""
		}
		types[id] = kind
	}
	return types, nil
}

// tips are the ids whose objects a harvest brings over, the most important first.
type tips struct {
	groups [][]string
	// has are ids that the base clone has anyway, with all that they need.
	has []string
}

// transfer brings objects over: packed in the private jail, checked and stored in the base clone's, joined by a pipe. When
// not all can be had, for a command may have broken or forged some, each group is tried by itself: failed are the ids of
// those that did not arrive, and why is the first failure.
func (j *jails) transfer(ctx context.Context, t tips) (objects uint64, failed map[string]bool, why error) {
	all := slices.Concat(t.groups...)
	if len(all) == 0 {
		return 0, nil, nil
	}
	objects, why = j.transferOne(ctx, all, t.has)
	if why == nil {
		return objects, nil, nil
	}
	failed = set(all)
	if ctx.Err() != nil || len(t.groups) == 1 {
		return objects, failed, why
	}
	for _, group := range t.groups[:min(len(t.groups), mostParts)] {
		n, err := j.transferOne(ctx, group, t.has)
		switch {
		case ctx.Err() != nil:
			return objects, failed, why
		case err == nil:
			objects += n
			for _, id := range group {
				delete(failed, id)
			}
		}
	}
	return objects, failed, why
}

func set(ids []string) map[string]bool {
	out := map[string]bool{}
	for _, id := range ids {
		out[id] = true
	}
	return out
}

func (j *jails) transferOne(ctx context.Context, ids, has []string) (uint64, error) {
	// A jail that failed may have ended.
	private, err := j.inPrivate()
	if err != nil {
		return 0, err
	}
	base, err := j.inBase()
	if err != nil {
		return 0, err
	}
	var stdin strings.Builder
	for _, id := range ids {
		stdin.WriteString(id + "\n")
	}
	for _, id := range has {
		stdin.WriteString("^" + id + "\n")
	}
	r, w, err := blockingPipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	packed := make(chan error, 1)
	go func() {
		_, err := private.RunCall(ctx, gitjail.Call{
			Args:  []string{"pack-objects", "--revs", "--local", "--stdout", "-q", "--delta-base-offset"},
			Stdin: strings.NewReader(stdin.String()), Stdout: w, Timeout: transferTimeout,
		})
		w.Close() // done already, unless the call was never sent
		packed <- err
	}()
	n, stored := j.receive(ctx, base, r, stdin.String())
	r.Close() // ends a packing whose objects nobody wants
	err = <-packed
	if private.Ended() {
		j.dropPrivate()
	}
	if base.Ended() {
		j.base.Close()
		j.base = nil
	}
	if err != nil {
		return 0, fmt.Errorf("packing the session's objects: %w", err)
	}
	return uint64(n), stored
}

// receive takes the objects of a pack into the base clone, all of them or none. wanted are the tips and what the base clone
// has, as rev-list reads them.
func (j *jails) receive(ctx context.Context, base *gitjail.Session, r *os.File, wanted string) (n uint32, err error) {
	name, err := j.v.incoming()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, j.v.dropIncoming()) }()
	env := j.v.into(name)
	if n, err = store(ctx, base, r, env); err != nil {
		return 0, err
	}
	// What was packed is what the session's objects said, and a command may have put others in their place: whether all is
	// there now is for the base clone to say.
	_, err = base.RunCall(ctx, gitjail.Call{
		Args: []string{"rev-list", "--objects", "--quiet", "--ignore-missing", "--stdin"}, Stdin: strings.NewReader(wanted), Env: env, Timeout: transferTimeout,
	})
	if err != nil {
		return 0, fmt.Errorf("looking for all that the session's objects need: %w", err)
	}
	step("objects checked")
	return n, j.v.accept(name)
}

// store reads a pack's header, as git receive-pack does, and lets Git store the rest: with the check that every object
// is sound and everything that it names is there. Git has written objects also when the check fails.
func store(ctx context.Context, base *gitjail.Session, r *os.File, env []string) (uint32, error) {
	var header [12]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, fmt.Errorf("%w: no pack came: %w", gitjail.ErrGit, err)
	}
	version, n := binary.BigEndian.Uint32(header[4:]), binary.BigEndian.Uint32(header[8:])
	if string(header[:4]) != "PACK" {
		return 0, fmt.Errorf("%w: what came is no pack", gitjail.ErrGit)
	}
	if n == 0 {
		_, err := io.Copy(io.Discard, io.LimitReader(r, 64)) // the checksum alone
		return 0, err
	}
	given := "--pack_header=" + strconv.FormatUint(uint64(version), 10) + "," + strconv.FormatUint(uint64(n), 10)
	args := []string{"unpack-objects", given, "--strict", "-q"}
	if n > fewObjects {
		args = []string{"index-pack", "--stdin", "--strict", "--fix-thin", given}
	}
	if _, err := base.RunCall(ctx, gitjail.Call{Args: args, Stdin: r, Env: env, Timeout: transferTimeout}); err != nil {
		return 0, fmt.Errorf("storing the session's objects in the base clone: %w", err)
	}
	return n, nil
}

// blockingPipe is for two programs: os.Pipe's would fail their reads when nothing is there yet.
func blockingPipe() (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("making a pipe: %w", errors.Join(err, gitjail.ErrGit))
	}
	return os.NewFile(uintptr(fds[0]), "pack"), os.NewFile(uintptr(fds[1]), "pack"), nil
}

// negatives are ids that the base clone has: its own branch of the session first, then other branches.
func (v *View) negatives(base refs) []string {
	var out []string
	seen := map[string]bool{}
	add := func(id string) {
		if id != "" && !seen[id] && len(out) < mostNegatives {
			seen[id] = true
			out = append(out, id)
		}
	}
	add(base[v.branch()])
	for _, onlyHeads := range []bool{true, false} {
		for name, id := range base {
			if strings.HasPrefix(name, heads) == onlyHeads {
				add(id)
			}
		}
	}
	return out
}

// branch is the session's own branch, as a ref; empty when the worktree's HEAD was detached.
func (v *View) branch() string {
	if v.o.Workspace.Branch == "" {
		return ""
	}
	return heads + v.o.Workspace.Branch
}
