package agent

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

func TestATimeIsUpOnceItIsReachedAndNeverWhereItIsOff(t *testing.T) {
	now := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	l := config.Lifetime{Idle: config.Duration(30 * time.Minute), Max: config.Duration(24 * time.Hour)}
	off := config.Lifetime{}
	for name, c := range map[string]struct {
		l    config.Lifetime
		v    vitals
		want ending
		next time.Time
	}{
		"a new one":                {l, vitals{state: Ready, started: now, used: now}, notYet, now.Add(30 * time.Minute)},
		"just before":              {l, vitals{state: Ready, started: ago(time.Hour), used: ago(30*time.Minute - 1)}, notYet, now.Add(1)},
		"idle":                     {l, vitals{state: Ready, started: ago(time.Hour), used: ago(30 * time.Minute)}, idleLong, time.Time{}},
		"idle, off":                {off, vitals{state: Ready, started: ago(time.Hour), used: ago(1000 * time.Hour)}, notYet, time.Time{}},
		"busy":                     {l, vitals{state: Executing, busy: true, started: ago(time.Hour), used: ago(2 * time.Hour)}, notYet, now.Add(30 * time.Minute)},
		"queued":                   {l, vitals{state: Ready, busy: true, started: ago(time.Hour), used: ago(2 * time.Hour)}, notYet, now.Add(30 * time.Minute)},
		"old":                      {l, vitals{state: Ready, started: ago(24 * time.Hour), used: now}, tooOld, time.Time{}},
		"old and busy":             {l, vitals{state: Executing, busy: true, started: ago(24 * time.Hour)}, tooOld, time.Time{}},
		"nearly old":               {l, vitals{state: Ready, started: ago(24*time.Hour - time.Minute), used: now}, notYet, now.Add(time.Minute)},
		"old, off":                 {off, vitals{state: Ready, started: ago(9999 * time.Hour), used: now}, notYet, time.Time{}},
		"no sandbox":               {l, vitals{state: Idle, started: ago(9999 * time.Hour), used: ago(9999 * time.Hour)}, notYet, time.Time{}},
		"uncertain":                {l, vitals{state: Uncertain, started: ago(9999 * time.Hour)}, notYet, time.Time{}},
		"grants required":          {l, vitals{state: GrantsRequired, started: ago(9999 * time.Hour)}, notYet, time.Time{}},
		"grant expired":            {off, vitals{state: Ready, expires: now}, grantExpired, time.Time{}},
		"grant expired, busy":      {l, vitals{state: Executing, busy: true, started: now, expires: ago(1)}, grantExpired, time.Time{}},
		"grant expired, no box":    {l, vitals{state: Idle, expires: now}, grantExpired, time.Time{}},
		"grant expires":            {off, vitals{state: Idle, expires: now.Add(5)}, notYet, now.Add(5)},
		"grant expires first":      {l, vitals{state: Ready, started: now, used: now, expires: now.Add(5)}, notYet, now.Add(5)},
		"grant expires after":      {l, vitals{state: Ready, started: now, used: now, expires: now.Add(time.Hour)}, notYet, now.Add(30 * time.Minute)},
		"expired comes before old": {l, vitals{state: Ready, started: ago(25 * time.Hour), used: ago(25 * time.Hour), expires: now}, grantExpired, time.Time{}},
	} {
		got, next := timeIsUp(c.l, c.v, now)
		require.Equal(t, c.want, got, name)
		require.Equal(t, c.next, next, name)
	}
}
