package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
)

func TestMain(m *testing.M) {
	embedded.Init() // see main
	testscript.Main(m, map[string]func(){"sandbox-agent": main})
}

// TestTheCommandLine runs testdata/script/*.txtar: what a person types, and what they get.
func TestTheCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", RequireExplicitExec: true})
}
