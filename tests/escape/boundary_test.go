package escape

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// survivor is a way to stay behind. The script starts at least one process with WORD among its arguments, waits until
// it runs, and returns while it still does.
type survivor struct{ name, script string }

var survivors = []survivor{
	{"in the background", `(exec -a WORD sleep 1000) & `},
	{"detached, double-forked, in a session of its own", `(setsid bash -c '(exec -a WORD sleep 1000) & disown' </dev/null >/dev/null 2>&1 &)`},
	{"behind nohup, holding the output open", `nohup bash -c 'exec -a WORD sleep 1000' &`},
	{"deaf to every signal", `bash -c 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM; exec -a WORD sleep 1000' &`},
	{"stopped", `bash -c 'kill -STOP $$; :' WORD &`},
	{"stopped, in a session of its own", `setsid bash -c 'kill -STOP $$; :' WORD &`},
	{"in a process group of its own", `set -m; (exec -a WORD sleep 1000) & set +m`},
	{"under a reaper of its own", `python3 -c 'import ctypes,os,time
ctypes.CDLL(None).prctl(36,1,0,0,0)
if os.fork()==0:
    os.setsid()
    if os.fork()==0: os.execvp("sleep",["WORD","1000"])
    time.sleep(1000)
time.sleep(1000)' WORD &`},
	{"as a thread whose leader is gone", `python3 -c 'import threading,ctypes,time
threading.Thread(target=time.sleep,args=(1000,)).start()
ctypes.CDLL(None).syscall(60 if __import__("os").uname().machine=="x86_64" else 93,0)' WORD &`},
	{"traced by another survivor", `python3 -c 'import ctypes,os,time
p=os.fork()
if p==0: os.execvp("sleep",["WORD","1000"])
l=ctypes.CDLL(None); l.ptrace(0x4206,p,0,0x100000)
time.sleep(1000)' WORD &`},
	{"waiting in vfork", `python3 -c 'import subprocess,time
subprocess.Popen(["bash","-c","exec -a WORD sleep 1000"],start_new_session=True,close_fds=True); time.sleep(1000)' WORD &`},
}

// awaitWord makes a script wait until a process with that word is to be seen inside.
func awaitWord(script, word string) string {
	// The brackets keep grep from finding itself.
	return strings.ReplaceAll(script, "WORD", word) +
		fmt.Sprintf("\nuntil cat /proc/[0-9]*/task/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -qx '[%s]%s'; do :; done\n", word[:1], word[1:])
}

func TestP3NothingOfACommandIsAliveWhenItIsAnswered(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"), testkit.Program("setsid"))
	s := newSession(t, "")
	for i, sv := range survivors {
		t.Run(sv.name, func(t *testing.T) {
			s.within(t)
			word := fmt.Sprintf("survivor-%d-%d", os.Getpid(), i)
			s.put("gate", "", 0o644)
			// The control case: while the command runs, the survivor is there and can be seen from the node.
			_, answer := s.start(awaitWord(sv.script, word)+"touch seen-"+word+"\nwhile [ -e gate ]; do :; done\nexit 7", patience)
			s.Until("the survivor runs", func() bool {
				_, err := os.Stat(filepath.Join(s.worktree, "seen-"+word))
				return err == nil
			})
			s.Until("the control case: it is to be seen from the node", func() bool { return len(processes(s.T, word)) > 0 })
			require.NoError(t, os.Remove(filepath.Join(s.worktree, "gate")))
			res := <-answer
			gone(t, word)
			require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
			require.EqualValues(t, 7, res.GetExitCode())
			s.verified(res)
		})
	}
	s.alive()
}

func TestP3TheEndOfTheTimeReachesEveryGeneration(t *testing.T) {
	s := newSession(t, "limits: {grace: 200ms}\n")
	word := fmt.Sprintf("generation-%d", os.Getpid())
	script := strings.ReplaceAll(`trap "" TERM HUP INT
bash -c 'trap "" TERM; setsid bash -c "trap \"\" TERM; (exec -a WORD sleep 1000) & exec -a WORD sleep 1000" & exec -a WORD sleep 1000' &
while :; do :; done`, "WORD", word)
	res := s.exec(script, time.Second)
	require.Equal(t, sandboxv1.ExecResult_TIMED_OUT, res.GetStatus())
	gone(t, word)
	s.alive()
}

func TestP3ACommandThatForksWhileItDiesLeavesNothing(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, "limits: {grace: 200ms, pids: 128}\n")
	word := fmt.Sprintf("comet-%d", os.Getpid())
	// Each process forks its successor and ends: there is never the same pid twice to be killed.
	comet := `import os,signal,sys
for n in (1,2,3,15): signal.signal(n, signal.SIG_IGN)
for i in range(8):
    if os.fork()==0:
        os.setsid()
        while True:
            try:
                if os.fork()!=0: os._exit(0)
            except OSError: pass
if len(sys.argv)>2: os._exit(5)
while True: pass
`
	s.put("comet.py", comet, 0o644)
	res := s.exec("exec python3 comet.py "+word+" end", patience)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.EqualValues(t, 5, res.GetExitCode())
	gone(t, word)
	res = s.exec("exec python3 comet.py "+word, time.Second)
	require.Equal(t, sandboxv1.ExecResult_TIMED_OUT, res.GetStatus(), res.GetReason())
	gone(t, word)
	s.alive()
}

