// Command receiptd is the trusted init of a sandbox; see package receiptd. The agent starts it, and "receiptd attach"
// beside it where that is the way to it, "receiptd grants" where grants can't be mounted from outside.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"github.com/sandbox-agent/sandbox-agent/internal/receiptd"
)

// version is set by the build.
var version = "devel"

// The commands' view is a mount namespace that a thread enters and never leaves, and it lacks receiptd's own folder. The
// process's first thread must not be the one: who joins the container later (receiptd attach) joins the namespaces of that
// thread. So the main goroutine keeps it to itself, and only waits.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) > 1 && os.Args[1] == "--version" {
		fmt.Println("receiptd", version)
		return
	}
	ended := make(chan error)
	go func() { ended <- run(os.Args[1:]) }()
	fmt.Fprintln(os.Stderr, "receiptd:", <-ended)
	os.Exit(1)
}

// The fixed places of design.md and internal/runtime; receiptd links no more of the runtime than these words.
const (
	control = "/.sandbox/control"
	socket  = control + "/receiptd.sock"
	grants  = "/run/grants"
)

func run(args []string) error {
	if len(args) == 1 && args[0] == "attach" {
		if err := receiptd.Attach(socket, os.Stdin, os.Stdout); err != nil {
			return err
		}
		os.Exit(0)
	}
	if len(args) == 3 && args[0] == "grants" {
		return takeGrants(args[1], args[2])
	}
	opts := receiptd.Options{Receipts: "/.sandbox/receipts", Socket: socket, Pid1: "/.sandbox/bin/pid1", Version: version}
	flags := flag.NewFlagSet("receiptd", flag.ContinueOnError)
	flags.IntVar(&opts.Handed, "handover", 0, "take `N` descriptors of cgroups over a socket before anything else")
	own := flags.Bool("own-cgroups", false, "make the commands' cgroups, which a guest's kernel has for itself")
	flags.Int64Var(&opts.OwnPids, "pids", 0, "allow `N` processes in each of them; 0: any number")
	oom := flags.Bool("oom", false, "read what the memory limit has killed from a file of the node's in the control folder")
	log := flags.Bool("log", false, "write the log into the control folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	if opts.Handed > 0 {
		opts.Handover = control + "/handover.sock"
	}
	if *own {
		opts.OwnCgroups = "/.sandbox/cgroup"
	}
	if *oom {
		opts.OwnOOM = control + "/oom"
	}
	if *log {
		opts.Log = control + "/receiptd.log"
	}
	return receiptd.Main(opts)
}

// takeGrants takes the command's uid and gid, and exits with 0 once the grants are in place.
func takeGrants(uid, gid string) error {
	var ids [2]uint32
	for i, s := range []string{uid, gid} {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return fmt.Errorf("reading the command's ids: %w", err)
		}
		ids[i] = uint32(n)
	}
	if err := receiptd.TakeGrants(os.Stdin, grants, ids[0], ids[1]); err != nil {
		return err
	}
	os.Exit(0)
	return nil
}
