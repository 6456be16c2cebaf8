package gitview

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	sandboxes = "refs/sandboxes/"
	heads     = "refs/heads/"
	stashRef  = "refs/stash"
	// mostIndex bounds an index, bytes.
	mostIndex = 512 << 20
	// mostLog bounds a HEAD's log, bytes.
	mostLog = 64 << 20
	// mostSmall bounds every other file that is copied, bytes, and mostCopied how many there are.
	mostSmall  = 16 << 20
	mostCopied = 10000
)

// Open makes the workspace's private folder, or takes over the one that is there. No command of the session may run. It
// fails with ErrRefused when what is kept belongs to another worktree or layout, and gitjail.ErrGit.
func Open(ctx context.Context, o Options) (*View, error) {
	if o.Layout != mounts.Isolated && o.Layout != mounts.Shared {
		return nil, fmt.Errorf("%w: there is no Git layout %q: name %s or %s", ErrRefused, o.Layout, mounts.Isolated, mounts.Shared)
	}
	v, base := &View{o: o}, o.Base
	v.o.Base = nil
	r, found, err := o.load()
	if err != nil {
		return nil, err
	}
	if found {
		err = r.check(o)
	} else {
		r, err = o.newRecord()
	}
	if err != nil {
		return nil, err
	}
	if err := v.makeFolders(); err != nil {
		return nil, err
	}
	// First: what is made then belongs to this worktree, also when the agent is killed in the middle.
	r.add(o.SessionID)
	v.o.Workspace.Branch = r.settle(o.Workspace.Branch)
	v.sessions = r.Sessions
	if err := writeJSON(v.path(recordName), r); err != nil {
		return nil, err
	}
	if o.Layout == mounts.Shared {
		return v, makeSkeleton(o)
	}
	return v, v.openIsolated(ctx, base)
}

func (v *View) makeFolders() error {
	if err := os.MkdirAll(v.o.Dir, 0o700); err != nil {
		return fmt.Errorf("making the folder of the workspace %s: %w", v.o.Workspace.Worktree, err)
	}
	if _, err := hostfs.MakeFor(v.path(scratchName), v.o.Workspace.Owner); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

func (v *View) openIsolated(ctx context.Context, base *gitjail.Kept) error {
	config, leftOut, err := v.o.Config.Sanitise(gitguard.SanitiseOptions{Hooks: v.o.Hooks})
	if err != nil {
		return err
	}
	v.leftOut = leftOut
	if mounts.Exists(v.Private()) {
		if err := v.loadState(); err != nil {
			return &KeptError{
				Why:    err.Error() + ": harvest can't go on; look at " + v.o.Dir,
				Remedy: fmt.Sprintf(", and delete the workspace (sandbox-agent workspace delete %s)", v.o.Workspace.Worktree),
			}
		}
		// Somebody who makes a session of this worktree would take it for the lock of a Git that is at work.
		if err := v.inMetaFolder(func(m folder) error { return dropOwnLock(m, "index.lock") }); err != nil {
			return err
		}
		if v.o.Live {
			return nil
		}
		return v.writeSealed(v.Private(), config)
	}
	j := v.jails(ctx)
	j.lent = base
	defer j.close()
	return v.build(ctx, j, config)
}

// alternates names the base's objects where they are mounted. By the whole path: "git clone" of a linked worktree takes
// a relative one from another folder (builtin/clone.c, copy_alternates), and the clone has no objects. A line has no
// place for a newline.
func alternates(commonDir string) string {
	if strings.Contains(commonDir, "\n") {
		return "../base-objects\n"
	}
	return commonDir + "/base-objects\n"
}

// build makes the private folder under another name and gives it its own when it is whole.
func (v *View) build(ctx context.Context, j *jails, config []byte) error {
	fresh := v.path(newGitName)
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("removing a half-made Git folder: %w", err)
	}
	if _, err := hostfs.MakeFor(fresh, v.o.Workspace.Owner); err != nil {
		return err
	}
	err := inFolder("the new Git folder", fresh, v.o.Workspace.Owner, func(d folder) error {
		for _, name := range []string{"hooks", "info", "objects/info", "objects/pack", "base-objects", "refs/heads", "refs/tags", "logs/refs", v.meta() + "/logs"} {
			if err := d.mkdir(name); err != nil {
				return err
			}
		}
		return d.write("objects/info/alternates", []byte(alternates(v.o.Workspace.CommonDir)))
	})
	if err == nil {
		err = v.writeSealed(fresh, config)
	}
	if err != nil {
		return err
	}
	// Before anything is read: what changes meanwhile is brought in by the first Refresh.
	if v.state.Base, err = v.printBase(); err != nil {
		return err
	}
	step("folder made")
	if err := v.copyBase(ctx, j, fresh); err != nil {
		return err
	}
	step("base copied")
	if err := v.save(true); err != nil {
		return err
	}
	step("state made")
	if err := os.Rename(fresh, v.Private()); err != nil {
		return fmt.Errorf("giving the new Git folder its name: %w", err)
	}
	step("folder named")
	if err := v.listCopiedIndex(ctx, j); err != nil {
		return err
	}
	if v.state.Clean, err = v.printPrivate(); err != nil {
		return err
	}
	v.settled = true
	return v.save(false)
}

