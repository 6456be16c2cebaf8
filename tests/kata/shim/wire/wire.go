// Package wire is what the shim of tests/kata's virtual machines and the init of their guests say to each other: a request in
// one line of JSON for each connection, an answer in one line, and for OpExec then the streams of the process.
package wire

import (
	"encoding/json"
	"errors"
	"io"
)

// Port is where the guest listens on vsock: that of Kata's own agent.
const Port = 1024

// Tag names the shared file system. In it are the container's config.json, its rootfs and its mounts.
const Tag = "kataShared"

// Network is the file in it with the commands of "ip -batch" that set the guest's network up; absent: it has none.
const Network = "network.batch"

// Shared is where the guest mounts it.
const Shared = "/run/shared"

// The operations.
const (
	OpOutput = "output" // the connection is the container's output, before it is started
	OpStart  = "start"  // runs the container
	OpExec   = "exec"   // runs a process in it; the connection is its standard input and output
	OpWait   = "wait"   // is answered when the container, or the process Exec, has ended
	OpKill   = "kill"
)

// Request is one operation. Exec names a process; empty: the container itself.
type Request struct {
	Op, ID, Exec string
	Process      json.RawMessage
	Signal       uint32
}

// Answer is the answer. Status is an exit status.
type Answer struct {
	Error  string
	Status uint32
}

// Err is the error that an answer holds.
func (a Answer) Err() error {
	if a.Error == "" {
		return nil
	}
	return errors.New(a.Error)
}

// Send writes one line.
func Send(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// Receive reads one line, and no byte beyond it.
func Receive(r io.Reader, v any) error {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return err
		}
		if b[0] == '\n' {
			return json.Unmarshal(line, v)
		}
		line = append(line, b[0])
	}
}
