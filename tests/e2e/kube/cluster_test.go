package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const (
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = 2 * time.Minute
	// poll is not shorter: what is polled is usually kubectl, which takes a processor for a quarter of a second.
	poll = 200 * time.Millisecond

	namespace  = "sandbox-agent"
	socket     = "/run/sandbox-agent/exec.sock"
	stateDir   = "/var/lib/sandbox-agent"
	workspaces = "/var/lib/sandbox-workspaces"
	// owner is an ordinary user of the node: its repositories, and so its worktrees.
	owner = 1000
)

// command runs a program in the node, for at most patience.
func command(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	return string(out), err
}

// run is command for what has to work.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := command(t, name, args...)
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return out
}

func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return run(t, "kubectl", args...)
}

// refused asks the API server for what it has to refuse, and answers with its words.
func refused(t *testing.T, args ...string) string {
	t.Helper()
	out, err := command(t, "kubectl", args...)
	require.Error(t, err, "kubectl %s: %s", strings.Join(args, " "), out)
	return out
}

func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(poll) {
		if time.Now().After(end) {
			t.Fatalf("never: %s\n%s", what, state(t))
		}
	}
}

// state is what there is to see when a test fails.
func state(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"-n", namespace, "describe", "pods"},
		{"-n", namespace, "logs", "-l", "app.kubernetes.io/name=sandbox-agent", "--tail=40"},
		{"-n", namespace, "logs", "-l", "app.kubernetes.io/name=sandbox-agent", "--tail=20", "-p"},
	} {
		said, _ := command(t, "kubectl", args...)
		fmt.Fprintf(&out, "--- kubectl %s\n%s", strings.Join(args, " "), said)
	}
	return out.String()
}

// manifests is a copy of daemonset/ with the images' names and digests set, as the README says that one deploys it.
func manifests(t *testing.T) string {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "daemonset")
	require.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Join(root, "daemonset"))))
	for _, in := range placesOfImages {
		path := filepath.Join(dir, in, "kustomization.yaml")
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		text := string(b)
		for name, i := range map[string]deployedImage{"sandbox-agent": deployed.agent, "sandbox-rootfs": deployed.rootfs} {
			text = strings.ReplaceAll(text, "registry.example/"+name+"\n    digest: sha256:"+strings.Repeat("0", 64), i.name+"\n    digest: "+i.digest)
		}
		require.NotContains(t, text, "registry.example", "%s has an image that was not set", path)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return dir
}

// placesOfImages are the kustomizations that name images.
var placesOfImages = []string{"overlays/runc", "overlays/gvisor", "overlays/kata", "uninstall"}

// deployed says what is on the node: the images, once, and the DaemonSet.
var deployed struct {
	agent, rootfs deployedImage
	as            string // what use was told; empty: nothing is there
}

// deploy brings the DaemonSet onto the node with the overlay runc, as most tests have it.
func deploy(t *testing.T) {
	t.Helper()
	use(t, "runc")
}

// use brings the DaemonSet onto the node with an overlay and its components ("runc+network"), in the place of the one that is there.
// The manifests may be edited before.
func use(t *testing.T, what string, edit ...func(dir string)) {
	t.Helper()
	need(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(state(t))
		}
	})
	if deployed.agent.digest == "" {
		deployed.agent, deployed.rootfs = importImage(t, "agent"), importImage(t, "sandbox")
		kubectl(t, "label", "node", "node1", "katacontainers.io/kata-runtime=true") // as if kata-deploy had been there
	}
	if deployed.as == what {
		return
	}
	dir := manifests(t)
	for _, e := range edit {
		e(dir)
	}
	overlay, components, _ := strings.Cut(what, "+")
	withComponents(t, dir, overlay, strings.Fields(strings.ReplaceAll(components, "+", " "))...)
	kubectl(t, "apply", "-k", filepath.Join(dir, "overlays", overlay))
	// It would run at the half hour, in the middle of any test.
	kubectl(t, "-n", namespace, "patch", "cronjob", "sandbox-egress-probe", "-p", `{"spec":{"suspend":true}}`)
	ready(t)
	deployed.as = what
}

