package nsexec

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"os"
)

// Capture takes one stream of a command: it counts and hashes everything and keeps a head and a tail (promise P13).
// Memory grows with the output up to the limit and no further.
type Capture struct {
	headMax, tailMax int
	head             []byte
	tail             []byte // a ring once it is tailMax long
	next             int    // where the ring's oldest byte is
	total            uint64
	sum              hash.Hash
}

// NewCapture keeps at most limit bytes: the first half from the beginning, the other from the end.
func NewCapture(limit uint64) *Capture {
	head := int(limit+1) / 2
	return &Capture{headMax: head, tailMax: int(limit) - head, sum: sha256.New()}
}

// Write never fails.
func (c *Capture) Write(b []byte) (int, error) {
	n := len(b)
	c.total += uint64(n)
	c.sum.Write(b)
	if room := c.headMax - len(c.head); room > 0 {
		k := min(room, len(b))
		c.head = append(c.head, b[:k]...)
		b = b[k:]
	}
	c.keepTail(b)
	return n, nil
}

func (c *Capture) keepTail(b []byte) {
	if over := len(b) - c.tailMax; over > 0 {
		b = b[over:]
	}
	if room := c.tailMax - len(c.tail); room > 0 {
		k := min(room, len(b))
		c.tail = append(c.tail, b[:k]...)
		b = b[k:]
	}
	for len(b) > 0 {
		k := copy(c.tail[c.next:], b)
		c.next = (c.next + k) % c.tailMax
		b = b[k:]
	}
}

// Total is how many bytes came.
func (c *Capture) Total() uint64 { return c.total }

// SHA256 is the digest of all that came, lower-case hex.
func (c *Capture) SHA256() string { return hex.EncodeToString(c.sum.Sum(nil)) }

// Kept is the head followed by the tail.
func (c *Capture) Kept() []byte {
	kept := make([]byte, 0, len(c.head)+len(c.tail))
	kept = append(kept, c.head...)
	kept = append(kept, c.tail[c.next:]...)
	return append(kept, c.tail[:c.next]...)
}

// Omitted is the range that was not kept: where it begins (the total when nothing is missing) and how long it is.
func (c *Capture) Omitted() (from, bytes uint64) {
	kept := uint64(len(c.head) + len(c.tail))
	if kept == c.total {
		return c.total, 0
	}
	return uint64(len(c.head)), c.total - kept
}

// Sink is told of output as it comes. It must not block: nothing may stall a command's output.
type Sink func(offset uint64, data []byte)

// pump copies a stream into its capture until every holder of the write end is gone.
func pump(from *os.File, to *Capture, sink Sink) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if sink != nil {
				sink(to.total, buf[:n])
			}
			_, _ = to.Write(buf[:n])
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
