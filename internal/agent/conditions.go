package agent

import (
	"path/filepath"

	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// conditionsOf is what holds for each command of a session, in the numbers that the command really gets.
func conditionsOf(rec *sessionRecord, c *config.Config) *sandboxv1.CommandConditions {
	r := resourcesOf(rec.Resources, c.Limits)
	return &sandboxv1.CommandConditions{
		Scratch: filepath.Join(rec.Workspace.Worktree, workspace.ScratchName), Home: runtime.HomePath,
		TmpBytes: r.TmpBytes, HomeBytes: r.HomeBytes, Hooks: c.Workspace.Hooks == "inside",
		Timeout: durationpb.New(c.Limits.Timeout.Std()), MaxTimeout: durationpb.New(c.Limits.MaxTimeout.Std()),
		CommandBytes: c.Limits.CommandBytes, OutputBytes: c.Limits.OutputBytes, SpillBytes: c.Limits.SpillBytes, Queue: c.Limits.Queue,
	}
}
