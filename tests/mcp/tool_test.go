package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// TestTheTool has one agent and a session for each case.
func TestTheTool(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{})
	t.Run("cases", func(t *testing.T) {
		for name, f := range map[string]func(*testing.T, *session){
			"it says what holds and what happened":                     saysWhatHappened,
			"its arguments are its only input":                         argumentsAreTheOnlyInput,
			"P7 a request that is delivered again never runs twice":    deliveredAgain,
			"a cancelled request is ended with evidence":               cancelledWithEvidence,
			"what runs when its caller goes away is ended":             callerGoesAway,
			"SIGTERM ends what runs and still answers":                 terminated,
			"lines that are no requests don't end the session":         badLines,
			"calls at the same time run one after the other":           atTheSameTime,
			"progress is told until the result and not after":          progress,
			"an agent at work finds, mends and commits":                realWork,
			"P14 without an agent nothing runs":                        withoutAnAgent,
			"P12 an output's file is never written through a link":     neverThroughALink,
			"the MCP Inspector's command line finds and calls it":      inspector,
			"a claimed session is not its former owner's any more":     claimed,
			"the description follows the session":                      descriptionFollows,
			"a caller that does not read can't keep a command running": doesNotRead,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				f(t, newSession(t, a))
			})
		}
	})
}

func saysWhatHappened(t *testing.T, s *session) {
	c := connect(t, s, nil, "--label", "turn=7")
	text := c.description()
	for _, want := range []string{"in the Git worktree " + s.worktree, "Network: none", "on branch topic: hooks are off", "$TMPDIR (" + s.worktree + "/.sandbox-tmp)", "120 seconds"} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, s.id, "a model has no use for it")

	a := c.bash(`echo out; echo err >&2; pwd; echo "$TMPDIR"; exit 3`)
	require.False(t, a.isError, "a command that fails is no failure of the tool")
	require.Equal(t, "EXITED", a.Status)
	require.Equal(t, 3, *a.Code)
	require.Equal(t, "out\n"+s.worktree+"\n"+s.worktree+"/.sandbox-tmp\n", a.Stdout)
	require.Equal(t, "err\n", a.Stderr)
	require.Equal(t, []string{"stdout:\n" + a.Stdout, "stderr:\n" + a.Stderr}, a.texts[1:])
	require.Regexp(t, `^EXITED with code 3 after `, a.texts[0])

	r := s.result(t, a.ExecID)
	require.Equal(t, map[string]string{"turn": "7"}, r.GetLabels())
	receipt, err := os.ReadFile(filepath.Join(s.State, "receipts", r.GetSandboxId(), a.ExecID+".json"))
	require.NoError(t, err)
	sum := sha256.Sum256(receipt)
	require.Equal(t, hex.EncodeToString(sum[:]), a.Receipt, "the digest is the receipt file's")

	a = c.call(map[string]any{"command": "sleep 600", "timeout_seconds": 0.1})
	require.True(t, a.isError)
	require.Equal(t, "TIMED_OUT", a.Status)
	require.Nil(t, a.Code)
	require.Contains(t, a.texts[0], "may have taken effect")

	a = c.bash("kill -KILL $$")
	require.Regexp(t, `^SIGNALED by SIGKILL`, a.texts[0])
	a = c.bash(`printf '\033[2J\377\000'`)
	require.Equal(t, "␛[2J\uFFFD␀", a.Stdout)
	require.EqualValues(t, 6, a.Info.Bytes)
	require.NotContains(t, c.log.String(), s.worktree, "no output is logged")
	require.NotContains(t, c.log.String(), "sleep 600", "no command is logged")
}

func argumentsAreTheOnlyInput(t *testing.T, s *session) {
	c := connect(t, s, nil)
	for name, arguments := range map[string]map[string]any{
		"another session":   {"command": "touch ran", "session_id": "other"},
		"a folder":          {"command": "touch ran", "cwd": "/"},
		"an environment":    {"command": "touch ran", "env": map[string]string{"A": "b"}},
		"a host":            {"command": "touch ran", "host": "x"},
		"a grant":           {"command": "touch ran", "grants": []string{"x"}},
		"an exec id":        {"command": "touch ran", "exec_id": "x"},
		"no command":        {},
		"no string":         {"command": 7},
		"a list":            {"command": []string{"touch", "ran"}},
		"no number":         {"command": "touch ran", "timeout_seconds": "1"},
		"too long a time":   {"command": "touch ran", "timeout_seconds": 3601},
		"no time":           {"command": "touch ran", "timeout_seconds": 0},
		"a NUL":             {"command": "touch ran\x00"},
		"too long":          {"command": "touch ran;" + strings.Repeat(" ", 131072)},
		"by capital letter": {"Command": "touch ran"},
	} {
		a := c.call(arguments)
		require.True(t, a.isError, name)
		require.Equal(t, "NOT_STARTED", a.Status, name)
		require.False(t, a.May, name)
		require.NoFileExists(t, s.file("ran"), name)
	}
	longest := c.bash("true #" + strings.Repeat("x", 131071-6))
	require.Equal(t, 0, *longest.Code, "the longest command runs")
	_, err := c.CallTool(t.Context(), &sdk.CallToolParams{Name: "sh", Arguments: map[string]any{"command": "touch ran"}})
	require.ErrorContains(t, err, "unknown tool")
	require.Empty(t, c.must("cat"), "standard input is empty")
	require.NoFileExists(t, s.file("ran"))
}

