package gitguard

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// SanitiseOptions are what a sanitised configuration may keep.
type SanitiseOptions struct {
	// Hooks leaves the choice of hooks to the repository: core.hooksPath is kept as it is. Only for commands in a sandbox;
	// trusted Git's environment has them off all the same.
	Hooks bool
}

// forced are what a private clone needs besides: its objects/info is sealed, so that Git must not write there, and
// nothing of it may run a program.
var forced = []Entry{
	{Key: "core.commitgraph", Value: "false", HasValue: true},
	{Key: "core.fsmonitor", Value: "false", HasValue: true},
	{Key: "gc.writecommitgraph", Value: "false", HasValue: true},
	{Key: "fetch.writecommitgraph", Value: "false", HasValue: true},
	{Key: "repack.updateserverinfo", Value: "false", HasValue: true},
}

var noHooks = Entry{Key: "core.hookspath", Value: "/dev/null", HasValue: true}

// Sanitise writes a configuration for a private clone in the files format: the harmless keys, and what such a clone
// needs besides. Users and passwords are taken out of the addresses of remotes. leftOut are the findings of Judge that
// it lacks. What it wrote is read back through Git; it fails with ErrConfig if Git understands anything else than what
// was meant.
func (c Config) Sanitise(opt SanitiseOptions) (text []byte, leftOut []Finding, err error) {
	entries := c.kept(opt)
	b := write(entries)
	back, err := parseConfig(context.Background(), c.Path, b)
	if err != nil {
		return nil, nil, fmt.Errorf("the sanitised configuration: %w", err)
	}
	if !slices.Equal(back.Entries, entries) {
		return nil, nil, fmt.Errorf("%w: %s: Git reads the sanitised configuration otherwise than it was written", ErrConfig, plain(c.Path))
	}
	leftOut = c.Judge()
	if opt.Hooks {
		leftOut = slices.DeleteFunc(leftOut, func(f Finding) bool { return f.Key == noHooks.Key })
	}
	return b, leftOut, nil
}

func (c Config) kept(opt SanitiseOptions) []Entry {
	always := forced
	if !opt.Hooks {
		always = append(always[:len(always):len(always)], noHooks)
	}
	var out []Entry
	for _, e := range c.Entries {
		if slices.ContainsFunc(always, func(f Entry) bool { return f.Key == e.Key }) || isNotCopied(e) {
			continue
		}
		if isAddress(e) {
			e.Value = withoutCredentials(e.Value)
		}
		if _, found := c.judge(e); !found || opt.Hooks && e.Key == noHooks.Key {
			out = append(out, e)
		}
	}
	return append(out, always...)
}

func isAddress(e Entry) bool {
	return pattern("remote.*.url").matches(e) || pattern("remote.*.pushUrl").matches(e)
}

// write spells entries by git-config(1)'s own rules, each in a section of its own and with its value in quotes.
func write(entries []Entry) []byte {
	var b strings.Builder
	b.WriteString("# Written by sandbox-agent from the base clone's configuration; what is not known to be harmless is left out.\n")
	for _, e := range entries {
		section, subsection, has, variable := e.split()
		b.WriteString("[" + section)
		if has {
			b.WriteString(" \"" + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(subsection) + "\"")
		}
		b.WriteString("]\n\t" + variable)
		if e.HasValue {
			b.WriteString(" = \"" + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\t", `\t`, "\b", `\b`).Replace(e.Value) + "\"")
		}
		b.WriteString("\n")
	}
	return []byte(b.String())
}
