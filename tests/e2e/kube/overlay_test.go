package kube

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// The tests are in the order that changes overlays least often: each change is a rollout.

func TestTheOverlayKataSaysWhatTheNodeLacksAndStartsNothingElse(t *testing.T) {
	use(t, "kata")
	said, err := command(t, "kubectl", "-n", namespace, "exec", pod(t), "-c", "agent", "--", "sandbox-agent", "check")
	require.Error(t, err, "the node is not fit")
	require.Contains(t, said, "MISSING    runtime kata", said)
	require.Contains(t, said, "install Kata Containers", "the remedy")
	if _, err := os.Stat("/dev/kvm"); err != nil {
		require.Regexp(t, `MISSING +KVM`, said)
		require.Contains(t, said, "nested virtualisation on the host of this machine", "the remedy")
	}
	before := containers(t)
	_, err = createSession(t, "kata")
	require.ErrorContains(t, err, "no sandbox can be had on this node")
	require.ErrorContains(t, err, "install Kata Containers")
	require.Equal(t, before, containers(t), "nothing is there in the place of a virtual machine (P14)")
}

func TestAPodThatThePolicyTakesRunsUnderGVisor(t *testing.T) {
	use(t, "gvisor")
	testkit.Need(t, testkit.Program("runsc"))
	tenants(t)
	kubectl(t, "label", "namespace", "tenants", "sandbox-agent.github.io/sandboxes=true")
	kubectl(t, "create", "-f", file(t, sandboxPod(func(_, spec map[string]any) {
		spec["restartPolicy"] = "Never"
		spec["containers"] = []any{map[string]any{"name": "c", "image": deployed.rootfs.String(), "command": []string{"cat", "/proc/version"}}}
	})))
	until(t, "the pod has run", func() bool {
		return kubectl(t, "-n", "tenants", "get", "pod", "sandbox", "-o", "jsonpath={.status.phase}") == "Succeeded"
	})
	require.Contains(t, kubectl(t, "-n", "tenants", "logs", "sandbox"), "gvisor")

	// What comes into a pod later is judged as well.
	debug := func(image, profile string) []string {
		return []string{"-n", "tenants", "debug", "sandbox", "--image=" + image, "--profile=" + profile, "--", "true"}
	}
	require.Contains(t, refused(t, debug("registry.example/tools:1", "general")...), "registry.example/tools:1")
	require.Contains(t, refused(t, debug(deployed.rootfs.String(), "sysadmin")...), "nothing of the node", "that profile's container is privileged")
	kubectl(t, debug(deployed.rootfs.String(), "general")...)
}

func TestTheOverlayGVisorHostsSandboxesUnderGVisorThatOutliveTheAgentsPod(t *testing.T) {
	use(t, "gvisor")
	testkit.Need(t, testkit.Program("runsc"))
	s := newSession(t, "gvisor")
	r := s.exec("a", "cat /proc/version; ls /usr/local/libexec/sandbox-agent; git commit -q --allow-empty -m Work")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r)
	require.Contains(t, r.GetStdoutText(), "gvisor", "no kernel of the node answers a command")
	require.Contains(t, r.GetStdoutText(), "\npid1\nreceiptd\n", "the root file system is the image")
	require.NotEmpty(t, r.GetReceipt())
	require.Equal(t, "gvisor", s.get().GetSandbox().GetRuntime())
	survives(t, s, func(old string) { kubectl(t, "-n", namespace, "delete", "pod", old) })

	// Without its runtime a sandbox is nothing that anybody may use.
	use(t, "runc")
	require.NotContains(t, containers(t), s.get().GetSandbox().GetId())
	until(t, "its sandbox has ended", func() bool { return s.get().GetState() == sandboxv1.Session_IDLE })
	_, err := s.ask("late", "true")
	require.ErrorContains(t, err, "runtime.allowed")
}

const (
	startupTaint = "sandbox-agent.github.io/not-ready"
	taintRemover = "system:serviceaccount:" + namespace + ":sandbox-agent-taint"
)

// taints are the keys of the node's taints.
func taints(t *testing.T) string {
	t.Helper()
	return kubectl(t, "get", "node", "node1", "-o", "jsonpath={.spec.taints[*].key}")
}

// agentsOn has agents on nodes with a label, or on all of them.
func agentsOn(t *testing.T, label any) {
	t.Helper()
	b, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"nodeSelector": map[string]any{"tried": label}}}}})
	require.NoError(t, err)
	kubectl(t, "-n", namespace, "patch", "daemonset", "sandbox-agent", "-p", string(b))
}

