package pid1

import (
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// Descriptors that pkg/nsexec hands to pid1 (its ForkExec names them in this order), and pid1 to the launcher.
const (
	FDControl  = 3 // pid1 and launcher: the socket to receiptd
	FDStdout   = 4 // pid1: write end of the command's stdout
	FDStderr   = 5
	FDExe      = 6 // O_PATH of this binary, which no path in the view leads to
	FDLauncher = 7 // pid1: the launcher's end of its socket to receiptd
	FDJoin     = 8 // pid1: the first of Setup.JoinFDs cgroup.procs files
	// launcherExe and launcherJoin are the same two in the launcher.
	launcherExe, launcherJoin = 4, 5
)

// roleVar in the environment makes the binary a launcher. (Arguments are to be had only from package os.)
const roleVar, launcherRole = "SANDBOX_PID1_ROLE", "launcher"

// Environ is pid1's whole environment. asyncpreemptoff: the Go runtime would signal its own threads with SIGURG, whose
// handler resetSignals takes away. GOGC=off: it allocates a few kilobytes in its life. GOMAXPROCS=1 saves threads.
var Environ = []string{"GODEBUG=asyncpreemptoff=1", "GOGC=off", "GOMAXPROCS=1"}

// Main is the binary's main function. It does not return.
func Main() {
	runtime.LockOSThread()
	if role, _ := syscall.Getenv(roleVar); role == launcherRole {
		launch()
	}
	if unix.Getpid() != 1 {
		_ = wire.FD(2).WriteAll([]byte("pid1 is started by receiptd as the first process of a new PID namespace; it is of no use by hand\n"))
		unix.Exit(2)
	}
	serve()
}

// fail reports why this process can't do its work and ends it. The parent reads the reason from the control socket.
func fail(what string, err error) {
	reason := what
	if err != nil {
		reason += ": " + err.Error()
	}
	_ = wire.FD(FDControl).WriteAll(wire.Frame(wire.KindFailed, wire.Failed{Reason: reason}.Encode()))
	unix.Exit(1)
}

func readSetup() wire.Setup {
	kind, body, err := wire.Read(wire.FD(FDControl))
	if err == wire.ErrClosed {
		unix.Exit(0) // receiptd went away
	}
	if err != nil {
		fail("reading the setup", err)
	}
	if kind != wire.KindSetup {
		fail("the first frame is not the setup but "+strconv.Quote(string(kind)), nil)
	}
	setup, err := wire.DecodeSetup(body)
	if err != nil {
		fail("decoding the setup", err)
	}
	return setup
}

// cpu gives a process's own CPU time in microseconds.
func cpu() (user, system uint64) {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0, 0
	}
	return uint64(ru.Utime.Nano() / 1000), uint64(ru.Stime.Nano() / 1000)
}

func startLauncher(setup wire.Setup) int {
	files := []uintptr{0, FDStdout, FDStderr, FDLauncher, FDExe}
	for i := range setup.JoinFDs {
		files = append(files, uintptr(FDJoin+i))
	}
	// The path is the one that holds in the child, after its descriptors have been put in place.
	pid, err := syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(launcherExe), []string{"pid1-launcher"},
		&syscall.ProcAttr{Dir: "/", Env: append(Environ[:len(Environ):len(Environ)], roleVar+"="+launcherRole), Files: files})
	if err != nil {
		fail("starting the launcher", err)
	}
	// What the launcher holds must have no second holder, or its end would not be seen.
	for fd := FDStdout; fd < FDJoin+int(setup.JoinFDs); fd++ {
		_ = unix.Close(fd)
	}
	return pid
}
