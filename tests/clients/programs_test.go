package clients

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// example runs a program of examples/ and gives what it printed and its exit code.
func example(t *testing.T, env []string, name string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func TestTheGoExampleDoesAJobAndFindsItDoneWhenItIsStartedAgain(t *testing.T) {
	needAgent(t)
	repo := testkit.Repo(t, owner)
	program := filepath.Join(t.TempDir(), "example")
	require.NoError(t, testkit.BuildStatic("./examples/go", program))
	run := func(keys string) (string, string, int) {
		return example(t, nil, program, "--socket", host.Socket, "--repo", repo, "--job", "job-17", "--keys", keys)
	}
	keys := filepath.Join(t.TempDir(), "keys")
	stdout, stderr, code := run(keys)
	require.Zero(t, code, stderr)
	require.Equal(t, "session job-17, owner epoch 1\nedit: EXITED 0, receipt 1 verifies\nGreet\nin the base clone: [refs/heads/job-17]\n1\n2\n3\nhello\ngone, evidence complete: true\n", stdout)
	require.Contains(t, testkit.GitAs(t, owner, repo, "log", "--format=%s", "job-17"), "Greet")
	b, err := os.ReadFile(keys)
	require.NoError(t, err)
	require.Contains(t, string(b), `"Generation":1`)

	_, stderr, code = run(keys)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "already_exists", "the job's session is gone, and its id is never used again")
}

// python gives a function that runs a command through the Python example.
func python(t *testing.T) func(args ...string) (stdout, stderr string, code int) {
	t.Helper()
	needAgent(t)
	testkit.Need(t, testkit.Program("python3"))
	// The interpreter itself: what is on PATH may be a script that looks for it.
	interpreter, err := exec.Command("python3", "-c", "import http.client, sys; print(sys.executable)").Output()
	if err != nil {
		require.NotEqual(t, "1", os.Getenv(testkit.MustRun), "install the package python3, not only python3-minimal")
		t.Skip("Python has no http.client: install the package python3, not only python3-minimal")
	}
	return func(args ...string) (string, string, int) {
		return example(t, []string{"PYTHONDONTWRITEBYTECODE=1"}, strings.TrimSpace(string(interpreter)),
			append([]string{"examples/python/run.py", "--socket", host.Socket}, args...)...)
	}
}

func TestThePythonExampleExitsAsTheCommandLineDoes(t *testing.T) {
	run := python(t)
	s := common(t)
	for _, x := range []struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{[]string{s.GetSessionId(), "--", "echo out; echo err >&2; exit 7"}, 7, "out\n", "err\n"},
		{[]string{s.GetSessionId(), "--", "printf '\\377ü'"}, 0, "\xff\u00fc", ""},
		{[]string{s.GetSessionId(), "--", "kill -9 $$"}, 137, "", ""},
		{[]string{"--timeout", "0.2", s.GetSessionId(), "--", "sleep 600"}, 124, "", ""},
		{[]string{"--exec-id", "python", s.GetSessionId(), "--", "echo ran >> count-id; wc -l < count-id"}, 0, "1\n", ""},
		{[]string{"--exec-id", "python", s.GetSessionId(), "--", "echo ran >> count-id; wc -l < count-id"}, 0, "1\n", ""},
		{[]string{"--exec-id", "python", s.GetSessionId(), "--", "true"}, 125, "", "already_exists"},
		{[]string{"never-made", "--", "true"}, 125, "", "not_found"},
		{[]string{"--socket", "/nowhere/s", s.GetSessionId(), "--", "true"}, 125, "", "/nowhere/s"},
	} {
		stdout, stderr, code := run(x.args...)
		require.Equal(t, x.code, code, "%v\n%s", x.args, stderr)
		require.Equal(t, x.stdout, stdout, x.args)
		require.Contains(t, stderr, x.stderr, x.args)
	}
	require.Equal(t, 1, lines(s, "count-id"))
}

func TestP6ThePythonExampleAsksAgainAfterTheAgentsDeath(t *testing.T) {
	run := python(t)
	s := common(t)
	type end struct {
		stdout, stderr string
		code           int
	}
	done := make(chan end, 1)
	go func() {
		stdout, stderr, code := run(s.GetSessionId(), "--", counted("python"))
		done <- end{stdout, stderr, code}
	}()
	until(t, "the command runs", func() bool { return lines(s, "count-python") == 1 })
	host.end(syscall.SIGKILL)
	host.Serve()
	let(t, s, "go-python")
	require.Equal(t, end{"one\ntwo\n", "", 0}, <-done)
	require.Equal(t, 1, lines(s, "count-python"))
}

