package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// overContainerd says whether a point is one of containerd's runtime.
func overContainerd(point string) bool { return strings.HasPrefix(point, "containerd.") }

// ofGuests says whether only the start of a sandbox with a kernel of its own comes by a point.
func ofGuests(point string) bool { return strings.HasPrefix(point, "containerd.guest-") }

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
	requireAll(t, crashed, func(point string) bool { return overContainerd(point) && !ofGuests(point) })
	if c.s != nil {
		c.end()
	}
	c.keptBy(d)
}

// TestP6UnderGVisorAnAgentThatIsKilledWhileASandboxStartsLeavesNothingOfItsImage is the same for what only such a sandbox has: an
// image that is mounted on the node.
func TestP6UnderGVisorAnAgentThatIsKilledWhileASandboxStartsLeavesNothingOfItsImage(t *testing.T) {
	t.Parallel()
	needAgent(t)
	d := containerd.Start(t, "runc", "gvisor")
	digest := d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "mkdir", "flock", "git"))
	a := newAgent(t, fmt.Sprintf("runtime: {default: gvisor, allowed: [gvisor]}\ncontainerd: {address: %s}\nrootfs: localhost/tools@%s\n", d.Address, digest))
	c := &crashCase{agent: a, repo: testkit.Repo(t, owner)}
	create := operations()[slices.IndexFunc(operations(), func(o operation) bool { return o.name == "create" })]
	points := slices.DeleteFunc(namedPoints(t), func(p string) bool { return !ofGuests(p) })
	require.NotEmpty(t, points)
	if long() {
		points = append(points, "containerd.image-leased", "containerd.image-viewed", "containerd.prepared", "containerd.container-made", "containerd.init-waits", "containerd.started")
	}
	for _, point := range points {
		died, _ := c.run(create, point, 1)
		require.True(t, died, "nothing comes by %s", point)
		c.keptBy(d)
		require.Empty(t, mountsBelow(t, a.State), "an image is mounted, and no sandbox is there")
	}

	s := c.fresh()
	require.Equal(t, digest, s.get().GetSandbox().GetProvenance().GetRootfsDigest())
	require.Len(t, mountsBelow(t, a.State), 1, "the session's sandbox has its image mounted")
	result := s.settle(s.request(""))
	key, err := verify.LoadKey(filepath.Join(a.State, "keys", result.GetSandboxId()+".pub"))
	require.NoError(t, err)
	p, err := verify.Envelope(result.GetReceipt(), key)
	require.NoError(t, err)
	require.Equal(t, digest, p.Provenance.RootfsDigest)
	c.end()
	c.keptBy(d)
	require.Empty(t, mountsBelow(t, a.State))
}

// mountsBelow are the mount points below a folder.
func mountsBelow(t *testing.T, dir string) (points []string) {
	t.Helper()
	for _, line := range strings.Split(string(read("/proc/self/mountinfo")), "\n") {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			points = append(points, f[4])
		}
	}
	return points
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

func TestP14ContainerdsFullDiskIsSaidAndTakesNothingElse(t *testing.T) {
	t.Parallel()
	needAgent(t)
	disk := testkit.StateDir(t)
	require.NoError(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "mode=0711,size=64m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(disk, unix.MNT_DETACH)) })
	d := containerd.StartOn(t, filepath.Join(disk, "root"), "runc")
	digest := d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "mkdir", "flock"))
	a := newAgent(t, fmt.Sprintf("runtime: {default: runc, allowed: [runc]}\ncontainerd: {address: %s}\nrootfs: localhost/tools@%s\n", d.Address, digest))
	t.Cleanup(func() { _ = os.Remove(filepath.Join(disk, "filler")) })

	full := filler(t, disk, 1<<20)
	repo := testkit.Repo(t, owner)
	s := a.unborn(repo)
	_, err := s.Client.Sessions.CreateSession(context.Background(), s.create)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "P14: %v", err)
	require.ErrorContains(t, err, "the disk of containerd's snapshotter is full ("+disk)
	require.ErrorContains(t, err, "enlarge it")
	require.NoDirExists(t, s.worktree, "what was made for it is gone")
	require.Empty(t, a.left())
	_, err = s.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.Equal(t, connect.CodeNotFound, codeOf(err), "%v", err)
	a.Restart()

	require.NoError(t, os.Remove(full))
	s = a.session(repo)
	s.works()
	filler(t, disk, 0)
	s.works()
	a.Restart()
	s.works()
	s.same()
}
