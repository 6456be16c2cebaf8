package kata

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// maxConfig bounds one configuration file, bytes; maxDropIns their number.
const (
	maxConfig  = 1 << 20
	maxDropIns = 256
)

// Source is where a setting stands. Line is 0 when it stands nowhere (a default) or can't be told.
type Source struct {
	File string
	Line int
}

func (s Source) String() string {
	if s.Line == 0 {
		return s.File
	}
	return fmt.Sprintf("%s:%d", s.File, s.Line)
}

// Config is what the judgement and the node check look at: one hypervisor's settings, after the drop-ins. Settings that
// nothing here judges are not in it, and may be anything.
type Config struct {
	// Path is the file with all symlinks resolved: the drop-ins lie in config.d beside this one, not beside a link to it.
	Path    string
	DropIns []string
	Flavour Flavour

	// Hypervisor is the name of its table: qemu, clh (Go), cloud-hypervisor (Rust), firecracker, dragonball, stratovirt …
	Hypervisor string
	// VMM, Kernel, Image, Initrd, VirtioFSDaemon are paths. VMM is empty where the VMM runs in the shim (VMMInShim).
	VMM, Kernel, Image, Initrd, VirtioFSDaemon string

	SharedFS, VirtioFSCache string
	VirtioFSExtraArgs       []string
	// EnableAnnotations are regular expressions, not anchored, of the annotations that the shim would obey.
	EnableAnnotations  []string
	KernelParams       string
	VMRootfsDriver     string
	FileMemBackend     string
	ExtraMonitorSocket string
	GuestHookPath      string
	GuestMemoryDump    string
	HugePages          bool
	IOMMU              bool
	DisableVhostNet    bool
	DisableVMMSeccomp  bool
	HypervisorDebug    bool

	VMTemplate bool
	VMCache    int64

	DebugConsole bool
	AgentTracing bool
	AgentDebug   bool

	DisableGuestSeccomp   bool
	SandboxCgroupOnly     bool
	StaticSandboxResource bool
	DisableNewNetns       bool
	KeepAbnormal          bool
	RuntimeDebug          bool
	Pprof                 bool
	SandboxBindMounts     []string
	Experimental          []string

	sources map[string]Source
}

// VMMInShim says that the VMM is threads of the shim: one process whose end is the end of both.
func (c Config) VMMInShim() bool { return c.Hypervisor == "dragonball" }

// HybridVsock says that the guest is reached through a unix socket of the VMM; otherwise through AF_VSOCK.
func (c Config) HybridVsock() bool { return c.Hypervisor != "qemu" && c.Hypervisor != "stratovirt" }

// Where says where a setting stands, by the name that a Finding uses ("hypervisor.qemu.kernel_params").
func (c Config) Where(key string) Source {
	if s, ok := c.sources[c.fold(key)]; ok {
		return s
	}
	return Source{File: c.Path}
}

// fold: the Go runtime's TOML library matches a struct's keys without regard to case; serde does not.
func (c Config) fold(key string) string {
	if c.Flavour == FlavourGo {
		return strings.ToLower(key)
	}
	return key
}

// ConfigCandidates are the files that a flavour looks for, in its order, when nothing names one. The Go runtime has two,
// fixed when it was built: the second follows from where its shim is installed.
func ConfigCandidates(f Flavour, shim string) []string {
	const name = "configuration.toml"
	dirs := []string{"/etc/kata-containers", "/usr/share/defaults/kata-containers", "/opt/kata/share/defaults/kata-containers"}
	if f == FlavourGo {
		if strings.HasPrefix(shim, "/opt/kata/") {
			dirs = []string{dirs[0], dirs[2]}
		} else {
			dirs = dirs[:2]
		}
		return []string{filepath.Join(dirs[0], name), filepath.Join(dirs[1], name)}
	}
	var all []string
	for _, d := range dirs {
		all = append(all, filepath.Join(d, "runtime-rs", name))
	}
	return all
}

