package kata

import (
	"fmt"
	"os"
	"testing"
)

// namespace is containerd's for these tests.
const namespace = "kata-test"

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
	_ = os.Remove("/run/containerd/runc/" + namespace) // runc's folder for it; not removed while anything is in it
	os.Exit(code)
}
