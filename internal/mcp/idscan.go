package mcp

import (
	"bytes"
	"encoding/json"
)

// Bounds of what is looked at, bytes: the key is "id", however it is written; an id longer than this is not repeated.
const (
	maxKey = 14 // "\u0069\u0064", with its quotes
	maxID  = 1024
)

// idScanner finds the value of the key "id" of a JSON object that is fed piece by piece, in constant memory: the answer to
// a message that is too long to be held still says whose it is, or its caller would wait without end. It needs no valid
// JSON, and finds nothing in what is none.
type idScanner struct {
	depth    int
	inString bool
	escaped  bool
	// token is the string or the number of the object itself that is being read, or was last.
	token []byte
	// key: token is a key's; value: what is read belongs to the key "id".
	key, value bool
	found      []byte
	count      int // of keys "id"
}

func (s *idScanner) feed(b []byte) {
	for _, c := range b {
		if s.inString {
			s.inside(c)
		} else {
			s.outside(c)
		}
	}
}

// inside takes a byte of a string.
func (s *idScanner) inside(c byte) {
	s.keep(c)
	switch {
	case s.escaped:
		s.escaped = false
	case c == '\\':
		s.escaped = true
	case c == '"':
		s.inString = false
	}
}

func (s *idScanner) outside(c byte) {
	switch c {
	case '"':
		s.inString = true
		if s.depth == 1 && !s.value {
			s.token = s.token[:0]
		}
		s.keep(c)
	case '{', '[':
		s.depth++
		s.key = s.depth == 1
	case '}', ']':
		s.endValue()
		s.depth--
	case ':':
		if s.depth == 1 && s.key {
			s.value, s.key = isID(s.token), false
			s.token = s.token[:0]
		}
	case ',':
		s.endValue()
	case ' ', '\t', '\r', '\n':
	default:
		s.keep(c)
	}
}

// keep adds to the token where it can still be a key or the id.
func (s *idScanner) keep(c byte) {
	if s.depth != 1 {
		return
	}
	limit := maxKey
	if s.value {
		limit = maxID
	}
	if (s.key || s.value) && len(s.token) <= limit {
		s.token = append(s.token, c)
	}
}

// endValue is the end of a member of the object.
func (s *idScanner) endValue() {
	if s.depth != 1 {
		return
	}
	if s.value {
		s.found = bytes.Clone(s.token)
		s.count++
	}
	s.key, s.value = true, false
}

// isID says whether a key is "id", for what decodes keys.
func isID(key []byte) bool {
	var name string
	return len(key) <= maxKey && json.Unmarshal(key, &name) == nil && name == "id"
}

// id is the id as it was written; nil when there is none that is a JSON string or number, or more than one.
func (s *idScanner) id() json.RawMessage {
	if s.count != 1 || len(s.found) == 0 || len(s.found) > maxID || !json.Valid(s.found) {
		return nil
	}
	return s.found
}
