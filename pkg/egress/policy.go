package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Covers says whether everything that f lets through, e lets through too. Names are compared as such: a listed range covers
// no name, whatever its addresses are now.
func (e Entry) Covers(f Entry) bool {
	if e.Protocol != f.Protocol || slices.ContainsFunc(f.Ports, func(p uint16) bool { return !slices.Contains(e.Ports, p) }) {
		return false
	}
	if e.Name == "" || f.Name == "" {
		return e.Name == f.Name && e.Range.Bits() <= f.Range.Bits() && e.Range.Overlaps(f.Range)
	}
	for _, p := range f.Private {
		if !slices.ContainsFunc(e.Private, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Overlaps(p) }) {
			return false
		}
	}
	return e.Name == f.Name || matches(e.Name, f.Name)
}

// matches says whether a pattern stands for a name, or for all that another pattern stands for.
func matches(pattern, name string) bool {
	suffix, ok := strings.CutPrefix(pattern, "*")
	return ok && strings.HasSuffix(name, suffix) && len(name) > len(suffix)
}

// Narrow is the list of a session that asks for some of what the operator permits: all of it if it asks for nothing. Each
// entry has to be covered by one of the operator's, whose private ranges it then has; the reason is the session's own.
func Narrow(operator, asked []Entry) ([]Entry, error) {
	if len(asked) == 0 {
		return operator, nil
	}
	if err := CheckList(asked); err != nil {
		return nil, err
	}
	out := make([]Entry, 0, len(asked))
	for _, f := range asked {
		i := slices.IndexFunc(operator, func(e Entry) bool { return e.Covers(f) })
		if i < 0 {
			return nil, fmt.Errorf("%s is within no single entry of network.egress.allow", f.Destination())
		}
		f.Private = operator[i].Private
		out = append(out, f)
	}
	return out, nil
}

// CheckList bounds a list.
func CheckList(list []Entry) error {
	ranges := 0
	for _, e := range list {
		if e.Name == "" {
			ranges++
		}
	}
	switch {
	case len(list) > MaxEntries:
		return fmt.Errorf("%d entries are more than %d", len(list), MaxEntries)
	case ranges > MaxRanges:
		return fmt.Errorf("%d entries for addresses are more than %d: list wider ranges, or names", ranges, MaxRanges)
	}
	return nil
}

// Policy is what holds for one sandbox. It is not changed, so it is safe for concurrent use.
type Policy struct {
	mode    Mode
	entries []Entry
	// names and suffixes find entries by name, and by what follows a pattern's star with its dot.
	names, suffixes map[string][]Entry
}

// NewPolicy makes a policy; entries count in the mode Allowlist only.
func NewPolicy(mode Mode, entries []Entry) *Policy {
	p := &Policy{mode: mode, names: map[string][]Entry{}, suffixes: map[string][]Entry{}}
	if mode != Allowlist {
		return p
	}
	p.entries = entries
	for _, e := range entries {
		switch suffix, pattern := strings.CutPrefix(e.Name, "*"); {
		case e.Name == "":
		case pattern:
			p.suffixes[suffix] = append(p.suffixes[suffix], e)
		default:
			p.names[e.Name] = append(p.names[e.Name], e)
		}
	}
	return p
}

// Mode is the policy's.
func (p *Policy) Mode() Mode { return p.mode }

// Entries are the policy's, in the order in which they were given.
func (p *Policy) Entries() []Entry { return p.entries }

// Ranges are the entries for addresses.
func (p *Policy) Ranges() []Entry {
	var out []Entry
	for _, e := range p.entries {
		if e.Name == "" {
			out = append(out, e)
		}
	}
	return out
}

// Match are the entries for a name, which is a normal one (Normal); none if it is not listed.
func (p *Policy) Match(name string) []Entry {
	out := slices.Clone(p.names[name])
	// Each suffix that begins with a dot and has something before it.
	for i := 1; i < len(name); i++ {
		if name[i] == '.' {
			out = append(out, p.suffixes[name[i:]]...)
		}
	}
	return out
}
