package network

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// The chains of a table.
const (
	common     = "common"   // of the ingress table: what holds for every sandbox
	switched   = "switched" // the same for interfaces that are ports of a switch, where the kernel can't answer at ingress
	marked     = "marked"   // of the routed table: what was to be answered at ingress
	carried    = "carried"  // of the bridge table: the same, where a bridge would carry it on unanswered
	inputChain = "input"
	localChain = "local"
	forward    = "forward"
	routed     = "routed"
	translate  = "translate"
)

// ourTables begins the names of all tables that an agent makes.
const ourTables = "sandbox-agent-"

// ingressPriority comes before everything else that netfilter does, and before a CNI's own chains.
const ingressPriority = -500

// socketBuffer is what a batch of all sandboxes' rules, and the answers to it, fit into; bytes.
const socketBuffer = 8 << 20

// rules are the agent's tables of nftables. Callers hold Manager.changing.
type rules struct {
	list    listeners.List
	ingress *nftables.Table
	routed  *nftables.Table
	// bridged is there if the kernel can't answer at an interface's ingress.
	bridged *nftables.Table
	// translated are the ranges whose addresses are translated on the way out.
	translated []netip.Prefix
	// group is that of the packet log in which refusals are told.
	group uint16
	log   *slog.Logger
	// file keeps left over a restart of the agent.
	file string
	// left is how the tables were left by this agent or an earlier one; nil: by none that kept it.
	left chainSizes
	// answers says whether the kernel can answer at an interface's ingress; nil: nobody has looked yet.
	answers *bool
	// bridges says whether it can have rules for what a Linux bridge carries; looked at where it can't answer.
	bridges *bool
	// devices are the names that the chains' interfaces had when they were made.
	devices map[string]string
	commits *commits
}

// chainSizes are how many rules each chain has.
type chainSizes map[string]int

// newRules names the tables after the state folder: two agents on one node don't undo each other's rules.
func newRules(stateDir string, list listeners.List, translated []netip.Prefix, log *slog.Logger) *rules {
	sum := sha256.Sum256([]byte(stateDir))
	name := ourTables + hex.EncodeToString(sum[:4])
	r := &rules{
		list: list, translated: translated, group: groupOf(stateDir), log: log, file: filepath.Join(stateDir, "rules.json"),
		ingress: &nftables.Table{Name: name, Family: nftables.TableFamilyNetdev},
		routed:  &nftables.Table{Name: name, Family: nftables.TableFamilyINet},
		bridged: &nftables.Table{Name: name, Family: nftables.TableFamilyBridge},
		devices: map[string]string{}, commits: &commits{},
	}
	if err := readState(r.file, &r.left); err != nil {
		r.left = nil
		log.Warn("whether the rules of sandboxes are as the last agent left them can't be said", "error", err)
	}
	return r
}

// keep keeps how the tables were left. The rules themselves don't depend on it.
func (r *rules) keep() {
	if err := writeState(r.file, r.left); err != nil {
		r.log.Warn("whether the rules of sandboxes are as this agent leaves them can't be kept for the next one", "error", err)
	}
}

func dialNFT(where ...nftables.ConnOption) (*nftables.Conn, error) {
	c, err := nftables.New(append(where, nftables.WithSockOptions(func(c *nl.Conn) error {
		// Root may exceed the node's bound (SO_RCVBUFFORCE); where it may not, the bound will do for most nodes.
		return errors.Join(c.SetReadBuffer(socketBuffer), c.SetWriteBuffer(socketBuffer))
	}))...)
	if err != nil {
		return nil, fmt.Errorf("%w: reaching nftables: %w (kernel option CONFIG_NF_TABLES)", ErrUnavailable, err)
	}
	return c, nil
}

// set brings the tables into the state that these sandboxes need, whatever they were: in one transaction, so that no packet
// ever meets half of them.
func (r *rules) set(all []*Record) error {
	if err := r.lookAtKernel(); err != nil {
		return err
	}
	c, err := dialNFT()
	if err != nil {
		return err
	}
	for _, t := range r.tables() {
		c.AddTable(t) // so that there is one to delete
		c.DelTable(t)
		c.AddTable(t)
	}
	if err := r.addShared(c); err != nil {
		return err
	}
	for _, rec := range all {
		if err := r.addSandbox(c, rec); err != nil {
			return err
		}
	}
	if err := r.commits.flushed(c); err != nil {
		return err
	}
	r.left = r.sizes(all)
	r.keep()
	return nil
}

