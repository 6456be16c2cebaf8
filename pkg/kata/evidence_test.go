package kata

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// machine is a folder with programs of a node's Kata: real programs (sleep) under the names of a VMM and a file server.
type machine struct {
	t      *testing.T
	dir    string
	config Config
}

func newMachine(t *testing.T) machine {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash)
	m := machine{t, short(t), Config{Hypervisor: "qemu", SharedFS: "virtio-fs"}}
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	data, err := os.ReadFile(sleep)
	require.NoError(t, err)
	for _, f := range []struct {
		name string
		path *string
	}{{"qemu", &m.config.VMM}, {"virtiofsd", &m.config.VirtioFSDaemon}, {"bystander", new(string)}} {
		*f.path = filepath.Join(m.dir, f.name)
		require.NoError(t, os.WriteFile(*f.path, data, 0o755))
	}
	return m
}

// started is a process that a test started. Its end closes gone, with the process reaped.
type started struct {
	cmd  *exec.Cmd
	gone chan struct{}
	says *bufio.Reader
}

func (s started) pid() int { return s.cmd.Process.Pid }

func (s started) kill() {
	_ = s.cmd.Process.Kill()
	<-s.gone
}

// bash runs lines in a shell of its own; say in them with echo.
func (m machine) bash(lines string) started {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "bash", "-c", lines)
	cmd.Dir = m.dir
	r, w, err := os.Pipe()
	require.NoError(m.t, err)
	cmd.Stdout = w
	require.NoError(m.t, cmd.Start())
	w.Close()
	s := started{cmd, make(chan struct{}), bufio.NewReader(r)}
	go func() { _ = cmd.Wait(); r.Close(); close(s.gone) }()
	m.t.Cleanup(s.kill)
	return s
}

func (s started) line(t *testing.T) string {
	t.Helper()
	line, err := s.says.ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(line)
}

func (s started) pids(t *testing.T) []int {
	t.Helper()
	var pids []int
	for _, f := range strings.Fields(s.line(t)) {
		pid, err := strconv.Atoi(f)
		require.NoError(t, err)
		pids = append(pids, pid)
		t.Cleanup(func() { endPid(pid) })
	}
	return pids
}

// endPid ends a process of the test that may have gone to init.
func endPid(pid int) {
	if fd, err := unix.PidfdOpen(pid, 0); err == nil {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		unix.Close(fd)
	}
}

// endOf gives a wait for the end of processes that may go to init.
func endOf(t *testing.T, pids []int) (wait func()) {
	t.Helper()
	var fds []unix.PollFd
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		require.NoError(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	return func() {
		for i := range fds {
			for n := 0; n != 1; {
				var err error
				if n, err = unix.Poll(fds[i:i+1], -1); err != nil {
					require.ErrorIs(t, err, unix.EINTR)
				}
			}
		}
	}
}

// vm starts a shim with a VMM and a file server below it, as Cloud Hypervisor's are, and answers with the pids once all run.
func (m machine) vm(id string) (started, []int) {
	m.t.Helper()
	shim := m.bash(fmt.Sprintf(`
		(exec -a "cloud-hypervisor --api-socket /run/vc/vm/%[1]s/clh-api.sock" ./qemu 1000 >&-) & vmm=$!
		(exec -a "virtiofsd --shared-dir /run/kata/%[1]s/shared" ./virtiofsd 1000 >&-) & fs=$!
		until [[ $(readlink /proc/$vmm/exe) == *qemu && $(readlink /proc/$fs/exe) == *virtiofsd ]]; do :; done
		echo $vmm $fs; wait`, id))
	return shim, shim.pids(m.t)
}

func (m machine) find(l Lookup) (VM, error) {
	l.Config = m.config
	if l.VMDirs == nil {
		l.VMDirs = []string{filepath.Join(m.dir, "vm")}
	}
	return FindVM(l)
}

func roles(vm VM) map[Role][]int {
	all := map[Role][]int{}
	for _, p := range vm.Processes {
		all[p.Role] = append(all[p.Role], p.Pid)
	}
	return all
}

func sources(ev Evidence) []string {
	var all []string
	for _, i := range ev.Items {
		all = append(all, i.Source)
	}
	return all
}

// now is a context that has ended: what has not happened by now is missing.
func now(t *testing.T) context.Context {
	ctx, cancel := cancelled(t)
	cancel()
	return ctx
}

func TestP5AVMIsGoneWhenAllItsProcessesAre(t *testing.T) {
	m := newMachine(t)
	shim, pids := m.vm(sandbox)
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid()})
	require.NoError(t, err)
	require.Equal(t, map[Role][]int{RoleShim: {shim.pid()}, RoleVMM: {pids[0]}, RoleVirtiofsd: {pids[1]}}, roles(vm))

	// It is written down and read again: an agent that was started meanwhile waits for the same.
	data, err := json.Marshal(vm)
	require.NoError(t, err)
	var again VM
	require.NoError(t, json.Unmarshal(data, &again))
	require.Equal(t, vm, again)

	ev, err := again.Wait(now(t))
	require.ErrorIs(t, err, ErrNoEvidence)
	require.False(t, ev.Complete)
	require.Empty(t, ev.Items)

	// The VMM is lost: the shim may exit with 0 then, and say so to containerd. That is no evidence while a file server runs.
	endPid(pids[0])
	shim.kill()
	ev, err = again.Wait(now(t))
	require.ErrorIs(t, err, ErrNoEvidence)
	require.ErrorContains(t, err, fmt.Sprintf("virtiofsd, process %d, has not ended", pids[1]))
	require.Contains(t, sources(ev), "shim_pidfd")

	waited := make(chan error, 1)
	go func() {
		var err error
		ev, err = again.Wait(t.Context())
		waited <- err
	}()
	endPid(pids[1])
	require.NoError(t, <-waited)
	require.True(t, ev.Complete)
	require.ElementsMatch(t, []string{"shim_pidfd", "vmm_pidfd", "virtiofsd_pidfd", "no_process_left"}, sources(ev))
}

