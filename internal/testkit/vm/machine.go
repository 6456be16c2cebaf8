package vm

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// Machine is one boot.
type Machine struct {
	Kernel    string // ELF
	Initramfs string
	Disk      string // ext4, kept as it is: what a guest writes is thrown away
	Append    string // more of the kernel's command line
	Memory    int    // MiB; 2048 by default
	Dir       string // scratch: the socket of the results, and in the end the console's text (console.log)
}

// Boot starts the machine, gives each line of its results to line, and waits for its end. It fails unless the guest said
// that it is done; done is what it said. An error has the end of the console with it.
func (m Machine) Boot(ctx context.Context, line func(string)) (done string, err error) {
	sock := filepath.Join(m.Dir, "results.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		return "", fmt.Errorf("listening for the guest's results: %w", err)
	}
	defer l.Close()
	if m.Memory == 0 {
		m.Memory = 2048
	}
	// Emulation always: where there is a /dev/kvm, it is not certain to run a guest, and a result has to mean the same
	// everywhere.
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35", "-accel", "tcg,tb-size=512", "-cpu", "max", "-smp", "2", "-m", strconv.Itoa(m.Memory),
		"-kernel", m.Kernel, "-initrd", m.Initramfs, "-append", "console=ttyS0 panic=-1 quiet "+m.Append, "-serial", "stdio",
		"-device", "virtio-serial-pci", "-chardev", "socket,id=results,path="+sock, "-device", "virtserialport,chardev=results,name="+plan.Port,
		"-drive", "if=none,id=disk,format=raw,snapshot=on,file="+m.Disk, "-device", "virtio-blk-pci,drive=disk")
	var console bytes.Buffer
	cmd.Stdout, cmd.Stderr = &console, &console
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("starting qemu: %w: install qemu-system-x86", err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		l.Close() // in case it never connected
	}()
	if conn, err := l.Accept(); err == nil {
		sc := bufio.NewScanner(conn)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			if rest, ok := strings.CutPrefix(sc.Text(), plan.Done); ok {
				done = rest
				continue
			}
			line(sc.Text())
		}
		conn.Close()
	}
	err = <-ended
	if err := os.WriteFile(filepath.Join(m.Dir, "console.log"), console.Bytes(), 0o644); err != nil {
		return "", err
	}
	if err != nil || ctx.Err() != nil || done == "" {
		return "", fmt.Errorf("the guest did not come to its end: %v, %v: its console ends:\n%s", err, ctx.Err(), tail(console.Bytes()))
	}
	return done, nil
}

func tail(b []byte) []byte { return b[max(0, len(b)-3000):] }

// Test boots a machine whose init follows a plan of test programs, and counts. It fails unless each program was run to its end
// and said that its tests hold. What the tests wrote is kept in tests.log.
func (m Machine) Test(ctx context.Context) (Counter, error) {
	var c Counter
	log, err := os.Create(filepath.Join(m.Dir, "tests.log"))
	if err != nil {
		return c, err
	}
	defer log.Close()
	done, err := m.Boot(ctx, func(line string) {
		fmt.Fprintln(log, line)
		c.Line(line)
	})
	if err != nil {
		return c, err
	}
	for _, r := range strings.Fields(done) {
		if !strings.HasSuffix(r, "=0") {
			return c, fmt.Errorf("failed: %s", done)
		}
	}
	return c, nil
}
