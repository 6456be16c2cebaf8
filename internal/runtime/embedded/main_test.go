package embedded

import (
	"os"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestMain(m *testing.M) {
	Init()
	code := m.Run()
	testkit.CleanBinaries()
	os.Exit(code)
}
