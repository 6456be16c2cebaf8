package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// prefix begins each name of the agent's own.
const prefix = "sandbox_agent_"

// Why a sandbox was ended although no caller had asked for that.
const (
	EvictedIdle  = "idle"  // lifetime.idle
	EvictedAge   = "age"   // lifetime.max
	EvictedGrant = "grant" // one of the session's grants has expired
	EvictedDrain = "drain" // the node is drained
	EvictedDied  = "died"  // it ended by itself
)

// What a check of an egress probe is about; see "sandbox-agent egress probe".
const (
	ProbeAllowed    = "allowed"
	ProbeOther      = "other"
	ProbeAddress    = "address"
	ProbeMetadata   = "metadata"
	ProbeManagement = "management"
)

// ProbeChecks are all of them.
var ProbeChecks = []string{ProbeAllowed, ProbeOther, ProbeAddress, ProbeMetadata, ProbeManagement}

// Metrics are what is counted. A nil one counts nothing: its methods can be called all the same. They are safe for concurrent use.
type Metrics struct {
	registry      *prometheus.Registry
	sandboxStart  *prometheus.HistogramVec
	startFailures *prometheus.CounterVec
	evicted       *prometheus.CounterVec
	execs         *prometheus.CounterVec
	refusedExecs  *prometheus.CounterVec
	execTime      prometheus.Histogram
	execOverhead  prometheus.Histogram
	boundaryWait  prometheus.Histogram
	harvest       *prometheus.HistogramVec
	journalSync   prometheus.Histogram
	refusals      prometheus.Counter
	refusedOut    prometheus.Counter
	bytesOut      prometheus.Counter
	probes        *prometheus.CounterVec
	probeHolds    *prometheus.GaugeVec
}

// The buckets of the histograms, in seconds.
var (
	starts  = []float64{.05, .1, .2, .3, .5, .75, 1, 2, 5, 10, 30, 60, 120}
	lives   = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 5, 15, 60, 300, 900, 3600}
	moments = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30}
)

// New makes metrics of an agent of this version, with those of its process and of Go's runtime.
func New(version string) *Metrics {
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: buckets}
	}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: prefix + name, Help: help}
	}
	m := &Metrics{
		registry:      prometheus.NewRegistry(),
		sandboxStart:  prometheus.NewHistogramVec(histogram("sandbox_start_seconds", "Time from the decision to start a sandbox until it has proved itself.", starts), []string{"runtime"}),
		startFailures: prometheus.NewCounterVec(counter("sandbox_start_failures_total", "Sandboxes that did not start, or did not prove themselves."), []string{"runtime"}),
		evicted:       prometheus.NewCounterVec(counter("sandboxes_evicted_total", "Sandboxes that were ended although no caller had asked for it."), []string{"reason"}),
		execs:         prometheus.NewCounterVec(counter("execs_total", "Execs that were answered for the first time, by status."), []string{"status"}),
		refusedExecs:  prometheus.NewCounterVec(counter("execs_refused_total", "Execs that had come to their turn and never started, by the code of the error."), []string{"code"}),
		execTime:      prometheus.NewHistogram(histogram("exec_seconds", "Time from the request of an exec until its answer.", lives)),
		execOverhead:  prometheus.NewHistogram(histogram("exec_overhead_seconds", "Time from the request of an exec until its answer, without that in which its command ran: waiting for its turn and for a sandbox, receipt, harvest, records.", moments)),
		boundaryWait:  prometheus.NewHistogram(histogram("boundary_wait_seconds", "Time from the end of a command's own process until nothing of the command was left.", moments)),
		harvest:       prometheus.NewHistogramVec(histogram("harvest_seconds", "Time of bringing a command's Git work over, by its result.", moments), []string{"result"}),
		journalSync:   prometheus.NewHistogram(histogram("journal_sync_seconds", "Time of writing a group of the journal's changes durably.", moments)),
		refusals:      prometheus.NewCounter(counter("connections_refused_total", "Connections and names that were refused to commands and told (at most 50 a second of each sandbox are, by each layer of rules).")),
		refusedOut:    prometheus.NewCounter(counter("packets_refused_total", "Packets of commands that their egress policy refused.")),
		bytesOut:      prometheus.NewCounter(counter("network_sent_bytes_total", "Bytes that commands have sent over the network, headers included.")),
		probes:        prometheus.NewCounterVec(counter("egress_probe_checks_total", "Checks of egress probes, by whether the policy held."), []string{"check", "holds"}),
		probeHolds:    prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + "egress_probe_holds", Help: "Whether the newest egress probe saw the policy hold: 1 or 0; absent before the first."}, []string{"check"}),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + "build_info", Help: "1, with the agent's version.", ConstLabels: prometheus.Labels{"version": version}})
	info.Set(1)
	m.registry.MustRegister(info, m.sandboxStart, m.startFailures, m.evicted, m.execs, m.refusedExecs, m.execTime, m.execOverhead, m.boundaryWait,
		m.harvest, m.journalSync, m.refusals, m.refusedOut, m.bytesOut, m.probes, m.probeHolds,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, reason := range []string{EvictedIdle, EvictedAge, EvictedGrant, EvictedDrain, EvictedDied} {
		m.evicted.WithLabelValues(reason)
	}
	return m
}

