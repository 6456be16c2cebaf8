package client

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// flow is one command's output on its way to its reader, over any number of connections.
type flow struct {
	stdout, stderr lane
	output         func(Chunk) error
}

// lane is one stream of it.
type lane struct {
	// next is the offset of the first byte that the reader has not got.
	next uint64
	// sum is of everything so far; nil once something of it is missing.
	sum hash.Hash
}

// outputError is what the reader of the output failed with.
type outputError struct{ err error }

func (e *outputError) Error() string { return e.err.Error() }
func (e *outputError) Unwrap() error { return e.err }

func newFlow(r *sandboxv1.StreamExecRequest, output func(Chunk) error) *flow {
	return &flow{stdout: newLane(r.GetStdoutOffset()), stderr: newLane(r.GetStderrOffset()), output: output}
}

func newLane(from uint64) lane {
	if from > 0 {
		return lane{next: from}
	}
	return lane{sum: sha256.New()}
}

func (f *flow) lane(s sandboxv1.Stream) *lane {
	if s == sandboxv1.Stream_STDERR {
		return &f.stderr
	}
	return &f.stdout
}

// take passes on what of a chunk the reader has not got yet.
func (f *flow) take(o *sandboxv1.OutputChunk) error {
	c, some := f.lane(o.GetStream()).cut(o.GetStream(), o.GetOffset(), o.GetData())
	if !some {
		return nil
	}
	if err := f.output(c); err != nil {
		return &outputError{fmt.Errorf("passing the output on: %w", err)}
	}
	return nil
}

func (l *lane) cut(s sandboxv1.Stream, offset uint64, data []byte) (Chunk, bool) {
	end := offset + uint64(len(data))
	if end <= l.next {
		return Chunk{}, false
	}
	c := Chunk{Stream: s, Offset: offset, Data: data}
	if offset > l.next {
		c.Lost, l.sum = offset-l.next, nil
	} else {
		c.Offset, c.Data = l.next, data[l.next-offset:]
	}
	if l.sum != nil {
		l.sum.Write(c.Data)
	}
	l.next = end
	return c, true
}

// finish gives what the answer holds and the stream did not bring, says what is lost at the end, and with check compares
// what was given with what was signed.
func (f *flow) finish(r *sandboxv1.ExecResult, check bool) error {
	for _, s := range []struct {
		stream sandboxv1.Stream
		kept   []byte
		info   *sandboxv1.OutputInfo
	}{
		{sandboxv1.Stream_STDOUT, r.GetStdout(), r.GetStdoutInfo()},
		{sandboxv1.Stream_STDERR, r.GetStderr(), r.GetStderrInfo()},
	} {
		head := uint64(len(s.kept))
		if s.info.GetTruncated() {
			head = min(head, s.info.GetOmittedFrom())
		}
		for _, c := range []*sandboxv1.OutputChunk{
			{Stream: s.stream, Data: s.kept[:head]},
			{Stream: s.stream, Offset: head + s.info.GetOmittedBytes(), Data: s.kept[head:]},
			{Stream: s.stream, Offset: s.info.GetBytes()},
		} {
			if err := f.take(c); err != nil {
				return err
			}
		}
		if l := f.lane(s.stream); check && s.info != nil {
			if err := l.check(s.info); err != nil {
				return fmt.Errorf("%w: %s: %w", ErrUnverified, s.stream, err)
			}
		}
	}
	return nil
}

func (l *lane) check(info *sandboxv1.OutputInfo) error {
	if l.next > info.GetBytes() && l.sum != nil {
		return fmt.Errorf("%d bytes came, the receipt counts %d", l.next, info.GetBytes())
	}
	if l.sum == nil {
		return nil
	}
	if sum := hex.EncodeToString(l.sum.Sum(nil)); sum != info.GetSha256() {
		return fmt.Errorf("what came has SHA-256 %s, the receipt says %s", sum, info.GetSha256())
	}
	return nil
}
