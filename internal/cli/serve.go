package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/internal/rpc"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

func serveCommand() *cli.Command {
	return &cli.Command{
		Name:  "serve",
		Usage: "run the agent: sessions, sandboxes and the exec socket of this node; needs root",
		Description: "Logs one line when it is ready: as text on a terminal, as JSON otherwise. SIGTERM and SIGINT end it and leave\n" +
			"its sandboxes running; the next start attaches to them again. Flags win over the configuration file, which\n" +
			"is strict YAML; every key is optional and listed in docs/operations.md.",
		Flags: append(podFlags(),
			&cli.StringFlag{Name: "config", Usage: "the configuration, a YAML `FILE`"},
			&cli.StringFlag{Name: "state-dir", Usage: "the `FOLDER` of journal, receipts and keys (default: /var/lib/sandbox-agent)"},
			&cli.StringFlag{Name: "socket", Usage: "the exec socket's `PATH` (default: " + DefaultSocket + ")"},
			&cli.StringSliceFlag{Name: "workspace-root", Usage: "a `FOLDER` that repositories and worktrees may lie under; can be given again, and replaces the configured list"},
			libexecFlag(),
			&cli.StringFlag{Name: "log-level", Usage: "debug, info, warn or error (default: info)"},
			&cli.BoolFlag{Name: stdinFlag, Hidden: true, Usage: "when standard input ends, delete all sessions and stop: for a parent that may be killed"},
		),
		Action: runServe,
	}
}

func runServe(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	cfg, err := serveConfig(c)
	if err != nil {
		return err
	}
	cfg.CloseOwnPorts()
	if os.Geteuid() != 0 {
		return errors.New("the agent needs root: it makes namespaces, cgroups, idmapped mounts and host uid ranges on this machine")
	}
	receiptd, pid1, err := nodeHelpers(c)
	if err != nil {
		return err
	}
	log := newLogger(c.Root().ErrWriter, cfg.Log.Level)
	if err := agent.CheckStateDir(cfg.StateDir); err != nil {
		return err
	}
	if err := refuseNode(ctx, &cfg); err != nil {
		return err
	}
	runtimes, err := newRuntimes(&cfg, log)
	if err != nil {
		return err
	}
	networks, err := newNetworks(&cfg, log)
	if err != nil {
		return err
	}
	began := time.Now()
	counted := metrics.New(Version)
	a, err := agent.New(agent.Options{
		Config: cfg, Runtimes: runtimes, Networks: networks, Receiptd: receiptd, Pid1: pid1, Version: Version, Metrics: counted, Log: log,
	})
	if err != nil {
		return err
	}
	stopTelling, err := tell(counted, a, cfg.Metrics.Listen, log)
	if err != nil {
		return errors.Join(err, a.Close())
	}
	interrupt.Describe(ctx, interrupt.CleanUp{
		Say: func(line string) { log.Warn(line) },
		Left: func() []string {
			return []string{"left behind: the socket " + cfg.Socket.Path + "; the next start replaces it"}
		},
	})
	if c.Bool(stdinFlag) {
		var cancel context.CancelCauseFunc
		ctx, cancel = context.WithCancelCause(ctx)
		defer cancel(nil)
		go func() { cancel(endWithStdin(ctx, os.Stdin, a, log)) }()
	}
	err = rpc.Serve(ctx, rpc.Options{
		Agent: a, Socket: cfg.Socket, Log: log,
		Ready: func() {
			log.Info("ready", "version", Version, "socket", cfg.Socket.Path, "state_dir", cfg.StateDir, "runtime", cfg.Runtime.Default,
				"workspace_roots", cfg.Workspace.Roots, "took", time.Since(began).Round(time.Millisecond).String())
		},
	})
	if err = errors.Join(err, a.Close(), stopTelling()); err != nil {
		return err
	}
	if sig, ok := interrupt.By(ctx); ok {
		log.Info("stopped; sandboxes go on", "signal", sig.String())
	} else {
		log.Info("stopped", "reason", context.Cause(ctx).Error())
	}
	return nil
}

// tell serves metrics and health where the operator wants them.
func tell(m *metrics.Metrics, a *agent.Agent, address string, log *slog.Logger) (stop func() error, err error) {
	if address == "" {
		return func() error { return nil }, nil
	}
	m.Watch(a.Figures)
	s, err := metrics.Serve(metrics.Options{Metrics: m, Address: address, Healthy: a.Healthy, Ready: a.Ready, Log: log})
	if err != nil {
		return nil, err
	}
	log.Info("metrics are served", "address", s.Addr())
	return s.Close, nil
}

// stdinFlag ties the agent's life to its parent's: the read end of a pipe ends with the process that holds the other,
// however that one dies. PR_SET_PDEATHSIG would not do: it follows the parent's *thread* (prctl(2)), and Go ends
// threads as it likes.
const stdinFlag = "until-stdin-ends"

// orphanWait bounds how long an agent without its parent tries to stop its sandboxes.
const orphanWait = time.Minute

var errStdinEnded = errors.New("standard input ended")

