package hostkernel

import (
	"os"
	"strings"

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
