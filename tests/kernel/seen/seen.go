// Package seen is what a guest is asked to try on its node, and what it saw. tests/kernel judges it; nothing else imports it.
package seen

import "encoding/json"

// Mark begins a line of the guest's that is a Result, as JSON.
const Mark = "=== seen: "

// Change is what is made otherwise on the node before it is looked at, and taken back afterwards.
type Change struct {
	Name string
	// Sysctls by name, in the order in which they are set.
	Sysctls [][2]string
	// Tmpfs mounts one where workspaces are.
	Tmpfs bool
	// Hidepid is an option of /proc.
	Hidepid string
	// Without is a capability that the agent does not get, as setpriv(1) calls it.
	Without string
	// NoSeccomp: to the agent, and what it starts, the kernel answers as one without CONFIG_SECCOMP_FILTER.
	NoSeccomp bool
	// Config is appended to the agent's configuration.
	Config string
}

// Result is what was seen.
type Result struct {
	Change string
	// NotRun says why nothing was tried: the kernel does not have the setting.
	NotRun string `json:",omitempty"`
	// Failed says what went wrong with looking itself.
	Failed string `json:",omitempty"`
	// Check is the answer of "sandbox-agent check --local --json", CheckCode its exit code.
	Check     json.RawMessage `json:",omitempty"`
	CheckCode int
	// Started: "sandbox-agent serve" became ready. Said is its log where it did not.
	Started bool
	Said    string `json:",omitempty"`
	// Session is the error of making a session; empty: it was made.
	Session string `json:",omitempty"`
	// Attacks are what a command tried, with "held" or "reached".
	Attacks map[string]string `json:",omitempty"`
	// Control are the same attacks by a process of the node, without a sandbox.
	Control map[string]string `json:",omitempty"`
	// Receipts is what "sandbox-agent receipt verify --all" found wrong.
	Receipts string `json:",omitempty"`
	// Left are the processes and mounts that are there when all has ended.
	Left []string `json:",omitempty"`
}
