package hostkernel

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Record is what a runtime keeps of one sandbox, from before anything of it exists until all of it is gone. It is
// not synced: after a reboot there is nothing left to find, and a restarted agent reads it from the page cache.
type Record struct {
	Identity runtime.Identity `json:"identity"`
	// Cgroup is the sandbox's cgroup path, the same in every hierarchy.
	Cgroup string          `json:"cgroup"`
	View   json.RawMessage `json:"view,omitempty"`
	// TaskAsked says that another daemon has been asked for the sandbox's processes, which may come after its answer is
	// given up.
	TaskAsked bool `json:"taskAsked,omitempty"`
	// VM is what a runtime of virtual machines has found of the sandbox's on the node, in its own form.
	VM json.RawMessage `json:"vm,omitempty"`
}

// unfinished ends the name of a record that is being written; an agent that is killed then leaves it.
const unfinished = "~"

// Records is the folder of a runtime's records.
type Records string

func (r Records) path(id string) string {
	return filepath.Join(string(r), id+".json")
}

// Files are all that there may be of a sandbox's record, the record itself last.
func (r Records) Files(id string) []string {
	path := r.path(id)
	return []string{path + unfinished, path}
}

// recordedIDs are the sandboxes of which the names in the folder of records tell, also those of unfinished ones alone.
func recordedIDs(names []string) []string {
	var ids []string
	for _, name := range names {
		if id, ok := strings.CutSuffix(strings.TrimSuffix(name, unfinished), ".json"); ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// List names the sandboxes of which there is any record, also an unfinished one.
func (r Records) List() ([]string, error) {
	des, err := os.ReadDir(string(r))
	if err != nil {
		return nil, fmt.Errorf("listing sandboxes: %w", err)
	}
	names := make([]string, len(des))
	for i, de := range des {
		names[i] = de.Name()
	}
	return recordedIDs(names), nil
}

// Write keeps a record, in the place of an earlier one.
func (r Records) Write(rec Record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("writing the record of sandbox %s: %w", rec.Identity.SandboxID, err)
	}
	path := r.path(rec.Identity.SandboxID)
	if err := os.WriteFile(path+unfinished, b, 0o600); err != nil {
		return fmt.Errorf("writing the record of sandbox %s: %w", rec.Identity.SandboxID, err)
	}
	if err := os.Rename(path+unfinished, path); err != nil {
		return fmt.Errorf("writing the record of sandbox %s: %w", rec.Identity.SandboxID, err)
	}
	return nil
}

// Read wraps os.ErrNotExist when there is none.
func (r Records) Read(id string) (Record, error) {
	var rec Record
	b, err := os.ReadFile(r.path(id))
	if err != nil {
		return rec, fmt.Errorf("reading the record of sandbox %s: %w", id, err)
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return rec, fmt.Errorf("reading the record of sandbox %s: %w", id, err)
	}
	return rec, nil
}

// ViewOf is the view that was recorded.
func (rec Record) ViewOf() (*receiptdv1.View, error) {
	v := &receiptdv1.View{}
	if err := protojson.Unmarshal(rec.View, v); err != nil {
		return nil, fmt.Errorf("reading the view of sandbox %s: %w", rec.Identity.SandboxID, err)
	}
	return v, nil
}

// CheckSandboxID keeps an id from being a path.
func CheckSandboxID(id string) error {
	if id == "" || len(id) > 64 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return fmt.Errorf("sandbox id %q: only a-z, 0-9 and - are allowed, 1 to 64 of them", id)
	}
	return nil
}

// BootID is this boot of the node (random(4)).
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// ProcStat is what identifies a process: field 22 of /proc/PID/stat, and its state (field 3). os.ErrNotExist: no such
// process.
func ProcStat(pid int) (startTime uint64, state byte, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStat(string(b))
}

// parseStat reads a /proc/PID/stat. The second field is a name that may hold blanks and parentheses: what counts
// begins after the last one (proc_pid_stat(5)).
func parseStat(stat string) (startTime uint64, state byte, err error) {
	i := strings.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, 0, errors.New("parsing a /proc/PID/stat: no name in it")
	}
	f := strings.Fields(stat[i+1:])
	if len(f) < 20 || len(f[0]) != 1 {
		return 0, 0, errors.New("parsing a /proc/PID/stat: too few fields")
	}
	startTime, err = strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("parsing a /proc/PID/stat: %w", err)
	}
	return startTime, f[0][0], nil
}

// Loaded gives the record of a sandbox that runs as far as the record tells, and is the one that the caller has recorded.
// ErrNotFound: there is none, or its init can't be running any more.
func (r Records) Loaded(id runtime.Identity) (Record, error) {
	if err := CheckSandboxID(id.SandboxID); err != nil {
		return Record{}, err
	}
	rec, err := r.Read(id.SandboxID)
	if errors.Is(err, os.ErrNotExist) {
		return Record{}, fmt.Errorf("loading sandbox %s: %w", id.SandboxID, runtime.ErrNotFound)
	}
	if err != nil {
		return Record{}, err
	}
	if id.Pid != 0 && (id.Pid != rec.Identity.Pid || id.StartTime != rec.Identity.StartTime || id.BootID != rec.Identity.BootID) {
		return Record{}, fmt.Errorf("loading sandbox %s: the container that was recorded (pid %d, start time %d, boot %s) is not the one of this id (pid %d, start time %d, boot %s)",
			id.SandboxID, id.Pid, id.StartTime, id.BootID, rec.Identity.Pid, rec.Identity.StartTime, rec.Identity.BootID)
	}
	boot, err := BootID()
	if err != nil {
		return Record{}, err
	}
	if rec.Identity.Pid == 0 || rec.Identity.BootID != boot {
		return Record{}, fmt.Errorf("loading sandbox %s: %w: it did not finish starting, or the node was rebooted", id.SandboxID, runtime.ErrNotFound)
	}
	return rec, nil
}

// Complete adds to a runtime's record, which may be empty, what the caller has recorded of the sandbox, and where it may be
// in the cgroups of today. name is the runtime's, cgroup where it puts this sandbox.
func (rec *Record) Complete(id runtime.Identity, name, cgroup string) error {
	if id.Pid != 0 {
		dirs := rec.Identity.Cgroups
		rec.Identity = id
		rec.Identity.Cgroups = append(append([]string(nil), id.Cgroups...), dirs...)
	}
	if rec.Identity.Dir == "" {
		rec.Identity.Dir = id.Dir
	}
	rec.Cgroup = cgroup
	all, err := Hierarchies()
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("%w: no cgroup hierarchy is mounted, so nothing can be seen of sandbox %s", runtime.ErrNoEvidence, id.SandboxID)
	}
	// Also where an earlier agent, with another cgroup parent, has put it. Nothing but a cgroup of this very id.
	rec.Identity.Cgroups = slices.DeleteFunc(unique(append(rec.Identity.Cgroups, TreeOf(all, cgroup).Dirs...)),
		func(dir string) bool { return filepath.Base(dir) != id.SandboxID })
	rec.Identity.Runtime, rec.Identity.ContainerID = name, id.SandboxID
	return nil
}

func unique(list []string) []string {
	var out []string
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
