package testkit

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Inside is a plan attached in a mount namespace of its own, over the node's own folders.
type Inside struct {
	t      testing.TB
	States []mounts.State
}

// The command's ids: as the sandbox sees them, and on the node.
const (
	insideID = 1000
	hostID   = 0x70000000 + insideID
)

// Attach puts the mounts of a plan over the node's own folders, in a mount namespace that only f and what it starts are
// in. Of a sandbox it has the mounts and the ids, and nothing else.
func Attach(t testing.TB, plan mounts.Plan, f func(in *Inside)) {
	t.Helper()
	opened, err := mounts.Open(plan)
	require.NoError(t, err)
	defer opened.Close()
	ns, err := mounts.UserNamespace(plan.Mapping(hostID, hostID))
	require.NoError(t, err)
	defer ns.Close()
	detached, err := opened.Clone(ns)
	require.NoError(t, err)
	defer detached.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread and its mount namespace end with the goroutine
		defer close(done)      // also when a require in f ends the goroutine: the test has failed then
		done <- attachAndRun(t, detached, f)
	}()
	require.NoError(t, <-done)
}

func attachAndRun(t testing.TB, detached *mounts.Detached, f func(in *Inside)) error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	root, err := mounts.OpenSource("/")
	if err != nil {
		return err
	}
	defer root.Close()
	states, err := detached.Attach(root)
	if err != nil {
		return err
	}
	f(&Inside{t: t, States: states})
	return nil
}

// Run runs a shell script as a command would run: with the command's ids in a user namespace, and no rights. It gives
// what the script printed, both streams together, and its exit code.
func (in *Inside) Run(dir, script string) (string, int) {
	in.t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = dir
	cmd.Env = gitEnv("Agent", "agent@example.com")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: insideID, HostID: hostID, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: insideID, HostID: hostID, Size: 1}},
		Credential:  &syscall.Credential{Uid: insideID, Gid: insideID, NoSetGroups: true},
	}
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		require.NoError(in.t, err)
	}
	return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
}

// Must is Run of what has to succeed.
func (in *Inside) Must(dir, script string) string {
	in.t.Helper()
	out, code := in.Run(dir, script)
	require.Equal(in.t, 0, code, "%s\n%s", script, out)
	return out
}

// Outside runs f where the plan is not attached: as the node itself.
func (in *Inside) Outside(f func()) {
	done := make(chan struct{})
	go func() { // another thread: this one's mount namespace is the plan's
		defer close(done)
		f()
	}()
	<-done
}
