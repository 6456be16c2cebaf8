package metrics

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// everything makes each metric appear once.
func everything(t *testing.T) *Metrics {
	t.Helper()
	m := New("v1")
	m.SandboxStarted("runc", time.Second, nil)
	m.SandboxStarted("runc", 0, errors.New("no"))
	m.ExecAnswered("EXITED")
	m.ExecTook(3*time.Second, time.Second)
	m.ExecRefused("unavailable")
	m.Boundary(time.Millisecond)
	m.Harvested("DONE", time.Millisecond)
	m.JournalSynced(time.Millisecond)
	m.Refused()
	m.Sent(100, 2)
	m.Probed(ProbeAllowed, true)
	m.Watch(func() State {
		return State{
			Sessions: map[string]int{"READY": 2}, Sandboxes: map[string]int{"runc": 2}, Running: 1, Queued: 3, MemoryReserved: 5,
			Folders: map[string]string{t.TempDir(): "state", "/nowhere": "workspaces"},
		}
	})
	return m
}

func families(t *testing.T, m *Metrics) []string {
	t.Helper()
	all, err := m.registry.Gather()
	require.NoError(t, err)
	var names []string
	for _, f := range all {
		if strings.HasPrefix(f.GetName(), prefix) {
			names = append(names, f.GetName())
		}
	}
	return names
}

func TestNamesAreAsPrometheusWantsThem(t *testing.T) {
	problems, err := testutil.GatherAndLint(everything(t).registry)
	require.NoError(t, err)
	require.Empty(t, problems)
}

func TestEveryMetricIsInTheOperatorsTableAndTheOtherWayRound(t *testing.T) {
	b, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	var told []string
	for _, found := range regexp.MustCompile("(?m)^\\| `("+prefix+"[a-z_]+)").FindAllStringSubmatch(string(b), -1) {
		told = append(told, found[1])
	}
	slices.Sort(told)
	require.Equal(t, families(t, everything(t)), told)
}

func TestEachEventCounts(t *testing.T) {
	m := everything(t)
	require.InDelta(t, 1, testutil.ToFloat64(m.startFailures.WithLabelValues("runc")), 0)
	require.InDelta(t, 1, testutil.ToFloat64(m.execs.WithLabelValues("EXITED")), 0)
	require.InDelta(t, 100, testutil.ToFloat64(m.bytesOut), 0)
	require.InDelta(t, 1, testutil.ToFloat64(m.probeHolds.WithLabelValues(ProbeAllowed)), 0)
	m.Probed(ProbeAllowed, false)
	require.InDelta(t, 0, testutil.ToFloat64(m.probeHolds.WithLabelValues(ProbeAllowed)), 0)
	require.InDelta(t, 0, testutil.ToFloat64(m.evicted.WithLabelValues(EvictedIdle)), 0, "a reason that never was is there, with 0")
	m.Evicted(EvictedIdle)
	require.InDelta(t, 1, testutil.ToFloat64(m.evicted.WithLabelValues(EvictedIdle)), 0)
}

func TestWithoutMetricsNothingIsCountedAndNothingFails(t *testing.T) {
	var m *Metrics
	m.SandboxStarted("runc", time.Second, nil)
	m.ExecAnswered("EXITED")
	m.ExecTook(0, 0)
	m.ExecRefused("x")
	m.Boundary(0)
	m.Harvested("x", 0)
	m.JournalSynced(0)
	m.Refused()
	m.Sent(1, 1)
	m.Probed(ProbeOther, true)
	m.Evicted(EvictedDied)
	require.Nil(t, m)
}

func serve(t *testing.T, healthy, ready func(context.Context) error) string {
	t.Helper()
	s, err := Serve(Options{Metrics: everything(t), Address: "127.0.0.1:0", Healthy: healthy, Ready: ready})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s.Addr()
}

func fine(context.Context) error { return nil }

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	tr := &http.Transport{DisableKeepAlives: true}
	res, err := tr.RoundTrip(req)
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(b)
}

func TestMetricsAndHealthAreServed(t *testing.T) {
	at := "http://" + serve(t, fine, func(context.Context) error { return errors.New("the node is drained") })
	code, body := get(t, at+"/metrics")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, body, "sandbox_agent_execs_total{status=\"EXITED\"} 1\n")
	require.Contains(t, body, "sandbox_agent_exec_queue_length 3\n")
	require.Contains(t, body, "go_goroutines ")
	code, body = get(t, at+"/healthz")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "ok\n", body)
	code, body = get(t, at+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, "the node is drained\n", body)
	code, _ = get(t, at+"/debug/pprof/")
	require.Equal(t, http.StatusNotFound, code)
}

func TestATakenAddressIsSaid(t *testing.T) {
	at := serve(t, fine, fine)
	_, err := Serve(Options{Metrics: New("v1"), Address: at})
	require.ErrorContains(t, err, "metrics.listen")
}

func TestPeersThatSayNothingKeepNobodyOut(t *testing.T) {
	at := serve(t, fine, fine)
	for range mostConnections - 1 {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
		require.NoError(t, err)
		defer c.Close()
	}
	code, _ := get(t, "http://"+at+"/healthz")
	require.Equal(t, http.StatusOK, code)
}