func TestTheStartupTaintStaysUntilTheAgentAnswers(t *testing.T) {
	deploy(t)
	dir := manifests(t)
	component := filepath.Join(dir, "components", "startup-taint", "taint.yaml")
	t.Cleanup(func() {
		kubectl(t, "delete", "-f", component, "--ignore-not-found")
		_, _ = command(t, "kubectl", "taint", "node", "node1", startupTaint+"-", "others-") // they may be gone
		agentsOn(t, nil)
		ready(t)
	})
	agentsOn(t, "nowhere")
	kubectl(t, "-n", namespace, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=sandbox-agent", "--timeout=100s")
	kubectl(t, "taint", "node", "node1", startupTaint+"=:NoSchedule", "others=:PreferNoSchedule")
	withComponents(t, dir, "runc", "startup-taint")
	kubectl(t, "apply", "-k", filepath.Join(dir, "overlays", "runc"))
	until(t, "it has looked for the agent twice", func() bool {
		said, _ := command(t, "kubectl", "-n", namespace, "logs", "daemonset/sandbox-agent-taint")
		return strings.Count(said, "curl: (7)") > 1
	})
	require.Contains(t, taints(t), startupTaint, "nobody answers yet")
	agentsOn(t, nil)
	ready(t)
	until(t, "the taint is gone", func() bool { return !strings.Contains(taints(t), startupTaint) })
	require.Contains(t, taints(t), "others", "the others' taints stay")
	theRemoverDoesNothingElse(t)
}

// theRemoverDoesNothingElse tries what the taint's remover could do with its right to patch nodes.
func theRemoverDoesNothingElse(t *testing.T) {
	t.Helper()
	kubectl(t, "create", "-f", file(t, []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"node2"},"spec":{"taints":[{"key":"`+startupTaint+`","effect":"NoSchedule"}]}}`)))
	t.Cleanup(func() { kubectl(t, "delete", "node", "node2") })
	as := func(args ...string) []string {
		return append([]string{"--as=" + taintRemover, "--as-user-extra=authentication.kubernetes.io/node-name=node1"}, args...)
	}
	bad := []struct {
		args []string
		says string
	}{
		{[]string{"taint", "node", "node1", "others-"}, "the taint " + startupTaint + " alone"},
		{[]string{"label", "node", "node1", "a=b"}, "no label"},
		{[]string{"patch", "node", "node1", "-p", `{"spec":{"unschedulable":true}}`}, "cordoned"},
		{[]string{"taint", "node", "node2", startupTaint + "-"}, "its own node alone"},
	}
	for _, b := range bad {
		require.Contains(t, refused(t, as(b.args...)...), b.says)
	}
	for _, args := range [][]string{{"delete", "node", "node2"}, {"get", "secrets", "-A"}, {"-n", namespace, "exec", pod(t), "--", "true"}} {
		require.Regexp(t, "Forbidden|is forbidden: User", refused(t, as(args...)...), "kubectl %v", args)
	}
	// It is the policy: RBAC alone lets all of it pass.
	kubectl(t, "delete", "validatingadmissionpolicybinding", "taint.sandbox-agent.github.io")
	for _, b := range bad {
		until(t, "without the policy it passes", func() bool {
			_, err := command(t, "kubectl", as(append(slices.Clone(b.args), "--dry-run=server")...)...)
			return err == nil
		})
	}
}

func TestTheEgressProbeFailsAsAJobWhenAListedHostDoesNotAnswer(t *testing.T) {
	// The list of the component as it stands, for every session; nobody is git.example.org here.
	use(t, "runc+network", func(dir string) {
		path := filepath.Join(dir, "components", "network", "agent.yaml")
		text := read(t, path)
		require.Equal(t, 1, strings.Count(text, "  default: none\n"))
		require.NoError(t, os.WriteFile(path, []byte(strings.Replace(text, "  default: none\n", "  default: bridge\n", 1)), 0o600))
	})
	succeeded, said := probe(t)
	require.False(t, succeeded, said)
	require.Regexp(t, `\nNO +a listed host answers +git.example.org:443 +it does not answer`, said)
	require.Equal(t, 1, strings.Count(said, "\nNO"), "all else holds on a network: %s", said)
	require.Regexp(t, `\nyes +management does not +\S+:10250 +refused`, said, "a sandbox does not reach the kubelet (P10)")
	metrics := get(t, "http://127.0.0.1:9464/metrics", http.StatusOK)
	require.Contains(t, metrics, "\nsandbox_agent_egress_probe_holds{check=\"allowed\"} 0\n", "there is something to alert on")
	require.Contains(t, metrics, "\nsandbox_agent_egress_probe_holds{check=\"management\"} 1\n")
}
