package gitguard

import (
	"fmt"
	"slices"
	"strings"
)

const (
	// maxWords and maxWordBytes bound the arguments of a trusted Git command.
	maxWords     = 1000
	maxWordBytes = 128 << 10
)

// GitCommand is a Git command that may run in a session's jail.
type GitCommand struct {
	// Args go to Git as they are: the subcommand first, combined short options taken apart, and options added that keep Git
	// out of nested repositories and from running programs.
	Args []string
	// Writes says that it may change the index, refs, objects or the worktree.
	Writes bool
}

// AllowGit checks the words after "git" against the list of subcommands and options that trusted Git may be asked for: at
// most 1000 words of 128 KiB in all. Options must be spelled out; values are joined to them, so that Git can't take one
// for an option. Everything else is refused with ErrNotAllowed, which names the word and what is allowed.
func AllowGit(args []string) (GitCommand, error) {
	if err := checkWords(args); err != nil {
		return GitCommand{}, err
	}
	name, rest, err := subcommand(args)
	if err != nil {
		return GitCommand{}, err
	}
	p := &words{name: name, command: commands[name]}
	if err := p.read(rest); err != nil {
		return GitCommand{}, err
	}
	c := GitCommand{Writes: p.command.writes}
	if p.command.check != nil {
		if c.Writes, err = p.command.check(p); err != nil {
			return GitCommand{}, err
		}
	}
	c.Args = append(append(append(c.Args, strings.Fields(name)...), p.command.adds...), p.out...)
	return c, nil
}

func notAllowed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrNotAllowed}, args...)...)
}

func checkWords(args []string) error {
	if len(args) == 0 {
		return notAllowed("no subcommand is named: one of %s", strings.Join(subcommands(), ", "))
	}
	if len(args) > maxWords {
		return notAllowed("%d words: at most %d are allowed", len(args), maxWords)
	}
	n := 0
	for _, a := range args {
		n += len(a) + 1
		if strings.Contains(a, "\x00") {
			return notAllowed("the word %q has a NUL byte", a)
		}
	}
	if n > maxWordBytes {
		return notAllowed("%d bytes of arguments: at most %d are allowed", n, maxWordBytes)
	}
	return nil
}

// subcommand finds the entry of the list: "stash push" is one, "stash" alone means it.
func subcommand(args []string) (name string, rest []string, err error) {
	first := args[0]
	if strings.HasPrefix(first, "-") {
		return "", nil, notAllowed("%q before the subcommand: the repository, its configuration and Git's programs are given; begin with one of %s", first, strings.Join(subcommands(), ", "))
	}
	if alone, has := withoutSecond[first]; has {
		if len(args) == 1 {
			return first + " " + alone, nil, nil
		}
		name, rest = first+" "+args[1], args[2:]
		if _, ok := commands[name]; !ok {
			return "", nil, notAllowed("%q after %s: one of %s", args[1], first, strings.Join(seconds(first), ", "))
		}
		return name, rest, nil
	}
	if _, ok := commands[first]; !ok {
		return "", nil, notAllowed("the subcommand %q: one of %s", first, strings.Join(subcommands(), ", "))
	}
	return first, args[1:], nil
}

// subcommands are the first words that are allowed.
func subcommands() []string {
	var out []string
	for name := range commands {
		first, _, _ := strings.Cut(name, " ")
		out = append(out, first)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func seconds(first string) []string {
	var out []string
	for name := range commands {
		if second, ok := strings.CutPrefix(name, first+" "); ok {
			out = append(out, second)
		}
	}
	slices.Sort(out)
	return out
}

// words is one command line as it is read.
type words struct {
	name    string
	command command
	out     []string
	// seen are the options, as the list has them without their values: "--message", "-n".
	seen []string
	// plain are the words before "--" that are no options.
	plain []string
	// paths are the words after it.
	paths []string
}

func (p *words) has(names ...string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return slices.Contains(p.seen, n) })
}