// flushed is flush with the remedy.
func (k *commits) flushed(c *nftables.Conn) error { return unflushed(k.flush(c)) }

func unflushed(err error) error {
	if err != nil {
		return fmt.Errorf("%w: setting the rules that keep sandboxes from the node: %w (kernel options CONFIG_NF_TABLES_NETDEV, CONFIG_NF_TABLES_INET, CONFIG_NFT_FIB_NETDEV, CONFIG_NFT_REJECT_INET, CONFIG_NFT_MASQ)", ErrUnavailable, err)
	}
	return nil
}

func (r *rules) setOf(t *nftables.Table, four bool) *nftables.Set {
	if four {
		return &nftables.Set{Table: t, Name: sandboxes4, KeyType: nftables.TypeIPAddr}
	}
	return &nftables.Set{Table: t, Name: sandboxes6, KeyType: nftables.TypeIP6Addr}
}

// addShared adds what holds for every sandbox.
func (r *rules) addShared(c *nftables.Conn) error {
	for _, t := range r.tables() {
		for _, four := range []bool{true, false} {
			for _, set := range []*nftables.Set{r.setOf(t, four), toldSet(t, four)} {
				if err := c.AddSet(set, nil); err != nil {
					return fmt.Errorf("making a set of sandboxes: %w", err)
				}
			}
		}
	}
	for name, on := range r.commons() {
		addRules(c, c.AddChain(&nftables.Chain{Table: r.ingress, Name: name}), r.told(r.list.Ingress(), on))
	}
	if !r.answersAtIngress() {
		r.addMarked(c)
	}
	if r.hasBridged() {
		r.addCarried(c)
	}
	addRules(c, c.AddChain(&nftables.Chain{Table: r.routed, Name: localChain}), r.told(r.list.Local(), routedLayer))
	addRules(c, c.AddChain(&nftables.Chain{Table: r.routed, Name: routed}), r.told(r.list.Forwarded(), routedLayer))
	for chain, to := range map[*nftables.Chain]string{
		r.hook(inputChain, nftables.ChainHookInput): localChain,
		r.hook(forward, nftables.ChainHookForward):  routed,
	} {
		c.AddChain(chain)
		for _, f := range []listeners.Family{listeners.IPv4, listeners.IPv6} {
			c.AddRule(&nftables.Rule{Table: r.routed, Chain: chain, Exprs: slices.Concat(
				ofFamily(f, routedLayer), isSandbox(f, false), []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: to}})})
		}
	}
	r.addTranslation(c)
	return nil
}

// answersAtIngress is true where nobody has looked yet.
func (r *rules) answersAtIngress() bool { return r.answers == nil || *r.answers }

// hasBridged says whether there is a table for what bridges carry.
func (r *rules) hasBridged() bool { return !r.answersAtIngress() && r.bridges != nil && *r.bridges }

// tables are those that there are.
func (r *rules) tables() []*nftables.Table {
	list := []*nftables.Table{r.ingress, r.routed}
	if r.hasBridged() {
		list = append(list, r.bridged)
	}
	return list
}

// lookAtKernel finds out, once, what the rules have to do without.
func (r *rules) lookAtKernel() error { return errors.Join(r.lookAtAnswers(), r.lookAtBridges()) }

