package gitguard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Report is what a check of a repository found.
type Report struct {
	// Repository is the base clone: the folder that has .git, or a bare repository itself.
	Repository string `json:"repository"`
	// CommonDir is the base clone's Git folder.
	CommonDir string    `json:"commonDir"`
	Findings  []Finding `json:"findings"`
	// Attributes says that the attributes and the submodules in the tree of HEAD, and of what else was named, were looked
	// at.
	Attributes bool `json:"attributes"`
}

// Refused gives the findings that refuse a layout.
func (r Report) Refused(layout string) []Finding {
	var out []Finding
	for _, f := range r.Findings {
		if f.Refuses(layout) {
			out = append(out, f)
		}
	}
	return out
}

// Verdict is what a layout makes of the repository: "ok", "left out N" (N findings are not in the sanitised configuration,
// and nothing is refused), or "refused".
func (r Report) Verdict(layout string) string {
	left := 0
	for _, f := range r.Findings {
		switch {
		case f.Refuses(layout):
			return "refused"
		case layout == layoutIsolated && f.Kind != Note:
			left++
		}
	}
	if left > 0 {
		return fmt.Sprintf("left out %d", left)
	}
	return "ok"
}

// Runner runs Git in the repository's common Git folder, jailed, and gives its standard output; a non-zero exit is an
// error.
type Runner func(ctx context.Context, args ...string) (string, error)

// FindRepository finds the base clone that path belongs to: path is a clone's folder, a bare repository, or one of its
// linked worktrees. It looks, runs nothing, follows no symbolic link, and fails with ErrNoRepository.
func FindRepository(path string) (repository, commonDir string, err error) {
	if !filepath.IsAbs(path) {
		return "", "", fmt.Errorf("%w: %s: name it by its absolute path", ErrNoRepository, plain(path))
	}
	path = filepath.Clean(path)
	repository, commonDir, _, err = findRepository(path)
	if err != nil {
		return "", "", fmt.Errorf("%w: %s: %w", ErrNoRepository, plain(path), err)
	}
	return repository, commonDir, nil
}

// WorktreeHead is what a base clone calls the HEAD of its linked worktree at path (git-worktree(1), refs); empty when none
// is there. Like FindRepository it looks, and runs nothing.
func WorktreeHead(path string) string {
	_, _, meta, err := findRepository(path)
	if err != nil || meta == "" {
		return ""
	}
	return "worktrees/" + filepath.Base(meta) + "/HEAD"
}

// findRepository also gives the Git folder of a linked worktree, where path is one.
func findRepository(path string) (repository, commonDir, meta string, err error) {
	if err := folder(path); err != nil {
		return "", "", "", err
	}
	// As Git does, .git first: what lies beside it in a worktree can look like a bare repository.
	dot := filepath.Join(path, ".git")
	if isGitFolder(dot) {
		return path, dot, "", nil
	}
	pointer, err := readRegular(dot, unix.PathMax+16)
	if errors.Is(err, os.ErrNotExist) {
		if isGitFolder(path) {
			return whoseGitFolder(path), path, "", nil
		}
		return "", "", "", errors.New("it has no .git and is none itself: name a clone, a bare repository or a linked worktree by its top folder")
	}
	if err != nil {
		return "", "", "", fmt.Errorf("its .git: %w", err)
	}
	var ok bool
	meta, ok = strings.CutPrefix(strings.TrimRight(string(pointer), "\r\n"), "gitdir: ")
	if !ok || meta == "" {
		return "", "", "", errors.New("its .git file names no Git folder")
	}
	if !filepath.IsAbs(meta) {
		meta = filepath.Join(path, meta)
	}
	commonDir = filepath.Dir(filepath.Dir(filepath.Clean(meta)))
	if filepath.Base(filepath.Dir(meta)) != "worktrees" || !isGitFolder(commonDir) {
		return "", "", "", fmt.Errorf("its .git names %s, which is no linked worktree of a clone (a submodule, or git init --separate-git-dir): name a clone", plain(meta))
	}
	return whoseGitFolder(commonDir), commonDir, meta, nil
}

func whoseGitFolder(commonDir string) string {
	if filepath.Base(commonDir) == ".git" {
		return filepath.Dir(commonDir)
	}
	return commonDir
}

