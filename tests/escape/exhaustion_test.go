package escape

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

const small = `limits: {pids: 200, tmp_bytes: 16777216, home_bytes: 16777216, memory_bytes: 268435456, grace: 200ms, output_bytes: 65536}
`

// ends asserts that what a command used up ended as its own result.
func (s *session) ends(r *sandboxv1.ExecResult) {
	s.T.Helper()
	require.Contains(s.T, []sandboxv1.ExecResult_Status{
		sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_KILLED,
	}, r.GetStatus(), r.GetReason())
}

func TestP16WhatACommandUsesUpNeverTakesTheSandboxWithIt(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, small)
	for _, bomb := range []struct{ name, program string }{
		{"threads", `import threading,time
n=0
try:
    while True: threading.Thread(target=time.sleep,args=(1000,),daemon=True).start(); n+=1
except RuntimeError: print("threads end", n<=200, flush=True)
__import__("os")._exit(0)`},
		{"processes", `import os
n=0
try:
    while True:
        if os.fork()==0: __import__("time").sleep(1000)
        n+=1
except OSError: print("processes end", n<=200)`},
		{"descriptors", `import os
n=0
try:
    while True: os.dup(0); n+=1
except OSError as e: print("descriptors end", e.errno==24)`},
		{"pipes", `import os
try:
    while True:
        r,w=os.pipe(); os.set_blocking(w,False)
        try:
            while True: os.write(w,b"x"*65536)
        except BlockingIOError: pass
except OSError as e: print("pipes end", e.errno in (24,23))`},
		{"sockets", `import socket,array
try:
    while True:
        a,b=socket.socketpair(); a.setblocking(False)
        try:
            while True: socket.send_fds(a,[b"x"*1000],[0,a.fileno(),b.fileno()])
        except (BlockingIOError,OSError) as e:
            if e.errno not in (11,105,109): raise
        keep=globals().setdefault("keep",[]); keep+= [a,b]
except OSError as e: print("sockets end", e.errno in (24,23,109))`},
		{"shared memory", `import mmap,os
try:
    while True:
        fd=os.memfd_create("x"); os.ftruncate(fd,8<<20); m=mmap.mmap(fd,8<<20)
        for i in range(0,8<<20,4096): m[i]=1
        globals().setdefault("keep",[]).append(m)
except OSError as e: print("end")`},
		{"mappings", `import mmap
try:
    while True: globals().setdefault("keep",[]).append(mmap.mmap(-1,4096,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS,prot=1+2*(len(globals().get("keep",[]))%2)))
except (OSError,MemoryError): print("end")`},
		{"pseudo terminals", `import os
try:
    while True: os.openpty()
except OSError: print("end")`},
		{"inotify", `import ctypes
l=ctypes.CDLL(None)
while l.inotify_init()>=0: pass
print("end")`},
		{"timers", `import ctypes
l=ctypes.CDLL(None); t=ctypes.c_int()
while l.syscall(222 if __import__("platform").machine()=="x86_64" else 107,0,0,ctypes.byref(t))==0: pass
print("end")`},
		{"message queues", `import ctypes
l=ctypes.CDLL(None); i=0
while l.msgget(i+1,0o1666)>=0 and i<100000: i+=1
print("end")`},
	} {
		t.Run(bomb.name, func(t *testing.T) {
			s.within(t)
			s.put("bomb.py", bomb.program, 0o644)
			res := s.exec("exec python3 bomb.py", 10*time.Second)
			s.ends(res)
			require.NotContains(t, res.GetStdoutText(), "False")
			s.alive()
		})
	}
}

func TestP16AFullTmpHomeOrShmIsTheCommandsOwnError(t *testing.T) {
	s := newSession(t, small)
	for dir, most := range map[string]int{"/tmp": 16 << 20, "$HOME": 16 << 20, "/dev/shm": 64 << 20} {
		res := s.exec("head -c 1000000000 /dev/zero > "+dir+"/big; echo code $?; stat -c %s "+dir+"/big", patience)
		require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
		require.Contains(t, res.GetStderrText(), "No space left on device")
		lines := strings.Split(res.GetStdoutText(), "\n")
		require.Equal(t, "code 1", lines[0])
		size, err := strconv.Atoi(lines[1])
		require.NoError(t, err)
		require.LessOrEqual(t, size, most)
		s.alive() // with the folder still full
		s.output("rm " + dir + "/big; echo x > " + dir + "/small; rm " + dir + "/small")
	}
}

