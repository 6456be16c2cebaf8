package gitguard

import (
	"slices"
	"strings"
)

// command is one entry of the list of what trusted Git may be asked for.
type command struct {
	writes    bool
	options   map[string]takes
	longNames map[string]string
	// adds come right after the subcommand.
	adds []string
	// check looks at the whole line; its answer replaces writes.
	check     func(*words) (writes bool, err error)
	withValue func(name, value string) error
}

// takes says what an option has for a value.
type takes int

const (
	nothing takes = iota
	// required is "--name=value", "--name value", "-xvalue" or "-x value".
	required
	// optional is "--name", "--name=value", "-x" or "-xvalue".
	optional
	// lastOptional is like optional, and takes the next word too; where there is none, or it is an option, it is HEAD.
	lastOptional
)

// number in a list of options is "-5".
const number = "-#"

const (
	diffOptions = `-p --patch -u -s --no-patch -U[=] --unified[=] --raw --stat[=] --stat-width= --stat-name-width= --stat-count= --numstat --shortstat
--dirstat[=] --summary --compact-summary --patch-with-stat --patch-with-raw -z --name-only --name-status --color[=] --no-color --color-moved[=]
--no-color-moved --color-words[=] --word-diff[=] --no-renames --rename-empty --no-rename-empty --check --full-index --binary --abbrev[=]
--no-abbrev -B[=] --break-rewrites[=] -M[=] --find-renames[=] --find-copies[=] --find-copies-harder -D --irreversible-delete -l=
--diff-filter= -S= -G= --find-object= --pickaxe-all --pickaxe-regex -R --relative[=] --no-relative -a --text --ignore-cr-at-eol
--ignore-space-at-eol -b --ignore-space-change -w --ignore-all-space --ignore-blank-lines --inter-hunk-context= -W --function-context
--exit-code --quiet --no-prefix --src-prefix= --dst-prefix= --line-prefix= --minimal --patience --histogram --diff-algorithm=
--indent-heuristic --no-indent-heuristic --anchored= --ita-invisible-in-index -m -c --cc --combined-all-paths `

	walkOptions = `-# -n=--max-count --max-count= --skip= --since= --after= --until= --before= --author= --committer= --grep= --grep-reflog= --all-match
--invert-grep -i --regexp-ignore-case --basic-regexp -E --extended-regexp -F --fixed-strings --remove-empty --merges --no-merges
--min-parents= --max-parents= --no-min-parents --no-max-parents --first-parent --not --all --branches[=] --tags[=] --remotes[=] --glob=
--exclude= --reflog -g --walk-reflogs --cherry-mark --cherry-pick --cherry --left-only --right-only --left-right --boundary
--simplify-by-decoration --full-history --dense --sparse --simplify-merges --ancestry-path --date-order --author-date-order
--topo-order --reverse --no-walk[=] --do-walk --pretty[=] --format= --abbrev-commit --no-abbrev-commit --oneline --encoding=
--relative-date --date= --parents --children --graph --no-graph --ignore-missing `

	logOptions = diffOptions + walkOptions + `--follow --decorate[=] --no-decorate --decorate-refs= --decorate-refs-exclude= --source --mailmap
--use-mailmap --no-mailmap --log-size -L= --full-diff --notes[=] --no-notes --expand-tabs[=] --no-expand-tabs --diff-merges= --root `

	listOptions = `--sort= --format= --contains[_] --no-contains[_] --merged[_] --no-merged[_] --points-at= -i --ignore-case --color[=] --no-color --column[=] --no-column `
)

// onlyHere keeps Git from programs that the configuration names, and out of nested repositories: .gitmodules can undo a
// configuration value, but not an option.
var onlyHere = []string{"--no-ext-diff", "--no-textconv", "--ignore-submodules=all"}

// withoutSecond are the subcommands that have subcommands, and which one is meant without one.
var withoutSecond = map[string]string{"stash": "push", "worktree": "list", "reflog": "show"}