func deliveredAgain(t *testing.T, s *session) {
	p := open(t, s)
	const command = "echo ran >> count; wc -l < count"
	p.call("7", command)
	first := p.answer(7.0)
	p.call("7", command)
	again := p.answer(7.0)
	require.Equal(t, first, again, "the recorded answer, receipt and all")
	require.Equal(t, "1\n", again.Stdout)
	p.call("7", "echo other >> count")
	other := p.answer(7.0)
	require.Equal(t, "NOT_STARTED", other.Status)
	require.Contains(t, other.Reason, "used before, for another command")
	require.Equal(t, "ran\n", s.read(t, "count"))

	// The control cases: another id runs, and so does the same one of another process.
	p.call(`"7"`, command)
	require.Equal(t, "2\n", p.answer("7").Stdout)
	q := open(t, s)
	q.call("7", command)
	require.Equal(t, "3\n", q.answer(7.0).Stdout)

	// While it runs.
	p.call("8", "echo slow >> count; touch begun; until [ -e gate ]; do sleep 0.01; done")
	s.awaitFile(t, "begun")
	p.call("8", "echo slow >> count; touch begun; until [ -e gate ]; do sleep 0.01; done")
	p.call("8", "echo another >> count")
	require.Contains(t, p.receive(nil), "the id 8 is that of a request that runs", "the refusal can't be taken for the first one's answer")
	s.touch(t, "gate")
	first = p.answer(8.0)
	require.Equal(t, "EXITED", first.Status)
	require.Equal(t, first, p.answer(8.0), "each delivery has its answer")
	require.Equal(t, 1, strings.Count(s.read(t, "count"), "slow"))
	require.NotContains(t, s.read(t, "count"), "another")
}

func cancelledWithEvidence(t *testing.T, s *session) {
	c := connect(t, s, nil)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := c.CallTool(ctx, &sdk.CallToolParams{Name: "bash", Arguments: map[string]any{"command": "touch begun; setsid sleep 600 & sleep 600"}})
		ended <- err
	}()
	s.awaitFile(t, "begun")
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	eventually(t, "the evidence in the log", func() bool { return len(c.log.logged("cancelled")) == 1 })
	entry := c.log.logged("cancelled")[0]
	require.Equal(t, "CANCELLED", entry["status"])
	require.Equal(t, true, entry["evidence_complete"])
	r := s.result(t, entry["exec"].(string))
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
	require.True(t, r.GetEvidence().GetComplete())
	require.Equal(t, "on\n", c.must("echo on"), "the next call has a sandbox again")

	require.NoError(t, os.Remove(s.file("begun")))
	p := open(t, s)
	p.call("1", "touch begun; sleep 600")
	s.awaitFile(t, "begun")
	p.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`)
	eventually(t, "its end", func() bool { return len(p.log.logged("not answered, for it was cancelled")) == 1 })
	p.call("2", "echo on")
	require.Equal(t, "on\n", p.answer(2.0).Stdout, "nobody waits for an answer to the first")
}

func callerGoesAway(t *testing.T, s *session) {
	for name, leave := range map[string]func(*pipe){
		"it closes its end":   func(p *pipe) { p.in.Close() },
		"it dies altogether":  func(p *pipe) { p.in.Close(); p.out.Close() },
		"it stops to listen":  func(p *pipe) { p.out.Close(); p.send(`{"jsonrpc":"2.0","id":"x","method":"ping"}`) },
		"with one in a queue": func(p *pipe) { p.call("2", "touch second"); p.in.Close() },
	} {
		p := open(t, s, "--progress", "10ms")
		p.call("1", "touch begun; until [ -e never ]; do sleep 0.01; done; touch lived")
		s.awaitFile(t, "begun")
		leave(p)
		require.NoError(t, p.end(), "%s\n%s", name, p.log.String())
		var of string
		for _, entry := range p.log.logged("cancelled") {
			if entry["status"] == "CANCELLED" {
				of = entry["exec"].(string)
				require.Equal(t, true, entry["evidence_complete"], name)
			}
		}
		require.NotEmpty(t, of, "%s\n%s", name, p.log.String())
		require.Equal(t, sandboxv1.ExecResult_CANCELLED, s.result(t, of).GetStatus(), name)
		require.NoFileExists(t, s.file("lived"), name)
		require.NoFileExists(t, s.file("second"), name)
		require.NoError(t, os.Remove(s.file("begun")))
	}
}

func terminated(t *testing.T, s *session) {
	p := open(t, s)
	p.call("1", "echo begun; touch begun; sleep 600") // in this order: tee makes its file first
	s.awaitFile(t, "begun")
	require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
	a := p.answer(1.0)
	require.Equal(t, "CANCELLED", a.Status)
	require.Equal(t, "begun\n", a.Stdout)
	require.Contains(t, a.texts[0], "may have taken effect")
	require.NoError(t, p.end())
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, s.result(t, a.ExecID).GetStatus())
}

func badLines(t *testing.T, s *session) {
	early := start(t, s)
	early.send(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	require.Contains(t, early.receive(1.0), `"code":-32600`, "before the handshake")
	p := open(t, s)
	for line, code := range map[string]int{
		`{"jsonrpc":"2.0","id":1,`: -32700,
		"\x00\xff":                 -32700,
		`{"jsonrpc":"2.0"}`:        -32600,
		`[]`:                       -32600,
		`{"jsonrpc":"2.0","id":2,"method":"none"}`:                              -32601,
		`{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":7}}`:    -32602,
		`{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"_meta":"x"}}`: -32602,
	} {
		p.send(line)
		m, text := p.next()
		fault, _ := m["error"].(map[string]any)
		require.NotNil(t, fault, text)
		require.EqualValues(t, code, fault["code"], text)
	}
	p.send(`{"jsonrpc":"2.0","id":"list","method":"tools/list","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"pipe","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`)
	require.Contains(t, p.receive("list"), `"cacheScope":"private"`, "the description is this session's")
	p.call("5", strings.Repeat("x", 3<<20))
	require.Contains(t, p.receive(5.0), "nothing ran")
	p.send(`{"jsonrpc":"2.0","method":"tools/call","params":{"name":"bash","arguments":{"command":"touch ran"}}}`)
	p.call("6", "echo well")
	require.Equal(t, "well\n", p.answer(6.0).Stdout)
	require.NoFileExists(t, s.file("ran"), "a notification is no request")
}

