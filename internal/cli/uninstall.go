package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// cgroupParent is where both runtimes' sandboxes are, in every hierarchy.
const cgroupParent = "/sandbox-agent"

func uninstallCommand() *cli.Command {
	return &cli.Command{
		Name:  "uninstall",
		Usage: "remove what the agent has left on this node: everything but workspaces, and receipts, which are archived; needs root",
		Description: "First \"drain\", then stop the agent: an agent that runs, or a sandbox that is there, is an error, and nothing is removed\n" +
			"then. The receipts and the keys to verify them move to a new folder in --archive, on the same file system as the\n" +
			"state folder. Removed are the state folder, the socket, the agent's namespace in containerd with its images, its\n" +
			"cgroups and its firewall rules.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "archive", Usage: "the `FOLDER` that receipts and keys are moved to", Required: true},
			&cli.BoolFlag{Name: "wait", Usage: "then do nothing until a signal comes, so that a pod of a DaemonSet stays ready"},
			&cli.StringFlag{Name: "config", Usage: "the configuration, a YAML `FILE`"},
			&cli.StringFlag{Name: "state-dir", Usage: "the `FOLDER` of journal, receipts and keys, instead of the configured one"},
			&cli.StringFlag{Name: "socket", Usage: "the exec socket's `PATH`, instead of the configured one"},
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			err := runUninstall(ctx, c)
			if err == nil && c.Bool("wait") {
				<-ctx.Done()
			}
			return err
		},
	}
}

func runUninstall(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	cfg, err := serveConfig(c)
	if err != nil {
		return err
	}
	archive, err := absolute("archive", c.String("archive"))
	if err != nil {
		return withCode(ExitUsage, err)
	}
	if archive == "" || archive == cfg.StateDir || strings.HasPrefix(archive, cfg.StateDir+"/") {
		return usagef("--archive %q: name a folder outside of the state folder, which is removed", archive)
	}
	if _, err := os.Stat(cfg.StateDir); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(c.Root().Writer, "nothing to remove: there is no %s\n", cfg.StateDir)
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New("uninstalling needs root")
	}
	if err := refuseUninstall(ctx, &cfg, c); err != nil {
		return fmt.Errorf("nothing is removed: %w", err)
	}
	kept, err := archiveReceipts(cfg.StateDir, archive)
	if err != nil {
		return err
	}
	if kept != "" {
		fmt.Fprintf(c.Root().Writer, "receipts and keys are in %s\n", kept)
	}
	return removeFromNode(ctx, &cfg, c)
}

// refuseUninstall is an error where an agent runs, or a sandbox is there.
func refuseUninstall(ctx context.Context, cfg *config.Config, c *cli.Command) error {
	var d net.Dialer
	if conn, err := d.DialContext(ctx, "unix", cfg.Socket.Path); err == nil {
		return errors.Join(fmt.Errorf("an agent listens at %s: stop it first", cfg.Socket.Path), conn.Close())
	}
	runtimes, err := newRuntimes(cfg, newLogger(c.Root().ErrWriter, cfg.Log.Level))
	if err != nil {
		return err
	}
	for name, r := range runtimes {
		ids, err := r.List(ctx)
		if errors.Is(err, runtime.ErrUnreachable) && !slices.Contains(cfg.Runtime.Allowed, name) {
			continue // a node that has never had a containerd
		}
		if err != nil {
			return fmt.Errorf("looking for sandboxes of the runtime %s: %w", name, err)
		}
		if len(ids) > 0 {
			return fmt.Errorf("sandboxes of the runtime %s are there: %s: start the agent again, and drain the node (sandbox-agent drain)", name, strings.Join(ids, ", "))
		}
	}
	return nil
}

// archiveReceipts moves receipts and keys to a new folder, with which it answers; empty: there are none.
func archiveReceipts(stateDir, archive string) (string, error) {
	if have, err := os.ReadDir(filepath.Join(stateDir, "receipts")); errors.Is(err, fs.ErrNotExist) || err == nil && len(have) == 0 {
		return "", nil
	}
	to := filepath.Join(archive, time.Now().UTC().Format("20060102T150405Z"))
	if err := os.MkdirAll(to, 0o700); err != nil {
		return "", fmt.Errorf("making the archive: %w", err)
	}
	for _, name := range []string{"receipts", "keys"} {
		err := os.Rename(filepath.Join(stateDir, name), filepath.Join(to, name))
		if errors.Is(err, unix.EXDEV) {
			err = fmt.Errorf("%w: name a folder on the file system, and the mount, of the state folder", err)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("archiving the %s: %w", name, err)
		}
	}
	return to, nil
}

// removeFromNode goes on after an error: all of them are told, and it can be run again.
func removeFromNode(ctx context.Context, cfg *config.Config, c *cli.Command) error {
	var errs []error
	networks, err := newNetworks(cfg, newLogger(c.Root().ErrWriter, cfg.Log.Level))
	if err == nil {
		_, err = networks.Restore() // without a sandbox it takes the rules away
	}
	errs = append(errs, err)
	if usesContainerd(cfg) {
		errs = append(errs, containerd.RemoveNamespace(ctx, cfg.Containerd.Address, cfg.Containerd.Namespace))
	}
	if hs, err := hostkernel.Hierarchies(); err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, removeEmptyCgroups(hostkernel.TreeOf(hs, cgroupParent).Dirs))
	}
	errs = append(errs, removeRunscState(cfg.Containerd.Namespace), removeSocket(cfg.Socket.Path))
	// Last: while it is there, this can be run again.
	if errors.Join(errs...) == nil {
		errs = append(errs, os.RemoveAll(cfg.StateDir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing what the agent has left: %w", err)
	}
	fmt.Fprintln(c.Root().Writer, removedWords(cfg))
	return nil
}

// usesContainerd: only then is there a namespace of the agent's.
func usesContainerd(cfg *config.Config) bool {
	return slices.ContainsFunc(cfg.Runtime.Allowed, func(name string) bool { return name != embedded.Name })
}

func removedWords(cfg *config.Config) string {
	words := "removed " + cfg.StateDir + ", the socket's folder, cgroups"
	if usesContainerd(cfg) {
		return words + ", firewall rules and containerd's namespace " + cfg.Containerd.Namespace
	}
	return words + " and firewall rules; containerd is left as it is: runtime.allowed has no runtime of its"
}

// removeEmptyCgroups leaves one alone that has a cgroup in it: another agent's may be there.
func removeEmptyCgroups(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("removing the cgroup: %w: does another agent run on this node?", err))
		}
	}
	return errors.Join(errs...)
}

// removeRunscState takes away the empty network namespace that gVisor's runsc makes once for each of containerd's namespaces,
// and keeps mounted.
func removeRunscState(namespace string) error {
	dir := filepath.Join("/run/containerd/runsc", namespace)
	err := unix.Unmount(filepath.Join(dir, "null-netns"), unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // EINVAL: it is no mount
		return fmt.Errorf("unmounting what gVisor keeps in %s: %w", dir, err)
	}
	return os.RemoveAll(dir)
}

// removeSocket also removes its folder if that is then empty.
func removeSocket(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := os.Remove(filepath.Dir(path))
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