func folder(path string) error {
	f, err := openPlain(path, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	return f.Close()
}

// isGitFolder asks for the three that Git asks for (is_git_directory in setup.c).
func isGitFolder(path string) bool {
	f, err := openPlain(path, unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer f.Close()
	for _, name := range []string{"HEAD", "objects", "refs"} {
		var st unix.Stat_t
		if err := unix.Fstatat(int(f.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return false
		}
	}
	return true
}

// CheckRepository checks the repository that path belongs to (see FindRepository): its configuration, its Git folder,
// and, unless run is nil or something that refuses every layout was found before, with Git the attributes in the trees of
// HEAD, of the HEAD of the linked worktree that path is, and of the commits that more names, as rev-parse reads them; those
// that name none are passed over. The findings have their lines. It fails with ErrNoRepository where there is nothing to
// judge, with ErrConfig where a configuration is refused as a whole, which is then also the report's last finding, and with
// run's error.
func CheckRepository(ctx context.Context, path string, run Runner, more ...string) (Report, error) {
	var r Report
	var err error
	if r.Repository, r.CommonDir, err = FindRepository(path); err != nil {
		return Report{}, err
	}
	r.Findings = checkNames(filepath.Clean(path), r.CommonDir)
	file := filepath.Join(r.CommonDir, "config")
	config, err := ReadConfig(ctx, file)
	if errors.Is(err, ErrConfig) {
		r.Findings = append(r.Findings, unreadable(file, err))
	}
	if err != nil {
		return r, err
	}
	r.Findings = append(r.Findings, config.Locate(ctx, config.Judge())...)
	files, err := checkGitFolder(r.CommonDir)
	if err != nil {
		return Report{}, fmt.Errorf("looking at %s: %w", plain(r.CommonDir), err)
	}
	r.Findings = append(r.Findings, files...)
	if run == nil || len(r.Refused(layoutIsolated)) > 0 {
		return r, nil
	}
	trees, err := checkTrees(ctx, run, config, append([]string{WorktreeHead(path)}, more...))
	if err != nil {
		return Report{}, fmt.Errorf("looking at the attributes in %s: %w", plain(r.Repository), err)
	}
	r.Attributes, r.Findings = true, append(r.Findings, trees...)
	return r, nil
}

// unreadable is the finding for a configuration that is refused as a whole.
func unreadable(file string, err error) Finding {
	why := strings.TrimPrefix(err.Error(), ErrConfig.Error()+": "+plain(file))
	if e, ok := errors.AsType[*fileError](err); ok {
		why, _, _ = strings.Cut(why, e.why)
		return Finding{File: plain(file), Kind: Unreadable, Why: strings.TrimLeft(why+e.why, ":, "), Remedy: e.remedy}
	}
	return Finding{File: plain(file), Kind: Unreadable, Why: strings.TrimLeft(why, ":, "), Remedy: "mend it: git config --file " + word(plain(file)) + " --list has to read it to its end"}
}

// checkNames refuses paths that the API can't name: its messages are UTF-8, and paths with control characters are refused.
func checkNames(paths ...string) []Finding {
	for _, path := range paths {
		var why string
		switch {
		case !utf8.ValidString(path):
			why = "the path is not UTF-8, and a message to an agent can hold no other"
		case strings.ContainsFunc(path, unicode.IsControl):
			why = "the path has a control character (a line break, say)"
		default:
			continue
		}
		return []Finding{{File: plain(path), Kind: Name, Why: why, Remedy: "rename it (mv), and then git worktree repair for a clone that has worktrees"}}
	}
	return nil
}

// checkTrees looks at HEAD's tree, and at those of other commits. What was found in one is not said again of another.
func checkTrees(ctx context.Context, run Runner, config Config, more []string) ([]Finding, error) {
	// A name that is an option, or several commits, is none that a worktree is made from.
	more = slices.DeleteFunc(slices.Clone(more), func(name string) bool {
		return name == "" || strings.ContainsAny(name[:1], "-^") || strings.Contains(name, "..")
	})
	trees, err := treesOf(ctx, run, more)
	if err != nil {
		return nil, err
	}
	found, err := checkTree(ctx, run, config, "HEAD", "HEAD")
	if err != nil {
		return nil, err
	}
	looked := map[string]bool{"": true, trees["HEAD"]: true}
	for _, name := range more {
		tree := trees[name]
		if looked[tree] {
			continue
		}
		looked[tree] = true
		in, err := checkTree(ctx, run, config, plain(name), tree)
		if err != nil {
			return nil, err
		}
		for _, f := range in {
			if !slices.ContainsFunc(found, func(g Finding) bool { return inTreeOf(g) == inTreeOf(f) && g.Kind == f.Kind }) {
				found = append(found, f)
			}
		}
	}
	return found, nil
}

// treesOf are the trees of HEAD and of the commits that names name, without those that name none. Mostly all do, and one
// run of Git says so; else HEAD's is left out too.
func treesOf(ctx context.Context, run Runner, names []string) (map[string]string, error) {
	trees := map[string]string{}
	if len(names) == 0 {
		return trees, nil
	}
	all := append([]string{"HEAD"}, names...)
	args := []string{"rev-parse"}
	for _, name := range all {
		args = append(args, name+"^{commit}^{tree}")
	}
	out, err := run(ctx, args...)
	if ids := strings.Fields(out); err == nil && len(ids) == len(all) && !slices.ContainsFunc(ids, isNoID) {
		for i, name := range all {
			trees[name] = ids[i]
		}
		return trees, nil
	}
	for _, name := range names {
		tree, err := run(ctx, "rev-parse", "--verify", "--quiet", name+"^{commit}^{tree}")
		switch {
		case ctx.Err() != nil:
			return nil, err
		case err == nil:
			trees[name] = strings.TrimSpace(tree)
		}
	}
	return trees, nil
}

// isNoID: without --verify, rev-parse answers with the name of a file as it is.
func isNoID(s string) bool { return len(s) < 40 || strings.Trim(s, "0123456789abcdef") != "" }

// inTreeOf is a finding's file without the name of the commit in whose tree it is.
func inTreeOf(f Finding) string {
	_, file, _ := strings.Cut(f.File, ":")
	return file
}

// The empty tree of each object format; Git knows them without having them.
const (
	emptyTree       = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
	emptyTreeSHA256 = "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321"
)

// inTree matches the lines that count: a filter in an attributes file, a submodule in .gitmodules.
const inTree = `(^[[:space:]]*[^#[:space:]].*[[:space:]]filter=)|(^[[:space:]]*\[submodule)`

// checkTree asks Git which attributes files of a tree name a filter. It asks for what the tree adds to nothing: unlike git
// grep, that is no failure when nothing is found. said is what a finding calls it.
func checkTree(ctx context.Context, run Runner, config Config, said, tree string) ([]Finding, error) {
	nothing := emptyTree
	if slices.ContainsFunc(config.Entries, func(e Entry) bool { return e.Key == "extensions.objectformat" && e.Value == "sha256" }) {
		nothing = emptyTreeSHA256
	}
	out, err := run(ctx, "diff-tree", "-r", "-z", "--name-only", "--text", "--no-ext-diff", "--no-textconv", "--no-renames", "-G"+inTree,
		nothing, tree, "--", ":(glob)**/.gitattributes", ":(top,literal).gitmodules")
	switch {
	case err != nil && tree == "HEAD":
		return unreadableHead(ctx, run, err)
	case err != nil:
		return nil, err
	}
	var found []Finding
	for _, name := range strings.FieldsFunc(out, func(r rune) bool { return r == 0 }) {
		if name == ".gitmodules" {
			found = append(found, Finding{File: said + ":.gitmodules", Kind: Note,
				Why:    "the repository has submodules: their folders stay empty in a new worktree, and sandbox-agent git does not go into them",
				Remedy: "nothing to do where commands need none; else use the submodule's own clone as a session's repository"})
			continue
		}
		found = append(found, Finding{File: said + ":" + plain(name), Kind: Attribute,
			Why:    "it has filter= for some files: without the filter's program (Git LFS is one) they would be changed when they are added",
			Remedy: "use a repository without filters, or take the attribute out and commit the files as they are"})
	}
	return bounded(found, said), nil
}

// unreadableHead tells a HEAD without a commit from a repository in which Git can't work.
func unreadableHead(ctx context.Context, run Runner, cause error) ([]Finding, error) {
	if _, err := run(ctx, "rev-list", "--all", "--max-count=1"); err != nil {
		return nil, cause
	}
	return []Finding{{File: "HEAD", Kind: Note, Why: "it names no commit that can be read, so that no .gitattributes were looked at",
		Remedy: "nothing to do where the sessions' branches begin at another commit"}}, nil
}
