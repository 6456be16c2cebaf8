package gitguard

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// CheckIndex reads the output of git ls-files -z --stage of an index that a command could have forged, and refuses with
// ErrIndex what would lead Git out of the worktree or into a repository: a path that is absolute, has an empty, "." or
// ".." component or one that a file system takes for ".git", a nested repository (mode 160000) that is none of submodules, and what is no entry at
// all. ids are the blobs' ids, in the list's order.
func CheckIndex(lsFilesStageZ []byte, submodules ...string) (ids []string, err error) {
	if len(lsFilesStageZ) == 0 {
		return nil, nil
	}
	list, ok := strings.CutSuffix(string(lsFilesStageZ), "\x00")
	if !ok {
		return nil, fmt.Errorf("%w: git's list of it does not end with a NUL byte", ErrIndex)
	}
	for _, entry := range strings.Split(list, "\x00") {
		id, err := checkIndexEntry(entry, submodules)
		if err != nil {
			return nil, err
		}
		if id != "" {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Submodules are the paths of the nested repositories in the output of git ls-files -z --stage.
func Submodules(lsFilesStageZ []byte) (paths []string) {
	for entry := range strings.SplitSeq(string(lsFilesStageZ), "\x00") {
		if head, path, ok := strings.Cut(entry, "\t"); ok && strings.HasPrefix(head, "160000 ") {
			paths = append(paths, path)
		}
	}
	return paths
}

// checkIndexEntry reads "mode SP id SP stage TAB path". A submodule has no object here, and no id is given.
func checkIndexEntry(entry string, submodules []string) (id string, err error) {
	head, path, ok := strings.Cut(entry, "\t")
	fields := strings.Split(head, " ")
	if !ok || len(fields) != 3 || !isID(fields[1]) || len(fields[2]) != 1 || strings.Trim(fields[2], "0123") != "" {
		return "", fmt.Errorf("%w: %q is no entry", ErrIndex, entry)
	}
	switch mode := fields[0]; mode {
	case "100644", "100755", "120000":
	case "160000":
		if !slices.Contains(submodules, path) {
			return "", fmt.Errorf("%w: %q is a nested repository, into which Git would go, and no submodule of the base clone: take it out (git rm --cached)", ErrIndex, path)
		}
		fields[1] = ""
	default:
		return "", fmt.Errorf("%w: %q has mode %q, which no file of a worktree has", ErrIndex, path, mode)
	}
	if err := checkPath(path); err != nil {
		return "", fmt.Errorf("%w: %q %w: take it out (git rm --cached), or make the index anew (git reset)", ErrIndex, path, err)
	}
	return fields[1], nil
}

// isID says that s is an object's id, SHA-1 or SHA-256, and not the one of no object.
func isID(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == "" && strings.Trim(s, "0") != ""
}

// checkPath refuses what Git itself refuses when it reads a tree (verify_path in read-cache.c), and on every system what
// it refuses on some.
func checkPath(path string) error {
	const longest = 4096 // PATH_MAX
	if strings.HasPrefix(path, "/") {
		return errors.New("is absolute")
	}
	if len(path) >= longest {
		return errors.New("is longer than any path")
	}
	for _, c := range strings.Split(path, "/") {
		switch {
		case c == "":
			return errors.New("has an empty component")
		case c == ".", c == "..":
			return fmt.Errorf("has the component %q", c)
		}
		// NTFS separates with a backslash too.
		for _, name := range strings.Split(c, `\`) {
			if isDotGit(name) {
				return fmt.Errorf("has the component %q, which is .git to a file system", name)
			}
		}
	}
	return nil
}

// hfsIgnores are the code points that HFS+ leaves out when it compares names (utf8.c of Git).
const hfsIgnores = "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"

// isDotGit says that a file system could take a name for ".git": one without upper and lower case, NTFS (short names,
// trailing dots and spaces, streams), HFS+.
func isDotGit(name string) bool {
	hfs := strings.Map(func(r rune) rune {
		if strings.ContainsRune(hfsIgnores, r) {
			return -1
		}
		return r
	}, name)
	if strings.EqualFold(hfs, ".git") {
		return true
	}
	stem, _, _ := strings.Cut(name, ":")
	stem = strings.TrimRight(stem, " .")
	return strings.EqualFold(stem, ".git") || strings.EqualFold(stem, "git~1")
}
