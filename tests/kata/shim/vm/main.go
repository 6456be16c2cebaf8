// Command vm is a containerd shim of the tests' own under Kata's name, io.containerd.kata.v2, that does what Kata's Rust shim
// does as far as docs/kata.md has it as a contract, with a real virtual machine: QEMU, virtiofsd, vsock, the management socket, an
// init in the guest (guest) that runs the container. It reads the configuration that the runtime option ConfigPath names, and
// no other. It keeps the contracts; the shim beside it breaks them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/events"
	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/runtime"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	runc "github.com/containerd/go-runc"
	"github.com/containerd/ttrpc"
	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandbox-agent/sandbox-agent/tests/kata/shim/entry"
	"github.com/sandbox-agent/sandbox-agent/tests/kata/shim/wire"
)

// bootTime bounds a VM's start where whoever asked for it never stops waiting.
const bootTime = 15 * time.Minute

// lostStatus is the exit status of all that ran in a VM that was lost.
const lostStatus = 255

func main() { entry.Run(newService) }

func newService(ctx context.Context, events shim.Publisher, end shutdown.Service) (any, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, err
	}
	return &service{publisher: events, shutdown: end, namespace: ns, processes: map[string]*process{}, lost: make(chan struct{})}, nil
}

// process is the container (exec "") or one beside it.
type process struct {
	spec                  []byte
	stdin, stdout, stderr string
	started               atomic.Bool
	ended                 chan struct{}
	status                uint32
	endedAt               time.Time
}

type service struct {
	taskAPI.TTRPCTaskService // what is not here is not asked for
	publisher                shim.Publisher
	shutdown                 shutdown.Service
	namespace                string

	id, bundle string
	cid        uint32
	cgroup     string
	netns      string // empty: the guest has no network
	vmm, fs    *exec.Cmd
	// lost is closed when the VMM has ended.
	lost       chan struct{}
	mounts     []string
	management *http.Server

	mu        sync.Mutex
	processes map[string]*process
}

func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	taskAPI.RegisterTTRPCTaskService(server, s)
	return nil
}

// dir holds everything of the VM; its name is in the arguments of VMM and virtiofsd, as with Kata.
func (s *service) dir() string { return filepath.Join("/run/kata-containers", s.id) }

func (s *service) shared() string { return filepath.Join(s.dir(), "shared") }

func (s *service) Create(ctx context.Context, r *taskAPI.CreateTaskRequest) (*taskAPI.CreateTaskResponse, error) {
	s.id, s.bundle = r.ID, r.Bundle
	err := s.create(ctx, r)
	if err != nil {
		// Whoever asked may have stopped waiting: containerd's log has it too.
		fmt.Fprintf(os.Stderr, "the VM was not started: %v: %s\n", err, tails(s.dir()+"/console", s.dir()+"/qemu.log", s.dir()+"/virtiofsd.log"))
		s.end()
		return nil, errgrpc.ToGRPC(err)
	}
	s.processes[""] = &process{stdout: r.Stdout, ended: make(chan struct{})}
	return &taskAPI.CreateTaskResponse{Pid: uint32(os.Getpid())}, nil
}

func (s *service) create(ctx context.Context, r *taskAPI.CreateTaskRequest) error {
	var o runtimeoptions.Options
	if err := r.Options.UnmarshalTo(&o); err != nil {
		return fmt.Errorf("reading the runtime options: %w", err)
	}
	c, err := readConfig(o.ConfigPath)
	if err != nil {
		return err
	}
	if err := s.share(); err != nil {
		return err
	}
	if err := s.boot(c); err != nil {
		return err
	}
	if err := s.manage(); err != nil {
		return err
	}
	return s.awaitGuest(ctx, filepath.Join(s.dir(), "console"))
}

// config is what is read of the configuration.
type config map[string]string

var setting = regexp.MustCompile(`(?m)^([a-z_]+) *= *"(.*)"$`)

func readConfig(path string) (config, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	c := config{}
	for _, m := range setting.FindAllStringSubmatch(string(b), -1) {
		c[m[1]] = m[2]
	}
	return c, nil
}

