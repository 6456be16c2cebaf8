package git

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestP12Attack25ARefThatIsALinkOutside(t *testing.T) {
	attack{
		prepare: func(p *place) {
			for _, name := range []string{"a", "b"} {
				p.file(filepath.Join(p.out, name), p.hostWorks("rev-parse", "HEAD")+"\n")
			}
		},
		strike: func(p *place) {
			p.command(`ln -s $OUT $C/refs/heads/d; ln -s $OUT $C/refs/d`)
			if p.layout != control {
				p.command("git branch; git branch -D d/b; git pack-refs --all --prune")
				p.trusted("branch", "-D", "d/b")
			}
			if p.layout != shared {
				p.host("branch", "-D", "d/a")
				p.host("gc", "-q")
			}
		},
		sharedLimit: func(p *place) {
			// C/refs is the base clone's: plain Git there follows the link. What runs in the jail and in the sandbox does not.
			require.False(p.t, p.outsideChanged())
			requireLink(p, "refs/heads/d")
			p.host("branch", "-D", "d/a")
			require.True(p.t, p.outsideChanged())
		},
	}.run(t)
}

func TestP12Attack26APackFolderThatIsAnotherRepositorys(t *testing.T) {
	attack{
		prepare: func(p *place) {
			p.outsideGit("init", "-q", ".")
			p.outsideGit("commit", "-q", "--allow-empty", "-m", "of the other")
			p.outsideGit("gc", "-q")
			p.outsideGit("fsck")
		},
		strike: func(p *place) {
			p.command(`rm -rf $C/objects/pack; ln -s $OUT/.git/objects/pack $C/objects/pack; ln -s $OUT/.git/objects $C/objects/aa; git commit -q --allow-empty -m x; git repack -q -ad`)
			if p.layout != shared {
				p.host("repack", "-q", "-ad")
			}
			p.trusted("repack", "-a", "-d")
			p.trusted("gc")
		},
		harmed: func(p *place) bool { return p.as(p.out, "git", "fsck").Run() != nil },
		sharedLimit: func(p *place) {
			// C/objects is the base clone's: plain Git there repacks what the link names.
			require.NoError(p.t, p.as(p.out, "git", "fsck").Run())
			requireLink(p, "objects/pack")
			p.host("repack", "-q", "-ad")
			require.Error(p.t, p.as(p.out, "git", "fsck").Run())
		},
	}.run(t)
}

// replaceObject writes another content under the id of README's blob.
const replaceObject = `
id=$(git rev-parse HEAD:README); evil=$(echo evil | git hash-object -w --stdin)
o() { echo $C/objects/${1:0:2}/${1:2}; }
mkdir -p $(dirname $(o $id)); rm -f $(o $id); cp $(o $evil) $(o $id); true`

func TestP12Attack31AnObjectUnderAFalseID(t *testing.T) {
	readsEvil := func(p *place) bool { return p.hostWorks("show", "main:README") == "evil" }
	attack{
		strike: func(p *place) { p.command(replaceObject); p.command("git commit -q --allow-empty -m x") },
		harmed: readsEvil,
		sharedLimit: func(p *place) {
			// C/objects is the base clone's. It is detected by who looks.
			require.True(p.t, readsEvil(p))
			said, err := p.host("fsck")
			require.Error(p.t, err)
			require.Contains(p.t, said, "mismatch")
		},
	}.run(t)
}

func TestP12Attack31AReplacementRef(t *testing.T) {
	readsEvil := func(p *place) bool { return p.hostWorks("show", "main:README") == "evil" }
	attack{
		strike: func(p *place) {
			p.command(`git replace $(git rev-parse HEAD:README) $(echo evil | git hash-object -w --stdin)`)
		},
		harmed: readsEvil,
		inside: func(p *place) {
			// Trusted Git in the session's own repository ignores it.
			shown := p.trusted("show", "main:README")
			require.NoError(p.t, shown.err)
			require.Equal(p.t, "hello\n", shown.out)
		},
		sharedLimit: func(p *place) { require.True(p.t, readsEvil(p), "C/refs is the base clone's") },
	}.run(t)
}

