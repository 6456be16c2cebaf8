package git

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The file gitdir of a worktree's metadata says to the base clone where the worktree is: git worktree repair writes a .git
// file there, and git worktree prune forgets a worktree that is not there. In the layout shared that folder is the base
// clone's own, and writable but for its seals.
func TestP11Attack06WhereTheBaseCloneLooksForTheWorktree(t *testing.T) {
	// Written, renamed over, taken away and made again, and with the folders above it replaced; the last that works counts.
	const point = `
say() { echo $1/.git > $M/gitdir; }
for way in 'say $OUT/TO' 'chmod u+w $M/gitdir && say $OUT/TO' 'rm -f $M/gitdir && say $OUT/TO' 'mv $M/gitdir $M/g2 && say $OUT/TO' \
  'echo $OUT/TO/.git > $M/g3 && mv -f $M/g3 $M/gitdir' 'echo $OUT/TO/.git > $M/g4 && ln -f $M/g4 $M/gitdir' 'mv $M $M.x && cp -r $M.x $M && say $OUT/TO' \
  'mv $C/worktrees $C/w.x && cp -r $C/w.x $C/worktrees && say $OUT/TO'; do
  eval "$way"
done
rm -rf $M/g? $M.x $C/w.x; true`
	attack{
		prepare: func(p *place) { p.folder(filepath.Join(p.out, "victim")) },
		steps: []step{
			{name: "repair", strike: func(p *place) {
				p.command(strings.ReplaceAll(point, "TO", "victim"))
				_, _ = p.host("worktree", "repair")
			}},
			{name: "prune", strike: func(p *place) {
				p.command(strings.ReplaceAll(point, "TO", "none"))
				p.hostWorks("worktree", "prune", "--expire=now")
			}},
		},
		harmed: func(p *place) bool {
			_, err := os.Lstat(p.m)
			return err != nil || p.outsideChanged()
		},
		inside: func(p *place) {
			got, err := os.ReadFile(filepath.Join(p.m, "gitdir"))
			require.NoError(p.t, err)
			require.Equal(p.t, p.w+"/.git\n", string(got))
			require.Contains(p.t, p.hostWorks("worktree", "list", "--porcelain"), "worktree "+p.w+"\n")
			require.Equal(p.t, p.w+"/.git\n", p.works("cat $M/gitdir"), "the command sees no other")
		},
	}.run(t)
}
