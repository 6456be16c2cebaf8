// Command bench measures the product against what it is built on and against its peers, and prints one table: run it
// with "make bench", as root.
//
// Every latency is taken in one run, interleaved: each round takes one sample of each case in an order of its own, so
// that a change of the machine's mood falls on all of them alike, and only ratios of medians are compared. The product
// is the real one: a "sandbox-agent serve" of its own on a fresh state folder, answered execs checked and their receipts
// verified; a sandbox of the embedded runtime in this process; the peers as Debian packages them. A missed aim is
// printed and changes no exit code. docs/performance.md says how to read it.
//
// Nobody imports it. One file holds one group of cases; place.go makes and removes everything that a run needs.
package main
