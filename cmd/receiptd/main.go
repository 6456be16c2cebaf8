// Command receiptd is the trusted init of a sandbox; see package receiptd. The agent starts it.
package main

import (
	"fmt"
	"os"

	"github.com/sandbox-agent/sandbox-agent/internal/receiptd"
)

// version is set by the build.
var version = "devel"

func main() {
	if len(os.Args) > 1 && os.Args[1] == "--version" {
		fmt.Println("receiptd", version)
		return
	}
	// The fixed places of design.md and internal/runtime; receiptd links no more of the runtime than these words.
	err := receiptd.Main(receiptd.Options{
		Receipts: "/.sandbox/receipts", Socket: "/.sandbox/control/receiptd.sock", Pid1: "/.sandbox/bin/pid1", Version: version,
	})
	fmt.Fprintln(os.Stderr, "receiptd:", err)
	os.Exit(1)
}
