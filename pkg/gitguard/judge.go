package gitguard

import (
	"fmt"
	"slices"
)

// maxFindings bounds the findings of one file. Those that refuse come first when there are more.
const maxFindings = 200

// Judge says what of the configuration is not on the list of harmless keys, in the file's order. Lines are not known
// yet: see Locate. Of more than 200 findings, those that refuse are kept, and the last one says how many are missing.
func (c Config) Judge() []Finding {
	var out []Finding
	for i, e := range c.Entries {
		if f, ok := c.judge(e); ok {
			f.entry = i + 1
			out = append(out, f)
		}
	}
	return bounded(out, c.Path)
}

func bounded(found []Finding, file string) []Finding {
	if len(found) <= maxFindings {
		return found
	}
	weight := func(f Finding) int {
		switch {
		case f.Refuses(layoutIsolated):
			return 0
		case f.Refuses(layoutShared):
			return 1
		default:
			return 2
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return weight(a) - weight(b) })
	more := found[maxFindings-1:]
	last := Finding{File: plain(file), Kind: more[0].Kind, Why: fmt.Sprintf("%d more findings like the ones before", len(more)), Remedy: "take those out first"}
	return append(found[:maxFindings-1:maxFindings-1], last)
}

// judge gives the finding about one entry, if there is one.
func (c Config) judge(e Entry) (Finding, bool) {
	r, excused := ruleFor(e)
	secret := hasCredentials(e.Key) || hasCredentials(e.Value)
	switch {
	case r != nil && r.kind != Unknown:
		return c.finding(e, r.kind, r.why, r.remedy), true
	case secret:
		return c.finding(e, Remote, "it holds a user or a password in an address, which every command could read",
			"keep passwords in a credential helper; of a remote's address only the user and the password are left out"), true
	case r != nil:
		return c.finding(e, r.kind, r.why, r.remedy), true
	case excused, harmless(e), isNotCopied(e):
		return Finding{}, false
	case isExtension(e):
		return c.finding(e, Extension, "it is an extension of the repository's format that the guard does not know", "use a clone without it"), true
	default:
		return c.finding(e, Unknown, notListed, ""), true
	}
}

// ruleFor gives the first rule that speaks of an entry. excused: one would have, but for the value.
func ruleFor(e Entry) (found *rule, excused bool) {
	for i := range rules {
		r := &rules[i]
		if r.matches(e) {
			return r, false
		}
		excused = excused || slices.ContainsFunc(r.keys, func(p pattern) bool { return p.matches(e) })
	}
	return nil, excused
}

func isNotCopied(e Entry) bool {
	return slices.ContainsFunc(notCopied, func(p pattern) bool { return p.matches(e) })
}

func isExtension(e Entry) bool {
	section, _, _, _ := e.split()
	return section == "extensions"
}

func (c Config) finding(e Entry, k Kind, why, remedy string) Finding {
	f := Finding{Key: plain(e.Key), File: plain(c.Path), Why: why, Kind: k}
	out := "take the line out of the file"
	if f.Key == e.Key && plain(c.Path) == c.Path {
		out = fmt.Sprintf("git config --file %s --unset-all %s", word(c.Path), word(e.Key))
	}
	switch {
	case f.Refuses(layoutIsolated):
		f.Remedy = "take it out: " + out
	case f.Refuses(layoutShared):
		f.Remedy = "use the isolated layout, which leaves it out, or take it out: " + out
	default:
		f.Remedy = "nothing to do: the isolated layout leaves it out"
	}
	if remedy != "" {
		f.Remedy += " (" + remedy + ")"
	}
	return f
}
