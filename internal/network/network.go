package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// Mode is how a sandbox is connected.
type Mode string

// The modes. None is not this package's to do: a new network namespace has it.
const (
	None   Mode = "none"
	Bridge Mode = "bridge"
	CNI    Mode = "cni"
)

// nodeResolvConf is where the node has its nameservers.
const nodeResolvConf = "/etc/resolv.conf"

// callTime bounds one call of the plugins.
const callTime = 30 * time.Second

// Options configure a Manager.
type Options struct {
	// StateDir is an existing folder for the manager's records and namespaces. CNI plugins and container runtimes have to
	// see what is mounted in it.
	StateDir string
	// Nameservers are what sandboxes ask; none: what the plugins say, or else the node's own that aren't on the node.
	Nameservers []netip.Addr
	// Listeners are what no sandbox may reach, besides every address of the node; the nameservers above may be asked.
	Listeners listeners.List
	Bridge    BridgeOptions
	CNI       CNIOptions
	Egress    EgressOptions
	Log       *slog.Logger
}

// Manager connects sandboxes. Its methods are safe for concurrent use, for different sandboxes.
type Manager struct {
	opts Options
	log  *slog.Logger
	// changing guards what sandboxes share: addresses and rules.
	changing sync.Mutex
	rules    *rules
	egress   *egressRules
	// inside are the generations of nftables in sandboxes' namespaces at which the rules inside were seen to be whole.
	inside map[string]uint32
	// lapsed are sandboxes whose rules were put back while another one's were set, and which Watch has not told of yet.
	lapsed []string
	// watcher hears what is refused, while Serve runs.
	watcher atomic.Pointer[watcher]
	// last is the address of each range that was given last, also by an earlier agent.
	last map[netip.Prefix]netip.Addr
}

// New makes the manager. It changes nothing of the node.
func New(opts Options) (*Manager, error) {
	if !filepath.IsAbs(opts.StateDir) {
		return nil, fmt.Errorf("networks: the state folder %q is not an absolute path", opts.StateDir)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.Listeners.Nameservers = slices.Concat(opts.Nameservers, opts.Egress.Resolvers)
	r := newRules(opts.StateDir, opts.Listeners, opts.Bridge.Subnets, opts.Log)
	m := &Manager{
		opts: opts, log: opts.Log, last: map[netip.Prefix]netip.Addr{}, rules: r, egress: newEgressRules(opts.StateDir, opts.Egress.Resolvers, r.commits, opts.Log),
	}
	for _, dir := range []string{string(m.records()), m.namespacesDir(), m.cacheDir()} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("networks: making the state folder: %w", err)
		}
	}
	if err := readState(m.lastFile(), &m.last); err != nil {
		m.log.Warn("the addresses of sandboxes are given from the range's beginning again", "error", err)
		m.last = map[netip.Prefix]netip.Addr{}
	}
	return m, nil
}

func (m *Manager) records() records      { return records(filepath.Join(m.opts.StateDir, "records")) }
func (m *Manager) namespacesDir() string { return filepath.Join(m.opts.StateDir, "netns") }
func (m *Manager) cacheDir() string      { return filepath.Join(m.opts.StateDir, "cni") }
func (m *Manager) lastFile() string      { return filepath.Join(m.opts.StateDir, "last.json") }
func (m *Manager) namespace(id string) string {
	return filepath.Join(m.namespacesDir(), id)
}

// Check says whether sandboxes can be connected this way now; an error wraps ErrUnavailable and names the remedy.
func (m *Manager) Check(ctx context.Context, mode Mode) error {
	switch mode {
	case None:
		return nil
	case CNI:
		return m.checkCNI(ctx)
	case Bridge:
		return m.checkBridge()
	}
	return fmt.Errorf("%w: there is no network mode %q", ErrUnavailable, mode)
}

// all are the records that can be read, and an error for the others.
func (m *Manager) all() ([]*Record, error) {
	all, _, err := m.readAll()
	return all, err
}

// readAll is all, and names the others.
func (m *Manager) readAll() (all []*Record, others []string, err error) {
	ids, err := m.records().list()
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, id := range ids {
		rec, err := m.records().read(id)
		switch {
		case err == nil:
			all = append(all, rec)
		case !errors.Is(err, ErrNotFound):
			others, errs = append(others, id), append(errs, fmt.Errorf("%w (retire the session's sandbox, then remove the record by hand)", err))
		}
	}
	return all, others, errors.Join(errs...)
}

// Connect connects a sandbox's new network namespace, in which nothing runs yet. The caller may close netns afterwards. On
// an error, or without an answer, ask Remove to take away what there may be of it.
func (m *Manager) Connect(ctx context.Context, id string, mode Mode, netns *os.File) (runtime.Connection, error) {
	return m.ConnectUnder(ctx, id, mode, Egress{}, netns)
}