func TestP16ATmpOrHomeWithoutInodesIsTheCommandsOwnError(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, small)
	for _, dir := range []string{"/tmp", "/home/sandbox"} {
		res := s.python(fmt.Sprintf(`import os
n=0
os.mkdir(%q)
try:
    while n<20000: os.close(os.open(%q+str(n),os.O_CREAT)); n+=1
    print("no bound")
except OSError as e: print(e.strerror)
`, dir+"/many", dir+"/many/"), patience)
		require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
		require.Equal(t, "No space left on device\n", res.GetStdoutText())
		s.alive()
		s.output("rm -r " + dir + "/many")
	}
}

func TestP13AFloodIsBoundedAndYetCountedAndHashedInFull(t *testing.T) {
	const kept = 65536
	bytesWritten := 1 << 30
	if node.OnGVisor() {
		bytesWritten = 1 << 26 // each byte costs thirty times as much there
	}
	s := newSession(t, small)
	res := s.exec(fmt.Sprintf("printf head; head -c %d /dev/zero; printf tail", bytesWritten), 5*time.Minute)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	info := res.GetStdoutInfo()
	require.EqualValues(t, bytesWritten+8, info.GetBytes())
	require.True(t, info.GetTruncated())
	require.LessOrEqual(t, len(res.GetStdout()), kept)
	require.EqualValues(t, info.GetBytes()-info.GetOmittedBytes(), len(res.GetStdout()))
	require.True(t, bytes.HasPrefix(res.GetStdout(), []byte("head\x00")))
	require.True(t, bytes.HasSuffix(res.GetStdout(), []byte("\x00tail")))
	require.Equal(t, hashOf("head", bytesWritten, "tail"), info.GetSha256())
	for _, pid := range []int{s.Cmd.Process.Pid, s.receiptdPID()} {
		require.Less(t, peakBytes(t, pid), int64(300<<20), "what a flood may cost a process of the product")
	}
	s.alive()
}

// Both streams at once, and a reader that never reads.
func TestP13AReaderThatDoesNotReadStallsNothing(t *testing.T) {
	s := newSession(t, small)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req := s.request("head -c 50000000 /dev/zero & head -c 50000000 /dev/zero >&2; wait; exit 5", patience)
	stream, err := s.Client.Execs.StreamExec(ctx, &sandboxv1.StreamExecRequest{Exec: req})
	require.NoError(t, err)
	require.NotNil(t, stream)
	s.Until("it ends although nobody reads", func() bool {
		res, err := s.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: req.GetExecId()})
		return err == nil && res.GetState() == sandboxv1.ExecState_EXEC_DONE
	})
	res, err := s.Client.Execs.Exec(context.Background(), req)
	require.NoError(t, err)
	require.EqualValues(t, 5, res.GetResult().GetExitCode())
	require.EqualValues(t, 50000000, res.GetResult().GetStdoutInfo().GetBytes())
	require.EqualValues(t, 50000000, res.GetResult().GetStderrInfo().GetBytes())
	s.verified(res.GetResult())
}

func hashOf(head string, zeros int, tail string) string {
	h := sha256.New()
	h.Write([]byte(head))
	block := make([]byte, 1<<20)
	for range zeros / len(block) {
		h.Write(block)
	}
	h.Write([]byte(tail))
	return hex.EncodeToString(h.Sum(nil))
}

// peakBytes is the largest resident set that a process had (proc_pid_status(5), VmHWM).
func peakBytes(t testing.TB, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	require.NoError(t, err)
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			require.NoError(t, err)
			return kib << 10
		}
	}
	t.Fatalf("process %d has no VmHWM", pid)
	return 0
}