// A shim that is stuck, or gone with exit status 0, while the VM runs on: an accepted deletion is no evidence either.
func TestP5AShimsEndIsNotTheVMs(t *testing.T) {
	m := newMachine(t)
	shim, _ := m.vm(sandbox)
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid()})
	require.NoError(t, err)
	shim.kill()
	_, err = vm.Wait(now(t))
	require.ErrorIs(t, err, ErrNoEvidence)
	require.ErrorContains(t, err, "vmm, process")

	require.NoError(t, vm.Kill())
	ev, err := vm.Wait(t.Context())
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.NoError(t, vm.Kill(), "there is nothing to end any more")
}

func TestAVMMThatBecameADaemonIsFound(t *testing.T) {
	m := newMachine(t)
	const daemon = `(setsid bash -c '(exec -a "%s" ./%s 1000 >&-) & p=$!; until [[ $(readlink /proc/$p/exe) == *%[2]s ]]; do :; done; echo $p'); `
	shim := m.bash(fmt.Sprintf(daemon, "qemu-system-x86_64 -name sandbox-"+sandbox+",debug-threads=on -pidfile x", "qemu") +
		fmt.Sprintf(daemon, "virtiofsd --socket-path=/run/vc/vm/"+sandbox+"/vhost-fs.sock", "virtiofsd") + "exec sleep 1000")
	vmm, fs := shim.pids(t)[0], shim.pids(t)[0]
	p, err := readStat(vmm)
	require.NoError(t, err)
	require.NotEqual(t, shim.pid(), p.parent, "it is no child of the shim")
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid()})
	require.NoError(t, err)
	require.Equal(t, []int{vmm}, roles(vm)[RoleVMM])
	require.Equal(t, []int{fs}, roles(vm)[RoleVirtiofsd])
}

// QEMU's arguments need not hold the id; the pid file names it, and the process it names has to be the VMM.
func TestQEMUsPidFileIsBelievedOnlyOfTheVMM(t *testing.T) {
	m := newMachine(t)
	shim := m.bash(`(exec -a "virtiofsd /` + sandbox + `/" ./virtiofsd 1000 >&-) & fs=$!
		until [[ $(readlink /proc/$fs/exe) == *virtiofsd ]]; do :; done
		echo $fs; wait`)
	shim.pids(t)
	daemon := m.bash(`./qemu 1000 >&- & vmm=$!; ./bystander 1000 >&- & other=$!
		until [[ $(readlink /proc/$vmm/exe) == *qemu && $(readlink /proc/$other/exe) == *bystander ]]; do :; done
		echo $vmm $other; wait`)
	pids := daemon.pids(t)
	file := filepath.Join(m.dir, "vm", sandbox, "pid")
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	l := Lookup{SandboxID: sandbox, ShimPid: shim.pid()}

	require.NoError(t, os.WriteFile(file, []byte(strconv.Itoa(pids[1])), 0o644))
	_, err := m.find(l)
	require.ErrorIs(t, err, ErrNoVMM)

	require.NoError(t, os.WriteFile(file, []byte(strconv.Itoa(pids[0])+"\n"), 0o644))
	vm, err := m.find(l)
	require.NoError(t, err)
	require.Equal(t, []int{pids[0]}, roles(vm)[RoleVMM])
}

