package hostkernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// listFrom lists folders below a source's root; symlinks are reported, never followed. Other kinds of files (sockets,
// pipes, devices) are left out: they don't belong into a root file system.
func listFrom(top string) lister {
	return remember(func(dir string) []entry {
		des, err := os.ReadDir(filepath.Join(top, dir))
		if err != nil {
			return nil
		}
		var out []entry
		for _, de := range des {
			e := entry{name: de.Name()}
			switch {
			case de.IsDir():
				e.kind = kindDir
			case de.Type().IsRegular():
				e.kind = kindFile
			case de.Type()&fs.ModeSymlink != 0:
				e.kind = kindSymlink
				if e.target, err = os.Readlink(filepath.Join(top, dir, de.Name())); err != nil {
					continue
				}
			default:
				continue
			}
			out = append(out, e)
		}
		return out
	})
}

// remember lists each folder once.
func remember(list lister) lister {
	known := map[string][]entry{}
	return func(dir string) []entry {
		es, ok := known[dir]
		if !ok {
			es = list(dir)
			known[dir] = es
		}
		return es
	}
}

// TakesRootfs refuses images, which nothing here can unpack.
func TakesRootfs(kind runtime.RootfsKind) error {
	if kind != runtime.RootfsImage {
		return nil
	}
	return fmt.Errorf("%w: the embedded runtime takes \"host\" or the absolute path of a folder as rootfs, and no image: name a runtime of containerd (runc, gvisor, kata), which takes one, or unpack it into a folder",
		runtime.ErrUnavailable)
}

// PlanRoot decides the skeleton of a sandbox's root file system and says where its binds come from.
func PlanRoot(spec runtime.Spec) (Skeleton, string, error) {
	if err := checkPlaces(spec.Workspace); err != nil {
		return Skeleton{}, "", err
	}
	required := spec.Workspace.Roots()
	if spec.Rootfs == "host" {
		return hostSkeleton(listFrom("/"), required, spec.IDs), "/", nil
	}
	if err := TakesRootfs(runtime.KindOfRootfs(spec.Rootfs)); err != nil {
		return Skeleton{}, "", fmt.Errorf("root file system %q: %w", spec.Rootfs, err)
	}
	top, err := mounts.OpenSource(spec.Rootfs)
	if err != nil {
		return Skeleton{}, "", fmt.Errorf("root file system %q: %w: %w", spec.Rootfs, runtime.ErrUnavailable, err)
	}
	defer top.Close()
	s := imageSkeleton(listFrom(spec.Rootfs), required, spec.IDs)
	if len(s.binds) == 0 {
		return Skeleton{}, "", fmt.Errorf("root file system %q: %w: the folder is empty; unpack an image there", spec.Rootfs, runtime.ErrUnavailable)
	}
	if err := runtime.CheckShell(top); err != nil {
		return Skeleton{}, "", fmt.Errorf("root file system %q: %w: %w", spec.Rootfs, runtime.ErrUnavailable, err)
	}
	s.Gitless = !runtime.HasGit(top)
	return s, spec.Rootfs, nil
}

// resolvConf is the one file of a skeleton that can only be known once the sandbox is connected.
const resolvConf = "/etc/resolv.conf"

// Resolve gives the skeleton its /etc/resolv.conf.
func (s *Skeleton) Resolve(content string) {
	for i := range s.files {
		if s.files[i].path == resolvConf {
			s.files[i].content = content
		}
	}
}

// WriteResolvConf gives a skeleton on disk its /etc/resolv.conf.
func WriteResolvConf(root, content string) error {
	if err := os.WriteFile(filepath.Join(root, resolvConf), []byte(content), 0o644); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	return nil
}

// InOwnMounts runs f on a thread whose mount namespace is its own: what f mounts, nobody else sees, and what f starts
// takes a copy along. Thread and namespace end with it.
func InOwnMounts(f func() error) error {
	result := make(chan error, 1)
	go func() {
		goruntime.LockOSThread() // never unlocked
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("making a mount namespace: %w", os.NewSyscallError("unshare", err))
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return fmt.Errorf("making a mount namespace private: %w", os.NewSyscallError("mount", err))
			}
			return f()
		}()
	}()
	return <-result
}

// MountSkeleton mounts a tmpfs and makes a skeleton in it. On disk the fifty-odd folders and files would cost more
// than everything else of a start, and have to be removed again.
func MountSkeleton(root string, s Skeleton) error {
	inodes := len(s.dirs) + len(s.files) + len(s.symlinks) + 64
	data := fmt.Sprintf("mode=755,size=1m,nr_inodes=%d", inodes)
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return fmt.Errorf("mounting the container's root: %w", os.NewSyscallError("mount", err))
	}
	return MakeSkeleton(root, s)
}

// MakeSkeleton makes the folders, links and files. Modes are set, not left to the umask.
func MakeSkeleton(root string, s Skeleton) error {
	for _, d := range s.dirs {
		if err := mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	for p, target := range s.symlinks {
		if err := os.Symlink(target, filepath.Join(root, p)); err != nil {
			return fmt.Errorf("making the root file system: %w", err)
		}
	}
	for _, f := range s.files {
		if err := os.WriteFile(filepath.Join(root, f.path), []byte(f.content), 0o644); err != nil {
			return fmt.Errorf("making the root file system: %w", err)
		}
		if err := os.Chmod(filepath.Join(root, f.path), 0o644); err != nil {
			return fmt.Errorf("making the root file system: %w", err)
		}
	}
	return nil
}

// mkdir makes a folder, or takes the one that is there, and sets its mode.
func mkdir(path string, mode os.FileMode) error {
	if err := os.Mkdir(path, mode); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("making the folder of a sandbox: %w", err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("making the folder of a sandbox: %w", err)
	}
	return nil
}
