package hostkernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
)

// Keeper is how every sandbox of a runtime begins and ends on the node, whatever does the work between: the record first, the
// cgroups of its own, and the evidence. A runtime fills it in once.
type Keeper struct {
	// Name is the runtime's.
	Name    string
	Records Records
	// CgroupParent is the cgroup below which its sandboxes live.
	CgroupParent string
	// Points begins the names of the places where tests kill the agent.
	Points string
	// UndoTime bounds how long a failed start waits for its own remains to go.
	UndoTime time.Duration
	// End, unless nil, ends what the runtime has of a sandbox whose init has been seen to end, while its cgroups are there.
	End func(ctx context.Context, rec Record, ev *Evidence) error
	// Parts, unless nil, are what the runtime keeps of a sandbox on disk, beside its folder and its record.
	Parts func(id string) []string
	Log   *slog.Logger
}

// Cgroup is the path of a sandbox's cgroup in every hierarchy.
func (k *Keeper) Cgroup(id string) string { return k.CgroupParent + "/" + id }

// Start is everything of one start that has to be let go of, whatever comes of it.
type Start struct {
	Spec   runtime.Spec
	Record Record
	// Hierarchies are the node's.
	Hierarchies []Hierarchy
	Mounts      *BindMounts
	Slots       *Slots
	UserNS      *os.File
	// Network is set by Isolate when the spec has a network.
	Network runtime.Connection
}

func (s *Start) Close() {
	if s.Mounts != nil {
		s.Mounts.Close()
	}
	if s.Slots != nil {
		s.Slots.Close()
	}
	if s.UserNS != nil {
		s.UserNS.Close()
	}
}

// Admit refuses what no sandbox can be made of, and an id that is taken.
func (k *Keeper) Admit(spec runtime.Spec) error {
	if err := CheckSpec(spec); err != nil {
		return err
	}
	if _, err := k.Records.Read(spec.SandboxID); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("starting sandbox %s: %w: there is one with this id", spec.SandboxID, os.ErrExist)
	}
	return nil
}

// Begin records that there will be a sandbox, and calls start. When that fails, nothing of the sandbox is left.
func (k *Keeper) Begin(ctx context.Context, spec runtime.Spec, start func(*Start) error) error {
	err := k.announced(spec, start)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.UndoTime)
	defer cancel()
	_, cleanErr := k.Remove(clean, runtime.Identity{SandboxID: spec.SandboxID, Dir: spec.Dir})
	return errors.Join(err, cleanErr)
}

func (k *Keeper) announced(spec runtime.Spec, start func(*Start) error) error {
	all, err := Hierarchies()
	if err != nil {
		return err
	}
	boot, err := BootID()
	if err != nil {
		return err
	}
	st := &Start{Spec: spec, Hierarchies: all, Record: Record{Cgroup: k.Cgroup(spec.SandboxID), Identity: runtime.Identity{
		Runtime: k.Name, SandboxID: spec.SandboxID, ContainerID: spec.SandboxID, BootID: boot, Dir: spec.Dir,
		Cgroups: TreeOf(all, k.Cgroup(spec.SandboxID)).Dirs,
	}}}
	defer st.Close()
	if err := k.Records.Write(st.Record); err != nil {
		return err
	}
	crashpoint.At(k.Points + ".announced")
	return start(st)
}

// Found records the container's init. known is its start time (field 22 of /proc/PID/stat); 0: the caller knows that pid can't
// have been taken by another process yet.
func (k *Keeper) Found(st *Start, pid int, known uint64, view *receiptdv1.View) error {
	id := &st.Record.Identity
	start, _, err := ProcStat(pid)
	if err != nil {
		return fmt.Errorf("finding the container's init: %w", err)
	}
	if known != 0 && known != start {
		return fmt.Errorf("finding the container's init: process %d has ended, and another one has its number", pid)
	}
	id.Pid, id.StartTime, id.StartedAt = pid, start, time.Now().UTC()
	if st.Record.View, err = protojson.Marshal(view); err != nil {
		return fmt.Errorf("recording the view: %w", err)
	}
	return k.Records.Write(st.Record)
}

