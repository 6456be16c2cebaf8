package receipt

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// One durable step
//
// A receipt must be on disk, under its name, with its kept output, when Commit returns. The textbook waits twice for the
// disk: sync the contents, rename, sync the folder. Commit waits once: it hands all contents to the device
// (sync_file_range, which waits for the writeback and makes nothing durable by itself), renames the outputs, renames the
// receipt, and then syncs.
//
// On a file system with ONE ordered journal it syncs the receipt alone: the journal commit that makes the receipt's name
// durable (it is preceded by a flush of the device's cache) also makes everything before it durable, the sizes, blocks
// and names of all files of this exec. So a power cut at any moment leaves a receipt with all of its output, or no
// receipt. That holds for ext4 with a journal (jbd2 commits transactions in order; the blocks' conversion to written
// ends before the page's writeback does, and so belongs to a transaction not later than the rename's) and for XFS (one
// log, forced in order; xfs_rename logs the source inode, so that its fsync forces the rename).
//
// Everywhere else (btrfs logs single inodes, virtio-fs and NFS have their own rules, ext4 may have no journal) it renames
// at once, and then syncs every file and the folder, at the same time. What Commit returned is as durable; only a power cut BEFORE it returned
// can leave a receipt's name on disk without the whole contents, and such a receipt doesn't parse, doesn't verify or
// doesn't match its output: it is refused, and its exec is UNCERTAIN, as it would be without any receipt (promise P6).
//
// Measured with spare files, 2 ms apart, on a busy machine with two cores (p25 in µs; a plain append + fdatasync took
// 250 without a journal, 520 with one):
//
//	a 2.6 KB receipt | and 300 bytes of stdout       ext4, no journal    ext4, journal on a loop device
//	sync contents in parallel, rename, sync folder      630 | 800           1040 | 1260
//	rename, sync everything in parallel (chosen)        550 | 670            640 | 860
//	rename, sync the receipt (chosen, one journal)      440 | 500            710 | 715
//
// On a quiet machine the files that were made beforehand count for more than the order: 295 against 395 for the
// receipt, and ext4 passes over inodes freed less than a minute ago one by one when it makes a file
// (fs/ext4/ialloc.c, recently_deleted), which was seen to cost 800 in a folder in which many had been deleted.

// oneJournal says whether the file system behind the folder dir is known to have one ordered journal. In doubt: no.
func oneJournal(dir int) bool {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(dir, &fs); err != nil {
		return false
	}
	switch int64(fs.Type) {
	case unix.XFS_SUPER_MAGIC:
		return true
	case unix.EXT4_SUPER_MAGIC:
		return hasJBD2(dir)
	}
	return false
}

// hasJBD2 looks for the journal that the kernel shows as /proc/fs/jbd2/<device>-<inode>: ext2 and ext4 without a
// journal share ext4's number in statfs.
func hasJBD2(dir int) bool {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return false
	}
	name := deviceName(unix.Major(st.Dev), unix.Minor(st.Dev))
	if name == "" {
		return false
	}
	found, err := filepath.Glob("/proc/fs/jbd2/" + name + "-*")
	return err == nil && len(found) > 0
}

// deviceName is the kernel's name of a block device; proc_partitions(5): major, minor, blocks, name.
func deviceName(major, minor uint32) string {
	f, err := os.Open("/proc/partitions")
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var ma, mi uint32
		var blocks uint64
		var name string
		if n, _ := fmt.Sscan(lines.Text(), &ma, &mi, &blocks, &name); n == 4 && ma == major && mi == minor {
			// The jbd2 name has '!' for the '/' of names such as cciss/c0d0.
			return strings.ReplaceAll(name, "/", "!")
		}
	}
	return ""
}

// startWriteback has the kernel begin to write f, and waits for nothing.
func startWriteback(fd int) error {
	return syncRange(fd, unix.SYNC_FILE_RANGE_WRITE)
}

// awaitWriteback returns once the contents of f were handed to the device. It makes nothing durable by itself.
func awaitWriteback(fd int) error {
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	return syncRange(fd, all)
}

// syncRange syncs the whole file where a kernel lacks the call (an emulated one may).
func syncRange(fd int, flags int) error {
	err := retry(func() error { return unix.SyncFileRange(fd, 0, 0, flags) })
	if err == unix.ENOSYS {
		return fsync(fd)
	}
	return err
}

func fsync(fd int) error { return retry(func() error { return unix.Fsync(fd) }) }

// fsyncAll syncs files at the same time, so that they share one commit of the journal.
func fsyncAll(fds []int) error {
	errs := make([]error, len(fds))
	var wg sync.WaitGroup
	for i, fd := range fds[1:] {
		wg.Go(func() { errs[i+1] = fsync(fd) })
	}
	errs[0] = fsync(fds[0])
	wg.Wait()
	return errors.Join(errs...)
}

// retry repeats a call that a signal interrupted (signal(7): fallocate and writes to some file systems give EINTR
// whatever SA_RESTART says; Go's runtime sends SIGURG to its own threads).
func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// noSpace says whether err means that the disk, the inodes or the quota are used up.
func noSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}
