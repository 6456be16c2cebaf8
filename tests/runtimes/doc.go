// Package runtimes runs the suites of promises and attacks over the runtimes of containerd: the same tests, the same real
// agent, another runtime below it (testkit/node, RuntimeEnv). What a table leaves out it names, with the reason.
package runtimes
