package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const ownerUID = 1234

// programs gives the folder of the three programs as "make build" makes them.
func programs(t *testing.T) string {
	t.Helper()
	receiptd, _ := testkit.Binaries(t)
	dir := filepath.Dir(receiptd)
	agent := filepath.Join(dir, "sandbox-agent")
	if _, err := os.Stat(agent); err == nil {
		return dir
	}
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	build := exec.Command("go", "build", "-trimpath", "-o", agent, "./cmd/sandbox-agent")
	build.Dir = root
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return dir
}

// realAgent is a "serve" process with a state folder of its own.
type realAgent struct {
	t                           *testing.T
	bin, state, socket, log, ws string
	args                        []string
	cmd                         *exec.Cmd
}

func needSandboxes(t *testing.T) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Bash, testkit.Git)
}

// startAgent starts it for a repository; at the test's end its sessions are deleted with evidence, and it is stopped.
func startAgent(t *testing.T, repo string) *realAgent {
	t.Helper()
	dir := testkit.StateDir(t)
	a := &realAgent{
		t: t, bin: programs(t), state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "run", "exec.sock"),
		log: filepath.Join(dir, "log"), ws: filepath.Join(dir, "ws"),
	}
	require.NoError(t, os.Mkdir(a.ws, 0o755))
	require.NoError(t, os.Chown(a.ws, ownerUID, ownerUID))
	a.args = []string{"serve", "--state-dir", a.state, "--socket", a.socket, "--workspace-root", a.ws, "--workspace-root", filepath.Dir(repo)}
	a.start()
	t.Cleanup(func() {
		for _, id := range a.sessions() {
			out, err := a.cli("session", "delete", id)
			require.NoError(t, err, out)
		}
		a.stop(syscall.SIGTERM)
	})
	return a
}