func TestP3ACommandCannotHideInANamespaceOfItsOwn(t *testing.T) {
	s := newSession(t, "")
	for _, flags := range []string{"-U", "-Ur", "-m", "-p --fork", "-n", "-i", "-u", "-C", "-T", "-Urpf"} {
		res := s.exec("unshare "+flags+" true", 0)
		require.NotZero(t, res.GetExitCode(), flags)
		require.Contains(t, res.GetStderrText(), "Operation not permitted", flags)
	}
	res := s.exec("for n in pid mnt user net; do nsenter --$n=/proc/self/ns/$n true && echo entered; done; true", 0)
	require.NotContains(t, res.GetStdoutText(), "entered")
}

func TestP3ACommandCannotEndOrStopPid1(t *testing.T) {
	s := newSession(t, "")
	res := s.exec("for n in $(seq 1 64); do kill -$n 1; done 2>/dev/null; kill -9 -1 2>/dev/null; echo still here", 0)
	// kill -9 -1 may reach the shell itself, never pid1: either way there is a receipt with the shell's own end.
	require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED}, res.GetStatus(), res.GetReason())
	require.Equal(t, "exit 1\n", s.output("for n in 1 2 3 6 7 8 9 11 15 19 20 34 64; do kill -$n 1 2>/dev/null && echo sent $n; done; echo exit $(kill -0 1 2>/dev/null; echo $?)"))
	s.alive()
}

func TestP4OneCommandRunsAtATime(t *testing.T) {
	s := newSession(t, "")
	const n = 8
	var wg sync.WaitGroup
	results := make([]*sandboxv1.ExecResult, n)
	for i := range n {
		_, answer := s.start("mkdir lock || exit 9; for i in $(seq 200); do :; done; pgrep -c bash; rmdir lock", patience)
		wg.Add(1)
		go func() { defer wg.Done(); results[i] = <-answer }()
	}
	wg.Wait()
	for _, r := range results {
		require.NotNil(t, r)
		require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
		require.Zero(t, r.GetExitCode(), "another command held the lock: %s", r.GetStderrText())
	}
}

// A command that is followed by another sees nothing of it, and leaves nothing to it but files.
func TestP3AndP4TheNextCommandFindsNoProcessNoSocketAndNoSharedMemoryOfTheOneBefore(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, "")
	// gVisor has no /proc/sysvipc: there the keys tell.
	list := `set -- /proc/[0-9]*; echo $#; awk '{print $8}' /proc/net/unix | sort -u; for f in tcp tcp6 udp udp6; do tail -n +2 /proc/net/$f | awk '$4 != "06"'; done
for f in shm sem msg; do [ ! -e /proc/sysvipc ] || tail -n +2 /proc/sysvipc/$f; done
python3 -c 'import ctypes; l=ctypes.CDLL(None); print(l.shmget(1234,0,0), l.semget(1234,0,0), l.msgget(1234,0))'`
	before := s.output(list)
	require.Contains(t, before, "-1 -1 -1\n", "the control case: nobody has these keys")
	res := s.python(`import socket,ctypes,os
l=ctypes.CDLL(None)
assert l.shmget(1234,4096,0o1666)>=0 and l.semget(1234,1,0o1666)>=0 and l.msgget(1234,0o1666)>=0
a=socket.socket(socket.AF_UNIX); a.bind("\0left-behind"); a.listen()
s=socket.create_server(("127.0.0.1",7777)); c=socket.create_connection(("127.0.0.1",7777)); d,_=s.accept()
c.setblocking(False)
try:
    while True: c.send(b"x"*65536)
except BlockingIOError: pass
u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.bind(("127.0.0.1",7777))
if os.fork()==0:
    os.setsid()
    import time; time.sleep(1000)
`, 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Equal(t, before, s.output(list))
}

func TestHole4ACommandSurvivesTheAgentAndItsAnswerIsNotLost(t *testing.T) {
	s := newSession(t, "")
	s.put("gate", "", 0o644)
	req, _ := s.start("echo before; while [ -e gate ]; do :; done; head -c 3000000 /dev/zero | tr '\\0' x; exit 3", patience)
	s.Until("it runs", func() bool {
		res, err := s.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: req.GetExecId()})
		return err == nil && res.GetState() == sandboxv1.ExecState_EXEC_RUNNING
	})
	s.Kill()
	require.NoError(t, os.Remove(filepath.Join(s.worktree, "gate")))
	file := filepath.Join(s.State, "receipts", s.first.GetSandbox().GetId(), req.GetExecId()+".json")
	s.Until("receiptd, without an agent and with its pipes gone, writes the receipt", func() bool {
		_, err := os.Stat(file)
		return err == nil
	})
	s.Serve()
	res, err := s.Client.Execs.Exec(context.Background(), req)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetResult().GetStatus(), res.GetResult().GetReason())
	require.EqualValues(t, 3, res.GetResult().GetExitCode())
	require.EqualValues(t, 3000007, res.GetResult().GetStdoutInfo().GetBytes())
	s.verified(res.GetResult())
	s.alive()
}
