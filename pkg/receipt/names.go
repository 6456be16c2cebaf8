package receipt

import (
	"fmt"
	"strings"
)

// MaxExecID is the longest exec id, bytes. With the longest ending it stays far below NAME_MAX (255).
const MaxExecID = 128

// Endings of an exec's files. An exec id may itself contain dots: the ending is what follows the last one, so no two
// execs share a name.
const (
	receiptEnding = ".json"
	stdoutEnding  = ".stdout"
	stderrEnding  = ".stderr"
)

// spareMark begins the names of files that are not yet anyone's. It is not a character of exec ids.
const spareMark = "~"

// IsSpare says whether a file of a receipts folder is one that a Store keeps ready, and no exec's.
func IsSpare(name string) bool { return strings.HasPrefix(name, spareMark) }

// CheckExecID says whether id can name an exec, and with that a file: 1 to MaxExecID of [A-Za-z0-9._-], not "." or
// "..". It fails with ErrExecID.
func CheckExecID(id string) error {
	if id == "" || len(id) > MaxExecID {
		return fmt.Errorf("%w: it has %d bytes; use 1 to %d", ErrExecID, len(id), MaxExecID)
	}
	if id == "." || id == ".." {
		return fmt.Errorf("%w %q: it names a folder; use another", ErrExecID, id)
	}
	for i := range len(id) {
		if !execIDByte(id[i]) {
			return fmt.Errorf("%w %q: byte %d is %q; use letters, digits, dot, underscore and hyphen", ErrExecID, id, i, id[i])
		}
	}
	return nil
}

func execIDByte(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return c == '.' || c == '_' || c == '-'
}

// FileName, StdoutName and StderrName are the names of an exec's files in the sandbox's receipts folder.
func FileName(execID string) string   { return execID + receiptEnding }
func StdoutName(execID string) string { return execID + stdoutEnding }
func StderrName(execID string) string { return execID + stderrEnding }

// spillEnding follows the name of the kept output of the same stream.
const spillEnding = ".spill"

// StdoutSpillName and StderrSpillName are the names, in the receipts folder, of files with more of an exec's output than is
// kept. They are no evidence and belong to no receipt: like spare files, they are debris to a Store that is opened.
func StdoutSpillName(execID string) string { return spareMark + StdoutName(execID) + spillEnding }
func StderrSpillName(execID string) string { return spareMark + StderrName(execID) + spillEnding }

// ExecIDOf gives the exec id of a receipt's file name; false if the name is not a receipt's.
func ExecIDOf(name string) (string, bool) {
	id, ok := strings.CutSuffix(name, receiptEnding)
	return id, ok && CheckExecID(id) == nil
}

// execIDOfOutput gives the exec id of a kept output's file name.
func execIDOfOutput(name string) (string, bool) {
	for _, ending := range []string{stdoutEnding, stderrEnding} {
		if id, ok := strings.CutSuffix(name, ending); ok && CheckExecID(id) == nil {
			return id, true
		}
	}
	return "", false
}