func (a *realAgent) start() {
	a.t.Helper()
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(a.t, err)
	defer log.Close()
	a.cmd = exec.Command(filepath.Join(a.bin, "sandbox-agent"), a.args...)
	a.cmd.Stdout, a.cmd.Stderr = log, log
	require.NoError(a.t, a.cmd.Start())
	require.Eventually(a.t, func() bool {
		c, err := net.Dial("unix", a.socket)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, 20*time.Second, 10*time.Millisecond, "the agent does not answer")
}

// stop ends the agent with a signal and gives its exit code, -1 for a death by signal.
func (a *realAgent) stop(sig syscall.Signal) int {
	a.t.Helper()
	require.NoError(a.t, a.cmd.Process.Signal(sig))
	err := a.cmd.Wait()
	if _, isExit := err.(*exec.ExitError); !isExit {
		require.NoError(a.t, err)
	}
	return a.cmd.ProcessState.ExitCode()
}

func (a *realAgent) cli(args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(a.bin, "sandbox-agent"), args...)
	cmd.Env = append(os.Environ(), "SANDBOX_AGENT_SOCKET="+a.socket)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (a *realAgent) sessions() []string {
	out, err := a.cli("session", "list", "--json")
	require.NoError(a.t, err, out)
	var list struct{ Sessions []struct{ SessionID string } }
	require.NoError(a.t, json.Unmarshal([]byte(out), &list))
	var ids []string
	for _, s := range list.Sessions {
		ids = append(ids, s.SessionID)
	}
	return ids
}

// TestTheCommandLineAgainstARealAgent runs testdata/e2e/*.txtar against one agent, each with a session of its own.
func TestTheCommandLineAgainstARealAgent(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	repo := testkit.Repo(t, ownerUID)
	a := startAgent(t, repo)
	t.Run("scripts", func(t *testing.T) {
		testscript.Run(t, testscript.Params{
			Dir: "testdata/e2e", RequireExplicitExec: true,
			Setup: func(env *testscript.Env) error {
				env.Setenv("PATH", a.bin+":"+os.Getenv("PATH"))
				env.Setenv("SANDBOX_AGENT_SOCKET", a.socket)
				env.Setenv("REPO", repo)
				env.Setenv("STATE", a.state)
				env.Setenv("ROOTS", a.ws)
				return nil
			},
		})
	})
}

func TestASecondAgentOnTheSameStateFolderIsRefused(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	out, err := a.cli("serve", "--state-dir", a.state, "--socket", a.socket+"2")
	require.Error(t, err)
	require.Contains(t, out, a.state)
	require.Regexp(t, `(?i)another|lock`, out)
}

func TestSigtermLeavesTheSandboxRunningAndTheNextAgentGoesOn(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	repo := a.args[len(a.args)-1] + "/repo"
	out, err := a.cli("session", "create", "--repo", repo, "--branch", "restart", "--session", "s1")
	require.NoError(t, err, out)
	out, err = a.cli("exec", "s1", "--exec-id", "before", "--", "echo one > /tmp/kept; echo one")
	require.NoError(t, err, out)
	require.Zero(t, a.stop(syscall.SIGTERM))
	log, err := os.ReadFile(a.log)
	require.NoError(t, err)
	require.Contains(t, string(log), `"msg":"ready"`)
	require.Contains(t, string(log), "sandboxes go on")
	require.NotContains(t, string(log), "echo one", "no command's text is logged")

	a.start()
	out, err = a.cli("exec", "s1", "--generation", "1", "--", "cat /tmp/kept")
	require.NoError(t, err, out)
	require.Equal(t, "one\n", out, "it is the same sandbox")
	out, err = a.cli("exec", "s1", "--exec-id", "before", "--", "echo one > /tmp/kept; echo one")
	require.NoError(t, err, out)
	require.Equal(t, "one\n", out, "the answer of before is still there")
}

func TestP7ExecSurvivesAnAgentThatIsKilledMeanwhile(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	repo := a.args[len(a.args)-1] + "/repo"
	out, err := a.cli("session", "create", "--repo", repo, "--branch", "killed", "--session", "s1")
	require.NoError(t, err, out)
	gate := filepath.Join(a.ws, "s1", "gate")

	cmd := exec.Command(filepath.Join(a.bin, "sandbox-agent"), "exec", "--socket", a.socket, "s1", "--",
		"echo begun; echo ran >> count; until [ -e gate ]; do sleep 0.01; done; echo ended; exit 7")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	first := make([]byte, len("begun\n"))
	_, err = io.ReadFull(stdout, first)
	require.NoError(t, err)

	require.Equal(t, -1, a.stop(syscall.SIGKILL))
	a.start()
	require.NoError(t, os.WriteFile(gate, nil, 0o644))
	rest, err := io.ReadAll(stdout)
	require.NoError(t, err)
	err = cmd.Wait()
	require.Equal(t, 7, cmd.ProcessState.ExitCode(), "%v %s", err, stderr.String())
	require.Equal(t, "begun\nended\n", string(first)+string(rest), "nothing is shown twice")
	count, err := os.ReadFile(filepath.Join(a.ws, "s1", "count"))
	require.NoError(t, err)
	require.Equal(t, "ran\n", string(count), "it ran once")
}

func TestPlainJSONOverTheSocketReachesTheSameHandlers(t *testing.T) {
	needSandboxes(t)
	testkit.Need(t, testkit.Program("curl"))
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	repo := a.args[len(a.args)-1] + "/repo"
	curl := func(call, body string) string {
		out, err := exec.Command("curl", "-sS", "--unix-socket", a.socket, "-H", "Content-Type: application/json",
			"http://localhost/sandbox.v1."+call, "-d", body).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	require.Contains(t, curl("NodeService/GetNodeInfo", "{}"), `"bootId"`)
	created := curl("SessionService/CreateSession", `{"sessionId":"s1","workspace":{"repository":"`+repo+`","branch":"json"}}`)
	require.Regexp(t, `"state": ?"READY"`, created)
	first := curl("ExecService/Exec", `{"sessionId":"s1","execId":"first","command":"git status --short --branch","text":true}`)
	require.Regexp(t, `"stdoutText": ?"## json\\n"`, first)
	require.JSONEq(t, first, curl("ExecService/Exec", `{"sessionId":"s1","execId":"first","command":"git status --short --branch","text":true}`))
	require.Regexp(t, `"code": ?"already_exists"`, curl("ExecService/Exec", `{"sessionId":"s1","execId":"first","command":"true"}`))
	var answer struct{ Stdout []byte }
	require.NoError(t, json.Unmarshal([]byte(curl("GitService/Git", `{"sessionId":"s1","args":["status","--short","--branch"]}`)), &answer))
	require.Equal(t, "## json\n", string(answer.Stdout))
	require.Regexp(t, `"code": ?"invalid_argument"`, curl("GitService/Git", `{"sessionId":"s1","args":["-c","core.pager=sh","log"]}`))
	require.Equal(t, http.StatusNotFound, status(t, a.socket, "/nothing"))
}

func status(t *testing.T, socket, path string) int {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) },
	}}
	defer c.CloseIdleConnections()
	res, err := c.Get("http://localhost" + path)
	require.NoError(t, err)
	res.Body.Close()
	return res.StatusCode
}

// TestTheDemo runs what "make demo" runs. Each of its own checks is one of a promise.
func TestTheDemo(t *testing.T) {
	needSandboxes(t)
	testkit.Need(t, testkit.Program("perl"))
	testkit.Leaks(t)
	for name, uid := range map[string]int{"a clone of an ordinary user": ownerUID, "a clone of root's": 0} {
		t.Run(name, func(t *testing.T) {
			repo := testkit.Repo(t, uid)
			before := testkit.GitAs(t, uid, repo, "for-each-ref")
			out, err := exec.Command(filepath.Join(programs(t), "sandbox-agent"), "demo", "--repo", repo).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Regexp(t, `All \d+ checks hold\.`, string(out))
			require.NotContains(t, string(out), "✗")
			require.NotContains(t, string(out), "\x1b", "no colours where nobody looks")
			require.Equal(t, before, testkit.GitAs(t, uid, repo, "for-each-ref"))
			require.Equal(t, 1, strings.Count(testkit.GitAs(t, uid, repo, "worktree", "list", "--porcelain"), "worktree "))
			require.NoDirExists(t, demoFolder(t, out))
		})
	}
}

