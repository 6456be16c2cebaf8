package kube

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheServerTakesEveryManifest(t *testing.T) {
	deploy(t)
	dir := manifests(t)
	found, err := filepath.Glob(filepath.Join(dir, "*", "*", "kustomization.yaml"))
	require.NoError(t, err)
	tried := 0
	for _, path := range append(found, filepath.Join(dir, "uninstall", "kustomization.yaml")) {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.Contains(string(b), "kind: Component") {
			continue // a part of an overlay; TestAComponentIsTakenWithAnOverlay
		}
		t.Run(strings.TrimPrefix(filepath.Dir(path), dir+"/"), func(t *testing.T) {
			kubectl(t, "apply", "--dry-run=server", "-k", filepath.Dir(path))
		})
		tried++
	}
	require.GreaterOrEqual(t, tried, 4, "three overlays and what uninstalls")
}

func TestTheServerTakesEveryComponentWithAnOverlay(t *testing.T) {
	deploy(t)
	dir := manifests(t)
	components, err := filepath.Glob(filepath.Join(dir, "components", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, components)
	for _, c := range components {
		t.Run(filepath.Base(c), func(t *testing.T) {
			use := filepath.Join(dir, "overlays", "runc", "kustomization.yaml")
			before, err := os.ReadFile(use)
			require.NoError(t, err)
			text := string(before) + "components: [../../components/" + filepath.Base(c) + "]\n"
			require.NoError(t, os.WriteFile(use, []byte(text), 0o600))
			kubectl(t, "apply", "--dry-run=server", "-k", filepath.Dir(use))
			require.NoError(t, os.WriteFile(use, before, 0o600))
		})
	}
}

// sandboxPod is a pod as the policy wants it. change makes another of it.
func sandboxPod(change func(meta, spec map[string]any)) []byte {
	meta := map[string]any{"name": "sandbox", "namespace": "tenants", "labels": map[string]any{"sandbox-agent.github.io/session": "s1"}}
	spec := map[string]any{
		"runtimeClassName": "sandbox-gvisor", "automountServiceAccountToken": false,
		"containers": []any{map[string]any{"name": "c", "image": "registry.example/tools@sha256:" + strings.Repeat("a", 64)}},
	}
	change(meta, spec)
	b, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
	if err != nil {
		panic(err)
	}
	return b
}

func TestSandboxPodsAreRefusedThatAreNotIsolatedPinnedTokenlessAndLabelled(t *testing.T) {
	deploy(t)
	kubectl(t, "apply", "-f", file(t, []byte(`{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"sandbox-gvisor"},"handler":"runsc"}`)))
	kubectl(t, "apply", "-f", file(t, []byte(`{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"ordinary"},"handler":"runc"}`)))
	kubectl(t, "create", "namespace", "tenants")
	kubectl(t, "create", "serviceaccount", "-n", "tenants", "default-of-the-test")
	t.Cleanup(func() {
		kubectl(t, "delete", "namespace", "tenants", "--wait=false")
		kubectl(t, "delete", "runtimeclass", "sandbox-gvisor", "ordinary")
	})
	until(t, "the namespace has its account", func() bool {
		_, err := command(t, "kubectl", "-n", "tenants", "get", "serviceaccount", "default")
		return err == nil
	})
	create := func(change func(meta, spec map[string]any)) (string, error) {
		return command(t, "kubectl", "create", "--dry-run=server", "-f", file(t, sandboxPod(change)))
	}
	container := func(spec map[string]any) map[string]any { return spec["containers"].([]any)[0].(map[string]any) }
	bad := map[string]struct {
		change func(meta, spec map[string]any)
		says   string
	}{
		"no RuntimeClass":           {func(_, spec map[string]any) { delete(spec, "runtimeClassName") }, "isolating RuntimeClass"},
		"one that does not isolate": {func(_, spec map[string]any) { spec["runtimeClassName"] = "ordinary" }, "isolating RuntimeClass"},
		"a tag":                     {func(_, spec map[string]any) { container(spec)["image"] = "registry.example/tools:1" }, "registry.example/tools:1"},
		"a tag in an init container": {func(_, spec map[string]any) {
			spec["initContainers"] = []any{map[string]any{"name": "i", "image": "registry.example/init"}}
		}, "registry.example/init"},
		"a token by default": {func(_, spec map[string]any) { delete(spec, "automountServiceAccountToken") }, "automountServiceAccountToken"},
		"a token":            {func(_, spec map[string]any) { spec["automountServiceAccountToken"] = true }, "automountServiceAccountToken"},
		"a projected token": {func(_, spec map[string]any) {
			spec["volumes"] = []any{map[string]any{"name": "t", "projected": map[string]any{"sources": []any{map[string]any{"serviceAccountToken": map[string]any{"path": "token"}}}}}}
		}, "projected volume"},
		"no label": {func(meta, _ map[string]any) { delete(meta, "labels") }, "sandbox-agent.github.io/session"},
		"a folder of the node": {func(_, spec map[string]any) {
			spec["volumes"] = []any{map[string]any{"name": "h", "hostPath": map[string]any{"path": "/"}}}
		}, "nothing of the node"},
		"the node's network":     {func(_, spec map[string]any) { spec["hostNetwork"] = true }, "nothing of the node"},
		"a privileged container": {func(_, spec map[string]any) { container(spec)["securityContext"] = map[string]any{"privileged": true} }, "nothing of the node"},
	}
	// Without the label the namespace is nobody's concern, and the policy's own existence is what the label switches on.
	for what, b := range bad {
		out, err := create(b.change)
		require.NoError(t, err, "%s, where the policy does not apply: %s", what, out)
	}
	kubectl(t, "label", "namespace", "tenants", "sandbox-agent.github.io/sandboxes=true")
	until(t, "the policy counts", func() bool {
		_, err := create(bad["a tag"].change)
		return err != nil
	})
	out, err := create(func(_, _ map[string]any) {})
	require.NoError(t, err, "a pod as it has to be: %s", out)
	for what, b := range bad {
		t.Run(what, func(t *testing.T) {
			out, err := create(b.change)
			require.Error(t, err, out)
			require.Contains(t, out, "sandbox-pods.sandbox-agent.github.io", "it is the policy that refuses")
			require.Contains(t, out, b.says)
		})
	}
}

// file is a temporary file with a content.
func file(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "manifest.json")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path
}

