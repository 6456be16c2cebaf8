package vm

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	testcontainerd "github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// mustRun is set to 1 where the test may not be skipped.
const mustRun = "SANDBOX_TEST_KATA"

// owner owns the repository and the worktree on disk.
const owner = 4321

// startTimeout is enough for a VM on an emulated processor of a busy machine.
const startTimeout = "start_timeout: 10m"

// subnet is the sandboxes'.
const subnet = "10.231.0.0/16"

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

// machine is a session in a virtual machine.
type machine struct {
	*node.Agent
	d            *testcontainerd.Daemon
	kata         kata.Report
	id, worktree string
	count        int
}

// need makes a containerd that finds Kata. Without KVM and Kata the test is skipped, also where tests must run: no machine without them can
// run it but by tests/kata/nested.
func need(t *testing.T) *machine {
	t.Helper()
	m := &machine{Agent: &node.Agent{T: t}, kata: kata.Check(t.Context(), kata.Places{})}
	if err := m.kata.Err(); err != nil {
		require.NotEqual(t, "1", os.Getenv(mustRun), "this node was made for this test")
		t.Skipf("this test needs a node with KVM and Kata (tests/kata/nested emulates one): %v", err)
	}
	t.Setenv("PATH", filepath.Dir(m.kata.Shim.Path)+":"+os.Getenv("PATH")) // where containerd looks for it
	m.d = testcontainerd.Start(t, "runc")
	return m
}

// start starts an agent with Kata as its only runtime, and makes a session.
func (m *machine) start(o node.Options, network string) {
	t := m.T
	t.Helper()
	o.Config += fmt.Sprintf("runtime: {default: kata, allowed: [kata], %s}\ncontainerd: {address: %s}\n", startTimeout, m.d.Address)
	m.Agent = node.Start(t, o)
	repo := testkit.Repo(t, owner)
	m.worktree = testkit.Worktree(t, owner, repo, "topic")
	res, err := m.Client.Sessions.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: m.worktree}, Network: &sandboxv1.Network{Mode: network},
	})
	require.NoError(t, err, "%s\n%s", m.LogText(), m.d.Log())
	m.id = res.GetSession().GetSessionId()
	require.Equal(t, sandboxv1.Session_READY, res.GetSession().GetState(), res.GetSession().GetReason())
}

func (m *machine) session() *sandboxv1.Session {
	m.T.Helper()
	res, err := m.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: m.id})
	require.NoError(m.T, err)
	return res.GetSession()
}

func (m *machine) request(command string) *sandboxv1.ExecRequest {
	m.count++
	return &sandboxv1.ExecRequest{SessionId: m.id, ExecId: fmt.Sprintf("exec-%d", m.count), Command: command, Text: true}
}

// exec runs a command to its verified receipt.
func (m *machine) exec(command string) *sandboxv1.ExecResult {
	m.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience())
	defer cancel()
	res, err := m.Client.Execs.Exec(ctx, m.request(command))
	if err != nil {
		m.fail(err)
	}
	r := res.GetResult()
	require.Equal(m.T, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s: %s", command, r.GetReason())
	key, err := verify.LoadKey(filepath.Join(m.State, "keys", r.GetSandboxId()+".pub"))
	require.NoError(m.T, err)
	p, err := verify.File(filepath.Join(m.State, "receipts", r.GetSandboxId(), r.GetExecId()+".json"), key)
	require.NoError(m.T, err)
	require.Equal(m.T, r.GetExecId(), p.ExecID)
	require.Equal(m.T, "wait4", p.Boundary.Method)
	require.True(m.T, p.SealsIntact)
	return r
}

func (m *machine) output(command string) string {
	m.T.Helper()
	r := m.exec(command)
	require.Zero(m.T, r.GetExitCode(), "%s\n%s%s", command, r.GetStdoutText(), r.GetStderrText())
	return strings.TrimSpace(r.GetStdoutText())
}

// fail ends the test with all that tells why a command has no answer: the agent's goroutines, containerd's log, the virtual machines'
// consoles and what their processes wait for.
func (m *machine) fail(err error) {
	m.T.Helper()
	_ = m.Cmd.Process.Signal(unix.SIGQUIT) // Go ends a program by it, and prints its goroutines
	<-m.Ended
	log, _ := os.ReadFile(m.Log)
	const look = `tail -n 20 /run/kata-containers/*/console /run/kata-containers/*/*.log; for p in /proc/[0-9]*; do echo "$p $(tr '\0' ' ' <$p/cmdline | cut -c 1-80) $(grep State $p/status) $(cat $p/wchan)"; done`
	seen, _ := exec.CommandContext(context.Background(), "sh", "-c", look).CombinedOutput()
	require.FailNow(m.T, "there is no answer", "%v\n%s\n%s\n%s", err, m.d.Log(), seen, log)
}

