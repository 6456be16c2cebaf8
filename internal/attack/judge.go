package attack

import (
	"fmt"
	"slices"
	"strings"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
)

// Judge makes a verdict of what was seen. why says what was broken, or why it can't be said; it is empty for what held.
func Judge(a Attack, s Seen) (v Verdict, why string) {
	// What was seen to break counts, also of an attack that was not run to its end.
	if broken := breaches(a, s); len(broken) > 0 {
		return Broken, strings.Join(broken, "; ")
	}
	if s.Unable != "" {
		return NotRun, s.Unable
	}
	if len(s.Answers) == 0 {
		return NotRun, "nothing was answered"
	}
	for _, answer := range s.Answers {
		if !a.Must.Unsaid && !hasLine(answer.Stdout, inside.Tried) {
			return NotRun, "the attack did not come to its end: " + lastLine(answer.Stderr)
		}
	}
	return Held, ""
}

func breaches(a Attack, s Seen) (all []string) {
	for i, answer := range s.Answers {
		must := a.Must
		if i > 0 && a.Then != "" {
			must = Must{}
		}
		all = append(all, must.breaches(answer)...)
	}
	for what, list := range map[string][]string{
		"still alive after the answer": s.Alive, "reached on the node": s.Reached, "changed on the node": s.Changed, "trusted Git did not come back from": s.Hung,
	} {
		if len(list) > 0 {
			all = append(all, what+": "+strings.Join(some(list), ", "))
		}
	}
	if s.Sandbox != "" {
		all = append(all, s.Sandbox)
	}
	slices.Sort(all)
	return all
}

func (m Must) breaches(r Answer) (all []string) {
	ends := m.End
	if len(ends) == 0 {
		ends = []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED}
	}
	if !slices.Contains(ends, r.Status) {
		all = append(all, strings.TrimSuffix(fmt.Sprintf("answered with %s: %s", r.Status, r.Reason), ": "))
	} else if !r.Verified {
		all = append(all, "answered without a receipt that verifies")
	}
	if got := linesWith(r.Stdout, inside.Got); len(got) > 0 {
		all = append(all, "the command got "+strings.Join(some(got), ", "))
	}
	if m.OOM && !r.OOM {
		all = append(all, "the answer does not say that it was for the memory")
	}
	if m.Bytes > 0 && (r.Bytes != m.Bytes || r.SHA256 != m.SHA256) {
		all = append(all, fmt.Sprintf("%d bytes of output with the hash %s were counted, and %d with %s were written", r.Bytes, r.SHA256, m.Bytes, m.SHA256))
	}
	return all
}

// some shortens a list that a person reads.
func some(list []string) []string {
	const most = 8
	if len(list) <= most {
		return list
	}
	return append(slices.Clone(list[:most]), fmt.Sprintf("and %d more", len(list)-most))
}

func linesWith(text, prefix string) (all []string) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			all = append(all, printable(strings.TrimSpace(rest)))
		}
	}
	return all
}

func hasLine(text, prefix string) bool { return len(linesWith(text, prefix)) > 0 }

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return printable(text[strings.LastIndexByte(text, '\n')+1:])
}

// printable is for what a command wrote: it does not get to a terminal as it is.
func printable(s string) string {
	const most = 1000
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	return s[:min(len(s), most)]
}

// concede has what a runtime concedes say so: never that it was held, since it need not be the next time.
func concede(a Attack, v Verdict, why string, concessions []*sandboxv1.Concession) (Verdict, string) {
	for _, c := range concessions {
		if a.Concession != "" && c.GetPromise() == a.Promise && c.GetWhat() == a.Concession && (v == Held || v == Broken) {
			if why != "" {
				why = " (seen: " + why + ")"
			}
			return Conceded, c.GetWhy() + why
		}
	}
	return v, why
}
