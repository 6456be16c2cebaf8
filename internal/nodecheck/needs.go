package nodecheck

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Runtimes are the names that a check can be asked about.
var Runtimes = []string{embeddedRuntime, config.RuncRuntime, config.GvisorRuntime, config.KataRuntime}

const embeddedRuntime = "embedded"

// Needs are what a node is checked for.
type Needs struct {
	// Runtimes are those of runtime.allowed, and those that were asked for.
	Runtimes []string
	// By are the needs that these, the networks and the root file system come to.
	By []Need
	// StateDir and WorkspaceRoots are absolute paths; they need not exist.
	StateDir       string
	WorkspaceRoots []string
	// Pids is the largest number of processes of a command (limits.pids).
	Pids       int64
	Containerd config.Containerd
	CNI        config.NetworkCNI
}

// NeedsOf are the needs of a configuration, and of further runtimes that somebody asks about. An unknown one is an error.
func NeedsOf(c *config.Config, asked []string) (Needs, error) {
	n := Needs{
		Runtimes: slices.Clone(c.Runtime.Allowed), StateDir: c.StateDir, WorkspaceRoots: c.Workspace.Roots, Pids: c.Limits.Pids, Containerd: c.Containerd, CNI: c.Network.CNI,
	}
	for _, r := range asked {
		if !slices.Contains(Runtimes, r) {
			return n, fmt.Errorf("there is no runtime %q: name one of %s", r, strings.Join(Runtimes, ", "))
		}
		if !slices.Contains(n.Runtimes, r) {
			n.Runtimes = append(n.Runtimes, r)
		}
	}
	n.By = []Need{NeedAgent}
	for _, r := range n.Runtimes {
		n.By = append(n.By, needsOfRuntime[r]...)
	}
	if runtime.KindOfRootfs(c.Rootfs) == runtime.RootfsImage {
		n.By = append(n.By, NeedImage)
	}
	for _, mode := range c.Network.Allowed {
		if mode != config.NoNetwork {
			n.By = append(n.By, NeedNetwork)
		}
		if mode == config.CNINetwork {
			n.By = append(n.By, NeedCNI)
		}
	}
	return n, nil
}

var needsOfRuntime = map[string][]Need{
	embeddedRuntime:      {NeedShared},
	config.RuncRuntime:   {NeedShared, NeedContainerd, NeedRunc},
	config.GvisorRuntime: {NeedContainerd, NeedGVisor},
	config.KataRuntime:   {NeedContainerd, NeedKata},
}

func (n Needs) has(x Need) bool { return slices.Contains(n.By, x) }
