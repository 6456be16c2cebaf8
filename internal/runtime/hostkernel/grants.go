package hostkernel

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/grants"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// makeGrants makes the file system of a session's grants: filled before it is mounted anywhere, so that it is read-only
// wherever anyone sees it, and gone with the sandbox, whose mount namespace alone has it.
func (b *BindMounts) makeGrants(given []runtime.Grant) error {
	if len(given) == 0 {
		return nil
	}
	tmpfs, err := grantsTmpfs(given)
	if err != nil {
		return err
	}
	b.root = append(b.root, attachment{runtime.GrantsPath, tmpfs})
	uid, gid := b.commandIDs()
	if err := grants.Write(tmpfs, uid, gid, given); err != nil {
		return err
	}
	return mounts.SetAttr(tmpfs, mounts.Attr{ReadOnly: true, NoExec: true})
}

// grantsTmpfs is as large as its content. Its pages are never swapped out where the kernel can promise that (noswap,
// Linux 6.4, tmpfs(5)).
func grantsTmpfs(given []runtime.Grant) (*os.File, error) {
	size, inodes := grants.Size(given)
	options := map[string]string{
		"mode": "0555", "size": strconv.FormatInt(size, 10), "nr_inodes": strconv.Itoa(inodes), "noswap": "",
	}
	tmpfs, err := mounts.NewTmpfs(options)
	if errors.Is(err, unix.EINVAL) {
		delete(options, "noswap")
		tmpfs, err = mounts.NewTmpfs(options)
	}
	return tmpfs, err
}
