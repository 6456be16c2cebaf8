package pid1

import (
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// statSeals reads what each seal is now, as this process sees it. Mount ids differ between mount namespaces, so a
// seal can be compared only within one.
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
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_STATX_DONT_SYNC, unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		return wire.SealState{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return wire.SealState{}, err
	}
	return wire.SealState{
		Path: path, MountID: st.Mnt_id, Inode: st.Ino, Device: unix.Mkdev(st.Dev_major, st.Dev_minor), ReadOnly: fs.Flags&unix.MS_RDONLY != 0, // ST_RDONLY of statfs(2) has the same value,
	}, nil
}

// brokenSeals names the seals that are not what they were: detached (another mount id), replaced (another inode),
// or writable.
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