// A process of the same name and with the id among its arguments, but of another program; and the VMM of a sandbox whose id
// begins with this one's.
func TestANameAloneIsNeverEnough(t *testing.T) {
	m := newMachine(t)
	other, pids := m.vm(sandbox + "0")
	impostor := m.bash(`(exec -a "qemu -name sandbox-` + sandbox + `" ./bystander 1000 >&-) & p=$!
		until [[ $(readlink /proc/$p/exe) == *bystander ]]; do :; done; echo $p; wait`)
	impostor.pids(t)
	empty := m.bash("echo ready; exec sleep 1000")
	empty.line(t)
	_, err := m.find(Lookup{SandboxID: sandbox, ShimPid: empty.pid()})
	require.ErrorIs(t, err, ErrNoVMM)
	require.ErrorContains(t, err, "no process of it runs the configured vmm")
	vm, err := m.find(Lookup{SandboxID: sandbox + "0", ShimPid: other.pid()})
	require.NoError(t, err, "control: with its own id it is found")
	require.Equal(t, []int{pids[0]}, roles(vm)[RoleVMM])
}

func TestAVMWhoseProcessesCannotBeToldIsNotUsed(t *testing.T) {
	m := newMachine(t)
	shim, _ := m.vm(sandbox)
	for name, l := range map[string]Lookup{
		"no id":        {SandboxID: "../x", ShimPid: shim.pid()},
		"no shim":      {SandboxID: sandbox},
		"a gone shim":  {SandboxID: sandbox, ShimPid: 1 << 22},
		"the agent's":  {SandboxID: sandbox, ShimPid: os.Getpid()},
		"init's":       {SandboxID: sandbox, ShimPid: 1},
		"no processes": {SandboxID: sandbox, ShimPid: 2},
	} {
		_, err := m.find(l)
		require.ErrorIs(t, err, ErrNoVMM, name)
	}
	m.config.VMM = filepath.Join(m.dir, "none")
	_, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid()})
	require.ErrorIs(t, err, ErrNoVMM)
	require.ErrorContains(t, err, "the configured vmm")

	// Dragonball's VMM is the shim itself.
	m.config = Config{Hypervisor: "dragonball", SharedFS: "inline-virtio-fs"}
	alone := m.bash("echo ready; exec sleep 1000")
	alone.line(t)
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: alone.pid()})
	require.NoError(t, err)
	require.Equal(t, map[Role][]int{RoleShim: {alone.pid()}}, roles(vm))
}

// The pid is another process's by now: its start time says so. It is neither waited for nor ended.
func TestP5APidThatWasUsedAgainIsAnotherProcess(t *testing.T) {
	m := newMachine(t)
	other := m.bash("echo ready; exec sleep 1000")
	other.line(t)
	boot, err := bootID()
	require.NoError(t, err)
	stat, err := readStat(other.pid())
	require.NoError(t, err)
	vm := VM{SandboxID: sandbox, BootID: boot, Processes: []Process{{RoleVMM, other.pid(), stat.start - 1}}}
	require.NoError(t, vm.Kill())
	ev, err := vm.Wait(now(t))
	require.NoError(t, err)
	require.True(t, ev.Complete)
	select {
	case <-other.gone:
		require.Fail(t, "a process that was never the VM's was ended")
	default:
	}
	vm.Processes[0].StartTime++
	_, err = vm.Wait(now(t))
	require.ErrorIs(t, err, ErrNoEvidence, "control: with its own start time it is the same")
}

func TestP5AnotherBootIsEvidence(t *testing.T) {
	vm := VM{SandboxID: sandbox, BootID: "of-before", Processes: []Process{{RoleVMM, os.Getpid(), 1}}}
	ev, err := vm.Wait(now(t))
	require.NoError(t, err)
	require.Equal(t, []string{"boot_id"}, sources(ev))
	require.NoError(t, vm.Kill())
	_, err = VM{SandboxID: sandbox}.Wait(t.Context())
	require.ErrorIs(t, err, ErrNoEvidence, "what was never written down can't be missed")
}

func TestP5AVMMThatWasStartedLaterIsNotMissed(t *testing.T) {
	m := newMachine(t)
	shim, _ := m.vm(sandbox)
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid()})
	require.NoError(t, err)
	later, pids := m.vm(sandbox)
	require.NoError(t, vm.Kill())
	<-shim.gone
	ev, err := vm.Wait(t.Context())
	require.ErrorIs(t, err, ErrNoEvidence)
	require.ErrorContains(t, err, "it was started later")
	require.False(t, ev.Complete)
	endPid(pids[0])
	endPid(pids[1])
	<-later.gone
	_, err = vm.Wait(t.Context())
	require.NoError(t, err)
}

// cgroup makes a cgroup of the test's own, in whichever hierarchy the machine has.
func cgroup(t *testing.T) string {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.CgroupV1orV2)
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(root, "kata-test")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, os.Remove(dir)) })
		return dir
	}
	require.Fail(t, "no cgroup hierarchy")
	return ""
}

