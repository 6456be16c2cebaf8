package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// KataOptions say where Kata is looked for. The zero value is where it is installed by kata-deploy or a package.
type KataOptions struct {
	// Places' handler and containerd's PATH are found out.
	Places kata.Places
	// RunDirs replace the folders that hold the shims' management sockets.
	RunDirs []string
}

// kataGuest is what Kata needs.
var kataGuest = guest{before: judgeKata, change: kataSpec, found: findVM}

// kataInstalled is an installation that was judged, and may be used.
type kataInstalled struct {
	shim   kata.ShimInfo
	config kata.Config
	// containerd is its process; its shims see its mounts.
	containerd int
}

// judgeKata judges the installation before each sandbox: it may be another than a moment ago. The shim is then given the very
// configuration that was judged.
func judgeKata(ctx context.Context, r *Runtime) error {
	k, err := r.findKata(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	environ, err := environOf(k.containerd)
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	findings := append(kata.Judge(k.shim, k.config), kata.JudgeEnvironment(environ)...)
	if err := errors.Join(kata.Refused(findings), kata.CheckFiles(k.config)); err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	r.judged.Store(k)
	return nil
}

// findKata finds and reads the installation that containerd's shims are of.
func (r *Runtime) findKata(ctx context.Context) (*kataInstalled, error) {
	k := &kataInstalled{}
	var p kata.Places
	var err error
	if p, k.containerd, err = r.kataPlaces(ctx); err != nil {
		return nil, err
	}
	if k.shim, err = kata.Find(ctx, p); err != nil {
		return nil, err
	}
	path, err := kata.FindConfig(p, k.shim)
	if err != nil {
		return nil, err
	}
	k.config, err = kata.ReadConfig(path, k.shim.Flavour)
	return k, err
}

// kataPlaces completes the configured places with what containerd's process tells.
func (r *Runtime) kataPlaces(ctx context.Context) (p kata.Places, containerd int, err error) {
	p = r.opts.Kata.Places
	p.Handler = r.opts.Handler
	if containerd, err = r.containerdPid(ctx); err != nil {
		return p, 0, err
	}
	environ, err := environOf(containerd)
	if err != nil {
		return p, 0, err
	}
	if p.ContainerdPATH == "" {
		p.ContainerdPATH = pathIn(environ)
	}
	return p, containerd, nil
}

// containerdPid is containerd's process.
func (r *Runtime) containerdPid(ctx context.Context) (int, error) {
	pid, err := daemonPid(ctx, r.opts.Address)
	if errors.Is(err, errNoDaemon) {
		return 0, r.failed("looking for containerd's process", err)
	}
	return pid, err
}

// checkKata says whether this node can host Kata's virtual machines, and if not everything that stands in the way.
func checkKata(ctx context.Context, r *Runtime) error {
	p, containerd, err := r.kataPlaces(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	environ, err := environOf(containerd)
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	report := kata.Check(ctx, p)
	if err := errors.Join(report.Err(), kata.Refused(kata.JudgeEnvironment(environ))); err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	for _, f := range report.Findings {
		if f.Severity == kata.Warn {
			r.log.Warn("kata", "finding", f.String())
		}
	}
	return nil
}

// kataOptions name the configuration to the shim that was judged last.
func kataOptions(r *Runtime, _ *specs.Spec) (typeurl.Any, error) {
	k := r.judged.Load()
	if k == nil {
		return nil, errors.New("kata's configuration was not judged")
	}
	return typeurl.MarshalAnyToProto(&runtimeoptions.Options{ConfigPath: k.config.Path})
}

// room is what receiptd and pid1 may take in the guest beyond a command's own limits.
const (
	roomBytes = 64 << 20
	roomPids  = 64
)

// kataSpec completes the spec: devices, which Kata adds none of by itself, limits, which are the guest's to keep, and one mount
// for each that the node has below a mount's source, which would vanish on its way into the guest.
func kataSpec(r *Runtime, s *specs.Spec, in input) error {
	points, err := kata.MountPoints(r.judged.Load().containerd)
	if err != nil {
		return err
	}
	for _, m := range smallFileSystems(in.spec) {
		if m.Destination == "/dev" || m.Destination == "/dev/pts" {
			s.Mounts = append(s.Mounts, m)
		}
	}
	if s.Mounts, err = kataMounts(s.Mounts, points); err != nil {
		return err
	}
	limitGuest(s.Linux.Resources, in.spec.Resources)
	return kata.CheckAnnotations(s.Annotations)
}

// kataMounts plans the bind mounts, and has every mount come after those that it lies in.
func kataMounts(all []specs.Mount, points []kata.MountPoint) ([]specs.Mount, error) {
	var binds []kata.Mount
	named := map[string]specs.Mount{}
	var out []specs.Mount
	for _, m := range all {
		if m.Type != "bind" {
			out = append(out, m)
			continue
		}
		named[m.Destination] = m
		binds = append(binds, kata.Mount{Source: m.Source, Destination: m.Destination, ReadOnly: slices.Contains(m.Options, "ro")})
	}
	planned, err := kata.PlanMounts(binds, points)
	if err != nil {
		return nil, err
	}
	if err := kata.CheckSources(planned); err != nil {
		return nil, err
	}
	for _, p := range planned {
		m, ok := named[p.Destination]
		if !ok {
			m = specs.Mount{Source: p.Source, Destination: p.Destination, Type: "bind", Options: []string{"bind", "nosuid", "nodev", "rprivate"}}
			if p.ReadOnly {
				m.Options = append(m.Options, "ro")
			}
		}
		out = append(out, m)
	}
	// "/" is below every other byte of a name here: a folder comes before all that is in it.
	slices.SortStableFunc(out, func(a, b specs.Mount) int {
		return strings.Compare(strings.ReplaceAll(a.Destination, "/", "\x00"), strings.ReplaceAll(b.Destination, "/", "\x00"))
	})
	return out, nil
}

// limitGuest bounds the container in the guest; receiptd has no cgroup of each command's own there.
func limitGuest(to *specs.LinuxResources, r runtime.Resources) {
	if r.MemoryBytes > 0 {
		limit := r.MemoryBytes + roomBytes
		to.Memory = &specs.LinuxMemory{Limit: &limit}
	}
	if r.Pids > 0 {
		limit := r.Pids + roomPids
		to.Pids = &specs.LinuxPids{Limit: &limit}
	}
	if r.CPUs > 0 {
		quota, period := hostkernel.CPUQuota(r.CPUs)
		to.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
}

// findVM finds and records everything of the virtual machine on the node, and answers with the process whose end is the guest's. A
// task's pid is of no use: the Rust shim gives its own.
func findVM(ctx context.Context, r *Runtime, st *hostkernel.Start) (pid int, startTime uint64, err error) {
	id := st.Spec.SandboxID
	shim, err := kata.NewShim(id, r.opts.Kata.RunDirs...)
	if err != nil {
		return 0, 0, err
	}
	shimPid, err := shim.Pid(ctx)
	if err != nil {
		return 0, 0, err
	}
	vm, err := kata.FindVM(kata.Lookup{SandboxID: id, ShimPid: shimPid, Config: r.judged.Load().config, Cgroups: st.Record.Identity.Cgroups})
	if err != nil {
		return 0, 0, fmt.Errorf("%w: run the agent in the node's PID namespace (hostPID)", err)
	}
	if st.Record.VM, err = json.Marshal(vm); err != nil {
		return 0, 0, fmt.Errorf("recording the virtual machine: %w", err)
	}
	// Without one the VMM is threads of the shim.
	for _, role := range []kata.Role{kata.RoleVMM, kata.RoleShim} {
		for _, p := range vm.Processes {
			if p.Role == role {
				return p.Pid, p.StartTime, nil
			}
		}
	}
	return 0, 0, fmt.Errorf("sandbox %s: %w: neither it nor its shim was found", id, kata.ErrNoVMM)
}

// shimTime is how long a shim whose task is deleted is given to end with all that it started.
const shimTime = 2 * time.Second

// endKata has containerd end and forget the container, and sees every process of the virtual machine gone: what containerd says of a
// lost one is no evidence. A shim that does not answer is ended.
func endKata(ctx context.Context, r *Runtime, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	boot, err := hostkernel.BootID()
	if err != nil {
		return err
	}
	if rec.Identity.BootID != "" && rec.Identity.BootID != boot {
		return r.endContainer(ctx, rec, ev)
	}
	vm, err := recordedVM(rec)
	if err != nil {
		r.log.Warn("the processes of a virtual machine are not recorded; sweeping by its id", "sandbox", rec.Identity.SandboxID, "error", err)
	}
	if err := r.endAnswering(ctx, rec, ev); err != nil {
		// The shim may be what keeps containerd from answering.
		if killErr := vm.Kill(); killErr != nil {
			return errors.Join(err, killErr)
		}
		if err := r.endContainer(ctx, rec, ev); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	var seen kata.Evidence
	if len(vm.Processes) > 0 {
		seen, err = waitVM(ctx, vm)
	} else {
		seen, err = r.sweepKata(ctx, rec)
	}
	for _, item := range seen.Items {
		ev.Add(item.Source, "%s", item.Detail)
	}
	return err
}

// endAnswering is endContainer for as long as a shim that boots nothing may take: one that hangs leaves time to go on without it.
func (r *Runtime) endAnswering(ctx context.Context, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	ctx, cancel := r.processCall(ctx)
	defer cancel()
	return r.endContainer(ctx, rec, ev)
}

// recordedVM is the zero value where a start was cut short before it was known.
func recordedVM(rec hostkernel.Record) (vm kata.VM, err error) {
	if len(rec.VM) == 0 {
		return vm, nil
	}
	if err := json.Unmarshal(rec.VM, &vm); err != nil {
		return kata.VM{}, fmt.Errorf("reading the record of the virtual machine: %w", err)
	}
	return vm, nil
}

// waitVM waits for the virtual machine's end, and helps after a while.
func waitVM(ctx context.Context, vm kata.VM) (kata.Evidence, error) {
	short, cancel := context.WithTimeout(ctx, shimTime)
	defer cancel()
	if ev, err := vm.Wait(short); err == nil {
		return ev, nil
	}
	if err := vm.Kill(); err != nil {
		return kata.Evidence{}, err
	}
	return vm.Wait(ctx)
}

// sweepKata ends what runs for a sandbox of which no process was written down. There is nothing where no creation was asked for.
func (r *Runtime) sweepKata(ctx context.Context, rec hostkernel.Record) (kata.Evidence, error) {
	if !rec.TaskAsked && rec.Identity.Pid == 0 {
		return kata.Evidence{}, nil
	}
	k, err := r.findKata(ctx)
	if err != nil {
		return kata.Evidence{}, err
	}
	return kata.Sweep(ctx, kata.Lookup{SandboxID: rec.Identity.SandboxID, Config: k.config, Shim: k.shim.Resolved})
}

// kataConcedes is what can't hold in a guest.
var kataConcedes []runtime.Concession
