package attack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestMain(m *testing.M) {
	inside.Init()
	os.Exit(m.Run())
}

// owner owns what is attacked.
const owner = 4321

// bare is a Place without a sandbox: commands are run by a user of the node. They have a PID namespace, so that the test can end
// them all, with a process 1 of that user's.
type bare struct {
	t       testing.TB
	g       *grounds
	init    *exec.Cmd
	initPID string
}

func newBare(t testing.TB, g *grounds) *bare {
	b := &bare{t: t, g: g}
	// setpriv sets the signal again that the change of the uid clears (prctl(2)): with unshare all of the namespace ends.
	b.init = exec.Command("unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "setpriv", "--pdeathsig", "KILL", "--reuid", strconv.Itoa(owner), "--regid", strconv.Itoa(owner), "--clear-groups", "sleep", "3600")
	require.NoError(t, b.init.Start())
	t.Cleanup(func() {
		_ = b.init.Process.Kill()
		_ = b.init.Wait()
		require.Eventually(t, func() bool { return unix.Access("/proc/"+b.initPID, unix.F_OK) != nil }, time.Minute, 5*time.Millisecond,
			"the namespace's process 1 ends with unshare, and all that attacks have left in it")
	})
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", b.init.Process.Pid)
	require.Eventually(t, func() bool {
		list, err := os.ReadFile(children)
		b.initPID = strings.TrimSpace(string(list))
		comm, commErr := os.ReadFile(filepath.Join("/proc", b.initPID, "comm"))
		return err == nil && commErr == nil && b.initPID != "" && string(comm) == "sleep\n"
	}, time.Minute, 5*time.Millisecond)
	return b
}

// inNamespace is a command in the PID, mount and IPC namespaces, as the owner.
func (b *bare) inNamespace(ctx context.Context, argv ...string) *exec.Cmd {
	enter := []string{"-t", b.initPID, "-p", "-m", "-i", "--setuid", strconv.Itoa(owner), "--setgid", strconv.Itoa(owner), "bash", "-c", `cd "$1" && shift && exec "$@"`, "bash", b.g.worktree}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, argv...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/tmp", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1"}
	return cmd
}

func (b *bare) Exec(ctx context.Context, command string, timeout time.Duration) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	dir := b.t.TempDir() // files, since a process that stays keeps a pipe open
	stdout, err := os.Create(filepath.Join(dir, "stdout"))
	require.NoError(b.t, err)
	defer stdout.Close()
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	require.NoError(b.t, err)
	defer stderr.Close()
	cmd := b.inNamespace(ctx, "bash", "-c", command)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return Answer{}, err
	}
	// As verified as anything: what breaks is to be what the attack does.
	a := Answer{Status: sandboxv1.ExecResult_EXITED, Verified: true}
	if cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
		a.Status = sandboxv1.ExecResult_SIGNALED
	}
	out, err := os.ReadFile(stdout.Name())
	require.NoError(b.t, err)
	said, err := os.ReadFile(stderr.Name())
	require.NoError(b.t, err)
	sum := sha256.Sum256(out)
	a.Stdout, a.Stderr, a.Bytes, a.SHA256 = string(out), string(said), uint64(len(out)), hex.EncodeToString(sum[:])
	return a, nil
}

func (b *bare) Git(ctx context.Context, args []string) error {
	cmd := b.inNamespace(ctx, append([]string{"git"}, args...)...)
	cmd.WaitDelay = time.Second
	_ = cmd.Run()
	return ctx.Err()
}

func (b *bare) Known(context.Context, string) (bool, error) { return false, nil }

func (b *bare) Same(context.Context) (string, error) { return "", nil }

// onBareGround is a runner without a sandbox.
func onBareGround(t *testing.T) *Runner {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.Program("unshare"), testkit.Program("nsenter"), testkit.Program("setpriv"))
	g, err := newGrounds(t.Context(), testkit.StateDir(t), owner, owner)
	require.NoError(t, err)
	b := newBare(t, g)
	self, err := os.Executable()
	require.NoError(t, err)
	r, err := newRunner(t.Context(), b, g, self)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close(context.Background())) })
	// Enough to show it.
	r.shared, r.patience = true, 2*time.Second
	r.words["memory"], r.words["disk"], r.words["files"] = "16", "4", "500"
	// In their PID namespace, commands don't see the canary.
	seen := b.inNamespace(t.Context(), "bash", "-c", "exec -a "+r.w.canaryWord+" sleep 3600")
	require.NoError(t, seen.Start())
	t.Cleanup(func() { _ = seen.Process.Kill(); _ = seen.Wait() })
	return r
}

