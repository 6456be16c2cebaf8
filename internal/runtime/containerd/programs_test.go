package containerd

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// unpack makes a folder of what would be an image's layer.
func unpack(t *testing.T, layer []byte) string {
	t.Helper()
	dir := testkit.StateDir(t)
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		require.NoError(t, err)
		path := filepath.Join(dir, h.Name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, content, 0o755))
	}
}

func TestP14ARootFileSystemWithoutBashIsAClearErrorAndLeavesNothing(t *testing.T) {
	h := newHost(t, Socket)
	bash, err := os.ReadFile("/bin/bash")
	require.NoError(t, err)
	for what, c := range map[string]struct {
		layer []byte
		says  string
	}{
		"no bash":                 {containerd.Layer(t, "cat"), "it has no /bin/bash, which runs the commands"},
		"a folder named bash":     {containerd.Archive(t, map[string][]byte{"bin/bash/readme": []byte("no")}), "it is no program"},
		"bash without its loader": {containerd.Archive(t, map[string][]byte{"bin/bash": bash}), "its /bin/bash needs /lib"},
	} {
		for kind, rootfs := range map[string]string{
			"an image": "localhost/tools@" + h.d.Import(t, "localhost/tools:1", c.layer),
			"a folder": unpack(t, c.layer),
		} {
			t.Run(what+" in "+kind, func(t *testing.T) {
				spec := h.spec(0)
				spec.Rootfs = rootfs
				_, err := h.r.Create(bound(t), spec)
				require.ErrorIs(t, err, runtime.ErrUnavailable)
				require.ErrorContains(t, err, rootfs)
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, "name one that has bash, and git")
				require.NoDirExists(t, spec.Dir)
				require.Empty(t, h.d.Keeps())
			})
		}
	}
}

func TestP14ABashWithoutItsLibrariesIsNamedByTheProof(t *testing.T) {
	h := newHost(t, Socket)
	bash, err := os.ReadFile("/bin/bash")
	require.NoError(t, err)
	loader := regexp.MustCompile(`/\S+/ld-linux\S+`).FindString(string(bash))
	loader, _, _ = strings.Cut(loader, "\x00")
	content, err := os.ReadFile(loader)
	require.NoError(t, err, "%q", loader)
	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + h.d.Import(t, "localhost/tools:1", containerd.Archive(t, map[string][]byte{"bin/bash": bash, loader[1:]: content}))
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	// A probe that goes on gets 20 s: that this one has ended is noticed.
	ctx, cancel := context.WithTimeout(bound(t), 15*time.Second)
	defer cancel()
	_, err = a.receiptd.Prove(ctx, &receiptdv1.ProveRequest{AttachEpoch: 1})
	require.ErrorContains(t, err, "error while loading shared libraries")
	h.stop(s)
}

func TestWithoutGitCommandsRunAndSayWhatTheyMiss(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat"))
	var log strings.Builder
	h.use(func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	s := h.create(spec)
	require.Contains(t, log.String(), "has no git")
	require.Contains(t, log.String(), spec.SandboxID)
	a := h.attach(s, spec, 1)
	out, p := a.run("cat README; git status")
	require.EqualValues(t, 127, p.ExitCode)
	require.Contains(t, out, "hello")
	require.Contains(t, out, "git: command not found")
	h.stop(s)
}
