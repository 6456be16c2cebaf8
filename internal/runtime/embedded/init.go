package embedded

import (
	"os"

	"github.com/opencontainers/runc/libcontainer"
	// The C part of the container's init: it joins and makes namespaces before the Go runtime starts threads.
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
)

// Init is the first stage of a sandbox: libcontainer starts the agent's own program again with the argument "init".
// main (and a test's TestMain) calls it first of all; it returns at once when the program was not started that way,
// and otherwise never.
func Init() {
	if len(os.Args) > 1 && os.Args[1] == "init" && os.Getenv("_LIBCONTAINER_INITPIPE") != "" {
		libcontainer.Init()
	}
}