// share puts the container's root and each of its bind mounts into the shared folder, not recursively, as Kata does, and
// writes the spec that the guest gets.
func (s *service) share() error {
	b, err := os.ReadFile(filepath.Join(s.bundle, "config.json"))
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		return err
	}
	root := spec["root"].(map[string]any)
	if err := s.bind(root["path"].(string), filepath.Join(s.shared(), "rootfs"), false); err != nil {
		return err
	}
	root["path"] = wire.Shared + "/rootfs"
	mounts, _ := spec["mounts"].([]any)
	for i, m := range mounts {
		m := m.(map[string]any)
		if m["type"] != "bind" {
			continue
		}
		options, _ := m["options"].([]any)
		place := strconv.Itoa(i)
		if err := s.bind(m["source"].(string), filepath.Join(s.shared(), place), slices.Contains(options, any("ro"))); err != nil {
			return err
		}
		m["source"] = wire.Shared + "/" + place
	}
	linux := spec["linux"].(map[string]any)
	s.cgroup, _ = linux["cgroupsPath"].(string)
	// What Kata leaves out on the way into the guest, by default.
	delete(linux, "seccomp")
	namespaces, _ := linux["namespaces"].([]any)
	linux["namespaces"] = slices.DeleteFunc(namespaces, func(n any) bool {
		kind := n.(map[string]any)["type"]
		if kind == "network" {
			s.netns, _ = n.(map[string]any)["path"].(string)
		}
		return kind == "network" || kind == "cgroup"
	})
	if b, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.shared(), "config.json"), b, 0o600)
}

func (s *service) bind(source, target string, readOnly bool) error {
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	if st.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		err = os.WriteFile(target, nil, 0o644)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s: %w", source, err)
	}
	s.mounts = append(s.mounts, target)
	if !readOnly {
		return nil
	}
	return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

// boot starts virtiofsd and the VMM in the sandbox's cgroup, as with sandbox_cgroup_only.
func (s *service) boot(c config) error {
	cgroup := filepath.Join("/sys/fs/cgroup", s.cgroup)
	if err := os.MkdirAll(cgroup, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(cgroup)
	if err != nil {
		return err
	}
	defer dir.Close()
	s.cid = uint32(3 + os.Getpid()) // no two shims have the same
	socket, fsEnded := filepath.Join(s.dir(), "virtiofsd.sock"), make(chan struct{})
	if s.fs, err = s.start(dir, s.dir()+"/virtiofsd.log", fsEnded, c["virtio_fs_daemon"], "--socket-path="+socket, "-o", "source="+s.shared(), "-o", "cache="+c["virtio_fs_cache"], "-o", "announce_submounts"); err != nil {
		return fmt.Errorf("starting virtiofsd: %w", err)
	}
	if err := awaitSocket(socket, fsEnded); err != nil {
		return fmt.Errorf("%w: %s", err, tails(s.dir()+"/virtiofsd.log"))
	}
	program, network, err := s.connect(c["path"])
	if err != nil {
		return err
	}
	// Without CMPXCHG16B, which qemu emulates badly where this processor is an emulated one itself (tests/kata/nested).
	s.vmm, err = s.start(dir, s.dir()+"/qemu.log", s.lost, program[0], append(slices.Concat(program[1:], network),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "sandbox-"+s.id+",debug-threads=on",
		"-machine", "q35", "-accel", "kvm", "-cpu", "qemu64,-cx16", "-smp", "1", "-m", "384M",
		"-object", "memory-backend-memfd,id=memory,size=384M,share=on", "-numa", "node,memdev=memory",
		"-kernel", c["kernel"], "-initrd", c["initrd"], "-append", "console=ttyS0 panic=-1 quiet mitigations=off random.trust_cpu=on rcupdate.rcu_expedited=1 nokaslr no_timer_check", "-serial", "file:"+s.dir()+"/console",
		"-chardev", "socket,id=shared,path="+socket, "-device", "vhost-user-fs-pci,chardev=shared,tag="+wire.Tag,
		"-device", fmt.Sprintf("vhost-vsock-pci,guest-cid=%d", s.cid))...)
	if err != nil {
		return fmt.Errorf("starting the VMM: %w", err)
	}
	return nil
}

func awaitSocket(path string, ended chan struct{}) error {
	for end := time.Now().Add(bootTime); time.Now().Before(end); {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ended:
			return errors.New("virtiofsd ended")
		case <-time.After(10 * time.Millisecond):
		}
	}
	return errors.New("virtiofsd does not listen")
}

// start starts a program in a cgroup, and closes ended when it has ended.
func (s *service) start(cgroup *os.File, log string, ended chan struct{}, path string, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(path, args...)
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd()), Setsid: true}
	exits, err := reaper.Default.Start(cmd)
	if err != nil {
		return nil, err
	}
	go func(exits chan runc.Exit) {
		_, _ = reaper.Default.Wait(cmd, exits)
		close(ended)
	}(exits)
	return cmd, nil
}