// FindConfig is the configuration that belongs to a shim. Whoever starts a container passes on this very path as the
// runtime option ConfigPath: then what is used is what was judged.
func FindConfig(p Places, shim ShimInfo) (string, error) {
	if p.Config != "" {
		return p.Config, nil
	}
	paths := p.ConfigPaths
	if paths == nil {
		paths = ConfigCandidates(shim.Flavour, shim.Resolved)
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: no configuration at %s; install Kata's, or name the file", ErrNotInstalled, strings.Join(paths, ", "))
}

// ReadConfig reads a configuration and its drop-ins as the flavour does: the file behind the link, then every file of
// config.d beside it in the order of their names, tables merged, the last value wins. Every file must be root's alone.
// An error wraps ErrConfig, ErrUntrusted or ErrNotInstalled.
func ReadConfig(path string, f Flavour) (Config, error) {
	c := Config{Flavour: f, sources: map[string]Source{}}
	var err error
	if c.Path, err = regular(path); errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("%w: %w", ErrNotInstalled, err)
	} else if err != nil {
		return c, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.DropIns, err = dropIns(filepath.Dir(c.Path), f); err != nil {
		return c, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	tree := map[string]any{}
	for _, file := range append([]string{c.Path}, c.DropIns...) {
		if err := c.merge(tree, file); err != nil {
			return c, fmt.Errorf("%w: %w", ErrConfig, err)
		}
	}
	if err := c.fill(tree); err != nil {
		return c, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return c, nil
}

// dropIns: both flavours read whatever lies there, whatever its name ends with. The Rust one refuses a symlink.
func dropIns(dir string, f Flavour) ([]string, error) {
	dir = filepath.Join(dir, "config.d")
	entries, err := os.ReadDir(dir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if _, err := resolve(dir); err != nil {
		return nil, err
	}
	if len(entries) > maxDropIns {
		return nil, fmt.Errorf("%s: %d files; at most %d are read", dir, len(entries), maxDropIns)
	}
	var files []string
	for _, e := range entries {
		file := filepath.Join(dir, e.Name())
		if f == FlavourRust && !e.Type().IsRegular() {
			return nil, fmt.Errorf("%s: not a regular file, which the Rust shim refuses; put a copy in its place", file)
		}
		files = append(files, file)
	}
	return files, nil
}

func (c *Config) merge(tree map[string]any, file string) error {
	real, err := resolve(file)
	if err != nil {
		return err
	}
	data, err := readSmall(real)
	if err != nil {
		return err
	}
	var in map[string]any
	if err := toml.Unmarshal(data, &in); err != nil {
		var de *toml.DecodeError
		if errors.As(err, &de) {
			line, _ := de.Position()
			return fmt.Errorf("%s: %w", Source{file, line}, err)
		}
		return fmt.Errorf("%s: %w", file, err)
	}
	if c.Flavour == FlavourGo {
		if in, err = lower(in); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	mergeTables(tree, in)
	for key, line := range lines(data) {
		c.sources[c.fold(key)] = Source{file, line}
	}
	return nil
}

func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(data) > maxConfig {
		err = fmt.Errorf("%s: longer than %d bytes", path, maxConfig)
	}
	return data, err
}

// lower folds the case of all keys. Two that differ in nothing else are refused: which one counts is the library's whim.
func lower(in map[string]any) (map[string]any, error) {
	out := make(map[string]any, len(in))
	for _, k := range slices.Sorted(maps.Keys(in)) {
		v := in[k]
		low := strings.ToLower(k)
		if _, twice := out[low]; twice {
			return nil, fmt.Errorf("key %q stands there twice, differing in case only; remove one", k)
		}
		if table, ok := v.(map[string]any); ok {
			folded, err := lower(table)
			if err != nil {
				return nil, err
			}
			v = folded
		}
		out[low] = v
	}
	return out, nil
}

func mergeTables(base, in map[string]any) {
	for k, v := range in {
		table, ok := v.(map[string]any)
		old, had := base[k].(map[string]any)
		if ok && had {
			mergeTables(old, table)
			continue
		}
		base[k] = v
	}
}

// lines tells on which line each dotted key stands. It is for people to find it: nothing is decided by it.
func lines(data []byte) map[string]int {
	found := map[string]int{}
	var p unstable.Parser
	p.Reset(data)
	table := ""
	for p.NextExpression() {
		n := p.Expression()
		if n.Kind != unstable.Table && n.Kind != unstable.ArrayTable && n.Kind != unstable.KeyValue {
			continue
		}
		key, line := "", 0
		for it := n.Key(); it.Next(); {
			k := it.Node()
			key += "." + string(k.Data)
			line = p.Shape(k.Raw).Start.Line
		}
		if n.Kind != unstable.KeyValue {
			table = key
			continue
		}
		found[strings.TrimPrefix(table+key, ".")] = line
	}
	return found
}

// reader reads settings of one table, and keeps the first that is not of its type.
type reader struct {
	c     *Config
	table string
	in    map[string]any
	err   *error
}

func read[T any](r reader, key string, to *T) {
	v, ok := r.in[key]
	if !ok || *r.err != nil {
		return
	}
	t, ok := v.(T)
	if !ok {
		name := r.table + "." + key
		*r.err = fmt.Errorf("%s: %s is a %T where Kata wants a %T", r.c.Where(name), name, v, *to)
		return
	}
	*to = t
}

func (r reader) list(key string, to *[]string) {
	var raw []any
	read(r, key, &raw)
	for _, e := range raw {
		s, ok := e.(string)
		if !ok && *r.err == nil {
			*r.err = fmt.Errorf("%s: %s.%s holds a %T where Kata wants strings", r.c.Where(r.table+"."+key), r.table, key, e)
		}
		*to = append(*to, s)
	}
}

// sub is a table within a table; without one, an empty table.
func (r reader) sub(name string) reader {
	t := map[string]any{}
	read(r, name, &t)
	return reader{r.c, strings.TrimPrefix(r.table+"."+name, "."), t, r.err}
}

func (c *Config) fill(tree map[string]any) error {
	var err error
	top := reader{c, "", tree, &err}
	rt := top.sub("runtime")
	c.fillRuntime(rt)
	all := top.sub("hypervisor")
	if err != nil {
		return err
	}
	if c.Hypervisor, err = c.hypervisor(rt, all.in); err != nil {
		return err
	}
	hv := all.sub(c.Hypervisor)
	c.fillHypervisor(hv)
	// The Rust runtime reads the factory from the hypervisor's table, the Go one from the top. Both are looked at.
	for _, f := range []reader{top.sub("factory"), hv.sub("factory")} {
		var on bool
		var n int64
		read(f, "enable_template", &on)
		read(f, "vm_cache_number", &n)
		c.VMTemplate, c.VMCache = c.VMTemplate || on, max(c.VMCache, n)
	}
	agents := top.sub("agent")
	for _, name := range slices.Sorted(maps.Keys(agents.in)) {
		a := agents.sub(name)
		var console, tracing, debug bool
		read(a, "debug_console_enabled", &console)
		read(a, "enable_tracing", &tracing)
		read(a, "enable_debug", &debug)
		c.DebugConsole, c.AgentTracing, c.AgentDebug = c.DebugConsole || console, c.AgentTracing || tracing, c.AgentDebug || debug
	}
	return err
}

// hypervisor is the table that counts. The Go runtime goes through all of them in no order: it must be the only one.
func (c *Config) hypervisor(rt reader, tables map[string]any) (string, error) {
	names := slices.Sorted(maps.Keys(tables))
	if c.Flavour == FlavourGo {
		if len(names) != 1 {
			return "", fmt.Errorf("%s: %d tables [hypervisor.…] (%s); the Go runtime takes one of them, and says not which: leave one", c.Path, len(names), strings.Join(names, ", "))
		}
		return names[0], nil
	}
	name := ""
	read(rt, "hypervisor_name", &name)
	switch {
	case *rt.err != nil:
		return "", *rt.err
	case name == "":
		return "", fmt.Errorf("%s: runtime.hypervisor_name is not set; name one of %s", c.Path, strings.Join(names, ", "))
	case !slices.Contains(names, name):
		return "", fmt.Errorf("%s: runtime.hypervisor_name is %q, and there is no [hypervisor.%s]", c.Where("runtime.hypervisor_name"), name, name)
	}
	return name, nil
}

func (c *Config) fillRuntime(r reader) {
	read(r, "disable_guest_seccomp", &c.DisableGuestSeccomp)
	read(r, "sandbox_cgroup_only", &c.SandboxCgroupOnly)
	read(r, "static_sandbox_resource_mgmt", &c.StaticSandboxResource)
	read(r, "disable_new_netns", &c.DisableNewNetns)
	read(r, "keep_abnormal", &c.KeepAbnormal)
	read(r, "enable_debug", &c.RuntimeDebug)
	read(r, "enable_pprof", &c.Pprof)
	r.list("sandbox_bind_mounts", &c.SandboxBindMounts)
	r.list("experimental", &c.Experimental)
}

func (c *Config) fillHypervisor(r reader) {
	for key, to := range map[string]*string{
		"path": &c.VMM, "kernel": &c.Kernel, "image": &c.Image, "initrd": &c.Initrd, "virtio_fs_daemon": &c.VirtioFSDaemon,
		"shared_fs": &c.SharedFS, "virtio_fs_cache": &c.VirtioFSCache, "kernel_params": &c.KernelParams,
		"vm_rootfs_driver": &c.VMRootfsDriver, "file_mem_backend": &c.FileMemBackend,
		"extra_monitor_socket": &c.ExtraMonitorSocket, "guest_hook_path": &c.GuestHookPath,
		"guest_memory_dump_path": &c.GuestMemoryDump,
	} {
		read(r, key, to)
	}
	for key, to := range map[string]*bool{
		"enable_hugepages": &c.HugePages, "enable_iommu": &c.IOMMU, "disable_vhost_net": &c.DisableVhostNet,
		"disable_seccomp": &c.DisableVMMSeccomp, "enable_debug": &c.HypervisorDebug,
	} {
		read(r, key, to)
	}
	r.list("virtio_fs_extra_args", &c.VirtioFSExtraArgs)
	r.list("enable_annotations", &c.EnableAnnotations)
	if c.SharedFS == "" {
		c.SharedFS = "virtio-fs" // both runtimes' default
	}
}
