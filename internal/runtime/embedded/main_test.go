package embedded

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestMain(m *testing.M) {
	Init()
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		agentProcess(os.Args[2:])
		return
	}
	code := m.Run()
	testkit.Clean()
	os.Exit(code)
}

// Bounds for what the kernel or another process does in its own time: they are reached only when a test fails.
const (
	leakless  = 30 * time.Second
	pollEvery = 2 * time.Millisecond
)

func itoa(n int) string { return strconv.Itoa(n) }
