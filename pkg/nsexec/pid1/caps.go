package pid1

import "golang.org/x/sys/unix"

// keepOnly leaves this thread with the given capabilities (of the first 32) and takes it the way to any other.
func keepOnly(capabilities ...uint) error {
	if err := dropBounding(); err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for _, c := range capabilities {
		data[0].Effective |= 1 << c
		data[0].Permitted |= 1 << c
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}

// dropBounding empties the capability bounding set of this thread. EINVAL marks the end of the kernel's capabilities.
func dropBounding() error {
	for c := uintptr(0); c < 64; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if err == unix.EINVAL {
			return nil
		}
		if err == unix.EPERM && !inBounding(c) {
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inBounding says whether c is in the bounding set: a second keepOnly, without CAP_SETPCAP, finds it empty.
func inBounding(c uintptr) bool {
	in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
	return err != nil || in != 0
}
