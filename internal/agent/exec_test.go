package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestACommandIsAnsweredWithItsOutputAndAReceipt(t *testing.T) {
	n := newNode(t)
	s := n.session("one")
	require.Equal(t, sandboxv1.Session_READY, s.GetState())
	r := n.exec("one", "e1", "echo out; echo err >&2; exit 3")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.EqualValues(t, 3, r.GetExitCode())
	require.Equal(t, "out\n", r.GetStdoutText())
	require.Equal(t, "err\n", r.GetStderrText())
	require.NotEmpty(t, r.GetReceipt())
}