// SandboxStarted counts a start that took so long, or that failed.
func (m *Metrics) SandboxStarted(runtime string, took time.Duration, err error) {
	switch {
	case m == nil:
	case err != nil:
		m.startFailures.WithLabelValues(runtime).Inc()
	default:
		m.sandboxStart.WithLabelValues(runtime).Observe(took.Seconds())
	}
}

// Evicted counts a sandbox that was ended for one of the reasons above.
func (m *Metrics) Evicted(reason string) {
	if m != nil {
		m.evicted.WithLabelValues(reason).Inc()
	}
}

// ExecAnswered counts the first answer of an exec.
func (m *Metrics) ExecAnswered(status string) {
	if m != nil {
		m.execs.WithLabelValues(status).Inc()
	}
}

// ExecTook counts how long after its request an exec was answered, and how long its command ran of that.
func (m *Metrics) ExecTook(took, ran time.Duration) {
	if m != nil {
		m.execTime.Observe(took.Seconds())
		m.execOverhead.Observe(max(took-ran, 0).Seconds())
	}
}

// ExecRefused counts an exec that never started.
func (m *Metrics) ExecRefused(code string) {
	if m != nil {
		m.refusedExecs.WithLabelValues(code).Inc()
	}
}

// Boundary counts how long a command's boundary took after its end.
func (m *Metrics) Boundary(wait time.Duration) {
	if m != nil {
		m.boundaryWait.Observe(wait.Seconds())
	}
}

// Harvested counts a harvest.
func (m *Metrics) Harvested(result string, took time.Duration) {
	if m != nil {
		m.harvest.WithLabelValues(result).Observe(took.Seconds())
	}
}

// JournalSynced counts a durable write of the journal.
func (m *Metrics) JournalSynced(took time.Duration) {
	if m != nil {
		m.journalSync.Observe(took.Seconds())
	}
}

// Refused counts a refusal that was told.
func (m *Metrics) Refused() {
	if m != nil {
		m.refusals.Inc()
	}
}

// Sent counts what a command did over the network.
func (m *Metrics) Sent(bytes, refused uint64) {
	if m != nil {
		m.bytesOut.Add(float64(bytes))
		m.refusedOut.Add(float64(refused))
	}
}

// Probed counts one check of an egress probe, one of ProbeChecks.
func (m *Metrics) Probed(check string, holds bool) {
	if m == nil {
		return
	}
	word, value := "no", 0.0
	if holds {
		word, value = "yes", 1
	}
	m.probes.WithLabelValues(check, word).Inc()
	m.probeHolds.WithLabelValues(check).Set(value)
}
