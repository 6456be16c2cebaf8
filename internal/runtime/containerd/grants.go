package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/grants"
)

// grantsMount is the file system of a guest's grants: in its memory, and empty until giveGrants.
func grantsMount(given []runtime.Grant) specs.Mount {
	bytes, inodes := grants.Size(given)
	return tmpfsMount(runtime.GrantsPath, fmt.Sprintf("mode=0700,size=%d,nr_inodes=%d", bytes, inodes), "noexec")
}

// grantsCapabilities are what filling that file system takes: to write below what it has given to the command, and to make
// it read-only.
var grantsCapabilities = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_SYS_ADMIN"}

// giveGrants has a process in the guest fill the grants' file system with what it reads: they pass through pipes and are on
// no disk.
func (s *Sandbox) giveGrants(ctx context.Context, spec runtime.Spec) (err error) {
	done, err := s.aloneAttaching(ctx)
	if err != nil {
		return err
	}
	defer done()
	id := newProcessID("grants")
	p, err := newPipes(filepath.Join(attachesDir(s.Record.Identity.Dir), id))
	if err != nil {
		return err
	}
	defer p.Close()
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		err = errors.Join(err, s.detach(clean, id))
	}()
	if err := s.startProcess(ctx, id, p, grantsCapabilities, "grants", strconv.Itoa(int(spec.IDs.CommandUID)), strconv.Itoa(int(spec.IDs.CommandGID))); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = p.in.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := json.NewEncoder(p.in).Encode(spec.Grants); err != nil {
		return fmt.Errorf("giving the grants: %w", errors.Join(err, ctx.Err()))
	}
	call, cancel := s.r.call(ctx)
	defer cancel()
	res, err := s.r.client.TaskService().Wait(call, &tasks.WaitRequest{ContainerID: s.Record.Identity.ContainerID, ExecID: id})
	if err != nil {
		return s.r.failed("giving the grants", err)
	}
	if res.GetExitStatus() == 0 {
		return nil
	}
	return fmt.Errorf("giving the grants: the process in the container ended with %d: %s", res.GetExitStatus(), p.said())
}