// manage serves the management socket, at the Rust shim's place.
func (s *service) manage() error {
	dir := filepath.Join("/run/kata", s.id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	l, err := net.Listen("unix", filepath.Join(dir, "shim-monitor.sock"))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /agent-url", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, "vsock://%d:%d", s.cid, wire.Port) })
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "kata_shim_threads 8") })
	s.management = &http.Server{Handler: mux}
	go func() { _ = s.management.Serve(l) }()
	return nil
}

// awaitGuest waits until the guest listens.
func (s *service) awaitGuest(ctx context.Context, console string) error {
	end := time.Now().Add(bootTime)
	for {
		conn, err := vsock.Dial(s.cid, wire.Port, nil)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-s.lost:
			return fmt.Errorf("the VM ended: %s", tails(console, s.dir()+"/qemu.log"))
		case <-ctx.Done():
			return fmt.Errorf("waiting for the guest: %w: %s", ctx.Err(), tails(console))
		}
		if time.Now().After(end) {
			return fmt.Errorf("the guest does not listen: %w: its console ends: %s", err, tails(console))
		}
	}
}

func tails(paths ...string) string {
	var out strings.Builder
	for _, p := range paths {
		b, _ := os.ReadFile(p)
		out.Write(b[max(0, len(b)-2000):])
	}
	return out.String()
}

// ask has the guest do something. A VM that is lost meanwhile is an error.
func (s *service) ask(r wire.Request) (net.Conn, wire.Answer, error) {
	var a wire.Answer
	r.ID = s.id
	conn, err := vsock.Dial(s.cid, wire.Port, nil)
	if err != nil {
		return nil, a, err
	}
	if err := errors.Join(wire.Send(conn, r), wire.Receive(conn, &a)); err != nil {
		conn.Close()
		return nil, a, err
	}
	if a.Err() != nil {
		conn.Close()
	}
	return conn, a, a.Err()
}

func (s *service) get(exec string) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.processes[exec]
	if p == nil {
		return nil, errgrpc.ToGRPC(fmt.Errorf("process %q: %w", exec, errdefs.ErrNotFound))
	}
	return p, nil
}

func (s *service) Start(_ context.Context, r *taskAPI.StartRequest) (*taskAPI.StartResponse, error) {
	p, err := s.get(r.ExecID)
	if err != nil {
		return nil, err
	}
	if r.ExecID == "" {
		if err := s.takeOutput(p); err != nil {
			return nil, errgrpc.ToGRPC(err)
		}
		conn, _, err := s.ask(wire.Request{Op: wire.OpStart})
		if err != nil {
			return nil, errgrpc.ToGRPC(fmt.Errorf("starting the container: %w: %s", err, tails(s.dir()+"/console")))
		}
		conn.Close()
	} else if err := s.startExec(r.ExecID, p); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	p.started.Store(true)
	go s.await(r.ExecID, p)
	return &taskAPI.StartResponse{Pid: uint32(os.Getpid())}, nil
}

// takeOutput carries the container's output to where containerd wants it.
func (s *service) takeOutput(p *process) error {
	conn, _, err := s.ask(wire.Request{Op: wire.OpOutput})
	if err != nil {
		return err
	}
	stdout, err := open(p.stdout, os.O_WRONLY)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(stdout, conn)
		stdout.Close()
		conn.Close()
	}()
	return nil
}

func (s *service) startExec(id string, p *process) error {
	conn, _, err := s.ask(wire.Request{Op: wire.OpExec, Exec: id, Process: p.spec})
	if err != nil {
		return err
	}
	stdin, err := open(p.stdin, os.O_RDONLY)
	if err != nil {
		return err
	}
	stdout, err := open(p.stdout, os.O_WRONLY)
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(conn, stdin)
		_ = conn.(*vsock.Conn).CloseWrite()
	}()
	go func() {
		_, _ = io.Copy(stdout, conn)
		stdout.Close()
		stdin.Close()
		conn.Close()
	}()
	return nil
}

func open(path string, flags int) (*os.File, error) {
	if path == "" {
		return os.OpenFile(os.DevNull, flags, 0)
	}
	return os.OpenFile(path, flags, 0)
}

// await waits for a process's end, or its VM's.
func (s *service) await(id string, p *process) {
	ended := make(chan uint32, 1)
	go func() {
		conn, a, err := s.ask(wire.Request{Op: wire.OpWait, Exec: id})
		if err != nil {
			a.Status = lostStatus
		} else {
			conn.Close()
		}
		ended <- a.Status
	}()
	select {
	case p.status = <-ended:
	case <-s.lost:
		p.status = lostStatus
	}
	p.endedAt = time.Now()
	close(p.ended)
	exec := id
	if exec == "" {
		exec = s.id
	}
	s.publish(runtime.TaskExitEventTopic, &events.TaskExit{ContainerID: s.id, ID: exec, Pid: uint32(os.Getpid()), ExitStatus: p.status, ExitedAt: timestamppb.New(p.endedAt)})
}

