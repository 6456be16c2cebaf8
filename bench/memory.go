package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// memory is what processes take, bytes. PSS counts a page that n processes share as its nth part (proc(5),
// smaps_rollup).
type memory struct {
	// One sandbox that waits: receiptd, and a pid1 with its launcher.
	Fresh []processMemory `json:"fresh"`
	// The same one after execsBefore commands and a rest.
	Used []processMemory `json:"used"`
	// The agent, with one sandbox and nothing run; and after everything else of this run.
	AgentFresh processMemory `json:"agent_fresh"`
	AgentUsed  processMemory `json:"agent_used"`
}

type processMemory struct {
	Name string `json:"name"`
	PSS  int64  `json:"pss_bytes"`
	RSS  int64  `json:"rss_bytes"`
}

const (
	execsBefore = 500
	// idle is long enough for a sandbox that rests to give memory back.
	idle = 2 * time.Second
)

func measureMemory(ctx context.Context, a *agent, s *session) (*memory, error) {
	m := &memory{}
	if err := rest(ctx, idle); err != nil {
		return nil, err
	}
	var err error
	if m.AgentFresh, err = memoryOf(a.cmd.Process.Pid); err != nil {
		return nil, err
	}
	if m.Fresh, err = sandboxMemory(a); err != nil {
		return nil, err
	}
	for range execsBefore {
		if _, err := s.exec(ctx, "true"); err != nil {
			return nil, err
		}
	}
	if err := rest(ctx, idle); err != nil {
		return nil, err
	}
	m.Used, err = sandboxMemory(a)
	return m, err
}

func (m *memory) addAgent(a *agent) (err error) {
	m.AgentUsed, err = memoryOf(a.cmd.Process.Pid)
	return err
}

// sandboxMemory is that of the agent's only sandbox: everything that descends from the agent.
func sandboxMemory(a *agent) ([]processMemory, error) {
	// Each is the child of the one before. By name the last two can't be known: they are executed by descriptor, and
	// have its number for a name.
	roles := []string{"receiptd", "pid1", "launcher"}
	pids := descendants(a.cmd.Process.Pid)
	if len(pids) != len(roles) {
		return nil, fmt.Errorf("measuring memory: one sandbox that waits is %s; seen: %d processes", strings.Join(roles, ", "), len(pids))
	}
	var all []processMemory
	for i, pid := range pids {
		m, err := memoryOf(pid)
		if err != nil {
			return nil, err
		}
		m.Name = roles[i]
		all = append(all, m)
	}
	return all, nil
}

func totalPSS(all []processMemory) (sum int64) {
	for _, p := range all {
		sum += p.PSS
	}
	return sum
}

func memoryOf(pid int) (processMemory, error) {
	rollup, err := os.ReadFile(procFile(pid, "smaps_rollup"))
	if err != nil {
		return processMemory{}, err
	}
	m := processMemory{Name: "sandbox-agent"}
	for _, line := range strings.Split(string(rollup), "\n") {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		kib, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "Pss:":
			m.PSS = kib << 10
		case "Rss:":
			m.RSS = kib << 10
		}
	}
	return m, nil
}

func procFile(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// descendants are the pids of a process's children, their children and so on, a parent before its children.
func descendants(pid int) []int {
	children := map[int][]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, _ := os.ReadFile(procFile(child, "stat"))
		// The second field is the name, in brackets, and may hold anything.
		_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
		if f := strings.Fields(rest); len(f) > 1 {
			parent, _ := strconv.Atoi(f[1])
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for queue := children[pid]; len(queue) > 0; queue = queue[1:] {
		all = append(all, queue[0])
		queue = append(queue, children[queue[0]]...)
	}
	return all
}

// size is a program on disk, bytes.
type size struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

func measureSizes(p *place) ([]size, error) {
	var all []size
	for _, name := range programs {
		st, err := os.Stat(filepath.Join(p.bin, name))
		if err != nil {
			return nil, err
		}
		all = append(all, size{name, st.Size()})
	}
	return all, nil
}