// lookAtAnswers finds out, once, whether the kernel can answer at an interface's ingress: kernels of some distributions are built
// without. The rule is tried in a transaction that takes it away again.
func (r *rules) lookAtAnswers() error {
	if r.answers != nil {
		return nil
	}
	c, err := dialNFT()
	if err != nil {
		return err
	}
	t := &nftables.Table{Name: r.ingress.Name + "-try", Family: nftables.TableFamilyNetdev}
	c.AddTable(t)
	chain := c.AddChain(&nftables.Chain{Table: t, Name: "try"})
	c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}})
	c.DelTable(t)
	err = r.commits.flush(c)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w: looking whether the kernel can refuse at an interface's ingress: %w", ErrUnavailable, err)
	}
	can := err == nil
	if !can {
		r.log.Warn("the kernel can't answer at an interface's ingress (CONFIG_NFT_REJECT_NETDEV): what is refused there is answered when it is routed; what a switch carries on instead is dropped without an answer, all of it where that is no Linux bridge or the kernel has no rules for one (CONFIG_NF_TABLES_BRIDGE)")
	}
	r.answers = &can
	return nil
}

// lookAtBridges finds out whether the kernel can have the rules of addCarried, as lookAtAnswers does.
func (r *rules) lookAtBridges() error {
	if r.answersAtIngress() || r.bridges != nil {
		return nil
	}
	c, err := dialNFT()
	if err != nil {
		return err
	}
	c.AddTable(r.bridged)
	c.DelTable(r.bridged)
	err = r.commits.flush(c)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("%w: looking whether the kernel can have rules for bridges: %w", ErrUnavailable, err)
	}
	can := err == nil
	r.bridges = &can
	return nil
}

// commons are the chains of what holds for every sandbox, at ingress.
func (r *rules) commons() map[string]layer {
	if r.answersAtIngress() {
		return map[string]layer{common: ingressLayer}
	}
	return map[string]layer{common: markingLayer, switched: droppingLayer}
}

// commonFor is the one for an interface.
func (r *rules) commonFor(l Link) string {
	if r.answersAtIngress() {
		return common
	}
	// What can't be looked at may be a port of anything.
	found, err := netlink.LinkByIndex(l.Index)
	if err == nil && found.Attrs().MasterIndex == 0 {
		return common
	}
	if err == nil && r.hasBridged() {
		if master, err := netlink.LinkByIndex(found.Attrs().MasterIndex); err == nil && master.Type() == "bridge" {
			return common
		}
	}
	return switched
}

// addCarried drops what was marked and is about to leave a bridge by another port: with br_netfilter it has been answered before,
// as what is routed; without, nobody else would stop it.
func (r *rules) addCarried(c *nftables.Conn) {
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{
		Table: r.bridged, Name: carried, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityRef(ingressPriority), Policy: &policy,
	})
	for _, e := range r.carriedRules() {
		c.AddRule(&nftables.Rule{Table: r.bridged, Chain: chain, Exprs: e})
	}
}

func (r *rules) carriedRules() (out [][]expr.Any) {
	for _, f := range []listeners.Family{listeners.IPv4, listeners.IPv6} {
		out = append(out, slices.Concat(ofFamily(f, markingLayer), isSandbox(f, false), hasMark(refusedMark, refusedMarkBits),
			[]expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}))
	}
	return out
}

// addMarked answers what was marked, once its connection is known and before any address is translated.
func (r *rules) addMarked(c *nftables.Conn) {
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{
		Table: r.routed, Name: marked, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(-190), Policy: &policy,
	})
	for _, e := range r.markedRules() {
		c.AddRule(&nftables.Rule{Table: r.routed, Chain: chain, Exprs: e})
	}
}

func (r *rules) markedRules() (out [][]expr.Any) {
	for _, f := range []listeners.Family{listeners.IPv4, listeners.IPv6} {
		its := slices.Concat(ofFamily(f, routedLayer), isSandbox(f, false), hasMark(refusedMark, refusedMarkBits))
		out = append(out, slices.Concat(its, l4proto(expr.CmpOpEq, listeners.TCP), rejectWith(unix.NFT_REJECT_TCP_RST, 0)),
			slices.Concat(its, rejectWith(unix.NFT_REJECT_ICMPX_UNREACH, icmpxAdminProhibited)))
	}
	return out
}

// hook is a chain that comes before the node's own filters, which can't admit what this one refuses.
func (r *rules) hook(name string, at *nftables.ChainHook) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{Table: r.routed, Name: name, Type: nftables.ChainTypeFilter, Hooknum: at, Priority: nftables.ChainPriorityRef(-10), Policy: &policy}
}

