package kata

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const rustLine = "kata-containers containerd shim (Rust): id: io.containerd.kata.v2, version: 4.2.0, commit: abc"

// script installs a stand-in for the shim: a program that does what the shell lines say.
func script(t *testing.T, dir, lines string) string {
	t.Helper()
	testkit.Need(t, testkit.Root)
	path := filepath.Join(dir, ShimName)
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+lines+"\n"), 0o755))
	return path
}

func TestTheShimIsFoundWhereContainerdFindsIt(t *testing.T) {
	dir := t.TempDir()
	first := script(t, filepath.Join(dir, "path"), `echo "`+rustLine+`"`)
	second := script(t, filepath.Join(dir, "opt"), `echo 'Kata Containers containerd shim (Golang): id: "io.containerd.kata.v2", version: 4.0.0, commit: x'`)
	p := Places{ContainerdPATH: "relative:/nowhere:" + filepath.Dir(first), ShimDirs: []string{filepath.Dir(second)}}
	shim, err := Find(t.Context(), p)
	require.NoError(t, err)
	require.Equal(t, ShimInfo{Path: first, Resolved: first, Flavour: FlavourRust, Version: Version{4, 2, 0, ""}, Commit: "abc"}, shim)

	p.ContainerdPATH = "/nowhere"
	shim, err = Find(t.Context(), p)
	require.NoError(t, err)
	require.Equal(t, second, shim.Path)
	require.Equal(t, FlavourGo, shim.Flavour)

	p.Shim = filepath.Join(dir, "named")
	require.NoError(t, os.Symlink(first, p.Shim))
	shim, err = Find(t.Context(), p)
	require.NoError(t, err)
	require.Equal(t, first, shim.Resolved)

	for _, p := range []Places{{ContainerdPATH: "/nowhere", ShimDirs: []string{}}, {Shim: "/nowhere/x"}, {Shim: "x"}} {
		_, err = Find(t.Context(), p)
		require.ErrorIs(t, err, ErrNotInstalled)
	}
}

func TestTheShimIsRunWithNothingOfOurs(t *testing.T) {
	t.Setenv("SECRET_OF_THE_AGENT", "1")
	dir := t.TempDir()
	seen := filepath.Join(dir, "seen")
	path := script(t, dir, fmt.Sprintf(`{ echo "$# $1"; pwd; tr '\0' '\n' </proc/$$/environ; readlink /proc/$$/fd/0; } >%s; echo "%s"`, seen, rustLine))
	_, err := Find(t.Context(), Places{Shim: path})
	require.NoError(t, err)
	got, err := os.ReadFile(seen)
	require.NoError(t, err)
	require.Equal(t, "1 --version\n/\n/dev/null\n", string(got))
}

func TestAShimThatMisbehavesIsRefused(t *testing.T) {
	for name, c := range map[string]struct{ lines, message string }{
		"fails":              {"exit 3", "exit status 3"},
		"says nothing":       {"true", "--version printed"},
		"says too much":      {"while :; do echo 0123456789012345678901234567890123456789 || exit 0; done", "more than 4096 bytes"},
		"is another program": {"echo runc version 1.5.3", "--version printed"},
		"is a vendor's":      {`echo "` + strings.Replace(rustLine, "4.2.0", "4.2.0.corp1", 1) + `"`, "install a release of Kata Containers"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Find(t.Context(), Places{Shim: script(t, t.TempDir(), c.lines)})
			require.ErrorIs(t, err, ErrVersion)
			require.ErrorContains(t, err, c.message)
		})
	}
}

// The wait ends with the caller's context, also when a grandchild keeps the output open.
func TestAShimThatHangsIsLeft(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "started")
	mkfifo(t, fifo)
	path := script(t, dir, "echo $$ >"+fifo+"; exec sleep 1000")
	ctx, cancel := cancelled(t)
	go func() {
		_, _ = os.ReadFile(fifo) // returns once the shim runs
		cancel()
	}()
	_, err := Find(ctx, Places{Shim: path})
	require.ErrorIs(t, err, ErrVersion)
}

func TestAShimThatOthersCanChangeIsNotRun(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"mode":   func(p string) error { return os.Chmod(p, 0o777) },
		"owner":  func(p string) error { return os.Chown(p, 1000, 1000) },
		"folder": func(p string) error { return os.Chmod(filepath.Dir(p), 0o757) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			mark := filepath.Join(t.TempDir(), "ran")
			path := script(t, dir, "echo >"+mark+`; echo "`+rustLine+`"`)
			_, err := Find(t.Context(), Places{Shim: path})
			require.NoError(t, err)
			require.FileExists(t, mark, "control: it runs when it is root's alone")
			require.NoError(t, os.Remove(mark))
			require.NoError(t, change(path))
			_, err = Find(t.Context(), Places{Shim: path})
			require.ErrorIs(t, err, ErrUntrusted)
			require.NoFileExists(t, mark)
		})
	}
}

func TestTheHandlerNamesTheProgram(t *testing.T) {
	for handler, program := range map[string]string{
		"": ShimName, RuntimeType: ShimName, "io.containerd.kata-qemu.v2": "containerd-shim-kata-qemu-v2",
	} {
		require.Equal(t, program, Places{Handler: handler}.shimName())
	}
}
