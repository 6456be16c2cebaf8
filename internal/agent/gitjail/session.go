package gitjail

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// Making a jail costs more than most runs of Git. A Session is a jail that stays for several of them, one after the other:
// its first process, which has given up every privilege, starts Git for each call that it is sent. The standard streams
// of a run are descriptors that come with the call, so that two sessions can be joined by a pipe.
//
//	agent                             first process of the jail              Git
//	  |- callMessage + 3 descriptors ->|                                      |
//	  |                                |- fork, exec ------------------------>|
//	  |<------------- standard output and error, by the descriptors ----------|
//	  |                                |<- wait4 -----------------------------|
//	  |<- replyMessage ----------------|

// sessionSocket is the descriptor of the agent's socket in a session's first process.
const sessionSocket = 3

// longestMessage bounds a call's words and environment, bytes; a datagram has to fit into a socket's buffer.
const longestMessage = 192 << 10

// drainTime is how long the output of a run is waited for once Git has ended: only a process that it left behind can
// still hold it open.
const drainTime = 10 * time.Second

// callMessage is a call's working folder, words and environment: their parts can be any bytes but NUL, with which they are
// joined.
type callMessage struct {
	dir       string
	args, env []string
}

func (m callMessage) encode() ([]byte, error) {
	parts := append([]string{m.dir, strconv.Itoa(len(m.args))}, m.args...)
	parts = append(parts, m.env...)
	b := []byte(strings.Join(parts, "\x00"))
	switch {
	case bytes.Count(b, []byte{0}) != len(parts)-1: // a caller's word would become a part of the environment
		return nil, errors.New("the call has a NUL byte in a word")
	case len(b) > longestMessage:
		return nil, fmt.Errorf("the call has %d bytes, more than %d", len(b), longestMessage)
	}
	return b, nil
}

func decodeCall(b []byte) (callMessage, error) {
	parts := strings.Split(string(b), "\x00")
	if len(parts) < 2 {
		return callMessage{}, errors.New("the call has no words")
	}
	dir, parts := parts[0], parts[1:]
	n, err := strconv.Atoi(parts[0])
	if err != nil || n < 0 || n > len(parts)-1 {
		return callMessage{}, fmt.Errorf("the call has %d parts and says %q", len(parts), parts[0])
	}
	return callMessage{dir: dir, args: parts[1 : n+1], env: parts[n+1:]}, nil
}

type replyMessage struct {
	ExitCode int `json:"exitCode"`
	// Error is why Git could not be started, or did not exit by itself.
	Error string `json:"error,omitempty"`
}

// Session is a jail that stays. It is for one caller at a time.
type Session struct {
	jail Jail
	conn *net.UnixConn
	end  context.CancelFunc
	done chan struct{}
	// said is what the first process printed; it is whole when done is closed.
	said *boundedBuffer
}

// Start makes the jail. ctx bounds the session: when it ends, everything in the jail is killed. The caller closes it.
func (j Jail) Start(ctx context.Context) (*Session, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making the socket of a jail: socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "jail"), os.NewFile(uintptr(fds[1]), "jail")
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		return nil, fmt.Errorf("using the socket of a jail: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &Session{jail: j, conn: conn.(*net.UnixConn), end: cancel, done: make(chan struct{}), said: &boundedBuffer{max: stderrOutput}}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args[0] = jailName
	cmd.Env = append(append(gitguard.Env(), j.Env...), jailSpec{Owner: j.Owner, Dir: j.Dir, Mounts: j.Mounts, Session: true, Finish: j.Finish}.variable())
	cmd.Stderr = s.said
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = jailAttr()
	cmd.WaitDelay = drainTime
	started := make(chan error, 1)
	go func() {
		defer close(s.done)
		// PR_SET_PDEATHSIG in the jail is about the thread that forks it: this one stays until the jail has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it is killed at the end; what went wrong before is in what it printed
		}
	}()
	made.jails.Add(1)
	if err := <-started; err != nil {
		cancel()
		conn.Close()
		return nil, fmt.Errorf("%w: starting a jail: %w", ErrGit, err)
	}
	return s, nil
}

// Close ends the jail and everything in it, and waits until it has ended.
func (s *Session) Close() {
	s.end()
	<-s.done
	s.conn.Close()
}