// Load finds a sandbox that an earlier agent started; see runtime.Runtime. What tells is the recorded init.
func (k *Keeper) Load(id runtime.Identity) (*Held, error) {
	rec, err := k.Records.Loaded(id)
	if err != nil {
		return nil, err
	}
	view, err := rec.ViewOf()
	if err != nil {
		return nil, err
	}
	return k.Hold(rec, view, func() {})
}

// Remove ends whatever is left of a sandbox; see runtime.Runtime.
func (k *Keeper) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	if err := CheckSandboxID(id.SandboxID); err != nil {
		return runtime.Evidence{}, err
	}
	rec, err := k.remains(id)
	if err != nil {
		return runtime.Evidence{}, err
	}
	if dir := rec.Identity.Dir; dir != "" && (!filepath.IsAbs(dir) || filepath.Base(dir) != id.SandboxID) {
		return runtime.Evidence{}, fmt.Errorf("removing sandbox %s: %w: the folder %q is not that of this sandbox", id.SandboxID, runtime.ErrNoEvidence, dir)
	}
	ev := NewEvidence(rec.Identity)
	boot, err := BootID()
	if err != nil {
		return ev.Evidence, err
	}
	if rec.Identity.BootID != "" && rec.Identity.BootID != boot {
		ev.Add("boot_id", "the node has been rebooted since: %s, now %s", rec.Identity.BootID, boot)
		rec.TaskAsked = false // nothing of it comes late any more
	} else if rec.Identity.Pid != 0 {
		if err := k.endLoaded(ctx, rec, ev); err != nil {
			return ev.Evidence, err
		}
	}
	if err := k.sweep(ctx, rec, ev); err != nil {
		return ev.Evidence, err
	}
	return ev.Completed(), nil
}

// remains puts together what is known of a sandbox: the caller's record of it, and the runtime's own where the start
// was cut short before the caller learnt the rest.
func (k *Keeper) remains(id runtime.Identity) (Record, error) {
	rec, err := k.Records.Read(id.SandboxID)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		k.Log.Warn("the record of a sandbox can't be read; sweeping by its id", "sandbox", id.SandboxID, "error", err)
	}
	if err != nil {
		rec = Record{Identity: id, TaskAsked: !errors.Is(err, os.ErrNotExist)}
	}
	return rec, rec.Complete(id, k.Name, k.Cgroup(id.SandboxID))
}

// endLoaded ends the init of a sandbox that nobody watches.
func (k *Keeper) endLoaded(ctx context.Context, rec Record, ev *Evidence) error {
	h, err := k.Hold(rec, nil, func() {})
	if errors.Is(err, runtime.ErrNotFound) {
		ev.Add("pidfd", "%s", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrNoEvidence, err)
	}
	defer h.Close()
	return h.end(ctx, ev)
}

// sweep has the runtime end what it has of a sandbox, empties and removes the cgroups, then everything that is kept of it on
// disk, the runtime's record last: as long as there is anything, List names it.
func (k *Keeper) sweep(ctx context.Context, rec Record, ev *Evidence) error {
	id := rec.Identity
	none := func(err error) error {
		return fmt.Errorf("removing sandbox %s: %w: %w", id.SandboxID, runtime.ErrNoEvidence, err)
	}
	if k.End != nil {
		if err := k.End(ctx, rec, ev); err != nil {
			return none(err)
		}
	}
	t := Tree{Dirs: id.Cgroups}
	if err := t.Remove(ctx); err != nil {
		return none(fmt.Errorf("%s: %w", States(t.Pids()), err))
	}
	crashpoint.At(k.Points + ".cgroups-removed")
	ev.Add("cgroup_empty", "no cgroup of it is left in %d hierarchies", len(id.Cgroups))
	for _, path := range k.paths(id) {
		if err := os.RemoveAll(path); err != nil {
			return none(err)
		}
		crashpoint.At(k.Points + ".part-removed")
	}
	ev.Add("deleted", "its container, its folder and its record are removed")
	return nil
}

// paths are all that is kept of a sandbox on disk, in the order in which it goes.
func (k *Keeper) paths(id runtime.Identity) []string {
	var out []string
	if k.Parts != nil {
		out = k.Parts(id.SandboxID)
	}
	if id.Dir != "" {
		out = append(out, id.Dir)
	}
	return append(out, k.Records.Files(id.SandboxID)...)
}
