package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// newFillable is a node whose journal has a disk of its own. fill takes all of it, room gives it back.
func newFillable(t *testing.T) (n *node, fill, room func()) {
	t.Helper()
	n = newNode(t, func(c *config.Config) {
		dir := filepath.Join(c.StateDir, "journal")
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size=96m"))
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	})
	filler := filepath.Join(n.state, "journal", "filler")
	fill = func() {
		var st unix.Statfs_t
		require.NoError(t, unix.Statfs(filepath.Dir(filler), &st))
		f, err := os.Create(filler)
		require.NoError(t, err)
		require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize))
		require.NoError(t, f.Close())
	}
	return n, fill, func() { require.NoError(t, os.Remove(filler)) }
}

// An owner_epoch that is not on disk is nobody's: after a restart of the agent the one before would start things again,
// beside a command of whoever took it from the session.
func TestP8AnEpochThatIsNotRecordedIsNotTold(t *testing.T) {
	n, fill, room := newFillable(t)
	s := n.session("s")
	fill()
	_, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s", OwnerEpoch: s.GetOwnerEpoch()})
	require.ErrorIs(t, err, journal.ErrNoSpace)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, s.GetOwnerEpoch(), n.get("s").GetOwnerEpoch())
	room()
	claimed, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s", OwnerEpoch: s.GetOwnerEpoch()})
	require.NoError(t, err)
	require.Equal(t, s.GetOwnerEpoch()+1, claimed.GetOwnerEpoch())
}

// A sandbox that has to end does so also when there is no room to write that down; the session is its workspace's, and the
// sandbox's place taken, until there is, and then nobody has to ask.
func TestP5AStopWithoutRoomInTheJournalIsRecordedLater(t *testing.T) {
	n, fill, room := newFillable(t)
	s := n.session("s")
	box := n.agent.sessions["s"].current()
	fill()
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "s"})
	require.ErrorIs(t, err, journal.ErrNoSpace)
	require.True(t, box.dead(), "it has ended all the same")
	require.Equal(t, sandboxv1.Session_STOPPING, n.get("s").GetState())
	require.Len(t, n.agent.slots.taken, 1)
	room()
	got := n.until("s", sandboxv1.Session_IDLE)
	n.atRest("s")
	require.Equal(t, s.GetSandbox().GetId(), got.GetSandbox().GetId())
	require.True(t, got.GetSandbox().GetEvidence().GetComplete())
	require.Empty(t, n.agent.slots.taken)
	require.Equal(t, sandboxv1.ExecResult_EXITED, n.exec("s", "next", "true").GetStatus())
}

// The same where the stop was written down and its evidence could not be.
func TestP5EvidenceWithoutRoomInTheJournalIsRecordedLater(t *testing.T) {
	n, fill, room := newFillable(t)
	n.session("s")
	s := n.agent.sessions["s"]
	require.NoError(t, s.apply(EvStop, "", nil))
	fill()
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "s"})
	require.ErrorIs(t, err, journal.ErrNoSpace)
	require.Equal(t, sandboxv1.Session_STOPPING, n.get("s").GetState())
	require.Len(t, n.agent.slots.taken, 1)
	room()
	n.until("s", sandboxv1.Session_IDLE)
	n.atRest("s")
	require.Empty(t, n.agent.slots.taken)
}

// A sandbox that was refused for want of room was never begun: the session is what it was.
func TestASandboxThatCannotBeRecordedChangesNothing(t *testing.T) {
	n, fill, room := newFillable(t)
	n.session("s")
	n.retire("s")
	before := n.get("s")
	fill()
	_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "x", Command: "true"})
	require.ErrorIs(t, err, journal.ErrNoSpace)
	after := n.get("s")
	require.Equal(t, sandboxv1.Session_IDLE, after.GetState())
	require.Equal(t, before.GetGeneration(), after.GetGeneration())
	require.Equal(t, before.GetSandbox().GetId(), after.GetSandbox().GetId())
	require.Empty(t, n.agent.slots.taken)
	room()
	got := n.exec("s", "x", "true")
	require.Equal(t, sandboxv1.ExecResult_EXITED, got.GetStatus())
	require.Equal(t, before.GetGeneration()+1, got.GetGeneration())
}

// A harvest that the journal takes in no record is told nobody, and all that comes after it is recorded.
func TestAHarvestThatCannotBeRecordedIsNotKept(t *testing.T) {
	n := newNode(t)
	n.session("s")
	s := n.agent.sessions["s"]
	err := s.do(n.ctx(), func() error {
		return s.saveHarvest(true, &gitview.Harvest{Detail: strings.Repeat("x", journal.MaxValue)})
	})
	require.ErrorIs(t, err, journal.ErrBadKey)
	n.retire("s")
	require.Equal(t, sandboxv1.Session_IDLE, n.get("s").GetState())
}
