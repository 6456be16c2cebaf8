package network

import (
	"context"
	"os/exec"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

func run(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%v: %s", cmd.Args, out)
}

func TestP10ADatapathBeforeTheRulesIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Program("tc"))
	l := newLab(t, true)
	rec := l.connect("sb-one", CNI)
	targets := l.serve(l.World, "tcp "+netlab.Metadata+" 80")
	require.Equal(t, []string{"refused"}, l.try(rec, targets))
	again := func() error {
		looked := *rec
		looked.Links, looked.Addresses = nil, nil
		return lookAtCNI(&looked)
	}
	require.NoError(t, again())

	node, err := netlink.LinkByIndex(rec.Links[0].Index)
	require.NoError(t, err)
	name := node.Attrs().Name
	// What a datapath of a CNI's own does: it sends what comes in out of the node's uplink, to the next host.
	bridge, err := netlink.LinkByName("cni0")
	require.NoError(t, err)
	run(t, l.Command(l.World, "ip", "link", "set", "node0", "address", bridge.Attrs().HardwareAddr.String()))
	run(t, exec.Command("tc", "qdisc", "add", "dev", name, "clsact"))
	run(t, exec.Command("tc", "filter", "add", "dev", name, "ingress", "protocol", "ip", "u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", "uplink0"))
	require.Equal(t, []string{"reached x"}, l.try(rec, targets), "control: no rule sees it")
	err = again()
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, `the queueing discipline "clsact"`)
	require.ErrorContains(t, l.Recheck(t.Context(), rec.ID), "clsact")
	run(t, exec.Command("tc", "qdisc", "del", "dev", name, "clsact"))
	require.NoError(t, again())

	run(t, exec.Command("tc", "qdisc", "add", "dev", name, "ingress"))
	require.ErrorContains(t, again(), `the queueing discipline "ingress"`)
	run(t, exec.Command("tc", "qdisc", "del", "dev", name, "ingress"))

	prog := admitting(t, unix.BPF_PROG_TYPE_SCHED_CLS, 0) // TCX_PASS
	attach(t, node, prog)
	require.ErrorContains(t, again(), "a BPF program (tcx)")
	detach(t, node, prog)
	require.NoError(t, again())

	prog = admitting(t, unix.BPF_PROG_TYPE_XDP, 2) // XDP_PASS
	require.NoError(t, netlink.LinkSetXdpFdWithFlags(node, prog, unix.XDP_FLAGS_SKB_MODE))
	require.ErrorContains(t, again(), "an XDP program")
	require.NoError(t, netlink.LinkSetXdpFdWithFlags(node, -1, unix.XDP_FLAGS_SKB_MODE))
	require.NoError(t, again())
}

// admitting is a BPF program that lets everything through.
func admitting(t *testing.T, kind uint32, verdict int32) (fd int) {
	t.Helper()
	code := [2]struct {
		op, registers byte
		offset        int16
		value         int32
	}{{op: 0xb7, value: verdict}, {op: 0x95}} // r0 = verdict; exit
	license := []byte("GPL\x00")
	load := struct {
		kind, instructions uint32
		code, license      uint64
		_                  [12]uint64
	}{kind: kind, instructions: 2, code: uint64(uintptr(unsafe.Pointer(&code))), license: uint64(uintptr(unsafe.Pointer(&license[0])))}
	n, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&load)), unsafe.Sizeof(load))
	require.Zero(t, errno, errno)
	t.Cleanup(func() { unix.Close(int(n)) })
	return int(n)
}

type attachment32 struct{ link, program, kind, flags uint32 }

func attach(t *testing.T, l netlink.Link, prog int) {
	t.Helper()
	a := attachment32{uint32(l.Attrs().Index), uint32(prog), tcxIngress, 0}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_ATTACH, uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a))
	require.Zero(t, errno, errno)
}

func detach(t *testing.T, l netlink.Link, prog int) {
	t.Helper()
	a := attachment32{uint32(l.Attrs().Index), uint32(prog), tcxIngress, 0}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_DETACH, uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a))
	require.Zero(t, errno, errno)
}

func TestAnEgressPolicyHoldsTowardsPodsOnTheSameBridge(t *testing.T) {
	l := newLab(t, true)
	filtered := func(value string) {
		l.Sysctl(l.Node, "net/bridge/bridge-nf-call-iptables", value)
	}
	filtered("1")
	t.Cleanup(func() { filtered("1") })
	l.Sysctl(l.Node, "net/bridge/bridge-nf-call-ip6tables", "1")
	under := func(id string, mode egress.Mode) (*Record, error) {
		ns := l.namespaceFile()
		defer ns.Close()
		t.Cleanup(func() { require.NoError(t, l.Remove(context.Background(), id)) })
		if _, err := l.ConnectUnder(t.Context(), id, CNI, Egress{Mode: mode}, ns); err != nil {
			return nil, err
		}
		return l.Get(id)
	}
	rec, err := under("sb-one", egress.None)
	require.NoError(t, err)
	// A pod on the plugin's bridge.
	run(t, exec.Command("ip", "link", "add", "pod0", "master", "cni0", "up", "type", "veth", "peer", "name", "pod1", "netns", l.World))
	const pod = "10.77.0.200"
	run(t, l.Command(l.World, "ip", "link", "set", "pod1", "up"))
	run(t, l.Command(l.World, "ip", "address", "add", pod+"/32", "dev", "pod1"))
	run(t, l.Command(l.World, "ip", "route", "add", rec.Addresses[0].String()+"/32", "dev", "pod1"))
	targets := l.serve(l.World, "tcp "+pod+" 80", "udp "+pod+" 80")
	require.Equal(t, []string{"refused", "refused"}, l.try(rec, targets))
	var seen uint32
	found, err := l.look(&seen)
	require.NoError(t, err)
	require.Empty(t, found)

	filtered("0")
	require.Equal(t, []string{"reached x", "reached x"}, l.try(rec, targets), "control: the bridge hands over nothing")
	found, err = l.look(&seen)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, Lapses{CutOff: []string{"sb-one"}}, found)
	require.NotContains(t, l.try(rec, targets), "reached x")
	_, err = under("sb-two", egress.Allowlist)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "load the kernel module br_netfilter and set the sysctl net.bridge.bridge-nf-call-iptables to 1")
	_, err = under("sb-open", egress.Open)
	require.NoError(t, err, "nothing of it is needed for the open policy")
	run(t, exec.Command("ip", "link", "del", "pod0"))
}
