package hostkernel

import (
	"os"
	"path/filepath"
	"strings"
	"time"
)

// How a start keeps migrations cheap: a migration waits for an RCU grace period (10 ms and more) unless another one has
// begun or ended within the last one (cgroup_threadgroup_rwsem, kernel/rcu/sync.c). A start makes a dozen: the
// container's init into each hierarchy, and, right after it, the first command's launcher into its slot.
const (
	warmEvery = 4 * time.Millisecond
	warmAfter = 40 * time.Millisecond // after the container is there; the first launcher joins within that
	warmMost  = time.Second
)

// KeepWarm moves the agent into the cgroup that it is in already, again and again, until warmAfter has passed since
// stop was called. It changes nothing else.
func KeepWarm(all []Hierarchy) (stop func()) {
	procs := ownProcs(all)
	if procs == "" {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(warmEvery)
		defer tick.Stop()
		most := time.After(warmMost)
		for {
			if WriteCgroup(procs, "0") != nil {
				return // only speed is lost
			}
			select {
			case <-tick.C:
			case <-done:
				return
			case <-most:
				return
			}
		}
	}()
	return func() { time.AfterFunc(warmAfter, func() { close(done) }) }
}

// ownProcs is the cgroup.procs of this process's own cgroup in the Hierarchy that has the pids controller.
func ownProcs(all []Hierarchy) string {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for _, h := range all {
		if !h.Has("pids") {
			continue
		}
		for _, line := range strings.Split(string(b), "\n") {
			f := strings.SplitN(line, ":", 3)
			if len(f) == 3 && (h.V2 && f[0] == "0" || !h.V2 && v1Same(f[1], h.controllers)) {
				return filepath.Join(h.Path(strings.TrimSuffix(f[2], "/")), "cgroup.procs")
			}
		}
	}
	return ""
}

func v1Same(field string, controllers []string) bool {
	return strings.Join(v1Controllers(field), ",") == strings.Join(controllers, ",")
}
