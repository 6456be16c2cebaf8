package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	nameBash  = "bash"
	nameFloor = "floor"
	// recordSize is the size of a durable record, bytes: about what an intent takes.
	recordSize = 400
)

// bareCases are what the product adds to: the command by itself, and the least that a durable answer costs.
func bareCases(_ context.Context, o options, p *place, s *session) ([]testCase, error) {
	var cases []testCase
	bash, err := bashTrue(p, s)
	if err != nil {
		return nil, err
	}
	if o.wants(nameBash) {
		cases = append(cases, testCase{group: groupCommand, series: []string{nameBash}, baseline: true, sample: one(func(context.Context) (time.Duration, error) {
			return bash.run(p.null)
		})})
	}
	if o.wants(nameFloor) {
		f, err := openFloor(p, "floor")
		if err != nil {
			return nil, err
		}
		cases = append(cases, testCase{group: groupCommand, series: []string{nameFloor}, baseline: true, sample: one(func(context.Context) (time.Duration, error) {
			return f.run(bash, p.null)
		})})
	}
	return cases, nil
}

// bashTrue is the command that everything here runs, in a session's worktree and with a sandbox's environment.
func bashTrue(p *place, s *session) (program, error) {
	bash, err := find("bash", "-c", "true")
	bash.env, bash.dir = s.env, p.repo
	return bash, err
}

// floor is a command with a durable record before and after it: what an intent and a receipt cost at the very least.
type floor struct {
	file   *os.File
	record []byte
}

func openFloor(p *place, name string) (*floor, error) {
	file, err := os.OpenFile(p.path("default-state", name), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	p.onClose(func(context.Context) error { return file.Close() })
	return &floor{file, []byte(strings.Repeat("x", recordSize))}, nil
}

func (f *floor) run(bash program, null *os.File) (time.Duration, error) {
	began := time.Now()
	err := f.sync()
	if err == nil {
		_, err = bash.run(null)
	}
	err = errors.Join(err, f.sync())
	return time.Since(began), err
}

func (f *floor) sync() error {
	if _, err := f.file.Write(f.record); err != nil {
		return err
	}
	return unix.Fdatasync(int(f.file.Fd()))
}

// bubblewrapCase is the nearest program to compare with: new namespaces for each command, and nothing durable.
func bubblewrapCase(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	const name = "bwrap"
	if !o.wants(name) {
		return nil, nil
	}
	bwrap, found := find("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "bash", "-c", "true")
	bwrap.env, bwrap.dir = s.env, p.repo
	return []testCase{{
		group: groupCommand, series: []string{name}, baseline: true, missing: bwrap.unusable(ctx, found),
		sample: one(func(context.Context) (time.Duration, error) { return bwrap.run(p.null) }),
	}}, nil
}