func atTheSameTime(t *testing.T, s *session) {
	c := connect(t, s, nil)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			// A folder can be made once: two commands at the same time would show.
			r, err := c.CallTool(t.Context(), &sdk.CallToolParams{Name: "bash", Arguments: map[string]any{"command": "mkdir busy && echo >> count && rmdir busy"}})
			require.NoError(t, err)
			a := answerOf(t, r)
			require.Equal(t, 0, *a.Code, a.texts)
		})
	}
	wg.Wait()
	require.Equal(t, strings.Repeat("\n", 6), s.read(t, "count"))
}

func progress(t *testing.T, s *session) {
	p := open(t, s, "--progress", "10ms")
	call := func(id int, command string) {
		p.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"_meta":{"progressToken":"p%d"},"name":"bash","arguments":{"command":%q}}}`, id, id, command))
	}
	call(1, "echo 12345; touch begun; until [ -e gate ]; do sleep 0.01; done")
	s.awaitFile(t, "begun")
	call(2, "echo second")
	last, seen := map[string]float64{}, map[string]string{}
	opened := false
	for answered := 0; answered < 2; {
		m, line := p.next()
		if id, is := m["id"].(float64); is {
			answered++
			delete(seen, fmt.Sprintf("p%.0f", id))
			last[fmt.Sprintf("p%.0f", id)] = 1e9 // a later one would not be greater
			continue
		}
		if m["method"] != "notifications/progress" {
			continue
		}
		params := m["params"].(map[string]any)
		token := params["progressToken"].(string)
		require.Greater(t, params["progress"], last[token], line)
		last[token], seen[token] = params["progress"].(float64), params["message"].(string)
		if seen["p1"] == "running, 6 bytes of output so far" && seen["p2"] == "waiting for its turn" && !opened {
			opened = true
			s.touch(t, "gate")
		}
	}
	require.True(t, opened)
	p.call("3", "true") // without a token there is none
	for {
		m, line := p.next()
		require.NotEqual(t, "notifications/progress", m["method"], line)
		if m["id"] == 3.0 {
			break
		}
	}
}

// realWork is what an agent does with the tool, and nothing but the tool: look, run the test, mend, test again, commit.
func realWork(t *testing.T, s *session) {
	c := connect(t, s, nil)
	c.must(`mkdir -p lib && cat > lib/sum.sh <<'END'
