package clients

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// counted is a command that leaves a line in count-NAME for each time that it runs, and waits for go-NAME.
func counted(name string) string {
	return fmt.Sprintf("echo ran >> count-%[1]s; echo one; until [ -e go-%[1]s ]; do sleep 0.02; done; echo two", name)
}

func TestP6TheAgentsEndInTheMiddleRunsNothingTwiceAndLosesNothing(t *testing.T) {
	needAgent(t)
	for how, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGTERM} {
		for call, streaming := range map[string]bool{"unary": false, "streaming": true} {
			name := how + "-" + call
			t.Run(name, func(t *testing.T) {
				c, s := host.client(), common(t)
				req := &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: name, Command: counted(name)}
				var stdout strings.Builder
				done := make(chan error, 1)
				go func() {
					if !streaming {
						res, err := c.Exec(context.Background(), req)
						if err == nil {
							stdout.Write(res.GetStdout())
						}
						done <- err
						return
					}
					_, err := c.Stream(context.Background(), &sandboxv1.StreamExecRequest{Exec: req}, func(k client.Chunk) error {
						stdout.Write(k.Data)
						return nil
					})
					done <- err
				}()
				until(t, "the command runs", func() bool { return lines(s, "count-"+name) == 1 })
				host.end(signal)
				host.Serve()
				let(t, s, "go-"+name)
				require.NoError(t, <-done)
				require.Equal(t, "one\ntwo\n", stdout.String())
				require.Equal(t, 1, lines(s, "count-"+name))
			})
		}
	}
}

func TestP7OneIdRunsOnceHoweverManyAsk(t *testing.T) {
	s, c := common(t), host.client()
	let(t, s, "go-same")
	digests := make(chan string, 8)
	for range cap(digests) {
		go func() { // each a program of its own, without pinned keys
			res, err := host.client().Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "same", Command: counted("same")})
			if err != nil {
				digests <- err.Error()
				return
			}
			digests <- res.Verified.Nonce
		}()
	}
	first := <-digests
	for range cap(digests) - 1 {
		require.Equal(t, first, <-digests)
	}
	require.Equal(t, 1, lines(s, "count-same"))
	_, err := c.Exec(t.Context(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "same", Command: "echo other"})
	require.ErrorIs(t, err, client.ErrNotStarted)
	require.ErrorIs(t, err, client.ErrAlreadyExists)
}

func TestP8AnOldOwnerOrGenerationHasCertainlyStartedNothing(t *testing.T) {
	needAgent(t)
	c := host.client()
	s := session(t, c)
	claimed, err := c.ClaimSession(t.Context(), s.GetSessionId(), s.GetOwnerEpoch())
	require.NoError(t, err)
	for _, r := range []*sandboxv1.ExecRequest{
		{SessionId: s.GetSessionId(), OwnerEpoch: s.GetOwnerEpoch(), Command: "echo x > ran"},
		{SessionId: s.GetSessionId(), OwnerEpoch: claimed.GetOwnerEpoch(), Generation: s.GetGeneration() + 1, Command: "echo x > ran"},
		{SessionId: "never-made", Command: "echo x > ran"},
		{SessionId: s.GetSessionId(), Command: ""},
	} {
		_, err := c.Exec(t.Context(), r)
		require.ErrorIs(t, err, client.ErrNotStarted, r)
		require.NotErrorIs(t, err, client.ErrUncertain, r)
	}
	require.Zero(t, lines(s, "ran"))
	_, err = c.ClaimSession(t.Context(), s.GetSessionId(), s.GetOwnerEpoch())
	require.ErrorIs(t, err, client.ErrFailedPrecondition)
}

func TestACancelledCommandHasEvidenceAndOneThatWaitedNeverRan(t *testing.T) {
	needAgent(t)
	c := host.client()
	s := session(t, c)
	type end struct {
		res *client.Result
		err error
	}
	begin := func(id string) <-chan end {
		ch := make(chan end, 1)
		go func() {
			res, err := c.Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: id, Command: counted(id)})
			ch <- end{res, err}
		}()
		return ch
	}
	running := begin("running")
	until(t, "it runs", func() bool { return lines(s, "count-running") == 1 })
	waiting := begin("waiting")
	until(t, "the other one waits", func() bool {
		now, err := c.GetSession(t.Context(), s.GetSessionId())
		return err == nil && len(now.GetQueuedExecIds()) == 1
	})
	_, err := c.CancelExec(t.Context(), &sandboxv1.CancelExecRequest{SessionId: s.GetSessionId(), ExecId: "waiting"})
	require.ErrorIs(t, err, client.ErrNotStarted)
	got := <-waiting
	require.ErrorIs(t, got.err, client.ErrNotStarted)
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, got.res.GetStatus(), "recorded")

	cancelled, err := c.CancelExec(t.Context(), &sandboxv1.CancelExecRequest{SessionId: s.GetSessionId(), ExecId: "running"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, cancelled.GetStatus())
	require.True(t, cancelled.GetEvidence().GetComplete())
	require.True(t, cancelled.Verified.Cancelled, "its receipt says so too")
	got = <-running
	require.NoError(t, got.err)
	require.Equal(t, "one\n", string(got.res.GetStdout()))
	require.Equal(t, 1, lines(s, "count-running"))
	state, again, err := c.GetExec(t.Context(), s.GetSessionId(), "running")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecState_EXEC_DONE, state)
	require.Equal(t, cancelled.Verified, again.Verified)
}