func TestP5ACgroupThatIsNotEmptyIsMissedInTheEvidence(t *testing.T) {
	m := newMachine(t)
	dir := cgroup(t)
	shim, pids := m.vm(sandbox)
	stray := m.bash("echo ready; exec sleep 1000")
	stray.line(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(stray.pid())), 0))
	vm, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid(), Cgroups: []string{dir, dir + "-none"}})
	require.NoError(t, err)
	require.Equal(t, []int{stray.pid()}, roles(vm)[RoleOther])

	late := m.bash("echo ready; exec sleep 1000")
	late.line(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(late.pid())), 0))
	ended := endOf(t, pids)
	require.NoError(t, vm.Kill())
	<-shim.gone
	<-stray.gone
	ended()
	_, err = vm.Wait(now(t))
	require.ErrorIs(t, err, ErrNoEvidence)
	require.ErrorContains(t, err, fmt.Sprintf("cgroup %s still holds [%d]", dir, late.pid()))
	late.kill()
	ev, err := vm.Wait(t.Context())
	require.NoError(t, err)
	require.Contains(t, sources(ev), "cgroup_empty")
}

// A wrong cgroup (the root, the agent's own) must not lead to its processes being ended as a VM's.
func TestACgroupWithTheAgentInItIsRefused(t *testing.T) {
	m := newMachine(t)
	shim, _ := m.vm(sandbox)
	for _, dir := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			continue
		}
		_, err := m.find(Lookup{SandboxID: sandbox, ShimPid: shim.pid(), Cgroups: []string{dir}})
		require.ErrorIs(t, err, ErrNoVMM)
		require.ErrorContains(t, err, "which is not a VM's")
	}
}

func TestAnIdIsMentionedOnlyAsAWhole(t *testing.T) {
	for arg, want := range map[string]bool{
		"/run/vc/vm/ab1/clh.sock": true, "ab1": true, "--id=ab1": true, "sandbox-ab1,debug": true, "x/ab12/ab1/y": true, "ab1.sock": true,
		"": false, "ab": false, "ab12": false, "xab1": false, "ab1-2": false, "/run/vc/vm/ab1_/x": false, "AB1": false, "my-ab1": false,
	} {
		require.Equal(t, want, proc{args: []string{"first", arg}}.mentions("ab1"), "%q", arg)
	}
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[a-z0-9][a-z0-9-]{1,20}`).Draw(t, "id")
		p := proc{args: rapid.SliceOf(rapid.String()).Draw(t, "args")}
		p.args = append(p.args, "/run/kata/"+id+"/x")
		require.True(t, p.mentions(id))
	})
}

func TestAProcessMayHaveAnyName(t *testing.T) {
	m := newMachine(t)
	odd := filepath.Join(m.dir, ") 1 (2 x")
	require.NoError(t, os.Rename(filepath.Join(m.dir, "bystander"), odd))
	cmd := exec.CommandContext(t.Context(), odd, "1000")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	p, err := readStat(cmd.Process.Pid)
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), p.parent)
	require.False(t, p.kernel)
	if k, err := readStat(2); err == nil { // kthreadd, where this PID namespace has it
		require.True(t, k.kernel)
	}
}

// The start of a sandbox was cut short before its processes were written down: they are found by what they run, and no other
// sandbox's is touched.
func TestP5WhatWasNeverWrittenDownIsSweptByItsId(t *testing.T) {
	m := newMachine(t)
	shim, pids := m.vm(sandbox)
	other, others := m.vm(sandbox + "2")
	l := Lookup{SandboxID: sandbox, Config: m.config, Shim: filepath.Join(m.dir, "bystander"), VMDirs: []string{m.dir}}
	wait := endOf(t, pids)
	ev, err := Sweep(t.Context(), l)
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.ElementsMatch(t, []string{"vmm_pidfd", "virtiofsd_pidfd", "no_process_left"}, sources(ev))
	wait()
	<-shim.gone // it waited for them

	vm, err := m.find(Lookup{SandboxID: sandbox + "2", ShimPid: other.pid()})
	require.NoError(t, err, "the other sandbox's processes are there")
	require.Equal(t, others, append(roles(vm)[RoleVMM], roles(vm)[RoleVirtiofsd]...))

	again, err := Sweep(t.Context(), l)
	require.NoError(t, err)
	require.Equal(t, []string{"no_process_left"}, sources(again))

	l.Config.VMM = filepath.Join(m.dir, "gone")
	_, err = Sweep(t.Context(), l)
	require.ErrorIs(t, err, ErrNoEvidence, "what is looked for can't be told any more")
}
