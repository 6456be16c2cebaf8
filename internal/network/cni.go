package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
)

// CNIOptions say where the node has its CNI.
type CNIOptions struct {
	// ConfDir is the folder of configurations. As for a kubelet's sandboxes the first file by name is taken, unless Network
	// names one.
	ConfDir string
	// BinDirs are where the plugins are.
	BinDirs []string
	// Network is the name of a configuration in ConfDir; empty: the first.
	Network string
}

// ifName is the sandbox's interface.
const ifName = "eth0"

func (m *Manager) plugins() *libcni.CNIConfig {
	return libcni.NewCNIConfigWithCacheDir(m.opts.CNI.BinDirs, m.cacheDir(), nil)
}

// cniConf is a configuration and its file.
type cniConf struct {
	list *libcni.NetworkConfigList
	file string
}

// loadCNI finds the node's configuration.
func (m *Manager) loadCNI() (*cniConf, error) {
	o := m.opts.CNI
	files, err := libcni.ConfFiles(o.ConfDir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, fmt.Errorf("%w: reading the CNI configurations in %s: %w", ErrUnavailable, o.ConfDir, err)
	}
	slices.Sort(files)
	var names []string
	for _, file := range files {
		list, err := loadCNIFile(file)
		if err != nil {
			return nil, fmt.Errorf("%w: the CNI configuration %s: %w", ErrUnavailable, file, err)
		}
		if o.Network == "" || o.Network == list.Name {
			return &cniConf{list, file}, nil
		}
		names = append(names, list.Name)
	}
	if len(names) > 0 {
		return nil, fmt.Errorf("%w: no CNI configuration in %s is called %q (network.cni.network); there are %s", ErrUnavailable, o.ConfDir, o.Network, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("%w: there is no CNI configuration (*.conflist, *.conf) in %s: install the cluster's network plugin, name its folder (network.cni.conf_dir), or take cni out of network.allowed",
		ErrUnavailable, o.ConfDir)
}

// loadCNIFile takes a list, or a single plugin's configuration as a list of one.
func loadCNIFile(file string) (*libcni.NetworkConfigList, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(file, ".conflist") {
		return libcni.NetworkConfFromFile(file)
	}
	conf, err := libcni.NetworkPluginConfFromBytes(b)
	if err != nil {
		return nil, err
	}
	if b, err = json.Marshal(map[string]any{"cniVersion": conf.Network.CNIVersion, "name": conf.Network.Name, "plugins": []json.RawMessage{b}}); err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(b)
}

// checkCNI wants a configuration, and each of its plugins to answer.
func (m *Manager) checkCNI(ctx context.Context) error {
	conf, err := m.loadCNI()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if _, err := m.plugins().ValidateNetworkList(ctx, conf.list); err != nil {
		return fmt.Errorf("%w: the CNI configuration %s: %w (network.cni.bin_dirs: %s)", ErrUnavailable, conf.file, err, strings.Join(m.opts.CNI.BinDirs, ", "))
	}
	return nil
}

func attachment(rec *Record) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: rec.ID, IfName: ifName}
	if isBound(rec.Namespace) {
		rt.NetNS = rec.Namespace // a DEL without one is for what a plugin keeps elsewhere (CNI specification, DEL)
	}
	return rt
}

// findPlugins wants every plugin of a configuration to be there, before any of them is asked: what one of them has done can only
// be undone by all.
func (m *Manager) findPlugins(conf *cniConf) error {
	for _, p := range conf.list.Plugins {
		if _, err := invoke.FindInPath(p.Network.Type, m.opts.CNI.BinDirs); err != nil {
			return fmt.Errorf("%w: the CNI configuration %s needs the plugin %q, which is in none of %s: install it, or name its folder (network.cni.bin_dirs)",
				ErrUnavailable, conf.file, p.Network.Type, strings.Join(m.opts.CNI.BinDirs, ", "))
		}
	}
	return nil
}

// addCNI has the plugins give the namespace its interface.
func (m *Manager) addCNI(ctx context.Context, rec *Record) error {
	conf, err := m.loadCNI()
	if err != nil {
		return err
	}
	if err := m.findPlugins(conf); err != nil {
		return err
	}
	rec.CNI = &CNIRecord{Network: conf.list.Name, File: conf.file, Config: conf.list.Bytes}
	if err := m.records().write(rec); err != nil {
		return err
	}
	crashpoint.At("network.asked")
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	answer, err := m.plugins().AddNetworkList(ctx, conf.list, attachment(rec))
	if err != nil {
		return fmt.Errorf("%w: the CNI configuration %s: %w", ErrUnavailable, conf.file, errors.Join(err, ctx.Err()))
	}
	crashpoint.At("network.plugged")
	result, err := types100.NewResultFromResult(answer)
	if err != nil {
		return fmt.Errorf("reading the answer of the CNI configuration %s: %w", conf.file, err)
	}
	if rec.CNI.Result, err = json.Marshal(result); err != nil {
		return fmt.Errorf("recording the answer of the CNI configuration %s: %w", conf.file, err)
	}
	if err := m.records().write(rec); err != nil {
		return err
	}
	m.nameservers(rec, result)
	if err := lookAtCNI(rec); err != nil {
		return err
	}
	if err := m.records().write(rec); err != nil {
		return err
	}
	return m.guard(rec)
}

