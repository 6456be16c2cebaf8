// Package entry is the main program of the tests' shims under Kata's name: what containerd starts, and what answers "--version" as the
// Rust shim does.
package entry

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
)

// name is the shim's to containerd.
const name = "io.containerd.kata.v2"

// Run runs a shim, whose task service newService makes.
func Run(newService func(ctx context.Context, events shim.Publisher, end shutdown.Service) (any, error)) {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("kata-containers containerd shim (Rust): id: " + name + ", version: 4.2.0, commit: tests")
		return
	}
	registry.Register(&plugin.Registration{
		Type: plugins.TTRPCPlugin, ID: "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn: func(ic *plugin.InitContext) (any, error) {
			events, err := ic.GetByID(plugins.EventPlugin, "publisher")
			if err != nil {
				return nil, err
			}
			end, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
			if err != nil {
				return nil, err
			}
			return newService(ic.Context, events.(shim.Publisher), end.(shutdown.Service))
		},
	})
	shim.RunShim(context.Background(), manager.NewShimManager(name))
}