func (p *words) read(args []string) error {
	for len(args) > 0 {
		a := args[0]
		args = args[1:]
		var err error
		switch {
		case a == "--":
			p.paths = args
			p.out = append(append(p.out, a), args...)
			return nil
		case slices.Contains(p.command.adds, a):
			// It is there already.
		case !strings.HasPrefix(a, "-"):
			p.plain = append(p.plain, a)
			p.out = append(p.out, a)
		case a == "-":
			err = notAllowed("%q: name the branch before this one as @{-1}", a)
		case strings.HasPrefix(a, "--"):
			args, err = p.long(a, args)
		default:
			args, err = p.short(a, args)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// long reads "--name", "--name=value" or "--name value".
func (p *words) long(a string, args []string) ([]string, error) {
	name, value, joined := strings.Cut(a, "=")
	takes, ok := p.command.options[name]
	switch {
	case !ok:
		return nil, p.refuse(name)
	case takes == nothing && joined:
		return nil, notAllowed("%s of git %s takes no value", name, p.name)
	case takes == required && !joined, takes == lastOptional && !joined && len(args) > 0 && !strings.HasPrefix(args[0], "-"):
		if len(args) == 0 {
			return nil, notAllowed("%s of git %s needs a value", name, p.name)
		}
		value, args, joined = args[0], args[1:], true
	case takes == lastOptional && !joined:
		// Git would take the next word, whatever it is.
		value, joined = "HEAD", true
	}
	return args, p.option(name, value, joined)
}

// short reads "-x", "-xyz", "-xvalue", "-x value", and "-5".
func (p *words) short(a string, args []string) ([]string, error) {
	if _, ok := p.command.options[number]; ok && strings.Trim(a[1:], "0123456789") == "" {
		return args, p.option("--max-count", a[1:], true)
	}
	for rest := a[1:]; rest != ""; {
		name := "-" + rest[:1]
		rest = rest[1:]
		takes, ok := p.command.options[name]
		if !ok {
			return nil, p.refuse(name)
		}
		value, joined := "", false
		switch {
		case takes == required && rest == "":
			if len(args) == 0 {
				return nil, notAllowed("%s of git %s needs a value", name, p.name)
			}
			value, args, joined = args[0], args[1:], true
		case takes != nothing && rest != "":
			value, rest, joined = rest, "", true
		}
		if err := p.option(name, value, joined); err != nil {
			return nil, err
		}
	}
	return args, nil
}

// option writes one option the way that Git can't misread: its value in the same word.
func (p *words) option(name, value string, joined bool) error {
	if long, ok := p.command.longNames[name]; ok {
		name = long
	}
	if allowed, ok := optionValues[name]; ok && joined && !allowed(value) {
		return notAllowed("%s of git %s does not take %q", name, p.name, value)
	}
	if p.command.withValue != nil && joined {
		if err := p.command.withValue(name, value); err != nil {
			return err
		}
	}
	p.seen = append(p.seen, name)
	switch {
	case !joined:
		p.out = append(p.out, name)
	case strings.HasPrefix(name, "--"):
		p.out = append(p.out, name+"="+value)
	case value == "":
		return notAllowed("%s of git %s needs a value that is not empty", name, p.name)
	default:
		p.out = append(p.out, name+value)
	}
	return nil
}

func (p *words) refuse(name string) error {
	why := neverAllowed[p.name+" "+name]
	if why == "" {
		why = neverAllowed[name]
	}
	if why != "" {
		why = " (" + why + ")"
	}
	var allowed []string
	for o, takes := range p.command.options {
		switch takes {
		case required:
			o += "=…"
		case optional, lastOptional:
			o += "[=…]"
		}
		allowed = append(allowed, o)
	}
	slices.Sort(allowed)
	if len(allowed) == 0 {
		return notAllowed("the option %s%s: git %s takes none here", plain(name), why, p.name)
	}
	return notAllowed("the option %s of git %s%s; options must be spelled out: %s", plain(name), p.name, why, strings.Join(allowed, " "))
}
