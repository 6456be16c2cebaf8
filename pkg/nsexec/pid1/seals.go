package pid1

import (
	"crypto/sha256"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// maxSealed bounds what is read of a sealed file, bytes. It is also the bound on a configuration that is accepted at all
// (pkg/gitguard); a pointer has one line.
const maxSealed = 1 << 20

// sealError says what is wrong with a seal that could be looked at.
type sealError string

func (e sealError) Error() string { return string(e) }

// statSeals reads what each seal is now, as this process sees it. Mount ids differ between mount namespaces, so a
// seal's can be compared only within one.
func statSeals(paths []string) ([]wire.SealState, error) {
	seals := make([]wire.SealState, 0, len(paths))
	for _, p := range paths {
		s, err := statSeal(p)
		if err != nil {
			return nil, mountError{p, err}
		}
		seals = append(seals, s)
	}
	return seals, nil
}

func statSeal(path string) (wire.SealState, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		return wire.SealState{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return wire.SealState{}, err
	}
	s := wire.SealState{
		Path: path, MountID: st.Mnt_id, Inode: st.Ino, Device: unix.Mkdev(st.Dev_major, st.Dev_minor), ReadOnly: fs.Flags&unix.MS_RDONLY != 0, // ST_RDONLY of statfs(2) has the same value,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return s, nil
	case unix.S_IFREG:
		err := digest(&s)
		return s, err
	}
	return wire.SealState{}, sealError("it is neither a file nor a folder")
}

// digest reads a sealed file. A read-only mount keeps the command from writing to it, and not whoever can write to the
// file elsewhere: then inode and mount are what they were, and the content is not. What can't be read in full is an
// error and never an empty digest: no change may go unseen.
func digest(s *wire.SealState) error {
	// The name may lead to something else since it was looked at: O_NONBLOCK, because a FIFO would hang pid1.
	fd, err := unix.Open(s.Path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Ino != s.Inode || st.Dev != s.Device || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return sealError("it was replaced while it was looked at")
	}
	h := sha256.New()
	buf := make([]byte, min(max(st.Size+1, 1), 32<<10)) // one byte more: the usual file is read at once, and its end seen
	for total := 0; ; {
		n, err := wire.FD(fd).Read(buf)
		if err != nil && err != wire.ErrClosed {
			return err
		}
		if total += n; total > maxSealed {
			return sealError("it is larger than 1 MiB, which is more than is read of a sealed file")
		}
		h.Write(buf[:n])
		if n < len(buf) { // read(2) gives less of a regular file only at its end
			h.Sum(s.SHA256[:0])
			return nil
		}
	}
}

// brokenSeals names the seals that are not what they were: detached (another mount id), replaced (another inode),
// writable, or with another content.
func brokenSeals(seals []wire.SealState) []string {
	var broken []string
	for _, was := range seals {
		now, err := statSeal(was.Path)
		if err != nil || now != was || !now.ReadOnly {
			broken = append(broken, was.Path)
		}
	}
	return broken
}
