package agent

import (
	"bytes"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// spillRoom is how many streams of the largest size a worktree's whole outputs may take together.
const spillRoom = 4

// spillBytes is what receiptd is to write down of each stream.
func (e *execution) spillBytes() uint64 {
	if e.spillAbove == 0 {
		return 0
	}
	return uint64(e.session.agent.cfg.Limits.SpillBytes)
}

// spill writes the streams whose caller wants them whole to files in the worktree, and names them in the answer. It runs at
// the session's turn, when nothing of the command is left. It says whether there is one: that is in no receipt, so the
// answer must be recorded durably. What an earlier agent may have answered without a file stays without, and a file that
// it wrote before it died is removed.
func (s *session) spill(e *execution, p *proven, r *sandboxv1.ExecResult) bool {
	if !e.intent.Spill {
		return false
	}
	dir := s.agent.receiptsDir(e.intent.SandboxID)
	stdout, stderr := filepath.Join(dir, receipt.StdoutSpillName(e.intent.ExecID)), filepath.Join(dir, receipt.StderrSpillName(e.intent.ExecID))
	defer os.Remove(stdout)
	defer os.Remove(stderr)
	if e.recovered {
		// No answer names what the agent before had written when it died. One that asked for no file has none: what has its
		// name is of an earlier session's exec with the same id, in whose answer it is.
		s.forgetOutputs(e)
	}
	if p == nil || e.spillAbove == 0 {
		return false
	}
	one := s.spillStream(e, receipt.StdoutName(e.intent.ExecID), stdout, p.stdout, r.GetStdoutInfo())
	other := s.spillStream(e, receipt.StderrName(e.intent.ExecID), stderr, p.stderr, r.GetStderrInfo())
	return one || other
}

// spillStream is spill for one stream: from what is kept of it, where that is all, or from the file that receiptd wrote.
func (s *session) spillStream(e *execution, name, path string, kept []byte, info *sandboxv1.OutputInfo) bool {
	most := int64(e.spillBytes())
	if most == 0 || info.GetBytes() <= e.spillAbove {
		return false
	}
	var src io.Reader = bytes.NewReader(kept)
	size := min(int64(len(kept)), most)
	if info.GetTruncated() {
		f, n, err := openSpill(path)
		if err != nil {
			s.log.Warn("no file of the whole output", "exec", e.intent.ExecID, "error", err)
			return false
		}
		defer f.Close()
		src, size = f, min(n, most)
	}
	w := s.workspace()
	if err := workspace.KeepOutput(w.Worktree, w.Owner, name, src, size, spillRoom*most); err != nil {
		s.log.Warn("no file of the whole output", "exec", e.intent.ExecID, "error", err)
		return false
	}
	info.File, info.FileBytes = workspace.OutputPath(w.Worktree, name), uint64(size)
	return true
}

// forgetOutputs removes the files of an exec that its answer doesn't name.
func (s *session) forgetOutputs(e *execution) {
	w := s.workspace()
	for _, name := range []string{receipt.StdoutName(e.intent.ExecID), receipt.StderrName(e.intent.ExecID)} {
		if err := workspace.RemoveOutput(w.Worktree, w.Owner, name); err != nil {
			s.log.Warn("file of an output left behind", "exec", e.intent.ExecID, "error", err)
		}
	}
}

func openSpill(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// unspilled takes the files out of an answer that could not be recorded with them, and says whether there were any.
func unspilled(r *sandboxv1.ExecResult) (any bool) {
	for _, info := range []*sandboxv1.OutputInfo{r.GetStdoutInfo(), r.GetStderrInfo()} {
		if info != nil {
			any = any || info.GetFile() != ""
			info.File, info.FileBytes = "", 0
		}
	}
	return any
}
