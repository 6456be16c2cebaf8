package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// ociCases are the low-level container runtimes of the distribution: a command in a running container (exec), and a
// whole container for one command (run).
func ociCases(ctx context.Context, o options, p *place, _ *session) ([]testCase, error) {
	var cases []testCase
	for _, name := range []string{"runc", "crun"} {
		execName, runName := name+" exec", name+" run"
		if !o.wants(execName) && !o.wants(runName) {
			continue
		}
		r, missing, err := startOCI(ctx, p, name)
		if err != nil {
			return nil, err
		}
		if o.wants(execName) {
			cases = append(cases, testCase{group: groupCommand, series: []string{execName}, baseline: true, missing: missing,
				sample: one(func(context.Context) (time.Duration, error) { return r.exec.run(p.null) })})
		}
		if o.wants(runName) {
			cases = append(cases, testCase{group: groupSandbox, series: []string{runName}, baseline: true, missing: missing,
				sample: one(func(context.Context) (time.Duration, error) { return r.run.run(p.null) })})
		}
	}
	return cases, nil
}

// oci is one runtime with a container that is running.
type oci struct {
	exec, run program
}

// startOCI starts the container that commands are run in. A runtime that isn't there, or can't work on this machine, is
// no error: missing says so.
func startOCI(ctx context.Context, p *place, name string) (r *oci, missing string, err error) {
	base, found := find(name, "--root", p.path("oci", name, "root"))
	if found != nil {
		return nil, base.unusable(ctx, found), nil
	}
	base.env = []string{"PATH=" + os.Getenv("PATH")}
	command := func(args ...string) program {
		c := base
		c.args = slices.Concat(base.args, args)
		return c
	}
	long, err := bundle(p, name, "long", "sleep", "infinity")
	if err != nil {
		return nil, "", err
	}
	short, err := bundle(p, name, "short", "true")
	if err != nil {
		return nil, "", err
	}
	id := fmt.Sprintf("bench-%d", os.Getpid())
	start, remove := command("run", "--detach", "--bundle", long, id), command("delete", "--force", id)
	if missing := start.unusable(ctx, nil); missing != "" {
		// A container that is half made goes; mostly there is none, which this would call an error.
		_ = remove.try(ctx)
		return nil, missing, nil
	}
	p.onClose(remove.try)
	return &oci{exec: command("exec", id, "bash", "-c", "true"), run: command("run", "--bundle", short, id+"-short")}, "", nil
}

// bundle makes the least that bash runs in: the node's own programs, read-only, and namespaces of its own. No user
// namespace, no seccomp, no limits: whatever a peer needn't do is in its favour.
func bundle(p *place, runtime, kind string, args ...string) (string, error) {
	dir := p.path("oci", runtime, kind)
	binds := []string{"/usr", "/etc"}
	for _, d := range []string{"usr", "etc", "proc", "dev", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, "rootfs", d), 0o755); err != nil {
			return "", err
		}
	}
	for _, d := range []string{"/bin", "/lib", "/lib64"} {
		inside := filepath.Join(dir, "rootfs", d)
		if target, err := os.Readlink(d); err == nil {
			if err := os.Symlink(target, inside); err != nil {
				return "", err
			}
		} else if _, err := os.Stat(d); err == nil {
			binds = append(binds, d)
			if err := os.Mkdir(inside, 0o755); err != nil {
				return "", err
			}
		}
	}
	config, err := json.Marshal(ociConfig(p.cgroup+"/"+runtime+"-"+kind, binds, args))
	if err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600)
}

type object = map[string]any

// ociConfig is a configuration of the OCI runtime specification, version 1.0.2.
func ociConfig(cgroup string, binds, args []string) object {
	mounts := []object{
		{"destination": "/proc", "type": "proc", "source": "proc"},
		{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755", "size=64k"}},
		{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "nodev"}},
	}
	for _, b := range binds {
		mounts = append(mounts, object{"destination": b, "type": "bind", "source": b, "options": []string{"rbind", "ro"}})
	}
	var namespaces []object
	for _, n := range []string{"pid", "network", "ipc", "uts", "mount"} {
		namespaces = append(namespaces, object{"type": n})
	}
	return object{
		"ociVersion": "1.0.2", "hostname": "bench", "mounts": mounts,
		"root": object{"path": "rootfs", "readonly": true},
		"process": object{
			"cwd": "/", "args": args, "env": []string{"PATH=/usr/bin:/bin"}, "noNewPrivileges": true,
			"user": object{"uid": 0, "gid": 0}, "capabilities": object{},
		},
		"linux": object{
			"cgroupsPath": cgroup, "namespaces": namespaces,
			"maskedPaths": []string{"/proc/kcore", "/proc/keys"}, "readonlyPaths": []string{"/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}
