package gitview

import (
	"context"
	"maps"
	"path/filepath"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// With the reftable format (since Git 2.45) a table of the base clone, and one of each worktree, holds what files hold
// otherwise. The private folder has files whatever the base clone has, so Git is asked for what its tables hold.

// tables is the name of the folder that holds one.
const tables = "reftable"

// hasTables says whether the base clone's refs are in tables.
func (v *View) hasTables() bool { return mounts.Exists(v.o.Workspace.CommonDir + "/" + tables) }

// listTable lists what the worktree's own table holds besides HEAD.
func (v *View) listTable(ctx context.Context, base *gitjail.Session) (refs, error) {
	if !v.hasTables() {
		return nil, nil
	}
	text, err := listText(ctx, base, &refLines{left: isSandboxes, most: keptOutput}, 0, v.inMeta(), "--include-root-refs")
	if err != nil {
		return nil, err
	}
	list := text.decode()
	maps.DeleteFunc(list.ids, func(name, _ string) bool {
		return name == "HEAD" || !isPseudoRef(name) && (!perWorktree(name) || gitguard.CheckRefName(name) != nil)
	})
	return list.ids, nil
}

// writeTable writes those as the files that they are in the private folder.
func (v *View) writeTable(d folder, table refs) error {
	for _, name := range sortedKeys(table) {
		path := v.meta() + "/" + name
		if err := d.mkdir(filepath.Dir(path)); err != nil {
			return err
		}
		if err := d.write(path, []byte(table[name]+"\n")); err != nil {
			return err
		}
	}
	return nil
}
