// Package interrupt turns SIGINT, SIGTERM and SIGHUP into the end of a context, and keeps a program that is cleaning up
// from being cut short by the next one. timeout(1) sends each signal twice, to its child and to the child's group; make
// sends one more; a person at a keyboard presses Ctrl-C again after a moment. Only someone who asks again after Patience
// has passed means it.
//
// cmd/sandbox-agent and internal/cli import it; it imports the standard library alone.
package interrupt
