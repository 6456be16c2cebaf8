package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// stateDirs are the folders below state_dir that hold what the agent believes: its records, the receipts and the keys that
// verify them, the sandboxes' control sockets, and the workspaces' private Git folders. What it makes in a sandbox's own folders belongs to that sandbox's ids.
var stateDirs = []string{"journal", "receipts", "keys", "sandboxes", "workspaces"}

// CheckStateDir refuses a state folder, or one of those below it, that somebody else owns or can write to: who can put a
// file there can forge what the agent believes (P9). What does not exist yet is right. It is asked before anything is
// made in the folder.
func CheckStateDir(dir string) error {
	if err := checkOwn(dir); err != nil {
		return err
	}
	for _, name := range stateDirs {
		if err := checkOwn(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func checkOwn(path string) error {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("looking at the state folder %s: %w", path, err)
	case !st.IsDir():
		return fmt.Errorf("the state folder %s is not a folder: remove it, or name another state_dir", path)
	}
	if owner, self := st.Sys().(*syscall.Stat_t).Uid, uint32(os.Geteuid()); owner != self {
		return fmt.Errorf("the state folder %s belongs to uid %d, the agent runs as uid %d: name a state_dir of its own, or, if nobody can have tampered with it, give it back (chown -R %d)",
			path, owner, self, self)
	}
	if mode := st.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("the state folder %s has mode %04o, so others than the agent can write to it: take that away (chmod go-w) if nobody has used it, or name another state_dir",
			path, mode)
	}
	return nil
}

// checkRootfs refuses a root file system in which no command could be run.
func checkRootfs(rootfs string) error {
	switch runtime.KindOfRootfs(rootfs) {
	case runtime.RootfsHost:
		rootfs = "/"
	case runtime.RootfsImage:
		return nil // its runtime has it, or fetches it, and looks then
	}
	top, err := mounts.OpenSource(rootfs)
	if err != nil {
		return fmt.Errorf("starting the agent: rootfs %s: %w: name a folder that exists, by its real path, or \"host\"", rootfs, err)
	}
	defer top.Close()
	if err := runtime.CheckShell(top); err != nil {
		return fmt.Errorf("starting the agent: rootfs %s: %w", rootfs, err)
	}
	return nil
}
