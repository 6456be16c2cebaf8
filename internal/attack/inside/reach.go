package inside

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// connect dials each address: tcp:HOST:PORT, udp:HOST:PORT, unix:PATH, abstract:NAME, vsock:CID:PORT. Over UDP it sends, and the
// other side knows what came.
func connect(a *attacker, args []string) error {
	for _, address := range args {
		network, where, _ := strings.Cut(address, ":")
		switch network {
		case "abstract":
			network, where = "unix", "@"+where
		case "vsock":
			a.attempt(dialVsock(where), "%s", address)
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		c, err := (&net.Dialer{}).DialContext(ctx, network, where)
		cancel()
		if err == nil {
			_, err = c.Write([]byte("x"))
			c.Close()
		}
		if network == "udp" {
			a.tried++
			continue
		}
		a.attempt(err, "%s", address)
	}
	return nil
}

func dialVsock(where string) error {
	var cid, port uint32
	if _, err := fmt.Sscanf(where, "%d:%d", &cid, &port); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port})
}

func listenUnder(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
}

// sockets makes a socket of each kind that reaches past a network namespace, or that a build has no use for.
func sockets(a *attacker, _ []string) error {
	for _, s := range []struct {
		name                  string
		family, kind, protcol int
	}{
		{"vsock", unix.AF_VSOCK, unix.SOCK_STREAM, 0},
		{"packet", unix.AF_PACKET, unix.SOCK_RAW, 0},
		{"alg", unix.AF_ALG, unix.SOCK_SEQPACKET, 0},
		{"key", unix.AF_KEY, unix.SOCK_RAW, 2},
		{"xdp", unix.AF_XDP, unix.SOCK_RAW, 0},
		{"raw IP", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP},
		{"audit", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT},
		{"netfilter", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER},
		{"uevent", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT},
	} {
		fd, err := unix.Socket(s.family, s.kind|unix.SOCK_CLOEXEC, s.protcol)
		if err == nil {
			unix.Close(fd)
		}
		a.attempt(err, "a socket of the kind %s", s.name)
	}
	return nil
}

// look names each path that is there, with something in it, under any of the names that lead to a root.
func look(a *attacker, args []string) error {
	worktree, err := os.Getwd()
	if err != nil {
		return err
	}
	for _, path := range args {
		for _, prefix := range []string{"", "/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/proc/self/cwd/../../../../../../..", fmt.Sprintf("/proc/%d/root", os.Getppid())} {
			a.tried++
			if what := content(prefix, path, worktree); what != "" {
				a.got("to see %s%s: %s", prefix, path, what)
			}
		}
	}
	return nil
}

// content says what there is to be had at a path below a root that prefix leads to; empty: nothing.
func content(prefix, name, worktree string) string {
	path := prefix + name
	st, err := os.Stat(path)
	if err != nil {
		return ""
	}
	switch {
	case st.Mode()&os.ModeDevice != 0:
		if f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
			f.Close()
			if masked(st) {
				return ""
			}
			return "a device"
		}
	case st.IsDir():
		if entry := stranger(prefix, name, worktree); entry != "" {
			return fmt.Sprintf("a folder with %s", entry)
		}
	case st.Mode().IsRegular():
		if readByte(path) == nil {
			return "a file that can be read"
		}
	case st.Mode()&os.ModeSocket != 0:
		return "a socket"
	}
	return ""
}

// stranger names what a folder has besides the way to the worktree; empty: nothing. The worktree has its own path in a sandbox, so the
// folders above it are there, and have nothing else in them. The one that it lies in is not looked at: the clone is there as well.
func stranger(prefix, folder, worktree string) string {
	entries, err := os.ReadDir(prefix + folder)
	if err != nil {
		return ""
	}
	rest, above := strings.CutPrefix(worktree, folder+"/")
	next, _, further := strings.Cut(rest, "/")
	for _, e := range entries {
		switch {
		case !above || further && e.Name() != next:
			return e.Name()
		case further:
			if below := stranger(prefix, filepath.Join(folder, next), worktree); below != "" {
				return filepath.Join(next, below)
			}
		}
	}
	return ""
}

// masked: a covered file is /dev/null.
func masked(st os.FileInfo) bool {
	null, err := os.Stat(os.DevNull)
	return err == nil && os.SameFile(st, null)
}

// open opens each path for writing, or makes something in it if it is a folder, renames nothing and writes nothing.
func open(a *attacker, args []string) error {
	for _, path := range args {
		st, err := os.Stat(path)
		if err != nil || masked(st) {
			a.tried++
			continue
		}
		if st.IsDir() {
			name := filepath.Join(path, ".sandbox-agent-attack")
			err := os.Mkdir(name, 0o700)
			if err == nil {
				err = os.Remove(name)
			}
			a.attempt(err, "to make something in %s", path)
			continue
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			f.Close()
		}
		a.attempt(err, "to open %s for writing", path)
	}
	return nil
}
