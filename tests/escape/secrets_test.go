package escape

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestP9ACommandCannotSeeReceiptsControlSocketKeysOrState(t *testing.T) {
	s := newSession(t, "")
	s.output("true")
	// The control case: on the node it is all there.
	for _, p := range []string{filepath.Join(s.State, "receipts"), filepath.Join(s.State, "keys")} {
		require.DirExists(t, p)
	}
	// What a command would look for, with the node's paths given to it.
	script := strings.NewReplacer("STATE", s.State, "SOCKET", s.Socket, "INTERNAL", runtime.InternalDir).Replace(`
for p in STATE STATE/receipts STATE/keys STATE/journal SOCKET INTERNAL/receipts INTERNAL/control INTERNAL/bin INTERNAL/control/receiptd.sock; do
  for q in "" /proc/self/root /proc/1/root /proc/1/cwd /proc/self/cwd/../../../../.. /proc/thread-self/root /proc/$PPID/root; do
    [ -S "$q$p" ] && echo "socket $q$p"
    [ -e "$q$p" ] && [ -n "$(ls -A "$q$p" 2>/dev/null)" ] && echo "sees $q$p"
  done
done
find / -xdev \( -name 'receiptd*' -o -name '*.pub' -path '*keys*' -o -path '*receipts/*.json' -o -name pid1 -o -name exec.sock \) -not -path "$PWD/*" 2>/dev/null
for d in /proc/[0-9]*; do
  for x in root cwd exe fd; do ls -l $d/$x/ 2>/dev/null | grep -E 'receiptd|receipts|control|journal' | sed "s|^|$d/$x |"; done
done
true`)
	require.Empty(t, s.output(script))
	mounted := s.output(`awk '{print $5}' /proc/self/mountinfo /proc/1/mountinfo 2>/dev/null; true`)
	require.NotContains(t, mounted, runtime.InternalDir)
	require.NotContains(t, mounted, s.State)
}

func TestP9ACommandCannotWriteWhereReceiptsAre(t *testing.T) {
	s := newSession(t, "")
	s.output("true")
	before := listing(t, filepath.Join(s.State, "receipts"))
	script := strings.NewReplacer("STATE", s.State, "SANDBOX", s.first.GetSandbox().GetId(), "INTERNAL", runtime.InternalDir).Replace(`
for p in STATE/receipts/SANDBOX INTERNAL/receipts INTERNAL; do
  mkdir -p $p; mkdir $p/made && echo "made $p/made"; echo x > $p/exec-1.json && echo "wrote $p"; mv $p $p.old && echo "moved $p"; rm -r $p && echo "removed $p"
done 2>/dev/null
true`)
	require.Empty(t, s.output(script))
	after := listing(t, filepath.Join(s.State, "receipts"))
	for name, content := range before {
		require.Equal(t, content, after[name], name)
	}
}

// listing maps the finished files below a folder to their content.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.Walk(dir, func(p string, st os.FileInfo, err error) error {
		if err != nil || !st.Mode().IsRegular() || strings.Contains(st.Name(), "~") {
			return err
		}
		b, err := os.ReadFile(p)
		out[p] = string(b)
		return err
	}))
	require.NotEmpty(t, out)
	return out
}

