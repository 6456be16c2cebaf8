package gitview

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// isPseudoRef says whether a name is like those that Git gives what is no branch: HEAD, FETCH_HEAD, CHERRY_PICK_HEAD.
func isPseudoRef(name string) bool {
	return name != "" && strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == ""
}

// isShortID says whether Git takes a name for an object.
func isShortID(name string) bool { return len(name) >= 4 && len(name) <= 64 && isHex(name, true) }

// isDescription says whether git describe prints such a name: Git takes what stands after the last "-g" for an object
// (get_describe_name in object-name.c), unless there is a ref of the whole name.
func isDescription(name string) bool {
	i := strings.LastIndex(name, "-g")
	return i > 0 && isShortID(name[i+2:])
}

// withheld says why a new branch stays below refs/sandboxes/: where Git takes its name before or instead of one that the
// host's people use for something else, "git merge origin/main" would be the session's. Empty: nothing is against it.
func (d decision) withheld(ref, before string) string {
	name, isBranch := strings.CutPrefix(ref, heads)
	switch {
	case !isBranch || before != "" || ref == d.branch || d.created[ref]:
		return ""
	case !utf8.ValidString(name): // no record and no answer could name it
		return "it is not UTF-8"
	case strings.HasPrefix(name, "-"): // every command would take it for an option
		return "it begins with -"
	case name == "@" || isPseudoRef(name):
		return "Git has a meaning of its own for that name"
	case strings.HasPrefix(name, "refs/"):
		return "it looks like a ref's full name"
	case isShortID(name):
		return "it looks like a commit's id"
	case isDescription(name):
		return "it looks like what git describe prints"
	}
	for _, dir := range append(slices.Collect(foldersOf(name)), name) {
		if d.remotes[dir] {
			return "the base clone has a remote " + dir
		}
	}
	for _, other := range []string{"refs/tags/" + name, "refs/remotes/" + name, "refs/" + name} {
		if d.base[other] != "" || d.symbolic[other] != "" {
			return "the base clone has " + other
		}
	}
	return ""
}

// count is a number of things: "1 ref", "2 refs".
func count(n int, what string) string { return countOf(n, what, what+"s") }

func countOf(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// inUTF8 is a name with %XX for each byte that is no UTF-8, which the state could not hold.
func inUTF8(name string) string {
	if utf8.ValidString(name) {
		return name
	}
	var b strings.Builder
	for len(name) > 0 {
		r, n := utf8.DecodeRuneInString(name)
		if r == utf8.RuneError && n == 1 {
			fmt.Fprintf(&b, "%%%02X", name[0])
		} else {
			b.WriteString(name[:n])
		}
		name = name[n:]
	}
	return b.String()
}

// word quotes a name for a shell: a ref's may have what one acts on, and remedies are pasted.
func word(name string) string {
	if strings.ContainsFunc(name, func(r rune) bool {
		return r >= utf8.RuneSelf || !strings.ContainsRune("_./:=@%+,-", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
	}
	return name
}

// Whole is the harvest with the conflicts that stand, as a session's record shows it.
func (h Harvest) Whole() Harvest {
	if len(h.Standing) == 0 {
		return h
	}
	if h.Status != Failed {
		h.Status = Conflicts
	}
	h.Conflicts, h.Standing = slices.Concat(h.Conflicts, h.Standing), nil
	return h
}

// speakable makes what commands named fit for an answer and a record, both of which hold UTF-8 alone: a name that is not
// is quoted.
func (h *Harvest) speakable() {
	for _, list := range [][]string{h.Refs, h.StaleLocks} {
		for i, name := range list {
			if !utf8.ValidString(name) {
				list[i] = strconv.Quote(name)
			}
		}
	}
	for _, list := range []*[]Conflict{&h.Conflicts, &h.Standing} {
		*list = slices.Clone(*list) // the state has them as Git does
		for i := range *list {
			c := &(*list)[i]
			if !utf8.ValidString(c.Ref) {
				c.Ref = strconv.Quote(c.Ref)
			}
			c.Remedy = strings.ToValidUTF8(c.Remedy, "\uFFFD")
		}
	}
	h.Detail = strings.ToValidUTF8(h.Detail, "\uFFFD")
}
