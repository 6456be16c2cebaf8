package receiptd

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// handover is a receiptd that waits for descriptors.
type handover struct {
	t    *testing.T
	path string
	got  chan handedOver
}

type handedOver struct {
	files []*os.File
	err   error
}

func awaitHandover(t *testing.T, want int) *handover {
	t.Helper()
	h := &handover{t: t, path: filepath.Join(testkit.StateDir(t), "handover.sock"), got: make(chan handedOver, 1)}
	go func() {
		files, err := receiveSlots(h.path, want)
		h.got <- handedOver{files, err}
	}()
	return h
}

func (h *handover) dial() *net.UnixConn {
	h.t.Helper()
	var conn *net.UnixConn
	require.Eventually(h.t, func() bool {
		var err error
		conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: h.path, Net: "unix"})
		return err == nil
	}, 10*time.Second, time.Millisecond)
	h.t.Cleanup(func() { conn.Close() })
	return conn
}

// hand sends n descriptors of one file in one message.
func (h *handover) hand(conn *net.UnixConn, path string, n int) {
	h.t.Helper()
	f, err := os.Open(path)
	require.NoError(h.t, err)
	defer f.Close()
	fds := make([]int, n)
	for i := range fds {
		fds[i] = int(f.Fd())
	}
	_, _, err = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil)
	require.NoError(h.t, err)
}

func (h *handover) ends() handedOver {
	h.t.Helper()
	select {
	case got := <-h.got:
		return got
	case <-time.After(30 * time.Second):
		h.t.Fatal("receiptd still waits for descriptors")
		return handedOver{}
	}
}

// openOf counts this process's descriptors of a file.
func openOf(t *testing.T, path string) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == path {
			n++
		}
	}
	return n
}

func TestTheHandedDescriptorsAreKnownByTheirNumbers(t *testing.T) {
	h := awaitHandover(t, 3)
	conn := h.dial()
	h.hand(conn, "/proc/self/status", 3)
	answer := make([]byte, 2)
	n, err := conn.Read(answer)
	require.NoError(t, err)
	require.Equal(t, 1, n, "one byte says that they are taken")
	got := h.ends()
	require.NoError(t, got.err)
	defer closeAll(got.files)
	lookup := handed(got.files)
	for _, fd := range []int32{3, 4, 5} {
		f, err := lookup(fd, "c0")
		require.NoError(t, err)
		require.Same(t, got.files[fd-3], f)
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.Equal(t, unix.FD_CLOEXEC, flags&unix.FD_CLOEXEC, "no pid1 inherits it")
	}
	for _, fd := range []int32{0, 2, 6} {
		_, err := lookup(fd, "c0")
		require.ErrorContains(t, err, "is not one that was handed over")
	}
	f, err := lookup(-1, "c0")
	require.NoError(t, err)
	require.Nil(t, f, "there need not be one")
}

func TestP16AHandOverThatIsNotWhatWasAgreedIsAnErrorAndLeavesNoDescriptor(t *testing.T) {
	const status = "/proc/self/status"
	for name, c := range map[string]struct {
		hand func(h *handover, conn *net.UnixConn)
		says string
	}{
		"too few":         {func(h *handover, conn *net.UnixConn) { h.hand(conn, status, 2) }, "2 descriptors came instead of 3"},
		"too many":        {func(h *handover, conn *net.UnixConn) { h.hand(conn, status, 4) }, "4 descriptors came instead of 3"},
		"more than fit":   {func(h *handover, conn *net.UnixConn) { h.hand(conn, status, maxHanded+10) }, "flags"},
		"a word and none": {func(_ *handover, conn *net.UnixConn) { _, _ = conn.Write([]byte{0}) }, "0 descriptors came instead of 3"},
		"an early end":    {func(_ *handover, conn *net.UnixConn) { conn.Close() }, "taking over the commands' cgroups"},
		"an end that does not wait for the answer": {func(h *handover, conn *net.UnixConn) {
			h.hand(conn, status, 2)
			conn.Close()
		}, "2 descriptors came instead of 3"},
	} {
		t.Run(name, func(t *testing.T) {
			h := awaitHandover(t, 3)
			conn := h.dial()
			before := openOf(t, fmt.Sprintf("/proc/%d/status", os.Getpid()))
			c.hand(h, conn)
			got := h.ends()
			require.ErrorContains(t, got.err, c.says)
			require.Empty(t, got.files)
			require.Equal(t, before, openOf(t, fmt.Sprintf("/proc/%d/status", os.Getpid())))
			_, err := conn.Read(make([]byte, 1))
			require.Error(t, err, "whoever handed them over is not told that they are taken")
		})
	}
}

func TestASecondHandOverFindsNoSocket(t *testing.T) {
	h := awaitHandover(t, 1)
	first, waiting := h.dial(), h.dial()
	h.hand(first, "/proc/self/status", 1)
	got := h.ends()
	require.NoError(t, got.err)
	defer closeAll(got.files)
	_, err := waiting.Read(make([]byte, 1))
	require.Error(t, err, "who was in the queue is refused")
	require.NoFileExists(t, h.path)
	_, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: h.path, Net: "unix"})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestNobodyButTheOwnerReachesTheHandOver(t *testing.T) {
	h := awaitHandover(t, 1)
	conn := h.dial()
	st, err := os.Stat(h.path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	conn.Close()
	require.Error(t, h.ends().err)
}

func TestP16OnlyFilesOfACgroupAreTakenForOne(t *testing.T) {
	regular, err := os.OpenFile(filepath.Join(testkit.StateDir(t), "cgroup.procs"), os.O_CREATE|os.O_RDWR, 0o600)
	require.NoError(t, err)
	defer regular.Close()
	_, err = regular.WriteString("0")
	require.NoError(t, err, "joining by it would succeed, and limit nothing")
	cgroup, err := os.Open(ownCgroupProcs(t))
	require.NoError(t, err)
	defer cgroup.Close()

	lookup := handed([]*os.File{cgroup, regular})
	slot := func(join, procs, oom, peak int32) []*receiptdv1.CgroupSlot {
		return []*receiptdv1.CgroupSlot{{Name: "c0", JoinFds: []int32{join}, ProcsFd: procs, OomFd: oom, PeakFd: peak}}
	}
	slots, err := openSlots(slot(3, 3, -1, -1), lookup)
	require.NoError(t, err)
	require.Len(t, slots, 1)
	require.Equal(t, []*os.File{cgroup}, slots[0].Join)
	for name, s := range map[string][]*receiptdv1.CgroupSlot{
		"to join by": slot(4, 3, -1, -1), "the processes": slot(3, 4, -1, -1), "the memory's end": slot(3, 3, 4, -1), "the peak": slot(3, 3, -1, 4),
	} {
		_, err := openSlots(s, lookup)
		require.ErrorContains(t, err, "cgroup c0: descriptor 4 is no file of a cgroup", name)
	}
	_, err = openSlots(slot(-1, 3, -1, -1), lookup)
	require.ErrorContains(t, err, "there is no descriptor -1 to join it by")
	_, err = openSlots(slot(9, 3, -1, -1), lookup)
	require.ErrorContains(t, err, "is not one that was handed over")
}

// ownCgroupProcs is a cgroup.procs of the test's machine.
func ownCgroupProcs(t *testing.T) string {
	t.Helper()
	testkit.Need(t, testkit.CgroupV1orV2)
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && strings.HasPrefix(f[2], "cgroup") {
			return filepath.Join(f[1], "cgroup.procs")
		}
	}
	t.Fatal("no cgroup hierarchy is mounted")
	return ""
}
