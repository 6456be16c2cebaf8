package containerd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// The names that configuration and records call the runtimes by.
const (
	Runc   = "runc"
	GVisor = "gvisor"
	Kata   = "kata"
)

// kind is what is known of the sandboxes that are made under a name.
type kind struct {
	// handler is the usual shim.
	handler     string
	isolation   runtime.Isolation
	concessions []runtime.Concession
	// guest is nil where the kernel is the node's: what works on it (mounts by descriptor, cgroups of each command, unix
	// sockets) works for the sandbox.
	guest *guest
	// options are the shim's for a container; nil for none.
	options func(r *Runtime, oci *specs.Spec) (typeurl.Any, error)
	// check, unless nil, is what it needs of a node besides; an error wraps runtime.ErrUnavailable.
	check func(ctx context.Context, r *Runtime) error
	// end, unless nil, is called in the place of endContainer, which it calls.
	end func(ctx context.Context, r *Runtime, rec hostkernel.Record, ev *hostkernel.Evidence) error
	// callTime is the default of Options.CallTime.
	callTime time.Duration
}

var kinds = map[string]kind{
	Runc:   {handler: "io.containerd.runc.v2", isolation: runtime.Namespaces, options: runcOptions, callTime: 20 * time.Second},
	GVisor: {handler: "io.containerd.runsc.v1", isolation: runtime.SeparateKernel, concessions: gvisorConcedes, guest: &gvisorGuest, options: gvisorOptions, callTime: 20 * time.Second},
	// One call boots the virtual machine.
	Kata: {
		handler: kata.RuntimeType, isolation: runtime.VirtualMachine, concessions: kataConcedes, guest: &kataGuest, options: kataOptions,
		check: checkKata, end: endKata, callTime: 60 * time.Second,
	},
}

func (r *Runtime) kind() kind { return kinds[r.opts.Name] }

// Transport is how the agent reaches receiptd.
type Transport string

// The transports.
const (
	// Socket is a unix socket in a folder that sandbox and node share: it takes a shared kernel.
	Socket Transport = "socket"
	// Attach is the standard streams of a process that containerd starts in the container.
	Attach Transport = "attach"
)

// Options configure the runtime.
type Options struct {
	// Name is Runc, GVisor or Kata: what the sandboxes are made for, and what they promise.
	Name string
	// Handler is containerd's name of the shim, "io.containerd.runc.v2" and so on; empty: the usual one.
	Handler string
	// Binary is the program that the shim starts; empty: what the shim finds in containerd's PATH. Kata has it in its configuration.
	Binary string
	// Address is containerd's socket, Namespace the namespace in it that is this project's alone.
	Address, Namespace string
	// Snapshotter keeps the root file systems of images; empty: containerd's default.
	Snapshotter string
	// ImagesFrom is another namespace, from which an image is taken that is not in Namespace; empty: none.
	ImagesFrom string
	// StateDir is an existing folder for the runtime's own records, of this Name alone.
	StateDir string
	// CgroupParent is the cgroup below which sandboxes live in every hierarchy; "/sandbox-agent" by default.
	CgroupParent string
	// Transport is the way to receiptd; empty: Socket for runc, Attach for the others.
	Transport Transport
	// CallTime bounds one call of containerd; 20 s by default, 60 s for Kata.
	CallTime time.Duration
	Kata     KataOptions
	Log      *slog.Logger
}

// Runtime hosts sandboxes in containerd.
type Runtime struct {
	opts   Options
	log    *slog.Logger
	client *client.Client
	keeper *hostkernel.Keeper
	// judged is Kata's installation as it was judged last.
	judged atomic.Pointer[kataInstalled]
}

var _ runtime.Runtime = (*Runtime)(nil)

// New makes the runtime. It reaches for nothing: containerd may be down, and come later.
func New(opts Options) (*Runtime, error) {
	if err := complete(&opts); err != nil {
		return nil, fmt.Errorf("containerd runtime %q: %w", opts.Name, err)
	}
	r := &Runtime{opts: opts, log: opts.Log}
	r.keeper = &hostkernel.Keeper{
		Name: opts.Name, Records: hostkernel.Records(filepath.Join(opts.StateDir, "records")), CgroupParent: opts.CgroupParent,
		Points: "containerd", UndoTime: cleanupTime, End: r.end, Log: opts.Log,
	}
	if err := os.Mkdir(string(r.keeper.Records), 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("containerd runtime %q: making its state folder: %w", opts.Name, err)
	}
	var err error
	// The timeout is also the longest that a new try of a lost connection waits.
	if r.client, err = client.New(opts.Address, client.WithDefaultNamespace(opts.Namespace), client.WithTimeout(time.Second)); err != nil {
		return nil, fmt.Errorf("containerd runtime %q: %w", opts.Name, err)
	}
	return r, nil
}

