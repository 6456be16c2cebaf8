package git

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// evilRepository makes a repository in the worktree whose configuration runs a program, as $W/evil. The configuration comes
// last: what makes the repository would run it as well.
const evilRepository = `git clone -q --bare $B $W/evil && git -C $W/evil config core.bare false && git -C $W/evil config core.fsmonitor "touch $OUT/fired; false"
`

func TestP11Attack01AHookInTheBaseClone(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`printf '#!/bin/sh\ntouch %s/fired\n' $OUT > $C/hooks/pre-commit; chmod +x $C/hooks/pre-commit`)
			p.hostWorks("commit", "-q", "--allow-empty", "-m", "by the host")
		},
	}.run(t)
}

func TestP11Attack02AProgramInTheConfiguration(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`printf '[core]\n\tfsmonitor = "touch %s/fired; false"\n' $OUT >> $C/config; git config core.fsmonitor "touch $OUT/fired; false"; git config --worktree core.fsmonitor "touch $OUT/fired; false"`)
			p.hostWorks("status")
			p.trusted("status")
		},
	}.run(t)
}

// The host's git config renames a new file over the old one, which takes a mount on the old one away.
func TestP11Attack03TheConfigurationAfterTheHostHasWrittenIt(t *testing.T) {
	const try = `printf '[core]\n\tfsmonitor = "touch %s/fired; false"\n' $OUT >> $C/config`
	attack{
		strike: func(p *place) {
			p.command("echo before")
			p.hostWorks("config", "user.note", "of the host")
			p.sealed = p.describeSealed()
			p.command(try)
			p.hostWorks("status")
			// Also within one command's life.
			held := p.hold(try)
			p.hostWorks("config", "user.note", "of the host again")
			if p.layout != control {
				p.sealed = p.describeSealed()
			}
			held.release()
			p.hostWorks("status")
			p.hostWorks("config", "--unset", "user.note")
			p.sealed = p.describeSealed()
		},
		inside: func(p *place) { require.NotContains(p.t, describe(p.t, filepath.Join(p.c, "config"))[0], "fsmonitor") },
	}.run(t)
}

func TestP11Attack04TheParentOfASealedPathIsRenamed(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`
plant() { mkdir -p $C/hooks; printf '#!/bin/sh\ntouch %s/fired\n' $OUT > $C/hooks/pre-commit; chmod +x $C/hooks/pre-commit; }
mv $B $B.x && cp -r $B.x $B && plant
mv $C $C.x && cp -r $C.x $C && plant
mv $C/hooks $C/h2 && plant
mv $C/info $C/i2; mv $C/config $C/c2 && cp $C/c2 $C/config; mv $M $M.x && cp -r $M.x $M; mv $W $W.x`)
			p.host("commit", "-q", "--allow-empty", "-m", "by the host")
		},
	}.run(t)
}

// A command may make no user namespace, and a seal's mount is locked in one that it would get.
func TestP11Attack05ASealIsUnmountedInAUserNamespace(t *testing.T) {
	testkit.Need(t, testkit.UserNamespaces)
	attack{
		config: "runtime: {nested_userns: true}\n",
		strike: func(p *place) {
			seal := ""
			if p.layout == control { // a seal that the namespace itself has made
				seal = `mount --bind $C/hooks $C/hooks; mount -o remount,ro,bind $C/hooks;`
			}
			p.command(`
plant() { printf '#!/bin/sh\ntouch %s/fired\n' $OUT > $C/hooks/pre-commit && chmod +x $C/hooks/pre-commit; }
export -f plant
for take in 'mount -o remount,rw,bind $C/hooks' 'umount $C/hooks' 'umount -l $C/hooks' 'umount -R $C' 'mount -o remount,rw,bind $C'; do
  unshare -Urm bash -c "` + seal + ` plant; $take; plant"
done`)
			p.hostWorks("commit", "-q", "--allow-empty", "-m", "by the host")
		},
	}.run(t)
}

func TestP11Attack06ThePointersOfTheWorktree(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(evilRepository + `
echo $W/evil > $M/commondir
mv $M/commondir $M/c2 && echo $W/evil > $M/commondir
rm -f $M/commondir && echo $W/evil > $M/commondir
echo $W/evil > x && mv -f x $M/commondir
echo $W/evil/.git > $M/gitdir; mv $M/gitdir $M/g2; rm -f $M/gitdir; true`)
			p.trusted("status")
			p.host("worktree", "prune")
		},
		inside: func(p *place) {
			for name, want := range map[string]string{"commondir": "../..\n", "gitdir": p.w + "/.git\n"} {
				got, err := os.ReadFile(filepath.Join(p.m, name))
				require.NoError(p.t, err)
				require.Equal(p.t, want, string(got), name)
			}
		},
	}.run(t)
}

