package containerd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

var _ client.Client // registers the types of the OCI spec with typeurl

// attachesDir has one folder for each attach process that may be there, made before the process and removed after it: also
// an agent that knows nothing else finds them all.
func attachesDir(dir string) string { return filepath.Join(dir, "attach") }

// attach starts a "receiptd attach" in the container and gives its standard streams as a connection.
func (s *Sandbox) attach(ctx context.Context) (net.Conn, error) {
	done, err := s.aloneAttaching(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := s.detachAll(ctx); err != nil {
		return nil, err
	}
	id := newProcessID("attach")
	p, err := newPipes(filepath.Join(attachesDir(s.Record.Identity.Dir), id))
	if err != nil {
		return nil, err
	}
	c := &attachConn{pipes: p, sandbox: s, id: id}
	c.waiting, c.stop = context.WithCancel(s.closing)
	if err := s.startProcess(ctx, id, p, nil, "attach"); err != nil {
		c.stop()
		p.Close()
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		return nil, errors.Join(err, s.detach(clean, id))
	}
	s.attached.Go(c.await)
	s.attached.Go(c.endWithSandbox)
	s.attached.Go(func() { s.logErrors(p.err, id) })
	return c, nil
}

// aloneAttaching waits until nobody else is attaching to the sandbox or ending an attach process of it.
func (s *Sandbox) aloneAttaching(ctx context.Context) (done func(), err error) {
	select {
	case s.attaching <- struct{}{}:
		return func() { <-s.attaching }, nil
	case <-ctx.Done():
		return nil, s.r.failed("waiting for the end of an earlier attach process", ctx.Err())
	}
}

// newProcessID names a process in a container. All names of a kind are of one length: gVisor takes a prefix for the whole.
func newProcessID(kind string) string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return kind + "-" + hex.EncodeToString(b[:])
}

// startProcess starts receiptd's program in the container with arguments, and with capabilities if it needs any.
func (s *Sandbox) startProcess(ctx context.Context, id string, p *pipes, capabilities []string, args ...string) error {
	process, err := typeurl.MarshalAnyToProto(&specs.Process{
		Args: append([]string{runtime.BinPath + "/receiptd"}, args...), Cwd: "/", Env: []string{"HOME=/"},
		Capabilities:    &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		NoNewPrivileges: true,
	})
	if err != nil {
		return fmt.Errorf("describing a process of receiptd's: %w", err)
	}
	ctx, cancel := s.r.processCall(ctx)
	defer cancel()
	container := s.Record.Identity.ContainerID
	service := s.r.client.TaskService()
	if _, err := service.Exec(ctx, &tasks.ExecProcessRequest{
		ContainerID: container, ExecID: id, Spec: process, Stdin: p.path("in"), Stdout: p.path("out"), Stderr: p.path("err"),
	}); err != nil {
		return s.r.failed("making the process \"receiptd "+args[0]+"\"", err)
	}
	if _, err := service.Start(ctx, &tasks.StartRequest{ContainerID: container, ExecID: id}); err != nil {
		return s.r.failed("starting the process \"receiptd "+args[0]+"\"", err)
	}
	return nil
}

// detachAll ends the attach processes that there are, also those of an earlier agent.
func (s *Sandbox) detachAll(ctx context.Context) error {
	des, err := os.ReadDir(attachesDir(s.Record.Identity.Dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("listing old attach processes: %w", err)
	}
	for _, de := range des {
		if err := s.detach(ctx, de.Name()); err != nil {
			return err
		}
	}
	return nil
}

// detach kills an attach process, waits for it and deletes it. That there is none is fine.
func (s *Sandbox) detach(ctx context.Context, id string) error {
	ctx, cancel := s.r.processCall(ctx)
	defer cancel()
	if err := s.endAttach(ctx, id); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(attachesDir(s.Record.Identity.Dir), id)); err != nil {
		return fmt.Errorf("removing the streams of an attach process: %w", err)
	}
	return nil
}

// drain reads and drops what is left in the streams of an attach process that has been killed, until stop is called. A shim
// that copies what the process wrote waits for room in the FIFO, which nobody reads when the agent of that attach is dead, and
// gVisor's does not delete a process before its copies are made.
func (s *Sandbox) drain(id string) (stop func()) {
	var files []*os.File
	var copies sync.WaitGroup
	for _, name := range []string{"out", "err"} {
		f, err := openFIFO(filepath.Join(attachesDir(s.Record.Identity.Dir), id, name), os.O_RDONLY)
		if err != nil {
			continue // cut short before it was made
		}
		files = append(files, f)
		copies.Go(func() { _, _ = io.Copy(io.Discard, f) })
	}
	return func() {
		for _, f := range files {
			f.Close()
		}
		copies.Wait()
	}
}

func (s *Sandbox) endAttach(ctx context.Context, id string) error {
	service, container := s.r.client.TaskService(), s.Record.Identity.ContainerID
	remove := func() error {
		_, err := service.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: container, ExecID: id})
		if missing(err) {
			return nil
		}
		return err
	}
	_, err := service.Kill(ctx, &tasks.KillRequest{ContainerID: container, ExecID: id, Signal: uint32(unix.SIGKILL)})
	if missing(err) {
		return nil
	}
	// One that was made and never started, which an agent leaves that is killed in between, has no exit to wait for.
	if errdefs.IsFailedPrecondition(native(err)) && remove() == nil {
		return nil
	}
	defer s.drain(id)()
	// Whatever the kill said: what counts is its exit.
	if _, err := service.Wait(ctx, &tasks.WaitRequest{ContainerID: container, ExecID: id}); err != nil && !missing(err) {
		return s.r.failed("waiting for the end of an old attach process", err)
	}
	if err := remove(); err != nil {
		return s.r.failed("deleting an old attach process", err)
	}
	return nil
}

