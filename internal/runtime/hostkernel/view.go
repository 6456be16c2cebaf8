package hostkernel

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Tail is the end of a log file, for an error message.
func Tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil || len(b) == 0 {
		return "(nothing)"
	}
	return strings.TrimSpace(string(b[max(0, len(b)-1024):]))
}

// AwaitReady waits for the one line that receiptd writes to its standard output once it listens.
func AwaitReady(ctx context.Context, stdout *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = stdout.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := bufio.NewReader(io.LimitReader(stdout, 64)).ReadString('\n')
	switch {
	case line == "ready\n":
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("waiting for receiptd: %w", context.Cause(ctx))
	case err == nil:
		err = fmt.Errorf("it said %q", line)
	}
	return fmt.Errorf("waiting for receiptd: it did not get ready: %w", err)
}

// ViewOf is the runtime's part of what receiptd is told.
func ViewOf(spec runtime.Spec, s *Slots) *receiptdv1.View {
	return &receiptdv1.View{
		Dir: spec.Workspace.Worktree,
		// One mount with all that receiptd has for itself below it.
		Hide:    []string{runtime.InternalDir},
		Pid1Uid: spec.IDs.Pid1UID, CommandUid: spec.IDs.CommandUID, CommandGid: spec.IDs.CommandGID,
		Cgroups: s.Views,
		Seals:   spec.Workspace.Seals(),
	}
}

// Provenance is what a sandbox without an image was made of.
func Provenance(spec runtime.Spec, p Programs) runtime.Provenance {
	return runtime.Provenance{
		Rootfs: spec.Rootfs, RootfsKind: runtime.KindOfRootfs(spec.Rootfs), ReceiptdSHA256: p.Receiptd, Pid1SHA256: p.Pid1,
	}
}
