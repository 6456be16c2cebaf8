package gitview

import (
	"path/filepath"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview/skeleton"
)

// makeSkeleton makes the folder of the shared layout, or puts the one that is there right.
func makeSkeleton(o Options) error {
	return skeleton.Make(filepath.Join(o.Dir, "git"), o.Workspace.CommonDir, o.Workspace.Owner)
}
