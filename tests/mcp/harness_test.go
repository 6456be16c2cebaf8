package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// owner owns the repositories and worktrees.
const owner = 4326

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

// session is a session of a real agent.
type session struct {
	*node.Agent
	id, worktree, repo string
}

func newSession(t *testing.T, a *node.Agent, change ...func(*sandboxv1.CreateSessionRequest)) *session {
	t.Helper()
	repo := testkit.Repo(t, owner)
	req := &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: repo, Branch: "topic", Worktree: filepath.Join(filepath.Dir(repo), "wt")}}
	for _, f := range change {
		f(req)
	}
	res, err := a.Client.Sessions.CreateSession(t.Context(), req)
	require.NoError(t, err, a.LogText())
	s := res.GetSession()
	t.Cleanup(func() { // before the repository goes
		_, err := a.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()})
		if err != nil {
			require.ErrorContains(t, err, "not_found", "a test may have deleted it")
		}
	})
	return &session{Agent: a, id: s.GetSessionId(), worktree: s.GetWorkspace().GetWorktree(), repo: repo}
}

// file is a file of the worktree, as the node sees it.
func (s *session) file(name string) string { return filepath.Join(s.worktree, name) }

func (s *session) read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(s.file(name))
	require.NoError(t, err)
	return string(b)
}

// touch makes a file that a command waits for.
func (s *session) touch(t *testing.T, name string) {
	t.Helper()
	require.NoError(t, os.WriteFile(s.file(name), nil, 0o644))
}

func (s *session) awaitFile(t *testing.T, name string) {
	t.Helper()
	eventually(t, "the file "+name, func() bool { _, err := os.Stat(s.file(name)); return err == nil })
}

// eventually waits for something that comes by itself.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, node.Patience, 5*time.Millisecond, what)
}

// result is what the agent itself says of an exec.
func (s *session) result(t *testing.T, exec string) *sandboxv1.ExecResult {
	t.Helper()
	r, err := s.Client.Execs.GetExec(t.Context(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: exec})
	require.NoError(t, err)
	return r.GetResult()
}

// buffer takes a process's output while a test looks at it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// logged are the server's log lines with a message.
func (b *buffer) logged(msg string) []map[string]any {
	var out []map[string]any
	for l := range strings.Lines(b.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(l), &entry) == nil && entry["msg"] == msg {
			out = append(out, entry)
		}
	}
	return out
}

func serverCommand(s *session, flags ...string) *exec.Cmd {
	return exec.Command(node.Program(), append([]string{"mcp", "--session", s.id, "--socket", s.Socket}, flags...)...)
}

// caller is the official SDK's client with a server of its own.
type caller struct {
	*sdk.ClientSession
	t   *testing.T
	log *buffer
}

func connect(t *testing.T, s *session, o *sdk.ClientOptions, flags ...string) *caller {
	t.Helper()
	cmd, log := serverCommand(s, flags...), &buffer{}
	cmd.Stderr = log
	c, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, o).Connect(t.Context(), &sdk.CommandTransport{Command: cmd, TerminateDuration: node.Patience}, nil)
	require.NoError(t, err, log.String())
	t.Cleanup(func() {
		require.NoError(t, c.Close(), "it ends by itself when its input does:\n%s", log.String())
	})
	return &caller{ClientSession: c, t: t, log: log}
}

// answer is a result of the tool.
type answer struct {
	isError bool
	texts   []string
	Status  string `json:"status"`
	May     bool   `json:"may_have_taken_effect"`
	Code    *int   `json:"exit_code"`
	Stdout  string `json:"stdout"`
	Stderr  string `json:"stderr"`
	ExecID  string `json:"exec_id"`
	Reason  string `json:"reason"`
	Receipt string `json:"receipt_sha256"`
	Info    struct {
		Bytes     uint64 `json:"bytes"`
		SHA256    string `json:"sha256"`
		Truncated bool   `json:"truncated"`
		File      string `json:"output_file"`
		FileBytes uint64 `json:"output_file_bytes"`
	} `json:"stdout_info"`
	Harvest struct {
		Status string   `json:"status"`
		Refs   []string `json:"refs"`
	} `json:"harvest"`
}

func answerOf(t *testing.T, r *sdk.CallToolResult) *answer {
	t.Helper()
	b, err := json.Marshal(r.StructuredContent)
	require.NoError(t, err)
	a := &answer{isError: r.IsError}
	require.NoError(t, json.Unmarshal(b, a))
	for _, c := range r.Content {
		a.texts = append(a.texts, c.(*sdk.TextContent).Text)
	}
	require.NotEmpty(t, a.texts)
	require.True(t, strings.HasPrefix(a.texts[0], a.Status), a.texts[0])
	return a
}

