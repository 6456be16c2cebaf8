package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// fixtureVersion is part of a fixture's name in the cache: raise it when what is made changes.
const fixtureVersion = 1

// fixture makes a large repository in an empty folder, as root.
type fixture func(ctx context.Context, repo string) error

const (
	refs  = 100_000
	blobs = 1024 // of 1 MiB each
)

// manyRefs has a hundred thousand branches, packed, at a thousand commits.
func manyRefs(ctx context.Context, repo string) error {
	const commits = 1000
	var stream bytes.Buffer
	for i := range commits {
		fmt.Fprintf(&stream, "commit refs/heads/main\nmark :%d\ncommitter Bench <bench@localhost> %d +0000\ndata 1\nx\nM 644 inline file\ndata 5\n%05d\n", i+1, 1800000000+i, i)
	}
	marks := filepath.Join(repo, "marks")
	if err := fastImport(ctx, repo, &stream, "--export-marks="+marks); err != nil {
		return err
	}
	b, err := os.ReadFile(marks)
	if err != nil {
		return err
	}
	ids := strings.Fields(string(b)) // ":1 id :2 id …"
	var packed bytes.Buffer
	packed.WriteString("# pack-refs with: peeled fully-peeled sorted \n")
	for i := range refs {
		fmt.Fprintf(&packed, "%s refs/heads/many/%06d\n", ids[2*(i%commits)+1], i)
	}
	return errors.Join(os.Remove(marks), os.WriteFile(filepath.Join(repo, ".git", "packed-refs"), packed.Bytes(), 0o644))
}

// bigPack has one pack of a gibibyte that can't be compressed, reachable from a branch that nobody checks out.
func bigPack(ctx context.Context, repo string) error {
	r, w := io.Pipe()
	go func() {
		out := bufio.NewWriter(w)
		source := rand.NewChaCha8([32]byte{1})
		fmt.Fprintf(out, "commit refs/heads/main\nmark :1\ncommitter Bench <bench@localhost> 1800000000 +0000\ndata 1\nx\nM 644 inline file\ndata 2\nx\n")
		fmt.Fprintf(out, "commit refs/heads/data\nmark :2\ncommitter Bench <bench@localhost> 1800000000 +0000\ndata 1\nx\nfrom :1\n")
		for i := range blobs {
			fmt.Fprintf(out, "M 644 inline data-%d\ndata %d\n", i, 1<<20)
			if _, err := io.CopyN(out, source, 1<<20); err != nil {
				w.CloseWithError(err)
				return
			}
			fmt.Fprintln(out)
		}
		w.CloseWithError(out.Flush())
	}()
	err := fastImport(ctx, repo, r)
	r.CloseWithError(err)
	return err
}

// fastImport makes a repository of a stream.
func fastImport(ctx context.Context, repo string, stream io.Reader, options ...string) error {
	for _, args := range [][]string{
		{"init", "-q", "-b", "main", repo},
		append([]string{"-C", repo, "-c", "pack.compression=0", "-c", "core.bigFileThreshold=64k", "-c", "fastimport.unpackLimit=0", "fast-import", "--quiet"}, options...),
	} {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Env, cmd.Stdin = gitIdentity, stream
		if args[0] == "init" {
			cmd.Stdin = nil
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("making a large repository: git %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// fixture gives this run a repository of its own from the cache, which is filled at the first use. Large files are
// linked where the cache is on the same file system.
func (p *place) fixture(name string, make fixture) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		cached, err := cacheDir(fmt.Sprintf("bench-%s-%d", name, fixtureVersion))
		if err != nil {
			return "", err
		}
		_, err = os.Stat(cached)
		if errors.Is(err, fs.ErrNotExist) {
			err = fillCache(ctx, cached, make)
		}
		if err != nil {
			return "", err
		}
		repo := p.path("work", name)
		if err := linkTree(cached, repo); err != nil {
			return "", fmt.Errorf("taking %s from the cache: %w: remove it, and run this again", cached, err)
		}
		return repo, nil
	}
}

func cacheDir(name string) (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding a folder for large repositories: %w: set XDG_CACHE_HOME", err)
	}
	return filepath.Join(base, "sandbox-agent", name), nil
}

// fillCache makes the fixture beside its place and moves it there: what is in the cache is whole.
func fillCache(ctx context.Context, cached string, make fixture) error {
	if err := os.MkdirAll(filepath.Dir(cached), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(cached), filepath.Base(cached)+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := make(ctx, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, cached)
}

// linkTree copies folders and small files, links packs, and gives everything to the repositories' owner. A linked pack
// changes its owner in the cache too, where nobody minds.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			err = os.Mkdir(target, 0o755)
		case filepath.Ext(path) == ".pack":
			if err = os.Link(path, target); errors.Is(err, syscall.EXDEV) {
				err = copyFile(path, target)
			}
		default:
			err = copyFile(path, target)
		}
		if err != nil {
			return err
		}
		return os.Chown(target, ownerUID, ownerUID)
	})
}
