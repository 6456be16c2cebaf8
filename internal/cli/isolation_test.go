package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestAClassOfIsolationIsWrittenAsItIsShown(t *testing.T) {
	for text, want := range map[string]sandboxv1.Isolation{
		"": sandboxv1.Isolation_ISOLATION_UNSPECIFIED, "namespaces": sandboxv1.Isolation_NAMESPACES,
		"separate-kernel": sandboxv1.Isolation_SEPARATE_KERNEL, "virtual-machine": sandboxv1.Isolation_VIRTUAL_MACHINE,
	} {
		got, err := parseIsolation(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
		if text != "" {
			require.Equal(t, text, isolationText(got))
		}
	}
	for _, bad := range []string{"vm", "SEPARATE_KERNEL", "isolation-unspecified", "3"} {
		_, err := parseIsolation(bad)
		require.ErrorContains(t, err, "separate-kernel, virtual-machine", bad)
	}
}

func TestWhatASandboxWasMadeOfIsOneLine(t *testing.T) {
	programs := ", receiptd sha256 0a, pid1 sha256 0b"
	for want, p := range map[string]*sandboxv1.Provenance{
		"":                                  nil,
		"the node's own files" + programs:   {Rootfs: "host", RootfsKind: "host", ReceiptdSha256: "0a", Pid1Sha256: "0b"},
		"folder /srv/rootfs" + programs:     {Rootfs: "/srv/rootfs", RootfsKind: "folder", ReceiptdSha256: "0a", Pid1Sha256: "0b"},
		"image r/i:1 (sha256:1)" + programs: {Rootfs: "r/i:1", RootfsKind: "image", RootfsDigest: "sha256:1", ReceiptdSha256: "0a", Pid1Sha256: "0b"},
		"image r/i@sha256:1" + programs:     {Rootfs: "r/i@sha256:1", RootfsKind: "image", RootfsDigest: "sha256:1", ReceiptdSha256: "0a", Pid1Sha256: "0b"},
	} {
		require.Equal(t, want, provenanceText(p))
	}
}
