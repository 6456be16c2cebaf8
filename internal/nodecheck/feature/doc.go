// Package feature is the table of what the promises need of a node: since when it is there, what it is for, what takes its place
// and what an operator can do. docs/host-requirements.md shows it.
//
// It is data and imports nothing. The node check (internal/nodecheck) judges by it, and internal/testkit: a test may be skipped for
// want of a feature only on a kernel that is older than the table says.
package feature
