package clients

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// configurations are the fenced blocks of a document that start the MCP server, by their language.
func configurations(t *testing.T, document string) map[string][]string {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	b, err := os.ReadFile(filepath.Join(root, document))
	require.NoError(t, err)
	blocks := map[string][]string{}
	for _, m := range regexp.MustCompile("(?s)\n```([a-z]+)\n(.*?)```").FindAllStringSubmatch(string(b), -1) {
		if strings.Contains(m[2], "/sandbox-agent\"") || strings.Contains(m[2], "/sandbox-agent\n") {
			blocks[m[1]] = append(blocks[m[1]], m[2])
		}
	}
	return blocks
}

// argv is the one command line that a configuration holds, from whatever keys its client wants it in.
func argv(t *testing.T, x any) []string {
	t.Helper()
	m, ok := x.(map[string]any)
	if !ok {
		return nil
	}
	var found []string
	for _, key := range []string{"command", "cmd", "args"} {
		switch v := m[key].(type) {
		case string:
			found = append(found, v)
		case []any:
			for _, word := range v {
				found = append(found, word.(string))
			}
		}
	}
	for _, v := range m {
		found = append(found, argv(t, v)...)
	}
	return found
}

func TestTheConfigurationsThatAreShownStartTheServer(t *testing.T) {
	want := []string{"/usr/local/bin/sandbox-agent", "mcp", "--session", "job-17"}
	for document, count := range map[string]int{"README.md": 1, "docs/agents.md": 7} {
		seen := 0
		for language, blocks := range configurations(t, document) {
			for _, block := range blocks {
				var x any
				switch language {
				case "json":
					require.NoError(t, json.Unmarshal([]byte(block), &x), block)
				case "yaml":
					require.NoError(t, yaml.UnmarshalStrict([]byte(block), &x), block)
				default: // TOML's two lines are JSON behind the equals sign
					table := map[string]any{}
					for _, m := range regexp.MustCompile(`(?m)^(command|args) = (.*)$`).FindAllStringSubmatch(block, -1) {
						var v any
						require.NoError(t, json.Unmarshal([]byte(m[2]), &v), block)
						table[m[1]] = v
					}
					x = table
				}
				require.Equal(t, want, argv(t, x), block)
				seen++
			}
		}
		require.Equal(t, count, seen, document)
	}

	// And this is what it starts.
	s := common(t)
	cmd := exec.CommandContext(t.Context(), host.binary, want[1], want[2], s.GetSessionId())
	cmd.Env = append(os.Environ(), "SANDBOX_AGENT_SOCKET="+host.Socket)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	answers := json.NewDecoder(out)
	ask := func(id int, method, params string) map[string]any {
		_, err := in.Write([]byte(`{"jsonrpc":"2.0","id":` + string(rune('0'+id)) + `,"method":"` + method + `","params":` + params + "}\n"))
		require.NoError(t, err)
		for {
			var m map[string]any
			require.NoError(t, answers.Decode(&m))
			if m["id"] != nil {
				return m["result"].(map[string]any)
			}
		}
	}
	ask(1, "initialize", `{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"test","version":"1"}}`)
	_, err = in.Write([]byte(`{"jsonrpc":"2.0","method":"notifications/initialized"}` + "\n"))
	require.NoError(t, err)
	tools := ask(2, "tools/list", `{}`)["tools"].([]any)
	require.Len(t, tools, 1)
	require.Equal(t, "bash", tools[0].(map[string]any)["name"])
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
}
