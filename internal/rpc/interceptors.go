package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"slices"
	"time"

	"connectrpc.com/connect/v2"
	"golang.org/x/sys/unix"
)

// peer is who is at the other end of a connection, as the kernel recorded it when it connected (SO_PEERCRED, unix(7)).
type peer struct {
	uid uint32
	pid int32
	err error
}

type peerKey struct{}

func peerOf(ctx context.Context) (peer, bool) {
	p, ok := ctx.Value(peerKey{}).(peer)
	return p, ok
}

// withPeer is the HTTP server's ConnContext.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, peerKey{}, lookUpPeer(c))
}

func lookUpPeer(c net.Conn) peer {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return peer{err: fmt.Errorf("not a unix connection: %T", c)}
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return peer{err: err}
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err != nil || credErr != nil {
		return peer{err: fmt.Errorf("SO_PEERCRED: %w", firstError(err, credErr))}
	}
	return peer{uid: cred.Uid, pid: cred.Pid}
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// admit refuses peers before anything of their request is read.
func admit(allowed []uint32, log *slog.Logger) connect.ServerInterceptor {
	return func(next connect.ServerFunc) connect.ServerFunc {
		return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) error {
			p, ok := peerOf(ctx)
			if !ok || p.err != nil || !slices.Contains(allowed, p.uid) {
				log.Warn("peer refused", "procedure", spec.Procedure, "uid", p.uid, "pid", p.pid, "error", p.err)
				return toConnect(fmt.Errorf("%w: uid %d is not in socket.allow_uids: call as an allowed user, or have the operator add it", errPeer, p.uid))
			}
			return next(ctx, spec, stream)
		}
	}
}

// guard turns a panic into an error of that one call, and every error into one with a code. It logs neither commands
// nor output.
func guard(log *slog.Logger) connect.ServerInterceptor {
	return func(next connect.ServerFunc) connect.ServerFunc {
		return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
			start := time.Now()
			defer func() {
				if r := recover(); r != nil {
					log.Error("call panicked", "procedure", spec.Procedure, "panic", r, "stack", string(debug.Stack()))
					err = connect.NewError(connect.CodeInternal, "the agent failed at this call; its log says why")
				}
				log.Debug("call", "procedure", spec.Procedure, "duration", time.Since(start), "error", err)
			}()
			return toConnect(next(ctx, spec, stream))
		}
	}
}
