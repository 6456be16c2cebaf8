package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// interrupted is the cause of a context that a signal ended.
type interrupted struct{ signal os.Signal }

func (e interrupted) Error() string { return fmt.Sprintf("interrupted by %s", e.signal) }

// WithSignals gives a context that ends at the first SIGINT, SIGTERM or SIGHUP; the second one ends the program as
// usual, so that a person is never stuck with a clean-up that hangs.
func WithSignals(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	got := make(chan os.Signal, 1)
	signal.Notify(got, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		select {
		case s := <-got:
			signal.Stop(got)
			cancel(interrupted{s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(context.Canceled)
	}
}

// interruptedBy says which signal ended the context, if one did.
func interruptedBy(ctx context.Context) (os.Signal, bool) {
	e, ok := errors.AsType[interrupted](context.Cause(ctx))
	return e.signal, ok
}
