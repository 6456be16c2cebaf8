package kube

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestADrainedNodeHasNoSandboxAndKeepsWorkspaces(t *testing.T) {
	deploy(t)
	s := newSession(t, "drained")
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.exec("work", "echo kept >kept").GetStatus())
	require.NotEmpty(t, containers(t))
	kubectl(t, "cordon", "node1")
	r := s.during("interrupted", func() {
		drained := decode[struct {
			Sessions []struct {
				SessionID string `json:"sessionId"`
				Evidence  struct{ Complete bool }
			}
		}](t, inPod(t, "sandbox-agent", "drain", "--timeout", "1ms", "--json"))
		seen := false
		for _, d := range drained.Sessions {
			seen = seen || d.SessionID == s.id && d.Evidence.Complete
		}
		require.True(t, seen, "the sandbox is gone, on evidence: %v", drained)
	})
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r)
	kubectl(t, "drain", "node1", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
	require.Empty(t, containers(t))
	require.Equal(t, sandboxv1.Session_IDLE, s.get().GetState())
	_, err := s.ask("late", "true")
	require.ErrorContains(t, err, "drain", "a drained node starts nothing")
	address := metricsAddress(t)
	require.Contains(t, get(t, address+"/readyz", http.StatusServiceUnavailable), "drain", "its pod is not ready")
	get(t, address+"/healthz", http.StatusOK)
	metrics := get(t, address+"/metrics", http.StatusOK)
	require.Regexp(t, `(?m)^sandbox_agent_sandboxes_evicted_total\{reason="drain"\} [1-9]`, metrics)
	require.Regexp(t, `(?m)^sandbox_agent_execs_total\{status="CANCELLED"\} [1-9]`, metrics)
	require.Regexp(t, `(?m)^sandbox_agent_sessions\{state="IDLE"\} [1-9]`, metrics)
	b, err := os.ReadFile(filepath.Join(s.worktree, "kept"))
	require.NoError(t, err)
	require.Equal(t, "kept\n", string(b))

	kubectl(t, "uncordon", "node1")
	old := pod(t)
	kubectl(t, "-n", namespace, "delete", "pod", old)
	ready(t)
	require.Equal(t, "kept\n", s.exec("again", "cat kept").GetStdoutText(), "the session goes on, with the next generation")
}

// The last test: there is no DaemonSet after it.
func TestUninstallLeavesWorkspacesAndArchivedReceiptsAlone(t *testing.T) {
	deploy(t)
	s := newSession(t, "last")
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.exec("work", "echo kept >kept").GetStatus())
	sandbox := s.get().GetSandbox().GetId()
	dir := manifests(t)
	runtimes := filepath.Join(dir, "uninstall", "agent.yaml")
	require.NoError(t, os.WriteFile(runtimes, []byte(strings.Replace(read(t, runtimes), "[runc]", "[runc, gvisor]", 1)), 0o600))

	inPod(t, "sandbox-agent", "drain", "--timeout", "1s")
	kubectl(t, "-n", namespace, "delete", "daemonset", "sandbox-agent", "--cascade=foreground")
	kubectl(t, "apply", "-k", filepath.Join(dir, "uninstall"))
	until(t, "the node is cleaned", func() bool {
		_, err := command(t, "kubectl", "-n", namespace, "rollout", "status", "daemonset/sandbox-agent-uninstall", "--timeout=5s")
		return err == nil
	})
	kubectl(t, "delete", "-k", filepath.Join(dir, "uninstall"))
	kubectl(t, "delete", "-k", filepath.Join(dir, "overlays", "runc"), "--ignore-not-found")
	deployed.as = ""

	require.NoDirExists(t, stateDir)
	require.NoDirExists(t, filepath.Dir(socket))
	require.NotContains(t, run(t, "ctr", "namespaces", "list", "-q"), "sandbox-agent")
	require.NoDirExists(t, "/run/containerd/runsc/sandbox-agent", "what runsc kept for the agent's sandboxes")
	cgroups, err := filepath.Glob("/sys/fs/cgroup/*/sandbox-agent")
	require.NoError(t, err)
	require.Empty(t, cgroups)
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), stateDir)
	for _, kind := range []string{"all", "validatingadmissionpolicies", "runtimeclasses", "clusterroles"} {
		require.NotContains(t, kubectl(t, "get", kind, "-A", "-o", "name"), "sandbox-agent", kind)
	}
	kept, err := os.ReadFile(filepath.Join(s.worktree, "kept"))
	require.NoError(t, err)
	require.Equal(t, "kept\n", string(kept))
	receipts, err := filepath.Glob("/var/lib/sandbox-agent-archive/*/receipts/" + sandbox + "/work.json")
	require.NoError(t, err)
	require.Len(t, receipts, 1)
	out := run(t, filepath.Join(os.Getenv(programsEnv), "sandbox-agent"), "receipt", "verify", "--all", filepath.Dir(filepath.Dir(receipts[0])))
	require.Contains(t, out, sandbox+": 1 receipts, verified")
}
