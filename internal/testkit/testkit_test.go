package testkit

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck/feature"
)

func TestNeedSkipsWithTheReasonWhenSomethingIsMissing(t *testing.T) {
	var ran, skipped bool
	t.Run("inner", func(t *testing.T) {
		t.Setenv(MustRun, "")
		defer func() { skipped = t.Skipped() }()
		Need(t, Program("no-such-program-anywhere"))
		ran = true
	})
	require.False(t, ran)
	require.True(t, skipped)
}

func TestNeedFailsInsteadOfSkippingWhenTestsMustRun(t *testing.T) {
	if os.Getenv("TESTKIT_INNER") == "1" {
		Need(t, Program("no-such-program-anywhere"))
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), "TESTKIT_INNER=1", MustRun+"=1")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "no-such-program-anywhere")
}

func TestKernelVersionsAreComparedAsNumbers(t *testing.T) {
	for release, older := range map[string]bool{
		"5.10.0-46-cloud-amd64": true, "4.19.1": true, "5.12.0": false, "5.13-rc1": false, "6.1.0": false, "6.12.118+deb13": false, "strange": false,
	} {
		require.Equal(t, older, olderKernel(release, 5, 12), release)
	}
}

// A test may do without a feature of the kernel only where the kernel is older than the feature table says.
func TestAMissingFeatureIsASkipOnOlderKernelsOnly(t *testing.T) {
	lacks := Requirement{name: "the mount API", feature: feature.MountAPI, missing: func() string { return "ENOSYS" }}
	row, known := feature.Find(feature.MountAPI)
	require.True(t, known)
	require.Equal(t, "Linux 5.12", row.Since)
	skip, text := lacks.decide("5.10.0-46-cloud-amd64", false)
	require.True(t, skip, text)
	skip, text = lacks.decide("5.10.0-46-cloud-amd64", true)
	require.False(t, skip, "on a machine where all tests must run")
	require.Contains(t, text, MustRun)
	skip, text = lacks.decide("6.12.0", false)
	require.False(t, skip)
	require.Contains(t, text, "ENOSYS; it may be skipped for that only on kernels before Linux 5.12")
	_, text = Requirement{feature: feature.MountAPI, missing: func() string { return "" }}.decide("4.4.0", true)
	require.Empty(t, text, "what works, works")
	skip, _ = Program("no-such-program-anywhere").decide("6.12.0", false)
	require.True(t, skip, "a program is no feature of a kernel")
	require.Empty(t, Feature(feature.UserNS).missing())
	require.NotEmpty(t, Feature(feature.Git).missing(), "it has no version of Linux")
	require.NotEmpty(t, Feature("no such feature").missing())
}

func TestASnapshotSeesADescriptorThatWasLeftOpen(t *testing.T) {
	before := snapshot()
	f, err := os.Open("/etc/passwd")
	require.NoError(t, err)
	require.NotEmpty(t, snapshot().beyond(before))
	require.NoError(t, f.Close())
	require.Empty(t, snapshot().beyond(before))
}

// Another process's tests may mount things meanwhile.
func TestASnapshotSeesMountsBelowItsOwnFoldersOnly(t *testing.T) {
	Need(t, Root)
	theirs, err := os.MkdirTemp(scratchRoot, "sa-s-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.Remove(theirs)) })
	ours := StateDir(t)
	before := snapshot()
	for _, dir := range []string{theirs, ours} {
		require.NoError(t, unix.Mount("testkit", dir, "tmpfs", 0, "size=64k"))
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	require.Equal(t, []string{"mount " + ours + " (1, 0 before)"}, snapshot().beyond(before))
	for _, dir := range []string{theirs, ours} {
		require.NoError(t, unix.Unmount(dir, 0))
	}
	require.Empty(t, snapshot().beyond(before))
}

func TestARepositoryBelongsToItsUidAndHasOneCommit(t *testing.T) {
	Need(t, Root, Git)
	Leaks(t)
	repo := Repo(t, 1234)
	require.Equal(t, "1\n", GitAs(t, 1234, repo, "rev-list", "--count", "HEAD"))
	wt := Worktree(t, 1234, repo, "topic")
	st, err := os.Stat(filepath.Join(wt, ".git"))
	require.NoError(t, err)
	require.True(t, st.Mode().IsRegular())
}
