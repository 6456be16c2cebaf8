package network

import (
	"net/netip"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// From linux/netfilter/nf_tables.h and if_ether.h, as far as x/sys/unix lacks them.
const (
	icmpxAdminProhibited = 3 // NFT_REJECT_ICMPX_ADMIN_PROHIBITED
	fragmentHeader       = 44
)

// layer says which tables a rule is compiled for: what tells IPv4 from IPv6 is another thing in each.
type layer int

const (
	ingressLayer layer = iota // family netdev, hook ingress
	routedLayer               // family inet
	insideLayer               // family inet, in the sandbox's own network namespace
	// Where the kernel can't answer at an interface's ingress (CONFIG_NFT_REJECT_NETDEV), what is refused there is marked, and
	// answered and dropped as soon as it is routed; what a switch may carry on is dropped at once, without an answer.
	markingLayer  // family netdev, hook ingress
	droppingLayer // the same
)

// atIngress: of family netdev.
func (l layer) atIngress() bool { return l == ingressLayer || l == markingLayer || l == droppingLayer }

// refusedMark is what a packet bears from its interface's ingress to where it is refused, and nowhere else. In between others use
// marks too, before its connection is known: Calico takes away some of the upper half, and kube-proxy and Cilium have some of the lower.
// None of theirs is among the bits that count.
const refusedMark, refusedMarkBits = 0x5b, 0xff

// The names of a table's own sets.
const (
	sandboxes4 = "sandboxes4"
	sandboxes6 = "sandboxes6"
	told4      = "told4"
	told6      = "told6"
)

// compile gives a rule in the kernel's words. One that has alternatives becomes several.
func compile(r listeners.Rule, on layer) [][]expr.Any {
	all := [][]expr.Any{packetKind(r, on)}
	all = each(all, r.Protocols, func(p uint8) []expr.Any { return l4proto(expr.CmpOpEq, p) })
	for _, p := range r.NotProtocols {
		all = and(all, l4proto(expr.CmpOpNeq, p))
	}
	all = and(all, fragment(r))
	if r.Opens {
		all = and(all, opens())
	}
	all = each(all, r.MadeBy, func(id uint32) []expr.Any {
		return meta(expr.MetaKeySKUID, expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(id))
	})
	all = each(all, r.ICMPTypes, func(t uint8) []expr.Any { return payload(expr.PayloadBaseTransportHeader, 0, []byte{t}, expr.CmpOpEq) })
	all = each(all, r.Ports, func(p uint16) []expr.Any {
		return payload(expr.PayloadBaseTransportHeader, 2, binaryutil.BigEndian.PutUint16(p), expr.CmpOpEq)
	})
	all = each(all, r.To, within)
	for _, p := range r.NotFrom {
		all = and(all, foreign(r, p))
	}
	if r.Tagged {
		all = each(all, []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD}, frameType)
	}
	if r.Local {
		all = and(all, addressType(expr.CmpOpEq, unix.RTN_LOCAL))
	}
	if r.NotUnicast {
		all = and(all, addressType(expr.CmpOpNeq, unix.RTN_UNICAST))
	}
	if r.ToSandbox {
		all = and(all, isSandbox(r.Family, true))
	}
	return verdict(all, r, on)
}

// and adds conditions to each alternative.
func and(all [][]expr.Any, more []expr.Any) [][]expr.Any {
	for i := range all {
		all[i] = append(all[i][:len(all[i]):len(all[i])], more...)
	}
	return all
}

// each makes an alternative for each value; without one the condition is not set.
func each[T any](all [][]expr.Any, values []T, f func(T) []expr.Any) [][]expr.Any {
	if len(values) == 0 {
		return all
	}
	var out [][]expr.Any
	for _, a := range all {
		for _, v := range values {
			out = append(out, append(a[:len(a):len(a)], f(v)...))
		}
	}
	return out
}

func packetKind(r listeners.Rule, on layer) []expr.Any {
	switch {
	case r.ARP:
		return etherType(expr.CmpOpEq, unix.ETH_P_ARP)
	case r.NotIP:
		return append(etherType(expr.CmpOpNeq, unix.ETH_P_IP), etherType(expr.CmpOpNeq, unix.ETH_P_IPV6)...)
	}
	family := r.Family
	if len(r.To) > 0 {
		family = listeners.FamilyOf(r.To[0].Addr())
		if r.To[0].Addr().Is6() {
			family = listeners.IPv6 // also an IPv4-mapped one, which is in an IPv6 packet
		}
	}
	if family == listeners.AnyFamily {
		return nil
	}
	return ofFamily(family, on)
}

func ofFamily(f listeners.Family, on layer) []expr.Any {
	four := f == listeners.IPv4
	switch {
	case on.atIngress() && four:
		return etherType(expr.CmpOpEq, unix.ETH_P_IP)
	case on.atIngress():
		return etherType(expr.CmpOpEq, unix.ETH_P_IPV6)
	case four:
		return meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})
	}
	return meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, []byte{unix.NFPROTO_IPV6})
}

func meta(key expr.MetaKey, op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: data}}
}

func etherType(op expr.CmpOp, t uint16) []expr.Any {
	return meta(expr.MetaKeyPROTOCOL, op, binaryutil.BigEndian.PutUint16(t))
}

