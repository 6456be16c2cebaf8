package receiptd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// firstInherited is the number of the first descriptor that a process is started with beyond the standard ones. A view
// counts its descriptors from here, however they come (runtime: firstInherited of package cgroup).
const firstInherited = 3

// maxHanded bounds what one message carries (SCM_MAX_FD of the kernel is 253).
const maxHanded = 64

// receiveSlots waits for the descriptors of the commands' cgroups on a socket of its own, where a container runtime can't
// have receiptd inherit them. The folder that it lies in is closed to everybody but the container's and the node's root,
// and no command is there yet. The socket is gone when it returns.
func receiveSlots(path string, want int) (_ []*os.File, err error) {
	l, err := listen(path)
	if err != nil {
		return nil, err
	}
	defer l.Close() // and removes it
	conn, err := l.(*net.UnixListener).AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("accepting on %s: %w", filepath.Base(path), err)
	}
	defer conn.Close()
	files, err := receiveFiles(conn)
	if err != nil {
		return nil, err
	}
	if len(files) != want {
		closeAll(files)
		return nil, fmt.Errorf("taking over the commands' cgroups: %d descriptors came instead of %d", len(files), want)
	}
	if _, err := conn.Write([]byte{0}); err != nil {
		closeAll(files)
		return nil, fmt.Errorf("taking over the commands' cgroups: %w", err)
	}
	return files, nil
}

// receiveFiles reads one message of one byte and takes the descriptors that come with it (unix(7), SCM_RIGHTS).
func receiveFiles(conn *net.UnixConn) ([]*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(maxHanded*4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return nil, fmt.Errorf("taking over the commands' cgroups: %w", err)
	}
	var files []*os.File
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range msgs {
		fds, rightsErr := unix.ParseUnixRights(&m)
		err = errors.Join(err, rightsErr)
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), fmt.Sprintf("cgroup %d", len(files))))
		}
	}
	if err == nil && (n != 1 || flags&unix.MSG_CTRUNC != 0) {
		err = fmt.Errorf("the message has %d bytes, flags %#x", n, flags)
	}
	if err != nil {
		closeAll(files)
		return nil, fmt.Errorf("taking over the commands' cgroups: %w", err)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// handed looks descriptors up among those that came over a socket.
func handed(files []*os.File) descriptors {
	return func(fd int32, name string) (*os.File, error) {
		if fd < 0 {
			return nil, nil
		}
		if i := int(fd) - firstInherited; i >= 0 && i < len(files) {
			return files[i], nil
		}
		return nil, fmt.Errorf("cgroup %s: descriptor %d is not one that was handed over", name, fd)
	}
}
