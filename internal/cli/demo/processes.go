package demo

import (
	"bytes"
	"os"
	"path/filepath"
)

// marked counts the processes of this machine that carry a variable in their environment. Every command of the
// session inherits it, and so does whatever a command starts, whatever namespace, session or group it hides in; only
// a process that has not started a program of its own yet shows its parent's.
func marked(variable string) int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended in the meantime
		}
		for _, v := range bytes.Split(b, []byte{0}) {
			if string(v) == variable {
				n++
				break
			}
		}
	}
	return n
}
