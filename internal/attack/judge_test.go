package attack

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// fine is what is seen of an attack that was held.
func fine() Seen {
	return Seen{Answers: []Answer{{Status: sandboxv1.ExecResult_EXITED, Verified: true, Stdout: "tried 3\n", Bytes: 8, SHA256: "a", OOM: true}}}
}

func TestWhatIsSeenDecides(t *testing.T) {
	first := func(change func(*Answer)) func(*Seen) { return func(s *Seen) { change(&s.Answers[0]) } }
	for name, c := range map[string]struct {
		must   Must
		change func(*Seen)
		want   Verdict
		why    string
	}{
		"nothing came of it":                     {Must{}, func(*Seen) {}, Held, ""},
		"nothing was answered":                   {Must{}, func(s *Seen) { s.Answers = nil }, NotRun, "nothing was answered"},
		"it could not be run":                    {Must{}, func(s *Seen) { s.Unable = "no agent" }, NotRun, "no agent"},
		"it could not be run and yet broke":      {Must{}, func(s *Seen) { s.Unable, s.Alive = "no agent", []string{"process 7"} }, Broken, "process 7"},
		"it did not come to its end":             {Must{}, first(func(a *Answer) { a.Stdout, a.Stderr = "", "x\nno such file\n" }), NotRun, "no such file"},
		"it did not, and need not":               {Must{Unsaid: true}, first(func(a *Answer) { a.Stdout = "" }), Held, ""},
		"it got something":                       {Must{}, first(func(a *Answer) { a.Stdout = "got /etc/shadow\ntried 1\n" }), Broken, "/etc/shadow"},
		"it got something and is not at its end": {Must{}, first(func(a *Answer) { a.Stdout = "got /etc/shadow\n" }), Broken, "/etc/shadow"},
		"no receipt":                             {Must{}, first(func(a *Answer) { a.Verified = false }), Broken, "receipt"},
		"uncertain":                              {Must{}, first(func(a *Answer) { a.Status, a.Reason = sandboxv1.ExecResult_UNCERTAIN, "lost" }), Broken, "UNCERTAIN: lost"},
		"killed":                                 {Must{}, first(func(a *Answer) { a.Status = sandboxv1.ExecResult_KILLED }), Broken, "KILLED"},
		"killed, which may be":                   {Must{End: anyEnd}, first(func(a *Answer) { a.Status = sandboxv1.ExecResult_KILLED }), Held, ""},
		"not for the memory":                     {Must{OOM: true}, first(func(a *Answer) { a.OOM = false }), Broken, "memory"},
		"for the memory":                         {Must{OOM: true}, func(*Seen) {}, Held, ""},
		"bytes that were not counted":            {Must{Bytes: 9, SHA256: "a"}, func(*Seen) {}, Broken, "8 bytes"},
		"another hash":                           {Must{Bytes: 8, SHA256: "b"}, func(*Seen) {}, Broken, "hash a"},
		"the same bytes":                         {Must{Bytes: 8, SHA256: "a"}, func(*Seen) {}, Held, ""},
		"alive":                                  {Must{}, func(s *Seen) { s.Alive = []string{"process 7"} }, Broken, "still alive"},
		"reached":                                {Must{}, func(s *Seen) { s.Reached = []string{"tcp"} }, Broken, "reached on the node: tcp"},
		"changed":                                {Must{}, func(s *Seen) { s.Changed = []string{"/config"} }, Broken, "/config"},
		"hung":                                   {Must{}, func(s *Seen) { s.Hung = []string{"git status"} }, Broken, "git status"},
		"the sandbox ended":                      {Must{}, func(s *Seen) { s.Sandbox = "the sandbox a ended" }, Broken, "ended"},
	} {
		s := fine()
		c.change(&s)
		verdict, why := Judge(Attack{Must: c.must}, s)
		require.Equal(t, c.want, verdict, name)
		require.Contains(t, why, c.why, name)
		require.Equal(t, c.want == Held, why == "", name)
	}
}

