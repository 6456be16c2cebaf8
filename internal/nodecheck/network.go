package nodecheck

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

// inFreshNetwork calls look on a thread with a network namespace of its own, which ends with the thread.
func inFreshNetwork(look func() Fact) Fact {
	seen := make(chan Fact, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread, and the namespace, end with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			seen <- unsure("no network namespace to try it in: %v", err)
			return
		}
		seen <- look()
	}()
	return <-seen
}

// tryDestroySockets has the product's own code destroy a TCP and a UDP socket.
func tryDestroySockets() Fact {
	return inFreshNetwork(func() Fact {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			fd, err := asCommand(func() (int, error) { return boundSocket(kind) })
			if err != nil {
				return unsure("no socket to try it on: %v", err)
			}
			defer unix.Close(fd)
		}
		// What is left is a UDP socket without an address: its descriptor is still open, as that of a dead process never is.
		destroyed, _, err := nsexec.DestroySockets()
		switch {
		case err != nil:
			return no(err)
		case destroyed < 2:
			return nof("of a TCP and a UDP socket %d were destroyed", destroyed)
		}
		return yes("a TCP and a UDP socket were destroyed")
	})
}

// asCommand makes a socket as another user (the kernel notes who has made it), on a thread that is the caller's alone: those of
// this process's own user are spared, as somebody's beside a sandbox.
func asCommand(make func() (int, error)) (int, error) {
	own, err := unix.SetfsuidRetUid(probeID)
	if err != nil {
		return -1, os.NewSyscallError("setfsuid", err)
	}
	fd, err := make()
	_, backErr := unix.SetfsuidRetUid(own)
	if backErr != nil && err == nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("setfsuid", backErr)
	}
	return fd, err
}

// boundSocket is a socket that listens, or is bound, in a namespace without an interface that is up.
func boundSocket(kind int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = unix.Bind(fd, &unix.SockaddrInet4{Port: 1024})
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("bind", err)
	}
	return fd, nil
}

// tryNftables makes each kind of rule that keeps a sandbox from something, one after the other.
func tryNftables() Fact {
	return inFreshNetwork(func() Fact { return tryRules(ruleKinds) })
}

// tryIngressAnswer makes the kind of rule that some distributions' kernels lack.
func tryIngressAnswer() Fact { return inFreshNetwork(func() Fact { return tryRules(answerKinds) }) }

// tryEgress makes each kind of rule that bounds what a sandbox sends, and listens to the packet log as the agent does.
func tryEgress() Fact {
	return inFreshNetwork(func() Fact {
		f := tryRules(egressKinds)
		if f.Answer != Yes {
			return f
		}
		if err := hearLog(); err != nil {
			return no(fmt.Errorf("listening to the packet log: %w", err))
		}
		f.Detail += "; the packet log is heard"
		return f
	})
}

// tryRules has the kernel take one rule after the other.
func tryRules(kinds []ruleKind) Fact {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return no(err)
	}
	defer func() { _ = c.CloseLasting() }()
	var failed, names []string
	var cause error
	broken := map[*nftables.Table]bool{}
	for _, r := range kinds {
		names = append(names, r.name)
		if broken[r.table] {
			continue // nothing else can be had there then
		}
		err := r.make(c)
		if err == nil {
			err = c.Flush()
		}
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s: %v", r.name, err))
			cause = errors.Join(cause, err)
		}
		broken[r.table] = broken[r.table] || r.first && err != nil
	}
	if cause != nil {
		f := no(cause)
		f.Detail = strings.Join(failed, "; ")
		return f
	}
	return yes("%s work", strings.Join(names, ", "))
}

// tryConntrack has the kernel forget all connections of a namespace that has none.
func tryConntrack() Fact {
	return inFreshNetwork(func() Fact {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, everyFlow{}); err != nil {
				return no(fmt.Errorf("forgetting connections: %w", err))
			}
		}
		return yes("connections are listed and forgotten")
	})
}

// everyFlow matches every connection.
type everyFlow struct{}

func (everyFlow) MatchConntrackFlow(*netlink.ConntrackFlow) bool { return true }

// hearLog binds a group of the packet log (linux/netfilter/nfnetlink_log.h: NFULNL_MSG_CONFIG, NFULA_CFG_CMD, NFULNL_CFG_CMD_BIND),
// which ends with its socket.
func hearLog() error {
	const config, command, bind, group = unix.NFNL_SUBSYS_ULOG<<8 | 1, 1, 1, 1
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	attributes, err := nl.MarshalAttributes([]nl.Attribute{{Type: command, Data: []byte{bind}}})
	if err != nil {
		return err
	}
	header := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, group} // struct nfgenmsg
	_, err = conn.Execute(nl.Message{Header: nl.Header{Type: config, Flags: nl.Request | nl.Acknowledge}, Data: append(header, attributes...)})
	return err
}