// answered waits for a command's result.
func (m *machine) answered(answer <-chan *sandboxv1.ExecResult) *sandboxv1.ExecResult {
	m.T.Helper()
	select {
	case r := <-answer:
		require.NotNil(m.T, r, m.LogText())
		return r
	case <-time.After(testkit.Patience()):
		m.fail(context.DeadlineExceeded)
		return nil
	}
}

// begin starts a command that says in the worktree that it runs, and waits for that. timeout is in seconds.
func (m *machine) begin(timeout float64) (*sandboxv1.ExecRequest, <-chan *sandboxv1.ExecResult) {
	m.T.Helper()
	r, answer := m.request(""), make(chan *sandboxv1.ExecResult, 1)
	r.TimeoutSeconds = &timeout
	r.Command = "echo > running-" + r.ExecId + "; exec sleep 100000"
	go func() {
		defer close(answer)
		if res, err := m.Client.Execs.Exec(context.Background(), r); err == nil {
			answer <- res.GetResult()
		}
	}()
	m.Until("the command runs", func() bool {
		_, err := os.Stat(filepath.Join(m.worktree, "running-"+r.ExecId))
		return err == nil
	})
	return r, answer
}

// asRoot runs a program in the sandbox as its root with all capabilities, beside receiptd: nothing of pid1 bounds it.
func (m *machine) asRoot(script string) (string, uint32) {
	m.T.Helper()
	ctx := namespaces.WithNamespace(context.Background(), "sandbox-agent")
	c := m.d.Client()
	defer c.Close()
	container, err := c.LoadContainer(ctx, m.session().GetSandbox().GetId())
	require.NoError(m.T, err)
	task, err := container.Task(ctx, nil)
	require.NoError(m.T, err)
	all := []string{"CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER", "CAP_SETUID", "CAP_SETGID"}
	m.count++
	var out bytes.Buffer
	p, err := task.Exec(ctx, fmt.Sprintf("root-%d", m.count), &specs.Process{
		Args: []string{"/bin/sh", "-c", "exec 2>&1\n" + script}, Cwd: "/", Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
		Capabilities: &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all},
	}, cio.NewCreator(cio.WithStreams(nil, &out, nil)))
	require.NoError(m.T, err)
	exits, err := p.Wait(ctx)
	require.NoError(m.T, err)
	require.NoError(m.T, p.Start(ctx))
	exit := <-exits
	require.NoError(m.T, exit.Error())
	_, err = p.Delete(ctx, client.WithProcessKill)
	require.NoError(m.T, err)
	return strings.TrimSpace(out.String()), exit.ExitCode()
}

// vmm opens the VMM's process.
func (m *machine) vmm() *os.File {
	m.T.Helper()
	id := m.session().GetSandbox().GetId()
	s, err := kata.NewShim(id)
	require.NoError(m.T, err)
	pid, err := s.Pid(m.T.Context())
	require.NoError(m.T, err)
	found, err := kata.FindVM(kata.Lookup{SandboxID: id, ShimPid: pid, Config: m.kata.Config})
	require.NoError(m.T, err)
	i := slices.IndexFunc(found.Processes, func(p kata.Process) bool { return p.Role == kata.RoleVMM })
	fd, err := unix.PidfdOpen(found.Processes[i].Pid, 0)
	require.NoError(m.T, err)
	f := os.NewFile(uintptr(fd), "the VMM")
	m.T.Cleanup(func() { f.Close() })
	return f
}

func (m *machine) signal(vmm *os.File, sig unix.Signal) {
	m.T.Helper()
	require.NoError(m.T, unix.PidfdSendSignal(int(vmm.Fd()), sig, nil, 0))
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return strings.TrimSpace(string(b))
}

// dial is a program that connects a stream socket of AF_VSOCK and says what came of it.
func dial(cid, port uint32) string {
	return fmt.Sprintf(`perl -e 'socket(S, 40, 1, 0) or print("no socket: $!\n"), exit 3;
connect(S, pack("SSLLx4", 40, 0, %d, %d)) or print("no connection: $!\n"), exit 4; print "connected\n"'`, port, cid)
}

// listenVsock listens on the node, and answers with the port.
func listenVsock(t *testing.T) uint32 {
	t.Helper()
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: unix.VMADDR_PORT_ANY}))
	require.NoError(t, unix.Listen(fd, 16))
	sa, err := unix.Getsockname(fd)
	require.NoError(t, err)
	return sa.(*unix.SockaddrVM).Port
}

