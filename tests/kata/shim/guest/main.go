// Command guest is the init of a virtual machine of tests/kata, in the place of Kata's agent: it mounts the shared file system,
// listens on vsock, and runs the container with runc. Static, no cgo.
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/tests/kata/shim/wire"
)

func main() {
	err := boot()
	if err == nil {
		err = serve()
	}
	fmt.Println("guest:", err)
	// The kernel panics, and ends the machine, when its init does.
}

func mount(source, target, fs string, flags uintptr, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, fs, flags, data); err != nil {
		return fmt.Errorf("mounting %s: %w", target, err)
	}
	return nil
}

func boot() error {
	for _, m := range [][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		if err := mount(m[0], m[1], m[0], 0, ""); err != nil {
			return err
		}
	}
	order, err := os.ReadFile("/modules.order")
	if err != nil {
		return err
	}
	for _, m := range strings.Fields(string(order)) {
		if err := load(m); err != nil {
			return err
		}
	}
	if err := leaveInitramfs(); err != nil {
		return err
	}
	return errors.Join(
		os.Setenv("PATH", "/usr/bin"),
		mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"),
		mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"),
		mount("cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""),
		mount(wire.Tag, wire.Shared, "virtiofs", unix.MS_NOSUID|unix.MS_NODEV, ""),
		loopback(),
		network(),
	)
}

func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("loading %s: %w", path, err)
	}
	return nil
}

// leaveInitramfs makes a tmpfs the root: pivot_root(2), which runc needs, refuses an initramfs before Linux 7.0.
func leaveInitramfs() error {
	const root = "/root"
	if err := mount("tmpfs", root, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(root, "usr"), os.DirFS("/usr")); err != nil {
		return err
	}
	for _, link := range []string{"lib", "lib64", "bin"} {
		if err := os.Symlink("usr/"+link, filepath.Join(root, link)); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := os.Mkdir(root+dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, root+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s: %w", dir, err)
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("moving the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}

// loopback sets lo up (netdevice(7)).
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var req struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], "lo")
	req.flags = unix.IFF_UP
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return fmt.Errorf("setting lo up: %w", errno)
	}
	return nil
}

// network sets the guest's interface up as the shim has it.
func network() error {
	batch := filepath.Join(wire.Shared, wire.Network)
	if _, err := os.Stat(batch); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if out, err := exec.Command("ip", "-batch", batch).CombinedOutput(); err != nil {
		return fmt.Errorf("setting the network up: %w: %s", err, out)
	}
	return nil
}

// process is the container, or one that was started in it beside.
type process struct {
	ended  chan struct{}
	status uint32
}

var (
	mu        sync.Mutex
	processes = map[string]*process{}
	// output is where the container's goes; it is given before the start.
	output io.Writer
)

func serve() error {
	l, err := vsock.Listen(wire.Port, nil)
	if err != nil {
		return fmt.Errorf("listening on vsock: %w", err)
	}
	fmt.Println("guest: listening")
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go answer(conn.(*vsock.Conn))
	}
}

func answer(conn *vsock.Conn) {
	defer conn.Close()
	var r wire.Request
	if err := wire.Receive(conn, &r); err != nil {
		return
	}
	var a wire.Answer
	var err error
	switch r.Op {
	case wire.OpStart:
		err = start(r)
	case wire.OpOutput:
		err = keepOutput(conn)
	case wire.OpExec:
		err = execute(r, conn)
	case wire.OpWait:
		a.Status, err = wait(r)
	case wire.OpKill:
		err = kill(r)
	default:
		err = fmt.Errorf("unknown operation %q", r.Op)
	}
	if err != nil {
		a.Error = err.Error()
	}
	if err != nil || r.Op != wire.OpExec && r.Op != wire.OpOutput {
		_ = wire.Send(conn, a)
	}
}

func pidFile(r wire.Request) string { return "/run/pid-" + r.ID + "-" + r.Exec }

// announce makes a process known, which can be waited for then.
func announce(r wire.Request) {
	mu.Lock()
	defer mu.Unlock()
	processes[r.Exec] = &process{ended: make(chan struct{})}
}

// run runs runc, which runs as long as the process does.
func run(r wire.Request, stdin io.Reader, stdout io.Writer, args ...string) error {
	cmd := exec.Command("runc", append([]string{"--root", "/run/runc"}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, os.Stdout
	p, err := find(r)
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		p.status = 255
		close(p.ended)
		return err
	}
	go func() {
		_ = cmd.Wait()
		p.status = uint32(cmd.ProcessState.ExitCode())
		close(p.ended)
	}()
	return nil
}

// keepOutput has the connection for the container's output until the container has ended.
func keepOutput(conn *vsock.Conn) error {
	if err := wire.Send(conn, wire.Answer{}); err != nil {
		return err
	}
	announce(wire.Request{})
	mu.Lock()
	output = conn
	mu.Unlock()
	_, err := wait(wire.Request{})
	return err
}

func start(r wire.Request) error {
	mu.Lock()
	stdout := output
	mu.Unlock()
	if err := run(r, nil, stdout, "run", "--bundle", wire.Shared, "--pid-file", pidFile(r), r.ID); err != nil {
		return err
	}
	return started(r)
}

// started waits until runc has written the process's pid down, which it does when it runs.
func started(r wire.Request) error {
	p, err := find(r)
	if err != nil {
		return err
	}
	for {
		if _, err := os.Stat(pidFile(r)); err == nil {
			return nil
		}
		select {
		case <-p.ended:
			return fmt.Errorf("runc ended with status %d; the guest's console has the reason", p.status)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// execute answers before the process has the streams.
func execute(r wire.Request, conn *vsock.Conn) error {
	announce(r)
	if err := wire.Send(conn, wire.Answer{}); err != nil {
		return err
	}
	path := "/run/process-" + r.Exec
	if err := os.WriteFile(path, r.Process, 0o600); err != nil {
		return err
	}
	// Its own: this connection's end must be that of the process's output, and not that of its input.
	in, out, err := os.Pipe()
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(out, conn)
		out.Close()
	}()
	if err := run(r, in, conn, "exec", "--process", path, "--pid-file", pidFile(r), r.ID); err != nil {
		return err
	}
	in.Close()
	p, err := find(r)
	if err != nil {
		return err
	}
	<-p.ended
	return nil
}

func find(r wire.Request) (*process, error) {
	mu.Lock()
	defer mu.Unlock()
	p := processes[r.Exec]
	if p == nil {
		return nil, fmt.Errorf("no process %q", r.Exec)
	}
	return p, nil
}

func wait(r wire.Request) (uint32, error) {
	p, err := find(r)
	if err != nil {
		return 0, err
	}
	<-p.ended
	return p.status, nil
}

func kill(r wire.Request) error {
	p, err := find(r)
	if err != nil {
		return err
	}
	if err := started(r); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return nil
	default:
	}
	b, err := os.ReadFile(pidFile(r))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.Signal(r.Signal)); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

var _ net.Conn = (*vsock.Conn)(nil)
