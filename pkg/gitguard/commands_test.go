package gitguard

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// template is made once: most of a test's time would be Git's.
var template struct {
	sync.Once
	dir string
}

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(template.dir)
	os.Exit(code)
}

// testRepo is a repository with two commits, an annotated tag and a stash, made with trusted Git's own environment.
func testRepo(t testing.TB) string {
	t.Helper()
	testkit.Need(t, testkit.Git)
	template.Do(func() {
		var err error
		template.dir, err = os.MkdirTemp("", "gitguard-test-")
		require.NoError(t, err)
		makeRepo(t, template.dir)
	})
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(template.dir)))
	return dir
}

func makeRepo(t testing.TB, dir string) {
	t.Helper()
	git(t, dir, "init", "-q", "-b", "main")
	for _, name := range []string{"a", "b"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(name+"\n"), 0o644))
		git(t, dir, "add", name)
		git(t, dir, "commit", "-q", "-m", name)
	}
	git(t, dir, "tag", "-a", "-m", "v", "v1")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), []byte("changed\n"), 0o644))
	git(t, dir, "stash", "push", "-q")
}

func tryGit(t testing.TB, dir string, args ...string) (code int, output string) {
	t.Helper()
	path, err := findGit()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Dir = dir
	cmd.Env = append(Env(), "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org", "GIT_COMMITTER_NAME=c", "GIT_COMMITTER_EMAIL=c@example.org")
	out, err := cmd.CombinedOutput()
	if err != nil {
		require.IsType(t, &exec.ExitError{}, err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	code, out := tryGit(t, dir, args...)
	require.Zero(t, code, "git %v: %s", args, out)
	return out
}

func TestP12WhatIsAllowedIsPassedOnSoThatGitCannotMisreadIt(t *testing.T) {
	for line, want := range map[string]string{
		"status --porcelain":                "status --ignore-submodules=all --porcelain",
		"status --ignore-submodules=all -s": "status --ignore-submodules=all -s",
		"status -sb":                        "status --ignore-submodules=all -s -b",
		"status -uno":                       "status --ignore-submodules=all -uno",
		"diff --cached -- a b":              "diff --no-ext-diff --no-textconv --ignore-submodules=all --cached -- a b",
		"diff -U5 main..x":                  "diff --no-ext-diff --no-textconv --ignore-submodules=all -U5 main..x",
		"log -5 --format %s main":           "log --no-ext-diff --no-textconv --ignore-submodules=all --max-count=5 --format=%s main",
		"log -n 3 -S --output=x":            "log --no-ext-diff --no-textconv --ignore-submodules=all --max-count=3 -S--output=x",
		"log -pn3":                          "log --no-ext-diff --no-textconv --ignore-submodules=all -p --max-count=3",
		"grep -ne -O HEAD":                  "grep --no-textconv -n -e-O HEAD",
		"stash":                             "stash push",
		"reflog":                            "reflog show --no-ext-diff --no-textconv --ignore-submodules=all",
		"worktree list --porcelain":         "worktree list --porcelain",
		"branch --contains -a":              "branch --contains=HEAD -a",
		"branch --contains x":               "branch --contains=x",
		"commit -am text":                   "commit -a --message=text",
		"commit -m --amend":                 "commit --message=--amend",
		"commit --amend --no-edit":          "commit --amend --no-edit",
		"checkout -b new main":              "checkout -bnew main",
		"switch -c new":                     "switch --create=new",
		"restore -s HEAD~1 -SW a":           "restore --source=HEAD~1 -S -W a",
		"merge --strategy ort -X ours x":    "merge --strategy=ort --strategy-option=ours x",
		"add -- -p --exec=x":                "add -- -p --exec=x",
	} {
		t.Run(line, func(t *testing.T) {
			c, err := AllowGit(strings.Fields(line))
			require.NoError(t, err)
			require.Equal(t, strings.Fields(want), c.Args)
		})
	}
}

func TestP12WhatIsNotOnTheListIsRefusedByName(t *testing.T) {
	for line, named := range map[string]string{
		"":                                  "no subcommand",
		"-c core.fsmonitor=x status":        `"-c"`,
		"-C /etc status":                    `"-C"`,
		"--git-dir=/x status":               `"--git-dir=/x"`,
		"--exec-path=/x status":             `"--exec-path=/x"`,
		"--no-pager log":                    `"--no-pager"`,
		"fetch origin":                      `"fetch"`,
		"push":                              `"push"`,
		"clone x":                           `"clone"`,
		"config --list":                     `"config"`,
		"gc":                                `"gc"`,
		"submodule status":                  `"submodule"`,
		"archive HEAD":                      `"archive"`,
		"difftool":                          `"difftool"`,
		"status --ignore-submodules=none":   "--ignore-submodules",
		"status --por":                      "--por",
		"status --porcelain=v2 --verbose":   "--verbose",
		"diff --output=/tmp/x":              "--output",
		"diff --output /tmp/x":              "--output",
		"diff -O/tmp/x":                     "-O",
		"diff --no-index /etc/passwd x":     "--no-index",
		"diff /etc/passwd /dev/null":        "/etc/passwd",
		"diff -- a ../../x":                 "../../x",
		"diff --ext-diff":                   "--ext-diff",
		"diff --textconv":                   "--textconv",
		"diff --submodule=diff":             "--submodule",
		"log -pO/tmp/x":                     "-O",
		"log --show-signature":              "--show-signature",
		"show --textconv":                   "--textconv",
		"log --output=x":                    "--output",
		"grep -Ovi x":                       "-O",
		"grep --open-files-in-pager=vi x":   "--open-files-in-pager",
		"grep --no-index x":                 "--no-index",
		"grep -f /etc/passwd":               "-f",
		"cat-file --textconv HEAD:a":        "--textconv",
		"cat-file --filters HEAD:a":         "--filters",
		"describe --dirty":                  "--dirty",
		"blame --contents=/etc/passwd a":    "--contents",
		"blame --ignore-revs-file=/x a":     "--ignore-revs-file",
		"blame -S /etc/passwd a":            "-S",
		"ls-files --recurse-submodules":     "--recurse-submodules",
		"ls-files -X /etc/passwd":           "-X",
		"ls-files --exclude-from=/x":        "--exclude-from",
		"fsck --lost-found":                 "--lost-found",
		"worktree add /x":                   `"add"`,
		"worktree remove x":                 `"remove"`,
		"reflog expire --all":               `"expire"`,
		"reflog delete x":                   `"delete"`,
		"stash clear":                       `"clear"`,
		"stash branch x":                    `"branch"`,
		"stash push -p":                     "-p",
		"stash push --pathspec-from-file=x": "--pathspec-from-file",
		"symbolic-ref HEAD refs/heads/x":    "symbolic-ref",
		"symbolic-ref -d HEAD":              "-d",
		"branch -m a b":                     "-m",
		"branch --edit-description":         "--edit-description",
		"branch -u origin/x":                "-u",
		"branch --list -D x":                "branch",
		"tag -s x":                          "-s",
		"tag -F /etc/passwd x":              "-F",
		"tag -v x":                          "-v",
		"add -p":                            "-p",
		"add -i":                            "-i",
		"add --pathspec-from-file=x":        "--pathspec-from-file",
		"commit -F /etc/passwd":             "-F",
		"commit --template=x":               "--template",
		"commit -S":                         "-S",
		"commit --gpg-sign=x":               "--gpg-sign",
		"commit --mess=x":                   "--mess",
		"checkout -p":                       "-p",
		"checkout --track origin/x":         "--track",
		"checkout -b --orphan":              "--orphan",
		"checkout --recurse-submodules x":   "--recurse-submodules",
		"switch -":                          "@{-1}",
		"merge -s evil x":                   "-s",
		"merge --strategy=evil x":           "evil",
		"merge --abort x":                   "--abort",
		"merge -F x y":                      "-F",
		"cherry-pick --strategy evil x":     "evil",
		"cherry-pick -e x":                  "-e",
		"rebase -i x":                       "-i",
		"rebase --exec=x y":                 "--exec",
		"rebase -x y":                       "-x",
		"rebase --edit-todo":                "--edit-todo",
		"status --porcelain --":             "",
		"diff --stat=\x00":                  "NUL",
		"commit -m":                         "needs a value",
		"add --verbose=1":                   "takes no value",
	} {
		if named == "" {
			continue
		}
		t.Run(line, func(t *testing.T) {
			_, err := AllowGit(strings.Fields(line))
			require.ErrorIs(t, err, ErrNotAllowed)
			require.ErrorContains(t, err, named)
		})
	}
}

func TestP12StepsThatACommandMayHaveWrittenAreNotContinuedOutsideOfTheSandbox(t *testing.T) {
	for _, line := range []string{"rebase --continue", "rebase --skip", "cherry-pick --continue", "cherry-pick --skip", "revert --continue", "revert --skip"} {
		_, err := AllowGit(strings.Fields(line))
		require.ErrorIs(t, err, ErrNotAllowed, line)
		require.ErrorContains(t, err, "exec lines", line)
		require.ErrorContains(t, err, "inside of the sandbox", line)
	}
	for _, line := range []string{"rebase --abort", "cherry-pick --abort", "revert --quit", "merge --abort", "merge --continue"} {
		_, err := AllowGit(strings.Fields(line))
		require.NoError(t, err, line)
	}
}

func TestTheArgumentsOfTrustedGitAreBounded(t *testing.T) {
	_, err := AllowGit(append([]string{"add", "--"}, slices.Repeat([]string{"x"}, maxWords)...))
	require.ErrorIs(t, err, ErrNotAllowed)
	_, err = AllowGit([]string{"add", "--", strings.Repeat("x", maxWordBytes)})
	require.ErrorIs(t, err, ErrNotAllowed)
	_, err = AllowGit(append([]string{"add", "--"}, slices.Repeat([]string{"x"}, maxWords-2)...))
	require.NoError(t, err)
}

func TestOnlyWhatSurelyReadsCountsAsReading(t *testing.T) {
	for line, writes := range map[string]bool{
		"status": false, "log": false, "diff --cached": false, "stash list": false, "stash": true, "stash pop": true, "reflog": false,
		"branch": false, "branch -v": false, "branch --list x": false, "branch x": true, "branch -D x": true, "branch -- x": true, "branch --merged x": false,
		"branch -f x y": true, "tag": false, "tag -n5": false, "tag -l v*": false, "tag x": true, "tag -d x": true, "tag -m x y": true,
		"add .": true, "commit -m x": true, "reset": true, "merge x": true, "rebase x": true, "checkout x": true, "symbolic-ref HEAD": false,
	} {
		c, err := AllowGit(strings.Fields(line))
		require.NoError(t, err, line)
		require.Equal(t, writes, c.Writes, line)
	}
}

// sampleValues are values that Git takes for an option that needs one.
var sampleValues = map[string]string{
	"--max-count": "1", "--skip": "0", "--since": "2000-01-01", "--after": "2000-01-01", "--until": "2040-01-01", "--before": "2040-01-01",
	"--min-parents": "0", "--max-parents": "9", "--encoding": "UTF-8", "--date": "iso", "--diff-filter": "A", "--find-object": "HEAD",
	"--diff-algorithm": "minimal", "--diff-merges": "off", "-l": "100", "--stat-width": "80", "--stat-name-width": "40", "--stat-count": "5",
	"--inter-hunk-context": "1", "-L": "1,1:a", "--candidates": "5", "--path-format": "absolute", "--default": "HEAD", "--missing": "error",
	"--points-at": "HEAD", "--contains": "HEAD", "--no-contains": "HEAD", "--merged": "HEAD", "--no-merged": "HEAD", "--sort": "refname", "--count": "1",
	"--after-context": "1", "--before-context": "1", "--context": "1", "--max-depth": "1", "--chmod": "+x", "--cleanup": "verbatim",
	"--author": "a <a@example.org>", "--trailer": "a=b", "--fixup": "HEAD", "--squash": "HEAD", "--reuse-message": "HEAD", "--conflict": "merge",
	"--strategy": "ort", "--strategy-option": "ours", "--empty": "drop", "--onto": "HEAD", "--mainline": "1", "--ignore-rev": "HEAD", "--group": "author",
	"--with-tree": "HEAD", "--abbrev": "8", "--format": "%(refname)",
}

// usage is how Git complains of an option that it does not know, or that it reads otherwise than the list says.
var usage = []string{"usage: git", "unknown option", "unknown switch", "unrecognized argument", "takes no value", "requires a value", "unknown argument", "ambiguous argument '-"}

func TestGitKnowsEveryOptionOfTheList(t *testing.T) {
	operands := map[string][]string{
		"diff-index": {"HEAD"}, "diff-tree": {"HEAD"}, "blame": {"a"}, "shortlog": {"HEAD"}, "rev-list": {"HEAD"}, "merge-base": {"HEAD", "HEAD"},
		"ls-tree": {"HEAD"}, "cat-file": {"HEAD"}, "show-ref": {"refs/heads/main"}, "grep": {"pattern"}, "symbolic-ref": {"HEAD"},
		"check-ignore": {"a"}, "reflog exists": {"HEAD"}, "rm": {"a"}, "mv": {"a", "z"}, "restore": {"a"}, "cherry-pick": {"HEAD"}, "revert": {"HEAD"},
		"rebase": {"HEAD"}, "tag": {"v2"}, "merge": {"HEAD"}, "diff --merge-base": {"HEAD"},
	}
	ends := []string{"--abort", "--quit", "--continue"}
	alone := map[string][]string{"merge": ends, "rebase": ends, "cherry-pick": ends, "revert": ends, "tag": {"-l", "--list", "-n"}}
	// What these share with another one, Git reads by the same code.
	shared := map[string]string{"show": logOptions, "stash list": logOptions, "reflog show": logOptions, "stash show": diffOptions, "diff-files": diffOptions, "diff-tree": diffOptions,
		"diff-index": diffOptions, "log": diffOptions, "rev-list": walkOptions}
	for _, name := range subcommandsInFull() {
		t.Run(name, func(t *testing.T) {
			dir := testRepo(t)
			skip := reads(shared[name]).options
			for option, takes := range commands[name].options {
				if _, ok := skip[option]; ok {
					continue
				}
				if option == number {
					option = "-5"
				}
				args := append(strings.Fields(name), option)
				if takes == required {
					value, ok := sampleValues[option]
					if long, alias := commands[name].longNames[option]; alias {
						value, ok = sampleValues[long]
					}
					if !ok {
						value = "x"
					}
					if name == "blame" && option == "-L" {
						value = "1,1"
					}
					args = append(args, value)
				}
				if !slices.Contains(alone[name], option) {
					args = append(args, operands[name]...)
				}
				args = append(args, operands[name+" "+option]...)
				c, err := AllowGit(args)
				require.NoError(t, err, args)
				_, out := tryGit(t, dir, c.Args...)
				for _, u := range usage {
					if strings.Contains(strings.ToLower(out), u) {
						t.Errorf("git %q: %s", c.Args, strings.SplitN(out, "\n", 2)[0])
					}
				}
			}
		})
	}
}

func subcommandsInFull() []string {
	var out []string
	for name := range commands {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