// logErrors carries what an attach process complains of to the agent's log, until its end.
func (s *Sandbox) logErrors(stderr *os.File, id string) {
	b, _ := io.ReadAll(io.LimitReader(stderr, 4096))
	if len(b) > 0 {
		s.r.log.Warn("an attach process said", "sandbox", s.Record.Identity.SandboxID, "attach", id, "text", string(b))
	}
	_, _ = io.Copy(io.Discard, stderr)
}

// pipes are the FIFOs between the agent and a process in a container, in a folder of their own.
type pipes struct {
	dir          string
	in, out, err *os.File
	// held keep the FIFOs open for writing until the process has ended: before the shim opens them there is no end of file.
	held []*os.File
	once sync.Once
}

func newPipes(dir string) (_ *pipes, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the streams of an attach process: %w", err)
	}
	p := &pipes{dir: dir}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	for _, s := range []struct {
		name string
		read **os.File
	}{{"in", nil}, {"out", &p.out}, {"err", &p.err}} {
		if err := unix.Mkfifo(p.path(s.name), 0o600); err != nil {
			return nil, fmt.Errorf("making the streams of an attach process: %w", &os.PathError{Op: "mkfifo", Path: p.path(s.name), Err: err})
		}
		// Opened for both, which neither blocks nor fails without another end (fifo(7)).
		both, err := openFIFO(p.path(s.name), os.O_RDWR)
		if err != nil {
			return nil, err
		}
		if s.read == nil {
			p.in = both
			continue
		}
		p.held = append(p.held, both)
		if *s.read, err = openFIFO(p.path(s.name), os.O_RDONLY); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func openFIFO(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the streams of an attach process: %w", err)
	}
	return f, nil
}

func (p *pipes) path(name string) string { return filepath.Join(p.dir, name) }

// release lets the readers see the end of file once the process's ends are closed too.
func (p *pipes) release() {
	p.once.Do(func() {
		for _, f := range p.held {
			f.Close()
		}
	})
}

func (p *pipes) Close() {
	p.release()
	for _, f := range []*os.File{p.in, p.out, p.err} {
		if f != nil {
			f.Close()
		}
	}
}

// said is the beginning of what a process has written to its standard error, without waiting for more of it.
func (p *pipes) said() string {
	_ = p.err.SetReadDeadline(time.Now().Add(time.Millisecond))
	b, _ := io.ReadAll(io.LimitReader(p.err, 1024))
	return strings.TrimSpace(string(b))
}

// attachConn is a connection over the standard streams of an attach process.
type attachConn struct {
	*pipes
	sandbox *Sandbox
	id      string
	waiting context.Context
	stop    context.CancelFunc
}

var _ net.Conn = (*attachConn)(nil)

// again is how long a lost containerd is left alone before it is asked for the attach process again. The streams are the
// shim's: they go on.
const again = 200 * time.Millisecond

// await waits for the end of the attach process, of itself or by Close, and removes what is left of it.
func (c *attachConn) await() {
	defer c.pipes.Close()
	c.awaitExit()
	clean, cancel := context.WithTimeout(context.WithoutCancel(c.waiting), cleanupTime)
	defer cancel()
	done, err := c.sandbox.aloneAttaching(clean)
	if err == nil {
		err = c.sandbox.detach(clean, c.id)
		done()
	}
	if err != nil {
		// The next Dial does it, or the end of the container.
		c.sandbox.r.log.Debug("an attach process is left", "sandbox", c.sandbox.Record.Identity.SandboxID, "attach", c.id, "error", err)
	}
	c.release()
	// What it wrote last may still be read.
	<-c.waiting.Done()
}

// lastWords is how long after a sandbox's end its streams go on, for what the shim still carries.
const lastWords = 2 * time.Second

// endWithSandbox closes the connection when the sandbox has ended. A shim that hangs, or that has lost its virtual machine, may neither
// tell of the attach process's end nor close its end of a stream: a command would be waited for until its time is over.
func (c *attachConn) endWithSandbox() {
	select {
	case <-c.waiting.Done():
		return
	case <-c.sandbox.Init.Exited():
	}
	select {
	case <-c.waiting.Done():
	case <-time.After(lastWords):
		_ = c.Close() // of what is closed already
	}
}

func (c *attachConn) awaitExit() {
	for {
		_, err := c.sandbox.r.client.TaskService().Wait(c.waiting, &tasks.WaitRequest{ContainerID: c.sandbox.Record.Identity.ContainerID, ExecID: c.id})
		if err == nil || missing(err) || c.waiting.Err() != nil {
			return
		}
		select {
		case <-c.waiting.Done():
			return
		case <-c.sandbox.Init.Exited():
			return
		case <-time.After(again):
		}
	}
}

func (c *attachConn) Read(b []byte) (int, error)  { return c.out.Read(b) }
func (c *attachConn) Write(b []byte) (int, error) { return c.in.Write(b) }

// Close ends the connection at once, and the attach process in the background.
func (c *attachConn) Close() error {
	c.stop()
	return errors.Join(c.in.Close(), c.out.Close())
}

func (c *attachConn) LocalAddr() net.Addr                { return attachAddr(c.id) }
func (c *attachConn) RemoteAddr() net.Addr               { return attachAddr(c.id) }
func (c *attachConn) SetReadDeadline(t time.Time) error  { return c.out.SetReadDeadline(t) }
func (c *attachConn) SetWriteDeadline(t time.Time) error { return c.in.SetWriteDeadline(t) }
func (c *attachConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

type attachAddr string

func (attachAddr) Network() string  { return "attach" }
func (a attachAddr) String() string { return string(a) }
