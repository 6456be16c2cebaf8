package kata

import (
	"os"
	"testing"

	testkata "github.com/sandbox-agent/sandbox-agent/internal/testkit/kata"
)

// namespace is containerd's for these tests.
const namespace = "kata-test"

func TestMain(m *testing.M) {
	code := m.Run()
	testkata.Clean()
	_ = os.Remove("/run/containerd/runc/" + namespace) // runc's folder for it; not removed while anything is in it
	os.Exit(code)
}
