package seccomp_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
)

// A filter can't be taken off again, so whatever is tried under one runs in a new process: this test program, told by
// the environment what to do instead of testing.
const childEnv = "SECCOMP_TEST_CHILD"

// order is what a child does.
type order struct {
	// Filters are loaded in this order: "container", "command", "nested".
	Filters []string
	// Calls are made one after the other; their error numbers are the child's output.
	Calls []rawCall
	// Exec, when set, is the program that the child becomes.
	Exec []string
}

type rawCall struct {
	Nr   uint32
	Args [6]uint64
}

func TestMain(m *testing.M) {
	if text := os.Getenv(childEnv); text != "" {
		if err := child(text); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(100)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func child(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	for _, f := range o.Filters {
		if err := install(f); err != nil {
			return err
		}
	}
	if len(o.Exec) > 0 {
		os.Unsetenv(childEnv)
		return fmt.Errorf("exec %s: %w", o.Exec[0], unix.Exec(o.Exec[0], o.Exec, os.Environ()))
	}
	// A thread that has called PTRACE_TRACEME stops at its next signal, for ever.
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil); err != nil {
		return err
	}
	errnos := make([]int, len(o.Calls))
	for i, c := range o.Calls {
		a := c.Args
		_, _, e := unix.RawSyscall6(uintptr(c.Nr), uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5]))
		errnos[i] = int(e)
	}
	return json.NewEncoder(os.Stdout).Encode(errnos)
}

func install(filter string) error {
	switch filter {
	case "container":
		return seccomp.InstallAll(seccomp.Container())
	case "command":
		return seccomp.Install(seccomp.Command(false))
	case "nested":
		return seccomp.Install(seccomp.Command(true))
	}
	return fmt.Errorf("no filter %q", filter)
}

// childCommand prepares a child, in a session of its own so that it has no terminal to hang up.
func childCommand(t *testing.T, o order) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(o)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+string(text), "GODEBUG=asyncpreemptoff=1")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	return cmd
}

// errnosOf makes calls in one child and gives their error numbers.
func errnosOf(t *testing.T, filters []string, calls ...rawCall) []unix.Errno {
	t.Helper()
	cmd := childCommand(t, order{Filters: filters, Calls: calls})
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	var numbers []unix.Errno
	require.NoError(t, json.Unmarshal(out, &numbers))
	require.Len(t, numbers, len(calls))
	return numbers
}
