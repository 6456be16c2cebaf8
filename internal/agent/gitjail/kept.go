package gitjail

import (
	"context"
	"sync/atomic"
)

// made counts what trusted Git costs.
var made struct{ jails, runs atomic.Int64 }

// Made says how many jails this process has made and how many runs of Git were in them. A jail costs as much as several
// runs: tests hold what an operation makes against a bound.
func Made() (jails, runs int64) { return made.jails.Load(), made.runs.Load() }

// Kept is a jail for several runs of Git, for one caller at a time: a Session that is made when it is first needed, and
// made anew after a run that ended it, as one does whose time was up.
type Kept struct {
	Jail
	ctx     context.Context
	session *Session
}

// Keep gives a jail that is made later. ctx bounds it as Start's does. The caller closes it.
func (j Jail) Keep(ctx context.Context) *Kept { return &Kept{Jail: j, ctx: ctx} }

// Session is the jail. Whoever asks early has it made while something else is done.
func (k *Kept) Session() (*Session, error) {
	if k.session != nil && k.session.Ended() {
		k.Close()
	}
	if k.session == nil {
		s, err := k.Start(k.ctx)
		if err != nil {
			return nil, err
		}
		k.session = s
	}
	return k.session, nil
}

// Do is Session.Do.
func (k *Kept) Do(ctx context.Context, c Call) (Result, error) {
	s, err := k.Session()
	if err != nil {
		return Result{}, err
	}
	return s.Do(ctx, c)
}

// RunCall is Session.RunCall.
func (k *Kept) RunCall(ctx context.Context, c Call) (string, error) {
	r, err := k.Do(ctx, c)
	return judge(k.Jail, c, r, err)
}

// Run is Session.Run.
func (k *Kept) Run(ctx context.Context, args ...string) (string, error) {
	return k.RunCall(ctx, Call{Args: args})
}

// Close ends the jail, if there is one, and waits until it has ended. Of none, nil, there is nothing to close.
func (k *Kept) Close() {
	if k != nil && k.session != nil {
		k.session.Close()
		k.session = nil
	}
}
