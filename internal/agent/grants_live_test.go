package agent

import (
	"bytes"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// kube is a grant whose content is a canary.
func kube(canary string) *sandboxv1.Grant {
	return &sandboxv1.Grant{
		Name: "kube", Files: []*sandboxv1.GrantFile{{Path: "config", Content: []byte("token: " + canary + "\n")}},
		Env: map[string]string{"KUBECONFIG": "/run/grants/kube/config", "TOKEN": "env-" + canary},
	}
}

func (n *node) granted(id string, grants ...*sandboxv1.Grant) *sandboxv1.Session {
	n.t.Helper()
	s, err := n.agent.CreateSession(n.ctx(), n.grantedRequest(id, grants...))
	require.NoError(n.t, err)
	return s
}

func (n *node) grantedRequest(id string, grants ...*sandboxv1.Grant) *sandboxv1.CreateSessionRequest {
	repo := testkit.Repo(n.t, owner)
	return &sandboxv1.CreateSessionRequest{
		SessionId: id, Grants: grants,
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt-"+id), Branch: "work"},
	}
}

func (n *node) grant(id string, grants ...*sandboxv1.Grant) (*sandboxv1.Session, error) {
	return n.agent.UpdateGrants(n.ctx(), &sandboxv1.UpdateGrantsRequest{SessionId: id, Grants: grants})
}

// until waits for a session's state, which the agent comes to in its own time.
func (n *node) until(id string, want sandboxv1.Session_State) *sandboxv1.Session {
	n.t.Helper()
	ctx := n.ctx()
	for {
		s := n.get(id)
		if s.GetState() == want {
			return s
		}
		select {
		case <-ctx.Done():
			require.Equal(n.t, want, s.GetState())
		case <-time.After(pollEvery):
		}
	}
}

// holding starts a command and gives it back once it runs; it ends when the worktree has a file "go".
func (n *node) holding(session, id, worktree string) *pending {
	n.t.Helper()
	p := n.submit(session, id, "touch runs-"+id+"; until [ -e go ]; do sleep 0.01; done")
	require.Eventually(n.t, func() bool {
		_, err := os.Stat(filepath.Join(worktree, "runs-"+id))
		return err == nil
	}, bound, pollEvery)
	return p
}

// pending is a call of Exec that has not come back.
type pending struct {
	request *sandboxv1.ExecRequest
	done    chan struct{}
	result  *sandboxv1.ExecResult
	err     error
}

func (p *pending) wait() (*sandboxv1.ExecResult, error) {
	<-p.done
	return p.result, p.err
}

func (n *node) submit(session, id, command string) *pending {
	p := &pending{done: make(chan struct{}), request: &sandboxv1.ExecRequest{SessionId: session, ExecId: id, Command: command, Text: true}}
	ctx := n.ctx()
	go func() {
		defer close(p.done)
		p.result, p.err = n.agent.Exec(ctx, p.request)
	}()
	return p
}

// queued submits a command behind a running one.
func (n *node) queued(session, id, command string) *pending {
	n.t.Helper()
	p := n.submit(session, id, command)
	require.Eventually(n.t, func() bool {
		s, err := n.agent.GetSession(n.t.Context(), &sandboxv1.GetSessionRequest{SessionId: session})
		return err == nil && len(s.GetQueuedExecIds()) > 0
	}, bound, pollEvery)
	return p
}

const useGrant = `cat "$KUBECONFIG"; echo "$TOKEN"`

func TestP15ACommandHasItsSessionsGrantsAndTheReceiptNamesThem(t *testing.T) {
	n := newNode(t)
	s := n.granted("g", kube("canary-1"))
	require.Equal(t, []string{"kube"}, s.GetGrantNames())
	r := n.exec("g", "e1", useGrant)
	require.Equal(t, "token: canary-1\nenv-canary-1\n", r.GetStdoutText())
	require.Contains(t, string(s.GetSandbox().GetSeals()[len(s.GetSandbox().GetSeals())-1].GetPath()), "/run/grants")
	set, err := newGrantSet([]*sandboxv1.Grant{kube("canary-1")}, nil)
	require.NoError(t, err)
	sess := n.agent.sessions["g"]
	p, err := readProven(n.agent.receiptsDir(s.GetSandbox().GetId()), intentOf(t, n, "g", "e1"), sess.sandboxRecord().key("g"), "")
	require.NoError(t, err)
	require.Equal(t, set.digest, p.predicate.GrantsDigest)
	forged := *intentOf(t, n, "g", "e1")
	forged.GrantsDigest = strings.Repeat("0", 64)
	_, err = readProven(n.agent.receiptsDir(s.GetSandbox().GetId()), &forged, sess.sandboxRecord().key("g"), "")
	require.ErrorContains(t, err, "grants", "a receipt of a command with other grants is not the answer")

	n.session("none")
	r = n.exec("none", "e1", `ls -A /run/grants; env | grep -c TOKEN`)
	require.Equal(t, "0\n", r.GetStdoutText(), "another session has nothing of it")
}

func intentOf(t *testing.T, n *node, session, exec string) *intentRecord {
	t.Helper()
	sess := n.agent.sessions[session]
	sess.mu.Lock()
	defer sess.mu.Unlock()
	_, rec, err := sess.lookup(exec)
	require.NoError(t, err)
	require.NotNil(t, rec)
	return &rec.Intent
}

func TestP15ANewSetEndsWhatHasTheOldOne(t *testing.T) {
	n := newNode(t)
	s := n.granted("g", kube("old-canary"))
	w := s.GetWorkspace().GetWorktree()
	running := n.holding("g", "running", w)
	waiting := n.queued("g", "waiting", "touch waiting-ran")
	s, err := n.grant("g", kube("new-canary"), &sandboxv1.Grant{Name: "more"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_READY, s.GetState())
	require.EqualValues(t, 2, s.GetGeneration())
	require.Equal(t, []string{"kube", "more"}, s.GetGrantNames())
	r, err := running.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
	require.NotEmpty(t, r.GetReceipt(), "its receipt is kept")
	r, err = waiting.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus())
	require.Contains(t, r.GetReason(), "grants were replaced")
	again := n.exec("g", "waiting", "touch waiting-ran")
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, again.GetStatus(), "recorded")
	require.NoFileExists(t, filepath.Join(w, "waiting-ran"))
	r = n.exec("g", "e2", useGrant+"; grep -rs old-canary /run /tmp /home /proc/self/environ; ls /run/grants")
	require.Equal(t, "token: new-canary\nenv-new-canary\nkube\nmore\n", r.GetStdoutText())
	require.EqualValues(t, 2, r.GetGeneration())
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "g", Generation: 1, Command: "true"})
	require.ErrorIs(t, err, ErrPrecondition, "the old generation")

	n.agent.sessions["g"].mu.Lock()
	n.agent.sessions["g"].rec.Sandbox.GrantsDigest = "of another set"
	n.agent.sessions["g"].mu.Unlock()
	require.EqualValues(t, 3, n.exec("g", "moved", "true").GetGeneration(), "what a replacement that failed halfway leaves runs nothing")
	s, err = n.grant("g", &sandboxv1.Grant{Name: "more"}, kube("new-canary"))
	require.NoError(t, err)
	require.EqualValues(t, 3, s.GetGeneration(), "the same set again changes nothing")
	s, err = n.grant("g")
	require.NoError(t, err)
	require.EqualValues(t, 4, s.GetGeneration())
	require.Empty(t, s.GetGrantNames())
	require.Equal(t, "0\n", n.exec("g", "e3", "ls -A /run/grants; env | grep -c TOKEN").GetStdoutText())
}

