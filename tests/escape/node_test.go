package escape

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// flat is a session with little memory, for attacks on what the node holds on behalf of a command.
const (
	flat       = "limits: {pids: 64, tmp_bytes: 8388608, home_bytes: 8388608, memory_bytes: 134217728, grace: 200ms}\n"
	flatMemory = 128 << 20
)

// while runs a program inside, looks at the node once the program has called hold(), and lets it end after that. What
// the program printed is the answer.
func (s *session) while(program string, look func()) string {
	s.t.Helper()
	for _, f := range []string{"held", "go"} {
		require.NoError(s.t, os.RemoveAll(filepath.Join(s.worktree, f)))
	}
	s.put("attack.py", `import os,time
def hold():
    open("held","w").close()
    while not os.path.exists("go"): time.sleep(0.01)
`+program, 0o644)
	_, answer := s.start("exec python3 attack.py", patience)
	s.until("the command holds what it took", func() bool {
		_, err := os.Stat(filepath.Join(s.worktree, "held"))
		return err == nil
	})
	look()
	s.put("go", "", 0o644)
	res := <-answer
	require.NotNil(s.t, res)
	s.ends(res)
	require.Zero(s.t, res.GetExitCode(), res.GetStderrText())
	return res.GetStdoutText()
}

// socketBytes is what the queues of all UDP sockets of the node hold (proc_pid_net(5), sockstat: the counter is the
// protocol's, not the network namespace's).
func socketBytes(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/net/sockstat")
	require.NoError(t, err)
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "UDP: "); ok {
			f := strings.Fields(rest)
			pages, err := strconv.ParseInt(f[len(f)-1], 10, 64)
			require.NoError(t, err)
			return pages * int64(os.Getpagesize())
		}
	}
	t.Fatal("no line for UDP in /proc/net/sockstat")
	return 0
}

func TestP16SocketQueuesCountAsTheCommandsMemory(t *testing.T) {
	s := newSession(t, flat)
	before := socketBytes(t)
	s.while(`import socket
keep=[]
for child in range(2):
    if os.fork()==0: break
else: hold(); os._exit(0)
for i in range(900):
    u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.bind(("127.0.0.1",0)); keep.append(u)
    out=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); out.connect(u.getsockname()); out.setblocking(False)
    try:
        for j in range(300): out.send(b"x"*1000)
    except OSError: pass
    out.close()
open("full%d"%child,"w").close()
while True: time.sleep(1)
`, func() {
		s.until("both have filled their sockets", func() bool {
			full, err := filepath.Glob(filepath.Join(s.worktree, "full*"))
			return err == nil && len(full) == 2
		})
		require.LessOrEqual(t, socketBytes(t)-before, int64(flatMemory), "bytes of the node that a command's sockets hold")
	})
	s.alive()
}
