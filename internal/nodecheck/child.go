package nodecheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
)

// What takes a process of its own is tried by this program, started again under another name: a receiptd that is the root of a
// sandbox, and a pid1 in it, as internal/runtime and pkg/nsexec start theirs.
const (
	asReceiptd = "nodecheck-receiptd"
	asPid1     = "nodecheck-pid1"
)

// canStart says that this program becomes the child that is started of it. A program that does not call Init would begin its
// own work instead.
var canStart atomic.Bool

// Init is called by a main function before anything else but the other Inits. In a child of a check it does not return.
func Init() {
	switch os.Args[0] {
	case asReceiptd:
		answer(os.Stdout, receiptd())
	case asPid1:
		answer(os.NewFile(pid1Out, "the answer"), pid1())
	default:
		canStart.Store(true)
	}
}

// childEnviron: a child allocates little and ends at once.
var childEnviron = []string{"GOGC=off", "GOMAXPROCS=1"}

// pid1Out is the descriptor that the child of the child answers on.
const pid1Out = 3

func answer(to io.Writer, f Facts) {
	if err := json.NewEncoder(to).Encode(f.Seen); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// The ids of the sandbox that is tried.
const (
	sandboxIDs = 1 << 16
	pid1UID    = 65000
	commandUID = 1000
)

// trySandbox starts the child and reads what it saw.
func trySandbox(ctx context.Context, root bool) map[ID][]Fact {
	p := probe{ids: []ID{Proc, NestedNS, NestedProc, Seccomp}}
	if !root {
		return p.inconclusive("only root can try it", "run this as root")
	}
	if !canStart.Load() {
		return p.inconclusive("this program can't be started for it", "run sandbox-agent check")
	}
	if st, err := os.Stat("/proc/self/exe"); err != nil || st.Mode()&0o001 == 0 {
		return p.inconclusive("a sandbox's ids can't execute this program", "chmod o+x it")
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{asReceiptd}
	cmd.Dir, cmd.Env = "/", childEnviron
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	ids := idRange(probeID, sandboxIDs)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		// The gids are root's to map, so groups may be set inside.
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{Uid: 0, Gid: 0},
	}
	if err := cmd.Start(); err != nil {
		return p.inconclusive("no namespaces to try it in: "+err.Error(), mendFirst)
	}
	err := cmd.Wait()
	var f Facts
	if jsonErr := json.Unmarshal(stdout.Bytes(), &f.Seen); jsonErr != nil {
		return p.inconclusive(fmt.Sprintf("the child that tried it ended without an answer (%v) %s", errors.Join(err, jsonErr), strings.TrimSpace(stderr.String())), hangs)
	}
	return f.Seen
}

// mendFirst is what to do about what could not be tried for want of something else.
const mendFirst = "mend what is missing first, and check again"

// endInTime bounds the life of a child whose parent is gone.
func endInTime() { time.AfterFunc(2*probeTime, func() { os.Exit(1) }) }

// receiptd does what the first process of a sandbox does, in its order: its own /proc, then its restrictions, then a pid1.
func receiptd() (f Facts) {
	runtime.LockOSThread()
	endInTime()
	proc := mountProc("")
	f.add(Proc, proc)
	if proc.Answer != Yes {
		// The id maps of a child are written through /proc, and its ids are those of another PID namespace there.
		for _, id := range []ID{NestedNS, NestedProc, Seccomp} {
			f.add(id, unsure("no fresh /proc to try it with").do(mendFirst))
		}
		return f
	}
	if err := errors.Join(keepOnly(receiptdCapabilities...), unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)); err != nil {
		for _, id := range []ID{NestedNS, NestedProc, Seccomp} {
			f.add(id, unsure("giving up rights: %v", err).do(mendFirst))
		}
		return f
	}
	filter := seccomp.Install(seccomp.Container())
	seen, err := startPid1()
	if err != nil {
		f.add(NestedNS, no(err))
		f.add(NestedProc, unsure("no namespaces to try it in").do(mendFirst))
		f.add(Seccomp, seccompWithout(filter))
		return f
	}
	f.add(NestedNS, yes("made by uid %d, with no_new_privs and no rights on the node", probeID))
	f.add(NestedProc, seen[NestedProc]...)
	if filter != nil {
		f.add(Seccomp, no(filter))
	} else {
		f.add(Seccomp, seen[Seccomp]...)
	}
	return f
}