var commands = map[string]command{
	"status": reads(`-s --short -b --branch --show-stash --porcelain[=] --long -u[=] --untracked-files[=] --ignored[=] -z --column[=] --no-column
--ahead-behind --no-ahead-behind --renames --no-renames --find-renames[=]`).adding("--ignore-submodules=all"),
	"diff": reads(diffOptions + `--cached --staged --merge-base -0 -1 -2 -3 --base --ours --theirs`).adding(onlyHere...).
		checked(inside),
	"diff-index": reads(diffOptions + `--cached --merge-base`).adding(onlyHere...),
	"diff-files": reads(diffOptions + `-q -0 -1 -2 -3 --base --ours --theirs`).adding(onlyHere...),
	"diff-tree":  reads(diffOptions + `-r -t --root -v --pretty[=] --format= --no-commit-id --always --merge-base`).adding(onlyHere...),
	"log":        reads(logOptions).adding(onlyHere...),
	"show":       reads(logOptions).adding(onlyHere...),
	"blame": reads(`-L= -s -e --show-email -w -l -t -f --show-name -n --show-number -p --porcelain --line-porcelain --incremental -M[=] --date=
--since= --root --reverse -b --abbrev= --first-parent --ignore-rev= --show-stats -c --minimal`).adding("--no-textconv"),
	"shortlog": reads(strings.ReplaceAll(walkOptions, "--committer=", "") + `-s --summary --numbered -e --email -w[=] --group=`),
	"describe": reads(`--all --tags --contains --always --abbrev[=] --candidates= --exact-match --long --match= --exclude= --first-parent`),
	"rev-parse": reads(`--verify -q --quiet --short[=] --abbrev-ref[=] --symbolic --symbolic-full-name --show-toplevel --git-dir --git-common-dir
--absolute-git-dir --path-format= --is-inside-work-tree --is-inside-git-dir --is-bare-repository --is-shallow-repository --show-prefix
--show-cdup --show-object-format[=] --all --branches[=] --tags[=] --remotes[=] --glob= --exclude= --not --default= --revs-only --no-revs
--flags --no-flags --since= --after= --until= --before=`),
	"rev-list":   reads(walkOptions + `--count --objects --timestamp --header --no-commit-header --quiet --full-history --disk-usage --missing=`),
	"merge-base": reads(`-a --all --is-ancestor --octopus --independent --fork-point`),
	"ls-files": reads(`-c --cached -d --deleted -m --modified -o --others -i --ignored -s --stage -u --unmerged -k --killed -t -v -f -z -x= --exclude=
--exclude-standard --directory --no-empty-directory --error-unmatch --with-tree= --full-name --abbrev[=] --eol --debug --deduplicate`),
	"ls-tree":      reads(`-d -r -t -l --long -z --name-only --name-status --object-only --full-name --full-tree --abbrev[=] --format=`),
	"cat-file":     reads(`-t -s -e -p`),
	"show-ref":     reads(`--head --heads --tags -d --dereference -s[=] --hash[=] --verify -q --quiet --abbrev[=]`),
	"for-each-ref": reads(`--count= --sort= --format= --color[=] --points-at= --merged[_] --no-merged[_] --contains[_] --no-contains[_] --ignore-case`),
	"name-rev":     reads(`--tags --refs= --exclude= --all --name-only --no-undefined --undefined --always`),
	"grep": reads(`-n --line-number --column -i --ignore-case -w --word-regexp -v --invert-match -h -H --full-name -E --extended-regexp -G
--basic-regexp -F --fixed-strings -l --files-with-matches --name-only -L --files-without-match -z --null -c --count --color[=] --no-color
--break --heading -p --show-function -W --function-context -A=--after-context --after-context= -B=--before-context --before-context=
--context= --max-depth= -q --quiet -o --only-matching -a --text -I -r --recursive --no-recursive --cached --untracked --exclude-standard
--no-exclude-standard -e= --and --or --not --all-match --max-count= -m=--max-count`).adding("--no-textconv"),
	"branch": reads(listOptions + `-l --list -a --all -r --remotes -v --verbose --abbrev[=] --no-abbrev --show-current -d --delete -D -f --force
--no-track -q --quiet`).checked(branchOrList),
	"tag": reads(listOptions + `-l --list -n[=] -a --annotate -m=--message --message= --cleanup= -f --force -d --delete --create-reflog
--no-sign`).checked(tagOrList),
	"symbolic-ref":  reads(`-q --quiet --short --no-recurse`).checked(oneName),
	"check-ignore":  reads(`-q --quiet -v --verbose -n --non-matching`),
	"count-objects": reads(`-v --verbose -H --human-readable`),
	"fsck": reads(`--full --no-full --strict --dangling --no-dangling --unreachable --root --tags --cache --reflogs --no-reflogs --verbose -v
--connectivity-only --name-objects --progress --no-progress`),
	"stash list":    reads(logOptions).adding(onlyHere...),
	"stash show":    reads(diffOptions + `--include-untracked --no-include-untracked --only-untracked`).adding(onlyHere...),
	"worktree list": reads(`--porcelain -v --verbose -z`),
	"reflog show":   reads(logOptions).adding(onlyHere...),
	"reflog exists": reads(``),

	"add": writes(`-n --dry-run -v --verbose -f --force -u --update -A --all --no-all --ignore-removal --no-ignore-removal -N --intent-to-add --refresh
--ignore-errors --chmod= --renormalize`),
	"rm": writes(`-n --dry-run -q --quiet --cached -f --force -r --ignore-unmatch`),
	"mv": writes(`-v --verbose -n --dry-run -f --force -k`),
	"commit": writes(`-a --all -i --include -o --only -q --quiet -v --verbose -m=--message --message= --amend --no-edit --reset-author --author= --date=
--allow-empty --allow-empty-message -s --signoff --no-signoff -n --no-verify --no-gpg-sign --cleanup= --trailer= --fixup= --squash=
--reuse-message= --dry-run --short --porcelain --long --branch -z -u[=] --untracked-files[=] --no-status --status --no-post-rewrite`),
	"reset": writes(`--soft --mixed --hard --merge --keep -q --quiet --no-quiet -N --intent-to-add --refresh --no-refresh`),
	"restore": writes(`-s=--source --source= -S --staged -W --worktree -q --quiet --progress --no-progress --ours --theirs -m --merge --conflict=
--ignore-unmerged --overlay --no-overlay`),
	"checkout": writes(`-b= -B= -l -d --detach -f --force -q --quiet --progress --no-progress --ours --theirs -m --merge --conflict= --overlay
--no-overlay --guess --no-guess --no-track --orphan= --ignore-other-worktrees --overwrite-ignore --no-overwrite-ignore`).forbiddingDash("-b", "-B", "--orphan"),
	"switch": writes(`-c=--create --create= --force-create= -d --detach -f --force --discard-changes -q --quiet --progress --no-progress -m --merge
--conflict= --guess --no-guess --no-track --orphan= --ignore-other-worktrees --overwrite-ignore --no-overwrite-ignore`).forbiddingDash("--create", "--force-create", "--orphan"),
	"stash push":  writes(`-m=--message --message= -k --keep-index --no-keep-index -u --include-untracked --no-include-untracked -a --all -S --staged -q --quiet`),
	"stash pop":   writes(`--index -q --quiet`),
	"stash apply": writes(`--index -q --quiet`),
	"stash drop":  writes(`-q --quiet`),
	"merge": writes(mergeOptions + `--commit --no-commit -n --stat --no-stat --log[=] --no-log --squash --no-squash --ff --no-ff --ff-only
-m=--message --message= -q --quiet -v --verbose --progress --no-progress --autostash --no-autostash --allow-unrelated-histories --no-verify
--no-gpg-sign --signoff --no-signoff --cleanup= --into-name= --overwrite-ignore --no-overwrite-ignore --abort --quit --continue`).checked(mergeState),
	"cherry-pick": writes(mergeOptions + `-n --no-commit -x -s --signoff -m=--mainline --mainline= --ff --allow-empty --allow-empty-message
--keep-redundant-commits --cleanup= --no-gpg-sign --rerere-autoupdate --no-rerere-autoupdate --abort --quit`),
	"revert": writes(mergeOptions + `-n --no-commit -s --signoff -m=--mainline --mainline= --cleanup= --no-gpg-sign --rerere-autoupdate
--no-rerere-autoupdate --abort --quit`),
	"rebase": writes(mergeOptions + `--onto= --keep-base --root --autostash --no-autostash --fork-point --no-fork-point -q --quiet -v --verbose --stat
--no-stat -n --no-verify --force-rebase --no-ff --merge -m --rebase-merges[=] --no-rebase-merges --empty= --keep-empty
--no-keep-empty --reapply-cherry-picks --no-reapply-cherry-picks --committer-date-is-author-date --reset-author-date --ignore-date
--signoff --no-gpg-sign --update-refs --no-update-refs --no-autosquash --abort --quit`),
}

