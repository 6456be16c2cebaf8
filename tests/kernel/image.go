package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
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
	"bash", "coreutils", "dash", "diffutils", "findutils", "git", "grep", "gzip", "hostname", "iproute2", "libc-bin", "mawk", "mount", "perl-base",
	"procps", "python3-minimal", "sed", "tar", "util-linux",
}

// folders are copied whole.
var folders = []string{"/usr/lib/x86_64-linux-gnu/perl-base", "/usr/lib/git-core", "/usr/share/git-core", "/usr/lib/python3*"}

// files are copied where the host has them, links with what they lead to.
var files = []string{"/usr/bin/awk", "/usr/bin/which", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ld.so.conf", "/etc/os-release"}

// root is the root file system of the guest while it is put together in a folder.
type root struct{ dir string }

func (r root) path(p string) string { return filepath.Join(r.dir, p) }

// fill makes a small Debian out of the host's own files.
func (r root) fill() error {
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "etc", "root", "var/tmp", "var/lib", "home", "opt", "src", "usr/src", "usr/bin", "usr/sbin", "usr/lib"} {
		if err := os.MkdirAll(r.path(d), 0o755); err != nil {
			return err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if target, err := os.Readlink("/" + d); err == nil {
			if err := os.MkdirAll(r.path("/"+target), 0o755); err != nil {
				return err
			}
			if err := os.Symlink(target, r.path(d)); err != nil {
				return err
			}
		}
	}
	if err := os.Chmod(r.path("var/tmp"), fs.ModeSticky|0o777); err != nil {
		return err
	}
	for _, p := range packages {
		// Debian's own record, not PATH: a user may have put others before the system's.
		out, err := exec.Command("dpkg", "-L", p).Output()
		if err != nil {
			continue // not installed
		}
		for _, f := range inBin.FindAllString(string(out), -1) {
			if err := r.program(f); err != nil {
				return err
			}
		}
	}
	for _, pattern := range folders {
		found, _ := filepath.Glob(pattern)
		for _, dir := range found {
			if err := r.tree(dir); err != nil {
				return err
			}
		}
	}
	for _, f := range files {
		if _, err := os.Stat(f); err == nil {
			if err := r.file(f); err != nil {
				return err
			}
		}
	}
	return run("ldconfig", "-r", r.dir)
}

// inBin matches a program's line of dpkg -L.
var inBin = regexp.MustCompile(`(?m)^(/usr)?/s?bin/[^/\n]+$`)

// program copies a program and the libraries that ldd(1) names.
func (r root) program(path string) error {
	if err := r.file(path); err != nil {
		return err
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return nil // a script, or static
	}
	for sc := bufio.NewScanner(bytes.NewReader(out)); sc.Scan(); {
		for _, f := range strings.Fields(sc.Text()) {
			if strings.HasPrefix(f, "/") {
				if err := r.file(f); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// file copies a file of the host, and the links that lead to it.
func (r root) file(path string) error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return err
	}
	path = filepath.Join(dir, filepath.Base(path))
	if _, err := os.Lstat(r.path(path)); err == nil {
		return nil
	}
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil // a package's file that has been removed, or another's alternative
	}
	if err := os.MkdirAll(r.path(dir), 0o755); err != nil {
		return err
	}
	if target, err := os.Readlink(path); err == nil {
		if err := os.Symlink(target, r.path(path)); err != nil {
			return err
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		return r.file(target)
	}
	return run("cp", "-p", "--sparse=auto", path, r.path(path))
}

// tree copies a folder, with the libraries that its own need.
func (r root) tree(dir string) error {
	if err := os.MkdirAll(r.path(filepath.Dir(dir)), 0o755); err != nil {
		return err
	}
	if err := run("cp", "-a", dir, r.path(filepath.Dir(dir))); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, ".so") {
			err = r.program(path)
		}
		return err
	})
}

// image makes an ext4 file system of the folder: idmapped mounts work on it since Linux 5.12, on tmpfs since 6.3.
func (r root) image(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return run("mkfs.ext4", "-q", "-F", "-O", "^metadata_csum_seed,^orphan_file", "-d", r.dir, path, "2G")
}

func run(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