func TestP11Attack07TheWorktreesGitFileIsReplaced(t *testing.T) {
	var steps []step
	kinds := map[string]string{
		"file":   `rm -f .git; echo "gitdir: $W/evil" > .git; echo "gitdir: $W/evil" > x; mv -f x .git`,
		"folder": `rm -f .git || mv .git g; git init -q . && git config core.fsmonitor "touch $OUT/fired; false"`,
		"link":   `rm -f .git; ln -s evil .git; ln -s evil y; mv -fT y .git`,
	}
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		replace := kinds[name]
		steps = append(steps, step{name: name, strike: func(p *place) {
			p.command(evilRepository + replace)
			p.trusted("status")
		}, undo: "rm -rf evil"})
	}
	attack{
		steps: steps,
		inside: func(p *place) {
			got, err := os.ReadFile(filepath.Join(p.w, ".git"))
			require.NoError(p.t, err)
			require.Equal(p.t, "gitdir: "+p.m+"\n", string(got))
		},
	}.run(t)
}

func TestP11Attack08AWorktreesConfigurationThatTheHostSwitchesOn(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(`git config -f $M/config.worktree core.fsmonitor "touch $OUT/fired; false"; printf '[core]\n\tfsmonitor = "touch %s/fired; false"\n' $OUT > $M/config.worktree; cp $M/config.worktree x && mv -f x $M/config.worktree`)
			p.hostWorks("config", "extensions.worktreeConfig", "true")
			p.trusted("status")
			p.hostWorks("status")
			if p.layout != control {
				ctx := p.bounded()
				_, err := p.agent.Client.Execs.Exec(ctx, p.request("true"))
				require.ErrorContains(p.t, err, "worktreeconfig", "nothing runs as long as a command's file could be configuration")
			}
			p.hostWorks("config", "--unset", "extensions.worktreeConfig")
			p.sealed = p.describeSealed()
		},
		inside: func(p *place) {
			got, err := os.ReadFile(filepath.Join(p.m, "config.worktree"))
			if err == nil {
				require.Empty(p.t, got, "whatever switches it on later finds nothing")
			} else {
				require.ErrorIs(p.t, err, os.ErrNotExist)
			}
		},
	}.run(t)
}

// With such a file the base clone becomes a part of another repository.
func TestP11Attack09ACommondirInTheBaseClone(t *testing.T) {
	attack{
		strike: func(p *place) {
			p.command(evilRepository + `echo $W/evil > $C/commondir`)
			p.hostWorks("status")
			p.trusted("status")
		},
	}.run(t)
}

func TestP11Attack10AlternatesWhereThereWasNoFolderForThem(t *testing.T) {
	const secret = "of another repository\n"
	stolen := func(p *place) bool {
		id := p.blob("f")
		_, err := p.host("cat-file", "-e", id)
		return err == nil || p.trusted("cat-file", "-p", id).out == secret
	}
	attack{
		prepare: func(p *place) {
			require.NoError(p.t, os.RemoveAll(filepath.Join(p.c, "objects", "info")))
			p.file(filepath.Join(p.out, "f"), secret)
			p.outsideGit("init", "-q", ".")
			p.outsideGit("add", "f")
		},
		strike: func(p *place) {
			p.command(`
try() { mkdir -p $C/objects/info; echo $OUT/.git/objects > $C/objects/info/alternates; }
try || { mv $C/objects/info $C/objects/i2 && try; } || { rm -rf $C/objects/info && try; } || { mv $C/objects $C/o2 && try; }`)
		},
		harmed: stolen,
		inside: func(p *place) {
			_, err := os.Lstat(filepath.Join(p.c, "objects", "info", "alternates"))
			require.ErrorIs(p.t, err, os.ErrNotExist)
		},
	}.run(t)
}

func TestP11Attack34TheFoldersThatSealsLieIn(t *testing.T) {
	attack{
		strike: func(p *place) {
			said := p.command(`
for d in $M $C/refs/../worktrees $C $B $(dirname $B) $W $C/hooks $C/info $C/objects/info; do mv $d $d.x && echo moved $d && mv $d.x $d; done
mv $C/objects $C/o2 && mkdir -p $C/objects/info && echo $OUT/x > $C/objects/info/alternates && echo moved objects
mv $C/worktrees $C/w2 && ln -s $OUT $C/worktrees && echo moved worktrees
true`)
			if p.layout == control { // what the next mount would do, which makes its target where it is missing
				require.NoError(p.t, os.MkdirAll(p.m, 0o755))
				return
			}
			require.NotContains(p.t, said, "moved ")
			p.retire()
			p.works("git status")
		},
	}.run(t)
}