func TestNobodyHasMoreRightsThanTheyNeed(t *testing.T) {
	deploy(t)
	kubectl(t, "-n", namespace, "create", "rolebinding", "operators", "--role=sandbox-agent-operator", "--user=operator")
	kubectl(t, "-n", namespace, "create", "rolebinding", "viewers", "--role=sandbox-agent-viewer", "--user=viewer")
	t.Cleanup(func() { kubectl(t, "-n", namespace, "delete", "rolebinding", "operators", "viewers") })
	p := pod(t)
	run := func(user string, args ...string) []string {
		return append([]string{"--as=" + user, "-n", namespace}, args...)
	}
	agent := "system:serviceaccount:" + namespace + ":sandbox-agent"
	execute := []string{"exec", p, "-c", "agent", "--", "sandbox-agent", "version"}
	for _, args := range [][]string{
		run(agent, "get", "pods"), run(agent, "get", "secrets"), run(agent, "get", "nodes"), run(agent, "get", "configmaps"), run(agent, execute...),
		run("viewer", execute...), run("viewer", "get", "secrets"), run("viewer", "delete", "pod", p), run("viewer", "create", "configmap", "x"),
		run("operator", "get", "secrets"), run("operator", "delete", "pod", p), run("operator", "-n", "kube-system", "get", "pods"), run("operator", "get", "nodes"),
	} {
		require.Regexp(t, "Forbidden|is forbidden: User", refused(t, args...), "kubectl %v", args)
	}
	kubectl(t, run("viewer", "get", "pods,daemonsets,configmaps,cronjobs")...)
	kubectl(t, run("operator", execute...)...)
}
