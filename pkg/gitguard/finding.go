package gitguard

import (
	"regexp"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Kind groups findings by what they could do; Refuses says which of them keep a repository from being shared.
type Kind string

// The kinds of findings.
const (
	// Include reads further configuration files, which nobody has looked at.
	Include Kind = "include"
	// Filter runs a program on checkout and add, or would leave files half-filtered without it.
	Filter Kind = "filter"
	// Program names a program that Git runs.
	Program Kind = "program"
	// PathMoving makes Git read or write another path.
	PathMoving Kind = "path"
	// Remote sends Git to another place over a network, or holds what opens one.
	Remote Kind = "remote"
	// Extension changes what the repository's files mean.
	Extension Kind = "extension"
	// Unknown is on no list. It never refuses; the sanitised configuration lacks it.
	Unknown Kind = "unknown"
	// Layout is a file in the Git folder that does not belong there.
	Layout Kind = "layout"
	// Attribute asks for a filter in an attributes file.
	Attribute Kind = "attribute"
	// Clone is a repository that is not whole without something outside of it.
	Clone Kind = "clone"
	// Unreadable is a configuration that is refused as a whole; ReadConfig says why.
	Unreadable Kind = "unreadable"
	// Name is a path that no message to an agent can hold.
	Name Kind = "name"
	// Note never refuses: it tells what will be different in a sandbox.
	Note Kind = "note"
)

const (
	layoutIsolated = "isolated"
	layoutShared   = "shared"
)

// Finding is one thing in a repository that could make Git run a program, leave the repository or hang, or that will be
// different in a sandbox.
type Finding struct {
	// Key is as Git spells it, without passwords, and as a quoted string where it isn't plain text; empty when the finding
	// is not about a key.
	Key  string `json:"key"`
	File string `json:"file"`
	// Line of File, from 1; 0: not known (Locate finds it), or not about a line.
	Line   int    `json:"line"`
	Why    string `json:"why"`
	Remedy string `json:"remedy"`
	Kind   Kind   `json:"kind"`

	// entry is the index of the configuration entry, from 1; 0: none.
	entry int
}

// Refuses says whether a repository with this finding must not be used in a layout ("isolated" or "shared"). What
// doesn't refuse isolated is left out of its sanitised configuration.
func (f Finding) Refuses(layout string) bool {
	switch f.Kind {
	case Unknown, Note:
		return false
	case Program, PathMoving, Remote:
		return layout != layoutIsolated
	default:
		return true
	}
}

// credentials are the user and the password of a URL, up to the last "@" before its path. Over ssh, a user alone is no
// secret. They are compiled when they are needed, for every process that is the agent's program would do it.
var (
	credentials = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?is)\b([a-z][a-z0-9+.-]*://)([^/?#]*)@`) })
	sshUser     = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?is)^(?:git\+)?ssh(?:\+git)?://[^:]*@$`) })
)

// withoutCredentials is s without users and passwords in URLs; of ssh URLs, a user without a password stays.
func withoutCredentials(s string) string {
	if !strings.Contains(s, "@") {
		return s
	}
	return credentials().ReplaceAllStringFunc(s, func(found string) string {
		if sshUser().MatchString(found) {
			return found
		}
		return credentials().ReplaceAllString(found, "$1")
	})
}

func hasCredentials(s string) bool { return withoutCredentials(s) != s }

// plain makes a text of unknown origin fit for a message or a terminal: one line of printable UTF-8, no passwords.
func plain(s string) string {
	s = withoutCredentials(s)
	const most = 512
	if len(s) > most {
		s = s[:most] + "…"
	}
	if !utf8.ValidString(s) || strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 {
		return strconv.Quote(s)
	}
	return s
}

// word quotes s for a shell where that is needed.
func word(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=@%+,-") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
