package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// errNoDaemon: nobody listens.
var errNoDaemon = errors.New("nothing answers at containerd's socket")

// DaemonPATH is the PATH of the containerd that listens at address, a socket's path: there it finds its shims, and they their programs.
// An error: none listens, its process can't be seen from here, or it has other mounts, so that its paths say nothing here.
func DaemonPATH(ctx context.Context, address string) (string, error) {
	pid, err := daemonPid(ctx, address)
	if err != nil {
		return "", err
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return "", fmt.Errorf("looking at containerd's process: %w", err)
	}
	if ours, err := os.Readlink("/proc/self/ns/mnt"); err != nil || ours != theirs {
		return "", errors.Join(errors.New("containerd has a mount namespace of its own"), err)
	}
	environ, err := environOf(pid)
	if err != nil {
		return "", err
	}
	return pathIn(environ), nil
}

// DaemonElsewhere is for a containerd that has other mounts than this process, as it has for an agent in a pod: its root folder,
// which the caller closes, and its PATH there. An error: none listens, or its process can't be seen from here.
func DaemonElsewhere(ctx context.Context, address string) (root *os.File, path string, err error) {
	pid, err := daemonPid(ctx, address)
	if err != nil {
		return nil, "", err
	}
	environ, err := environOf(pid)
	if err != nil {
		return nil, "", err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, "", fmt.Errorf("opening containerd's root folder: %w", os.NewSyscallError("open", err))
	}
	return os.NewFile(uintptr(fd), "containerd's root folder"), pathIn(environ), nil
}

// daemonPid is the process that listens on containerd's socket, as the kernel tells it (unix(7), SO_PEERCRED).
func daemonPid(ctx context.Context, address string) (int, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", address)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNoDaemon, err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, fmt.Errorf("looking for containerd's process: %w", os.NewSyscallError("getsockopt", credErr))
	}
	if cred.Pid <= 0 {
		return 0, errors.New("containerd's process is not in the agent's PID namespace: run the agent in the node's (hostPID)")
	}
	return int(cred.Pid), nil
}

func environOf(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil, fmt.Errorf("reading containerd's environment: %w", err)
	}
	return strings.Split(string(b), "\x00"), nil
}

func pathIn(environ []string) string {
	for _, e := range environ {
		if path, ok := strings.CutPrefix(e, "PATH="); ok {
			return path
		}
	}
	return ""
}
