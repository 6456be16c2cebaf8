package journal

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// stateKey holds the state. No caller's key begins with NUL.
const stateKey = "\x00state"

// state is written with every change, in the same batch.
type state struct {
	// seq counts the batches.
	seq uint64
	// records is how many live records there are.
	records uint64
	// sum is the sum, modulo 2^64 in each word, of a hash of every live record: it can be carried on from one change
	// to the next, and computed anew from all records in any order. It guards against faults, not against forgery.
	sum [2]uint64
}

func (s *state) add(key string, value []byte) {
	h := recordHash(key, value)
	s.records++
	s.sum[0] += h[0]
	s.sum[1] += h[1]
}

func (s *state) remove(key string, value []byte) {
	h := recordHash(key, value)
	s.records--
	s.sum[0] -= h[0]
	s.sum[1] -= h[1]
}

func recordHash(key string, value []byte) [2]uint64 {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(key)+len(value)), uint64(len(key)))
	b = append(append(b, key...), value...)
	sum := sha256.Sum256(b)
	return [2]uint64{binary.BigEndian.Uint64(sum[:]), binary.BigEndian.Uint64(sum[8:])}
}

const stateBytes = 4*8 + 4

func (s state) encode() []byte {
	b := make([]byte, 0, stateBytes)
	for _, n := range []uint64{s.seq, s.records, s.sum[0], s.sum[1]} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

var errState = errors.New("its state record is damaged")

func decodeState(b []byte) (state, error) {
	if len(b) != stateBytes || crc32.ChecksumIEEE(b[:stateBytes-4]) != binary.BigEndian.Uint32(b[stateBytes-4:]) {
		return state{}, errState
	}
	n := func(i int) uint64 { return binary.BigEndian.Uint64(b[8*i:]) }
	return state{seq: n(0), records: n(1), sum: [2]uint64{n(2), n(3)}}, nil
}

// compare says what is wrong when the records that are there have another checksum than was last written.
func (s state) compare(found state) error {
	if s.records != found.records {
		return fmt.Errorf("it has %d records, and had %d when it was last written", found.records, s.records)
	}
	if s.sum != found.sum {
		return fmt.Errorf("of its %d records at least one is not what was last written", s.records)
	}
	return nil
}
