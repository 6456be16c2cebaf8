// Package egress decides what a sandbox with a network may reach: which modes there are, what an operator's and a session's
// lists of destinations mean, whether one is within the other, which names are listed, and which addresses an answer may
// have. It is pure; packages internal/network and internal/network/resolver do what it decides.
//
// It imports the standard library only.
package egress