// addTranslation gives what leaves the node from the agent's own ranges the node's address.
func (r *rules) addTranslation(c *nftables.Conn) {
	if len(r.translated) == 0 {
		return
	}
	chain := c.AddChain(&nftables.Chain{Table: r.routed, Name: translate, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
	for _, p := range r.translated {
		from := inRange(expr.CmpOpEq, p, expr.PayloadBaseNetworkHeader, sourceOffset(p.Addr()))
		c.AddRule(&nftables.Rule{Table: r.routed, Chain: chain, Exprs: slices.Concat(ofFamily(listeners.FamilyOf(p.Addr()), routedLayer), from, []expr.Any{&expr.Counter{}, &expr.Masq{}})})
	}
}

// compiled is a rule of listeners in the kernel's words, with what it is for.
type compiled struct {
	why   string
	exprs []expr.Any
}

// told compiles rules, with one before each refusal that has it told (egresslog.go): of each sandbox so many a second, whatever
// another one has told.
func (r *rules) told(list []listeners.Rule, on layer) (out []compiled) {
	for _, rule := range list {
		if rule.Action == listeners.Refuse {
			same := rule
			same.Action = listeners.Admit
			for _, same.Family = range familiesOf(rule) {
				for _, e := range compile(same, on) {
					out = append(out, compiled{rule.Why, slices.Concat(e[:len(e)-2], oftenOf(same.Family), []expr.Any{tellWhy(r.group, "")})}) // without its counter and verdict
				}
			}
		}
		out = append(out, untold([]listeners.Rule{rule}, on)...)
	}
	return out
}

// familiesOf are those whose packets a rule can match.
func familiesOf(rule listeners.Rule) []listeners.Family {
	switch {
	case len(rule.To) > 0 && rule.To[0].Addr().Is6():
		return []listeners.Family{listeners.IPv6} // also with an IPv4-mapped one
	case len(rule.To) > 0:
		return []listeners.Family{listeners.IPv4}
	case rule.Family != listeners.AnyFamily:
		return []listeners.Family{rule.Family}
	}
	return []listeners.Family{listeners.IPv4, listeners.IPv6}
}

// oftenOf goes on as long as a packet's source has not been told too often. What another source than its own says is dropped
// before, so each sandbox has an element for each address. (The kernel evaluates the limit of the element.)
func oftenOf(f listeners.Family) []expr.Any {
	a, set := netip.IPv4Unspecified(), told4
	if f == listeners.IPv6 {
		a, set = netip.IPv6Unspecified(), told6
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: sourceOffset(a), Len: uint32(a.BitLen() / 8)},
		&expr.Dynset{SrcRegKey: 1, SetName: set, Operation: unix.NFT_DYNSET_OP_UPDATE, Exprs: []expr.Any{refusalsLimit()}},
	}
}

// toldFor is how long an element of told4 and told6 stays after its sandbox's last refusal: well beyond the time after which
// its limit is whole again.
const toldFor = time.Minute

// toldSet has a limit for each sandbox's address.
func toldSet(t *nftables.Table, four bool) *nftables.Set {
	s := &nftables.Set{Table: t, Name: told6, KeyType: nftables.TypeIP6Addr, Dynamic: true, HasTimeout: true, Timeout: toldFor, Size: 1 << 16}
	if four {
		s.Name, s.KeyType = told4, nftables.TypeIPAddr
	}
	return s
}

func untold(list []listeners.Rule, on layer) (out []compiled) {
	for _, rule := range list {
		for _, e := range compile(rule, on) {
			out = append(out, compiled{rule.Why, e})
		}
	}
	return out
}

func addRules(c *nftables.Conn, chain *nftables.Chain, list []compiled) {
	for _, r := range list {
		c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: r.exprs, UserData: userdata.AppendString(nil, userdata.TypeComment, r.why)})
	}
}

// chainOf is the chain of one of a sandbox's interfaces.
func chainOf(rec *Record, l Link) string { return fmt.Sprintf("%s-%d", rec.ID, l.Index) }