func TestP8AStaleOwnerCantReplaceGrants(t *testing.T) {
	n := newNode(t)
	n.granted("g", kube("one"))
	s, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "g"})
	require.NoError(t, err)
	_, err = n.agent.UpdateGrants(n.ctx(), &sandboxv1.UpdateGrantsRequest{SessionId: "g", OwnerEpoch: 1, Grants: []*sandboxv1.Grant{kube("two")}})
	require.ErrorIs(t, err, ErrPrecondition)
	require.Equal(t, "token: one\nenv-one\n", n.exec("g", "e", useGrant).GetStdoutText())
	_, err = n.agent.UpdateGrants(n.ctx(), &sandboxv1.UpdateGrantsRequest{SessionId: "g", OwnerEpoch: s.GetOwnerEpoch(), Grants: []*sandboxv1.Grant{kube("two")}})
	require.NoError(t, err)
	require.Equal(t, "token: two\nenv-two\n", n.exec("g", "e2", useGrant).GetStdoutText())
	_, err = n.agent.UpdateGrants(n.ctx(), &sandboxv1.UpdateGrantsRequest{SessionId: "nobody", Grants: nil})
	require.ErrorIs(t, err, ErrNotFound)
}

func TestP15GrantsThatAreLostWithTheAgentAreAskedForAgain(t *testing.T) {
	n := newNode(t)
	req := n.grantedRequest("g", kube("canary"))
	_, err := n.agent.CreateSession(n.ctx(), req)
	require.NoError(t, err)
	plain := n.session("plain")
	require.NoError(t, n.agent.Close())
	n.start()
	s := n.get("g")
	require.Equal(t, sandboxv1.Session_GRANTS_REQUIRED, s.GetState())
	require.Contains(t, s.GetReason(), "the agent was restarted")
	require.True(t, s.GetSandbox().GetEvidence().GetComplete(), "its sandbox is gone")
	require.Equal(t, []string{"kube"}, s.GetGrantNames())
	require.Equal(t, plain.GetSandbox().GetId(), n.get("plain").GetSandbox().GetId(), "one without grants goes on")
	require.Equal(t, sandboxv1.Session_READY, n.get("plain").GetState())
	for range 2 {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "g", ExecId: "e", Command: "touch ran"})
		require.ErrorIs(t, err, ErrPrecondition)
		require.ErrorContains(t, err, "UpdateGrants")
		again, err := n.agent.CreateSession(n.ctx(), req)
		require.NoError(t, err, "the same request gives the session as it is")
		require.Equal(t, sandboxv1.Session_GRANTS_REQUIRED, again.GetState())
		require.NoError(t, n.agent.Close())
		n.start()
	}
	_, err = n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "g", Args: []string{"status", "--short"}})
	require.NoError(t, err, "trusted Git needs no sandbox")
	s, err = n.grant("g", kube("canary"))
	require.NoError(t, err, "the same set, by its digest, but its content was lost")
	require.Equal(t, sandboxv1.Session_READY, s.GetState())
	require.EqualValues(t, 2, s.GetGeneration())
	require.Equal(t, "token: canary\nenv-canary\n", n.exec("g", "e", useGrant).GetStdoutText(), "the id was not used up")
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "ran"))
	require.NoError(t, n.agent.Close())
	n.start()
	s, err = n.grant("g")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_READY, s.GetState(), "without grants none are required")
}

