package git

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a command wrote is read by the harvest, which is root's to begin with: the attacks of this file are on that. Their
// control cases are a harvest as one might write it.

// below says whether any file below a folder has a text in it.
func below(t *testing.T, dir, text string) bool {
	t.Helper()
	found := false
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		if d.Type().IsRegular() {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			found = found || strings.Contains(string(b), text)
		}
		return nil
	}))
	return found
}

func TestP12Attack19LinksToRootsFilesWhereTheHarvestReads(t *testing.T) {
	const secret = "-----root's key-----"
	var steps []step
	for _, file := range []string{"$M/index", "$M/HEAD", "$M/logs/HEAD", "$C/packed-refs", "$C/refs/heads/topic", "$C/logs/refs/heads/topic", "$C/shallow"} {
		steps = append(steps, step{name: strings.ReplaceAll(file, "/", " "), undo: "rm -f " + file + "; mv kept " + file + "; true", strike: func(p *place) {
			p.command("git commit -q --allow-empty -m x; mv " + file + " kept; ln -s $OUT/key " + file)
			if p.layout == control {
				out, err := exec.Command("cp", "-rL", p.c, p.w+"/copied").CombinedOutput()
				require.NoError(p.t, err, string(out))
				return
			}
			p.trustedFor(impatience, "commit", "--allow-empty", "-m", "z")
		}})
	}
	attack{
		prepare: func(p *place) {
			require.NoError(p.t, os.WriteFile(filepath.Join(p.out, "key"), []byte(secret+"\n"), 0o600))
		},
		steps: steps,
		harmed: func(p *place) bool {
			return below(p.t, p.c, secret) || below(p.t, p.w, secret) || p.agent != nil && below(p.t, p.agent.State, secret)
		},
		inside: func(p *place) {
			p.command("rm -f $M/index $M/logs/HEAD; ln -s $OUT/key $M/index; ln -s $OUT/key $M/logs/HEAD")
		},
	}.run(t)
}

// A ref's name may have a line's end in it, if one writes it as a file: for update-ref it is one more instruction.
func TestP12Attack24ARefNameThatIsAnInstruction(t *testing.T) {
	attack{
		prepare: func(p *place) { p.hostWorks("branch", "victim") },
		strike: func(p *place) {
			p.command(`
d=$(printf 'x\ndelete refs'); mkdir -p "$C/refs/heads/$d/heads"; git rev-parse HEAD > "$C/refs/heads/$d/heads/victim"
git rev-parse HEAD > "$C/refs/heads/-D"; git rev-parse HEAD > "$C/refs/heads/a b"; git commit -q --allow-empty -m x`)
			if p.layout == control {
				p.command(`cd $C; find refs/heads -path '*victim*' -newer config -type f -printf 'verify %p\n' | grep -a '^delete' | git update-ref --stdin`)
				return
			}
			p.trusted("for-each-ref")
			if p.layout == isolated {
				require.NotContains(p.t, p.hostWorks("for-each-ref"), "refs/heads/-", "a branch that is an option to whoever lists branches")
			}
		},
		harmed: func(p *place) bool { _, err := p.host("rev-parse", "--verify", "refs/heads/victim"); return err != nil },
	}.run(t)
}

// A tree can name what no checkout may write.
func TestP12Attack23ATreeThatLeadsOutside(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.works(`
blob=$(printf '[core]\n\tfsmonitor = "touch %s/fired; false"\n' $OUT | git hash-object -w --stdin)
tree() { printf "$1 $2\0"; git cat-file -t $3 > /dev/null; printf "$(echo $3 | sed 's/../\\x&/g')"; }
inner=$(tree 100644 config $blob | git hash-object -t tree --literally -w --stdin)
outer=$( { tree 40000 .. $inner; tree 40000 .git $inner; } | git hash-object -t tree --literally -w --stdin)
git update-ref refs/heads/topic $(git commit-tree -p HEAD -m evil $outer)`)
			p.trusted("status")
		},
		harmed: func(p *place) bool {
			said, err := p.host("fsck", "--strict")
			return err != nil && strings.Contains(said, "hasDot")
		},
		sharedLimit: func(p *place) {
			said, err := p.host("fsck", "--strict")
			require.Error(p.t, err, "C/objects is the base clone's")
			require.Contains(p.t, said, "hasDotgit")
		},
	}.run(t)
}
