// Package layout holds the rules of the tree as tests: who may import whom, what may be linked into the programs that
// run inside a sandbox, that each package says what it is for, and which few files make raw system calls.
package layout