// present are those of a sandbox's interfaces that are there, by the names that they have now. One that is gone lets nothing
// through; one that can't be looked at is not gone.
func present(rec *Record) []Link {
	var out []Link
	for _, l := range rec.Links {
		found, err := netlink.LinkByIndex(l.Index)
		switch {
		case errors.As(err, &netlink.LinkNotFoundError{}):
		case err != nil || found.Attrs().Name == l.Name:
			out = append(out, l)
		case isSideOf(rec, found): // after a reboot another interface may have its number
			out = append(out, Link{Name: found.Attrs().Name, Index: l.Index})
		}
	}
	return out
}

// isSideOf says whether a link of the node is the other end of one that a sandbox has.
func isSideOf(rec *Record, node netlink.Link) bool {
	if node.Type() != "veth" || !isBound(rec.Namespace) {
		return false
	}
	h, err := inside(rec.Namespace)
	if err != nil {
		return false
	}
	defer h.Close()
	l, err := h.LinkByIndex(node.Attrs().ParentIndex)
	return err == nil && l.Type() == "veth" && l.Attrs().ParentIndex == node.Attrs().Index
}

// addSandbox adds what is a sandbox's own.
func (r *rules) addSandbox(c *nftables.Conn, rec *Record) error {
	for _, t := range r.tables() {
		for _, four := range []bool{true, false} {
			if e := elements(rec, four); len(e) > 0 {
				if err := c.SetAddElements(r.setOf(t, four), e); err != nil {
					return fmt.Errorf("adding sandbox %s to a set: %w", rec.ID, err)
				}
			}
		}
	}
	policy := nftables.ChainPolicyAccept
	for _, l := range present(rec) {
		chain := c.AddChain(&nftables.Chain{
			Table: r.ingress, Name: chainOf(rec, l), Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookIngress,
			Priority: nftables.ChainPriorityRef(ingressPriority), Policy: &policy, Device: l.Name,
		})
		r.devices[chain.Name] = l.Name
		c.FlushChain(chain) // a change for another sandbox may have made it already
		addRules(c, chain, untold(listeners.Source(rec.Addresses), ingressLayer))
		c.AddRule(&nftables.Rule{Table: r.ingress, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: r.commonFor(l)}}})
	}
	return nil
}

