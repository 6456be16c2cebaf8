package nodecheck

import (
	"fmt"
	"strings"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// The API's words for verdicts are in the same order as those of this package.
func (v Verdict) proto() sandboxv1.CheckVerdict { return sandboxv1.CheckVerdict(v) }

var outcomes = map[Answer]sandboxv1.CheckOutcome{
	Yes: sandboxv1.CheckOutcome_CHECK_YES, No: sandboxv1.CheckOutcome_CHECK_NO, Inconclusive: sandboxv1.CheckOutcome_CHECK_INCONCLUSIVE,
}

// Proto is the line as the API has it.
func (l Line) Proto() *sandboxv1.NodeCheck {
	p := &sandboxv1.NodeCheck{
		Feature: string(l.Feature.ID), Subject: l.Fact.Subject, Outcome: outcomes[l.Fact.Answer], Verdict: l.Verdict.proto(),
		Since: l.Feature.Since, Purpose: l.Feature.For, Promises: l.Feature.Promises, Detail: l.Fact.Detail, Remedy: l.Remedy,
	}
	if l.Verdict > Note || l.Verdict == Note && l.Feature.Kept == Same {
		p.Instead = l.Feature.Instead
	}
	return p
}

// Proto is the report as the API has it.
func (r Report) Proto() *sandboxv1.CheckNodeResponse {
	resp := &sandboxv1.CheckNodeResponse{Node: r.Node.describe()}
	for _, l := range r.Lines {
		Add(resp, l.Proto())
	}
	return resp
}

// Add appends a check, and has the whole take its verdict if that is worse.
func Add(resp *sandboxv1.CheckNodeResponse, check *sandboxv1.NodeCheck) {
	resp.Checks = append(resp.Checks, check)
	resp.Verdict = max(resp.Verdict, check.GetVerdict())
}

func (n Node) describe() string {
	name := n.OS.Name
	if name == "" {
		name = "an unknown distribution"
	}
	text := fmt.Sprintf("%s, Linux %s, %s", name, n.Kernel, versions(n.Cgroups))
	if n.Kubernetes {
		text += ", in Kubernetes"
	}
	return text
}

// ExitCode is that of a check: 0 when all is well or only noted, 1 when something is degraded or could not be looked at, 2
// when something that is configured can't be had.
func ExitCode(v sandboxv1.CheckVerdict) int {
	switch v {
	case sandboxv1.CheckVerdict_CHECK_MISSING:
		return 2
	case sandboxv1.CheckVerdict_CHECK_DEGRADED, sandboxv1.CheckVerdict_CHECK_UNKNOWN:
		return 1
	}
	return 0
}

// Text is what a person reads of one check: a line, and below it what to do where that is called for.
func Text(c *sandboxv1.NodeCheck) string {
	name := c.GetFeature()
	if c.GetSubject() != "" {
		name += " (" + c.GetSubject() + ")"
	}
	var b strings.Builder
	verdict := Verdict(c.GetVerdict())
	fmt.Fprintf(&b, "%-9s  %s: %s%s\n", verdict, name, inOneLine(c.GetDetail()), noteText(verdict, c.GetInstead()))
	more := func(what, text string) {
		if text != "" {
			fmt.Fprintf(&b, "%11s%s: %s\n", "", what, inOneLine(text))
		}
	}
	if verdict > Unknown {
		purpose := c.GetPurpose()
		if c.GetPromises() != "" {
			purpose += " (" + c.GetPromises() + ")"
		}
		more("for", purpose)
		more("instead", c.GetInstead())
	}
	if verdict > Note {
		more("do", c.GetRemedy())
	}
	return b.String()
}

// noteText says why what is not there is no fault.
func noteText(v Verdict, instead string) string {
	switch {
	case v != Note:
		return ""
	case instead != "":
		return "; as good: " + instead
	}
	return "; nothing that is configured needs it"
}

// inOneLine keeps one requirement on one line: errors of several things have a line for each.
func inOneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' }), "; ")
}
