package gitguard

import (
	"fmt"
	"strings"
)

// CheckRefName refuses, with ErrRefName, a ref that does not begin with "refs/" or that git-check-ref-format(1) refuses:
// such a name can be a path out of the refs folder.
func CheckRefName(ref string) error {
	const longest = 1024 // far below PATH_MAX, so that the Git folder's path and ".lock" fit too
	why := ""
	switch {
	case !strings.HasPrefix(ref, "refs/"):
		why = `it does not begin with "refs/"`
	case len(ref) > longest:
		why = fmt.Sprintf("it is longer than %d bytes", longest)
	case strings.Contains(ref, ".."), strings.Contains(ref, "@{"), strings.HasSuffix(ref, "."):
		why = `it has "..", "@{", or ends with "."`
	case strings.ContainsAny(ref, " ~^:?*[\\\x7f"), strings.IndexFunc(ref, func(r rune) bool { return r < ' ' }) >= 0:
		why = `it has a control character or one of " ~^:?*[\"`
	}
	for _, c := range strings.Split(ref, "/") {
		if why == "" && (c == "" || strings.HasPrefix(c, ".") || strings.HasSuffix(c, ".lock")) {
			why = fmt.Sprintf(`its component %q is empty, begins with "." or ends with ".lock"`, c)
		}
		if why == "" && len(c) > 250 {
			why = "it has a component of more than 250 bytes"
		}
	}
	if why != "" {
		return fmt.Errorf("%w: %s: %s", ErrRefName, plain(ref), why)
	}
	return nil
}

// Matches says whether a pattern covers a ref: "*" stands for any text without "/", "**" for any text, everything else
// for itself. The whole ref must match, for example "refs/heads/agent/**" or "refs/tags/v*".
func Matches(pattern, ref string) bool {
	literal, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == ref
	}
	ref, ok := strings.CutPrefix(ref, literal)
	if !ok {
		return false
	}
	deep := strings.HasPrefix(rest, "*")
	rest = strings.TrimLeft(rest, "*")
	if rest == "" {
		return deep || !strings.Contains(ref, "/")
	}
	for i := 0; i <= len(ref); i++ {
		if Matches(rest, ref[i:]) {
			return true
		}
		if i < len(ref) && ref[i] == '/' && !deep {
			break
		}
	}
	return false
}
