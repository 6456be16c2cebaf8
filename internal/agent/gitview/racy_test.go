package gitview

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestAFolderOfAFileSystemWithWholeSecondsSettlesLater(t *testing.T) {
	at := func(after time.Duration) unix.Timespec { return unix.NsecToTimespec(time.Now().Add(-after).UnixNano()) }
	racy := func(change unix.Timespec) bool {
		p := &printer{settled: settled(change)}
		return p.racy()
	}
	require.True(t, racy(at(0)))
	require.False(t, racy(at(time.Second+time.Millisecond)), "the control case: times are fine there")
	// Of whole seconds, one that began just now goes on for one more: a change within it looks the same.
	whole := at(time.Second)
	whole.Nsec = 0
	require.True(t, racy(whole))
	whole.Sec -= 3
	require.False(t, racy(whole))
	require.True(t, racy(at(-time.Hour)), "a clock that was set back")
}
