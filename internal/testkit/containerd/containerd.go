package containerd

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const poll = 5 * time.Millisecond

// patience bounds what a test waits for when it fails; nothing passes or fails by it.
var patience = testkit.Patience()

// Daemon is a containerd with everything that it keeps.
type Daemon struct {
	T testing.TB
	// Address is its socket.
	Address string

	dir   string
	root  string // what it keeps for good
	path  string // PATH of it and its shims
	cmd   *exec.Cmd
	ended chan struct{}
}

// gVisorStates are where gVisor's shim has runsc keep its state: a folder for each of containerd's namespaces. In it runsc makes an
// empty network namespace once, and keeps it.
const gVisorStates, gVisorNetns = "/run/containerd/runsc/*", "null-netns"

// Start starts a containerd with the given parts of scripts/containerd.sh in its PATH. Without them the test is skipped, or
// fails where tests must run.
func Start(t testing.TB, parts ...string) *Daemon {
	t.Helper()
	return StartOn(t, "", parts...)
}

// StartOn is Start with a folder of the caller's, unless root is empty, for images, their file systems and the database.
func StartOn(t testing.TB, root string, parts ...string) *Daemon {
	t.Helper()
	testkit.Need(t, testkit.Root)
	d := &Daemon{T: t, dir: testkit.StateDir(t), root: root, path: strings.Join(append(folders(t, append([]string{"containerd"}, parts...)), os.Getenv("PATH")), ":")}
	d.Address = filepath.Join(d.dir, "containerd.sock")
	if d.root == "" {
		d.root = filepath.Join(d.dir, "root")
	}
	require.NoError(t, os.WriteFile(d.config(), []byte(fmt.Sprintf(config, d.dir, d.Address, d.root)), 0o600))
	t.Cleanup(d.end)
	d.Serve()
	return d
}

// config leaves out what takes long to start and nobody here asks for: the CRI.
const config = `version = 4
root = "%[3]s"
state = "%[1]s/state"
imports = []
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.podsandbox.controller.v1.podsandbox", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
[plugins.'io.containerd.server.v1.grpc']
  address = "%[2]s"
[plugins.'io.containerd.server.v1.ttrpc']
  address = "%[2]s.ttrpc"
`

func (d *Daemon) config() string { return filepath.Join(d.dir, "config.toml") }

// Need skips the test, or fails it where tests must run, without the given parts.
func Need(t testing.TB, parts ...string) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	folders(t, append([]string{"containerd"}, parts...))
}

// Folder is where a part of scripts/containerd.sh has been built. Without it the test is skipped, or fails where tests must run.
func Folder(t testing.TB, part string) string {
	t.Helper()
	return folders(t, []string{part})[0]
}

// folders asks the script for what it has built; nothing is built for a test.
func folders(t testing.TB, parts []string) []string {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(root, "scripts", "containerd.sh"), append([]string{"-n"}, parts...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		why := strings.TrimSpace(stderr.String())
		require.NotEqual(t, "1", os.Getenv(testkit.MustRun), "this test needs a container runtime, and %s=1 forbids to skip it: %s", testkit.MustRun, why)
		t.Skipf("this test needs a container runtime: %s", why)
	}
	return strings.Fields(string(out))
}

// Serve starts the process and waits until it answers.
func (d *Daemon) Serve() {
	d.T.Helper()
	log, err := os.OpenFile(filepath.Join(d.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(d.T, err)
	defer log.Close()
	first, _, _ := strings.Cut(d.path, ":") // the folder of containerd itself
	d.cmd = exec.Command(filepath.Join(first, "containerd"), "-c", d.config())
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.Env = append(os.Environ(), "PATH="+d.path)
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	require.NoError(d.T, d.cmd.Start())
	d.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(d.cmd, d.ended)
	c := d.Client()
	defer c.Close()
	Until(d.T, "containerd answers", func() bool {
		select {
		case <-d.ended:
			d.T.Fatalf("containerd ended:\n%s", d.Log())
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := c.Version(ctx)
		return err == nil
	})
}

// Client is a client of it; the caller closes it.
func (d *Daemon) Client() *client.Client {
	d.T.Helper()
	c, err := client.New(d.Address, client.WithTimeout(100*time.Millisecond), client.WithDefaultNamespace("sandbox-agent"))
	require.NoError(d.T, err)
	return c
}

// Kill ends it as a crash would (kill -9). Its shims go on.
func (d *Daemon) Kill() {
	_ = d.cmd.Process.Kill()
	<-d.ended
}

// Signal sends it a signal, such as SIGSTOP.
func (d *Daemon) Signal(s syscall.Signal) {
	d.T.Helper()
	require.NoError(d.T, d.cmd.Process.Signal(s))
}

// Log is the end of what it said, at most 16 KiB.
func (d *Daemon) Log() string {
	b, _ := os.ReadFile(filepath.Join(d.dir, "log"))
	return string(b[max(0, len(b)-16<<10):])
}

// Shims are the processes of its shims.
func (d *Daemon) Shims() []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		args := strings.Split(string(line), "\x00")
		if strings.HasPrefix(filepath.Base(args[0]), "containerd-shim-") && strings.Contains(string(line), d.Address) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// end stops it and fails the test for what it leaves.
func (d *Daemon) end() {
	if d.T.Failed() {
		d.T.Logf("containerd's log:\n%s", d.Log())
	}
	select {
	case <-d.ended:
	default:
		_ = d.cmd.Process.Signal(syscall.SIGCONT)
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-d.ended:
		case <-time.After(patience):
			d.T.Errorf("containerd does not end on SIGTERM")
			d.Kill()
		}
	}
	for end := time.Now().Add(5 * time.Second); len(d.Shims()) > 0; time.Sleep(poll) {
		if time.Now().After(end) {
			d.T.Errorf("shims are left: %v", d.Shims())
			for _, pid := range d.Shims() {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			break
		}
	}
	d.endGVisor()
	mounts, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1], d.dir) {
			d.T.Errorf("a mount is left: %s", f[1])
			_ = syscall.Unmount(f[1], syscall.MNT_DETACH)
		}
	}
}

// endGVisor fails the test for state of runsc's that is left of this containerd's sandboxes, and takes runsc's network namespace
// away where nobody has a sandbox: the folder is shared by all containerds of the machine.
func (d *Daemon) endGVisor() {
	folders, _ := filepath.Glob(gVisorStates)
	for _, folder := range folders {
		states, _ := filepath.Glob(filepath.Join(folder, "*.state"))
		for _, path := range states {
			if b, _ := os.ReadFile(path); strings.Contains(string(b), d.dir+"/") {
				d.T.Errorf("state of runsc's is left: %s", path)
			}
		}
		if len(states) == 0 {
			_ = syscall.Unmount(filepath.Join(folder, gVisorNetns), syscall.MNT_DETACH)
			_ = os.Remove(filepath.Join(folder, gVisorNetns))
			_ = os.Remove(folder) // unless something else is in it
		}
	}
}

// Left is how many containers and leases it still knows of.
func (d *Daemon) Left() (containers, leases int) {
	d.T.Helper()
	c := d.Client()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cs, err := c.ContainerService().List(ctx)
	require.NoError(d.T, err)
	ls, err := c.LeasesService().List(ctx)
	require.NoError(d.T, err)
	return len(cs), len(ls)
}

// Until polls for something that comes by itself, and fails the test when it never does.
func Until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(poll) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}
