package gitwork

import (
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// everyday are the commands that sequences are drawn from; a word in braces is drawn too. What fails in an ordinary
// clone has to fail inside as well, so nothing here looks at the state first.
var everyday = []string{
	"echo {text} >> {file}", "echo {text} >> {file}", "sed -i '1s/.*/{text}/' {file}", "sed -i '2s/.*/{text}/' a", "echo {text} > new-{name}", "rm -f {file}",
	"mkdir -p sub && echo {text} > sub/{name}.txt", "ln -sfn {file} link", "chmod 755 {file}",
	"git add -A", "git add -A", "git add {file}", "git add -u", "git rm -q --cached {file}", "git rm -qf {file}", "git mv {file} moved-{name}",
	"git restore {file}", "git restore --staged {file}", "git diff", "git diff --cached --stat",
	"git commit -qm {text}", "git commit -qam {text}", "git commit -qam {text}", "git commit -q --allow-empty -m {text}", "git commit -q --amend --no-edit", "git commit -qa --amend -m {text}",
	"git add -A && git commit -qm {text}", "git add -A && git commit -qm {text}",
	"git branch {branch}", "git branch {branch} {commit}", "git branch -f {branch} {commit}", "git branch -d {branch}", "git branch -D {branch}",
	"git checkout -q -b {branch}", "git checkout -q {branch}", "git checkout -q -f {branch}", "git switch -q {branch}", "git switch -q -c {branch} {commit}", "git checkout -q --detach {commit}", "git checkout -q -f work",
	"git checkout -q --orphan {branch}", "git checkout -q {commit} -- {file}",
	"git merge -q {commit}", "git merge -q --no-ff -m {text} {commit}", "git merge -q --squash {commit}", "git merge --abort", "git merge --continue", "git checkout -q --ours -- a && git add a",
	"git rebase -q {commit}", "git rebase -q {commit}", "git rebase --abort", "git rebase --continue", "git rebase --skip", "git rebase -q -i --exec true HEAD~2",
	"git cherry-pick {commit}", "git cherry-pick side~1", "git cherry-pick -x {commit}", "git cherry-pick side~1 side", "git cherry-pick --abort", "git cherry-pick --continue", "git cherry-pick --skip",
	"git revert --no-edit {commit}", "git revert --abort",
	"git stash push -q", "git stash push -q -u", "git stash push -q -m {text} -- {file}", "git stash pop -q", "git stash apply -q --index", "git stash drop -q", "git stash list", "git stash branch {branch}",
	"git reset -q --soft {commit}", "git reset -q {commit}", "git reset -q --hard {commit}", "git reset -q --hard HEAD~1", "git reset -q --merge", "git reset -q -- {file}",
	"git tag {tag}", "git tag -f {tag} {commit}", "git tag -a -m {text} {tag}", "git tag -d {tag}",
	"git log --oneline -5", "git blame -s {file}", "git reflog -3", "git show --stat --format=%an", "git describe --always --all", "git notes add -f -m {text}",
	"git clone -q --bare . far.git; git fetch -q ./far.git '+refs/heads/*:refs/remotes/far/*'", "git push -q ./far.git HEAD:refs/heads/{branch}", "git fetch -q ./far.git {branch} && git merge -q FETCH_HEAD", "git pull -q --rebase ./far.git {branch}",
	"git bisect start HEAD v1", "git bisect good", "git bisect reset",
	"git clean -fdq", "git apply --check /dev/null", "git grep -c {text}",
}

// recipes are what people do in a row. A drawn command may still come between two of them.
var recipes = [][]string{
	{"git stash push -q -u", "git checkout -q work"},
	{"git add -A", "git commit -qm {text}", "git log --format='%h %an %s' -3"},
	{"git reset -q --hard", "git checkout -q -b {branch} {commit}", "echo {text} >> {file}", "git commit -qam {text}", "git checkout -q work", "git merge -q --no-ff -m {text} {branch}"},
	// A pick that conflicts, and what comes after it: the next commit is not the picked one's author's.
	{"git reset -q --hard", "git cherry-pick side~1", "echo resolved > a && git add a", "{author} git commit -q --no-edit", "echo {text} >> b && git commit -qam {text}", "git log --format='%h %an %s' -3"},
	{"git reset -q --hard", "git cherry-pick side~1 side", "git cherry-pick --skip", "git status"},
	{"git reset -q --hard", "git cherry-pick side~1 side", "git checkout -q --theirs a && git add a", "git cherry-pick --continue", "git diff HEAD~1 --stat"},
	{"git reset -q --hard", "git merge -q side", "git status", "git merge --abort"},
	{"git reset -q --hard", "git merge -q side", "git checkout -q --ours a && git add a", "git merge --continue", "git log --graph --oneline -8"},
	{"git reset -q --hard", "git checkout -q side", "git rebase -q main", "echo resolved > a && git add a", "git rebase --continue", "git checkout -q work"},
	{"git reset -q --hard", "git checkout -q side", "git rebase -q main", "git rebase --abort", "git checkout -q work", "git branch -d {branch}"},
	{"git reset -q --hard", "git checkout -q side", "git rebase -q work", "git rebase --skip", "git switch -q work"},
	{"git reset -q --hard", "git checkout -q --detach other", "echo {text} >> b && git commit -qam {text}", "git rebase -q --onto work other", "git branch -f {branch} HEAD", "git checkout -q work"},
	{"git reset -q --hard", "git rebase -q -i --exec 'echo {text} >> log.txt; git add log.txt; git commit -q --amend --no-edit' HEAD~2"},
	{"echo {text} >> {file}", "git stash push -q", "echo {text} >> b", "git stash push -q", "git stash pop -q stash@{1}", "git stash list"},
	{"echo {text} > fresh", "git stash push -q -u", "git stash branch {branch}"},
	{"sed -i '1s/.*/{text}/' a && git add a", "git stash push -q --keep-index", "git commit -qm {text}", "git stash pop -q"},
	{"git reset -q --hard", "git merge -q other", "git reset -q --soft HEAD~1", "git reset -q", "git add -A", "git commit -qm {text}"},
	{"git tag {tag}", "git checkout -q --detach {tag}", "git tag -d {tag}", "git checkout -q work"},
	{"git reset -q --hard", "git revert --no-edit HEAD", "git revert --no-edit HEAD~1", "git revert --abort"},
	{"git branch {branch}", "git branch -D {branch}", "git branch {branch} {commit}", "git branch -d {branch}"},
	{"git add -A && git commit -qm {text}", "git clone -q --bare . far.git", "git fetch -q ./far.git '+refs/heads/*:refs/remotes/far/*'", "git push -q ./far.git HEAD:refs/heads/{branch}", "git fetch -q ./far.git {branch}", "git merge -q FETCH_HEAD", "git pull -q --rebase ./far.git main", "rm -rf far.git"},
	{"git bisect start HEAD v1", "git bisect good", "git bisect bad", "git bisect reset"},
	{"git mv a moved-{name}", "git commit -qm {text}", "git log --follow --oneline moved-{name}", "git blame -s moved-{name}"},
}

// packing deletes or rewrites packed refs, which is what "shared" can't do.
var packing = []string{"git pack-refs --all", "git gc -q", "git repack -adq", "git prune", "git reflog expire --expire=now --all && git gc -q --prune=now"}

// hosts are what somebody does in the base clone between two commands.
var hosts = []string{
	"", "", "",
	"echo {text} >> b; git commit -qam {text}", "git branch -f host {commit}", "git tag -f host {commit}", "git branch -D host", "git gc -q", "git pack-refs --all",
}

var drawn = map[string][]string{
	"{text}": {"alpha", "beta", "gamma", "delta"}, "{file}": {"a", "a", "b", "dir/c", "s", "new-x"}, "{name}": {"x", "y"},
	"{branch}": {"work", "side", "other", "x", "y", "z/z"}, "{tag}": {"v1", "v2", "t"},
	"{commit}": {"HEAD", "HEAD~1", "main", "main", "side", "other", "side~1", "x", "work", "v1", "host"},
	"{author}": {"GIT_AUTHOR_NAME=Somebody"},
}

var drawnWord = regexp.MustCompile(`\{[a-z]+\}`)

// pick draws an item, each as likely as another: rapid by itself prefers the first ones.
func pick[T any](t *rapid.T, label string, from []T) T {
	n := rapid.Uint64().Draw(t, label)
	return from[rand.New(rand.NewPCG(n, n)).IntN(len(from))]
}

func fill(t *rapid.T, template string) string {
	return drawnWord.ReplaceAllStringFunc(template, func(word string) string { return pick(t, word, drawn[word]) })
}

// drawCommands gives what one exec runs: a recipe, or commands that have nothing to do with one another.
func drawCommands(t *rapid.T, layout string, singles []string) (commands []string) {
	defer func() {
		commands = slices.DeleteFunc(commands, func(c string) bool { return !can(layout, c) })
	}()
	if rapid.Bool().Draw(t, "in a row") {
		words := map[string]string{}
		for _, c := range pick(t, "recipe", recipes) {
			commands = append(commands, drawnWord.ReplaceAllStringFunc(c, func(word string) string {
				if words[word] == "" {
					words[word] = pick(t, word, drawn[word])
				}
				return words[word]
			}))
		}
		return commands
	}
	for range rapid.IntRange(1, 6).Draw(t, "commands") {
		commands = append(commands, fill(t, pick(t, "command", singles)))
	}
	return commands
}

// TestP11ARandomSequenceGivesWhatItGivesInAnOrdinaryClone compares after every command.
func TestP11ARandomSequenceGivesWhatItGivesInAnOrdinaryClone(t *testing.T) {
	for _, c := range []struct {
		layout string
		format format
	}{{isolated, packedFormat}, {isolated, sha256Format}, {isolated, reftableFormat}, {shared, filesFormat}, {shared, reftableFormat}} {
		t.Run(c.layout+", "+c.format.name, func(t *testing.T) {
			c.format.need(t)
			a := newAgent(t, "")
			from := clone(t, c.format)
			singles, host := everyday, hosts
			if c.layout == isolated {
				singles = slices.Concat(everyday, packing)
			} else {
				host = []string{""} // who works in a base clone at the same time shares more than its refs
			}
			rapid.Check(t, func(t *rapid.T) {
				p := newPair(t, a, from, c.layout)
				defer p.close(t)
				for range rapid.IntRange(2, 5).Draw(t, "execs") {
					p.both(t, drawCommands(t, c.layout, singles)...)
					p.arrived(t, "refs/heads/work", "refs/heads/x", "refs/heads/y", "refs/heads/z") // the session's own
					if command := fill(t, pick(t, "host", host)); command != "" {
						p.host(t, command)
					}
				}
				p.sound(t)
			})
		})
	}
}