func sources(ev *sandboxv1.Evidence) []string {
	var out []string
	for _, i := range ev.GetItems() {
		out = append(out, i.GetSource())
	}
	return out
}

func TestSandboxesInVirtualMachines(t *testing.T) {
	m := need(t)
	m.start(node.Options{}, "none")
	within := func(name string, f func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			outer := m.T
			m.T = t
			defer func() { m.T = outer }()
			f(t)
		})
	}
	within("P2: commands run under another kernel, and their receipts verify", func(t *testing.T) {
		require.Equal(t, sandboxv1.Isolation(3), m.session().GetSandbox().GetIsolation())
		require.NotEqual(t, read(t, "/proc/sys/kernel/random/boot_id"), m.output("cat /proc/sys/kernel/random/boot_id"))
		require.Equal(t, m.worktree, m.output("pwd"))
		require.Equal(t, "hello\nmade", m.output("cat README; echo made > made; git add made; git commit -qm made; git log --format=%s -1"))
		require.Equal(t, "made", read(t, filepath.Join(m.worktree, "made")))
		var st unix.Stat_t
		require.NoError(t, unix.Stat(filepath.Join(m.worktree, "made"), &st))
		require.EqualValues(t, owner, st.Uid)
		require.EqualValues(t, 7, m.exec("exit 7").GetExitCode())
	})
	within("P3: nothing of a command is alive after its answer", func(t *testing.T) {
		const find = `for p in /proc/[0-9]*; do tr '\0' ' ' < $p/cmdline | grep -q '^sleep 98765' && echo alive; done; true`
		// Its output would be waited for.
		out, _ := m.asRoot("sleep 98765 >/dev/null 2>&1 & " + find + "; kill $!")
		require.Contains(t, out, "alive", "control: it would be seen")
		m.output("setsid sh -c '(sleep 98765 &) &'")
		out, _ = m.asRoot(find)
		require.NotContains(t, out, "alive")
	})
	within("P11: seals hold in the guest, also against its root", func(t *testing.T) {
		pointer := filepath.Join(m.worktree, ".git")
		before := read(t, pointer)
		for _, attack := range []string{"echo x >> .git", "rm -f .git", "mv .git y", "git config core.fsmonitor /tmp/x"} {
			require.NotZero(t, m.exec(attack).GetExitCode(), attack)
		}
		// The file server asks who writes: it is the worktree's owner, whom the sandbox's root can become.
		const asOwner = "setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'echo x >> %s'"
		out, status := m.asRoot(fmt.Sprintf(asOwner, m.worktree+"/by-root"))
		require.Zero(t, status, "control: the sandbox's root writes in the worktree: %s", out)
		out, status = m.asRoot(fmt.Sprintf("mount -o remount,bind,rw %s || true; "+asOwner, pointer, pointer))
		require.NotZero(t, status, out)
		require.Contains(t, out, "Read-only file system", "it is read-only on the node's side")
		require.Equal(t, before, read(t, pointer))
	})
	within("P10: no command reaches vsock", func(t *testing.T) {
		shim, err := kata.NewShim(m.session().GetSandbox().GetId())
		require.NoError(t, err)
		agent, err := shim.AgentURL(t.Context())
		require.NoError(t, err)
		for _, to := range []kata.Endpoint{{CID: unix.VMADDR_CID_HOST, Port: listenVsock(t)}, agent} {
			out, _ := m.asRoot(dial(to.CID, to.Port))
			require.Equal(t, "connected", out, "control: without pid1's filter %s is reached", to)
			r := m.exec(dial(to.CID, to.Port))
			require.EqualValues(t, 3, r.GetExitCode(), r.GetStdoutText())
			require.Contains(t, r.GetStdoutText(), "no socket")
		}
	})
	within("P9: receipts and socket are not there for a command", func(t *testing.T) {
		require.Empty(t, m.output("ls -A /.sandbox 2>/dev/null; cat /.sandbox/receipts/* /.sandbox/bin/* 2>/dev/null; true"))
	})
	within("P6: the sandbox goes on when the agent is killed", func(t *testing.T) {
		first := m.session().GetSandbox().GetId()
		m.Restart()
		require.Equal(t, "again", m.output("echo again"))
		require.Equal(t, first, m.session().GetSandbox().GetId())
	})
	within("P5: a VMM that is lost in the middle of a command is uncertain, and its workspace is free with evidence", func(t *testing.T) {
		before := m.session()
		_, answer := m.begin(1000)
		m.signal(m.vmm(), unix.SIGKILL)
		r := m.answered(answer)
		require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus(), r.GetReason())
		require.True(t, r.GetEvidence().GetComplete(), "%v", r.GetEvidence())
		require.Subset(t, sources(r.GetEvidence()), []string{"pidfd", "vmm_pidfd", "shim_pidfd", "virtiofsd_pidfd", "no_process_left", "cgroup_empty", "deleted"})
		require.Equal(t, "next", m.output("echo next"))
		require.Greater(t, m.session().GetGeneration(), before.GetGeneration())
	})
	hangs := func(t *testing.T, timeout float64, then func(r *sandboxv1.ExecRequest)) *sandboxv1.ExecResult {
		req, answer := m.begin(timeout)
		vmm := m.vmm()
		m.signal(vmm, unix.SIGSTOP)
		then(req)
		r := m.answered(answer)
		require.True(t, r.GetEvidence().GetComplete(), "%v", r.GetEvidence())
		require.NotEmpty(t, r.GetReason())
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(vmm.Fd()), Events: unix.POLLIN}}, 0)
		require.NoError(t, err)
		require.Equal(t, 1, n, "the VMM has ended")
		return r
	}
	// It waits for minutes, and boots one more: what ends the VM is what ends it in the next case.
	if os.Getenv("SANDBOX_TEST_LONG") == "1" {
		within("P5: a VM that hangs is ended when its command is cancelled", func(t *testing.T) {
			r := hangs(t, 1000, func(r *sandboxv1.ExecRequest) {
				_, err := m.Client.Execs.CancelExec(t.Context(), &sandboxv1.CancelExecRequest{SessionId: m.id, ExecId: r.GetExecId()})
				require.NoError(t, err, m.LogText())
			})
			require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
		})
		m.output("true") // in another VM, which takes its time
	}
	within("P6: a command whose VM hangs is uncertain when its time is over", func(t *testing.T) {
		m.Kill()
		// Nothing boots any more, and what hangs is waited for.
		text := strings.Replace(read(t, m.Config), startTimeout, "start_timeout: 2m", 1) + "\nlimits: {boundary: 5s}\n"
		require.NoError(t, os.WriteFile(m.Config, []byte(text), 0o600))
		m.Serve()
		r := hangs(t, 30, func(*sandboxv1.ExecRequest) {})
		require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus(), r.GetReason())
		t.Log(r.GetReason())
	})
}

