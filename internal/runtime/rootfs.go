package runtime

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// RootfsKind is what a root file system is made of.
type RootfsKind string

// The kinds.
const (
	// RootfsHost: the node's own /usr and what belongs to it, read-only.
	RootfsHost RootfsKind = "host"
	// RootfsFolder: a folder of the node.
	RootfsFolder RootfsKind = "folder"
	// RootfsImage: an image that the runtime keeps or fetches.
	RootfsImage RootfsKind = "image"
)

// KindOfRootfs tells what the setting "rootfs" names: "host", an absolute path, or else an image's reference.
func KindOfRootfs(rootfs string) RootfsKind {
	switch {
	case rootfs == string(RootfsHost):
		return RootfsHost
	case strings.HasPrefix(rootfs, "/"):
		return RootfsFolder
	}
	return RootfsImage
}

// CheckShell refuses a root file system, an open folder, without the program that runs every command, or without the loader
// that this program names.
func CheckShell(root *os.File) error {
	const remedy = "name one that has bash, and git"
	bash, err := ProgramIn(root, "/bin/bash")
	if err != nil {
		return fmt.Errorf("it has no /bin/bash, which runs the commands (%w): %s", err, remedy)
	}
	defer bash.Close()
	loader := loaderOf(bash)
	if loader == "" {
		return nil
	}
	// The kernel would say of bash itself that there is no such file.
	f, err := ProgramIn(root, loader)
	if err != nil {
		return fmt.Errorf("its /bin/bash needs %s, which it has not (%w): %s", loader, err, remedy)
	}
	return f.Close()
}

// HasGit says whether a root file system, an open folder, has a git where commands look for programs. Without one commands
// run, and can't work on the repository.
func HasGit(root *os.File) bool {
	for _, dir := range []string{"/usr/local/bin", "/usr/bin", "/bin"} {
		if f, err := ProgramIn(root, dir+"/git"); err == nil {
			return f.Close() == nil
		}
	}
	return false
}

// ProgramIn opens a program of another root file system, an open folder, as who has it as / resolves the path: an image's /bin is
// often a link, and an absolute one means the image's own. The caller closes it.
func ProgramIn(root *os.File, path string) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), path, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0) {
		err = fmt.Errorf("it is no program, mode %#o", st.Mode)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// loaderOf is the path of the dynamic loader that a program names; empty where it names none, or is no ELF file.
func loaderOf(program *os.File) string {
	f, err := elf.NewFile(program)
	if err != nil {
		return ""
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP && p.Filesz <= unix.PathMax {
			b, err := io.ReadAll(p.Open())
			if err == nil {
				return string(bytes.TrimRight(b, "\x00"))
			}
		}
	}
	return ""
}
