package nsexec

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// siginfo is the part of siginfo_t that waitid(2) fills for a child, as on every 64-bit Linux.
type siginfo struct {
	Signo, Errno, Code, _ int32
	Pid                   int32
	UID                   uint32
	Status                int32
	_                     [100]byte
}

// waitAny looks at a child that has ended without reaping it; Pid is 0 when there is none.
func waitAny(info *siginfo) error {
	return unix.Waitid(unix.P_ALL, 0, (*unix.Siginfo)(unsafe.Pointer(info)), unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
}
