// Command observe runs in the guests of tests/kernel. For each change of the node in its standard input (package seen) it
// makes the change, asks "sandbox-agent check", starts the agent, makes a session and has a command attack what the
// promises keep from it, takes the change back, and prints what it saw as one line. It judges nothing.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
	"github.com/sandbox-agent/sandbox-agent/tests/kernel/seen"
)

// patience bounds every step; nothing is decided by it but that something hangs.
const patience = 4 * time.Minute

const (
	owner = 4321
	state = "/var/lib/observe-state"
	roots = "/var/tmp"
	work  = roots + "/observe"
	// port is one of those that a command must never reach (listeners.tcp in the configuration).
	port = 44772
	// stray is the argument by which a process that outlives its command is found.
	stray = "86417"
)

// withoutSeccomp as the first argument: the rest is a command, which this program becomes.
const withoutSeccomp = "without-seccomp"

func main() {
	if len(os.Args) > 2 && os.Args[1] == withoutSeccomp {
		fmt.Println("observe:", becomeWithoutSeccomp(os.Args[2:]))
		os.Exit(1)
	}
	var changes []seen.Change
	if err := json.NewDecoder(os.Stdin).Decode(&changes); err != nil {
		fmt.Println("observe:", err)
		os.Exit(1)
	}
	control := attackHere()
	for _, c := range changes {
		step("%s", c.Name)
		r := observe(c)
		r.Control = control
		line, err := json.Marshal(r)
		if err != nil {
			fmt.Println("observe:", err)
			os.Exit(1)
		}
		fmt.Printf("%s%s\n", seen.Mark, line)
	}
}

var began = time.Now()

// step says how far it is, for whoever reads why a guest came to nothing.
func step(format string, args ...any) {
	fmt.Printf("%6.1f s: %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
}

// observe looks at the node with a change. What is wrong with looking is in Failed.
func observe(c seen.Change) seen.Result {
	r := seen.Result{Change: c.Name}
	before := strays()
	undo, err := apply(c)
	if errors.Is(err, errNoSetting) {
		r.NotRun = err.Error()
		return r
	}
	if err == nil {
		err = look(c, &r)
	}
	if err := errors.Join(err, os.RemoveAll(state), os.RemoveAll(work), undo()); err != nil {
		r.Failed = err.Error()
	}
	for _, s := range strays() {
		if !slices.Contains(before, s) {
			r.Left = append(r.Left, s)
		}
	}
	return r
}

var errNoSetting = errors.New("this kernel does not have the setting")

// apply makes a change. undo takes back what the kernel lets be taken back.
func apply(c seen.Change) (undo func() error, err error) {
	var undone []func() error
	undo = func() error {
		var all []error
		for _, f := range slices.Backward(undone) {
			all = append(all, f())
		}
		return errors.Join(all...)
	}
	for _, s := range c.Sysctls {
		path := "/proc/sys/" + strings.ReplaceAll(s[0], ".", "/")
		was, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			return undo, fmt.Errorf("%w %s", errNoSetting, s[0])
		}
		if err := os.WriteFile(path, []byte(s[1]), 0); err != nil {
			return undo, err
		}
		undone = append(undone, func() error {
			if err := os.WriteFile(path, bytes.TrimSpace(was), 0); err != nil && s[0] != "kernel.yama.ptrace_scope" { // 3 can't be taken back
				return err
			}
			return nil
		})
	}
	if c.Tmpfs {
		if err := unix.Mount("tmpfs", roots, "tmpfs", 0, "mode=1777"); err != nil {
			return undo, err
		}
		undone = append(undone, func() error { return unix.Unmount(roots, 0) })
	}
	if c.Hidepid != "" {
		remount := func(value string) error { return unix.Mount("", "/proc", "", unix.MS_REMOUNT, "hidepid="+value) }
		if err := remount(c.Hidepid); err != nil {
			return undo, err
		}
		undone = append(undone, func() error { return remount("0") })
	}
	return undo, nil
}

// look asks the check, and tries what the node then does.
func look(c seen.Change, r *seen.Result) error {
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	config := filepath.Join(work, "config.yaml")
	// A guest on a busy machine is slow, which is nothing that is looked for.
	text := fmt.Sprintf("runtime: {start_timeout: 10m}\nstate_dir: %s\nsocket: {path: %s/exec.sock}\nworkspace: {roots: [%s]}\n%s\n", state, work, roots, c.Config)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	var answer bytes.Buffer
	check := agent(c, "check", "--json", "--config", config)
	check.Stdout = &answer
	code, err := exitCode(check)
	if err != nil {
		return err
	}
	r.CheckCode = code
	if json.Valid(answer.Bytes()) {
		r.Check = bytes.TrimSpace(answer.Bytes())
	}
	step("the check answered %d", code)
	serve, ended, err := start(c, config)
	if err != nil {
		return err
	}
	if r.Started, err = ready(ended); err != nil || !r.Started {
		r.Said = log()
		return err
	}
	step("the agent answers")
	err = useAgent(r)
	_ = serve.Process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(patience):
		_ = serve.Process.Kill()
		err = errors.Join(err, errors.New("the agent does not end on SIGTERM"))
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, log())
	}
	return err
}

