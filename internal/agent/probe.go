package agent

import (
	"fmt"
	"slices"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
)

// The bounds of a report: its checks, and the bytes of a text in one.
const (
	maxProbeChecks = 64
	maxProbeText   = 300
)

// ReportEgressProbe counts what a probe has found, and tells what does not hold. The probe is the caller's: its commands ran as
// any other's, and what they saw it has judged itself.
func (a *Agent) ReportEgressProbe(r *sandboxv1.ReportEgressProbeRequest) error {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return err
	}
	if err := checkProbe(r.GetChecks()); err != nil {
		return err
	}
	holds := map[string]bool{}
	for _, c := range r.GetChecks() {
		before, tried := holds[c.GetCheck()]
		holds[c.GetCheck()] = c.GetHolds() && (before || !tried)
		if !c.GetHolds() {
			s.tellProbe(c)
		}
	}
	for check, all := range holds {
		a.metrics.Probed(check, all)
	}
	s.log.Info("egress policy probed", "checks", len(r.GetChecks()), "holds", !slices.ContainsFunc(r.GetChecks(), func(c *sandboxv1.EgressProbeCheck) bool { return !c.GetHolds() }))
	return nil
}

func checkProbe(checks []*sandboxv1.EgressProbeCheck) error {
	if n := len(checks); n == 0 || n > maxProbeChecks {
		return invalid("checks: %d of them; give 1 to %d", n, maxProbeChecks)
	}
	for _, c := range checks {
		if !slices.Contains(metrics.ProbeChecks, c.GetCheck()) {
			return invalid("checks: %q is none of %v", c.GetCheck(), metrics.ProbeChecks)
		}
		if len(c.GetTarget()) > maxProbeText || len(c.GetDetail()) > maxProbeText {
			return invalid("checks: a target or a detail of %q has more than %d bytes", c.GetCheck(), maxProbeText)
		}
	}
	return nil
}

// tellProbe tells of a check that does not hold.
func (s *session) tellProbe(c *sandboxv1.EgressProbeCheck) {
	detail := fmt.Sprintf("%s %s: %s", c.GetCheck(), c.GetTarget(), c.GetDetail())
	s.log.Error("the egress policy does not hold", "check", c.GetCheck(), "target", c.GetTarget(), "detail", c.GetDetail())
	if err := s.agent.chain.Tell(events.Event{Kind: events.EgressProbeFailed, Session: s.id, Detail: detail}); err != nil {
		s.log.Warn("a failed probe is not among the events", "error", err)
	}
}