func l4proto(op expr.CmpOp, p uint8) []expr.Any { return meta(expr.MetaKeyL4PROTO, op, []byte{p}) }

func payload(base expr.PayloadBase, offset uint32, data []byte, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(data))},
		&expr.Cmp{Op: op, Register: 1, Data: data},
	}
}

// sourceOffset and destinationOffset are where a header has its addresses (RFC 791, 8200).
func sourceOffset(a netip.Addr) uint32 {
	if a.Is4() {
		return 12
	}
	return 8
}

func destinationOffset(a netip.Addr) uint32 {
	if a.Is4() {
		return 16
	}
	return 24
}

// within matches a destination in a range.
func within(p netip.Prefix) []expr.Any {
	return inRange(expr.CmpOpEq, p, expr.PayloadBaseNetworkHeader, destinationOffset(p.Addr()))
}

// foreign matches a packet that says to be from outside of a range: by its source, by what it claims as its own in a neighbour's
// advertisement (RFC 4861, 4.4), or as the sender of ARP (RFC 826).
func foreign(r listeners.Rule, p netip.Prefix) []expr.Any {
	switch {
	case r.Claim:
		return inRange(expr.CmpOpNeq, p, expr.PayloadBaseTransportHeader, 8)
	case r.ARP:
		return inRange(expr.CmpOpNeq, p, expr.PayloadBaseNetworkHeader, 14)
	}
	return inRange(expr.CmpOpNeq, p, expr.PayloadBaseNetworkHeader, sourceOffset(p.Addr()))
}

// inRange compares an address of a packet with a range.
func inRange(op expr.CmpOp, p netip.Prefix, base expr.PayloadBase, offset uint32) []expr.Any {
	a := p.Masked().Addr()
	if p.IsSingleIP() {
		return payload(base, offset, a.AsSlice(), op)
	}
	mask := make([]byte, a.BitLen()/8)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(mask))},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))},
		&expr.Cmp{Op: op, Register: 1, Data: a.AsSlice()},
	}
}

// frameType matches the type in a frame's own header. That of a VLAN's frame is seen nowhere else: the kernel takes the tag off
// before the rules, and puts it back for who looks at the header.
func frameType(t uint16) []expr.Any {
	return payload(expr.PayloadBaseLLHeader, 12, binaryutil.BigEndian.PutUint16(t), expr.CmpOpEq)
}

// addressType compares what the node's routing tables say of a destination.
func addressType(op expr.CmpOp, kind uint32) []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: op, Register: 1, Data: binaryutil.NativeEndian.PutUint32(kind)},
	}
}

// fragment matches parts of datagrams: IPv4 says so in its header, with "more to come" or an offset, IPv6 has a header for it.
func fragment(r listeners.Rule) []expr.Any {
	switch {
	case !r.Fragment:
		return nil
	case r.Family == listeners.IPv4:
		return []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 2},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0x3f, 0xff}, Xor: []byte{0, 0}},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0, 0}},
		}
	}
	return []expr.Any{
		&expr.Exthdr{DestRegister: 1, Type: fragmentHeader, Len: 1, Flags: unix.NFT_EXTHDR_F_PRESENT, Op: expr.ExthdrOpIpv6},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}},
	}
}

// opens matches the first packet of a TCP connection: of the flags SYN and ACK (RFC 9293, 3.1) the first alone.
func opens() []expr.Any {
	const syn, ack = 0x02, 0x10
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}},
	}
}

// isSandbox matches a destination, or else a source, that is a sandbox's address.
func isSandbox(f listeners.Family, destination bool) []expr.Any {
	a, set := netip.IPv4Unspecified(), sandboxes4
	if f == listeners.IPv6 {
		a, set = netip.IPv6Unspecified(), sandboxes6
	}
	offset := sourceOffset(a)
	if destination {
		offset = destinationOffset(a)
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
		&expr.Lookup{SourceRegister: 1, SetName: set},
	}
}

// verdict adds what becomes of the packet, which is also counted. A refusal is two rules: TCP alone has a reset. Where the
// packet's destination may have been translated there is no reset: on a bridge with br_netfilter the kernel sends it with the
// translated address as its source (nf_send_reset), from which its receiver expects nothing. The ICMP message is translated.
func verdict(all [][]expr.Any, r listeners.Rule, on layer) [][]expr.Any {
	reject := func(kind uint32, code uint8) []expr.Any {
		return []expr.Any{&expr.Counter{}, &expr.Reject{Type: kind, Code: code}}
	}
	switch r.Action {
	case listeners.Admit:
		return and(all, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept}})
	case listeners.Drop:
		return and(all, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
	}
	switch on {
	case droppingLayer:
		return and(all, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
	case markingLayer:
		return and(all, append(setMark(refusedMark), &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept}))
	}
	prohibited := reject(unix.NFT_REJECT_ICMPX_UNREACH, icmpxAdminProhibited)
	if on == routedLayer {
		return and(all, prohibited)
	}
	var out [][]expr.Any
	for _, a := range all {
		out = append(out,
			append(append(a[:len(a):len(a)], l4proto(expr.CmpOpEq, listeners.TCP)...), reject(unix.NFT_REJECT_TCP_RST, 0)...),
			append(a[:len(a):len(a)], prohibited...))
	}
	return out
}

func setMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}
}

func hasMark(mark, bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)},
	}
}