func program() string { return filepath.Join(os.Getenv("SANDBOX_TEST_BIN_DIR"), "sandbox-agent") }

// agent is a command of the product's own, without what the change takes from it.
func agent(c seen.Change, args ...string) *exec.Cmd {
	argv := append([]string{program()}, args...)
	if c.Without != "" {
		argv = append([]string{"setpriv", "--bounding-set", "-" + c.Without, "--inh-caps", "-" + c.Without, "--"}, argv...)
	}
	if c.NoSeccomp {
		argv = append([]string{"/proc/self/exe", withoutSeccomp}, argv...)
	}
	return exec.Command(argv[0], argv[1:]...)
}

// becomeWithoutSeccomp becomes a command to which the kernel answers as one that is built without CONFIG_SECCOMP_FILTER (EINVAL,
// prctl(2) and seccomp(2)): none of the suites' kernels is, and there is no boot parameter for it. It returns only an error.
func becomeWithoutSeccomp(argv []string) error {
	const nr, arg0 = 0, 16 // offsets in struct seccomp_data
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	skipUnless := func(is uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: is, Jf: skip}
	}
	refuse := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EINVAL)}
	err := seccomp.InstallAll([]unix.SockFilter{
		load(nr), skipUnless(unix.SYS_SECCOMP, 1), refuse,
		skipUnless(unix.SYS_PRCTL, 3), load(arg0), skipUnless(unix.PR_SET_SECCOMP, 1), refuse,
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	})
	if err != nil {
		return err
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return fmt.Errorf("starting %s: %w", path, unix.Exec(path, argv, os.Environ()))
}

func start(c seen.Change, config string) (*exec.Cmd, <-chan struct{}, error) {
	file, err := os.Create(filepath.Join(work, "log"))
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	cmd := agent(c, "serve", "--config", config, "--libexec-dir", filepath.Dir(program()))
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	return cmd, ended, nil
}

// ready waits until the agent answers, or has ended.
func ready(ended <-chan struct{}) (bool, error) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("unix", work+"/exec.sock"); err == nil {
			conn.Close()
			return true, nil
		}
		select {
		case <-ended:
			return false, nil
		default:
		}
	}
	return false, errors.New("the agent neither answers nor ends")
}

func log() string {
	b, _ := os.ReadFile(filepath.Join(work, "log"))
	return string(b[max(0, len(b)-8<<10):])
}

// useAgent makes a session, attacks from a command in it, and deletes it.
func useAgent(r *seen.Result) error {
	repo := filepath.Join(work, "repo")
	if err := makeRepo(repo); err != nil {
		return err
	}
	stop, err := listen()
	if err != nil {
		return err
	}
	defer stop()
	socket := []string{"--socket", work + "/exec.sock"}
	created, err := output(agent(seen.Change{}, append([]string{"session", "create", "--repo", repo, "--branch", "topic", "--worktree", work + "/wt", "--memory", "40MiB"}, socket...)...))
	if err != nil {
		r.Session = created
		return nil
	}
	step("there is a session")
	id := strings.TrimSpace(created)
	run := func(script string) (string, error) {
		return output(agent(seen.Change{}, append([]string{"exec", id, "--timeout", "100s"}, append(socket, "--", script)...)...))
	}
	said, err := run(attacks(repo))
	if err != nil {
		return fmt.Errorf("the command with the attacks: %w: %s", err, said)
	}
	r.Attacks = parse(said)
	r.Attacks[aliveAfter] = held(len(strayProcesses()) == 0)
	// The command's memory is its own affair, and the sandbox goes on.
	said, _ = run(useMemory) // how it ends is not asked: what it printed is
	r.Attacks[moreMemory] = held(!strings.Contains(said, usedMemory))
	step("its commands have run")
	if said, err = run("echo still here"); err != nil || strings.TrimSpace(said) != "still here" {
		return fmt.Errorf("the sandbox did not go on: %v: %s", err, said)
	}
	if said, err := output(agent(seen.Change{}, "receipt", "verify", "--all", state+"/receipts")); err != nil {
		r.Receipts = said
	}
	if said, err := output(agent(seen.Change{}, append([]string{"session", "delete", id}, socket...)...)); err != nil {
		return fmt.Errorf("deleting the session: %w: %s", err, said)
	}
	return nil
}

