package config

import (
	"fmt"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"
)

// systemPrefixes never hold a workspace, whatever workspace.roots says: mounting something writable there would
// shadow the node's own programs, devices or kernel interfaces inside the sandbox.
var systemPrefixes = []string{"/proc", "/sys", "/dev", "/run", "/boot", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc"}

// Under says whether path is dir or lies in it. Both are absolute and clean.
func Under(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// SystemFolder is the node's own folder that path lies in and where no workspace is ever accepted, or "".
func SystemFolder(path string) string {
	for _, p := range systemPrefixes {
		if Under(path, p) {
			return p
		}
	}
	return ""
}

// forbiddenPrefix is the forbidden folder that path lies in, or "".
func (c *Config) forbiddenPrefix(path string) string {
	if p := SystemFolder(path); p != "" {
		return p
	}
	if Under(path, c.StateDir) {
		return c.StateDir
	}
	return ""
}

// CheckWorkspacePath decides whether a path may be a session's repository or worktree by its text alone; whether a
// component is a symlink is looked up later, by descriptor. what names the field in the error.
func (c *Config) CheckWorkspacePath(what, path string) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s %q %s", ErrPath, what, path, fmt.Sprintf(format, args...))
	}
	switch {
	case path == "":
		return refuse("is empty: name an absolute path")
	case len(path) > 4095:
		return refuse("is longer than 4095 bytes (PATH_MAX)")
	case !utf8.ValidString(path):
		return refuse("is not valid UTF-8: rename it")
	case strings.ContainsFunc(path, unicode.IsControl):
		return refuse("holds a control character (a line break or NUL): rename it")
	case !filepath.IsAbs(path):
		return refuse("is not absolute: name it from /")
	case filepath.Clean(path) != path:
		return refuse("is not clean: write it as %q", filepath.Clean(path))
	}
	if p := c.forbiddenPrefix(path); p != "" {
		return refuse("lies under %s, where no workspace is accepted: move it under one of workspace.roots %v", p, c.Workspace.Roots)
	}
	if Under(c.StateDir, path) || Under(c.Socket.Path, path) {
		return refuse("contains the agent's own folders (state_dir %s, socket %s): choose another folder", c.StateDir, c.Socket.Path)
	}
	for _, r := range c.Workspace.Roots {
		if path != r && Under(path, r) {
			return nil
		}
	}
	return refuse("lies under none of workspace.roots %v: move it there, or add its folder to workspace.roots", c.Workspace.Roots)
}

// DefaultWorktree is where the worktree of a session lies that named none.
func (c *Config) DefaultWorktree(sessionID string) string {
	return filepath.Join(c.Workspace.Roots[0], sessionID)
}