// Ended says whether the jail is gone, so that the session is of no more use.
func (s *Session) Ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// Run gives Git's standard output. A non-zero exit, or more output than is kept, is an error that wraps ErrGit.
func (s *Session) Run(ctx context.Context, args ...string) (string, error) {
	return s.RunCall(ctx, Call{Args: args})
}

// RunCall is Run with everything that a call can have.
func (s *Session) RunCall(ctx context.Context, c Call) (string, error) {
	r, err := s.Do(ctx, c)
	return judge(s.jail, c, r, err)
}

// Do runs Git and gives what it answered, whatever its exit code. A stream of c that is an *os.File goes to Git as it is,
// and is closed here once Git has it. After an error, which wraps ErrGit, the jail has ended
// and the session is of no more use.
func (s *Session) Do(ctx context.Context, c Call) (Result, error) {
	timeout := s.jail.timeout(c)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, s.end)
	defer stop()
	r, err := s.call(c)
	if err == nil {
		return r, nil
	}
	s.end()
	<-s.done
	if ctx.Err() != nil {
		return Result{}, fmt.Errorf("%w: git %s in %s took longer than %s or was cancelled: %w", ErrGit, c.name(), s.jail.dir(c), timeout, ctx.Err())
	}
	return Result{}, fmt.Errorf("%w: git %s in %s: %w: %s", ErrGit, c.name(), s.jail.dir(c), err, withoutAdvice(s.said.String()))
}

func (s *Session) call(c Call) (Result, error) {
	keep := s.jail.keep(c)
	stdout, stderr := &boundedBuffer{max: keep}, &boundedBuffer{max: min(keep, stderrOutput)}
	streams := streamSet{outputErrs: make(chan error, 2)}
	defer streams.close()
	var out io.Writer = stdout
	if c.Stdout != nil {
		out = c.Stdout
	}
	theirs := []*os.File{streams.in(c.Stdin), streams.out(out), streams.out(stderr)}
	if streams.err != nil {
		return Result{}, streams.err
	}
	b, err := callMessage{dir: s.jail.dir(c), args: c.Args, env: c.Env}.encode()
	if err != nil {
		return Result{}, err
	}
	made.runs.Add(1)
	rights := unix.UnixRights(int(theirs[0].Fd()), int(theirs[1].Fd()), int(theirs[2].Fd()))
	_, _, err = s.conn.WriteMsgUnix(b, rights, nil)
	streams.sent()
	if err != nil {
		return Result{}, err
	}
	answer := make([]byte, 64<<10)
	n, err := s.conn.Read(answer)
	if err != nil {
		return Result{}, err
	}
	if n == 0 {
		return Result{}, io.ErrUnexpectedEOF
	}
	var reply replyMessage
	if err := json.Unmarshal(answer[:n], &reply); err != nil {
		return Result{}, fmt.Errorf("reading the jail's answer: %w", err)
	}
	if reply.Error != "" {
		return Result{}, errors.New(reply.Error)
	}
	// A stream that was not read to its end, or whose reader refused it, is no answer: what is checked in part is unchecked.
	if err := streams.drain(); err != nil {
		return Result{}, err
	}
	return Result{
		ExitCode: reply.ExitCode, Stdout: stdout.Bytes(), Stderr: []byte(withoutAdvice(stderr.String())), Truncated: stdout.cut || stderr.cut,
	}, nil
}

// streamSet is the standard streams of one run: Git's ends, ours, and the copying between ours and the caller's.
type streamSet struct {
	theirs, inputs, outputs []*os.File
	copying                 sync.WaitGroup
	err                     error
	outputErrs              chan error // one for each of outputs
}

// in gives Git's end of its standard input. A file is handed on as it is.
func (s *streamSet) in(from io.Reader) *os.File {
	if f, ok := from.(*os.File); ok {
		return s.their(f, nil)
	}
	if from == nil {
		f, err := os.Open(os.DevNull)
		return s.their(f, err)
	}
	r, w, err := os.Pipe()
	if err == nil {
		s.inputs = append(s.inputs, w)
		s.copying.Go(func() {
			_, _ = io.Copy(w, from) // Git may end without having read it all
			w.Close()
		})
	}
	return s.their(r, err)
}

// out gives Git's end of an output. A file is handed on as it is.
func (s *streamSet) out(to io.Writer) *os.File {
	if f, ok := to.(*os.File); ok {
		return s.their(f, nil)
	}
	r, w, err := os.Pipe()
	if err == nil {
		s.outputs = append(s.outputs, r)
		s.copying.Go(func() {
			_, err := io.Copy(to, r)
			s.outputErrs <- err
		})
	}
	return s.their(w, err)
}

