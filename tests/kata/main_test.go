package kata

import (
	"fmt"
	"os"
	"testing"
)

// scratch is removed after all tests.
var scratch string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("/var/tmp", "sandbox-agent-kata-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	scratch = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}