func TestP9AForgedReceiptIsNotAccepted(t *testing.T) {
	s := newSession(t, "")
	real := s.exec("exit 3", 0)
	require.EqualValues(t, 3, real.GetExitCode())
	key := filepath.Join(s.State, "keys", real.GetSandboxId()+".pub")
	verifies := func(path string) bool {
		err := exec.Command(node.Program(), "receipt", "verify", "--key", key, path).Run()
		if err != nil {
			_, isExit := err.(*exec.ExitError)
			require.True(t, isExit, "%v", err)
		}
		return err == nil
	}
	require.True(t, verifies(s.receiptFile(real)), "the control case: the real one verifies")

	envelope, err := os.ReadFile(s.receiptFile(real))
	require.NoError(t, err)
	edited := func(f func(string) string) []byte {
		var e map[string]any
		require.NoError(t, json.Unmarshal(envelope, &e))
		payload, err := base64.StdEncoding.DecodeString(e["payload"].(string))
		require.NoError(t, err)
		e["payload"] = base64.StdEncoding.EncodeToString([]byte(f(string(payload))))
		b, err := json.Marshal(e)
		require.NoError(t, err)
		return b
	}
	dir := t.TempDir()
	for name, content := range map[string][]byte{
		"another exit code": edited(func(p string) string { return strings.Replace(p, `"exitCode":3`, `"exitCode":0`, 1) }),
		"another exec":      edited(func(p string) string { return strings.ReplaceAll(p, `"exec-1"`, `"exec-2"`) }),
		"one byte more":     append(append([]byte{}, envelope...), 'x'),
		"half":              envelope[:len(envelope)/2],
		"nothing":           nil,
	} {
		path := filepath.Join(dir, "exec-1.json")
		require.NoError(t, os.WriteFile(path, content, 0o600))
		require.NotEqual(t, envelope, content, name)
		require.False(t, verifies(path), name)
	}
	// A true receipt under another exec's name is no receipt of that exec.
	path := filepath.Join(dir, "exec-9.json")
	require.NoError(t, os.WriteFile(path, envelope, 0o600))
	require.False(t, verifies(path))

	// A command lays a receipt for an exec that never was where it can write. The agent doesn't know that exec.
	s.put("exec-77.json", string(envelope), 0o644)
	s.output("mkdir -p receipts .sandbox/receipts; cp exec-77.json receipts/; cp exec-77.json .sandbox/receipts/; cp exec-77.json /tmp/")
	_, err = s.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: "exec-77"})
	require.ErrorContains(t, err, "not_found")
}

func TestP9ACommandCannotReadOrTracePid1(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, "")
	res := s.exec(`for f in mem environ maps auxv stack syscall io pagemap smaps task/1/mem task/1/environ; do head -c1 /proc/1/$f >/dev/null 2>&1 && echo "read $f"; done
for f in root cwd exe; do readlink /proc/1/$f >/dev/null && echo "link $f"; done
for f in fd fdinfo map_files ns; do [ -n "$(ls -A /proc/1/$f 2>/dev/null)" ] && echo "listed $f"; done
for n in mnt pid user net ipc uts cgroup; do readlink /proc/1/ns/$n >/dev/null && echo "ns $n"; done; true`, 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus())
	visible := ""
	if node.OnGVisor() { // conceded: names and numbers, and nothing by which anything is opened
		visible = "listed fdinfo\nns mnt\nns pid\nns user\nns net\nns ipc\nns uts\n"
	}
	require.Equal(t, visible, res.GetStdoutText())
	res = s.python(pid1Attack, 0)
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Equal(t, answeredForPid1(), res.GetStdoutText())
	s.alive()
}

// pid1Attack names each call on process 1 that succeeds; TARGET may replace 1 for the control case.
const pid1Attack = `
import ctypes, os, sys, platform
l = ctypes.CDLL(None, use_errno=True)
target = int(sys.argv[1]) if len(sys.argv) > 1 else 1
x86 = platform.machine() == "x86_64"
def tried(name, r):
    if r >= 0: print(name)
class IOV(ctypes.Structure): _fields_ = [("b", ctypes.c_void_p), ("l", ctypes.c_size_t)]
buf = ctypes.create_string_buffer(64)
here, there = IOV(ctypes.addressof(buf), 8), IOV(0x400000, 8)
tried("process_vm_readv", l.process_vm_readv(target, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
tried("process_vm_writev", l.process_vm_writev(target, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
tried("prlimit NOFILE", l.syscall(302 if x86 else 261, target, 7, buf, 0))
tried("prlimit CPU", l.syscall(302 if x86 else 261, target, 0, buf, 0))
tried("setpriority", l.setpriority(0, target, 5))
tried("sched_setscheduler", l.sched_setscheduler(target, 0, ctypes.byref(ctypes.c_int(0))))
tried("sched_setaffinity", l.sched_setaffinity(target, 8, ctypes.byref(ctypes.c_ulong(1))))
tried("ioprio_set", l.syscall(251 if x86 else 30, 1, target, (2 << 13) | 7))
tried("setpgid", l.setpgid(target, 0))
tried("kcmp", l.syscall(312 if x86 else 272, target, os.getpid(), 1, 0, 0))
tried("migrate_pages", l.syscall(256 if x86 else 238, target, 0, 0, 0))
head, size = ctypes.c_size_t(1), ctypes.c_size_t()
answered = l.syscall(274 if x86 else 100, target, ctypes.byref(head), ctypes.byref(size))
tried("get_robust_list" if head.value else "get_robust_list null", answered)
fd = l.syscall(434, target, 0)
if fd >= 0:
    tried("pidfd_getfd", l.syscall(438, fd, 3, 0))
    tried("pidfd_send_signal", l.syscall(424, fd, 0, 0, 0))
    tried("process_madvise", l.syscall(440, fd, ctypes.byref(there), 1, 20, 0))
    tried("process_mrelease", l.syscall(448, fd, 0))
    tried("setns", l.syscall(308 if x86 else 268, fd, 0x20000))
l.ptrace.argtypes = [ctypes.c_long] * 4
tried("ptrace attach", l.ptrace(16, target, 0, 0))
tried("ptrace seize", l.ptrace(0x4206, target, 0, 0))
`