// call calls the tool with arguments of any kind.
func (c *caller) call(arguments map[string]any) *answer {
	c.t.Helper()
	r, err := c.CallTool(c.t.Context(), &sdk.CallToolParams{Name: "bash", Arguments: arguments})
	require.NoError(c.t, err, c.log.String())
	return answerOf(c.t, r)
}

func (c *caller) bash(command string) *answer {
	c.t.Helper()
	return c.call(map[string]any{"command": command})
}

// must runs a command that must succeed and gives what it prints.
func (c *caller) must(command string) string {
	c.t.Helper()
	a := c.bash(command)
	require.NotNil(c.t, a.Code, a.texts[0])
	require.Zero(c.t, *a.Code, "%s\n%s", command, strings.Join(a.texts, "\n"))
	return a.Stdout
}

func (c *caller) description() string {
	c.t.Helper()
	list, err := c.ListTools(c.t.Context(), nil)
	require.NoError(c.t, err)
	require.Len(c.t, list.Tools, 1)
	require.Equal(c.t, "bash", list.Tools[0].Name)
	return list.Tools[0].Description
}

// pipe is a server with nothing but bytes between it and the test.
type pipe struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   io.ReadCloser
	lines *bufio.Reader
	log   *buffer
	ended chan error
}

// start starts a server.
func start(t *testing.T, s *session, flags ...string) *pipe {
	t.Helper()
	p := &pipe{t: t, cmd: serverCommand(s, flags...), log: &buffer{}, ended: make(chan error, 1)}
	p.cmd.Stderr = p.log
	var theirs [2]*os.File
	var err error
	var in, out *os.File
	theirs[0], in, err = os.Pipe()
	require.NoError(t, err)
	out, theirs[1], err = os.Pipe()
	require.NoError(t, err)
	p.in, p.out, p.lines = in, out, bufio.NewReaderSize(out, 1<<20)
	p.cmd.Stdin, p.cmd.Stdout = theirs[0], theirs[1]
	require.NoError(t, p.cmd.Start())
	theirs[0].Close()
	theirs[1].Close()
	go func() { p.ended <- p.cmd.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		p.in.Close()
		<-p.ended
		p.out.Close()
	})
	return p
}

// open starts a server and gets it past the handshake.
func open(t *testing.T, s *session, flags ...string) *pipe {
	t.Helper()
	p := start(t, s, flags...)
	p.send(`{"jsonrpc":"2.0","id":"hello","method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"pipe","version":"1"}}}`)
	require.Contains(t, p.receive("hello"), "serverInfo")
	p.send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	return p
}

func (p *pipe) send(line string) {
	p.t.Helper()
	_, err := io.WriteString(p.in, line+"\n")
	require.NoError(p.t, err, p.log.String())
}

// call sends a call of the tool; id is JSON.
func (p *pipe) call(id, command string) {
	p.t.Helper()
	text, err := json.Marshal(command)
	require.NoError(p.t, err)
	p.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":"bash","arguments":{"command":%s}}}`, id, text))
}

// next is the next line, which must be a message: standard output carries nothing else.
func (p *pipe) next() (message map[string]any, line string) {
	p.t.Helper()
	line, err := p.lines.ReadString('\n')
	require.NoError(p.t, err, p.log.String())
	require.NoError(p.t, json.Unmarshal([]byte(line), &message), line)
	require.Equal(p.t, "2.0", message["jsonrpc"])
	return message, line
}

// receive gives the answer to an id; notifications are passed over.
func (p *pipe) receive(id any) string {
	p.t.Helper()
	for {
		m, line := p.next()
		if _, is := m["method"]; is {
			continue
		}
		require.Equal(p.t, id, m["id"], line)
		return line
	}
}

// answer is the answer to a call.
func (p *pipe) answer(id any) *answer {
	p.t.Helper()
	var m struct {
		Result sdk.CallToolResult `json:"result"`
	}
	require.NoError(p.t, json.Unmarshal([]byte(p.receive(id)), &m))
	return answerOf(p.t, &m.Result)
}

// end waits for the server's end, and says how it was.
func (p *pipe) end() error {
	p.t.Helper()
	select {
	case err := <-p.ended:
		return err
	case <-time.After(node.Patience):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		<-p.ended
		require.Fail(p.t, "the server does not end", p.log.String())
		return nil
	}
}
