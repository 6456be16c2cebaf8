package hostkernel

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
)

func TestOnlyRecordsNameSandboxes(t *testing.T) {
	require.Equal(t, []string{"sb-1", "sb-2"}, recordedIDs([]string{"sb-2.json~", "sb-1.json", "sb-1.json~", "notes", "notes~", "sb-3.yaml"}))
	require.Empty(t, recordedIDs(nil))
}

// TestP5ANumberThatAnotherProcessHasIsNoInit: what ends with a virtual machine is looked for first and recorded then.
func TestP5ANumberThatAnotherProcessHasIsNoInit(t *testing.T) {
	k, st := &Keeper{Records: Records(t.TempDir())}, &Start{}
	st.Record.Identity.SandboxID = "sb-1"
	start, _, err := ProcStat(os.Getpid())
	require.NoError(t, err)
	require.ErrorContains(t, k.Found(st, os.Getpid(), start+1, &receiptdv1.View{}), "another one has its number")
	require.Zero(t, st.Record.Identity.Pid)
	_, err = os.Stat(k.Records.path("sb-1"))
	require.ErrorIs(t, err, os.ErrNotExist, "nothing is recorded")
	for _, known := range []uint64{0, start} {
		require.NoError(t, k.Found(st, os.Getpid(), known, &receiptdv1.View{}))
		require.Equal(t, start, st.Record.Identity.StartTime)
	}
}
