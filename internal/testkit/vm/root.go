package vm

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// packages are those whose programs the tests and the commands in them use; each program comes with its libraries. Those
// that lack on the host lack in the guest: the tests that need them are skipped there.
var packages = []string{
	"bash", "coreutils", "dash", "diffutils", "findutils", "git", "grep", "gzip", "hostname", "iproute2", "libc-bin", "mawk", "mount", "nftables", "perl-base",
	"procps", "python3-minimal", "sed", "tar", "util-linux",
}

// folders are copied whole.
var folders = []string{"/usr/lib/x86_64-linux-gnu/perl-base", "/usr/lib/git-core", "/usr/share/git-core", "/usr/lib/python3*"}

// files are copied where the host has them, links with what they lead to.
var files = []string{"/usr/bin/awk", "/usr/bin/which", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.conf", "/etc/os-release"}

// Root is the root file system of a guest while it is put together in the folder Dir.
type Root struct{ Dir string }

// Path is where a path of the guest lies here.
func (r Root) Path(p string) string { return filepath.Join(r.Dir, p) }

// Fill makes a small Debian out of the host's own files.
func (r Root) Fill() error {
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "etc", "root", "mnt", "var/tmp", "var/lib", "home", "opt", "src", "usr/src", "usr/bin", "usr/sbin", "usr/lib"} {
		if err := os.MkdirAll(r.Path(d), 0o755); err != nil {
			return err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if target, err := os.Readlink("/" + d); err == nil {
			if err := os.MkdirAll(r.Path("/"+target), 0o755); err != nil {
				return err
			}
			if err := os.Symlink(target, r.Path(d)); err != nil {
				return err
			}
		}
	}
	if err := os.Chmod(r.Path("var/tmp"), fs.ModeSticky|0o777); err != nil {
		return err
	}
	// Debian's own record, not PATH: a user may have put others before the system's. It fails for those that are not installed.
	out, _ := exec.Command("dpkg", append([]string{"-L"}, packages...)...).Output()
	if err := r.Program(inBin.FindAllString(string(out), -1)...); err != nil {
		return err
	}
	for _, pattern := range folders {
		found, _ := filepath.Glob(pattern)
		for _, dir := range found {
			if err := r.Tree(dir); err != nil {
				return err
			}
		}
	}
	for _, f := range files {
		if _, err := os.Stat(f); err == nil {
			if err := r.File(f); err != nil {
				return err
			}
		}
	}
	return Run("ldconfig", "-r", r.Dir)
}

// inBin matches a program's line of dpkg -L.
var inBin = regexp.MustCompile(`(?m)^(/usr)?/s?bin/[^/\n]+$`)

// Program copies programs, or libraries, and the libraries that they need.
func (r Root) Program(paths ...string) error {
	for _, f := range append(paths, libraries(paths)...) {
		if err := r.File(f); err != nil {
			return err
		}
	}
	return nil
}

// File copies a file of the host, and the links that lead to it.
func (r Root) File(path string) error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return err
	}
	path = filepath.Join(dir, filepath.Base(path))
	if _, err := os.Lstat(r.Path(path)); err == nil {
		return nil
	}
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil // a package's file that has been removed, or another's alternative
	}
	if err := os.MkdirAll(r.Path(dir), 0o755); err != nil {
		return err
	}
	if target, err := os.Readlink(path); err == nil {
		if err := os.Symlink(target, r.Path(path)); err != nil {
			return err
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		return r.File(target)
	}
	return copyFile(path, r.Path(path))
}

func copyFile(source, target string) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	st, err := from.Stat()
	if err != nil {
		return err
	}
	to, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Chmod(st.Mode()), to.Close())
}

// Tree copies a folder, with the libraries that its own need.
func (r Root) Tree(dir string) error {
	if err := os.MkdirAll(r.Path(filepath.Dir(dir)), 0o755); err != nil {
		return err
	}
	if err := Run("cp", "-a", dir, r.Path(filepath.Dir(dir))); err != nil {
		return err
	}
	var needy []string
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, ".so") {
			needy = append(needy, path)
		}
		return err
	}); err != nil {
		return err
	}
	for _, f := range libraries(needy) {
		if err := r.File(f); err != nil {
			return err
		}
	}
	return nil
}

// Image makes an ext4 file system of the folder: idmapped mounts work on it since Linux 5.12, on tmpfs since 6.3.
func (r Root) Image(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return Run("mkfs.ext4", "-q", "-F", "-O", "^metadata_csum_seed,^orphan_file", "-d", r.Dir, path, "2G")
}

// Run runs a program, whose output is part of the error.
func Run(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// Linked are the libraries of a program for Initramfs.Files: where the program looks for them, with /lib and /lib64 in /usr,
// and where they are here.
func Linked(program string) map[string]string {
	files := map[string]string{}
	for _, f := range libraries([]string{program}) {
		files["usr/"+strings.TrimPrefix(strings.TrimPrefix(f, "/"), "usr/")] = f
	}
	return files
}