// answeredForPid1 is what pid1Attack may print: gVisor answers get_robust_list for every process, and for pid1, which has no such
// list, with null.
func answeredForPid1() string {
	if node.OnGVisor() {
		return "get_robust_list null\n"
	}
	return ""
}

func TestHole6NoCallOnPid1Succeeds(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"), testkit.Program("sleep"))
	// The control case: on the node's own child the same calls do succeed.
	child := exec.Command("sleep", "1000")
	require.NoError(t, child.Start())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	control := exec.Command("python3", "-c", pid1Attack, fmt.Sprint(child.Process.Pid))
	out, err := control.CombinedOutput()
	require.NoError(t, err, string(out))
	for _, call := range []string{"prlimit NOFILE", "prlimit CPU", "setpriority", "sched_setaffinity", "ptrace attach"} {
		require.Contains(t, string(out), call+"\n")
	}
	s := newSession(t, "")
	res := s.python(pid1Attack, 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Equal(t, answeredForPid1(), res.GetStdoutText())
	ids := s.output("id -u; grep ^Uid /proc/self/status | tr -s '\\t' ' '")
	require.Equal(t, "1000\nUid: 1000 1000 1000 1000\n", ids)
	s.alive()
}

func TestP10NoListenerOfTheNodeIsReached(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, "")
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer tcp.Close()
	abstract := fmt.Sprintf("@escape-%d", os.Getpid())
	ab, err := net.Listen("unix", abstract)
	require.NoError(t, err)
	defer ab.Close()
	attack := fmt.Sprintf(`import socket,os
def dial(name, family, address):
    try:
        s=socket.socket(family); s.settimeout(5); s.connect(address); print("reached", name)
    except OSError: pass
dial("tcp", socket.AF_INET, ("127.0.0.1", %d))
dial("abstract", socket.AF_UNIX, "\0%s")
dial("socket", socket.AF_UNIX, %q)
for p in ("/run/docker.sock","/run/containerd/containerd.sock","/run/systemd/private","/run/dbus/system_bus_socket","/.sandbox/control/receiptd.sock"): dial(p, socket.AF_UNIX, p)
for cid in (0,1,2,3): 
    for port in (1024,1025,1026): dial("vsock", 40, (cid, port))
`, tcp.Addr().(*net.TCPAddr).Port, abstract[1:], s.Socket)
	reachedHere := pythonHere(t, attack)
	for _, name := range []string{"tcp", "abstract", "socket"} {
		require.Contains(t, reachedHere, "reached "+name+"\n", "the control case")
	}
	res := s.python(attack, 0)
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Empty(t, res.GetStdoutText())
	// What a command can name in /proc/net/unix is its own.
	require.NotContains(t, s.output("cat /proc/net/unix"), abstract)
	interfaces := s.output("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
	require.Equal(t, "lo\n", interfaces)
}

func TestP9ACommandHoldsNoDescriptorButThreeAndNothingOfTheAgentsEnvironment(t *testing.T) {
	t.Setenv("ESCAPE_SECRET", "of-the-agent")
	s := newSession(t, "")
	require.Equal(t, "0\n1\n2\n", s.output("for f in /proc/$$/fd/*; do n=${f##*/}; [ $n -lt 255 ] && [ -e $f ] && echo $n; done; true"))
	require.Equal(t, "/dev/null\n", s.output("readlink /proc/self/fd/0"))
	env := s.output("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
	require.NotContains(t, env, "ESCAPE_SECRET")
	require.NotContains(t, env, s.State)
}