func (s *service) publish(topic string, event any) {
	_ = s.publisher.Publish(namespaces.WithNamespace(context.Background(), s.namespace), topic, event)
}

func (s *service) Exec(_ context.Context, r *taskAPI.ExecProcessRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes[r.ExecID] = &process{spec: r.Spec.GetValue(), stdin: r.Stdin, stdout: r.Stdout, stderr: r.Stderr, ended: make(chan struct{})}
	return &emptypb.Empty{}, nil
}

func (s *service) Wait(ctx context.Context, r *taskAPI.WaitRequest) (*taskAPI.WaitResponse, error) {
	p, err := s.get(r.ExecID)
	if err != nil {
		return nil, err
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		return nil, errgrpc.ToGRPC(ctx.Err())
	}
	return &taskAPI.WaitResponse{ExitStatus: p.status, ExitedAt: timestamppb.New(p.endedAt)}, nil
}

func (s *service) State(_ context.Context, r *taskAPI.StateRequest) (*taskAPI.StateResponse, error) {
	p, err := s.get(r.ExecID)
	if err != nil {
		return nil, err
	}
	resp := &taskAPI.StateResponse{ID: s.id, Bundle: s.bundle, Pid: uint32(os.Getpid()), ExecID: r.ExecID, Stdin: p.stdin, Stdout: p.stdout, Stderr: p.stderr, Status: tasktypes.Status_CREATED}
	select {
	case <-p.ended:
		resp.Status, resp.ExitStatus, resp.ExitedAt = tasktypes.Status_STOPPED, p.status, timestamppb.New(p.endedAt)
	default:
		if p.started.Load() {
			resp.Status = tasktypes.Status_RUNNING
		}
	}
	return resp, nil
}

func (s *service) Kill(_ context.Context, r *taskAPI.KillRequest) (*emptypb.Empty, error) {
	p, err := s.get(r.ExecID)
	if err != nil {
		return nil, err
	}
	select {
	case <-p.ended:
		return &emptypb.Empty{}, nil
	default:
	}
	if !p.started.Load() {
		return nil, errgrpc.ToGRPC(fmt.Errorf("it was not started: %w", errdefs.ErrFailedPrecondition))
	}
	conn, _, err := s.ask(wire.Request{Op: wire.OpKill, Exec: r.ExecID, Signal: r.Signal})
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, conn.Close()
}

func (s *service) Delete(_ context.Context, r *taskAPI.DeleteRequest) (*taskAPI.DeleteResponse, error) {
	p, err := s.get(r.ExecID)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	delete(s.processes, r.ExecID)
	s.mu.Unlock()
	resp := &taskAPI.DeleteResponse{Pid: uint32(os.Getpid()), ExitStatus: p.status, ExitedAt: timestamppb.New(p.endedAt)}
	if r.ExecID == "" {
		s.end()
		s.publish(runtime.TaskDeleteEventTopic, &events.TaskDelete{ContainerID: s.id, ID: s.id, Pid: resp.Pid, ExitStatus: p.status, ExitedAt: resp.ExitedAt})
	}
	return resp, nil
}

// end ends the VM and takes everything of it away.
func (s *service) end() {
	for _, cmd := range []*exec.Cmd{s.vmm, s.fs} {
		if cmd != nil {
			_ = cmd.Process.Kill()
		}
	}
	if s.vmm != nil {
		<-s.lost
	}
	if s.management != nil {
		_ = s.management.Close()
		_ = os.RemoveAll(filepath.Join("/run/kata", s.id))
	}
	for _, m := range slices.Backward(s.mounts) {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil {
			return // what is under it is not the shim's to remove
		}
	}
	_ = os.RemoveAll(s.dir())
}

func (s *service) Pids(context.Context, *taskAPI.PidsRequest) (*taskAPI.PidsResponse, error) {
	return &taskAPI.PidsResponse{Processes: []*tasktypes.ProcessInfo{{Pid: uint32(os.Getpid())}}}, nil
}

func (s *service) CloseIO(context.Context, *taskAPI.CloseIORequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

func (s *service) Connect(context.Context, *taskAPI.ConnectRequest) (*taskAPI.ConnectResponse, error) {
	return &taskAPI.ConnectResponse{ShimPid: uint32(os.Getpid()), TaskPid: uint32(os.Getpid())}, nil
}

func (s *service) Shutdown(context.Context, *taskAPI.ShutdownRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.processes) == 0 {
		s.shutdown.Shutdown()
	}
	return &emptypb.Empty{}, nil
}
