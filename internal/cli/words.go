package cli

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// count is a number of things: "1 object", "2 objects".
func count[N int | uint64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// printable is a path as it is, or quoted where a terminal or JSON could not show it so.
func printable(path string) string {
	if !utf8.ValidString(path) || strings.ContainsFunc(path, unicode.IsControl) {
		return strconv.Quote(path)
	}
	return path
}

// checkText refuses what no message to the agent can hold (protocol buffers' strings are UTF-8): the encoder's error would
// name neither the text nor the remedy.
func checkText(what, text string) error {
	if !utf8.ValidString(text) {
		return fmt.Errorf("%s %q is not UTF-8, and messages to the agent can hold no other: rename it", what, text)
	}
	return nil
}