func TestP12Attack31HeadNamesTheBasesBranchBeforeATrustedCommit(t *testing.T) {
	moved := func(p *place) bool { return p.hostWorks("rev-list", "--count", "main") != "1" }
	attack{
		strike: func(p *place) {
			p.command(`echo 'ref: refs/heads/main' > $M/HEAD; git commit -q --allow-empty -m inside`)
			p.trusted("commit", "--allow-empty", "-m", "by trusted code")
		},
		harmed:      moved,
		sharedLimit: func(p *place) { require.True(p.t, moved(p), "C/refs is the base clone's") },
	}.run(t)
}

// hangs says whether a call in the base clone waits at a FIFO, and ends it.
func (p *place) hangs(fifo string, args ...string) bool {
	p.t.Helper()
	return p.waits(p.as(p.b, "git", args...), func() bool { return waitsAt(p.t, fifo) })
}

// waitsAt says whether somebody waits at a FIFO to read.
func waitsAt(t *testing.T, fifo string) bool {
	t.Helper()
	if info, err := os.Lstat(fifo); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		return false
	}
	f, err := os.OpenFile(fifo, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		require.NoError(t, f.Close())
		return true
	}
	require.True(t, errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist), "%v", err)
	return false
}

// waits runs a program until it ends, or it is seen to wait; then it is ended.
func (p *place) waits(cmd *exec.Cmd, seen func() bool) bool {
	p.t.Helper()
	cmd.SysProcAttr.Setpgid = true // its helpers may be the ones that wait
	require.NoError(p.t, cmd.Start())
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	defer func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); <-ended }()
	for !seen() {
		select {
		case <-ended: // at the latest when its context ends
			return false
		case <-time.After(5 * time.Millisecond):
		}
	}
	return true
}

// baseCalls are what the base clone's owner does, all of which look into every worktree's metadata.
func (p *place) baseCalls() [][]string {
	return [][]string{{"branch"}, {"worktree", "list"}, {"gc", "-q"}, {"fetch", "-q", p.out}, {"worktree", "add", "-q", "--detach", filepath.Join(filepath.Dir(p.b), "another")}}
}

func TestP12Attack33APipeAtHeadHangsTheBase(t *testing.T) {
	hang := func(p *place) (n int) {
		for _, args := range p.baseCalls() {
			if p.hangs(filepath.Join(p.m, "HEAD"), args...) {
				n++
			}
		}
		return n
	}
	attack{
		prepare: func(p *place) {
			p.outsideGit("init", "-q", ".")
			p.outsideGit("commit", "-q", "--allow-empty", "-m", "of another")
		},
		strike: func(p *place) { p.command(`rm -f $M/HEAD; mkfifo $M/HEAD`) },
		harmed: func(p *place) bool { return hang(p) > 0 },
		inside: func(p *place) {
			if p.layout == isolated {
				p.hostWorks("fetch", "-q", p.out)
				p.hostWorks("worktree", "add", "-q", "--detach", filepath.Join(filepath.Dir(p.b), "one-more"))
			}
		},
		sharedLimit: func(p *place) { require.NotZero(p.t, hang(p), "M is the base clone's") },
	}.run(t)
}

func TestP12Attack33HeadThatNamesAnotherBranchBlocksIt(t *testing.T) {
	blocked := func(p *place) bool {
		_, err := p.host("checkout", "-q", "other")
		if err == nil {
			p.hostWorks("checkout", "-q", "main")
		}
		return err != nil
	}
	attack{
		prepare:     func(p *place) { p.hostWorks("branch", "other") },
		strike:      func(p *place) { p.command(`echo 'ref: refs/heads/other' > $M/HEAD`) },
		harmed:      blocked,
		sharedLimit: func(p *place) { require.True(p.t, blocked(p), "M is the base clone's") },
	}.run(t)
}

func TestP12Attack33AnIndexThatNamesAMissingObjectBreaksGc(t *testing.T) {
	broken := func(p *place) bool { _, err := p.host("gc", "-q"); return err != nil }
	attack{
		strike:      func(p *place) { p.plantIndex(map[string]string{"README": "1111111111111111111111111111111111111111"}) },
		harmed:      broken,
		inside:      func(p *place) { p.command("true") },
		sharedLimit: func(p *place) { require.True(p.t, broken(p), "M is the base clone's") },
	}.run(t)
}
