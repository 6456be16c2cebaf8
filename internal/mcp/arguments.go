package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// arguments are what a caller of the tool may give.
type arguments struct {
	command string
	// timeout is in seconds; nil: the node's default.
	timeout *float64
}

// bounds of the arguments, as the session's record has them.
type bounds struct {
	commandBytes int64
	maxTimeout   time.Duration
}

// Bounds of a session that could not be asked: the widest that a node can have (docs/operations.md, limits). The agent
// checks them in any case.
const (
	mostCommandBytes = 131071
	mostTimeout      = 24 * time.Hour
)

func boundsOf(c *sandboxv1.CommandConditions) bounds {
	b := bounds{commandBytes: mostCommandBytes, maxTimeout: mostTimeout}
	if n := c.GetCommandBytes(); n > 0 {
		b.commandBytes = n
	}
	if d := c.GetMaxTimeout().AsDuration(); d > 0 {
		b.maxTimeout = d
	}
	return b
}

// inputSchema is the tool's, for a model and for clients that check before they send.
func inputSchema(b bounds, def time.Duration) json.RawMessage {
	seconds := fmt.Sprintf("End the command after this time, at most %s.", number(b.maxTimeout))
	if def > 0 {
		seconds += fmt.Sprintf(" Default: %s.", number(def))
	}
	return must(map[string]any{
		"type": "object",
		"properties": map[string]any{
			"command": map[string]any{
				"type": "string", "minLength": 1, "maxLength": b.commandBytes,
				"description": fmt.Sprintf("What bash -c runs, in the worktree: 1 to %d bytes, no NUL byte.", b.commandBytes),
			},
			"timeout_seconds": map[string]any{
				"type": "number", "exclusiveMinimum": 0, "maximum": b.maxTimeout.Seconds(), "description": seconds,
			},
		},
		"required":             []string{"command"},
		"additionalProperties": false,
	})
}

// must encodes what is made of constants and numbers only.
func must(v any) json.RawMessage {
	b, _ := json.Marshal(v)
	return b
}

// number is a time in seconds, as the argument is.
func number(d time.Duration) string {
	return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + " seconds"
}

// parseArguments takes exactly what the schema says. The names are compared letter by letter and none may come twice:
// whoever looked at a call on its way must have seen what runs.
func parseArguments(raw json.RawMessage, b bounds) (arguments, error) {
	var a arguments
	members, err := membersOf(raw)
	if err != nil {
		return a, err
	}
	for _, m := range members {
		switch m.name {
		case "command":
			a.command, err = commandOf(m.value, b)
		case "timeout_seconds":
			a.timeout, err = timeoutOf(m.value, b)
		default:
			err = fmt.Errorf("unknown argument %q: there are command and timeout_seconds; the session decides everything else", clip(m.name))
		}
		if err != nil {
			return a, err
		}
	}
	if a.command == "" {
		return a, errors.New("command is missing or empty: give the command line for bash")
	}
	return a, nil
}

// member is one of a JSON object.
type member struct {
	name  string
	value json.RawMessage
}

func membersOf(raw json.RawMessage) ([]member, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("the arguments are no object: give {\"command\": …}")
	}
	var out []member
	for d.More() {
		t, err := d.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			return nil, errors.New("the arguments can't be read")
		}
		m := member{name: name}
		if err := d.Decode(&m.value); err != nil {
			return nil, fmt.Errorf("argument %q can't be read", clip(name))
		}
		for _, o := range out {
			if o.name == name {
				return nil, fmt.Errorf("argument %q is there twice", clip(name))
			}
		}
		out = append(out, m)
	}
	return out, nil
}

func commandOf(raw json.RawMessage, b bounds) (string, error) {
	var s string
	if raw[0] != '"' || json.Unmarshal(raw, &s) != nil {
		return "", errors.New("command is no string: give the command line for bash as one string")
	}
	switch {
	case int64(len(s)) > b.commandBytes:
		return "", fmt.Errorf("command has %d bytes, at most %d: write the long part to a file in the worktree first, in several calls", len(s), b.commandBytes)
	case strings.ContainsRune(s, 0):
		return "", errors.New("command has a NUL byte, which bash can't be given: write it as \\0 for printf")
	case loneSurrogate(raw):
		return "", errors.New("command has half of a surrogate pair (\\ud800 to \\udfff), which is no character: bytes that are no text are written as \\x.. for printf")
	}
	return s, nil
}

// loneSurrogate says whether a JSON string has an escape that stands for no character: the decoder would put another one
// in its place, and something else would run than was asked for.
func loneSurrogate(raw json.RawMessage) bool {
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		first, ok := escapedUnit(raw[i:])
		if !ok {
			i++
			continue
		}
		i += 5
		switch {
		case 0xdc00 <= first && first < 0xe000:
			return true
		case 0xd800 <= first && first < 0xdc00:
			second, ok := escapedUnit(raw[i+1:])
			if !ok || second < 0xdc00 || second >= 0xe000 {
				return true
			}
			i += 6
		}
	}
	return false
}

// escapedUnit is the UTF-16 unit of a \uXXXX that b begins with.
func escapedUnit(b []byte) (uint64, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	return n, err == nil
}

func timeoutOf(raw json.RawMessage, b bounds) (*float64, error) {
	var n json.Number
	if raw[0] == '"' || raw[0] == 'n' || json.Unmarshal(raw, &n) != nil {
		return nil, errors.New("timeout_seconds is no number: leave it out for the default")
	}
	f, err := n.Float64()
	if err != nil || math.IsInf(f, 0) || f <= 0 || f > b.maxTimeout.Seconds() {
		return nil, fmt.Errorf("timeout_seconds is %s: give more than 0 and at most %s", clip(n.String()), number(b.maxTimeout))
	}
	return &f, nil
}

// clip shortens what came from outside for a message.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
