package vm

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// Machine is one boot.
type Machine struct {
	Kernel    string // ELF, or whatever qemu boots
	Initramfs string
	Disk      string        // ext4, kept as it is: what a guest writes is thrown away; empty: none
	Append    string        // more of the kernel's command line
	Memory    int           // MiB; 2048 by default
	CPUs      int           // 2 by default
	CPU       string        // qemu's name for what is emulated; "max" by default
	Parallel  bool          // emulate its two processors in a thread for each
	Quiet     time.Duration // bound of a guest that has said nothing yet; ten minutes by default
	Dir       string        // scratch: the console's text in the end (console.log); its path is short, for a socket
}

// patience is the default of Machine.Quiet: many times what a boot takes, also on a machine that does ten other things.
const patience = 10 * time.Minute

// Boot starts the machine, gives each line of its results to line, and waits for its end, which is at the latest that of the
// context. It fails unless the guest said in its last line that it is done, and then switched itself off: a kernel that panics
// ends qemu without an error too. done is what it said. An error has the end of the console with it.
func (m Machine) Boot(ctx context.Context, line func(string)) (done string, err error) {
	results, err := listen(filepath.Join(m.Dir, "results.sock"))
	if err != nil {
		return "", fmt.Errorf("listening for the guest's results: %w", err)
	}
	defer results.Close()
	monitor, err := listen(filepath.Join(m.Dir, "monitor.sock"))
	if err != nil {
		return "", fmt.Errorf("listening for qemu's events: %w", err)
	}
	defer monitor.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var console bytes.Buffer
	cmd := m.command(ctx, results, monitor)
	cmd.Stdout, cmd.Stderr = &console, &console
	// qemu ends with this process, however that ends. The signal follows the thread (prctl(2)).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("starting qemu: %w: install qemu-system-x86", err)
	}
	off := make(chan string, 1)
	go func() { off <- whyOff(monitor) }()
	said := make(chan string, 1)
	heard := time.AfterFunc(cmp.Or(m.Quiet, patience), func() { cancel(errQuiet) })
	go func() {
		said <- lines(results, func(s string) {
			heard.Stop()
			line(s)
		})
	}()
	err = cmd.Wait()
	heard.Stop()
	// In case qemu never connected.
	results.Close()
	monitor.Close()
	done, why := <-said, <-off
	if err := os.WriteFile(filepath.Join(m.Dir, "console.log"), console.Bytes(), 0o644); err != nil {
		return "", err
	}
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
	case why != switchedOff:
		err = fmt.Errorf("it ended by %q, and a guest that is done by %q", why, switchedOff)
	case done == "":
		err = errors.New("its last line does not say that it is done")
	default:
		return done, nil
	}
	return "", fmt.Errorf("the guest did not come to its end: %w: its console ends:\n%s", err, tail(console.Bytes()))
}

var errQuiet = errors.New("it never said anything")

// command is qemu's. It emulates always: where there is a /dev/kvm, it is not certain to run a guest, and a result has to mean
// the same everywhere. One thread emulates both processors by turns: with two, a guest's kernel that patches its own code while
// the other processor runs it may meet its own breakpoint after it has forgotten it, and panics ("Oops: int3"), where the machine
// is busy.
func (m Machine) command(ctx context.Context, results, monitor *net.UnixListener) *exec.Cmd {
	if m.Memory == 0 {
		m.Memory = 2048
	}
	if m.CPUs == 0 {
		m.CPUs = 2
	}
	threads := "single"
	if m.Parallel {
		threads = "multi"
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35", "-accel", "tcg,tb-size=512,thread=" + threads, "-cpu", cmp.Or(m.CPU, "max"), "-smp", strconv.Itoa(m.CPUs), "-m", strconv.Itoa(m.Memory),
		"-kernel", m.Kernel, "-initrd", m.Initramfs, "-append", "console=ttyS0 panic=-1 quiet " + m.Append, "-serial", "stdio",
		"-chardev", "socket,id=monitor,path=" + monitor.Addr().String(), "-mon", "chardev=monitor,mode=control",
		"-device", "virtio-serial-pci", "-chardev", "socket,id=results,path=" + results.Addr().String(),
		"-device", "virtserialport,chardev=results,name=" + plan.Port,
	}
	if m.Disk != "" {
		args = append(args, "-drive", "if=none,id=disk,format=raw,snapshot=on,file="+m.Disk, "-device", "virtio-blk-pci,drive=disk")
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func listen(path string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

// lines gives each line of the guest's to f, up to the one that says that it is done. It gives what that says if none follows.
func lines(l *net.UnixListener, f func(string)) (done string) {
	conn, err := l.Accept()
	if err != nil {
		return ""
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	for {
		s, err := r.ReadString('\n')
		if s = strings.TrimRight(s, "\r\n"); s != "" {
			rest, last := strings.CutPrefix(s, plan.Done)
			if done = rest; !last {
				done = ""
				f(s)
			}
		}
		if err != nil {
			return done
		}
	}
}

// switchedOff is qemu's word for the end of a guest that switched itself off; one whose kernel panics is reset.
const switchedOff = "guest-shutdown"

// whyOff reads qemu's events (qemu-qmp-ref(7), SHUTDOWN) to their end.
func whyOff(l *net.UnixListener) (why string) {
	conn, err := l.Accept()
	if err != nil {
		return ""
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(`{"execute":"qmp_capabilities"}` + "\n")); err != nil {
		return ""
	}
	for dec := json.NewDecoder(conn); ; {
		var e struct {
			Event string
			Data  struct{ Reason string }
		}
		if dec.Decode(&e) != nil {
			return why
		}
		if e.Event == "SHUTDOWN" {
			why = e.Data.Reason
		}
	}
}

func tail(b []byte) []byte { return b[max(0, len(b)-3000):] }
