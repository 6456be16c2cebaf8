package agent

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// embeddedOnly is what checkCreate is told of a node that has the embedded runtime alone.
var embeddedOnly = []hostClass{{"embedded", runtime.Namespaces}}

func TestP14ASessionGetsARuntimeThatIsAllowedAndNeverOneThatIsolatesLess(t *testing.T) {
	node := []hostClass{{"embedded", runtime.Namespaces}, {"runc", runtime.Namespaces}, {"gvisor", runtime.SeparateKernel}, {"kata", runtime.VirtualMachine}}
	for name, x := range map[string]struct {
		want    string
		floor   runtime.Isolation
		first   string
		allowed []hostClass
		got     string
		refused error
		says    []string
	}{
		"nothing asked for":              {"", 0, "runc", node, "runc", nil, nil},
		"a name":                         {"gvisor", 0, "runc", node, "gvisor", nil, nil},
		"a floor that the default has":   {"", runtime.SeparateKernel, "kata", node, "kata", nil, nil},
		"a floor that the default lacks": {"", runtime.SeparateKernel, "embedded", node, "gvisor", nil, nil},
		"the highest floor":              {"", runtime.VirtualMachine, "embedded", node, "kata", nil, nil},
		"the operator's order counts":    {"", runtime.SeparateKernel, "runc", []hostClass{node[1], node[3], node[2]}, "kata", nil, nil},
		"a name above the floor":         {"kata", runtime.SeparateKernel, "runc", node, "kata", nil, nil},
		"a name on the floor":            {"runc", runtime.Namespaces, "runc", node, "runc", nil, nil},
		"a name below the floor":         {"runc", runtime.SeparateKernel, "runc", node, "", ErrPrecondition, []string{`"runc"`, "separate-kernel", "[gvisor kata]"}},
		"a name that isn't allowed":      {"kata", runtime.VirtualMachine, "runc", node[:2], "", ErrInvalid, []string{`"kata"`, "[embedded runc]", "runtime.allowed"}},
		"nobody has that much":           {"", runtime.VirtualMachine, "runc", node[:3], "", ErrPrecondition, []string{"virtual-machine", "gvisor: separate-kernel", "runtime.allowed"}},
		"a name, and nobody has it":      {"runc", runtime.VirtualMachine, "runc", node[:3], "", ErrPrecondition, []string{"virtual-machine"}},
	} {
		got, err := chooseRuntime(x.want, x.floor, x.first, x.allowed)
		require.Equal(t, x.got, got, name)
		require.ErrorIs(t, err, x.refused, name)
		for _, s := range x.says {
			require.ErrorContains(t, err, s, name)
		}
	}
}

func TestTheClassesOfTheAPIAreTheRuntimes(t *testing.T) {
	for api, class := range map[sandboxv1.Isolation]runtime.Isolation{
		sandboxv1.Isolation_ISOLATION_UNSPECIFIED: 0, sandboxv1.Isolation_NAMESPACES: runtime.Namespaces,
		sandboxv1.Isolation_SEPARATE_KERNEL: runtime.SeparateKernel, sandboxv1.Isolation_VIRTUAL_MACHINE: runtime.VirtualMachine,
	} {
		floor, err := floorOf(api)
		require.NoError(t, err)
		require.Equal(t, class, floor)
		require.Equal(t, api, sandboxv1.Isolation(class))
	}
	require.Len(t, sandboxv1.Isolation_name, 4)
	_, err := floorOf(4)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "min_isolation")
}

func TestASandboxProvesAllThatItsRuntimeHasNotConceded(t *testing.T) {
	item := func(promise, what string, holds bool) *receiptdv1.ProofItem {
		return &receiptdv1.ProofItem{Promise: promise, What: what, Holds: holds, Detail: "detail of " + what}
	}
	conceded := []runtime.Concession{{Promise: "P10", What: "a seccomp filter is on", Why: "the kernel in user space has none"}}
	good := item("P3", "a child is gone", true)

	proof, err := judgeProof([]*receiptdv1.ProofItem{good, item("P10", "a seccomp filter is on", false)}, conceded)
	require.NoError(t, err)
	require.Equal(t, []proofRecord{
		{Promise: "P3", What: "a child is gone", Holds: true, Detail: "detail of a child is gone"},
		{Promise: "P10", What: "a seccomp filter is on", Detail: "detail of a seccomp filter is on", Conceded: true},
	}, proof)

	proof, err = judgeProof([]*receiptdv1.ProofItem{good, item("P10", "a seccomp filter is on", true)}, conceded)
	require.NoError(t, err)
	require.False(t, proof[1].Conceded, "what holds needs no concession")

	for name, items := range map[string][]*receiptdv1.ProofItem{
		"not conceded at all":            {good, item("P9", "no_new_privs is set", false)},
		"other words of that promise":    {good, item("P10", "a listener refuses", false)},
		"those words of another promise": {good, item("P9", "a seccomp filter is on", false)},
		"one conceded and one not":       {good, item("P10", "a seccomp filter is on", false), item("P11", "sealed: /x", false)},
	} {
		_, err := judgeProof(items, conceded)
		require.ErrorContains(t, err, "can't prove", name)
		bad := items[len(items)-1]
		require.ErrorContains(t, err, bad.GetPromise()+" ("+bad.GetWhat()+": "+bad.GetDetail(), name)
	}
	for name, items := range map[string][]*receiptdv1.ProofItem{"nothing": nil, "concessions alone": {item("P10", "a seccomp filter is on", false)}} {
		_, err := judgeProof(items, conceded)
		require.ErrorContains(t, err, "proved nothing", name)
	}
}