// ConnectUnder is Connect for a sandbox that may reach only some of what others may.
func (m *Manager) ConnectUnder(ctx context.Context, id string, mode Mode, e Egress, netns *os.File) (runtime.Connection, error) {
	rec, err := m.connect(ctx, id, mode, e, netns)
	if err != nil {
		return runtime.Connection{}, fmt.Errorf("connecting sandbox %s to the network (%s): %w", id, mode, err)
	}
	return runtime.Connection{Path: rec.Namespace, ResolvConf: resolvConf(rec)}, nil
}

func (m *Manager) connect(ctx context.Context, id string, mode Mode, e Egress, netns *os.File) (*Record, error) {
	if _, err := m.records().read(id); !errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("there is a network of this id: %w", os.ErrExist)
	}
	rec := &Record{ID: id, Mode: mode, Egress: e, Namespace: m.namespace(id)}
	if err := m.records().write(rec); err != nil {
		return nil, err
	}
	crashpoint.At("network.recorded")
	if err := bind(netns, rec.Namespace); err != nil {
		return nil, err
	}
	crashpoint.At("network.bound")
	h, err := inside(rec.Namespace)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if err := raiseLoopback(h); err != nil {
		return nil, err
	}
	if rec.Inside, err = m.rules.guardInside(rec.Namespace); err != nil {
		return nil, err
	}
	if err := m.plug(ctx, rec); err != nil {
		return nil, err
	}
	// Nothing runs in it yet, and the rules are in place: no connection that is known now is its own.
	if err := forgetConnections(rec.Addresses); err != nil {
		return nil, err
	}
	if err := m.nameserversOf(rec); err != nil {
		return nil, err
	}
	rec.Connected = true
	return rec, m.records().write(rec)
}

// plug gives the namespace its interface, by the mode.
func (m *Manager) plug(ctx context.Context, rec *Record) error {
	switch rec.Mode {
	case CNI:
		return m.addCNI(ctx, rec)
	case Bridge:
		return m.addBridge(rec)
	}
	return fmt.Errorf("%w: there is no network mode %q", ErrUnavailable, rec.Mode)
}

// Remove takes away whatever there is of a sandbox's network. It can be called again, and for a sandbox that never had one.
func (m *Manager) Remove(ctx context.Context, id string) error {
	rec, err := m.records().read(id)
	switch {
	case errors.Is(err, ErrNotFound):
		rec = &Record{ID: id, Namespace: m.namespace(id)} // an unfinished record, at the most
	case err != nil:
		return err
	}
	if err := m.remove(ctx, rec); err != nil {
		return fmt.Errorf("removing the network of sandbox %s: %w", id, err)
	}
	return nil
}

func (m *Manager) remove(ctx context.Context, rec *Record) error {
	switch {
	case rec.CNI != nil:
		if err := m.delCNI(ctx, rec); err != nil {
			return err
		}
	case rec.Mode == Bridge:
		if err := delBridge(rec); err != nil {
			return err
		}
	}
	crashpoint.At("network.unplugged")
	// Should this fail it is done before the next one has the addresses.
	if err := forgetConnections(rec.Addresses); err != nil {
		m.log.Warn("the connections of a sandbox that is gone are still known to the kernel", "sandbox", rec.ID, "error", err)
	}
	if err := unbind(rec.Namespace); err != nil {
		return err
	}
	crashpoint.At("network.unbound")
	m.changing.Lock()
	defer m.changing.Unlock()
	if err := m.records().remove(rec.ID); err != nil || len(rec.Links) == 0 {
		return err
	}
	// Its rules stand for nothing any more. Should this fail they cost nothing either.
	if err := m.unguard(rec); err != nil {
		m.log.Warn("the rules of a sandbox that is gone are not removed", "sandbox", rec.ID, "error", err)
	}
	return nil
}

// unguard takes away the rules of a sandbox that has no record any more. Those of the others stay as they are: what somebody
// else has done to them is Watch's to find.
func (m *Manager) unguard(rec *Record) error {
	all, err := m.all()
	if err == nil && len(all) == 0 {
		m.egress.forget(rec.ID)
		return errors.Join(m.rules.clear(), m.egress.set(nil))
	}
	return errors.Join(m.egress.remove(rec), m.rules.remove(rec))
}

// Get is what is recorded of a sandbox's network; ErrNotFound without one.
func (m *Manager) Get(id string) (*Record, error) { return m.records().read(id) }

// List names the sandboxes of which there is anything, in the records or among the namespaces.
func (m *Manager) List() ([]string, error) {
	ids, err := m.records().list()
	if err != nil {
		return nil, err
	}
	bound, err := os.ReadDir(m.namespacesDir())
	if err != nil {
		return nil, fmt.Errorf("listing network namespaces: %w", err)
	}
	for _, e := range bound {
		ids = append(ids, e.Name())
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
