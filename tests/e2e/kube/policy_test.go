package kube

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
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
			continue // a part of an overlay: the next test
		}
		t.Run(strings.TrimPrefix(filepath.Dir(path), dir+"/"), func(t *testing.T) {
			taken(t, filepath.Dir(path))
		})
		tried++
	}
	require.GreaterOrEqual(t, tried, 4, "three overlays and what uninstalls")
}

func TestTheServerTakesEveryComponentWithEveryOverlay(t *testing.T) {
	deploy(t)
	root := manifests(t)
	components, err := filepath.Glob(filepath.Join(root, "components", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, components)
	for i, c := range components {
		components[i] = filepath.Base(c)
	}
	for _, overlay := range []string{"runc", "gvisor", "kata"} {
		t.Run(overlay, func(t *testing.T) {
			dir := manifests(t)
			withComponents(t, dir, overlay, components...)
			taken(t, filepath.Join(dir, "overlays", overlay))
		})
	}
}

func TestTheServerTakesTheBrokersWithoutAWarning(t *testing.T) {
	need(t)
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	folder := filepath.Join(root, "examples", "brokers")
	// What is in a namespace is only tried where there is one, and its label is what Pod Security goes by.
	kubectl(t, "apply", "-f", filepath.Join(folder, "namespace.yaml"))
	t.Cleanup(func() { kubectl(t, "delete", "namespace", "sandbox-brokers", "--wait=false") })
	taken(t, folder)
}

// taken has the server look at what a kustomization makes, without a warning: of a field that it doesn't know, or of Pod Security.
func taken(t *testing.T, folder string) {
	t.Helper()
	require.NotContains(t, kubectl(t, "apply", "--dry-run=server", "-k", folder), "Warning")
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
	t.Cleanup(func() { kubectl(t, "delete", "runtimeclass", "sandbox-gvisor", "ordinary") })
	tenants(t)
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

// tenants makes a namespace for pods of others, until the test's end.
func tenants(t *testing.T) {
	t.Helper()
	kubectl(t, "create", "namespace", "tenants")
	t.Cleanup(func() { kubectl(t, "delete", "namespace", "tenants") })
	until(t, "the namespace has its account", func() bool {
		_, err := command(t, "kubectl", "-n", "tenants", "get", "serviceaccount", "default")
		return err == nil
	})
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
		// Who makes a pod here is root on its node.
		run("viewer", "run", "x", "--image=x"), run("operator", "run", "x", "--image=x"), run("operator", "delete", "daemonset", "sandbox-agent"),
	} {
		require.Regexp(t, "Forbidden|is forbidden: User", refused(t, args...), "kubectl %v", args)
	}
	kubectl(t, run("viewer", "get", "pods,daemonsets,configmaps,cronjobs")...)
	kubectl(t, run("operator", execute...)...)
}
