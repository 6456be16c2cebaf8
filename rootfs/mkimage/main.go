package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// build is everything that the images are made of.
type build struct {
	root    *tree
	lock    []debian
	suite   string
	bin     string
	out     string
	version string
	epoch   time.Time
	said    io.Writer
}

func main() {
	debs := flag.String("debs", "", "the `FOLDER` of the packages' archives, each named by its checksum")
	lock := flag.String("lock", "rootfs/packages.lock", "the `FILE` with the packages of the sandbox's root file system")
	b := build{said: os.Stdout}
	flag.StringVar(&b.suite, "suite", "", "the Debian suite that they are of")
	flag.StringVar(&b.bin, "bin", "bin", "the `FOLDER` of sandbox-agent, receiptd and pid1, linked statically")
	flag.StringVar(&b.out, "out", "", "the `FOLDER` that the images go to")
	flag.StringVar(&b.version, "version", "dev", "the images' tag")
	flag.Parse()
	if err := b.run(context.Background(), *debs, *lock); err != nil {
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(1)
	}
}

func (b *build) run(ctx context.Context, debs, lock string) error {
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("reading SOURCE_DATE_EPOCH: %w: set it to the images' date in seconds", err)
	}
	b.epoch = time.Unix(seconds, 0).UTC()
	if b.lock, err = readLock(lock); err != nil {
		return err
	}
	spool, err := os.CreateTemp("", "mkimage-*")
	if err != nil {
		return err
	}
	defer spool.Close()
	if err := os.Remove(spool.Name()); err != nil {
		return err
	}
	if b.root, err = unpack(ctx, b.lock, debs, spool); err != nil {
		return err
	}
	return errors.Join(b.sandbox(), b.agent())
}

// programsOf gives the folder of the programs, and what is in it, as a layer of its own: the one that changes with each commit.
func (b *build) programsOf(dir string, names ...string) (*tree, error) {
	t := newTree()
	t.addDirs(dir)
	for _, name := range names {
		if err := t.addFile(filepath.Join(dir, name), filepath.Join(b.bin, name), 0o755); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// libexec is where the agent looks for what runs in a sandbox (internal/cli, helpers).
const libexec = "usr/local/libexec/sandbox-agent"

// sandbox makes the image that sandboxes have as their root file system.
func (b *build) sandbox() error {
	b.root.addDirs("dev", "proc", "sys", "run", "home")
	programs, err := b.programsOf(libexec, "receiptd", "pid1")
	if err != nil {
		return err
	}
	return b.write(image{
		name: "sandbox", title: "Root file system of a sandbox", layers: []*tree{b.root, programs}, packages: b.lock,
		programs: []string{"receiptd", "pid1"},
		cmd:      []string{"/bin/bash"},
	})
}

// agent makes the image of the agent itself. It starts no program but its own three and Git, which has the image's root file
// system in its jail.
func (b *build) agent() error {
	base, packages, err := b.gitOnly()
	if err != nil {
		return fmt.Errorf("choosing what Git needs: %w", err)
	}
	programs, err := b.programsOf("usr/local/bin", "sandbox-agent", "receiptd", "pid1")
	if err != nil {
		return err
	}
	return b.write(image{
		name: "agent", title: "Node agent that runs untrusted commands in sandboxes", layers: []*tree{base, programs}, packages: packages,
		programs:   []string{"sandbox-agent", "receiptd", "pid1"},
		entrypoint: []string{"/usr/local/bin/sandbox-agent"}, cmd: []string{"serve"},
		// The C library's resolver is linked in, and would look for libraries that aren't there.
		env: []string{"GODEBUG=netdns=go"},
	})
}
