package embedded

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

func TestAnUnfinishedRecordThatAKilledAgentLeftIsNamedAndRemoved(t *testing.T) {
	for name, finished := range map[string]bool{"before the first record": false, "while the record was written again": true} {
		t.Run(name, func(t *testing.T) {
			h := newHostOfAnyKernel(t)
			id := newID(t)
			if finished {
				require.NoError(t, h.r.keeper.Records.Write(hostkernel.Record{Identity: runtime.Identity{SandboxID: id}}))
			}
			require.NoError(t, os.WriteFile(h.r.keeper.Records.Files(id)[0], []byte(`{"ident`), 0o600))

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
