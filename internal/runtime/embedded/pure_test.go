package embedded

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP14CheckSaysBeforehandWhetherThisNodeCanHostASandbox(t *testing.T) {
	h := newHostOfAnyKernel(t)
	checked := h.r.Check(bound(t))
	s, err := h.r.Create(bound(t), h.spec(1234, 0))
	if checked == nil {
		require.NoError(t, err)
		h.stop(s)
		return
	}
	require.ErrorIs(t, checked, runtime.ErrUnavailable)
	require.Error(t, err)
	if testkit.OlderKernel(5, 12) {
		require.ErrorContains(t, checked, "Linux 5.12")
		require.ErrorContains(t, err, "Linux 5.12")
	}
}

func TestSmallFileSystemsAreBoundedInBytesAndInodes(t *testing.T) {
	for _, m := range smallFileSystems(runtime.Spec{IDs: testIDs}) {
		if m.Device == "tmpfs" {
			require.Contains(t, m.Data, "size=", m.Destination)
			require.Contains(t, m.Data, "nr_inodes=", m.Destination)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := New(Options{StateDir: "relative"})
	require.ErrorContains(t, err, "absolute")
	for _, parent := range []string{"relative", "/", "/a/../b"} {
		_, err = New(Options{StateDir: t.TempDir(), CgroupParent: parent})
		require.ErrorContains(t, err, "cgroup parent")
	}
}
