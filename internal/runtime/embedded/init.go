package embedded

import (
	"os"
	goruntime "runtime"

	"github.com/opencontainers/runc/libcontainer"
	// The C part of the container's init: it joins and makes namespaces before the Go runtime starts threads.
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
)

// Starting a container takes threads that enter its mount namespace and end with their goroutine; libcontainer has
// one of these too. The process's first thread can't end: it would stay in there for ever, and /proc/self, which is the
// first thread's, would show the container's mounts. So the main goroutine keeps that thread to itself: LockOSThread in
// an init function makes main run on it (runtime documentation).
func init() { goruntime.LockOSThread() }

// Init is the first stage of a sandbox: libcontainer starts the agent's own program again with the argument "init".
// main (and a test's TestMain) calls it first of all; it returns at once when the program was not started that way,
// and otherwise never.
func Init() {
	if len(os.Args) > 1 && os.Args[1] == "init" && os.Getenv("_LIBCONTAINER_INITPIPE") != "" {
		libcontainer.Init()
	}
}
