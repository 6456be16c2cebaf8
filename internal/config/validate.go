package config

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// What the names of the API stand for in this version.
var (
	runtimes  = []string{"embedded", RuncRuntime, GvisorRuntime, KataRuntime}
	networks  = []string{NoNetwork, BridgeNetwork, CNINetwork}
	layouts   = []string{IsolatedLayout, SharedLayout}
	hookModes = []string{"off", "inside"}
	levels    = []string{"debug", "info", "warn", "error"}
	modeText  = regexp.MustCompile(`^0[0-7]{3}$`)
	cacheName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`)
	envName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// The runtimes that containerd hosts. What a name promises (runtime.Isolation) its handler has to keep.
const (
	RuncRuntime   = "runc"
	GvisorRuntime = "gvisor"
	KataRuntime   = "kata"
)

// The Git layouts of the API.
const (
	SharedLayout   = "shared"
	IsolatedLayout = "isolated"
)

// maxLifetime is the longest that lifetime.idle and lifetime.max can name.
const maxLifetime = 365 * 24 * time.Hour

// maxCachePath bounds a cache's path below HOME, bytes.
const maxCachePath = 1024

// MaxSocketPath is what fits into sockaddr_un.sun_path with its NUL (unix(7)).
const MaxSocketPath = 107

// intRange is one bounded number of the file.
type intRange struct {
	key        string
	value      int64
	low, high  int64
	unit       string
	isDuration bool
}

// text is the range as an operator reads it.
func (r intRange) text() string {
	if r.isDuration {
		return fmt.Sprintf("%s to %s", time.Duration(r.low), time.Duration(r.high))
	}
	return strings.TrimSpace(fmt.Sprintf("%d to %d %s", r.low, r.high, r.unit))
}

func (c *Config) ranges() []intRange {
	l := c.Limits
	d := func(key string, v Duration, low, high time.Duration) intRange {
		return intRange{key: key, value: int64(v), low: int64(low), high: int64(high), isDuration: true}
	}
	return []intRange{
		d("runtime.start_timeout", c.Runtime.StartTimeout, 10*time.Second, 30*time.Minute),
		d("limits.timeout", l.Timeout, time.Millisecond, l.MaxTimeout.Std()),
		d("limits.max_timeout", l.MaxTimeout, time.Second, 24*time.Hour),
		d("limits.grace", l.Grace, 0, time.Minute),
		d("limits.boundary", l.Boundary, time.Second, 10*time.Minute),
		{key: "limits.output_bytes", value: l.OutputBytes, low: 2, high: 16 << 20, unit: "bytes"},
		{key: "limits.spill_bytes", value: l.SpillBytes, low: 0, high: 1 << 30, unit: "bytes (0: no files)"},
		{key: "limits.command_bytes", value: l.CommandBytes, low: 1, high: maxCommandBytes, unit: "bytes"},
		{key: "limits.pids", value: l.Pids, low: 8, high: 65536},
		{key: "limits.tmp_bytes", value: l.TmpBytes, low: 1 << 20, high: 1 << 40, unit: "bytes"},
		{key: "limits.home_bytes", value: l.HomeBytes, low: 1 << 20, high: 1 << 40, unit: "bytes"},
		{key: "limits.memory_bytes", value: l.MemoryBytes, low: 32 << 20, high: 1 << 44, unit: "bytes"},
		{key: "limits.queue", value: l.Queue, low: 0, high: 1024},
		{key: "limits.sessions", value: l.Sessions, low: 1, high: 4096},
		{key: "limits.total_memory_bytes", value: l.TotalMemoryBytes, low: 0, high: 1 << 50, unit: "bytes (0: no bound)"},
		d("lifetime.idle", c.Lifetime.Idle, 0, maxLifetime),
		d("lifetime.max", c.Lifetime.Max, 0, maxLifetime),
		d("lifetime.drain_grace", c.Lifetime.DrainGrace, 0, time.Hour),
		{key: "retention.execs", value: c.Retention.Execs, low: 1, high: 10_000_000},
		d("retention.age", c.Retention.Age, time.Minute, 10*365*24*time.Hour),
		{key: "events.keep", value: c.Events.Keep, low: 1000, high: 10_000_000},
		{key: "audit.max_bytes", value: c.Audit.MaxBytes, low: 64 << 10, high: 1 << 40, unit: "bytes"},
		{key: "audit.keep", value: c.Audit.Keep, low: 1, high: 1000},
	}
}

// Validate checks everything that can be checked without the node. The error names key, value and allowed range.
func (c *Config) Validate() error {
	for _, check := range []func() error{
		c.checkPaths, c.checkSocket, c.checkNames, c.checkContainerd, c.checkRootfs, c.checkRanges, c.checkListeners, c.checkNetwork, c.checkEgress, c.checkIdentity, c.checkExport, c.checkCaches, c.checkMetrics,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func bad(key string, value any, allowed string) error {
	return fmt.Errorf("%w: %s is %s; allowed: %s", ErrInvalid, key, show(value), allowed)
}

func absClean(p string) bool { return filepath.IsAbs(p) && filepath.Clean(p) == p }

func (c *Config) checkPaths() error {
	const abs = "an absolute path without \"..\", doubled or closing slashes"
	for _, p := range []struct{ key, value string }{
		{"state_dir", c.StateDir}, {"containerd.address", c.Containerd.Address},
	} {
		if !absClean(p.value) || p.value == "/" {
			return bad(p.key, p.value, abs)
		}
	}
	if p := c.Audit.Path; p != "" && (!absClean(p) || p == "/") {
		return bad("audit.path", p, "empty for no audit log, or "+abs)
	}
	if len(c.Workspace.Roots) == 0 {
		return bad("workspace.roots", c.Workspace.Roots, "at least one absolute path")
	}
	for i, r := range c.Workspace.Roots {
		key := fmt.Sprintf("workspace.roots[%d]", i)
		if !absClean(r) || r == "/" {
			return bad(key, r, abs+", and not / itself")
		}
		if p := c.forbiddenPrefix(r); p != "" {
			return bad(key, r, "no path under "+p)
		}
	}
	return nil
}

func (c *Config) checkSocket() error {
	s := c.Socket
	if !absClean(s.Path) {
		return bad("socket.path", s.Path, "an absolute, clean path")
	}
	if len(s.Path) > MaxSocketPath {
		return bad("socket.path", s.Path, fmt.Sprintf("at most %d bytes (sun_path, unix(7)), this one has %d: choose a shorter folder",
			MaxSocketPath, len(s.Path)))
	}
	if !modeText.MatchString(s.Mode) {
		return bad("socket.mode", s.Mode, "four octal digits in quotes, for example \"0660\"")
	}
	if len(s.AllowUIDs) == 0 {
		return bad("socket.allow_uids", s.AllowUIDs, "at least one uid; [0] is root alone")
	}
	return nil
}

func (c *Config) checkNames() error {
	sets := []struct {
		key   string
		value string
		set   []string
	}{
		{"workspace.git_layout", c.Workspace.GitLayout, layouts},
		{"workspace.hooks", c.Workspace.Hooks, hookModes},
		{"log.level", c.Log.Level, levels},
		{"runtime.default", c.Runtime.Default, c.Runtime.Allowed},
		{"network.default", c.Network.Default, c.Network.Allowed},
		{"network.egress.default", c.Network.Egress.Default, c.Network.Egress.Allowed},
	}
	for i, r := range c.Runtime.Allowed {
		sets = append(sets, struct {
			key   string
			value string
			set   []string
		}{fmt.Sprintf("runtime.allowed[%d]", i), r, runtimes})
	}
	for i, n := range c.Network.Allowed {
		sets = append(sets, struct {
			key   string
			value string
			set   []string
		}{fmt.Sprintf("network.allowed[%d]", i), n, networks})
	}
	for i, n := range c.Network.Egress.Allowed {
		sets = append(sets, struct {
			key   string
			value string
			set   []string
		}{fmt.Sprintf("network.egress.allowed[%d]", i), n, egress.Modes})
	}
	for _, s := range sets {
		if !slices.Contains(s.set, s.value) {
			return bad(s.key, s.value, strings.Join(s.set, ", "))
		}
	}
	for i, n := range c.Workspace.AllowEnv {
		if !envName.MatchString(n) {
			return bad(fmt.Sprintf("workspace.allow_env[%d]", i), n, "a variable's name: letters, digits and _")
		}
	}
	return nil
}

func (c *Config) checkRanges() error {
	for _, r := range c.ranges() {
		if r.value >= r.low && r.value <= r.high {
			continue
		}
		var value any = r.value
		if r.isDuration {
			value = time.Duration(r.value)
		}
		return bad(r.key, value, r.text())
	}
	if c.Limits.CPUs < 0 || c.Limits.CPUs > 4096 || c.Limits.CPUs != c.Limits.CPUs {
		return bad("limits.cpus", c.Limits.CPUs, "0 (no limit) to 4096 cores")
	}
	return nil
}

func (c *Config) checkListeners() error {
	for key, ports := range map[string][]int{"listeners.tcp": c.Listeners.TCP, "listeners.udp": c.Listeners.UDP} {
		for i, p := range ports {
			if p < 1 || p > 65535 {
				return bad(fmt.Sprintf("%s[%d]", key, i), p, "1 to 65535")
			}
		}
	}
	for i, p := range c.Listeners.Unix {
		if !absClean(p) && !strings.HasPrefix(p, "@") {
			return bad(fmt.Sprintf("listeners.unix[%d]", i), p, "an absolute path, or an abstract name that begins with @")
		}
	}
	return nil
}

// checkIdentity refuses what Git itself would strip or refuse in an identity.
func (c *Config) checkIdentity() error {
	for key, v := range map[string]string{"workspace.identity.name": c.Workspace.Identity.Name, "workspace.identity.email": c.Workspace.Identity.Email} {
		if strings.TrimSpace(v) == "" || strings.ContainsAny(v, "<>\n\x00") {
			return bad(key, v, "text that is not empty, without <, >, NUL and line breaks")
		}
	}
	return nil
}

// checkExport wants whole names of refs, with * and ? as in a shell: "refs/tags/*". What the agent keeps for itself can't be
// exported to.
func (c *Config) checkExport() error {
	for i, pattern := range c.Workspace.Export {
		if !strings.HasPrefix(pattern, "refs/") || strings.HasPrefix(pattern, "refs/sandboxes/") || strings.ContainsAny(pattern, " \t\n\x00~^:\\") || strings.Contains(pattern, "..") {
			return bad(fmt.Sprintf("workspace.export[%d]", i), pattern, `a pattern of whole ref names, for example "refs/tags/*", and none of refs/sandboxes/`)
		}
	}
	return nil
}

func (c *Config) checkCaches() error {
	for _, name := range slices.Sorted(maps.Keys(c.Caches)) {
		cache, key := c.Caches[name], "caches."+name
		if !cacheName.MatchString(name) {
			return bad(key, name, "a name of 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with a dot or a dash")
		}
		if !absClean(cache.Source) || cache.Source == "/" {
			return bad(key+".source", cache.Source, "the absolute path of a folder, without \"..\", doubled or closing slashes")
		}
		if Under(cache.Source, c.StateDir) || Under(c.StateDir, cache.Source) || Under(c.Socket.Path, cache.Source) {
			return bad(key+".source", cache.Source, "no folder that holds, or lies in, the agent's own")
		}
		if err := CheckCachePath(cache.Path); err != nil {
			return bad(key+".path", cache.Path, err.Error())
		}
	}
	return nil
}

// CheckCachePath says what a cache's path below HOME must be, if it is not; its error is that sentence.
func CheckCachePath(path string) error {
	switch {
	case path == "" || filepath.IsAbs(path) || filepath.Clean(path) != path || path == "." || path == ".." || strings.HasPrefix(path, "../"),
		strings.ContainsFunc(path, unicode.IsControl), !utf8.ValidString(path), len(path) > maxCachePath:
		return fmt.Errorf("a clean path relative to HOME, for example \".cache/pip\", of at most %d bytes", maxCachePath)
	}
	return nil
}

// CheckCacheName says whether a cache can be called so: it is the name of a folder.
func CheckCacheName(name string) bool { return cacheName.MatchString(name) }
