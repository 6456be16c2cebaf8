package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/tests/kernel/plan"
)

// machine is one boot.
type machine struct {
	kernel    string // ELF
	initramfs string
	disk      string // ext4, kept as it is: what a guest writes is thrown away
	append    string // more of the kernel's command line
	dir       string // scratch
}

// boot starts the machine, gives each line of its results to line, and waits for its end. It fails unless the guest said
// that it is done; done is what it said.
func (m machine) boot(ctx context.Context, line func(string)) (done string, err error) {
	sock := filepath.Join(m.dir, "results.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		return "", fmt.Errorf("listening for the guest's results: %w", err)
	}
	defer l.Close()
	// Emulation always: where there is a /dev/kvm, it is not certain to run a guest, and a result has to mean the same
	// everywhere.
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2048",
		"-kernel", m.kernel, "-initrd", m.initramfs, "-append", "console=ttyS0 panic=-1 quiet "+m.append, "-serial", "stdio",
		"-device", "virtio-serial-pci", "-chardev", "socket,id=results,path="+sock, "-device", "virtserialport,chardev=results,name="+plan.Port,
		"-drive", "if=none,id=disk,format=raw,snapshot=on,file="+m.disk, "-device", "virtio-blk-pci,drive=disk")
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
	if err := os.WriteFile(filepath.Join(m.dir, "console.log"), console.Bytes(), 0o644); err != nil {
		return "", err
	}
	if err != nil || ctx.Err() != nil || done == "" {
		return "", fmt.Errorf("the guest did not come to its end: %v, %v: its console ends:\n%s", err, ctx.Err(), tail(console.Bytes()))
	}
	return done, nil
}

func tail(b []byte) []byte { return b[max(0, len(b)-3000):] }
