package hostkernel

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOnlyRecordsNameSandboxes(t *testing.T) {
	require.Equal(t, []string{"sb-1", "sb-2"}, recordedIDs([]string{"sb-2.json~", "sb-1.json", "sb-1.json~", "notes", "notes~", "sb-3.yaml"}))
	require.Empty(t, recordedIDs(nil))
}
