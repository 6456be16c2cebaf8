package interrupt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// Patience is how long after the first signal another one is not heard.
const Patience = 5 * time.Second

// exitBase plus n is the exit code of a program that signal n ended, as a shell has it.
const exitBase = 128

// Cause is the cause of a context that a signal ended.
type Cause struct{ Signal os.Signal }

func (e Cause) Error() string { return fmt.Sprintf("interrupted by %s", e.Signal) }

// By says which signal ended the context, if one did.
func By(ctx context.Context) (os.Signal, bool) {
	e, ok := errors.AsType[Cause](context.Cause(ctx))
	return e.Signal, ok
}

// CleanUp is what a program tells about its way out.
type CleanUp struct {
	// Say shows one line to whoever sent a signal; nil is standard error.
	Say func(line string)
	// Left gives what is left behind, a line for each thing, if the program ends now. It is called from another
	// goroutine than the clean-up's; nil is nothing.
	Left func() []string
}

// Describe says what ctx's program does between the first signal and its end. Without a catcher in ctx it does nothing.
func Describe(ctx context.Context, c CleanUp) {
	if k, ok := ctx.Value(key{}).(*catcher); ok {
		k.describe(c)
	}
}

// Catch gives a context that ends at the first SIGINT, SIGTERM or SIGHUP. Signals that come within Patience after that
// are answered on stderr and nothing else; the next one prints what is left behind and ends the program. A catcher that
// is in parent already stops catching: the newest one is in charge.
func Catch(parent context.Context, stderr io.Writer) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	k := &catcher{cancel: cancel, stderr: stderr, now: time.Now, exit: os.Exit, got: make(chan os.Signal, 8), done: make(chan struct{})}
	signal.Notify(k.got, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if older, ok := parent.Value(key{}).(*catcher); ok {
		older.stop()
	}
	go k.run()
	return context.WithValue(ctx, key{}, k), func() {
		k.stop()
		cancel(context.Canceled)
	}
}

type key struct{}

type catcher struct {
	cancel context.CancelCauseFunc
	stderr io.Writer
	now    func() time.Time
	exit   func(code int)
	got    chan os.Signal
	done   chan struct{}
	once   sync.Once
	first  time.Time // of the first signal; run's alone

	mu      sync.Mutex
	cleanUp CleanUp
	told    bool // somebody called Describe
}

func (k *catcher) describe(c CleanUp) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cleanUp, k.told = c, true
}

func (k *catcher) stop() {
	k.once.Do(func() {
		signal.Stop(k.got)
		close(k.done)
	})
}

func (k *catcher) run() {
	for {
		select {
		case s := <-k.got:
			k.hear(s)
		case <-k.done:
			return
		}
	}
}

// hear decides on one signal.
func (k *catcher) hear(s os.Signal) {
	now := k.now()
	if k.first.IsZero() {
		k.first = now
		k.cancel(Cause{s})
		return
	}
	k.mu.Lock()
	c, told := k.cleanUp, k.told
	k.mu.Unlock()
	say := c.Say
	if say == nil {
		say = func(line string) { fmt.Fprintln(k.stderr, line) }
	}
	if now.Sub(k.first) < Patience {
		if told { // the others are about to end anyway
			say(fmt.Sprintf("cleaning up; again after %d seconds to leave it all behind", int(Patience.Seconds())))
		}
		return
	}
	if c.Left != nil {
		for _, line := range c.Left() {
			say(line)
		}
	}
	n, _ := s.(syscall.Signal)
	k.exit(exitBase + int(n))
}
