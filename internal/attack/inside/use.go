package inside

import (
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// memory takes memory until it is ended, at most half as much again as the limit (in MiB).
func memory(a *attacker, args []string) error {
	limit, err := number(args, 0)
	if err != nil {
		return err
	}
	for n := 1; n <= limit+limit/2; n++ {
		b, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil //nolint:nilerr // that there is no more is what must be
		}
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		a.tried++
	}
	a.got("%d MiB of memory; the limit is %d", limit+limit/2, limit)
	return nil
}

// fill writes a file into a folder until no more goes in, at most the limit (in MiB), and removes it.
func fill(a *attacker, args []string) error {
	limit, err := number(args, 1)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(args[0], "full-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	block := make([]byte, mib)
	for range limit {
		a.tried++
		if _, err := f.Write(block); err != nil {
			return nil
		}
	}
	a.got("%d MiB into %s", limit, args[0])
	return nil
}

// setid makes files with the set-id bits and devices, by every call that could, in the working directory.
func setid(a *attacker, _ []string) error {
	unix.Umask(0)
	for i, m := range makers {
		path := fmt.Sprintf("set-id-%d", i)
		m.make(path)
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil {
			a.tried++
			continue
		}
		kind := st.Mode & unix.S_IFMT
		bad := st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 || kind == unix.S_IFBLK || kind == unix.S_IFCHR
		a.tried++
		if bad {
			a.got("%s: a file of mode %o", m.name, st.Mode)
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}

// makers are the ways to a file with a mode of one's choice.
var makers = []struct {
	name string
	make func(path string)
}{
	{"chmod", func(p string) { fresh(p); _ = unix.Chmod(p, 0o4755) }},
	{"chmod of the group's bit", func(p string) { fresh(p); _ = unix.Chmod(p, 0o2755) }},
	{"fchmod", func(p string) {
		withFile(p, func(fd int) { _ = unix.Fchmod(fd, 0o6755) })
	}},
	{"fchmodat", func(p string) { fresh(p); _ = unix.Fchmodat(unix.AT_FDCWD, p, 0o4755, 0) }},
	{"fchmodat2", func(p string) { fresh(p); callWithPath(unix.SYS_FCHMODAT2, p, 0o4755, 0) }},
	{"chmod by the high half", func(p string) { fresh(p); callWithPath(unix.SYS_FCHMODAT, p, 0x100000000|0o4755, 0) }},
	{"open", func(p string) {
		if fd, err := unix.Open(p, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o4755); err == nil {
			unix.Close(fd)
		}
	}},
	{"openat2", func(p string) {
		if fd, err := unix.Openat2(unix.AT_FDCWD, p, &unix.OpenHow{Flags: unix.O_CREAT | unix.O_WRONLY, Mode: 0o4755}); err == nil {
			unix.Close(fd)
		}
	}},
	{"O_TMPFILE", func(p string) {
		fd, err := unix.Open(".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o4755)
		if err != nil {
			return
		}
		defer unix.Close(fd)
		_ = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, p, unix.AT_SYMLINK_FOLLOW)
	}},
	{"mknod", func(p string) { _ = unix.Mknod(p, unix.S_IFREG|0o4755, 0) }},
	{"mknod of a device", func(p string) { _ = unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) }},
	{"mknod of a whiteout", func(p string) { _ = unix.Mknod(p, unix.S_IFCHR, 0) }},
	{"mkdir", func(p string) { _ = unix.Mkdir(p, 0o6755) }},
	{"a pipe", func(p string) { _ = unix.Mknod(p, unix.S_IFIFO|0o4755, 0) }},
	{"a socket", func(p string) {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return
		}
		defer unix.Close(fd)
		_ = unix.Fchmod(fd, 0o4755)
		_ = unix.Bind(fd, &unix.SockaddrUnix{Name: p})
	}},
}

func fresh(path string) { withFile(path, func(int) {}) }

func withFile(path string, f func(fd int)) {
	if fd, err := unix.Open(filepath.Clean(path), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o644); err == nil {
		f(fd)
		unix.Close(fd)
	}
}

// callWithPath is a raw call with all 64 bits of the mode.
func callWithPath(nr uintptr, path string, mode uint64, flags uintptr) {
	p, err := unix.BytePtrFromString(path)
	if err == nil {
		at := unix.AT_FDCWD
		_, _, _ = unix.Syscall6(nr, uintptr(at), uintptr(unsafe.Pointer(p)), uintptr(mode), flags, 0, 0)
	}
}
