package containerd

import (
	"os"
	"strconv"
	"syscall"
)

func ownerOf(st os.FileInfo) uint32 { return st.Sys().(*syscall.Stat_t).Uid }

func itoa(n int) string { return strconv.Itoa(n) }
