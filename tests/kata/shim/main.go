// Command shim is a containerd shim of the tests' own under Kata's name, io.containerd.kata.v2. It answers --version as the
// Rust shim does, has a process in the place of the VMM and one in that of virtiofsd, serves the management socket, and drops
// what is mounted below a bind mount's source, as Kata does. What runs "in the guest" runs in a container of runc's.
//
// It misbehaves on request: the file "misbehave" in $KATA_TEST_DIR holds words (see the constants), read at each call. The
// programs qemu and virtiofsd are there too; the management socket is run/ID/shim-monitor.sock.
//
// It is a module of its own: what it links must not change the product's versions.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/api/events"
	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/task"
	coreevents "github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/pkg/sys/reaper"
	runc "github.com/containerd/go-runc"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/sandbox-agent/sandbox-agent/tests/kata/shim/entry"
)

// What can be asked for.
const (
	// lostWith0 and lostWith255: a container whose VM is lost has this exit status. Without either it is 137.
	lostWith0, lostWith255 = "lost-with-0", "lost-with-255"
	// earlyExit: the exit is told before the end of the output, which comes with the first question for the state after the
	// word is gone.
	earlyExit = "exit-before-eof"
	// shimPid: exits carry the shim's pid.
	shimPid = "exit-with-shim-pid"
	// onePid: a signal for all processes reaches the first one only. (So it does with runc, but for SIGKILL: here it reaches all.)
	onePid = "signal-one-pid"
	// recursive: what is mounted below a source is there. Kata never does this; it is the control case.
	recursive = "binds-recursive"
	// survives: a deletion is answered, and the VM goes on.
	survives = "vm-survives-delete"
	// stuck: a deletion is never answered; that it has come is written to the fifo "deleting".
	stuck = "delete-stuck"
)

func main() { entry.Run(newService) }

func newService(ctx context.Context, events shim.Publisher, end shutdown.Service) (any, error) {
	s := &service{dir: os.Getenv("KATA_TEST_DIR"), status: 137}
	var err error
	s.TTRPCTaskService, err = task.NewTaskService(ctx, publisher{events, s}, end)
	end.RegisterCallback(func(context.Context) error { return s.endManagement() })
	return s, err
}

type service struct {
	taskAPI.TTRPCTaskService
	dir string

	mu         sync.Mutex
	id         string
	vmm, fs    *exec.Cmd
	deleting   bool
	lost       bool
	status     uint32
	stdout     *os.File
	management *http.Server
}

// misbehaves says whether a word was asked for.
func (s *service) misbehaves(word string) bool {
	b, _ := os.ReadFile(filepath.Join(s.dir, "misbehave"))
	return slices.Contains(strings.Fields(string(b)), word)
}

func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	taskAPI.RegisterTTRPCTaskService(server, s)
	return nil
}

func (s *service) Create(ctx context.Context, r *taskAPI.CreateTaskRequest) (*taskAPI.CreateTaskResponse, error) {
	if err := s.keepAsked(r); err != nil {
		return nil, err
	}
	// The container is runc's, which has options of another type.
	r.Options = nil
	if !s.misbehaves(recursive) {
		if err := dropNested(filepath.Join(r.Bundle, "config.json")); err != nil {
			return nil, err
		}
	}
	if err := s.boot(r.ID); err != nil {
		return nil, err
	}
	if s.misbehaves(earlyExit) && r.Stdout != "" {
		f, err := os.OpenFile(r.Stdout, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		s.stdout = f
	}
	return s.TTRPCTaskService.Create(ctx, r)
}

// keepAsked writes down what was asked for: the spec, and the configuration that the runtime options name.
func (s *service) keepAsked(r *taskAPI.CreateTaskRequest) error {
	spec, err := os.ReadFile(filepath.Join(r.Bundle, "config.json"))
	if err != nil {
		return err
	}
	var o runtimeoptions.Options
	if r.Options != nil {
		if err := r.Options.UnmarshalTo(&o); err != nil {
			return err
		}
	}
	return errors.Join(
		os.WriteFile(filepath.Join(s.dir, "asked-spec.json"), spec, 0o600),
		os.WriteFile(filepath.Join(s.dir, "asked-config"), []byte(o.ConfigPath), 0o600),
	)
}

// dropNested makes each bind mount one that is not recursive.
func dropNested(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		return err
	}
	mounts, _ := spec["mounts"].([]any)
	for _, m := range mounts {
		options, _ := m.(map[string]any)["options"].([]any)
		for i, o := range options {
			if o == "rbind" {
				options[i] = "bind"
			}
		}
	}
	if b, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// boot starts what stands for a VM: two processes and the management socket.
func (s *service) boot(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.id = id
	var exits chan runc.Exit
	var err error
	if s.vmm, exits, err = s.start("qemu", "qemu-system-x86_64 -name sandbox-"+id+",debug-threads=on"); err != nil {
		return err
	}
	vmm := s.vmm
	go func() {
		_, _ = reaper.Default.Wait(vmm, exits)
		s.vmLost()
	}()
	if s.fs, exits, err = s.start("virtiofsd", "virtiofsd --shared-dir /run/kata-containers/shared/sandboxes/"+id+"/rw"); err != nil {
		return err
	}
	fs := s.fs
	go func() { _, _ = reaper.Default.Wait(fs, exits) }()
	dir := filepath.Join(s.dir, "run", id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	l, err := net.Listen("unix", filepath.Join(dir, "shim-monitor.sock"))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /agent-url", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "vsock://3:1024") })
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "kata_shim_threads 8") })
	s.management = &http.Server{Handler: mux}
	go func() { _ = s.management.Serve(l) }()
	return nil
}