const mergeOptions = `--strategy= --strategy-option= -X=--strategy-option `

// strategies are those that Git has built in; for any other name it runs git-merge-NAME.
var strategies = []string{"ort", "recursive", "resolve", "octopus", "ours", "subtree"}

// optionValues say which values an option may have that could name a program.
var optionValues = map[string]func(string) bool{
	"--strategy": func(v string) bool { return slices.Contains(strategies, v) },
}

// neverAllowed says why, where it isn't plain: by option, or by subcommand and option.
var neverAllowed = map[string]string{
	"--output":              "it writes a file anywhere",
	"-o":                    "it names a file or a program",
	"-O":                    "it runs a program, or reads a file",
	"--open-files-in-pager": "it runs a program",
	"--ext-diff":            "it runs a program that the configuration names",
	"--textconv":            "it runs a program that the configuration names",
	"--filters":             "it runs a program that the configuration names",
	"--no-index":            "it reads files outside of the repository",
	"--upload-pack":         "it names a program",
	"--receive-pack":        "it names a program",
	"--exec":                "it names a program",
	"--gpg-sign":            "there is no key to sign with, and it runs a program",
	"-S":                    "there is no key to sign with, and it runs a program",
	"--show-signature":      "it runs a program",
	"--verify-signatures":   "it runs a program",
	"--submodule":           "it has Git go into nested repositories",
	"--ignore-submodules":   "nested repositories are left alone, always",
	"--recurse-submodules":  "it has Git go into nested repositories",
	"--dirty":               "it has Git go into nested repositories",
	"--broken":              "it has Git go into nested repositories",
	"--pathspec-from-file":  "it reads a file; give the paths as words",
	"--file":                "it reads a file; give the message as --message",
	"-F":                    "it reads a file; give the message as --message",
	"--template":            "it reads a file",
	"--edit":                "nobody is there to edit",
	"-e":                    "nobody is there to edit",
	"--interactive":         "nobody is there to answer",
	"-i":                    "nobody is there to answer",
	"--patch":               "nobody is there to answer",
	"-p":                    "nobody is there to answer",
	"-C":                    "another folder or repository can't be named; of options of that name the long form may be allowed",
	"--track":               "it writes the configuration, which is read-only",
	"-t":                    "it writes the configuration, which is read-only",
	"--stdin":               "there is no standard input",
	"--lost-found":          "it writes files into the Git folder",

	"rebase --continue":      whyContinue,
	"rebase --skip":          whyContinue,
	"rebase -x":              "it names a program",
	"cherry-pick --continue": whyContinue,
	"cherry-pick --skip":     whyContinue,
	"revert --continue":      whyContinue,
	"revert --skip":          whyContinue,
}

