// Package resolver is the nameserver of sandboxes with an egress allowlist: it forwards questions about listed names only, and
// has every address that it answers with admitted to that sandbox's rules before the answer leaves.
//
// A name that is not listed is answered at once with "no such name", and nothing of the question goes anywhere, so that a
// name can't carry data away. Questions for anything but addresses are never forwarded either. What an answer may hold is
// decided by package egress.
//
// It may import pkg/egress and nothing of the agent; package network puts it into a network.
package resolver