// withComponents has an overlay of a copy of daemonset/ use components.
func withComponents(t *testing.T, dir, overlay string, components ...string) {
	t.Helper()
	if len(components) == 0 {
		return
	}
	path := filepath.Join(dir, "overlays", overlay, "kustomization.yaml")
	text := read(t, path) + "components: [../../components/" + strings.Join(components, ", ../../components/") + "]\n"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

// ready waits until the DaemonSet's pod is of its newest version and ready, and the agent answers at the node's socket. It does not
// wait, as "rollout status" does, until the pod has been ready for some seconds.
func ready(t *testing.T) {
	t.Helper()
	type daemonSet struct {
		Metadata struct{ Generation int64 }
		Status   struct {
			ObservedGeneration                                          int64
			DesiredNumberScheduled, UpdatedNumberScheduled, NumberReady int
		}
	}
	until(t, "the DaemonSet's pod is ready", func() bool {
		d := decode[daemonSet](t, kubectl(t, "-n", namespace, "get", "daemonset", "sandbox-agent", "-o", "json"))
		st := d.Status
		return st.ObservedGeneration == d.Metadata.Generation && st.DesiredNumberScheduled == 1 && st.UpdatedNumberScheduled == 1 && st.NumberReady == 1
	})
	until(t, "the agent answers", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), patience) // a test's own has ended when it cleans up
		defer cancel()
		_, err := client.New(socket).Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
		return err == nil
	})
}

// pod is the name of the agent's pod, once it runs.
func pod(t *testing.T) (name string) {
	t.Helper()
	until(t, "the agent's pod runs", func() bool {
		out, err := command(t, "kubectl", "-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=sandbox-agent", "--field-selector=status.phase=Running",
			"-o", "jsonpath={.items[0].metadata.name}")
		name = out
		return err == nil && out != ""
	})
	return name
}

// uid is the uid of a pod.
func uid(t *testing.T, name string) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "pod", name, "-o", "jsonpath={.metadata.uid}")
}

// inPod runs a program of the agent's image in its pod.
func inPod(t *testing.T, args ...string) string {
	t.Helper()
	return kubectl(t, append([]string{"-n", namespace, "exec", pod(t), "-c", "agent", "--"}, args...)...)
}

// session is one of the node's, made by a control plane through the socket.
type session struct {
	t        *testing.T
	c        *client.Client
	id       string
	worktree string
}

// newSession makes a repository of an ordinary user, and a session on it.
func newSession(t *testing.T, id string) *session {
	t.Helper()
	s, err := createSession(t, id)
	require.NoError(t, err)
	return s
}

func createSession(t *testing.T, id string) (*session, error) {
	t.Helper()
	repo := filepath.Join(workspaces, id, "repo")
	require.NoError(t, os.MkdirAll(repo, 0o755))
	require.NoError(t, os.Chown(filepath.Dir(repo), owner, owner))
	require.NoError(t, os.Chown(repo, owner, owner))
	testkit.GitAs(t, owner, repo, "init", "-q", "-b", "main")
	testkit.GitAs(t, owner, repo, "commit", "-q", "--allow-empty", "-m", "First")
	s := &session{t: t, c: client.New(socket), id: id, worktree: filepath.Join(workspaces, id, "worktree")}
	_, err := s.c.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{
		SessionId: id, Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: s.worktree, Branch: id},
	})
	return s, err
}

// get is what the agent says of the session.
func (s *session) get() *sandboxv1.Session {
	s.t.Helper()
	res, err := s.c.Sessions.GetSession(s.t.Context(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.NoError(s.t, err)
	return res.GetSession()
}

// exec runs a command to its end.
func (s *session) exec(execID, text string) *sandboxv1.ExecResult {
	s.t.Helper()
	r, err := s.ask(execID, text)
	require.NoError(s.t, err)
	return r
}

func (s *session) ask(execID, text string) (*sandboxv1.ExecResult, error) {
	res, err := s.c.Exec(s.t.Context(), &sandboxv1.ExecRequest{SessionId: s.id, ExecId: execID, Command: text, Text: true})
	if err != nil {
		return nil, err
	}
	return res.ExecResult, nil
}

// receiptsHold verifies every receipt of the session's sandbox with the agent's own program, in its pod.
func (s *session) receiptsHold(sandbox string) {
	s.t.Helper()
	out := inPod(s.t, "sandbox-agent", "receipt", "verify", "--all", filepath.Join(stateDir, "receipts", sandbox))
	require.NotEmpty(s.t, out)
}

// containers are the sandboxes that containerd has.
func containers(t *testing.T) []string {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(run(t, "ctr", "-n", "sandbox-agent", "containers", "list", "-q")), "\n")
	// On cgroup v1 it warns beside its answer.
	return slices.DeleteFunc(lines, func(l string) bool { return l == "" || strings.HasPrefix(l, "time=") })
}

// decode reads JSON that a program has printed.
func decode[T any](t *testing.T, text string) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(text), &v), "%s", text)
	return v
}