func elements(rec *Record, four bool) []nftables.SetElement {
	var out []nftables.SetElement
	for _, a := range rec.Addresses {
		if a.Is4() == four {
			out = append(out, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return out
}

// add adds a sandbox to tables that are there.
func (r *rules) add(rec *Record) error {
	c, err := dialNFT()
	if err != nil {
		return err
	}
	if err := r.addSandbox(c, rec); err != nil {
		return err
	}
	if err := r.commits.flushed(c); err != nil {
		return err
	}
	if r.left == nil {
		r.left = r.sharedSizes()
	}
	maps.Copy(r.left, r.sizesOf(rec))
	r.keep()
	return nil
}

// remove takes away what is a sandbox's own. What is not there, as the chain of an interface that is gone, is no error.
func (r *rules) remove(rec *Record) error {
	c, err := dialNFT()
	if err != nil {
		return err
	}
	var errs []error
	for _, t := range r.tables() {
		for _, four := range []bool{true, false} {
			for _, e := range elements(rec, four) {
				errs = append(errs, c.SetDeleteElements(r.setOf(t, four), []nftables.SetElement{e}), absent(r.commits.flush(c)))
			}
		}
	}
	for _, l := range rec.Links {
		name := chainOf(rec, l)
		c.DelChain(&nftables.Chain{Table: r.ingress, Name: name})
		errs = append(errs, absent(r.commits.flush(c)))
		delete(r.left, fmt.Sprint(nftables.TableFamilyNetdev, name))
		delete(r.devices, name)
	}
	r.keep()
	return errors.Join(errs...)
}

// absent is an error unless it says that something is not there.
func absent(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// intact says whether the tables hold what set gave them for these sandboxes.
func (r *rules) intact(all []*Record) (bool, error) {
	if !r.named(all) {
		return false, nil
	}
	return r.hold(r.sizes(all), all)
}

// named says whether the sandboxes' interfaces have the names that their chains were made for.
func (r *rules) named(all []*Record) bool {
	for _, rec := range all {
		for _, l := range present(rec) {
			if r.devices[chainOf(rec, l)] != l.Name {
				return false
			}
		}
	}
	return true
}

// asLeft says whether the tables hold for these sandboxes what an earlier agent has left: whether they are what this one would
// make is another question, as its lists may be others.
func (r *rules) asLeft(all []*Record) (condition, error) {
	want := chainSizes{}
	for chain := range r.sizes(all) {
		if n, known := r.left[chain]; known {
			want[chain] = n
		}
	}
	if len(want) == 0 {
		return unknown, nil
	}
	return conditionOf(r.hold(want, all))
}

// hold says whether the chains have these sizes, and the sets these sandboxes.
func (r *rules) hold(want chainSizes, all []*Record) (bool, error) {
	c, err := dialNFT()
	if err != nil {
		return false, err
	}
	got := chainSizes{}
	for _, t := range r.tables() {
		chains, err := c.ListChainsOfTableFamily(t.Family)
		if err != nil {
			return false, fmt.Errorf("looking at the rules: %w", err)
		}
		for _, chain := range chains {
			if chain.Table.Name != t.Name {
				continue
			}
			found, err := c.GetRules(t, chain)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return false, fmt.Errorf("looking at the rules: %w", err)
			}
			got[fmt.Sprint(t.Family, chain.Name)] = len(found)
		}
	}
	for chain, n := range want {
		if got[chain] != n {
			return false, nil
		}
	}
	return r.hasAddresses(c, all), nil
}

// hasAddresses says whether each sandbox is in the sets.
func (r *rules) hasAddresses(c *nftables.Conn, all []*Record) bool {
	for _, t := range r.tables() {
		for _, four := range []bool{true, false} {
			found, err := c.GetSetElements(r.setOf(t, four))
			if err != nil {
				return false
			}
			in := map[string]bool{}
			for _, e := range found {
				in[string(e.Key)] = true
			}
			for _, rec := range all {
				for _, e := range elements(rec, four) {
					if !in[string(e.Key)] {
						return false
					}
				}
			}
		}
	}
	return true
}

// sizes are what set makes for these sandboxes.
func (r *rules) sizes(all []*Record) chainSizes {
	want := r.sharedSizes()
	for _, rec := range all {
		maps.Copy(want, r.sizesOf(rec))
	}
	return want
}

func (r *rules) sharedSizes() chainSizes {
	netdev, inet := nftables.TableFamilyNetdev, nftables.TableFamilyINet
	want := chainSizes{
		fmt.Sprint(inet, localChain): len(r.told(r.list.Local(), routedLayer)), fmt.Sprint(inet, routed): len(r.told(r.list.Forwarded(), routedLayer)),
		fmt.Sprint(inet, inputChain): 2, fmt.Sprint(inet, forward): 2,
	}
	for name, on := range r.commons() {
		want[fmt.Sprint(netdev, name)] = len(r.told(r.list.Ingress(), on))
	}
	if !r.answersAtIngress() {
		want[fmt.Sprint(inet, marked)] = len(r.markedRules())
	}
	if r.hasBridged() {
		want[fmt.Sprint(nftables.TableFamilyBridge, carried)] = len(r.carriedRules())
	}
	if len(r.translated) > 0 {
		want[fmt.Sprint(inet, translate)] = len(r.translated)
	}
	return want
}

func (r *rules) sizesOf(rec *Record) chainSizes {
	want := chainSizes{}
	for _, l := range present(rec) {
		want[fmt.Sprint(nftables.TableFamilyNetdev, chainOf(rec, l))] = len(untold(listeners.Source(rec.Addresses), ingressLayer)) + 1
	}
	return want
}

// clear takes the tables away.
func (r *rules) clear() error {
	if err := r.lookAtKernel(); err != nil {
		return err
	}
	c, err := dialNFT()
	if err != nil {
		return err
	}
	for _, t := range r.tables() {
		c.AddTable(t)
		c.DelTable(t)
	}
	if err := r.commits.flushed(c); err != nil {
		return err
	}
	r.left = nil
	r.keep()
	return nil
}
