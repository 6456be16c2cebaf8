package embedded

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func someGrants(content string) []runtime.Grant {
	return []runtime.Grant{
		{Name: "cluster", Files: []runtime.GrantFile{{Path: "kubeconfig", Content: []byte(content)}, {Path: "certs/ca/root.pem", Content: []byte("pem")}}},
		{Name: "empty"},
		{Name: "odd", Files: []runtime.GrantFile{{Path: "none", Content: nil}, {Path: "page", Content: []byte(strings.Repeat("x", 4097))}}},
	}
}

func TestP15GrantsAreTheCommandsToReadAndNobodysToWrite(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Grants = someGrants("the secret")
	s := h.create(spec)
	a := h.attach(s, spec)
	out, _ := a.run("cat /run/grants/cluster/kubeconfig; echo; cat /run/grants/cluster/certs/ca/root.pem; echo; wc -c < /run/grants/odd/page; ls -A /run/grants/empty; stat -c '%a %u %g' /run/grants/cluster /run/grants/cluster/kubeconfig; cd /run/grants; echo *")
	require.Equal(t, "the secret\npem\n4097\n500 1000 1000\n400 1000 1000\ncluster empty odd", out)
	out, p := a.run("grep ' /run/grants ' /proc/self/mountinfo")
	require.EqualValues(t, 0, p.ExitCode)
	options := strings.Fields(out)[5]
	for _, want := range []string{"ro", "nosuid", "nodev", "noexec"} {
		require.Contains(t, strings.Split(options, ","), want)
	}
	require.Contains(t, out, "tmpfs")
	for _, attack := range []string{
		"echo x > /run/grants/cluster/kubeconfig", "echo x >> /run/grants/new", "rm -f /run/grants/cluster/kubeconfig && test ! -e /run/grants/cluster/kubeconfig",
		"chmod 600 /run/grants/cluster/kubeconfig", "mv /run/grants/cluster /run/grants/other", "mv /run/grants /run/other", "rmdir /run/grants/empty",
		"umount /run/grants", "umount -l /run/grants", "mount -o remount,rw /run/grants", "unshare -Urm umount /run/grants",
		"ln /run/grants/cluster/kubeconfig /tmp/hard",
	} {
		out, p := a.run(attack)
		require.NotZero(t, p.ExitCode, "%s: %s", attack, out)
	}
	out, _ = a.run("cat /run/grants/cluster/kubeconfig")
	require.Equal(t, "the secret", out)
	h.stop(s)
}

func TestP15AnotherSandboxHasNothingOfTheGrants(t *testing.T) {
	h := newHost(t)
	spec, other := h.spec(1234, 0), h.spec(1234, 1)
	spec.Grants = someGrants("canary-4711")
	first, second := h.create(spec), h.create(other)
	a, b := h.attach(first, spec), h.attach(second, other)
	look := "cat /run/grants/cluster/kubeconfig; for p in /proc/[0-9]*; do cat $p/environ $p/root/run/grants/cluster/kubeconfig $p/cwd/kubeconfig; done; ls -A /run/grants; true"
	out, _ := a.run(look)
	require.Contains(t, out, "canary-4711", "the look finds what is there")
	out, p := b.run(look)
	require.NotContains(t, out, "canary-4711")
	require.EqualValues(t, 0, p.ExitCode)
	out, p = b.run("ls -A /run/grants")
	require.EqualValues(t, 0, p.ExitCode, "there is the folder, and nothing in it")
	require.Empty(t, out)
	h.stop(first)
	h.stop(second)
}

func TestP15NoGrantIsOnDiskWhileASandboxHasIt(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	const canary = "canary-0815"
	spec.Grants = someGrants(canary)
	s := h.create(spec)
	found := 0
	a := h.attach(s, spec)
	a.run("cp /run/grants/cluster/kubeconfig leaked") // the control: a command may write what it can read
	for _, top := range []string{h.state, filepath.Dir(spec.Workspace.Worktree)} {
		require.NoError(t, filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			if strings.Contains(string(b), canary) {
				found++
				require.Equal(t, "leaked", filepath.Base(path), path)
			}
			return nil
		}))
	}
	require.Equal(t, 1, found, "the search finds what is there")
	h.stop(s)
}
