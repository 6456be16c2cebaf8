package receiptd

import (
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// spill writes a stream's beginning to a file in the receipts folder, once there is more of it than the receipt keeps. It
// is the agent's to take away. Nothing depends on it: when it can't be written (a full disk) there is none. nil does
// nothing.
type spill struct {
	path string
	// above is how much there must be; most is how much is written.
	above, most int

	mu      sync.Mutex
	held    []byte // what came, as long as there is no file
	file    *os.File
	written int
	closed  bool
}

// spillReserve is what a spill leaves free on the disk, bytes: receipts and the agent's journal are on it too, and without
// room for them no session's command starts (P16).
const spillReserve = 64 << 20

// newSpills are those of an exec's two streams. What is not more than a receipt keeps needs no file.
func (s *Server) newSpills(req *receiptdv1.ExecRequest) [2]*spill {
	most := int(req.GetSpillBytes())
	if most == 0 {
		return [2]*spill{}
	}
	one := func(name string) *spill {
		return &spill{path: filepath.Join(s.opts.Receipts, name), above: min(int(s.init.GetLimits().GetOutputBytes()), most), most: most}
	}
	return [2]*spill{one(receipt.StdoutSpillName(req.GetExecId())), one(receipt.StderrSpillName(req.GetExecId()))}
}

// behind is a sink that has the stream go to another one and then to the file.
func (s *spill) behind(sink nsexec.Sink) nsexec.Sink {
	if s == nil {
		return sink
	}
	return func(offset uint64, data []byte) {
		sink(offset, data)
		s.take(data)
	}
}

func (s *spill) take(data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if s.file == nil && len(s.held)+len(data) <= s.above {
		s.held = append(s.held, data...)
		return
	}
	if s.file == nil && !s.begin() {
		return
	}
	s.write(data)
}

// hasRoom says whether a write leaves the reserve free. Other sessions' commands may take from it at the same time: a
// write is small against it.
func (s *spill) hasRoom(bytes int) bool {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.path), &fs); err != nil {
		return false
	}
	return fs.Bavail*uint64(fs.Bsize) >= uint64(bytes)+spillReserve
}

// begin makes the file with what was held.
func (s *spill) begin() bool {
	if !s.hasRoom(len(s.held)) {
		logf("keeping no more of the output: the disk is nearly full")
		s.closed, s.held = true, nil
		return false
	}
	f, err := os.OpenFile(s.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		logf("keeping more of the output: %v", err)
		s.closed, s.held = true, nil
		return false
	}
	s.file = f
	s.write(s.held)
	s.held = nil
	return !s.closed
}

func (s *spill) write(data []byte) {
	if s.closed {
		return
	}
	if !s.hasRoom(len(data)) { // what is there is the stream's beginning all the same
		logf("keeping no more of the output: the disk is nearly full")
		s.shut()
		return
	}
	n, err := s.file.Write(data[:min(len(data), s.most-s.written)])
	s.written += n
	if err != nil { // what is there is the stream's beginning all the same
		logf("keeping more of the output: %v", err)
		s.shut()
	}
}

func (s *spill) shut() {
	s.closed, s.held = true, nil
	if s.file != nil {
		s.file.Close()
	}
}

// close ends the file: a stream whose end was not seen may still bring something.
func (s *spill) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.shut()
	}
}
