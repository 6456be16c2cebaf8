package inside

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// int80 makes a system call of the i386 ABI, whose numbers and registers are others than the native ones.
func int80(nr, a, b, c uintptr) int32

// vsockArguments are socketcall's, which hides them in memory: below 4 GiB, as all variables of a program without PIE.
var vsockArguments = [3]uint32{unix.AF_VSOCK, unix.SOCK_STREAM, 0}

// foreign makes one call of another ABI: "socket" or "getpid" by i386, "x32" by x32. What refuses it may end this process.
func foreign(a *attacker, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("name one call")
	}
	a.tried++
	switch args[0] {
	case "socket":
		if int80(102, 1, uintptr(unsafe.Pointer(&vsockArguments)), 0) >= 0 { // socketcall(SYS_SOCKET)
			a.got("a vsock socket by i386's socketcall")
		}
	case "getpid":
		if int80(20, 0, 0, 0) > 0 {
			a.got("an answer to i386's getpid")
		}
	case "x32":
		if _, _, e := unix.RawSyscall(0x40000000|41, unix.AF_VSOCK, unix.SOCK_STREAM, 0); e == 0 {
			a.got("a vsock socket by x32")
		}
	default:
		return fmt.Errorf("there is no call %q", args[0])
	}
	return nil
}
