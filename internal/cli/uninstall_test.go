package cli

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// uninstall runs the command for a state folder in dir.
func uninstall(t *testing.T, dir string, more ...string) (string, int) {
	t.Helper()
	var out strings.Builder
	code := Run(context.Background(), append([]string{program, "uninstall", "--state-dir", filepath.Join(dir, "state"), "--socket", filepath.Join(dir, "exec.sock")}, more...), &out, &out)
	return out.String(), code
}

func TestNothingIsUninstalledWhereAnAgentListensOrTheArchiveWouldBeRemoved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this test needs root")
	}
	dir := t.TempDir()
	receipt := filepath.Join(dir, "state", "receipts", "sb", "a.json")
	require.NoError(t, os.MkdirAll(filepath.Dir(receipt), 0o700))
	require.NoError(t, os.WriteFile(receipt, nil, 0o600))

	out, code := uninstall(t, dir, "--archive", filepath.Join(dir, "state", "archive"))
	require.Equal(t, ExitUsage, code, out)
	require.Contains(t, out, "outside of the state folder")
	l, err := net.Listen("unix", filepath.Join(dir, "exec.sock"))
	require.NoError(t, err)
	out, code = uninstall(t, dir, "--archive", filepath.Join(dir, "archive"))
	require.NoError(t, l.Close())
	require.Equal(t, ExitError, code, out)
	require.Contains(t, out, "nothing is removed: an agent listens at")
	require.FileExists(t, receipt)
	require.NoDirExists(t, filepath.Join(dir, "archive"))
}

func TestOnlyWhatIsRemovedIsSaidToBe(t *testing.T) {
	cfg := config.Default(1 << 30)
	require.Equal(t, "removed /var/lib/sandbox-agent, the socket's folder, cgroups and firewall rules; containerd is left as it is: runtime.allowed has no runtime of its", removedWords(&cfg))
	cfg.Runtime.Allowed = []string{"embedded", "runc"}
	require.Equal(t, "removed /var/lib/sandbox-agent, the socket's folder, cgroups, firewall rules and containerd's namespace sandbox-agent", removedWords(&cfg))
}

func TestReceiptsAndKeysAreArchived(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	kept, err := archiveReceipts(state, filepath.Join(dir, "archive"))
	require.NoError(t, err)
	require.Empty(t, kept, "without receipts there is no archive")
	require.NoDirExists(t, filepath.Join(dir, "archive"))
	for _, path := range []string{"receipts/sb/a.json", "keys/sb.pub", "journal/x"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(state, path)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(state, path), []byte(path), 0o600))
	}
	kept, err = archiveReceipts(state, filepath.Join(dir, "archive"))
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(kept, "receipts", "sb", "a.json"))
	require.FileExists(t, filepath.Join(kept, "keys", "sb.pub"))
	require.NoFileExists(t, filepath.Join(kept, "journal", "x"))
}
