package receipt

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"maps"
	"slices"
)

// requestDomain separates these digests from every other SHA-256 of the project; a change of the encoding below
// changes its number.
const requestDomain = "sandbox-agent/request/v1"

// Request is what a caller asked for, as far as it decides whether two requests with one exec id are the same
// (promise P7). It is digested as the caller gave it, before any default is filled in.
type Request struct {
	SessionID string
	Command   string
	// TimeoutMS is the caller's own timeout in milliseconds; 0: none was given, the node's default was left to rule.
	TimeoutMS uint64
	Labels    map[string]string
}

// Digest is the SHA-256 (lower-case hex) of an unambiguous encoding of r: every text is preceded by its length
// (8 bytes, big-endian), the labels by their number and sorted by key, so that no two requests share an encoding.
func (r Request) Digest() string {
	h := sha256.New()
	writeText(h, requestDomain)
	writeText(h, r.SessionID)
	writeText(h, r.Command)
	writeNumber(h, r.TimeoutMS)
	writeNumber(h, uint64(len(r.Labels)))
	for _, k := range slices.Sorted(maps.Keys(r.Labels)) {
		writeText(h, k)
		writeText(h, r.Labels[k])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// A hash.Hash never returns an error from Write (package hash).
func writeNumber(h hash.Hash, n uint64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	h.Write(b[:])
}

func writeText(h hash.Hash, s string) {
	writeNumber(h, uint64(len(s)))
	h.Write([]byte(s))
}

// hexSHA256 is the lower-case hex SHA-256 of b.
func hexSHA256(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
