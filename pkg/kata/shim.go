package kata

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// RuntimeType is the name under which containerd is asked for Kata; ShimName is the program's name that follows from it.
const (
	RuntimeType = "io.containerd.kata.v2"
	ShimName    = "containerd-shim-kata-v2"
)

// Places are where an installation is looked for. The zero value of a field is its default.
type Places struct {
	// Shim is the shim's absolute path. Empty: the program that Handler stands for in ContainerdPATH, then in ShimDirs.
	Shim string
	// Handler is containerd's name of the shim: RuntimeType, or another one of kata-deploy's, such as io.containerd.kata-qemu.v2.
	Handler string
	// ContainerdPATH is the PATH of containerd's own environment: containerd finds shims there. Empty: this process's.
	ContainerdPATH string
	// ShimDirs default to /opt/kata/runtime-rs/bin, /opt/kata/bin, /usr/local/bin and /usr/bin: kata-deploy's two, and
	// those of packages. The Rust shim has the same name as the Go one and a folder of its own.
	ShimDirs []string
	// Config is the configuration's absolute path. Empty: the first of the flavour's list (ConfigCandidates) that exists.
	Config string
	// ConfigPaths replace the flavour's list.
	ConfigPaths []string
	// Dev and Sys default to /dev and /sys.
	Dev, Sys string
}

// shimName is the program that containerd starts for the handler: its last two words.
func (p Places) shimName() string {
	words := strings.Split(p.Handler, ".")
	if len(words) < 3 {
		return ShimName
	}
	return "containerd-shim-" + strings.Join(words[len(words)-2:], "-")
}

func (p Places) shimDirs() []string {
	if p.ShimDirs != nil {
		return p.ShimDirs
	}
	return []string{"/opt/kata/runtime-rs/bin", "/opt/kata/bin", "/usr/local/bin", "/usr/bin"}
}

// ShimInfo is a shim that was found, and what it says of itself.
type ShimInfo struct {
	// Path is where it was found: what containerd has to be given as the runtime's path. Resolved is the file behind it.
	Path, Resolved string
	Flavour        Flavour
	Version        Version
	Commit         string
}

// versionTime and versionBytes bound the run of a shim that is asked for its version.
const (
	versionTime  = 10 * time.Second
	versionBytes = 4096
)

// Find looks for the shim and asks it for its version. It is run with an empty environment, in /, without input; only
// a file that root alone can change is run. An error wraps ErrNotInstalled, ErrUntrusted or ErrVersion.
func Find(ctx context.Context, p Places) (ShimInfo, error) {
	path, err := p.findShim()
	if err != nil {
		return ShimInfo{}, err
	}
	info := ShimInfo{Path: path}
	if info.Resolved, err = regular(path); err != nil {
		return info, fmt.Errorf("kata shim: %w", err)
	}
	out, err := askVersion(ctx, info.Resolved)
	if err != nil {
		return info, err
	}
	info.Flavour, info.Version, info.Commit, err = ParseVersionOutput(out)
	if err != nil {
		return info, fmt.Errorf("%s: %w", path, err)
	}
	return info, nil
}

func (p Places) findShim() (string, error) {
	if p.Shim != "" {
		if !filepath.IsAbs(p.Shim) {
			return "", fmt.Errorf("%w: the shim's path %q is not absolute", ErrNotInstalled, p.Shim)
		}
		if _, err := os.Stat(p.Shim); err != nil {
			return "", fmt.Errorf("%w: %w", ErrNotInstalled, err)
		}
		return p.Shim, nil
	}
	path := p.ContainerdPATH
	if path == "" {
		path = os.Getenv("PATH")
	}
	dirs := append(filepath.SplitList(path), p.shimDirs()...)
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) {
			continue // relative to whose working directory?
		}
		file := filepath.Join(dir, p.shimName())
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("%w: no %s in containerd's PATH nor in %s; install Kata Containers %s or newer, or name the shim",
		ErrNotInstalled, p.shimName(), strings.Join(p.shimDirs(), ", "), oldest)
}

func askVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env, cmd.Dir = []string{}, "/"
	// A child that the program left behind must not keep the pipe open.
	cmd.WaitDelay = time.Second
	out := &bounded{left: versionBytes}
	cmd.Stdout = out
	err := cmd.Run()
	switch {
	case out.cut:
		return "", fmt.Errorf("%w: %s --version printed more than %d bytes", ErrVersion, path, versionBytes)
	case ctx.Err() != nil:
		return "", fmt.Errorf("%w: %s --version: %w", ErrVersion, path, ctx.Err())
	case err != nil:
		return "", fmt.Errorf("%w: %s --version: %w", ErrVersion, path, err)
	}
	return out.buf.String(), nil
}

var errFull = errors.New("too much output")

// bounded keeps the first bytes, and ends the writer with an error after them. The buffer is not embedded: io.Copy would
// find its ReadFrom, which has no bound.
type bounded struct {
	buf  bytes.Buffer
	left int
	cut  bool
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(p) > b.left {
		b.cut = true
		return 0, errFull
	}
	b.left -= len(p)
	return b.buf.Write(p)
}