// writeSealed writes what commands can't change, where it is not as it should be already: a mount of a file is of that
// very file.
func (v *View) writeSealed(private string, config []byte) error {
	return inBoth(v.o.Workspace.CommonDir, private, v.o.Workspace.Owner, func(base, d folder) error {
		files := map[string][]byte{"config": config, v.meta() + "/config.worktree": nil}
		for name, must := range map[string]bool{
			"info/exclude": false, "info/attributes": false, v.meta() + "/commondir": true, v.meta() + "/gitdir": true,
		} {
			b, err := base.read(name, mostSmall)
			if errors.Is(err, unix.ENOENT) && !must {
				continue
			}
			if err != nil {
				return fmt.Errorf("%w: %w", ErrRefused, err)
			}
			files[name] = b
		}
		for name, content := range files {
			if now, err := d.read(name, mostSmall); err == nil && string(now) == string(content) {
				continue
			}
			if err := d.write(name, content); err != nil {
				return err
			}
		}
		return v.writeHooks(base, d)
	})
}

// writeHooks copies the repository's hooks where they are to run inside, and takes them away where they are not.
func (v *View) writeHooks(base, d folder) error {
	there, err := d.names("hooks")
	if err != nil {
		return err
	}
	for _, name := range there {
		if err := d.remove("hooks/" + name); err != nil {
			return err
		}
	}
	if !v.o.Hooks {
		return nil
	}
	hooks, err := base.names("hooks")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	for _, name := range hooks {
		f, st, err := base.openFile("hooks/" + name)
		if err != nil && !errors.Is(err, errNotRegular) {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		if err != nil {
			continue // a folder is no hook
		}
		f.Close()
		if strings.HasSuffix(name, ".sample") || st.Mode&0o111 == 0 {
			continue
		}
		content, err := base.read("hooks/"+name, mostSmall)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrRefused, err)
		}
		if err := d.writeMode("hooks/"+name, 0o755, content); err != nil {
			return err
		}
	}
	return nil
}

// copyBase brings refs, HEADs and the worktree's own files into the new folder.
func (v *View) copyBase(ctx context.Context, j *jails, fresh string) error {
	inBase, err := j.inBase()
	if err != nil {
		return err
	}
	if v.text, err = v.listBase(ctx, inBase); err != nil {
		return err
	}
	common, err := headOf(ctx, inBase, nil)
	if err != nil {
		return err
	}
	if v.o.Workspace.Branch != "" {
		v.state.BaseHead = "ref: " + heads + v.o.Workspace.Branch // most likely
	}
	if v.state.BaseHead, err = v.baseHead(ctx, j); err != nil {
		return fmt.Errorf("%w: HEAD of worktree %s names nothing: %w", ErrRefused, v.o.Workspace.Worktree, err)
	}
	v.state.Head = v.state.BaseHead
	table, err := v.listTable(ctx, inBase)
	if err != nil {
		return err
	}
	return inBoth(v.o.Workspace.CommonDir, fresh, v.o.Workspace.Owner, func(base, d folder) error {
		if err := writePackedRefs(d, v.text); err != nil {
			return err
		}
		if err := d.write("HEAD", []byte(common+"\n")); err != nil {
			return err
		}
		if err := v.copyWorktreeFiles(base, d); err != nil {
			return err
		}
		if err := v.writeTable(d, table); err != nil {
			return err
		}
		return d.write(v.meta()+"/HEAD", []byte(v.state.Head+"\n"))
	})
}

// writePackedRefs writes refs as one file: a hundred thousand files would take seconds. Git wants them in the order of
// their bytes. Symbolic refs can't be packed.
func writePackedRefs(d folder, t refText) error {
	err := d.writeFrom("packed-refs", 0o644, func(w io.Writer) error {
		_, err := io.WriteString(w, "# pack-refs with: sorted \n")
		if err == nil {
			_, err = w.Write(t.packed())
		}
		return err
	})
	if err != nil {
		return err
	}
	symbolic := refText{lines: t.lines[t.plain:]}.decode().symbolic
	for _, name := range sortedKeys(symbolic) {
		if err := gitguard.CheckRefName(name); err != nil {
			return err
		}
		if err := d.mkdir(filepath.Dir(name)); err != nil {
			return err
		}
		if err := d.write(name, []byte("ref: "+symbolic[name]+"\n")); err != nil {
			return err
		}
	}
	return nil
}