// Each attack does what it says where nothing keeps it from it, and the runner says so: without that, one that does nothing would
// be held for ever.
func TestWithoutASandboxEachAttackIsReportedBroken(t *testing.T) {
	r := onBareGround(t)
	for _, a := range Table {
		t.Run(a.Promise+" "+a.Name, func(t *testing.T) {
			if a.Needless != "" {
				t.Logf("there is no control case: %s", a.Needless)
				return
			}
			on := r
			if a.Promise == "P11" || a.Promise == "P12" { // these spoil the ground for the next one
				on = onBareGround(t)
			}
			if strings.Contains(a.Name, "foreign ABI") && !runsForeign(t) {
				t.Log("this machine runs no call of another ABI, in a sandbox or not")
				return
			}
			res := on.Run(t.Context(), a)
			require.Equal(t, Broken, res.Verdict, "%+v", res)
			require.NotEmpty(t, res.Why)
		})
	}
}

// runsForeign says whether this machine's kernel has i386's calls (CONFIG_IA32_EMULATION).
func runsForeign(t *testing.T) bool {
	self, err := os.Executable()
	require.NoError(t, err)
	out, _ := exec.Command(self, inside.Word, "foreign", "getpid").Output()
	return bytes.Contains(out, []byte(inside.Got))
}

func TestWithoutASandboxWhatStaysBehindIsSeenByItsBeatAsWell(t *testing.T) {
	r := onBareGround(t)
	answer, err := r.place.Exec(t.Context(), "(exec -a unnamed "+r.words["helper"]+" stay deaf) & echo tried 1", time.Minute)
	require.NoError(t, err)
	require.Equal(t, "tried 1\n", answer.Stdout)
	require.Eventually(t, func() bool { return r.w.beats() > 0 }, time.Minute, time.Millisecond)
	require.Equal(t, []string{"something that writes to beat"}, r.w.still(t.Context(), "a word of nobody's"), "as where /proc doesn't show it")
}

func TestAnAttackThatDoesNotComeToItsEndIsNotHeld(t *testing.T) {
	r := onBareGround(t)
	for command, why := range map[string]string{
		"exit 0":                              "did not come to its end",
		r.words["helper"] + " no-such-attack": "there is no such attack",
		"echo got what it wanted":             "the command got what it wanted",
		"echo tried 1; echo got it; printf 'got \\033[2J\\n'": "the command got it, ?[2J",
	} {
		res := r.Run(t.Context(), Attack{Promise: "P0", Command: command})
		require.NotEqual(t, Held, res.Verdict, command)
		require.Contains(t, res.Why, why, command)
	}
	res := r.Run(t.Context(), Attack{Promise: "P0", Command: "echo tried 1", Needs: []string{"no-such-program"}})
	require.Equal(t, NotRun, res.Verdict)
	res = r.Run(t.Context(), Attack{Promise: "P0", Command: "echo tried 1", Stays: true})
	require.Equal(t, NotRun, res.Verdict, "nothing stayed")
	res = r.Run(t.Context(), Attack{Promise: "P0", Command: "echo tried 1"})
	require.Equal(t, Held, res.Verdict, "the control case: %s", res.Why)
}

func TestNothingIsLeftOfWhatIsAttacked(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	top := testkit.StateDir(t)
	g, err := newGrounds(t.Context(), top, owner, owner)
	require.NoError(t, err)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(g.worktree, &st))
	require.EqualValues(t, owner, st.Uid)
	self, err := os.Executable()
	require.NoError(t, err)
	_, err = newWitness(t.Context(), g, filepath.Join(top, "no-such-program"))
	require.ErrorContains(t, err, "starting a canary")
	w, err := newWitness(t.Context(), g, self)
	require.NoError(t, err)
	require.Len(t, processes(w.canaryWord), 1)
	w.stop()
	require.NoError(t, g.remove())
	require.Empty(t, processes(w.canaryWord))
	entries, err := os.ReadDir(top)
	require.NoError(t, err)
	require.Empty(t, entries)
}