const whyContinue = "it runs what a command may have written into the Git folder's list of steps, exec lines and strategies: do it inside of the sandbox, or --abort"

func reads(options string) command { return command{}.listing(options) }

func writes(options string) command { return command{writes: true}.listing(options) }

// listing reads a list of options: "-s", "--short", "--count=" (a value is required), "--color[=]" (it is optional),
// "--merged[_]" (it is optional, and can be the next word), and "-m=--message" (-m is written as --message).
func (c command) listing(options string) command {
	c.options, c.longNames = map[string]takes{}, map[string]string{}
	for _, o := range strings.Fields(options) {
		name, long, alias := strings.Cut(o, "=--")
		if alias {
			c.options[name], c.longNames[name] = required, "--"+long
			continue
		}
		if n, ok := strings.CutSuffix(o, "[=]"); ok {
			c.options[n] = optional
		} else if n, ok := strings.CutSuffix(o, "[_]"); ok {
			c.options[n] = lastOptional
		} else if n, ok := strings.CutSuffix(o, "="); ok {
			c.options[n] = required
		} else {
			c.options[o] = nothing
		}
	}
	return c
}

func (c command) adding(words ...string) command {
	c.adds = words
	return c
}

func (c command) checked(f func(*words) (bool, error)) command {
	c.check = f
	return c
}

// forbiddingDash is for options whose value is a branch's name.
func (c command) forbiddingDash(names ...string) command {
	c.withValue = func(name, value string) error {
		if slices.Contains(names, name) && strings.HasPrefix(value, "-") {
			return notAllowed("%q as the name of a branch: it begins with a dash", value)
		}
		return nil
	}
	return c
}

// inside refuses paths that would have git diff compare files outside of the worktree, as --no-index does.
func inside(p *words) (bool, error) {
	for _, w := range append(append([]string(nil), p.plain...), p.paths...) {
		if strings.HasPrefix(w, "/") || slices.Contains(strings.Split(w, "/"), "..") {
			return false, notAllowed("%q of git diff: it could lie outside of the worktree; name the path from the worktree's top", w)
		}
	}
	return false, nil
}

// oneName is the reading form of git symbolic-ref.
func oneName(p *words) (bool, error) {
	if len(p.plain) != 1 || len(p.paths) > 0 {
		return false, notAllowed("git symbolic-ref with %d names: with one it reads, and only that is allowed", len(p.plain))
	}
	return false, nil
}

// branchOrList tells git branch's forms apart.
func branchOrList(p *words) (bool, error) {
	return makesOrLists(p, []string{"-l", "--list", "-a", "--all", "--show-current"}, []string{"-d", "--delete", "-D", "-f", "--force", "--no-track"})
}

func tagOrList(p *words) (bool, error) {
	return makesOrLists(p, []string{"-l", "--list", "-n"}, []string{"-d", "--delete", "-f", "--force", "-a", "--annotate", "--message", "--create-reflog"})
}

// makesOrLists: what is not certainly a list counts as writing.
func makesOrLists(p *words, lists, makes []string) (bool, error) {
	list, make := p.has(lists...), p.has(makes...)
	if list && make {
		return false, notAllowed("git %s with options that list and options that change something: use one of the two kinds", p.name)
	}
	return make || !list && len(p.plain)+len(p.paths) > 0, nil
}

// mergeState: what ends an unfinished merge stands alone.
func mergeState(p *words) (bool, error) {
	if p.has("--abort", "--quit", "--continue") && len(p.out) > 1 {
		return true, notAllowed("git merge --abort, --quit and --continue take nothing else")
	}
	return true, nil
}
