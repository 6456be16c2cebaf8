package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
)

// highWater is the file that notes the sequence number of the last batch that was synced. It is written after the
// sync and not synced itself: it never says more than is durable, survives a kill as the page cache does, and after a
// power cut says a little less. 12 bytes within one sector, overwritten in place: never torn.
type highWater struct {
	f    *os.File
	seen uint64
}

const highWaterBytes = 8 + 4

func openHighWater(path string) (*highWater, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	h := &highWater{f: f}
	if h.seen, err = h.read(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return h, nil
}

var errHighWater = corrupt(errors.New("it is not what was written"))

func (h *highWater) read() (uint64, error) {
	b := make([]byte, highWaterBytes+1)
	n, err := h.f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	if n == 0 {
		// New, or a power cut came before the first writeback.
		return 0, nil
	}
	if n != highWaterBytes || crc32.ChecksumIEEE(b[:8]) != binary.BigEndian.Uint32(b[8:]) {
		return 0, errHighWater
	}
	return binary.BigEndian.Uint64(b), nil
}

func (h *highWater) note(seq uint64) error {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, highWaterBytes), seq)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	_, err := h.f.WriteAt(b, 0)
	return err
}