// copyWorktreeFiles copies what the base clone keeps for the worktree: index, logs, and an unfinished operation's files.
func (v *View) copyWorktreeFiles(base, d folder) error {
	if err := copyTo(base, "shallow", d, "shallow", mostSmall); err != nil {
		return err
	}
	copied := 0
	var in func(path string) error
	in = func(path string) error {
		fd, err := hostfs.Beneath(base.File, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return base.fail("opening", path, err)
		}
		dir := os.NewFile(uintptr(fd), path)
		defer dir.Close()
		entries, err := dir.ReadDir(-1)
		if err != nil {
			return base.fail("reading", path, err)
		}
		for _, e := range entries {
			name := filepath.Join(path, e.Name())
			rel := strings.TrimPrefix(name, v.meta()+"/")
			copied++
			switch {
			case rel == "HEAD" || rel == "commondir" || rel == "gitdir" || rel == "config.worktree" || rel == "locked":
			case rel == tables || rel == "refs/heads": // the latter is a file that says so
			case strings.HasSuffix(rel, ".lock"):
			case copied > mostCopied:
				return fmt.Errorf("%w: %s has more than %d files: finish the operation that is under way in the worktree", ErrRefused, base.Name()+"/"+v.meta(), mostCopied)
			case e.IsDir():
				if err := d.mkdir(name); err != nil {
					return err
				}
				if err := in(name); err != nil {
					return err
				}
			default:
				limit := int64(mostSmall)
				if rel == "index" || rel == "logs/HEAD" {
					limit = mostIndex
				}
				if err := copyTo(base, name, d, name, limit); err != nil {
					return fmt.Errorf("%w: %w: look at it, and remove it", ErrRefused, err)
				}
			}
		}
		return nil
	}
	return in(v.meta())
}

// listCopiedIndex takes note of the entries that base clone and private folder have in common.
func (v *View) listCopiedIndex(ctx context.Context, j *jails) error {
	listing, err := v.listSameIndex(ctx, j)
	if err != nil {
		return fmt.Errorf("%w: the index of worktree %s can't be read: %w", ErrRefused, v.o.Workspace.Worktree, err)
	}
	v.state.Listing = digest(listing)
	if err := writeOwn(v.path(listingName), listing); err != nil {
		return err
	}
	log, err := v.privateLog()
	v.state.Log = digest(log)
	return err
}

// listSameIndex lists the entries of the private index when no command has run yet: in the base clone, whose jail is there,
// if that one's is the same before and after.
func (v *View) listSameIndex(ctx context.Context, j *jails) ([]byte, error) {
	var own []byte
	err := v.inPrivateFolder(func(d folder) (err error) {
		own, err = d.read(v.meta()+"/index", mostIndex)
		return err
	})
	sum := digest(own)
	if is, baseErr := v.baseIndexDigest(); err != nil || baseErr != nil || is != sum {
		return v.listIndex(ctx, j)
	}
	s, err := j.inBase()
	if err != nil {
		return nil, err
	}
	listing, err := v.listBaseIndex(ctx, s)
	if is, baseErr := v.baseIndexDigest(); err != nil || baseErr != nil || is != sum {
		return v.listIndex(ctx, j)
	}
	v.state.BaseIndex = sum
	return listing, nil
}

// listIndex lists the entries of the private index, from a copy that nobody else can write.
func (v *View) listIndex(ctx context.Context, j *jails) ([]byte, error) {
	if err := v.copyIndex(); err != nil {
		return nil, err
	}
	s, err := j.inPrivate()
	if err != nil {
		return nil, err
	}
	out, err := s.RunCall(ctx, gitjail.Call{
		Args: []string{"ls-files", "-z", "--stage"}, Env: []string{"GIT_INDEX_FILE=" + scratchAt + "/index"},
	})
	return []byte(out), err
}

// copyIndex copies the private index to the scratch folder. Without an index there is none there either.
func (v *View) copyIndex() error {
	return inBoth(v.gitFolder(), v.path(scratchName), v.o.Workspace.Owner, func(d, scratch folder) error {
		return copyTo(d, v.meta()+"/index", scratch, "index", mostIndex)
	})
}

func (v *View) privateLog() (b []byte, err error) {
	err = v.inPrivateFolder(func(d folder) error {
		b, err = d.read(v.meta()+"/logs/HEAD", mostLog)
		if errors.Is(err, unix.ENOENT) {
			err = nil
		}
		return err
	})
	return b, err
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