// endWithStdin waits for the end of stdin and then deletes all sessions: nobody is left to do it.
func endWithStdin(ctx context.Context, stdin io.Reader, a *agent.Agent, log *slog.Logger) error {
	_, err := io.Copy(io.Discard, stdin)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	log.Warn("standard input ended: deleting all sessions, then stopping", "error", err)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), orphanWait)
	defer cancel()
	for token := ""; ; {
		page, next, err := a.ListSessions(ctx, &sandboxv1.ListSessionsRequest{PageToken: token})
		if err != nil {
			log.Error("listing the sessions to delete", "error", err)
			break
		}
		for _, s := range page {
			if _, err := a.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()}); err != nil {
				log.Error("a sandbox may be left behind", "session", s.GetSessionId(), "error", err)
			}
		}
		if token = next; token == "" {
			break
		}
	}
	return errStdinEnded
}

// serveConfig is the file's settings with the flags' over them.
func serveConfig(c *cli.Command) (config.Config, error) {
	cfg, err := config.Load(c.String("config"))
	if err != nil {
		return cfg, err
	}
	for flag, setting := range map[string]*string{
		"state-dir": &cfg.StateDir, "socket": &cfg.Socket.Path, "log-level": &cfg.Log.Level, "rootfs": &cfg.Rootfs,
	} {
		if c.IsSet(flag) {
			*setting = withoutSlash(c.String(flag))
		}
	}
	if c.IsSet("workspace-root") {
		cfg.Workspace.Roots = c.StringSlice("workspace-root")
		for i, r := range cfg.Workspace.Roots {
			cfg.Workspace.Roots[i] = withoutSlash(r)
		}
	}
	return cfg, cfg.Validate()
}

// withoutSlash takes off what a shell's completion puts behind a folder.
func withoutSlash(path string) string {
	if short := strings.TrimRight(path, "/"); short != "" {
		return short
	}
	return path
}

// newRuntimes makes all that are built in, allowed or not: one that is not may have to end what it still has. The agent
// refuses to start without one of runtime.allowed.
func newRuntimes(cfg *config.Config, log *slog.Logger) (map[string]runtime.Runtime, error) {
	all := map[string]runtime.Runtime{}
	for _, name := range []string{embedded.Name, containerd.Runc, containerd.GVisor, containerd.Kata} {
		dir, err := makeRuntimeDir(cfg.StateDir, name)
		if err != nil {
			return nil, err
		}
		r, err := newRuntime(name, dir, cfg, log)
		if err != nil {
			return nil, err
		}
		all[name] = r
	}
	return all, nil
}

// newRuntime reaches for nothing: containerd may be down, and come later.
func newRuntime(name, dir string, cfg *config.Config, log *slog.Logger) (runtime.Runtime, error) {
	c := cfg.Containerd
	of, ok := c.Runtimes.Named(name)
	if !ok {
		return embedded.New(embedded.Options{StateDir: dir, Log: log})
	}
	callTime := cfg.Runtime.StartTimeout.Std()
	if name != containerd.Kata { // where one call boots the virtual machine
		callTime /= 3
	}
	return containerd.New(containerd.Options{
		Name: name, Handler: of.Handler, Binary: of.Binary, Address: c.Address, Namespace: c.Namespace, Snapshotter: c.Snapshotter, ImagesFrom: c.ImagesFrom, CallTime: callTime,
		StateDir: dir, Log: log, Kata: containerd.KataOptions{Places: kata.Places{Config: c.Runtimes.Kata.Config}},
	})
}

// newNetworks makes what connects sandboxes, also where no mode is allowed: there may be something of an earlier one to remove.
func newNetworks(cfg *config.Config, log *slog.Logger) (*network.Manager, error) {
	dir, err := makeRuntimeDir(cfg.StateDir, "network")
	if err != nil {
		return nil, err
	}
	n := cfg.Network
	return network.New(network.Options{
		StateDir: dir, Log: log, Nameservers: n.NameserverAddrs(),
		Listeners: listeners.List{TCP: portsOf(cfg.Listeners.TCP), UDP: portsOf(cfg.Listeners.UDP)},
		Bridge:    network.BridgeOptions{Subnets: n.Bridge.Prefixes()},
		CNI:       network.CNIOptions{ConfDir: n.CNI.ConfDir, BinDirs: n.CNI.BinDirs, Network: n.CNI.Network},
		Egress:    egressOptions(n),
	})
}

// egressOptions give the agent a resolver where sessions can have a list of destinations.
func egressOptions(n config.Network) network.EgressOptions {
	if !slices.Contains(n.Egress.Allowed, string(egress.Allowlist)) {
		return network.EgressOptions{}
	}
	return network.EgressOptions{Resolvers: n.Egress.ResolverAddrs(), Upstreams: n.Egress.UpstreamAddrs()}
}

// portsOf are ports that Validate has checked.
func portsOf(in []int) []uint16 {
	var out []uint16
	for _, p := range in {
		out = append(out, uint16(p))
	}
	return out
}

func makeRuntimeDir(stateDir, name string) (string, error) {
	dir := filepath.Join(stateDir, name)
	// 0711: a container's init, which isn't root on the host, passes through.
	if err := os.MkdirAll(dir, 0o711); err != nil {
		hint := ""
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
			hint = ": name a folder that root can write with --state-dir"
		}
		return "", fmt.Errorf("making the state folder %s: %w%s", dir, err, hint)
	}
	return dir, nil
}

// newLogger writes for a person on a terminal, and for a machine otherwise. The level has been validated.
func newLogger(w io.Writer, level string) *slog.Logger {
	var l slog.Level
	_ = l.UnmarshalText([]byte(level))
	o := &slog.HandlerOptions{Level: l}
	if f, ok := w.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			return slog.New(slog.NewTextHandler(w, o))
		}
	}
	return slog.New(slog.NewJSONHandler(w, o))
}
