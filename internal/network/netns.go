package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// bind keeps a network namespace alive at a path. It refuses the node's own.
func bind(ns *os.File, path string) error {
	if err := checkForeign(ns); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return fmt.Errorf("binding the network namespace: %w", err)
	}
	f.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding the network namespace at %s: %w", path, os.NewSyscallError("mount", err))
	}
	return nil
}

// checkForeign refuses a namespace that this process is in itself.
func checkForeign(ns *os.File) error {
	var theirs, own unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &theirs); err != nil {
		return fmt.Errorf("looking at the network namespace: %w", os.NewSyscallError("fstat", err))
	}
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return fmt.Errorf("looking at the node's network namespace: %w", os.NewSyscallError("stat", err))
	}
	if theirs.Dev == own.Dev && theirs.Ino == own.Ino {
		return fmt.Errorf("%w: the network namespace is the node's own, which no sandbox may have", ErrUnavailable)
	}
	return nil
}

// unbind undoes bind, as far as it came.
func unbind(path string) error {
	// A detached mount goes when nobody uses it any more.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unbinding the network namespace %s: %w", path, os.NewSyscallError("umount2", err))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("unbinding the network namespace: %w", err)
	}
	return nil
}

// isBound says whether a namespace is bound at path, not only the file that it would be bound to.
func isBound(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// openNamespace is a descriptor of a bound namespace.
func openNamespace(path string) (netns.NsHandle, error) {
	ns, err := netns.GetFromPath(filepath.Clean(path))
	if err != nil {
		return ns, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	return ns, nil
}

// inside is a netlink handle in a bound namespace. No goroutine's namespace changes: only its sockets are there.
func inside(path string) (*netlink.Handle, error) {
	ns, err := openNamespace(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	return h, nil
}

// raiseLoopback gives a namespace its loopback interface, which a new one has and which is down.
func raiseLoopback(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("setting up the loopback interface: %w", err)
	}
	return nil
}
