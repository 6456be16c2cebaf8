package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// report is everything that one run measured, and on what.
type report struct {
	When    time.Time `json:"when"`
	Version string    `json:"version"`
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	// The load average of the minute before: well below the number of CPUs, or the run says little.
	Load       string       `json:"load_before"`
	Rounds     int          `json:"rounds"`
	Latency    []*series    `json:"latency"`
	Throughput []throughput `json:"throughput,omitempty"`
	Memory     *memory      `json:"memory,omitempty"`
	Sizes      []size       `json:"sizes,omitempty"`
	Aims       []aim        `json:"aims"`
}

func newReport(ctx context.Context, o options, a *agent) (*report, error) {
	info, err := a.client.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	if err != nil {
		return nil, a.client.Explain("asking the agent for its version", err)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, err
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return nil, err
	}
	return &report{
		When: time.Now().UTC(), Version: info.GetVersion(), Kernel: unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:]),
		CPUs: runtime.NumCPU(), Load: strings.Fields(string(load))[0], Rounds: o.rounds,
	}, nil
}

// write prints the tables, and writes the same as JSON where a file was named.
func (r *report) write(w io.Writer, file string) error {
	if file != "" {
		b, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "%s, version %s, Linux %s, %d CPUs, load before %s, %d rounds\n",
		r.When.Format("2006-01-02 15:04 UTC"), r.Version, r.Kernel, r.CPUs, r.Load, r.Rounds)
	for _, group := range []string{groupCommand, groupSandbox, groupSession, groupLayout, groupGit, groupCommit, groupPolicy, groupConnections} {
		r.writeGroup(w, group)
	}
	r.writeThroughput(w)
	r.writeMemory(w)
	r.writeAims(w)
	return nil
}

// table begins a table; its cells are separated by tabs, the first column is a name.
func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

func (r *report) writeGroup(w io.Writer, group string) {
	var rows, bases []*series
	for _, s := range r.Latency {
		if s.Group != group {
			continue
		}
		rows = append(rows, s)
		if s.Baseline && s.Samples > 0 {
			bases = append(bases, s)
		}
	}
	if len(rows) == 0 {
		return
	}
	t := table(w)
	fmt.Fprintf(t, "\n%s\tmedian ms\tp99 ms", group)
	for _, b := range bases {
		fmt.Fprintf(t, "\t× %s", b.Name)
	}
	fmt.Fprintln(t)
	var notes []string
	for _, s := range rows {
		if s.Missing != "" {
			notes = append(notes, s.Name+": "+s.Missing)
			continue
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f", s.Name, s.Median, s.P99)
		for _, b := range bases {
			fmt.Fprintf(t, "\t%.2f", s.Ratios[b.Name])
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	for _, n := range notes {
		fmt.Fprintln(w, n)
	}
}

func (r *report) writeThroughput(w io.Writer) {
	if len(r.Throughput) == 0 {
		return
	}
	t := table(w)
	fmt.Fprintf(t, "\nat a time\texec/s\tmedian ms\tp99 ms\tfloor/s\tbash/s\n")
	for _, x := range r.Throughput {
		fmt.Fprintf(t, "%d\t%.0f\t%.2f\t%.2f\t%.0f\t%.0f\n", x.AtATime, x.Exec, x.Median, x.P99, x.Floor, x.Bash)
	}
	t.Flush()
}

func (r *report) writeMemory(w io.Writer) {
	t := table(w)
	if m := r.Memory; m != nil {
		fmt.Fprintf(t, "\nmemory, MiB\tPSS\tRSS\n")
		for _, set := range []struct {
			when string
			all  []processMemory
		}{
			{"fresh", m.Fresh},
			{fmt.Sprintf("after %d execs", execsBefore), m.Used},
			{"with one sandbox", []processMemory{m.AgentFresh}},
			{"at the end", []processMemory{m.AgentUsed}},
		} {
			for _, p := range set.all {
				fmt.Fprintf(t, "%s, %s\t%.2f\t%.2f\n", p.Name, set.when, mebibytes(p.PSS), mebibytes(p.RSS))
			}
		}
	}
	if len(r.Sizes) > 0 {
		fmt.Fprintf(t, "\non disk, MB\t\n")
	}
	for _, s := range r.Sizes {
		fmt.Fprintf(t, "%s\t%.2f\n", s.Name, megabytes(s.Bytes))
	}
	t.Flush()
}

func mebibytes(n int64) float64 { return float64(n) / (1 << 20) }
func megabytes(n int64) float64 { return float64(n) / 1e6 }