func seccompWithout(filter error) Fact {
	if filter != nil {
		return no(filter)
	}
	return unsure("receiptd's filter loads; no command to try the other one on").do(mendFirst)
}

// receiptdCapabilities are those of hostkernel.Capabilities.
var receiptdCapabilities = []uint{unix.CAP_SYS_ADMIN, unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SETPCAP, unix.CAP_KILL, unix.CAP_NET_ADMIN, unix.CAP_NET_BIND_SERVICE}

// keepOnly leaves the calling thread with these capabilities, and whatever it executes with no more.
func keepOnly(capabilities ...uint) error {
	var keep uint32
	for _, c := range capabilities {
		keep |= 1 << c
	}
	for c := uint(0); c < 64; c++ {
		if c < 32 && keep&(1<<c) != 0 {
			continue
		}
		// EINVAL: beyond the last capability of this kernel.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return os.NewSyscallError("prctl(PR_CAPBSET_DROP)", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{{Effective: keep, Permitted: keep}}
	return os.NewSyscallError("capset", unix.Capset(&header, &data[0]))
}

// mountProc covers /proc by one of this process's PID namespace, in its own mount namespace.
func mountProc(options string) Fact {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return no(fmt.Errorf("making the mounts private: %w", err))
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return no(os.NewSyscallError("mount", err))
	}
	return yes("one was mounted")
}

// startPid1 starts the child's child from the calling thread, which has its restrictions.
func startPid1() (map[ID][]Fact, error) {
	var out [2]int
	if err := unix.Pipe2(out[:], unix.O_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	ours := os.NewFile(uintptr(out[0]), "the answer")
	defer ours.Close()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: pid1UID, Size: 1}, {ContainerID: commandUID, HostID: commandUID, Size: 1}}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{asPid1}, &syscall.ProcAttr{
		Dir: "/", Env: childEnviron, Files: []uintptr{0, 2, 2, uintptr(out[1])},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
			UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
			Credential: &syscall.Credential{Uid: 0, Gid: 0},
		},
	})
	unix.Close(out[1])
	if err != nil {
		return nil, err
	}
	var seen map[ID][]Fact
	err = json.NewDecoder(ours).Decode(&seen)
	for {
		if _, e := unix.Wait4(pid, nil, 0, nil); e != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pid1 ended without an answer: %w", err)
	}
	return seen, nil
}

// pid1 does what the first process of a command does, and then what a command may not.
func pid1() (f Facts) {
	runtime.LockOSThread()
	endInTime()
	proc := mountProc("hidepid=2")
	if proc.Answer == Yes {
		if err := unix.Mount("/dev/null", "/proc/kcore", "", unix.MS_BIND, ""); err != nil && err != unix.ENOENT {
			proc = no(fmt.Errorf("masking /proc/kcore: %w", err))
		}
	}
	f.add(NestedProc, proc)
	f.add(Seccomp, tryCommandFilter())
	return f
}

// tryCommandFilter loads a command's filter and does what it must refuse: a user namespace of the command's own.
func tryCommandFilter() Fact {
	if err := errors.Join(keepOnly(), unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)); err != nil {
		return unsure("giving up rights: %v", err)
	}
	if err := makeNamespaces(unix.CLONE_NEWUSER, nil); err != nil {
		return unsure("nothing for a filter to refuse: %v", err)
	}
	if err := seccomp.Install(seccomp.Command(false)); err != nil {
		return no(err)
	}
	if err := makeNamespaces(unix.CLONE_NEWUSER, nil); !errors.Is(err, unix.EPERM) {
		return nof("the filter loads, and does not refuse what it must (%v)", err)
	}
	return yes("receiptd's and a command's are loaded, and refuse")
}
