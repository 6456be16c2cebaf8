package rpc

import (
	"context"
	"log/slog"
	"runtime/debug"
	"time"

	"connectrpc.com/connect/v2"
)

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
