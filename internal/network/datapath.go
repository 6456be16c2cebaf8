package network

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// checkDatapath refuses a node's side on whose way in something stands that can carry packets elsewhere before the rules see
// them. The kernel asks XDP, then tcx and the queueing discipline "clsact" or "ingress", and then the rules' hook
// (__netif_receive_skb_core); what one of the first redirects meets neither layer of the rules.
func checkDatapath(node netlink.Link) error {
	name := node.Attrs().Name
	if x := node.Attrs().Xdp; x != nil && x.Attached {
		return before(name, "an XDP program")
	}
	disciplines, err := netlink.QdiscList(node)
	if err != nil {
		return fmt.Errorf("looking at the queueing disciplines of the interface %s: %w", name, err)
	}
	for _, q := range disciplines {
		if q.Type() == "clsact" || q.Type() == "ingress" {
			return before(name, fmt.Sprintf("the queueing discipline %q", q.Type()))
		}
	}
	n, err := tcxPrograms(node.Attrs().Index)
	if err != nil {
		return fmt.Errorf("looking at the BPF programs of the interface %s: %w", name, err)
	}
	if n > 0 {
		return before(name, "a BPF program (tcx)")
	}
	return nil
}

func before(name, what string) error {
	return fmt.Errorf("the interface %s, the node's side of the sandbox's, has %s at its ingress, which can carry packets past the rules that keep sandboxes from the node: use a plugin without a datapath of its own there (bridge, ptp, Calico with iptables or nftables), and no bandwidth plugin", name, what)
}

// From linux/bpf.h, as far as x/sys/unix lacks it.
const tcxIngress = 46 // BPF_TCX_INGRESS

// bpfQuery is the part of union bpf_attr for BPF_PROG_QUERY.
type bpfQuery struct {
	Interface, AttachType, QueryFlags, AttachFlags uint32
	Programs                                       uint64
	Count, _                                       uint32
	_                                              [4]uint64
}

// tcxPrograms is how many programs an interface has at its ingress. A kernel that knows no such programs has none: without
// BPF, or before Linux 6.6.
func tcxPrograms(index int) (uint32, error) {
	q := bpfQuery{Interface: uint32(index), AttachType: tcxIngress}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&q)), unsafe.Sizeof(q))
	switch errno {
	case 0:
		return q.Count, nil
	case unix.ENOSYS, unix.EINVAL, unix.ENOENT:
		return 0, nil
	}
	return 0, os.NewSyscallError("bpf", errno)
}

// checkBridged wants an egress policy to hold between the ports of one Linux bridge too. What a bridge carries from port to port
// is no routed packet: the policy sees it only where br_netfilter hands it over. Other switches (Open vSwitch) never do.
func checkBridged(rec *Record) error {
	if rec.Egress.mode() == egress.Open {
		return nil
	}
	for _, l := range present(rec) {
		link, err := netlink.LinkByIndex(l.Index)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err != nil {
			return fmt.Errorf("looking at the interface %s: %w", l.Name, err)
		}
		if err := checkPort(link, rec.Egress.mode()); err != nil {
			return err
		}
	}
	return nil
}

func checkPort(link netlink.Link, mode egress.Mode) error {
	name := link.Attrs().Name
	if link.Attrs().MasterIndex == 0 {
		return nil
	}
	master, err := netlink.LinkByIndex(link.Attrs().MasterIndex)
	if err != nil {
		return fmt.Errorf("looking at what the interface %s is a port of: %w", name, err)
	}
	switch master.Type() {
	case "vrf":
		return nil
	case "bridge":
	default:
		return fmt.Errorf("%w: the interface %s is a port of %s, of type %s, where the egress policy %s would not hold: use a plugin that routes (ptp, Calico) or a Linux bridge, or the policy open",
			ErrUnavailable, name, master.Attrs().Name, master.Type(), mode)
	}
	for _, key := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		b, err := os.ReadFile("/proc/sys/net/bridge/" + key)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("looking whether bridged packets are filtered: %w", err)
		}
		if strings.TrimSpace(string(b)) != "1" {
			return fmt.Errorf("%w: the interface %s is a port of the bridge %s, on whose other ports the egress policy %s would not hold: load the kernel module br_netfilter and set the sysctl net.bridge.%s to 1",
				ErrUnavailable, name, master.Attrs().Name, mode, key)
		}
	}
	return nil
}
