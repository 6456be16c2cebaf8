package faults

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// overContainerd says whether a point is one of containerd's runtime.
func overContainerd(point string) bool { return strings.HasPrefix(point, "containerd.") }

// madeOverContainerd are the operations that begin and end sandboxes.
var madeOverContainerd = []string{"exec that needs a new sandbox", "start after the sandbox died", "create", "retire beside a running exec"}

// TestP6OverContainerdAnAgentThatIsKilledBetweenAnyTwoStepsNeverLiesAfterwards is the same over runc in a real containerd,
// with an image as root file system, at the points of that runtime: and each time nothing is left of it in containerd
// either but what the session's one sandbox has.
func TestP6OverContainerdAnAgentThatIsKilledBetweenAnyTwoStepsNeverLiesAfterwards(t *testing.T) {
	t.Parallel()
	needAgent(t)
	d := containerd.Start(t, "runc")
	digest := d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "mkdir", "flock", "sleep", "git"))
	a := newAgent(t, fmt.Sprintf("runtime: {default: runc, allowed: [runc]}\ncontainerd: {address: %s}\nrootfs: localhost/tools@%s\n", d.Address, digest))
	c := &crashCase{agent: a, repo: testkit.Repo(t, owner)}
	crashed, tried := map[string]int{}, 0
	for _, op := range operations() {
		if !slices.Contains(madeOverContainerd, op.name) {
			continue
		}
		t.Run(op.name, func(t *testing.T) {
			c.T, d.T = t, t
			_, passed := c.run(op, "", 0)
			c.keptBy(d)
			order, times := pointsOf(passed)
			for _, point := range slices.DeleteFunc(order, func(p string) bool { return !overContainerd(p) }) {
				for _, count := range countsOf(times[point]) {
					if !long() && (crashed[point] > 0 || count > 1) {
						continue
					}
					tried++
					t.Logf("killed at %s, the %d. time", point, count)
					if died, _ := c.run(op, point, count); died {
						crashed[point]++
					}
					c.keptBy(d)
				}
			}
		})
		c.T, d.T = t, t
		if t.Failed() {
			return
		}
	}
	t.Logf("%d calls that were to be cut short, killed at %d points, 0 violations", tried, len(crashed))
	requireAll(t, crashed, overContainerd)
	if c.s != nil {
		c.end()
	}
	c.keptBy(d)
}

// keptBy requires that containerd comes to have nothing of any sandbox but the session's.
func (c *crashCase) keptBy(d *containerd.Daemon) {
	c.T.Helper()
	sandbox := ""
	if c.s != nil {
		sandbox = c.s.get().GetSandbox().GetId()
	}
	left := func() map[string][]string {
		keeps := d.Keeps()
		delete(keeps, sandbox)
		return keeps
	}
	for end := time.Now().Add(patience); len(left()) > 0; time.Sleep(poll) {
		if time.Now().After(end) {
			require.Empty(c.T, left(), "what containerd has of sandboxes that are gone; there is %q", sandbox)
		}
	}
}
