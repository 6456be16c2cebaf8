// Package network has the tests of what a command can reach, through the real agent on a node of the tests' own (netlab), over
// the embedded runtime and containerd, with real CNI plugins.
package network
