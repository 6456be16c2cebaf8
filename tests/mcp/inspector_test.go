package mcp

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// Another implementation of the protocol, in another language, finds the tool and calls it.
func inspector(t *testing.T, s *session) {
	testkit.Need(t, testkit.Program("node"), testkit.Program("npm"))
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	install := exec.Command(filepath.Join(root, "scripts", "inspector.sh"))
	var why bytes.Buffer
	install.Stderr = &why
	path, err := install.Output()
	require.NoError(t, err, why.String())
	script := strings.TrimSpace(string(path))

	inspect := func(into any, args ...string) {
		t.Helper()
		cmd := exec.Command("node", append([]string{script, "--cli", node.Program(), "mcp", "--session", s.id, "--socket", s.Socket}, args...)...)
		cmd.Dir = filepath.Dir(script) // it looks for its own version from there
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		require.NoError(t, err, stderr.String())
		require.NoError(t, json.Unmarshal(out, into), string(out))
	}
	var list sdk.ListToolsResult
	inspect(&list, "--method", "tools/list")
	require.Len(t, list.Tools, 1)
	require.Equal(t, "bash", list.Tools[0].Name)
	require.Contains(t, list.Tools[0].Description, s.worktree)

	var result sdk.CallToolResult
	inspect(&result, "--method", "tools/call", "--tool-name", "bash", "--tool-arg", "command=echo from the inspector; exit 5", "--tool-arg", "timeout_seconds=20")
	got := answerOf(t, &result)
	require.Equal(t, "EXITED", got.Status)
	require.Equal(t, 5, *got.Code)
	require.Equal(t, "from the inspector\n", got.Stdout)

	result = sdk.CallToolResult{}
	inspect(&result, "--method", "tools/call", "--tool-name", "bash", "--tool-arg", "command=touch ran", "--tool-arg", "cwd=/")
	got = answerOf(t, &result)
	require.True(t, got.isError)
	require.Contains(t, got.Reason, `unknown argument "cwd"`)
	require.NoFileExists(t, s.file("ran"))
}
