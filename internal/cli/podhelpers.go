package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"
)

// podFlags are for an agent in a pod, whose image and whose files are not the node's.
func podFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "rootfs", Usage: "a sandbox's root file system: host, a `FOLDER`, or an image by its digest (default: the configuration's)"},
		&cli.StringFlag{Name: "copy-helpers-to", Usage: "copy receiptd and pid1 to a `FOLDER`, and use them from there: it has to be at the same path on the node"},
	}
}

// nodeHelpers are the programs that run inside a sandbox, where the node has them: containerd's shims look them up there, and
// what sandboxes run must not depend on an image of the agent that is removed.
func nodeHelpers(c *cli.Command) (receiptd, pid1 string, err error) {
	receiptd, pid1, err = helpers(c.String("libexec-dir"))
	if err != nil || c.String("copy-helpers-to") == "" {
		return receiptd, pid1, err
	}
	dir, err := absolute("copy-helpers-to", c.String("copy-helpers-to"))
	if err != nil {
		return "", "", withCode(ExitUsage, err)
	}
	if err := copyHelpers(dir, receiptd, pid1); err != nil {
		return "", "", fmt.Errorf("copying receiptd and pid1 to %s: %w", dir, err)
	}
	return pairIn(dir)
}

// copyHelpers puts programs into a folder, each under its own name. One that is there already with the same content stays.
// Another is replaced: what runs keeps the file that it has.
func copyHelpers(dir string, programs ...string) error {
	// The agent's state folder is made by the agent, later: its mode is the same here.
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	for _, p := range programs {
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.Base(p))
		if have, err := os.ReadFile(to); err == nil && bytes.Equal(have, b) {
			continue
		}
		if err := replaceProgram(to, b); err != nil {
			return err
		}
	}
	return nil
}

// replaceProgram writes a program beside its place and moves it there, so that a half-written one is never run.
func replaceProgram(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o755), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
