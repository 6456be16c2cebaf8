package pid1

import "golang.org/x/sys/unix"

// What a command's own /proc hides. Files are covered by /dev/null, folders by an empty read-only tmpfs, the last list
// is read-only. The lists are runc's defaults (libcontainer's masked and read-only paths) and, beyond them, kallsyms,
// kmsg and interrupts, which tell a command about the node.
var (
	maskedFiles = []string{
		"/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug",
		"/proc/kallsyms", "/proc/kmsg", "/proc/sysrq-trigger", "/proc/interrupts", "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup",
	}
	maskedFolders   = []string{"/proc/acpi", "/proc/asound", "/proc/scsi"}
	readOnlyFolders = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"}
)

type mountError struct {
	what string
	err  error
}

func (e mountError) Error() string { return e.what + ": " + e.err.Error() }
func (e mountError) Unwrap() error { return e.err }

// mountProc covers /proc by one of this PID namespace. hidepid=2 hides what another uid owns: pid1. The container's
// own /proc underneath has nothing masked, because a locked mount over a part of it would make this mount EPERM
// ("mount too revealing").
func mountProc() error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", "/proc", "proc", flags, "hidepid=2"); err != nil {
		return mountError{"mounting /proc (the container must not mask paths of /proc, and the kernel must allow user namespaces)", err}
	}
	for _, f := range maskedFiles {
		if err := unix.Mount("/dev/null", f, "", unix.MS_BIND, ""); err != nil && err != unix.ENOENT {
			return mountError{"masking " + f, err}
		}
	}
	for _, f := range maskedFolders {
		if err := unix.Mount("tmpfs", f, "tmpfs", unix.MS_RDONLY|flags, "size=0k,nr_inodes=1,mode=555"); err != nil && err != unix.ENOENT {
			return mountError{"masking " + f, err}
		}
	}
	for _, f := range readOnlyFolders {
		err := unix.Mount(f, f, "", unix.MS_BIND|unix.MS_REC, "")
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return mountError{"binding " + f, err}
		}
		if err := unix.Mount("", f, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|flags, ""); err != nil {
			return mountError{"making " + f + " read-only", err}
		}
	}
	return nil
}