func makeRepo(repo string) error {
	if err := os.MkdirAll(repo, 0o755); err != nil {
		return err
	}
	if err := os.Chown(work, owner, owner); err != nil {
		return err
	}
	if err := os.Chown(repo, owner, owner); err != nil {
		return err
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"commit", "-q", "--allow-empty", "-m", "First"}} {
		cmd := exec.Command("git", append([]string{"-c", "user.name=T", "-c", "user.email=t@example.com"}, args...)...)
		cmd.Dir = repo
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner, Gid: owner}}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", args[0], err, out)
		}
	}
	return nil
}

// listen opens what a command must not reach.
func listen() (stop func(), err error) {
	tcp, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return nil, err
	}
	return func() { tcp.Close() }, nil
}

// What is looked at from outside.
const (
	aliveAfter = "P3: a process goes on after the answer"
	moreMemory = "P16: a command gets more memory than its session"
)

// useMemory has tail(1) hold half as much again as a command of the session may have.
const (
	useMemory  = "head -c 64M /dev/zero | tail -c 64M | wc -c"
	usedMemory = "67108864"
)

// attacks is a script that says of each thing whether it was reached. repo is the base clone.
func attacks(repo string) string {
	const f = `
try() { name=$1; shift; if "$@" >/dev/null 2>&1; then echo "$name=reached"; else echo "$name=held"; fi; }
setid() { : >setid.$$ && chmod 4755 setid.$$ && [ -u setid.$$ ]; }
config() { git config --file %[1]s/.git/config attack.x y; }
tcp() { exec 9<>/dev/tcp/127.0.0.1/%[2]d; }
tmpfs() { mkdir here.$$ && mount -t tmpfs tmpfs here.$$ && umount here.$$; }
try "P9: reads the receipts" ls %[3]s/receipts
try "P9: reads the environment of process 1" cat /proc/1/environ
try "P9: is root" test "$(id -u)" = 0
try "P9: mounts a file system" tmpfs
try "P11: makes a set-id file" setid
try "P12: changes the configuration of the base clone" config
try "P10: connects to a listener of the node" tcp
rm -rf setid.* here.*
setsid sh -c 'echo >here.started; exec sleep "$0"' %[4]s </dev/null >/dev/null 2>&1 &
until [ -e here.started ]; do sleep 0.1; done
`
	return fmt.Sprintf(f, repo, port, state, stray)
}

// attackHere is the control: the same by a process of the node.
func attackHere() map[string]string {
	repo := filepath.Join(work, "repo")
	stop, err := listen()
	if err != nil {
		return map[string]string{"listening": err.Error()}
	}
	defer stop()
	for _, dir := range []string{repo + "/.git", state + "/receipts"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return map[string]string{"making folders": err.Error()}
		}
	}
	cmd := exec.Command("unshare", "-m", "bash", "-c", attacks(repo))
	cmd.Dir = repo
	said, err := output(cmd)
	if err != nil {
		return map[string]string{"the attacks": said}
	}
	m := parse(said)
	m[aliveAfter] = held(len(strayProcesses()) == 0)
	for _, p := range strayProcesses() {
		if pid, err := strconv.Atoi(p); err == nil {
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
				unix.Close(fd)
			}
		}
	}
	said, _ = output(exec.Command("bash", "-c", useMemory))
	m[moreMemory] = held(!strings.Contains(said, usedMemory))
	if err := errors.Join(os.RemoveAll(state), os.RemoveAll(work)); err != nil {
		m["cleaning up"] = err.Error()
	}
	return m
}

func held(is bool) string {
	if is {
		return "held"
	}
	return "reached"
}

func parse(said string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(said) {
		if name, what, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			m[name] = what
		}
	}
	return m
}

// output is what a program says, both streams, within patience.
func output(cmd *exec.Cmd) (string, error) {
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	code, err := exitCode(cmd)
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d", code)
	}
	return b.String(), err
}

func exitCode(cmd *exec.Cmd) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	err := cmd.Wait()
	if ctx.Err() != nil {
		return 0, fmt.Errorf("%s hangs", filepath.Base(cmd.Path))
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// strayProcesses are those with the stray's argument.
func strayProcesses() (pids []string) {
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range found {
		b, _ := os.ReadFile(path)
		if slices.Contains(strings.Split(string(b), "\x00"), stray) {
			pids = append(pids, filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

// strays are the mounts, and the processes of the product's, that there are.
func strays() []string {
	all := map[string]bool{}
	if f, err := os.Open("/proc/self/mounts"); err == nil {
		b, _ := io.ReadAll(f)
		f.Close()
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 1 && f[1] != "/proc" {
				all["mount "+f[1]] = true
			}
		}
	}
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, path := range comms {
		b, _ := os.ReadFile(path)
		if name := strings.TrimSpace(string(b)); slices.Contains([]string{"receiptd", "pid1", "sandbox-agent"}, name) {
			all["process "+name] = true
		}
	}
	for _, p := range strayProcesses() {
		all["stray process "+p] = true
	}
	return slices.Sorted(maps.Keys(all))
}