var (
	probeTable = &nftables.Table{Name: "nodecheck", Family: nftables.TableFamilyINet}
	probeChain = &nftables.Chain{Name: "output", Table: probeTable, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter}
	// What a sandbox sends is judged at the ingress of the node's side of its interface; a fresh network namespace has lo.
	probeIngressTable = &nftables.Table{Name: "nodecheck", Family: nftables.TableFamilyNetdev}
	probeIngress      = &nftables.Chain{
		Name: "ingress", Table: probeIngressTable, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookIngress, Priority: nftables.ChainPriorityRef(-500), Device: "lo",
	}
	// What a sandbox sends is refused before it is routed.
	probeSent = &nftables.Chain{Name: "sent", Table: probeTable, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle}
	probeNAT  = &nftables.Chain{Name: "nat", Table: probeTable, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource}
)

// ruleKind is what rules are made of. What is first in its table is what all else there stands on.
type ruleKind struct {
	name  string
	table *nftables.Table
	first bool
	make  func(c *nftables.Conn) error
}

// ruleKinds are those that keep a sandbox from the node.
var ruleKinds = []ruleKind{
	{"tables", probeTable, true, func(c *nftables.Conn) error { c.AddTable(probeTable); return nil }},
	{"chains", probeTable, true, func(c *nftables.Conn) error { c.AddChain(probeChain); return nil }},
	{"skuid", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeChain, &expr.Meta{Key: expr.MetaKeySKUID, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(probeID)}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
	{"sets with timeouts", probeTable, false, func(c *nftables.Conn) error {
		set := &nftables.Set{Table: probeTable, Name: "addresses", KeyType: nftables.TypeIPAddr, HasTimeout: true, Timeout: time.Minute}
		return c.AddSet(set, []nftables.SetElement{{Key: []byte{192, 0, 2, 1}, Timeout: time.Minute}})
	}},
	{"fib", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeChain, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
	{"ct", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeChain, &expr.Ct{Register: 1, Key: expr.CtKeySTATE},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0)}, &expr.Verdict{Kind: expr.VerdictAccept})
	}},
	{"reject", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeChain, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	}},
	{"nat", probeTable, false, func(c *nftables.Conn) error {
		c.AddChain(probeNAT)
		return addRule(c, probeNAT, &expr.Masq{})
	}},
	{"tables of interfaces", probeIngressTable, true, func(c *nftables.Conn) error { c.AddTable(probeIngressTable); return nil }},
	{"chains at ingress", probeIngressTable, true, func(c *nftables.Conn) error { c.AddChain(probeIngress); return nil }},
	{"fib at ingress", probeIngressTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeIngress, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_UNICAST)}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
}

// answerKinds are what refuses with an answer at an interface's ingress.
var answerKinds = []ruleKind{
	{"tables of interfaces", probeIngressTable, true, func(c *nftables.Conn) error { c.AddTable(probeIngressTable); return nil }},
	{"chains at ingress", probeIngressTable, true, func(c *nftables.Conn) error { c.AddChain(probeIngress); return nil }},
	{"reject at ingress", probeIngressTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeIngress, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED})
	}},
}

// egressKinds are those that keep a sandbox within its policy.
var egressKinds = []ruleKind{
	{"tables", probeTable, true, func(c *nftables.Conn) error { c.AddTable(probeTable); return nil }},
	{"chains at prerouting", probeTable, true, func(c *nftables.Conn) error { c.AddChain(probeSent); return nil }},
	{"reject at prerouting", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeSent, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED})
	}},
	{"connlimit", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeSent, &expr.Connlimit{Count: 16, Flags: expr.NFT_CONNLIMIT_F_INV}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
	{"limit", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeSent, &expr.Limit{Type: expr.LimitTypePkts, Rate: 16, Unit: expr.LimitTimeSecond, Burst: 16, Over: true}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
	{"quota", probeTable, false, func(c *nftables.Conn) error {
		c.AddObj(&nftables.QuotaObj{Table: probeTable, Name: "bytes", Bytes: 1 << 20, Over: true})
		return addRule(c, probeSent, &expr.Objref{Type: int(nftables.ObjTypeQuota), Name: "bytes"}, &expr.Verdict{Kind: expr.VerdictDrop})
	}},
	{"log", probeTable, false, func(c *nftables.Conn) error {
		return addRule(c, probeSent, &expr.Log{Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_SNAPLEN, Group: 1, Snaplen: 128})
	}},
}

func addRule(c *nftables.Conn, chain *nftables.Chain, exprs ...expr.Any) error {
	c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: exprs})
	return nil
}
