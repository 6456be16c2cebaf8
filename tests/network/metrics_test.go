package network

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

const metricsPort = "9464"

// ask is a command that asks an HTTP server.
func ask(address, port, path string) string {
	return fmt.Sprintf(`exec 3<>/dev/tcp/%s/%s && printf 'GET %s HTTP/1.0\r\n\r\n' >&3 && cat <&3`, address, port, path)
}

// onNode asks the agent from its node.
func (w *world) onNode(path string) string {
	w.t.Helper()
	out, err := w.Command(w.Node, "bash", "-c", ask(netlab.NodeAddr, metricsPort, path)).CombinedOutput()
	require.NoError(w.t, err, string(out))
	return string(out)
}

// counted is a sample of the agent's metrics; -1 without one.
func (w *world) counted(sample string) float64 {
	w.t.Helper()
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta("sandbox_agent_"+sample) + ` (\S+)$`).FindStringSubmatch(w.onNode("/metrics"))
	if m == nil {
		return -1
	}
	n, err := strconv.ParseFloat(m[1], 64)
	require.NoError(w.t, err)
	return n
}

func TestP10TheAgentsMetricsAreForItsNodeAndForNoCommand(t *testing.T) {
	testkit.Leaks(t)
	w := newNode(t, bridged)
	w.serve(node.Program(), "metrics: {listen: '"+netlab.NodeAddr+":"+metricsPort+"'}")
	w.TCP(w.World, "elsewhere", netlab.Web+":"+metricsPort)
	w.TCP(w.World, "web", netlab.Web+":80")

	require.Contains(t, w.onNode("/healthz"), "200 OK")
	require.Contains(t, w.onNode("/readyz"), "200 OK")
	require.InDelta(t, 0, w.counted(`sessions{state="READY"}`), 0)
	require.Positive(t, w.counted(`filesystem_size_bytes{folder="state",path="`+w.State+`"}`))

	s := w.session("embedded", "bridge")
	require.InDelta(t, 0, w.counted("connections_refused_total"), 0, "what a sandbox's proof is refused is no command's")
	require.Equal(t, "web to "+netlab.NodeAddr+"\n", w.run(s, dial(netlab.Web, "80")).GetStdoutText(), "the control case")
	for _, at := range []string{netlab.NodeAddr, netlab.Web} {
		r := w.run(s, ask(at, metricsPort, "/metrics"))
		require.NotZero(t, r.GetExitCode(), at)
		require.Contains(t, r.GetStderrText(), "Connection refused", at)
	}
	for sample, want := range map[string]float64{
		`sessions{state="READY"}`: 1, `sandboxes{runtime="embedded"}`: 1, `sandbox_start_seconds_count{runtime="embedded"}`: 1,
		`execs_total{status="EXITED"}`: 3, "exec_seconds_count": 3, "boundary_wait_seconds_count": 3, "exec_queue_length": 0,
		`sandboxes_evicted_total{reason="drain"}`: 0,
	} {
		require.InDelta(t, want, w.counted(sample), 0, sample)
	}
	require.Positive(t, w.counted("journal_sync_seconds_count"))
	require.GreaterOrEqual(t, w.counted("connections_refused_total"), 2.0)
	require.Positive(t, w.counted("network_sent_bytes_total"))
	require.Positive(t, w.counted("memory_reserved_bytes"))

	require.InDelta(t, -1, w.counted(`egress_probe_holds{check="metadata"}`), 0, "there was none")
	out, err := w.Command(w.Node, w.Program(node.Program()), "egress", "probe", s.GetSessionId(), "--socket", w.Socket).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, check := range []string{"metadata", "management"} {
		require.InDelta(t, 1, w.counted(`egress_probe_holds{check="`+check+`"}`), 0, check)
	}
	out, err = w.Command(w.Node, w.Program(node.Program()), "egress", "probe", s.GetSessionId(), "--management", netlab.Web+":80", "--socket", w.Socket).CombinedOutput()
	require.ErrorContains(t, err, "exit status 15", string(out))
	require.InDelta(t, 0, w.counted(`egress_probe_holds{check="management"}`), 0)
	require.InDelta(t, 1, w.counted(`egress_probe_holds{check="metadata"}`), 0)

	out, err = w.Command(w.Node, w.Program(node.Program()), "drain", "--socket", w.Socket).CombinedOutput()
	require.NoError(t, err, string(out))
	require.InDelta(t, 1, w.counted(`sandboxes_evicted_total{reason="drain"}`), 0)
	require.InDelta(t, 0, w.counted(`sandboxes{runtime="embedded"}`), 0)
	require.Contains(t, w.onNode("/readyz"), "this node is drained")
	require.Contains(t, w.onNode("/healthz"), "200 OK")
}