// end ends what containerd, and whatever it started, has of a sandbox.
func (r *Runtime) end(ctx context.Context, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	if end := r.kind().end; end != nil {
		return end(ctx, r, rec, ev)
	}
	return r.endContainer(ctx, rec, ev)
}

// complete fills in the defaults and refuses what can't be.
func complete(o *Options) error {
	k, known := kinds[o.Name]
	if !known {
		return fmt.Errorf("the name is none of %q", slices.Sorted(maps.Keys(kinds)))
	}
	for _, d := range []struct {
		value   *string
		usually string
	}{
		{&o.Handler, k.handler}, {&o.Address, "/run/containerd/containerd.sock"}, {&o.Namespace, "sandbox-agent"}, {&o.CgroupParent, "/sandbox-agent"},
	} {
		if *d.value == "" {
			*d.value = d.usually
		}
	}
	if o.Transport == "" {
		o.Transport = Attach
		if k.guest == nil {
			o.Transport = Socket
		}
	}
	if o.Transport == Socket && k.guest != nil {
		return errors.New("the transport \"socket\" takes a shared kernel, which only runc has: use \"attach\"")
	}
	if o.CallTime <= 0 {
		o.CallTime = k.callTime
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if !filepath.IsAbs(o.StateDir) {
		return fmt.Errorf("the state folder %q is not an absolute path", o.StateDir)
	}
	if !filepath.IsAbs(o.CgroupParent) || filepath.Clean(o.CgroupParent) != o.CgroupParent || o.CgroupParent == "/" {
		return fmt.Errorf("the cgroup parent %q is not a clean absolute path below the root", o.CgroupParent)
	}
	return nil
}

// Name answers what Options say.
func (r *Runtime) Name() string { return r.opts.Name }

// Isolation is the class of what is hosted under the runtime's name.
func (r *Runtime) Isolation() runtime.Isolation { return r.kind().isolation }

// Concessions are what a guest's kernel can't keep by its nature; none for runc.
func (r *Runtime) Concessions() []runtime.Concession { return slices.Clone(r.kind().concessions) }

// TakesRootfs takes all kinds; see runtime.Runtime.
func (r *Runtime) TakesRootfs(runtime.RootfsKind) error { return nil }

// Reachable asks containerd for its version.
func (r *Runtime) Reachable(ctx context.Context) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	if _, err := r.client.Version(ctx); err != nil {
		return r.failed("asking containerd for its version", err)
	}
	return nil
}

// Check says whether this node, and its containerd, can host sandboxes; see runtime.Runtime.
func (r *Runtime) Check(ctx context.Context) error {
	if err := hostkernel.Check(); err != nil {
		return err
	}
	if err := r.Reachable(ctx); err != nil {
		return err
	}
	if check := r.kind().check; check != nil {
		return check(ctx, r)
	}
	return nil
}

// Load finds a sandbox that an earlier agent started; see runtime.Runtime. What tells is the recorded init, whatever
// containerd says: it may be down, and then the sandbox goes on all the same.
func (r *Runtime) Load(_ context.Context, id runtime.Identity) (runtime.Sandbox, error) {
	held, err := r.keeper.Load(id)
	if err != nil {
		return nil, err
	}
	return r.sandbox(held), nil
}

// Remove ends whatever is left of a sandbox; see runtime.Runtime.
func (r *Runtime) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	return r.keeper.Remove(ctx, id)
}

// List names the sandboxes of which there is anything, in the records or in containerd; see runtime.Runtime.
func (r *Runtime) List(ctx context.Context) ([]string, error) {
	ids, err := r.keeper.Records.List()
	if err != nil {
		return nil, err
	}
	theirs, err := r.listContainers(ctx)
	if err != nil {
		return nil, err
	}
	ids = append(ids, theirs...)
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