func TestP15AfterTheAgentsDeathARunningCommandEndsAndNothingElseStarts(t *testing.T) {
	n := newNode(t)
	s := n.granted("g", kube("canary"))
	w := s.GetWorkspace().GetWorktree()
	running := n.submit("g", "running", `touch runs; until [ -e go ]; do sleep 0.01; done; `+useGrant)
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(w, "runs")); return err == nil }, bound, pollEvery)
	require.NoError(t, n.agent.Close())
	_, err := running.wait()
	require.ErrorIs(t, err, ErrUnavailable)
	n.start()
	require.Equal(t, sandboxv1.Session_EXECUTING, n.until("g", sandboxv1.Session_EXECUTING).GetState())
	next := n.submit("g", "next", "touch next-ran")
	require.NoError(t, os.WriteFile(filepath.Join(w, "go"), nil, 0o644))
	r := n.exec("g", "running", `touch runs; until [ -e go ]; do sleep 0.01; done; `+useGrant)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus())
	require.Equal(t, "token: canary\nenv-canary\n", r.GetStdoutText())
	_, err = next.wait()
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "UpdateGrants")
	require.NoFileExists(t, filepath.Join(w, "next-ran"))
	s = n.until("g", sandboxv1.Session_GRANTS_REQUIRED)
	require.True(t, s.GetSandbox().GetEvidence().GetComplete())
}

func expiring(g *sandboxv1.Grant, at time.Time) *sandboxv1.Grant {
	g.ExpiresAt = timestamppb.New(at)
	return g
}

