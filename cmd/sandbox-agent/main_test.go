package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestMain(m *testing.M) {
	embedded.Init() // see main
	nodecheck.Init()
	testscript.Main(cleaned{m}, map[string]func(){"sandbox-agent": main})
}

// cleaned removes what the tests built.
type cleaned struct{ m *testing.M }

func (c cleaned) Run() int {
	defer testkit.Clean()
	return c.m.Run()
}

// TestTheCommandLine runs testdata/script/*.txtar: what a person types, and what they get.
func TestTheCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", RequireExplicitExec: true, Condition: condition})
}

func condition(name string) (bool, error) {
	if name == "root" {
		return os.Geteuid() == 0, nil
	}
	return false, fmt.Errorf("unknown condition %q", name)
}
