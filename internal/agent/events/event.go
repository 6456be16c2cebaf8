package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

// Kind is what an event tells. docs/operations.md lists what its detail holds.
type Kind string

// The kinds of events.
const (
	AgentStarted      Kind = "agent.started"
	AgentStopped      Kind = "agent.stopped"
	Gap               Kind = "gap" // what happened since the event before may not be told
	SessionCreated    Kind = "session.created"
	SessionClaimed    Kind = "session.claimed"
	SessionDeleted    Kind = "session.deleted"
	SandboxAssigned   Kind = "sandbox.assigned" // a generation and a sandbox id were given out
	SandboxReady      Kind = "sandbox.ready"    // it has proved itself
	SandboxRetired    Kind = "sandbox.retired"  // it is gone, with the whole set of evidence
	SandboxUncertain  Kind = "sandbox.uncertain"
	ExecRequested     Kind = "exec.requested"
	ExecStarted       Kind = "exec.started" // its intent is durable: from here on it may run
	ExecRefused       Kind = "exec.refused" // it never started, and is not recorded
	ExecBoundary      Kind = "exec.boundary"
	ExecResult        Kind = "exec.result"
	EgressRefused     Kind = "egress.refused"      // a destination of its command; each once, up to a bound
	EgressProbeFailed Kind = "egress.probe_failed" // a probe saw the session's policy not hold
	HarvestConflict   Kind = "harvest.conflict"
	GrantsUpdated     Kind = "grants.updated"
	GrantsRequired    Kind = "grants.required" // their contents are lost, or one has expired
	WorkspaceDeleted  Kind = "workspace.deleted"
)

// Bounds of what an event holds, bytes.
const (
	maxDetail  = 1024
	maxCommand = 4096
)

// Event is one thing that happened.
type Event struct {
	Kind       Kind      `json:"kind"`
	Session    string    `json:"session,omitempty"`
	Exec       string    `json:"exec,omitempty"`
	Generation uint64    `json:"generation,omitempty"`
	At         time.Time `json:"at"`
	Detail     string    `json:"detail,omitempty"`
	// Command is the text of a command that started, for the audit log alone, with audit.commands alone.
	Command string `json:"command,omitempty"`
}

// Op is the change of the journal that adds the event to the chain. An event without a time happens now.
func (e Event) Op() journal.Op {
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	e.Detail, e.Command = short(e.Detail, maxDetail), short(e.Command, maxCommand)
	b, err := json.Marshal(e)
	if err != nil {
		panic(fmt.Sprintf("encoding an event: %v", err)) // strings, a number and a time of this clock
	}
	return journal.Append(b)
}

// Ops is Op for several.
func Ops(list ...Event) []journal.Op {
	ops := make([]journal.Op, 0, len(list))
	for _, e := range list {
		ops = append(ops, e.Op())
	}
	return ops
}

// short cuts a text at a rune's boundary and says how much is left out.
func short(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return fmt.Sprintf("%s… (%d bytes more)", s[:cut], len(s)-cut)
}

// Cursor is the place of an event in the chain. It rises strictly over the node's life; 0 is before the first.
type Cursor uint64

// String is 16 hex digits, so that texts compare as numbers do.
func (c Cursor) String() string { return fmt.Sprintf("%016x", uint64(c)) }

// ErrCursor: a text that is no cursor.
var ErrCursor = errors.New("no cursor")

// ParseCursor reads what String wrote; "" is 0.
func ParseCursor(s string) (Cursor, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 16, 64)
	if err != nil || Cursor(n).String() != s {
		return 0, fmt.Errorf("%w: %q: give one that an event had, 16 hex digits, or none to begin with the oldest event", ErrCursor, s)
	}
	return Cursor(n), nil
}

// Entry is an event in its place.
type Entry struct {
	Cursor Cursor
	Event
}
