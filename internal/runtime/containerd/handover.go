package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Names in the control folder that receiptd uses beside runtime.SocketName; see cmd/receiptd.
const (
	handoverSocket = "handover.sock"
	logName        = "receiptd.log"
)

func receiptdLog(dir string) string { return filepath.Join(hostkernel.ControlDir(dir), logName) }

// poll is how often a start looks whether receiptd listens.
const poll = 2 * time.Millisecond

// handOver gives receiptd the descriptors of the commands' cgroups. The kernel checks a migration with the credentials of
// who opened cgroup.procs (cgroups(7)), so that receiptd needs no right on the cgroup file system.
func (s *Sandbox) handOver(ctx context.Context, files []*os.File) error {
	conn, err := s.dialWhenThere(ctx, handoverSocket)
	if err != nil {
		return fmt.Errorf("handing the commands' cgroups over: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil); err != nil {
		return fmt.Errorf("handing the commands' cgroups over: %w", err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		return fmt.Errorf("handing the commands' cgroups over: receiptd did not take them: %w", err)
	}
	return nil
}

// awaitReady waits until receiptd listens.
func (s *Sandbox) awaitReady(ctx context.Context) error {
	conn, err := s.dialWhenThere(ctx, runtime.SocketName)
	if err != nil {
		return fmt.Errorf("waiting for receiptd: %w", err)
	}
	return conn.Close()
}

// awaitReadyLine waits for what receiptd writes where the node can't see its socket, or for the end of its init.
func (s *Sandbox) awaitReadyLine(ctx context.Context, stdout *os.File) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-s.Exited():
			cancel(errors.New("it ended"))
		case <-ctx.Done():
		}
	}()
	return hostkernel.AwaitReady(ctx, stdout)
}

// dialWhenThere dials a socket of the control folder as soon as somebody listens on it.
func (s *Sandbox) dialWhenThere(ctx context.Context, name string) (*net.UnixConn, error) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		conn, err := s.DialSocket(ctx, name)
		if err == nil {
			return conn, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-s.Init.Exited():
			return nil, errors.New("it ended")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
