package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// program is another program that is started, waited for and timed. Its standard streams are /dev/null.
type program struct {
	args []string // args[0] is an absolute path
	env  []string
	dir  string
	// uid and gid are the same number; 0 is root.
	uid uint32
}

// find gives the program of a command line by its absolute path, so that no sample pays for a search of PATH.
func find(name string, args ...string) (program, error) {
	path, err := exec.LookPath(name)
	return program{args: append([]string{path}, args...)}, err
}

// run starts it, waits for its end and gives the time that both took. Another exit code than 0 is an error.
func (p program) run(null *os.File) (time.Duration, error) {
	attr := &os.ProcAttr{Dir: p.dir, Env: p.env, Files: []*os.File{null, null, null}}
	if p.uid != 0 {
		attr.Sys = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.uid, Gid: p.uid}}
	}
	began := time.Now()
	process, err := os.StartProcess(p.args[0], p.args, attr)
	if err != nil {
		return 0, err
	}
	state, err := process.Wait()
	took := time.Since(began)
	if err == nil && !state.Success() {
		err = fmt.Errorf("%s: %s", strings.Join(p.args, " "), state)
	}
	return took, err
}

// try runs it once, untimed; an error says what it wrote.
func (p program) try(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...)
	cmd.Dir, cmd.Env = p.dir, p.env
	if p.uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.uid, Gid: p.uid}}
	}
	// A file, not a pipe: what it leaves running would hold a pipe open, and this would wait for it.
	out, err := os.CreateTemp("", "sandbox-agent-bench-")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%s: %w: %s", filepath.Base(p.args[0]), err, strings.TrimSpace(string(said)))
	}
	return nil
}

// unusable says why a peer can't be measured here; found is what the search for it gave. Empty: it can.
func (p program) unusable(ctx context.Context, found error) string {
	if found != nil {
		return "not installed"
	}
	if err := p.try(ctx); err != nil {
		line, _, _ := strings.Cut(err.Error(), "\n")
		return "does not run here: " + line
	}
	return ""
}
