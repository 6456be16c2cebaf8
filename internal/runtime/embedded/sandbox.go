package embedded

import (
	"context"
	"fmt"
	"net"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Sandbox is a running container.
type Sandbox struct {
	*hostkernel.Held
}

var _ runtime.Sandbox = Sandbox{}

// Dial connects to receiptd's socket.
func (s Sandbox) Dial(ctx context.Context) (net.Conn, error) {
	conn, err := s.DialSocket(ctx, runtime.SocketName)
	if err != nil {
		return nil, fmt.Errorf("dialling the receiptd of sandbox %s: %w", s.Record.Identity.SandboxID, err)
	}
	return conn, nil
}

// Load finds a sandbox that an earlier agent started; see runtime.Runtime.
func (r *Runtime) Load(_ context.Context, id runtime.Identity) (runtime.Sandbox, error) {
	held, err := r.keeper.Load(id)
	if err != nil {
		return nil, err
	}
	return Sandbox{held}, nil
}

// Remove ends whatever is left of a sandbox; see runtime.Runtime.
func (r *Runtime) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	return r.keeper.Remove(ctx, id)
}

// List names the sandboxes of which there is anything; see runtime.Runtime. Only those of this state folder: another
// agent's sandboxes are none of its business.
func (r *Runtime) List(context.Context) ([]string, error) { return r.keeper.Records.List() }
