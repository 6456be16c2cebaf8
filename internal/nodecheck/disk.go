package nodecheck

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// What a state folder's disk needs at the least: less, and an agent could not write what it must before a command starts.
const (
	leastBytes  = 64 << 20
	leastInodes = 1000
)

func lookAtDisk(stateDir string, root bool) map[ID][]Fact {
	at, err := existing(stateDir)
	if err != nil {
		fact := unsure("%v", err)
		return map[ID][]Fact{StateSpace: {fact}, Fsync: {fact}}
	}
	return map[ID][]Fact{StateSpace: {space(at)}, Fsync: {durable(at, root)}}
}

func space(at string) Fact {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return unsure("%s: %v", at, os.NewSyscallError("statfs", err))
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return nof("%s is read-only", at).do("remount it read-write, or name another state_dir")
	}
	return enough(fmt.Sprintf("%s (%s)", at, fileSystem(at)), uint64(st.Bavail)*uint64(st.Bsize), st.Ffree, st.Files)
}

// enough is the decision of space. inodes of 0 in all: the file system has no such bound (btrfs).
func enough(where string, bytes, free, inodes uint64) Fact {
	seen := fmt.Sprintf("%s has %d MiB free", where, bytes>>20)
	if inodes > 0 {
		seen += fmt.Sprintf(" and %d inodes", free)
	}
	if bytes < leastBytes || inodes > 0 && free < leastInodes {
		return nof("%s; at least %d MiB and %d inodes are needed", seen, leastBytes>>20, leastInodes)
	}
	return yes("%s", seen)
}

// durable writes 4 KiB to a file without a name and has the disk say that they are there. Its time is told, not judged.
func durable(at string, root bool) Fact {
	fd, err := nameless(at)
	if err != nil {
		if !root {
			return unsure("uid %d can't write in %s: %v", os.Geteuid(), at, err)
		}
		return no(fmt.Errorf("writing in %s: %w", at, err))
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, make([]byte, 4096)); err != nil {
		return no(fmt.Errorf("writing in %s: %w", at, err))
	}
	began := time.Now()
	if err := unix.Fdatasync(fd); err != nil {
		return no(fmt.Errorf("syncing in %s: %w", at, err))
	}
	return yes("4 KiB in %s took %s", at, time.Since(began).Round(10*time.Microsecond))
}

// nameless is a file that ends with its descriptor (O_TMPFILE), or, where the file system has no such thing, one that loses
// its name at once.
func nameless(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != unix.EOPNOTSUPP && err != unix.EISDIR && err != unix.ENOENT {
		return fd, err
	}
	f, err := os.CreateTemp(dir, ".sandbox-agent-check-")
	if err != nil {
		return -1, err
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		return -1, err
	}
	return unix.Dup(int(f.Fd()))
}

// fileSystem names the file system of a path by its magic number (statfs(2)).
func fileSystem(path string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return "an unknown file system"
	}
	if name, known := magics[int64(st.Type)]; known {
		return name
	}
	return fmt.Sprintf("the file system %#x", st.Type)
}

var magics = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.TMPFS_MAGIC: "tmpfs", unix.RAMFS_MAGIC: "ramfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs", unix.FUSE_SUPER_MAGIC: "fuse", unix.F2FS_SUPER_MAGIC: "f2fs", unix.V9FS_MAGIC: "9p",
	unix.SMB2_SUPER_MAGIC: "smb", unix.CEPH_SUPER_MAGIC: "ceph", unix.EROFS_SUPER_MAGIC_V1: "erofs", unix.SQUASHFS_MAGIC: "squashfs", 0x2fc12fc1: "zfs",
}