func TestTheNextCommandIsHeldToWhatEveryOneIs(t *testing.T) {
	s := fine()
	s.Answers = append(s.Answers, Answer{Status: sandboxv1.ExecResult_SIGNALED, Verified: true, Stdout: "tried 1\n"})
	verdict, _ := Judge(Attack{Then: "x", Must: Must{End: anyEnd}}, s)
	require.Equal(t, Broken, verdict, "what the first may do, the second may not")
}

func TestWhatARuntimeConcedesIsNeverSaidToBeHeld(t *testing.T) {
	gvisor := []*sandboxv1.Concession{{Promise: "P16", What: "memory ends alone", Why: "it can't"}, {Promise: "P3", What: "sockets", Why: "nor that"}}
	a := Attack{Promise: "P16", Name: "memory", Concession: "memory ends alone"}
	for _, v := range []Verdict{Held, Broken} {
		verdict, why := concede(a, v, "", gvisor)
		require.Equal(t, Conceded, verdict)
		require.Equal(t, "it can't", why)
	}
	verdict, why := concede(a, Broken, "the sandbox ended", gvisor)
	require.Equal(t, Conceded, verdict)
	require.Contains(t, why, "the sandbox ended")
	verdict, _ = concede(a, NotRun, "no", gvisor)
	require.Equal(t, NotRun, verdict, "nothing was seen of it")
	verdict, _ = concede(a, Broken, "x", gvisor[1:])
	require.Equal(t, Broken, verdict, "another runtime concedes something else")
	verdict, _ = concede(Attack{Promise: "P16", Name: "processes"}, Broken, "x", gvisor)
	require.Equal(t, Broken, verdict, "it concedes a part of a promise")
	rest := unattacked(gvisor)
	require.Len(t, rest, 2, "no row of the table is about these")
	require.Equal(t, Conceded, rest[0].Verdict)
}

func TestTheExitCodeIsThatOfTheWorst(t *testing.T) {
	for code, all := range map[int][][]Verdict{
		0: {{Held}, {Held, Conceded}},
		1: {{Broken}, {NotRun, Broken, Held}},
		2: {{NotRun}, {Held, NotRun, Conceded}, {}},
	} {
		for _, verdicts := range all {
			var s Suite
			for _, v := range verdicts {
				s.Results = append(s.Results, Result{Verdict: v})
			}
			var r Report
			r.Add(s)
			require.Equal(t, code, r.ExitCode(), verdicts)
			r.Add(Suite{Results: []Result{{Verdict: Held}}})
			require.Equal(t, code, r.ExitCode(), "another runtime that is well changes nothing: %v", verdicts)
		}
	}
	require.Equal(t, 2, Report{}.ExitCode(), "nothing was run at all")
	require.Equal(t, "BROKEN    P9   keys: seen", Result{Promise: "P9", Attack: "keys", Verdict: Broken, Why: "seen"}.Text())
}

func TestEachRowIsWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, a := range Table {
		require.Regexp(t, `^P([1-9]|1[0-6])$`, a.Promise)
		require.NotEmpty(t, a.Command, a.Name)
		require.False(t, seen[a.Name], "%s is there twice", a.Name)
		seen[a.Name] = true
		replaced := a.words(map[string]string{
			"word": "w", "helper": "h", "worktree": "w", "repo": "r", "secret": "s", "beside": "b", "pids": "1", "memory": "1", "disk": "1", "files": "1", "zeros": "0",
			"state": "s", "socket": "s", "node": "n", "making": "m", "tcp": "t", "udp": "u", "abstract": "a", "unix": "u", "canary": "c",
		})
		require.NotRegexp(t, `\{[a-z]+\}`, replaced.Command+replaced.Then+replaced.Must.SHA256, "a word that nobody replaces")
	}
}
