package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"
)

func libexecFlag() cli.Flag {
	return &cli.StringFlag{
		Name:  "libexec-dir",
		Usage: "the `FOLDER` of receiptd and pid1 (default: this program's own, then ../libexec/sandbox-agent beside it)",
	}
}

// helpers finds the programs that run inside a sandbox.
func helpers(libexecDir string) (receiptd, pid1 string, err error) {
	dirs := []string{libexecDir}
	if libexecDir == "" {
		self, err := os.Executable()
		if err == nil {
			self, err = filepath.EvalSymlinks(self)
		}
		if err != nil {
			return "", "", fmt.Errorf("finding this program's folder: %w: name the folder of receiptd and pid1 with --libexec-dir", err)
		}
		beside := filepath.Dir(self)
		dirs = []string{beside, filepath.Join(filepath.Dir(beside), "libexec", program)}
	}
	return findHelpers(dirs)
}

// findHelpers takes the first folder that has both: a pair of different builds must not be mixed.
func findHelpers(dirs []string) (receiptd, pid1 string, err error) {
	var why []error
	for _, dir := range dirs {
		receiptd, pid1, err := pairIn(dir)
		if err == nil {
			return receiptd, pid1, nil
		}
		why = append(why, err)
	}
	return "", "", fmt.Errorf("finding receiptd and pid1: %w: build them with \"make build\", or name their folder with --libexec-dir", errors.Join(why...))
}

func pairIn(dir string) (receiptd, pid1 string, err error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", "", err
	}
	receiptd, pid1 = filepath.Join(abs, "receiptd"), filepath.Join(abs, "pid1")
	for _, p := range []string{receiptd, pid1} {
		st, err := os.Stat(p)
		switch {
		case err != nil:
			return "", "", err
		case !st.Mode().IsRegular():
			return "", "", fmt.Errorf("%s is not a regular file", p)
		case unix.Access(p, unix.X_OK) != nil:
			return "", "", fmt.Errorf("%s is not executable", p)
		}
	}
	return receiptd, pid1, nil
}
