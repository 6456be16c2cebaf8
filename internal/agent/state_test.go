package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP9AStateFolderThatOthersCanWriteToIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root)
	receiptd, pid1 := testkit.Binaries(t)
	for _, below := range append([]string{"."}, stateDirs...) {
		for what, x := range map[string]struct {
			spoil func(path string) error
			says  string
		}{
			"another's":         {func(p string) error { return os.Chown(p, 4321, 0) }, "belongs to uid 4321"},
			"the group writes":  {func(p string) error { return os.Chmod(p, 0o730) }, "mode 0730"},
			"everyone writes":   {func(p string) error { return os.Chmod(p, 0o777) }, "mode 0777"},
			"a file, no folder": {func(p string) error { os.Remove(p); return os.WriteFile(p, nil, 0o600) }, "not a folder"},
		} {
			state := filepath.Join(testkit.StateDir(t), "state")
			path := filepath.Join(state, below)
			require.NoError(t, os.MkdirAll(path, 0o700))
			require.NoError(t, x.spoil(path))
			cfg := testConfig(state, "/var/tmp")
			_, err := New(Options{Config: cfg, Runtimes: map[string]runtime.Runtime{"embedded": nil}, Receiptd: receiptd, Pid1: pid1})
			require.ErrorContains(t, err, "the state folder "+path+" ", "%s: %s", below, what)
			require.ErrorContains(t, err, x.says, "%s: %s", below, what)
			require.ErrorContains(t, err, "state_dir", "%s: %s", below, what)
			require.NoFileExists(t, filepath.Join(state, "journal", "lock"))
		}
	}
	require.NoError(t, CheckStateDir(filepath.Join(testkit.StateDir(t), "none")), "one that does not exist is made")
}

func TestARootFileSystemWithoutBashIsRefusedAtTheStart(t *testing.T) {
	dir := t.TempDir()
	program := func(parts ...string) string {
		p := filepath.Join(append([]string{dir}, parts...)...)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, nil, 0o755))
		return p
	}
	program("good", "bin", "bash")
	program("merged", "usr", "bin", "bash")
	require.NoError(t, os.Symlink("/usr/bin", filepath.Join(dir, "merged", "bin")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "empty"), 0o755))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "folder", "bin", "bash"), 0o755))
	require.NoError(t, os.Chmod(program("plain", "bin", "bash"), 0o644))
	require.NoError(t, os.Symlink("good", filepath.Join(dir, "link")))
	for _, good := range []string{"host", filepath.Join(dir, "good"), filepath.Join(dir, "merged")} {
		require.NoError(t, checkRootfs(good), good)
	}
	require.NoError(t, checkRootfs("docker.io/library/debian:13"), "an image's runtime looks into it")
	for name, says := range map[string]string{
		"none": "name a folder that exists", "empty": "has no /bin/bash", "folder": "is no program", "plain": "is no program", "link": "by its real path",
	} {
		cfg := testConfig(filepath.Join(dir, "state"), "/var/tmp")
		cfg.Rootfs = filepath.Join(dir, name)
		_, err := New(Options{Config: cfg})
		require.ErrorContains(t, err, "rootfs "+cfg.Rootfs, name)
		require.ErrorContains(t, err, says, name)
	}
}