// nameservers are the operator's, the plugins', or the node's, in this order.
func (m *Manager) nameservers(rec *Record, result *types100.Result) {
	dns := result.DNS
	var words []string
	if len(dns.Search) > 0 {
		words = append(words, "search "+strings.Join(dns.Search, " "))
	}
	if len(dns.Options) > 0 {
		words = append(words, "options "+strings.Join(dns.Options, " "))
	}
	for _, w := range words {
		rec.CNI.Search += oneLine(w) + "\n"
	}
	rec.Nameservers = m.opts.Nameservers
	if len(rec.Nameservers) > 0 {
		return
	}
	for _, s := range dns.Nameservers {
		if a, err := netip.ParseAddr(s); err == nil {
			rec.Nameservers = append(rec.Nameservers, a)
		}
	}
	if len(rec.Nameservers) == 0 {
		rec.Nameservers = nodesNameservers(nodeResolvConf)
	}
}

// oneLine keeps a plugin's answer from being two lines of resolv.conf.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// lookAtCNI finds out what the plugins made, in the kernel and not in their answer: the sandbox's addresses, and the node's
// side of each of its interfaces.
func lookAtCNI(rec *Record) error {
	h, err := inside(rec.Namespace)
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return fmt.Errorf("looking at the sandbox's interfaces: %w", err)
	}
	for _, l := range links {
		if l.Attrs().Name == "lo" || l.Attrs().RawFlags&unix.IFF_UP == 0 && l.Type() != "veth" {
			continue // the kernel gives a new namespace some of its own (tunl0, sit0), which are down
		}
		peer, err := nodesSide(l)
		if err != nil {
			return fmt.Errorf("%w: the CNI configuration %s gave the sandbox %w", ErrUnavailable, rec.CNI.File, err)
		}
		if err := checkDatapath(peer); err != nil {
			return fmt.Errorf("%w: the CNI configuration %s: %w", ErrUnavailable, rec.CNI.File, err)
		}
		rec.Links = append(rec.Links, Link{Name: peer.Attrs().Name, Index: peer.Attrs().Index})
		found, err := addressesOf(h, l)
		if err != nil {
			return err
		}
		rec.Addresses = append(rec.Addresses, found...)
	}
	if len(rec.Links) == 0 || len(rec.Addresses) == 0 {
		return fmt.Errorf("%w: the CNI configuration %s gave the sandbox no interface with an address", ErrUnavailable, rec.CNI.File)
	}
	return checkBridged(rec)
}

func addressesOf(h *netlink.Handle, l netlink.Link) ([]netip.Addr, error) {
	list, err := h.AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("looking at the addresses of the sandbox's interface %s: %w", l.Attrs().Name, err)
	}
	var out []netip.Addr
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.Unmap().IsLinkLocalUnicast() {
			out = append(out, ip.Unmap())
		}
	}
	return out, nil
}

// nodesSide is the other end of a veth pair. Rules can stand nowhere else: an interface of another kind shares a device of
// the node, or is one.
func nodesSide(l netlink.Link) (netlink.Link, error) {
	name := l.Attrs().Name
	if l.Type() != "veth" {
		return nil, fmt.Errorf("%s, an interface of type %s, which has no side on the node where rules could stand: use a plugin that makes veth pairs (bridge, ptp, Calico with iptables or nftables)", name, l.Type())
	}
	peer, err := netlink.LinkByIndex(l.Attrs().ParentIndex)
	if err != nil || peer.Type() != "veth" || peer.Attrs().ParentIndex != l.Attrs().Index {
		return nil, fmt.Errorf("%s, whose other end (index %d) is not in the agent's network namespace: run the agent in the node's (hostNetwork)", name, l.Attrs().ParentIndex)
	}
	return peer, nil
}

// delCNI has the plugins undo what they did, also what they did half.
func (m *Manager) delCNI(ctx context.Context, rec *Record) error {
	list, err := libcni.NetworkConfFromBytes(rec.CNI.Config)
	if err != nil {
		return fmt.Errorf("reading the CNI configuration that it was made with: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	err = m.plugins().DelNetworkList(ctx, list, attachment(rec))
	switch {
	case err == nil:
		return nil
	case rec.CNI.Result == nil:
		// They never said that they had made anything. A configuration that is wrong fails here too, and always will; what is in
		// the namespace goes with it, and an address at most stays reserved.
		m.log.Warn("CNI plugins that failed to connect a sandbox failed to undo it as well", "sandbox", rec.ID, "configuration", rec.CNI.File, "error", err)
		return nil
	}
	return fmt.Errorf("the CNI configuration %s: %w", rec.CNI.File, errors.Join(err, ctx.Err()))
}

// checkPlugged asks the plugins whether what they made is still as it was. Plugins that can't tell (before version 0.4.0 of
// the specification) are believed.
func (m *Manager) checkPlugged(ctx context.Context, rec *Record) error {
	list, err := libcni.NetworkConfFromBytes(rec.CNI.Config)
	if err != nil {
		return fmt.Errorf("reading the CNI configuration that it was made with: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	if err := m.plugins().CheckNetworkList(ctx, list, attachment(rec)); err != nil && !errors.Is(err, libcni.ErrorCheckNotSupp) {
		return fmt.Errorf("the CNI configuration %s: %w", rec.CNI.File, errors.Join(err, ctx.Err()))
	}
	return nil
}
