package seccomp_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// Both filters, as a command has them.
var (
	asCommand = []string{"container", "command"}
	asNested  = []string{"container", "nested"}
)

// shell runs a script with bash in dir under the filters.
func shell(t *testing.T, dir string, filters []string, script string) (string, error) {
	t.Helper()
	bash, err := exec.LookPath("bash")
	require.NoError(t, err)
	cmd := childCommand(t, order{Filters: filters, Exec: []string{bash, "-ec", script}})
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestOrdinaryProgramsWorkUnderTheFilters(t *testing.T) {
	for _, program := range []struct{ name, script, want string }{
		{"bash", `echo a | while read x; do (echo "$x$x") & wait; done; exec 3<>/dev/null; echo $((6*7))`, "aa\n42\n"},
		{"coreutils", `mkdir -p d/e; echo x > d/e/f; cp -a d g; mv g h; ln -s h l; chmod 1750 h; rm -r d; cat l/e/f; stat -c %a h; mkfifo p; ls`, "x\n1750\nh\nl\np\n"},
		{"find", `mkdir -p a/b; touch a/b/c; find a -type f -exec echo {} +`, "a/b/c\n"},
		{"tar", `mkdir a; echo x > a/b; tar cf t.tar a; rm -r a; tar xpf t.tar; cat a/b`, "x\n"},
		{"git", `git init -q -b main .; echo x > f; git add f; git -c user.name=n -c user.email=e@example.com commit -qm m; git gc -q; git status --porcelain; git log --format=%s`, "m\n"},
		{"gcc", `printf '#include <stdio.h>\nint main(){puts("hello");}' > h.c; gcc -o h h.c; ./h`, "hello\n"},
		{"make", `printf 'a: b c\n\t@cat b c\nb:\n\t@echo b > b\nc:\n\t@echo c > c\n' > Makefile; make -s -j2 a`, "b\nc\n"},
		{"ps", `x=$(ps -o comm= -p $$); echo $x`, "bash\n"},
		{"python3", `python3 -c 'import subprocess,threading,socket,tempfile,multiprocessing as m
t=threading.Thread(target=print,args=("thread",)); t.start(); t.join()
print(subprocess.run(["echo","child"],capture_output=True,text=True).stdout.strip())
a,b=socket.socketpair(); a.send(b"x"); print(b.recv(1).decode())
s=socket.create_server(("127.0.0.1",0)); c=socket.create_connection(s.getsockname()); print(type(c).__name__)
with tempfile.TemporaryFile() as f: f.write(b"y")
l=m.Lock(); print(l.acquire())'`, "thread\nchild\nx\nsocket\nTrue\n"},
		{"node", `node -e 'const {execSync}=require("child_process"),fs=require("fs");fs.writeFileSync("f","x");console.log(execSync("cat f").toString());require("net").createServer().listen(0,"127.0.0.1",function(){console.log(typeof this.address().port);this.close()})'`, "x\nnumber\n"},
		{"sqlite3", `sqlite3 db 'pragma journal_mode=wal; create table t(a); insert into t values(1); select * from t;'`, "wal\n1\n"},
		// Go's listeners ask for MPTCP first.
		{"go", `go version | cut -d' ' -f1-2; printf 'package main\nimport "net"\nfunc main(){ l, e := net.Listen("tcp", "127.0.0.1:0"); println(l.Addr().Network(), e == nil) }' > m.go; go run m.go`, "go version\ntcp true\n"},
		{"gdb", `printf 'int main(){return 0;}' > h.c; gcc -g -o h h.c; gdb -q -batch -nx -ex 'break main' -ex run -ex kill ./h 2>&1 | grep -o '^Breakpoint 1, main'`, "Breakpoint 1, main\n"},
		{"strace", `strace -f -e trace=execve -o o true; grep -c execve o`, "1\n"},
		{"ip", `ip -o link show lo | cut -d: -f2`, " lo\n"},
	} {
		t.Run(program.name, func(t *testing.T) {
			if program.name != "coreutils" {
				testkit.Need(t, testkit.Program(program.name))
			}
			for _, filters := range [][]string{asCommand, asNested} {
				out, err := shell(t, t.TempDir(), filters, program.script)
				require.NoError(t, err, out)
				require.Equal(t, program.want, out)
			}
		})
	}
}

func TestHole1NoFileGetsASetIDBit(t *testing.T) {
	testkit.Need(t, testkit.Bash)
	script := `cp $(type -P true) f; chmod u+s f && echo made; chmod g+s f && echo made; install -m 4755 f g && echo made; mkdir -m 2755 d && echo made; true`
	for _, c := range []struct {
		filters []string
		want    uint32
	}{{nil, 0o6000}, {asCommand, 0}, {asNested, 0}} {
		dir := t.TempDir()
		out, err := shell(t, dir, c.filters, script)
		require.NoError(t, err, out)
		var st unix.Stat_t
		require.NoError(t, unix.Stat(filepath.Join(dir, "f"), &st))
		require.Equal(t, c.want, st.Mode&0o6000, out)
		if c.filters != nil {
			require.NotContains(t, out, "made")
			require.Contains(t, out, "Operation not permitted")
		}
	}
}

func TestP3ANamespaceOfItsOwnIsOnlyHadWithTheOperatorsPermission(t *testing.T) {
	testkit.Need(t, testkit.Program("unshare"), testkit.UserNamespaces)
	script := `unshare -Urmpf sh -c 'mount -t tmpfs none /tmp && echo $$'`
	out, err := shell(t, t.TempDir(), asCommand, script)
	require.Error(t, err)
	require.Contains(t, out, "Operation not permitted")
	out, err = shell(t, t.TempDir(), asNested, script)
	require.NoError(t, err, out)
	require.Equal(t, "1\n", out)
}

// A root of a nested user namespace could otherwise write a file capability that the node honours.
func TestHole1NestedRootCannotWriteFileCapabilities(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"), testkit.Program("unshare"), testkit.UserNamespaces)
	dir := t.TempDir()
	script := `touch f; unshare -Ur python3 -c 'import os,struct
try:
    os.setxattr("f","security.capability",struct.pack("<5I",0x02000001,1<<21,0,0,0)); print("written")
except OSError as e: print(e.strerror)'`
	out, err := shell(t, dir, asNested, script)
	require.NoError(t, err, out)
	require.Equal(t, "Operation not supported\n", out)
	out, err = shell(t, dir, nil, script)
	require.NoError(t, err, out)
	require.Equal(t, "written\n", out, "the control case: without the filter it is possible")
}

// foreign makes calls through i386's and x32's doors. Both are in every 64-bit program's reach.
const foreign = `
#include <stdio.h>
#include <string.h>
static long int80(long nr, long a, long b, long c) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(a), "c"(b), "d"(c) : "memory", "r8", "r9", "r10", "r11"); return (int)r; }
static long native(long nr, long a, long b, long c) { long r; __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c) : "memory", "rcx", "r11"); return r; }
int main(int n, char **v) {
	static int vsock[3] __attribute__((aligned(16))) = {40, 1, 0};
	long r = 0;
	if (!strcmp(v[1], "getpid32")) r = int80(20, 0, 0, 0);
	if (!strcmp(v[1], "socketcall")) r = int80(102, 1, (long)vsock, 0);
	if (!strcmp(v[1], "socket32")) r = int80(359, 40, 1, 0);
	if (!strcmp(v[1], "chmod32")) r = int80(15, (long)"f", 04755, 0);
	if (!strcmp(v[1], "x32getpid")) r = native(0x40000000 | 39, 0, 0, 0);
	if (!strcmp(v[1], "x32chmod")) r = native(0x40000000 | 90, (long)"f", 04755, 0);
	if (!strcmp(v[1], "native")) r = native(39, 0, 0, 0);
	printf("%s\n", r > 0 ? "positive" : r == 0 ? "zero" : r == -38 ? "ENOSYS" : "error");
	return 0;
}
`

// buildForeign compiles the program at a fixed low address: i386 calls take 32-bit pointers.
func buildForeign(t *testing.T) string {
	t.Helper()
	if arch(t).GOARCH != "amd64" {
		t.Skip("the machine has no i386 and no x32")
	}
	testkit.Need(t, testkit.GCC)
	dir := t.TempDir()
	src, bin := filepath.Join(dir, "foreign.c"), filepath.Join(dir, "foreign")
	require.NoError(t, os.WriteFile(src, []byte(foreign), 0o600))
	out, err := exec.Command("gcc", "-static", "-no-pie", "-O1", "-o", bin, src).CombinedOutput()
	require.NoError(t, err, string(out))
	return bin
}

func TestHole11ForeignABIsAreClosed(t *testing.T) {
	bin := buildForeign(t)
	run := func(filters []string, what string) (string, syscall.WaitStatus) {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o600))
		cmd := childCommand(t, order{Filters: filters, Exec: []string{bin, what}})
		cmd.Dir = dir
		out, err := cmd.Output()
		if _, ok := err.(*exec.ExitError); !ok {
			require.NoError(t, err)
		}
		st, err := os.Stat(filepath.Join(dir, "f"))
		require.NoError(t, err)
		if filters != nil {
			require.Zero(t, st.Mode()&os.ModeSetuid)
		}
		return string(out), cmd.ProcessState.Sys().(syscall.WaitStatus)
	}
	i386 := true
	if out, _ := run(nil, "getpid32"); out != "positive\n" {
		t.Log("this kernel has no i386: there is no control case")
		i386 = false
	}
	for _, filters := range [][]string{{"command"}, {"nested"}, {"container"}, asCommand} {
		out, _ := run(filters, "native")
		require.Equal(t, "positive\n", out)
		for _, what := range []string{"getpid32", "socketcall", "socket32", "chmod32"} {
			out, status := run(filters, what)
			require.Empty(t, out, what)
			if i386 {
				require.Equal(t, syscall.SIGSYS, status.Signal(), what)
			}
		}
		for _, what := range []string{"x32getpid", "x32chmod"} {
			out, _ := run(filters, what)
			require.Equal(t, "ENOSYS\n", out, what)
		}
	}
}
