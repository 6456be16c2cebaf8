package receiptd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// How long, and how often, an attach waits for the control socket: it may be started before receiptd listens.
const (
	attachPatience = 30 * time.Second
	attachPoll     = 5 * time.Millisecond
)

// Attach joins a receiptd's control socket with standard input and output: the way to receiptd of every runtime that can
// start a process in a container, and needs no port and no shared kernel. It ends when receiptd closes the connection, which
// it does once a newer one is there. It decides nothing: whatever passes is receiptd's protocol.
func Attach(socket string, in io.Reader, out io.Writer) error {
	// Commands have other uids and a PID namespace of their own; this is the second line.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making the attach process undumpable: %w", err)
	}
	conn, err := dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, in)
		// The agent's end of input is the end of the connection.
		_ = conn.CloseWrite()
	}()
	if _, err := io.Copy(out, conn); err != nil {
		return fmt.Errorf("carrying receiptd's answers: %w", err)
	}
	return nil
}

func dial(socket string) (*net.UnixConn, error) {
	end := time.NewTimer(attachPatience)
	defer end.Stop()
	for {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err == nil {
			return conn, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("connecting to receiptd: %w", err)
		}
		select {
		case <-time.After(attachPoll):
		case <-end.C:
			return nil, fmt.Errorf("connecting to receiptd: it does not listen after %s: %w", attachPatience, err)
		}
	}
}

// openLog makes a file receiptd's standard error. Nobody has to read from it, as from the pipe of a container runtime's
// shim: a shim that is stopped, or gone, stalls nothing.
func openLog(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("opening receiptd's log: %w", err)
	}
	defer f.Close()
	if err := unix.Dup3(int(f.Fd()), 2, 0); err != nil {
		return fmt.Errorf("making the log receiptd's standard error: %w", err)
	}
	return nil
}
