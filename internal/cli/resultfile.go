package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// resultFile is the file of --result-file. It is opened before anything is sent, so that a wrong path is an error
// while nothing has run yet; it appears under its name only with a whole result, and an older one is gone by then:
// whoever finds the file can believe it.
type resultFile struct {
	path string
	tmp  *os.File
}

// newResultFile prepares path; with "" it gives nil, whose methods do nothing.
func newResultFile(path string) (*resultFile, error) {
	if path == "" {
		return nil, nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("removing the old result file: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return nil, fmt.Errorf("making the result file %s: %w", path, err)
	}
	return &resultFile{path: path, tmp: tmp}, nil
}

func (f *resultFile) write(res *sandboxv1.ExecResult) error {
	if f == nil {
		return nil
	}
	b, err := marshalJSON(res)
	if err != nil {
		return err
	}
	if _, err := f.tmp.Write(b); err != nil {
		return fmt.Errorf("writing the result file %s: %w", f.path, err)
	}
	if err := f.tmp.Close(); err != nil {
		return fmt.Errorf("writing the result file %s: %w", f.path, err)
	}
	if err := os.Rename(f.tmp.Name(), f.path); err != nil {
		return fmt.Errorf("putting the result file in its place: %w", err)
	}
	f.tmp = nil
	return nil
}

// discard removes what was never finished.
func (f *resultFile) discard() {
	if f == nil || f.tmp == nil {
		return
	}
	f.tmp.Close()
	os.Remove(f.tmp.Name())
}

// signalName is "SIGKILL" for 9.
func signalName(n int32) string {
	if s := unix.SignalName(unix.Signal(n)); s != "" {
		return s
	}
	return fmt.Sprintf("signal %d", n)
}
