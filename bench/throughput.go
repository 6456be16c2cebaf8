package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

const throughputTime = 3 * time.Second

// throughput is how many commands a second several at a time get done.
type throughput struct {
	AtATime int `json:"at_a_time"`
	// Commands per second: through the socket, one session each; bare; with two durable appends, one file each.
	Exec  float64 `json:"exec_per_s"`
	Bash  float64 `json:"bash_per_s"`
	Floor float64 `json:"floor_per_s"`
	// Of the execs, milliseconds: back to back, so that each waits for its pid1 to be made.
	Median float64 `json:"exec_median_ms"`
	P99    float64 `json:"exec_p99_ms"`
}

func measureThroughput(ctx context.Context, p *place, a *agent, first *session) ([]throughput, error) {
	bash, err := bashTrue(p, first)
	if err != nil {
		return nil, err
	}
	sessions := []*session{first}
	var floors []*floor
	var all []throughput
	for _, n := range []int{1, 2, 8} {
		for len(sessions) < n {
			s, err := a.newSession(ctx)
			if err != nil {
				return nil, err
			}
			sessions = append(sessions, s)
		}
		for len(floors) < n {
			f, err := openFloor(p, fmt.Sprintf("floor-%d", len(floors)))
			if err != nil {
				return nil, err
			}
			floors = append(floors, f)
		}
		t := throughput{AtATime: n}
		if t.Bash, _, err = rate(ctx, n, func(int) error { _, err := bash.run(p.null); return err }); err != nil {
			return nil, err
		}
		if t.Floor, _, err = rate(ctx, n, func(i int) error { _, err := floors[i].run(bash, p.null); return err }); err != nil {
			return nil, err
		}
		var took []time.Duration
		if t.Exec, took, err = rate(ctx, n, func(i int) error { _, err := sessions[i].exec(ctx, "true"); return err }); err != nil {
			return nil, err
		}
		t.Median, t.P99 = milliseconds(quantile(took, 0.5)), milliseconds(quantile(took, 0.99))
		all = append(all, t)
	}
	return all, nil
}

// rate does something n times at once, again and again for a while. took is sorted.
func rate(ctx context.Context, n int, do func(i int) error) (perSecond float64, took []time.Duration, err error) {
	each, errs := make([][]time.Duration, n), make([]error, n)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for errs[i] == nil && ctx.Err() == nil && time.Since(began) < throughputTime {
				start := time.Now()
				errs[i] = do(i)
				each[i] = append(each[i], time.Since(start))
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	took = slices.Concat(each...)
	slices.Sort(took)
	for _, e := range append(errs, ctx.Err()) {
		if e != nil {
			return 0, nil, fmt.Errorf("measuring throughput, %d at a time: %w", n, e)
		}
	}
	return float64(len(took)) / elapsed.Seconds(), took, nil
}
