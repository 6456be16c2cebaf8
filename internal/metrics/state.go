package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// State is what is looked up at each scrape.
type State struct {
	// Sessions are counted by their state; every state is there, also with none.
	Sessions map[string]int
	// Sandboxes are counted by their runtime; each allowed one is there.
	Sandboxes map[string]int
	// Running and Queued are the execs that run and that wait for their turn.
	Running, Queued int
	// MemoryReserved is the sum of the sandboxes' memory limits, bytes.
	MemoryReserved int64
	// Folders are those whose file systems are told of, by what they are for.
	Folders map[string]string
}

// Watch has the state told at each scrape. look must be quick, and must wait for nothing that a command can hold up.
func (m *Metrics) Watch(look func() State) { m.registry.MustRegister(&states{look}) }

type states struct{ look func() State }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prefix+name, help, labels, nil)
}

var (
	sessionsDesc  = desc("sessions", "Sessions of the node, by their state.", "state")
	sandboxesDesc = desc("sandboxes", "Sandboxes that there are, by their runtime.", "runtime")
	runningDesc   = desc("execs_running", "Execs whose command runs.")
	queueDesc     = desc("exec_queue_length", "Execs that wait for their turn.")
	memoryDesc    = desc("memory_reserved_bytes", "Memory limits of all sandboxes together.")
	sizeDesc      = desc("filesystem_size_bytes", "Size of the file system of a folder: the agent's state, or a root of workspaces.", "folder", "path")
	freeDesc      = desc("filesystem_avail_bytes", "What is free on the file system of a folder, for who is not root.", "folder", "path")
	usedDesc      = desc("filesystem_used_bytes", "What is used of the file system of a folder.", "folder", "path")
	inodesDesc    = desc("filesystem_free_inodes", "Inodes that are free on the file system of a folder.", "folder", "path")
)

// Describe is prometheus.Collector's.
func (s *states) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sessionsDesc, sandboxesDesc, runningDesc, queueDesc, memoryDesc, sizeDesc, freeDesc, usedDesc, inodesDesc} {
		ch <- d
	}
}

// Collect is prometheus.Collector's.
func (s *states) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	st := s.look()
	for state, n := range st.Sessions {
		gauge(sessionsDesc, float64(n), state)
	}
	for runtime, n := range st.Sandboxes {
		gauge(sandboxesDesc, float64(n), runtime)
	}
	gauge(runningDesc, float64(st.Running))
	gauge(queueDesc, float64(st.Queued))
	gauge(memoryDesc, float64(st.MemoryReserved))
	for path, folder := range st.Folders {
		var fs unix.Statfs_t
		if err := unix.Statfs(path, &fs); err != nil {
			continue // a root of workspaces that nobody has made
		}
		block := float64(fs.Bsize)
		gauge(sizeDesc, float64(fs.Blocks)*block, folder, path)
		gauge(freeDesc, float64(fs.Bavail)*block, folder, path)
		gauge(usedDesc, float64(fs.Blocks-fs.Bfree)*block, folder, path)
		gauge(inodesDesc, float64(fs.Ffree), folder, path)
	}
}
