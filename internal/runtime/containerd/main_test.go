package containerd

import (
	"os"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	testkata "github.com/sandbox-agent/sandbox-agent/internal/testkit/kata"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		agentProcess(os.Args[2:])
		return
	}
	code := m.Run()
	testkit.Clean()
	testkata.Clean()
	os.Exit(code)
}
