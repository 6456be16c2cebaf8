package nodecheck

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

func TestARealContainerdAndItsRuntimesSayTheirVersions(t *testing.T) {
	d := containerd.Start(t)
	c := config.Default(8 << 30).Containerd
	c.Address = d.Address
	f := askContainerd(t.Context(), c)
	require.Equal(t, Yes, f.Answer, f)
	require.Regexp(t, `version v?2\.`, f.Detail)

	f = lookAtShimmed(t.Context(), runcShimmed, config.ContainerdRuntime{Binary: filepath.Join(containerd.Folder(t, "runc"), "runc")}, d.Address)
	require.Equal(t, Yes, f.Answer, f)
	require.Contains(t, f.Detail, "runc version 1.")
	f = lookAtShimmed(t.Context(), gvisorShimmed, config.ContainerdRuntime{Binary: filepath.Join(containerd.Folder(t, "gvisor"), "runsc")}, d.Address)
	require.Contains(t, f.Detail, "runsc version")
	f = lookAtShimmed(t.Context(), gvisorShimmed, config.ContainerdRuntime{Binary: filepath.Join(t.TempDir(), "runsc")}, d.Address)
	require.Equal(t, No, f.Answer, "a program that is not there")
	require.NotEmpty(t, daemonPATH(t.Context(), d.Address), "a containerd's PATH is known")
	require.Empty(t, daemonPATH(t.Context(), d.Address+".none"))
}