// demoAt runs the demo until it has printed mark, does something to it, and gives all that it printed.
func demoAt(t *testing.T, repo, mark string, do func(*exec.Cmd)) string {
	t.Helper()
	cmd := exec.Command(filepath.Join(programs(t), "sandbox-agent"), "demo", "--repo", repo)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell or timeout(1) starts it
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	cmd.Stdout, cmd.Stderr = w, w
	require.NoError(t, cmd.Start())
	w.Close()
	var out []byte
	buf := make([]byte, 4096)
	for done := false; ; {
		n, err := r.Read(buf)
		out = append(out, buf[:n]...)
		if !done && bytes.Contains(out, []byte(mark)) {
			done = true
			do(cmd)
		}
		if err != nil {
			break
		}
	}
	require.Error(t, cmd.Wait())
	require.NotContains(t, string(out), "What next")
	return string(out)
}

func TestTheDemoCleansUpOnCtrlC(t *testing.T) {
	needSandboxes(t)
	for name, interrupt := range map[string]func(*testing.T, *exec.Cmd){
		"once": func(t *testing.T, cmd *exec.Cmd) { require.NoError(t, cmd.Process.Signal(os.Interrupt)) },
		"pressed again at once": func(t *testing.T, cmd *exec.Cmd) {
			require.NoError(t, cmd.Process.Signal(os.Interrupt))
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM)) // another signal, so that the kernel can't merge the two
		},
		"as timeout(1) does, to the process and to its group": func(t *testing.T, cmd *exec.Cmd) {
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
			require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGHUP))
		},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Leaks(t)
			repo := testkit.Repo(t, ownerUID)
			before := testkit.GitAs(t, ownerUID, repo, "for-each-ref")
			// Its command is about to run, or running.
			out := demoAt(t, repo, "Three generations", func(cmd *exec.Cmd) { interrupt(t, cmd) })
			require.Contains(t, out, "the sandbox is gone, on evidence")
			require.Equal(t, name != "once", strings.Contains(out, "cleaning up; again after 5 seconds to leave it all behind"))
			require.Equal(t, before, testkit.GitAs(t, ownerUID, repo, "for-each-ref"))
			require.NoDirExists(t, demoFolder(t, []byte(out)))
		})
	}
}

func TestTheDemoCleansUpWhenNobodyReadsItsOutputAnyMore(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	repo := testkit.Repo(t, ownerUID)
	before := testkit.GitAs(t, ownerUID, repo, "for-each-ref")
	script := `"$1" demo --repo "$2" | head -n 12`
	out, err := exec.Command("bash", "-c", script, "bash", filepath.Join(programs(t), "sandbox-agent"), repo).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, before, testkit.GitAs(t, ownerUID, repo, "for-each-ref"))
	require.NoDirExists(t, demoFolder(t, out))
}

func TestADemoThatIsKilledTakesItsAgentAndItsSandboxAlong(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t) // the sandbox's processes, mounts and cgroups among them
	var agent int
	var dir string
	out := demoAt(t, testkit.Repo(t, ownerUID), "Three generations", func(cmd *exec.Cmd) {
		agent = childOf(t, cmd.Process.Pid)
		require.NoError(t, cmd.Process.Kill())
	})
	dir = demoFolder(t, []byte(out))
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.Eventually(t, func() bool { return !alive(agent) }, time.Minute, 20*time.Millisecond, "agent %d lives on", agent)
	log, err := os.ReadFile(filepath.Join(dir, "agent.log"))
	require.NoError(t, err)
	require.Contains(t, string(log), "standard input ended")
	require.NoFileExists(t, filepath.Join(dir, "run", "exec.sock"))
	require.NotContains(t, string(log), "left behind")
}

// childOf is the one child of a process that runs "serve".
func childOf(t *testing.T, parent int) int {
	t.Helper()
	out, err := exec.Command("pgrep", "-P", strconv.Itoa(parent), "-f", "serve").Output()
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	require.NoError(t, err, string(out))
	return pid
}

// alive says whether a process runs; one that nobody waited for has ended too.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := bytes.Cut(b, []byte(") "))
	return !bytes.HasPrefix(after, []byte("Z"))
}

func TestTimeoutStopsServeInOrder(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	require.NoError(t, a.cmd.Process.Signal(syscall.SIGTERM))
	// timeout(1)'s second one; another signal, so that the kernel can't merge the two.
	require.Zero(t, a.stop(syscall.SIGINT))
	require.NoFileExists(t, a.socket)
	log, err := os.ReadFile(a.log)
	require.NoError(t, err)
	require.Contains(t, string(log), `"msg":"stopped; sandboxes go on"`)
	a.start()
}

func demoFolder(t *testing.T, out []byte) string {
	t.Helper()
	m := regexp.MustCompile(`/var/tmp/sandbox-demo-\d+`).Find(out)
	require.NotNil(t, m, "%s", out)
	return string(m)
}
