// Command guest is the init of a test guest (package vm): it mounts what a booted node has, cgroup v2 with
// its controllers handed down, runs the test programs of the plan and powers off. Static, no cgo.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

func main() {
	os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
	out, err := boot()
	if err == nil {
		err = runAll(out)
	}
	if err != nil {
		fmt.Fprintln(out, "guest:", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

var todo plan.Plan

// boot brings the guest up and gives the port that results go to; the console until that exists.
func boot() (io.Writer, error) {
	for _, m := range [][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		if err := mount(m[0], m[1], m[0], 0, ""); err != nil {
			return os.Stderr, err
		}
	}
	b, err := os.ReadFile(plan.Path)
	if err != nil {
		return os.Stderr, err
	}
	if err := json.Unmarshal(b, &todo); err != nil {
		return os.Stderr, fmt.Errorf("reading the plan: %w", err)
	}
	order, err := os.ReadFile(plan.Order)
	if err != nil {
		return os.Stderr, err
	}
	for _, m := range strings.Fields(string(order)) {
		if err := load(m); err != nil {
			return os.Stderr, err
		}
	}
	port, err := openPort()
	if err != nil {
		return os.Stderr, err
	}
	return port, errors.Join(enterRoot(), mountAll(), makeCgroups(), loopback())
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

func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
		fmt.Fprintln(os.Stderr, "guest: this machine is none for", path) // kvm_amd wants a constant clock under PREEMPT_RT
		return nil
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("loading %s: %w", path, err)
	}
	return nil
}

// openPort finds the virtio port by its name.
func openPort() (*os.File, error) {
	for range 500 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == plan.Port {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_WRONLY, 0)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, fmt.Errorf("there is no virtio port %q: the kernel needs CONFIG_VIRTIO_PCI and CONFIG_VIRTIO_CONSOLE, built in or among the modules that it was given", plan.Port)
}

// enterRoot makes the disk the root: by moving its mount, because pivot_root(2) refuses an initramfs before Linux 7.0.
func enterRoot() error {
	if err := mount("/dev/vda", "/root", "ext4", 0, ""); err != nil {
		return fmt.Errorf("%w: the kernel needs CONFIG_VIRTIO_BLK and CONFIG_EXT4_FS, built in or among the modules that it was given", err)
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := unix.Mount(dir, "/root"+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s: %w", dir, err)
		}
	}
	if err := os.Chdir("/root"); err != nil {
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

func mountAll() error {
	const plain = unix.MS_NOSUID | unix.MS_NODEV
	return errors.Join(
		mount("tmpfs", "/run", "tmpfs", plain, "mode=755"),
		mount("tmpfs", "/tmp", "tmpfs", plain, "mode=1777"),
		mount("devpts", "/dev/pts", "devpts", 0, "mode=620,ptmxmode=666"),
		mount("tmpfs", "/dev/shm", "tmpfs", plain, "mode=1777"),
		mountCgroups(plain|unix.MS_NOEXEC),
		// As an init system leaves it: everything is shared.
		unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""),
	)
}

func mountCgroups(flags uintptr) error {
	if !todo.CgroupV1 {
		// systemd's options: with nsdelegate a cgroup namespace is a boundary that no process is moved across.
		return mount("cgroup2", "/sys/fs/cgroup", "cgroup2", flags, "nsdelegate,memory_recursiveprot")
	}
	if err := mount("tmpfs", "/sys/fs/cgroup", "tmpfs", flags, "mode=755"); err != nil {
		return err
	}
	for _, c := range append(todo.Controllers, "devices", "freezer") {
		// Newer kernels may have no version 1 of a controller, and then refuse it.
		if err := mount("cgroup", filepath.Join("/sys/fs/cgroup", v1Name(c)), "cgroup", flags, v1Name(c)); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// v1Name is what a controller of version 2 is called in version 1.
func v1Name(controller string) string {
	if controller == "io" {
		return "blkio"
	}
	return controller
}

// makeCgroups moves this process out of the root cgroup, where a unit of an init system would not be either.
func makeCgroups() error {
	if todo.CgroupV1 {
		return nil // processes and controllers may be in the root there
	}
	const unit = "/sys/fs/cgroup/system.slice/agent.service"
	if err := os.MkdirAll(unit, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(unit+"/cgroup.procs", []byte("0"), 0); err != nil {
		return fmt.Errorf("moving into %s: %w", unit, err)
	}
	has, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		return err
	}
	for _, c := range todo.Controllers {
		if !slices.Contains(strings.Fields(string(has)), c) {
			continue // switched off on the kernel's command line
		}
		if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+"+c), 0); err != nil {
			return fmt.Errorf("enabling the controller %s: %w", c, err)
		}
	}
	return nil
}

func loopback() error {
	out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput()
	if err != nil {
		return fmt.Errorf("setting the loopback device up: %w: %s", err, out)
	}
	return nil
}

// waitReaping runs a program to its end and meanwhile reaps every orphan, as a node's init does. The code is 128 and the
// number of the signal that ended it.
func waitReaping(cmd *exec.Cmd) (code int, err error) {
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && pid != cmd.Process.Pid:
		case err != nil:
			return 0, err
		case status.Signaled():
			return 128 + int(status.Signal()), nil
		default:
			return status.ExitStatus(), nil
		}
	}
}

// runAll runs the programs one after the other. The last line is explicit: a panic ends qemu without an error.
func runAll(out io.Writer) error {
	var codes []string
	for _, r := range todo.Runs {
		fmt.Fprintf(out, "%s%s\n", plan.Begin, r.Name)
		cmd := exec.Command(r.Argv[0], r.Argv[1:]...)
		cmd.Dir, cmd.Env = r.Dir, todo.Env
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(r.Stdin), out, out
		code, err := waitReaping(cmd)
		if err != nil {
			return fmt.Errorf("running %s: %w", r.Name, err)
		}
		codes = append(codes, fmt.Sprintf("%s=%d", r.Name, code))
	}
	_, err := fmt.Fprintf(out, "%s%s\n", plan.Done, strings.Join(codes, " "))
	return err
}
