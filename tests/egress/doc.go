// Package egress has the tests of what a listed destination lets a command reach, and what it doesn't, through the real agent on
// a node of the tests' own (netlab) with real tools inside.
package egress
