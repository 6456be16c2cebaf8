package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Options are what the agent is made of.
type Options struct {
	// Config has been validated.
	Config config.Config
	// Runtimes by the name that sessions use. Those of runtime.allowed must be there; another one is only asked when the
	// journal names a sandbox of it, to end it.
	Runtimes map[string]runtime.Runtime
	// Networks connects sandboxes; nil for an agent whose only network mode is "none".
	Networks *network.Manager
	// Receiptd and Pid1 are host paths of the static binaries.
	Receiptd, Pid1 string
	Version        string
	// Metrics counts; nil: nothing is counted.
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// Agent is the node's sessions. Its methods are safe for concurrent use.
type Agent struct {
	opts     Options
	cfg      *config.Config
	log      *slog.Logger
	metrics  *metrics.Metrics // nil counts nothing
	journal  *journal.Journal
	chain    *events.Chain
	audit    *events.Audit // nil without one
	watching watching
	hosts    *hosts
	programs programs
	networks *network.Manager // nil without one
	slots    *slots
	bootID   string
	started  time.Time

	// ctx ends the streams at Close; sandboxes and their commands go on.
	ctx      context.Context
	cancel   context.CancelFunc
	closing  chan struct{}
	gate     sync.RWMutex   // no session's goroutine starts once Close has begun to wait for them
	work     sync.WaitGroup // the sessions' goroutines
	watchers sync.WaitGroup
	// timesChanged has keepTimes look at once.
	timesChanged chan struct{}
	// draining: nothing new is started (DrainNode). Never taken back.
	draining atomic.Bool
	clock    *clock
	// sweepNow has old exec records removed before the hour is over.
	sweepNow chan struct{}

	mu        sync.Mutex // guards what follows
	sessions  map[string]*session
	creating  map[string]bool   // ids of sessions that are being made
	worktrees map[string]string // reserved worktree → session id
	closed    bool
}

// New opens the state folder, takes over what an earlier agent left (P6), and sweeps what belongs to no session. When
// it returns, every session's state is known; commands that still run are waited for in the background.
func New(o Options) (*Agent, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if err := checkOptions(&o); err != nil {
		return nil, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("reading the boot id: %w (is /proc mounted?)", err)
	}
	programs, err := digestPrograms(&o)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := &Agent{
		opts: o, cfg: &o.Config, log: o.Log, metrics: o.Metrics, hosts: newHosts(o.Runtimes, o.Config.Runtime), programs: programs, networks: o.Networks, slots: newSlots(o.Config.Limits.TotalMemoryBytes),
		bootID: strings.TrimSpace(string(boot)), started: time.Now(), clock: nodeClock(),
		ctx: ctx, cancel: cancel, closing: make(chan struct{}), sweepNow: make(chan struct{}, 1), timesChanged: make(chan struct{}, 1),
		sessions: map[string]*session{}, creating: map[string]bool{}, worktrees: map[string]string{},
	}
	if err := a.open(); err != nil {
		cancel()
		return nil, err
	}
	return a, nil
}

func checkOptions(o *Options) error {
	if err := CheckStateDir(o.Config.StateDir); err != nil {
		return err
	}
	if err := checkRootfs(o.Config.Rootfs); err != nil {
		return err
	}
	if err := checkNetworks(o); err != nil {
		return err
	}
	for _, name := range o.Config.Runtime.Allowed {
		if o.Runtimes[name] == nil {
			return fmt.Errorf("starting the agent: runtime %q of runtime.allowed is not built into it: remove it from the list", name)
		}
		if err := o.Runtimes[name].TakesRootfs(runtime.KindOfRootfs(o.Config.Rootfs)); err != nil {
			return fmt.Errorf("starting the agent: rootfs %s with %s in runtime.allowed: %w", o.Config.Rootfs, name, err)
		}
	}
	for what, path := range map[string]string{"receiptd": o.Receiptd, "pid1": o.Pid1} {
		st, err := os.Stat(path)
		if err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			return fmt.Errorf("starting the agent: no executable %s at %q (%v): build it (make build) and name its folder", what, path, err)
		}
	}
	return nil
}

func (a *Agent) open() error {
	// 0711: the container's init is not root on the host, and gets through to its root file system.
	for _, dir := range []struct {
		path string
		mode os.FileMode
	}{
		{a.cfg.StateDir, 0o711}, {a.sandboxesDir(), 0o711},
		{a.workspacesDir(), 0o700}, {filepath.Join(a.cfg.StateDir, "receipts"), 0o700}, {filepath.Join(a.cfg.StateDir, "keys"), 0o755},
	} {
		if err := makeDir(dir.path, dir.mode); err != nil {
			return err
		}
	}
	j, err := journal.Open(filepath.Join(a.cfg.StateDir, "journal"), a.log)
	if err != nil {
		return fmt.Errorf("opening the journal of %s: %w", a.cfg.StateDir, err)
	}
	a.journal = j
	j.OnSync(a.metrics.JournalSynced)
	if err := a.openEvents(); err != nil {
		a.cancel()
		a.watchers.Wait()
		return errors.Join(err, j.Close())
	}
	lapses := a.restoreNetworks()
	a.serveNetworks()
	if err := a.recover(); err != nil {
		a.cancel()
		a.watchers.Wait()
		a.closeEvents()
		return errors.Join(err, j.Close())
	}
	a.watchers.Go(a.keepRetention)
	if a.networks != nil {
		a.markUnguarded(lapses, "since an unknown moment while there was no agent")
		a.watchers.Go(func() {
			a.networks.Watch(a.ctx, func(l network.Lapses) { a.markUnguarded(l, "for at most some seconds before that") })
		})
	}
	a.watchers.Go(a.keepTimes)
	return nil
}