func (s *service) start(program, argv0 string) (*exec.Cmd, chan runc.Exit, error) {
	cmd := exec.Command(filepath.Join(s.dir, program), "100000")
	cmd.Args[0] = argv0
	exits, err := reaper.Default.Start(cmd)
	return cmd, exits, err
}

// vmLost is what a guest's end does to all that ran in it.
func (s *service) vmLost() {
	s.mu.Lock()
	deleting := s.deleting
	if !deleting {
		s.lost = true
		switch {
		case s.misbehaves(lostWith0):
			s.status = 0
		case s.misbehaves(lostWith255):
			s.status = 255
		}
	}
	id := s.id
	s.mu.Unlock()
	if !deleting {
		_, _ = s.TTRPCTaskService.Kill(context.Background(), &taskAPI.KillRequest{ID: id, Signal: uint32(unix.SIGKILL), All: true})
	}
}

// told is the status and the pid that callers are given of an exit.
func (s *service) told(pid, status uint32) (uint32, uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.misbehaves(shimPid) {
		pid = uint32(os.Getpid())
	}
	if s.lost {
		status = s.status
	}
	return pid, status
}

func (s *service) Wait(ctx context.Context, r *taskAPI.WaitRequest) (*taskAPI.WaitResponse, error) {
	resp, err := s.TTRPCTaskService.Wait(ctx, r)
	if err == nil {
		_, resp.ExitStatus = s.told(0, resp.ExitStatus)
	}
	return resp, err
}

func (s *service) State(ctx context.Context, r *taskAPI.StateRequest) (*taskAPI.StateResponse, error) {
	s.endOutput()
	resp, err := s.TTRPCTaskService.State(ctx, r)
	if err == nil {
		resp.Pid, resp.ExitStatus = s.told(resp.Pid, resp.ExitStatus)
	}
	return resp, err
}

// endOutput writes the end of the output that was held back.
func (s *service) endOutput() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stdout != nil && !s.misbehaves(earlyExit) {
		_, _ = s.stdout.WriteString("late\n")
		s.stdout.Close()
		s.stdout = nil
	}
}

func (s *service) Kill(ctx context.Context, r *taskAPI.KillRequest) (*emptypb.Empty, error) {
	if !r.All || r.Signal == uint32(unix.SIGKILL) {
		return s.TTRPCTaskService.Kill(ctx, r)
	}
	if s.misbehaves(onePid) {
		r.All = false
		return s.TTRPCTaskService.Kill(ctx, r)
	}
	all, err := s.TTRPCTaskService.Pids(ctx, &taskAPI.PidsRequest{ID: r.ID})
	if err != nil {
		return nil, err
	}
	for _, p := range all.Processes {
		if fd, err := unix.PidfdOpen(int(p.Pid), 0); err == nil {
			_ = unix.PidfdSendSignal(fd, unix.Signal(r.Signal), nil, 0)
			unix.Close(fd)
		}
	}
	return &emptypb.Empty{}, nil
}

func (s *service) Delete(ctx context.Context, r *taskAPI.DeleteRequest) (*taskAPI.DeleteResponse, error) {
	if r.ExecID != "" {
		return s.TTRPCTaskService.Delete(ctx, r)
	}
	if s.misbehaves(stuck) {
		if err := os.WriteFile(filepath.Join(s.dir, "deleting"), []byte("."), 0); err != nil {
			return nil, err
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	resp, err := s.TTRPCTaskService.Delete(ctx, r)
	if err != nil {
		return resp, err
	}
	resp.Pid, resp.ExitStatus = s.told(resp.Pid, resp.ExitStatus)
	if s.misbehaves(survives) {
		return resp, nil
	}
	s.mu.Lock()
	s.deleting = true
	s.mu.Unlock()
	for _, cmd := range []*exec.Cmd{s.vmm, s.fs} {
		_ = cmd.Process.Kill()
	}
	return resp, nil
}

func (s *service) endManagement() error {
	if s.management == nil {
		return nil
	}
	return errors.Join(s.management.Close(), os.RemoveAll(filepath.Join(s.dir, "run", s.id)))
}

// publisher tells of exits as they are to be told.
type publisher struct {
	shim.Publisher
	s *service
}

func (p publisher) Publish(ctx context.Context, topic string, event coreevents.Event) error {
	if exit, ok := event.(*events.TaskExit); ok {
		exit.Pid, exit.ExitStatus = p.s.told(exit.Pid, exit.ExitStatus)
	}
	return p.Publisher.Publish(ctx, topic, event)
}
