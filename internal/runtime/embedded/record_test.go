package embedded

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func TestAnUnfinishedRecordThatAKilledAgentLeftIsNamedAndRemoved(t *testing.T) {
	for name, finished := range map[string]bool{"before the first record": false, "while the record was written again": true} {
		t.Run(name, func(t *testing.T) {
			h := newHostOfAnyKernel(t)
			id := newID(t)
			if finished {
				require.NoError(t, h.r.writeRecord(record{Identity: runtime.Identity{SandboxID: id}}))
			}
			require.NoError(t, os.WriteFile(h.r.recordPath(id)+"~", []byte(`{"ident`), 0o600))

			ids, err := h.r.List(bound(t))
			require.NoError(t, err)
			require.Equal(t, []string{id}, ids)
			ev, err := h.r.Remove(bound(t), runtime.Identity{SandboxID: id})
			require.NoError(t, err)
			require.True(t, ev.Complete)
			left, err := os.ReadDir(filepath.Join(h.state, "records"))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

func TestOnlyRecordsNameSandboxes(t *testing.T) {
	require.Equal(t, []string{"sb-1", "sb-2"}, recordedIDs([]string{"sb-2.json~", "sb-1.json", "sb-1.json~", "notes", "notes~", "sb-3.yaml"}))
	require.Empty(t, recordedIDs(nil))
}
