package agent

import "github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"

// point names a step at which tests/faults kills the agent.
func point(name string) { crashpoint.At(name) }