func TestP2AnswersOfEarlierSandboxesVerifyWithTheKeysThatWerePinned(t *testing.T) {
	needAgent(t)
	c := host.client()
	s := session(t, c)
	first := &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "first", Command: "echo first"}
	_, err := c.Exec(t.Context(), first)
	require.NoError(t, err)
	_, evidence, err := c.RetireSandbox(t.Context(), &sandboxv1.RetireSandboxRequest{SessionId: s.GetSessionId()})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	res, err := c.Exec(t.Context(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "second", Command: "echo second"})
	require.NoError(t, err, "the key of a sandbox that was started for this command is the session's newest")
	require.Equal(t, s.GetGeneration()+1, res.Verified.Generation)
	require.Len(t, c.Keys().All(), 2)

	_, err = c.Exec(t.Context(), first)
	require.NoError(t, err, "the first one's is still pinned")
	stranger := host.client()
	res, err = stranger.Exec(t.Context(), first)
	require.NoError(t, err, "who has not seen that sandbox's key asks the agent for it")
	require.Equal(t, c.Keys().All()[res.GetSandboxId()], stranger.Keys().All()[res.GetSandboxId()])
	require.Equal(t, res.Verified.Nonce, res.GetNonce(), "the nonce is the intent's")
	other := session(t, c)
	foreign, err := c.API().Sessions.GetSession(t.Context(), &sandboxv1.GetSessionRequest{SessionId: other.GetSessionId(), SandboxId: res.GetSandboxId()})
	require.NoError(t, err)
	require.Nil(t, foreign.GetSandboxKey(), "it is none of another session's")
	ring := &client.Keyring{}
	for id, pin := range c.Keys().All() {
		require.NoError(t, ring.Pin(id, pin))
	}
	restarted := client.New(host.Socket, client.Options{Keys: ring})
	res, err = restarted.Exec(t.Context(), first)
	require.NoError(t, err, "stored and put back")
	_, err = client.VerifyResult(res.ExecResult, ring.All()[res.GetSandboxId()], client.RequestDigest(first))
	require.NoError(t, err, "offline")
}

// liar stands between a caller and the agent, and turns failures into successes.
type liar struct {
	sandboxv1connect.UnimplementedExecServiceHandler
	sandboxv1connect.UnimplementedSessionServiceHandler
	api client.API
	// forges: it changes the receipt too, but can't sign it.
	forges bool
}

func (l *liar) Exec(ctx context.Context, r *sandboxv1.ExecRequest) (*sandboxv1.ExecResponse, error) {
	res, err := l.api.Execs.Exec(ctx, r)
	if res.GetResult() != nil {
		res.Result.ExitCode = 0
	}
	if l.forges && err == nil {
		res.Result.Receipt, err = forged(res.GetResult().GetReceipt())
	}
	return res, err
}

// forged is a receipt of exit code 1 that says 0.
func forged(receipt []byte) ([]byte, error) {
	var envelope struct{ Payload []byte }
	if err := json.Unmarshal(receipt, &envelope); err != nil {
		return nil, err
	}
	// In place, for the envelope has to be as a signer writes it.
	text := func(b []byte) []byte { return []byte(base64.StdEncoding.EncodeToString(b)) }
	lie := bytes.Replace(envelope.Payload, []byte(`"exitCode":1`), []byte(`"exitCode":0`), 1)
	return bytes.Replace(receipt, text(envelope.Payload), text(lie), 1), nil
}

func (l *liar) GetSession(ctx context.Context, r *sandboxv1.GetSessionRequest) (*sandboxv1.GetSessionResponse, error) {
	return l.api.Sessions.GetSession(ctx, r)
}

