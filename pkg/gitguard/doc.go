// Package gitguard decides whether a repository is safe to share with commands that nobody has read, and what of it
// trusted Git and the sandbox get to see: which configuration keys, which index entries, which subcommands and options.
//
// It decides and does nothing: what it reads, it reads through real Git (never a parser of its own, for parsers differ)
// on bytes that it was given, never on a path that a command could have replaced. It keeps the deciding half of promises
// P11 and P12. It imports nothing of the project.
package gitguard
