// Command odd is a program of a guest that comes to the end that its argument names, or the guest's init that says nothing.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

func main() {
	if os.Getpid() == 1 {
		wait() // "silent": an init that the harness never hears of
	}
	fmt.Println("hello from", os.Args[1])
	switch os.Args[1] {
	case "panic":
		crash()
	case "lie": // as a test would look that succeeds just before its kernel dies
		fmt.Printf("%sodd=0\n", plan.Done)
		crash()
	case "hang":
		wait()
	case "reset":
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	case "off": // without the guest's last line
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case "fail":
		os.Exit(3)
	}
}

// crash makes the kernel panic (its Documentation/admin-guide/sysrq.rst).
func crash() {
	if err := os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0); err != nil {
		fmt.Println(err)
	}
}

// wait never returns. Go ends a program in which every goroutine waits for another; this one waits for the kernel.
func wait() {
	for {
		_ = unix.Pause()
	}
}