func TestP2ThePythonExampleDoesNotBelieveAProxyThatTurnsAFailureIntoASuccess(t *testing.T) {
	run, s := python(t), common(t)
	_, stderr, code := run("--exec-id", "python-fails", s.GetSessionId(), "--", "exit 1")
	require.Equal(t, 1, code, "the control case: %s", stderr)
	_, stderr, code = run("--socket", (&liar{api: host.client().API()}).serve(t), "--exec-id", "python-fails", s.GetSessionId(), "--", "exit 1")
	require.Equal(t, 120, code)
	require.Contains(t, stderr, "not its receipt's")
	_, stderr, code = run("--socket", (&liar{api: host.client().API(), forges: true}).serve(t), "--exec-id", "python-fails", s.GetSessionId(), "--", "exit 1")
	require.Equal(t, 120, code)
	require.Contains(t, stderr, "the receipt's signature is not its sandbox's", "all else is as a true answer is")
}

// The example's own verification and Go's say the same of true and of spoilt signatures.
func TestP2ThePythonExampleVerifiesSignaturesAsGoDoes(t *testing.T) {
	python(t) // is there one
	seed := bytes.Repeat([]byte{7}, ed25519.SeedSize)
	private := ed25519.NewKeyFromSeed(seed)
	public := private.Public().(ed25519.PublicKey)
	type trial struct{ Key, Message, Signature []byte }
	var trials []trial
	var want []bool
	for n := range 40 {
		x := trial{bytes.Clone(public), bytes.Repeat([]byte("m"), n), nil}
		x.Signature = ed25519.Sign(private, x.Message)
		switch n % 5 {
		case 1:
			x.Signature[n%64] ^= 1 << (n % 8)
		case 2:
			x.Message = append(x.Message, 'x')
		case 3:
			x.Key[n%32] ^= 1
		case 4:
			x.Signature = x.Signature[:63]
		}
		trials = append(trials, x)
		want = append(want, len(x.Signature) == 64 && ed25519.Verify(x.Key, x.Message, x.Signature))
	}
	require.Contains(t, want, true)
	in, err := json.Marshal(trials)
	require.NoError(t, err)
	out, stderr, code := example(t, []string{"PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=examples/python"}, "python3", "-c", `
import base64, ed25519, json, sys
d = base64.b64decode
print(json.dumps([ed25519.verify(d(x["Key"]), d(x["Message"]), d(x["Signature"])) for x in json.loads(sys.argv[1])]))
`, string(in))
	require.Zero(t, code, stderr)
	var got []bool
	require.NoError(t, json.Unmarshal([]byte(out), &got))
	require.Equal(t, want, got)
}

// The two clients must agree on what a request is.
func TestThePythonExampleDigestsARequestAsReceiptsDo(t *testing.T) {
	run := python(t)
	s := common(t)
	// The comparison is in the client: an answer whose digest differs is UNCERTAIN, exit code 120.
	_, stderr, code := run("--timeout", "12.3456", s.GetSessionId(), "--", "echo 'grüße \U0001F980'")
	require.Zero(t, code, stderr)
}

func TestTheGrpcurlExampleWorksAsItStands(t *testing.T) {
	needAgent(t)
	testkit.Need(t, testkit.Program("go"))
	s := common(t)
	stdout, stderr, code := example(t, []string{"SOCKET=" + host.Socket}, "examples/grpcurl.sh", s.GetSessionId())
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "sandbox.v1.ExecService", "reflection")
	require.Contains(t, stdout, "refused: 70", "64 plus ALREADY_EXISTS")
	require.Contains(t, stderr, "AlreadyExists")
	var results []string
	for dec := json.NewDecoder(strings.NewReader(stdout[strings.Index(stdout, "{"):strings.Index(stdout, "refused")])); dec.More(); {
		var m struct {
			Result struct{ Status, StdoutText, Receipt string }
		}
		require.NoError(t, dec.Decode(&m))
		if m.Result.Status != "" {
			results = append(results, m.Result.Status+" "+m.Result.StdoutText+m.Result.Receipt)
		}
	}
	require.Len(t, results, 3)
	require.Regexp(t, "^EXITED hello\n[A-Za-z0-9+/]+=*$", results[0])
	require.Equal(t, results[0], results[1], "it did not run again: the receipt is the same")
	require.NotEqual(t, results[0], results[2])
}