func (s *streamSet) their(f *os.File, err error) *os.File {
	if err != nil {
		s.err = errors.Join(s.err, fmt.Errorf("making a stream for git: %w", err))
		return nil
	}
	s.theirs = append(s.theirs, f)
	return f
}

// sent closes Git's ends: it has them now.
func (s *streamSet) sent() {
	for _, f := range s.theirs {
		f.Close()
	}
	s.theirs = nil
}

// drain takes the rest of the output of a run that has ended, and says whether all of it was taken.
func (s *streamSet) drain() error {
	for _, f := range s.outputs {
		_ = f.SetReadDeadline(time.Now().Add(drainTime))
	}
	for _, f := range s.inputs {
		_ = f.SetWriteDeadline(time.Now())
	}
	s.copying.Wait()
	var all error
	for range s.outputs {
		if err := <-s.outputErrs; err != nil {
			all = errors.Join(all, fmt.Errorf("taking git's output: %w", err))
		}
	}
	return all
}

func (s *streamSet) close() {
	s.sent()
	for _, f := range append(s.inputs, s.outputs...) {
		f.Close()
	}
	s.copying.Wait()
}

// serve is the first process of a session's jail. It runs on the thread that gave up its privileges, and so does the
// forking of Git, which inherits what that thread has left.
func serve(git string) error {
	// What it ends besides Git is all that this PID namespace has: see endOthers.
	if os.Getpid() != 1 {
		return errors.New("it is not the first process of a PID namespace")
	}
	// Root's Git has the same uid: it must not get at this process, whose other threads still have capabilities.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("closing itself to ptrace: %w", err)
	}
	unix.CloseOnExec(sessionSocket)
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, jailVar+"=") })
	message, control := make([]byte, 2*longestMessage), make([]byte, unix.CmsgSpace(3*4))
	for {
		n, c, _, _, err := unix.Recvmsg(sessionSocket, message, control, unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("receiving a call: %w", err)
		case n == 0:
			os.Exit(0) // the agent has closed its end
		}
		reply := answerCall(git, env, message[:n], control[:c])
		b, err := json.Marshal(reply)
		if err != nil {
			return err
		}
		if err := unix.Sendmsg(sessionSocket, b, nil, nil, 0); err != nil {
			return fmt.Errorf("answering a call: %w", err)
		}
	}
}

func answerCall(git string, env []string, message, control []byte) replyMessage {
	files, err := receivedFiles(control)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err != nil {
		return replyMessage{Error: err.Error()}
	}
	m, err := decodeCall(message)
	if err != nil {
		return replyMessage{Error: "reading the call: " + err.Error()}
	}
	cmd := exec.Cmd{Path: git, Dir: m.dir, Args: append([]string{"git"}, m.args...), Env: append(slices.Clone(env), m.env...)}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = files[0], files[1], files[2]
	err = cmd.Run()
	if err := endOthers(); err != nil {
		return replyMessage{Error: err.Error()}
	}
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || !exit.Exited()) {
		return replyMessage{Error: err.Error()}
	}
	return replyMessage{ExitCode: cmd.ProcessState.ExitCode()}
}

// endOthers kills what a run left behind, and waits until it has ended: the next run is alone in the jail, as the first was.
// A kill of all processes leaves out who asks for it (kill(2)), and orphans are the first process's children.
func endOthers() error {
	if err := unix.Kill(-1, unix.SIGKILL); err != nil && err != unix.ESRCH { //nolint:forbidigo // it names no process, but all others of this PID namespace
		return fmt.Errorf("ending what git left behind: kill: %w", err)
	}
	for {
		_, err := unix.Wait4(-1, nil, 0, nil)
		switch {
		case err == unix.ECHILD:
			return nil
		case err != nil && err != unix.EINTR:
			return fmt.Errorf("waiting for what git left behind: wait4: %w", err)
		}
	}
}

func receivedFiles(control []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("the call came without its streams (%v)", err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, fmt.Errorf("reading the call's streams: %w", err)
	}
	var files []*os.File
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "stream"))
	}
	if len(files) != 3 {
		return files, fmt.Errorf("the call came with %d streams instead of 3", len(files))
	}
	return files, nil
}