func TestAnImageServesAsRootFileSystemOfAMachine(t *testing.T) {
	m := need(t)
	digest := m.d.Import(t, "localhost/tools:1", testcontainerd.Layer(t, "bash", "cat"))
	m.start(node.Options{Config: fmt.Sprintf("rootfs: localhost/tools@%s\n", digest)}, "none")
	require.Equal(t, "image\nhello", m.output("cat /etc/of-the-image README"))
	require.NotEqual(t, read(t, "/proc/sys/kernel/random/boot_id"), m.output("cat /proc/sys/kernel/random/boot_id"))
	require.Equal(t, digest, m.session().GetSandbox().GetProvenance().GetRootfsDigest())
	require.NotZero(t, m.exec("echo x > /etc/of-the-image").GetExitCode())
	require.NotZero(t, m.exec("ls /.sandbox").GetExitCode())
}

// The machine's packets come from a tap in the sandbox's network namespace.
func TestP10AMachineReachesWhatItsNetworkLetsAndNothingOfTheNode(t *testing.T) {
	m := need(t)
	lab := netlab.New(t, subnet)
	lab.TCP(lab.World, "web", netlab.Web+":80")
	live := lab.TCP(lab.Node, "kubelet", netlab.NodeAddr+":10250")
	m.start(node.Options{
		Program: lab.Program(node.Program()),
		Config:  fmt.Sprintf("network: {allowed: [none, bridge], nameservers: [%s], bridge: {subnet: %s}}\n", netlab.Web, subnet),
	}, "bridge")
	before := len(live.Peers())
	require.NotZero(t, before, "control: the agent has seen that it answers on the node")
	const dial = "exec 3<>/dev/tcp/%s && cat <&3"
	require.Equal(t, "web to "+netlab.NodeAddr, m.output(fmt.Sprintf(dial, netlab.Web+"/80")))
	r := m.exec(fmt.Sprintf(dial, netlab.NodeAddr+"/10250"))
	require.NotZero(t, r.GetExitCode())
	require.Contains(t, r.GetStderrText(), "Connection refused")
	require.Len(t, live.Peers(), before)
}