sum() { local n=0 x; for x in "$@"; do n=$((n - x)); done; echo "$n"; }
END
cat > test.sh <<'END'
#!/bin/bash
. lib/sum.sh
got=$(sum 1 2 3)
[ "$got" = 6 ] || { echo "FAIL: sum 1 2 3 is $got, not 6"; exit 1; }
echo ok
END
chmod +x test.sh && git add -A && git commit -qm "Add a sum"`)
	require.Contains(t, c.must("git ls-files"), "lib/sum.sh")
	failing := c.bash("./test.sh")
	require.Equal(t, 1, *failing.Code)
	require.Contains(t, failing.Stdout, "FAIL: sum 1 2 3 is -6, not 6")
	require.Contains(t, c.must("grep -n 'n - x' -r lib"), "lib/sum.sh:1:")
	c.must("sed -i 's/n - x/n + x/' lib/sum.sh")
	require.Equal(t, "ok\n", c.must("./test.sh"))
	require.Equal(t, " M lib/sum.sh\n", c.must("git status --short"))
	done := c.bash("git commit -qam 'Add, and do not subtract' && git status --short")
	require.Equal(t, 0, *done.Code)
	require.Empty(t, done.Stdout)
	require.Equal(t, "HARVESTED", done.Harvest.Status)
	require.Contains(t, done.texts[0], "Git: HARVESTED refs/heads/topic")
	require.Equal(t, "Add, and do not subtract\nAdd a sum\nFirst\n", testkit.GitAs(t, owner, s.repo, "log", "--format=%s", "topic"))
}

func withoutAnAgent(t *testing.T, s *session) {
	marker := filepath.Join(t.TempDir(), "ran")
	command := "touch " + marker
	out, err := exec.Command("bash", "-c", command).CombinedOutput()
	require.NoError(t, err, string(out))
	require.FileExists(t, marker, "the control case: a local shell would do it")
	require.NoError(t, os.Remove(marker))

	nowhere := *s.Agent
	nowhere.Socket = filepath.Join(t.TempDir(), "none")
	for name, c := range map[string]struct {
		s    *session
		want string
	}{
		"no agent":   {&session{Agent: &nowhere, id: s.id}, "no agent listens at " + nowhere.Socket},
		"no session": {&session{Agent: s.Agent, id: "other"}, "not_found"},
	} {
		p := connect(t, c.s, nil)
		require.Contains(t, p.description(), "Now it can't be used", name)
		a := p.bash(command)
		require.True(t, a.isError, name)
		require.Equal(t, "NOT_STARTED", a.Status, name)
		require.Contains(t, a.Reason, c.want, name)
		require.Contains(t, a.texts[0], "It certainly did not run", name)
	}
	require.NoFileExists(t, marker)
	require.NoFileExists(t, s.file("ran"))
}

func claimed(t *testing.T, s *session) {
	c := connect(t, s, nil, "--owner-epoch", "1")
	c.must("true")
	_, err := s.Client.Sessions.ClaimSession(t.Context(), &sandboxv1.ClaimSessionRequest{SessionId: s.id})
	require.NoError(t, err)
	a := c.bash("touch ran")
	require.Equal(t, "NOT_STARTED", a.Status)
	require.Contains(t, a.Reason, "another owner has claimed it")
	require.NoFileExists(t, s.file("ran"))
}

func descriptionFollows(t *testing.T, s *session) {
	changed := make(chan struct{}, 16)
	c := connect(t, s, &sdk.ClientOptions{ToolListChangedHandler: func(context.Context, *sdk.ToolListChangedRequest) { changed <- struct{}{} }})
	require.NotContains(t, c.description(), "Credentials")
	_, err := s.Client.Sessions.UpdateGrants(t.Context(), &sandboxv1.UpdateGrantsRequest{
		SessionId: s.id, Grants: []*sandboxv1.Grant{{Name: "registry", Env: map[string]string{"TOKEN": "canary"}}},
	})
	require.NoError(t, err)
	require.Equal(t, "canary\n", c.must("echo $TOKEN"))
	<-changed // after the call, without being asked
	text := c.description()
	require.Contains(t, text, "in the environment: registry.")
	require.NotContains(t, text, "canary")
}

func doesNotRead(t *testing.T, s *session) {
	p := open(t, s, "--progress", "10ms")
	// More answers than a pipe holds, none of which is read.
	for i := range 40 {
		p.send(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/list"}`, 100+i))
	}
	p.send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"_meta":{"progressToken":1},"name":"bash","arguments":{"command":"touch begun; sleep 600"}}}`)
	s.awaitFile(t, "begun")
	p.in.Close()
	eventually(t, "the evidence in the log", func() bool { return len(p.log.logged("cancelled")) == 1 })
	require.Error(t, p.end(), "it says that the answers were not read")
	require.Contains(t, p.log.String(), "does not read")
}