func makeDir(path string, mode os.FileMode) error {
	if err := os.MkdirAll(path, mode); err != nil {
		return fmt.Errorf("making the state folder %s: %w (state_dir must be a folder that root can write)", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("setting the mode of the state folder %s: %w", path, err)
	}
	if err := unix.Access(path, unix.W_OK); err != nil {
		return fmt.Errorf("writing to the state folder %s: %w (name another state_dir, or remount it read-write)", path, err)
	}
	return nil
}

// Close lets go of everything: sandboxes and their commands go on, and the next agent on this state folder attaches
// to them. Callers that wait get an error; they ask again with the same exec id.
func (a *Agent) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	a.closed = true
	a.gate.Lock()
	close(a.closing)
	a.gate.Unlock()
	sessions := a.all()
	a.mu.Unlock()
	a.cancel()
	a.work.Wait()
	a.watchers.Wait()
	var errs []error
	for _, s := range sessions {
		if sb := s.current(); sb != nil {
			errs = append(errs, sb.conn.Close(), sb.Close())
		}
	}
	a.closeEvents()
	return errors.Join(append(errs, a.journal.Close())...)
}

// spawn runs a session's goroutine; false once the agent is closing.
func (a *Agent) spawn(f func()) bool {
	a.gate.RLock()
	defer a.gate.RUnlock()
	if a.isClosing() {
		return false
	}
	a.work.Go(f)
	return true
}

// nap waits, unless the agent is closing.
func (a *Agent) nap(d time.Duration) {
	select {
	case <-time.After(d):
	case <-a.closing:
	}
}

func (a *Agent) isClosing() bool {
	select {
	case <-a.closing:
		return true
	default:
		return false
	}
}

// all is every session. Caller holds mu.
func (a *Agent) all() []*session {
	list := make([]*session, 0, len(a.sessions))
	for _, s := range a.sessions {
		list = append(list, s)
	}
	return list
}

func (a *Agent) sandboxesDir() string { return filepath.Join(a.cfg.StateDir, "sandboxes") }
func (a *Agent) receiptsDir(sandboxID string) string {
	return filepath.Join(a.cfg.StateDir, "receipts", sandboxID)
}
func (a *Agent) keyFile(sandboxID string) string {
	return filepath.Join(a.cfg.StateDir, "keys", sandboxID+".pub")
}

// find gives a session that exists.
func (a *Agent) find(id string) (*session, error) {
	if err := checkSessionID(id); err != nil {
		return nil, err
	}
	a.mu.Lock()
	s := a.sessions[id]
	a.mu.Unlock()
	if s != nil {
		return s, nil
	}
	if t, err := a.tomb(id); err != nil {
		return nil, err
	} else if t != nil {
		return nil, fmt.Errorf("%w: session %s was deleted at %s", ErrNotFound, id, t.DeletedAt.Format(time.RFC3339))
	}
	return nil, fmt.Errorf("%w: no session %q: sandbox-agent session list shows them", ErrNotFound, id)
}

// tomb is what is left of a deleted session, nil if there was none of this id.
func (a *Agent) tomb(id string) (*tombRecord, error) {
	b, err := a.journal.Get(tombKey(id))
	if errors.Is(err, journal.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking up session %s: %w", id, err)
	}
	t := &tombRecord{}
	if err := json.Unmarshal(b, t); err != nil {
		return nil, fmt.Errorf("%w: the record of deleted session %s can't be read: %w", ErrDataLoss, id, err)
	}
	return t, nil
}

// reserveWorkspace gives a worktree to one session. Worktrees that contain each other are one workspace.
func (a *Agent) reserveWorkspace(worktree, session string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for taken, by := range a.worktrees {
		if by != session && (config.Under(worktree, taken) || config.Under(taken, worktree)) {
			return fmt.Errorf("%w: worktree %s is reserved: session %s has %s: use that session, delete it, or name another worktree",
				ErrPrecondition, worktree, by, taken)
		}
	}
	a.worktrees[worktree] = session
	return nil
}

func (a *Agent) releaseWorkspace(worktree, session string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.worktrees[worktree] == session {
		delete(a.worktrees, worktree)
	}
}