// serve gives the socket on which it lies.
func (l *liar) serve(t *testing.T) string {
	t.Helper()
	server := connect.NewServer()
	sandboxv1connect.RegisterExecServiceHandler(server, l)
	sandboxv1connect.RegisterSessionServiceHandler(server, l)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server)
	socket := filepath.Join(t.TempDir(), "liar")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	hs := &http.Server{Handler: mux}
	go func() { _ = hs.Serve(listener) }()
	t.Cleanup(func() { hs.Close() })
	return socket
}

func TestP2AProxyThatTurnsAFailureIntoASuccessIsNotBelieved(t *testing.T) {
	s, c := common(t), host.client()
	socket := (&liar{api: c.API()}).serve(t)
	req := &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "failing", Command: "echo 1 test failed; exit 1"}
	fooled, err := client.New(socket, client.Options{SkipVerify: true}).Exec(t.Context(), req)
	require.NoError(t, err)
	require.True(t, fooled.Success(), "the control case: the lie works on who believes it")
	_, err = client.New(socket, client.Options{}).Exec(t.Context(), req)
	require.ErrorIs(t, err, client.ErrUnverified)
	require.ErrorContains(t, err, "exit code")
	_, err = client.New((&liar{api: c.API(), forges: true}).serve(t), client.Options{}).Exec(t.Context(), req)
	require.ErrorIs(t, err, verify.ErrSignature)
	honest, err := c.Exec(t.Context(), req)
	require.NoError(t, err)
	require.EqualValues(t, 1, honest.GetExitCode())
}

func TestASessionIsTheSameHoweverOftenItIsCreated(t *testing.T) {
	s, c := common(t), host.client()
	same := &sandboxv1.CreateSessionRequest{SessionId: s.GetSessionId(), Workspace: &sandboxv1.Workspace{
		Repository: s.GetWorkspace().GetRepository(), Worktree: s.GetWorkspace().GetWorktree(),
	}}
	again, err := c.CreateSession(t.Context(), same)
	require.NoError(t, err)
	require.Equal(t, s.GetSandbox().GetId(), again.GetSandbox().GetId())
	same.Env = map[string]string{"OTHER": "request"}
	_, err = c.CreateSession(t.Context(), same)
	require.ErrorIs(t, err, client.ErrAlreadyExists)
	found := false
	for x, err := range c.Sessions(t.Context()) {
		require.NoError(t, err)
		found = found || x.GetSessionId() == s.GetSessionId()
	}
	require.True(t, found)
}

func TestEventsAreFollowedAcrossARestart(t *testing.T) {
	s, c := common(t), host.client()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	kinds, seen := make(chan string, 1000), make(chan error, 1)
	go func() {
		for e, err := range c.WatchEvents(ctx, &sandboxv1.WatchEventsRequest{SessionId: s.GetSessionId()}) {
			if err != nil {
				seen <- err
				return
			}
			kinds <- e.GetKind()
		}
		seen <- nil
	}()
	await := func(kind string) {
		for {
			select {
			case k := <-kinds:
				if k == kind {
					return
				}
			case err := <-seen:
				require.NoError(t, errors.Join(err, errors.New("the events ended")))
			}
		}
	}
	await("sandbox.ready")
	host.end(syscall.SIGTERM)
	host.Serve()
	_, err := c.Exec(t.Context(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), Command: "true"})
	require.NoError(t, err)
	await("exec.result")
	cancel()
	require.NoError(t, <-seen, "that is how following ends")
}

func TestGitAndHarvestAnswerThroughTheClient(t *testing.T) {
	needAgent(t)
	c := host.client()
	s := session(t, c)
	let(t, s, "new")
	res, err := c.Git(t.Context(), &sandboxv1.GitRequest{SessionId: s.GetSessionId(), Args: []string{"status", "--porcelain"}})
	require.NoError(t, err)
	require.Equal(t, "?? new\n", string(res.GetStdout()))
	_, err = c.Git(t.Context(), &sandboxv1.GitRequest{SessionId: s.GetSessionId(), Args: []string{"push"}})
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	h, err := c.Harvest(t.Context(), s.GetSessionId(), 0)
	require.NoError(t, err)
	require.Equal(t, "UNCHANGED", h.GetStatus())
	updated, err := c.UpdateGrants(t.Context(), &sandboxv1.UpdateGrantsRequest{SessionId: s.GetSessionId(), Grants: []*sandboxv1.Grant{{Name: "token", Env: map[string]string{"TOKEN": "t"}}}})
	require.NoError(t, err)
	require.Equal(t, []string{"token"}, updated.GetGrantNames())
}