func TestP9ASandboxMadeOfSomethingElseIsRefused(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	image := &runtime.Spec{SandboxID: "sb-1", Rootfs: "docker.io/library/debian@" + digest, ReceiptdSHA256: "r", Pid1SHA256: "p"}
	tagged := &runtime.Spec{SandboxID: "sb-1", Rootfs: "docker.io/library/debian:13", ReceiptdSHA256: "r", Pid1SHA256: "p"}
	host := &runtime.Spec{SandboxID: "sb-1", Rootfs: "host", ReceiptdSHA256: "r", Pid1SHA256: "p"}
	of := func(s *runtime.Spec, digest string) runtime.Provenance {
		return runtime.Provenance{Rootfs: s.Rootfs, RootfsKind: runtime.KindOfRootfs(s.Rootfs), RootfsDigest: digest, ReceiptdSHA256: "r", Pid1SHA256: "p"}
	}
	require.NoError(t, checkProvenance(of(image, digest), image))
	require.NoError(t, checkProvenance(of(tagged, digest), tagged), "whatever the tag names is said by its digest")
	require.NoError(t, checkProvenance(of(host, ""), host))
	for name, x := range map[string]struct {
		spec   *runtime.Spec
		change func(*runtime.Provenance)
		says   string
	}{
		"nothing said":                {host, func(p *runtime.Provenance) { *p = runtime.Provenance{} }, "root file system"},
		"another receiptd":            {host, func(p *runtime.Provenance) { p.ReceiptdSHA256 = "x" }, "receiptd"},
		"another pid1":                {host, func(p *runtime.Provenance) { p.Pid1SHA256 = "" }, "pid1"},
		"the node's own files":        {image, func(p *runtime.Provenance) { p.Rootfs = "host" }, "root file system"},
		"a folder as an image":        {image, func(p *runtime.Provenance) { p.RootfsKind = runtime.RootfsFolder }, "kind"},
		"another image":               {image, func(p *runtime.Provenance) { p.RootfsDigest = "sha256:" + strings.Repeat("0b", 32) }, "digest"},
		"an image of unknown content": {tagged, func(p *runtime.Provenance) { p.RootfsDigest = "" }, "digest"},
		"a digest that is none":       {tagged, func(p *runtime.Provenance) { p.RootfsDigest = "sha256:latest" }, "digest"},
	} {
		p := of(x.spec, "")
		if p.RootfsKind == runtime.RootfsImage {
			p.RootfsDigest = digest
		}
		x.change(&p)
		err := checkProvenance(p, x.spec)
		require.ErrorContains(t, err, x.says, name)
		require.ErrorContains(t, err, "sb-1", name)
	}
}

func TestARuntimeThatTakesNoImageIsRefusedAtTheStartWithOneThatDoes(t *testing.T) {
	n := newNode(t)
	cfg := n.cfg
	cfg.StateDir = n.state + "/other"
	cfg.Rootfs = "docker.io/library/debian@sha256:" + strings.Repeat("0a", 32)
	require.NoError(t, cfg.Validate())
	_, err := New(Options{Config: cfg, Runtimes: n.agent.hosts.all, Receiptd: n.agent.opts.Receiptd, Pid1: n.agent.opts.Pid1})
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	for _, says := range []string{cfg.Rootfs, "embedded", "runc, gvisor, kata"} {
		require.ErrorContains(t, err, says)
	}
}

func TestADefaultIsLookedAtFirst(t *testing.T) {
	h := newHosts(nil, config.Runtime{Default: "runc", Allowed: []string{"embedded", "runc", "gvisor"}})
	require.Less(t, h.rank("runc"), h.rank("embedded"))
	require.Less(t, h.rank("embedded"), h.rank("gvisor"))
	require.Less(t, h.rank("gvisor"), h.rank("kata"))
}
