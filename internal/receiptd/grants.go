package receiptd

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/grants"
)

// TakeGrants fills the file system of the session's grants, which is mounted and empty, with what it reads, gives it to the
// command's ids and makes it read-only. It is how grants get into a guest, to which no mount can be attached: over the
// standard input of a process in it, from one memory into another.
func TakeGrants(in io.Reader, folder string, uid, gid uint32) error {
	// It holds the grants; receiptd's own memory never does.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making the process that takes grants undumpable: %w", err)
	}
	// One value, whose end shows by itself: a stream's end needs another call of the container runtime.
	var given []runtime.Grant
	if err := json.NewDecoder(in).Decode(&given); err != nil {
		return fmt.Errorf("reading the grants: %w", err)
	}
	top, err := os.Open(folder)
	if err != nil {
		return fmt.Errorf("opening the grants' file system: %w", err)
	}
	defer top.Close()
	if err := grants.Write(top, uid, gid, given); err != nil {
		return err
	}
	if err := top.Chmod(0o555); err != nil {
		return fmt.Errorf("making the grants' file system readable: %w", err)
	}
	const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("", folder, "", flags, ""); err != nil {
		return fmt.Errorf("making the grants' file system read-only: %w", os.NewSyscallError("mount", err))
	}
	return nil
}
