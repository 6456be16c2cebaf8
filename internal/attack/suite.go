package attack

import (
	"context"
	"time"
)

// closeTime bounds how long ending what was attacked takes, also after the caller's context has ended.
const closeTime = 2 * time.Minute

// Attack runs a list of attacks in a session of its own, and leaves nothing behind. each gets every result as it comes. What could
// not be begun, run or ended is a result as well.
func (o Options) Attack(ctx context.Context, list []Attack, each func(Result)) Suite {
	s := Suite{Runtime: o.Runtime}
	add := func(r Result) {
		s.Results = append(s.Results, r)
		each(r)
	}
	r, err := Start(ctx, o)
	if err != nil {
		add(Result{Attack: "a session to attack", Verdict: NotRun, Why: printable(err.Error())})
		return s
	}
	for _, a := range list {
		if a.Shared && !r.shared {
			continue
		}
		if ctx.Err() != nil {
			add(Result{Promise: a.Promise, Attack: a.Name, Verdict: NotRun, Why: context.Cause(ctx).Error()})
			continue
		}
		add(r.Run(ctx, a))
	}
	for _, x := range unattacked(r.concede) {
		add(x)
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
	defer cancel()
	if err := r.Close(closing); err != nil {
		add(Result{Attack: "leaving nothing behind", Verdict: NotRun, Why: printable(err.Error())})
	}
	return s
}