func TestP15AnExpiredGrantEndsTheSandboxAndTheCommand(t *testing.T) {
	n := newNode(t)
	_, err := n.agent.CreateSession(n.ctx(), n.grantedRequest("late", expiring(kube("x"), time.Now().Add(-time.Second))))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "expired")
	at := time.Now().Add(time.Hour)
	s := n.granted("g", expiring(kube("canary"), at), &sandboxv1.Grant{Name: "other"})
	w := s.GetWorkspace().GetWorktree()
	running := n.holding("g", "running", w)
	waiting := n.queued("g", "waiting", "touch waiting-ran")
	require.WithinDuration(t, at, n.agent.endWhatIsOver(at.Add(-30*time.Minute-1)), 30*time.Minute, "it will look again by then")
	require.Equal(t, sandboxv1.Session_EXECUTING, n.get("g").GetState(), "not yet")
	n.expireNow("g")
	n.agent.lookAtTimes()
	r, err := running.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
	r, err = waiting.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus())
	require.Contains(t, r.GetReason(), "expired")
	require.NoFileExists(t, filepath.Join(w, "waiting-ran"))
	s = n.until("g", sandboxv1.Session_GRANTS_REQUIRED)
	require.True(t, s.GetSandbox().GetEvidence().GetComplete())
	n.counts(`sandboxes_evicted_total{reason="grant"} 1`)
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "g", Command: "true"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "kube expired at")
	require.Eventually(t, func() bool {
		sess := n.agent.sessions["g"]
		sess.mu.Lock()
		defer sess.mu.Unlock()
		return sess.grants == nil
	}, bound, pollEvery, "the contents are let go of")
	_, err = n.grant("g", expiring(kube("next"), time.Now().Add(time.Hour)))
	require.NoError(t, err)
	require.Equal(t, "token: next\nenv-next\n", n.exec("g", "e", useGrant).GetStdoutText())
	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "g"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_IDLE, n.get("g").GetState(), "the contents are held")
	require.Equal(t, "token: next\nenv-next\n", n.exec("g", "e2", useGrant).GetStdoutText())
	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "g"})
	require.NoError(t, err)
	n.expireNow("g")
	n.agent.lookAtTimes()
	n.until("g", sandboxv1.Session_GRANTS_REQUIRED)
	n.counts(`sandboxes_evicted_total{reason="grant"} 1`)
}

// expireNow moves the session's expiry into the past: a test that waits for a clock would depend on it.
func (n *node) expireNow(id string) {
	s := n.agent.sessions[id]
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.rec.Grants {
		if !s.rec.Grants[i].ExpiresAt.IsZero() {
			s.rec.Grants[i].ExpiresAt = time.Now().Add(-time.Second)
		}
	}
}

func TestP15NoByteOfAGrantIsInTheStateFolderTheJournalOrTheLog(t *testing.T) {
	var log lockedBuffer
	n := newNode(t)
	n.agent.log = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	const canary = "canary-4b1d"
	s := n.granted("g", kube(canary))
	n.exec("g", "e1", "cp $KUBECONFIG leaked; ulimit -c unlimited; bash -c 'kill -SEGV $$'; ls /proc/*/; true")
	for _, bad := range []*sandboxv1.Grant{{Name: "NO", Env: map[string]string{"X": canary}}, {Name: "a", Env: map[string]string{"PATH": canary}}} {
		_, err := n.grant("g", bad)
		require.ErrorIs(t, err, ErrInvalid)
		require.NotContains(t, err.Error(), canary)
	}
	_, err := n.grant("g", kube(canary+"-second"))
	require.NoError(t, err)
	n.exec("g", "e2", "true")
	records := 0
	require.NoError(t, n.agent.journal.Scan("", "", func(key string, value []byte) error {
		records++
		require.NotContains(t, key+string(value), canary)
		return nil
	}))
	require.NotZero(t, records)
	require.NoError(t, n.agent.Close(), "all that is written is on the disk")
	require.Equal(t, []string{filepath.Join(s.GetWorkspace().GetWorktree(), "leaked")}, filesWith(t, canary, n.state, filepath.Dir(s.GetWorkspace().GetWorktree())),
		"the command's own copy shows that the search finds what is there")
	require.NotContains(t, log.String(), canary)
	n.start()
	require.NotContains(t, log.String(), canary)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// filesWith gives the regular files below the folders that hold the text.
func filesWith(t *testing.T, text string, tops ...string) []string {
	t.Helper()
	var found []string
	for _, top := range tops {
		require.NoError(t, filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if bytes.Contains(b, []byte(text)) {
				found = append(found, path)
			}
			return nil
		}))
	}
	return found
}

func TestGrantsThatSpoilTheSessionsEnvironmentAreRefused(t *testing.T) {
	n := newNode(t)
	req := n.grantedRequest("g", kube("x"))
	req.Env = map[string]string{"TOKEN": "mine"}
	_, err := n.agent.CreateSession(n.ctx(), req)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, `"TOKEN"`)
	req.Grants = nil
	_, err = n.agent.CreateSession(n.ctx(), req)
	require.NoError(t, err)
	_, err = n.grant("g", kube("x"))
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, "mine\n", n.exec("g", "e", "echo $TOKEN").GetStdoutText())
}
