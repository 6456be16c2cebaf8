package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEveryKeyIsOptionalAndTheDefaultsAreValid(t *testing.T) {
	for name, text := range map[string]string{"an empty file": "", "a comment": "# nothing\n", "an empty map": "{}"} {
		c := Default(16 * gib)
		require.NoError(t, Parse([]byte(text), &c), name)
		require.Equal(t, Default(16*gib), c, name)
		require.NoError(t, c.Validate(), name)
	}
}

func TestMemoryDefaultsTo4GiBOrThreeQuartersOfTheNode(t *testing.T) {
	require.Equal(t, 4*gib, Default(64*gib).Limits.MemoryBytes)
	require.Equal(t, 3*gib, Default(4*gib).Limits.MemoryBytes)
}

func TestLifetimesAreOffAtNought(t *testing.T) {
	c := Default(16 * gib)
	require.Equal(t, 30*time.Minute, c.Lifetime.Idle.Std())
	require.NoError(t, Parse([]byte("lifetime: {idle: 0s, max: 0s, drain_grace: 0s}"), &c))
	require.NoError(t, c.Validate())
	require.Zero(t, c.Lifetime)
}

func TestAFileChangesOnlyTheKeysThatItNames(t *testing.T) {
	c := Default(16 * gib)
	require.NoError(t, Parse([]byte(`
limits: {timeout: 5s, pids: 100}
workspace: {roots: [/srv/work], hooks: off}
socket: {mode: "0600"}
`), &c))
	require.NoError(t, c.Validate())
	require.Equal(t, 5*time.Second, c.Limits.Timeout.Std())
	require.EqualValues(t, 100, c.Limits.Pids)
	require.Equal(t, time.Hour, c.Limits.MaxTimeout.Std())
	require.Equal(t, []string{"/srv/work"}, c.Workspace.Roots)
	require.Equal(t, "off", c.Workspace.Hooks)
	require.Equal(t, os.FileMode(0o600), c.Socket.FileMode())
}

func TestWhatTheFileMustNotHoldIsNamed(t *testing.T) {
	for text, names := range map[string][]string{
		"limitz: {}":                                                   {"limitz"},
		"limits: {pid: 3}":                                             {"pid"},
		"limits: {pids: 3}\nlimits: {pids: 4}":                         {"limits"},
		"limits: {timeout: 5}":                                         {"5", "90s"},
		"runtime: {start_timeout: 1s}":                                 {"runtime.start_timeout", "1s", "10s to 30m0s"},
		"limits: {boundary: 0s}":                                       {"limits.boundary", "0s", "1s to 10m0s"},
		"limits: {timeout: 2h}":                                        {"limits.timeout", "2h0m0s", "1ms to 1h0m0s"},
		"limits: {timeout: 0s}":                                        {"limits.timeout", "0s"},
		"limits: {max_timeout: 48h}":                                   {"limits.max_timeout", "24h0m0s"},
		"limits: {pids: 1000000}":                                      {"limits.pids", "1000000", "8 to 65536"},
		"limits: {command_bytes: 131072}":                              {"limits.command_bytes", "1 to 131071 bytes"},
		"limits: {output_bytes: 0}":                                    {"limits.output_bytes"},
		"limits: {memory_bytes: 1}":                                    {"limits.memory_bytes"},
		"limits: {queue: -1}":                                          {"limits.queue", "0 to 1024"},
		"limits: {sessions: 0}":                                        {"limits.sessions"},
		"limits: {total_memory_bytes: -1}":                             {"limits.total_memory_bytes", "no bound"},
		"lifetime: {idle: 5}":                                          {"lifetime.idle", "90s"},
		"lifetime: {idle: -1s}":                                        {"lifetime.idle", "0s to 8760h0m0s"},
		"lifetime: {max: 9000h}":                                       {"lifetime.max", "0s to 8760h0m0s"},
		"lifetime: {drain_grace: 2h}":                                  {"lifetime.drain_grace", "0s to 1h0m0s"},
		"lifetime: {maximum: 2h}":                                      {"lifetime.maximum", "idle, max, drain_grace"},
		"limits: {cpus: -1}":                                           {"limits.cpus"},
		"state_dir: relative":                                          {"state_dir", "relative", "absolute"},
		"state_dir: /a/../b":                                           {"state_dir"},
		"runtime: {default: docker}":                                   {"runtime.default", "docker", "embedded"},
		"runtime: {default: docker, allowed: [docker]}":                {"runtime.allowed[0]", "docker"},
		"network: {default: host}":                                     {"network.default", "host"},
		"workspace: {roots: []}":                                       {"workspace.roots"},
		"workspace: {roots: [/]}":                                      {"workspace.roots[0]"},
		"workspace: {roots: [/etc/x]}":                                 {"workspace.roots[0]", "/etc"},
		"workspace: {roots: [/var/lib/sandbox-agent/w]}":               {"workspace.roots[0]", "/var/lib/sandbox-agent"},
		"workspace: {git_layout: open}":                                {"workspace.git_layout", "allowed: isolated, shared"},
		"workspace: {export: [tags/*]}":                                {"workspace.export[0]", "refs/tags/*"},
		"workspace: {export: ['refs/tags/*', refs/sandboxes/*]}":       {"workspace.export[1]", "refs/sandboxes"},
		"workspace: {export: ['refs/../x']}":                           {"workspace.export[0]"},
		"caches: {.pip: {source: /a, path: b}}":                        {"caches..pip", "not beginning with a dot"},
		"caches: {a/b: {source: /a, path: b}}":                         {"caches.a/b"},
		"caches: {pip: {path: b}}":                                     {"caches.pip.source", "absolute path"},
		"caches: {pip: {source: a, path: b}}":                          {"caches.pip.source"},
		"caches: {pip: {source: /, path: b}}":                          {"caches.pip.source"},
		"caches: {pip: {source: /var/lib/sandbox-agent/x, path: b}}":   {"caches.pip.source", "the agent's own"},
		"caches: {pip: {source: /var/lib, path: b}}":                   {"caches.pip.source", "the agent's own"},
		"caches: {pip: {source: /a}}":                                  {"caches.pip.path", "relative to HOME"},
		"caches: {pip: {source: /a, path: ../b}}":                      {"caches.pip.path"},
		"caches: {pip: {source: /a, path: /b}}":                        {"caches.pip.path"},
		"caches: {pip: {source: /a, path: a/../b}}":                    {"caches.pip.path"},
		"runtime: {default: kata}":                                     {"runtime.default", "kata", "embedded"},
		"runtime: {allowed: [embedded, podman]}":                       {"runtime.allowed[1]", "podman", "embedded, runc, gvisor, kata"},
		"network: {allowed: [none, host]}":                             {"network.allowed[1]", "host", "none, bridge, cni"},
		"network: {default: bridge}":                                   {"network.default", "bridge", "allowed: none"},
		"network: {nameservers: [127.0.0.53]}":                         {"network.nameservers[0]", "127.0.0.53", "no loopback"},
		"network: {nameservers: [a.example]}":                          {"network.nameservers[0]", "address"},
		"network: {nameservers: [9.9.9.9, 9.9.9.10, 9.9.9.11, '::2']}": {"network.nameservers", "at most 3"},
		"network: {bridge: {subnet: 10.1.2.3/16}}":                     {"network.bridge.subnet", "first address"},
		"network: {bridge: {subnet: 8.8.0.0/16}}":                      {"network.bridge.subnet", "192.168.0.0/16"},
		"network: {bridge: {subnet: 10.0.0.0/8}}":                      {"network.bridge.subnet", "/16 to /30"},
		"network: {bridge: {subnet: ''}}":                              {"network.bridge.subnet"},
		"network: {bridge: {subnet6: 10.9.0.0/16}}":                    {"network.bridge.subnet6", "IPv6"},
		"network: {bridge: {subnet6: '2001:db8::/64'}}":                {"network.bridge.subnet6", "fc00::/7"},
		"network: {cni: {conf_dir: net.d}}":                            {"network.cni.conf_dir", "absolute path"},
		"network: {cni: {bin_dirs: []}}":                               {"network.cni.bin_dirs", "at least one"},
		"network: {cni: {bin_dirs: [/a/]}}":                            {"network.cni.bin_dirs[0]"},
		"network: {egress: {default: closed}}":                         {"network.egress.default", "closed"},
		"network: {egress: {default: allowlist}}":                      {"network.egress.default", "allowlist", "allowed: open"},
		"network: {egress: {allowed: [open, all]}}":                    {"network.egress.allowed[1]", "all", "none, open, allowlist"},
		"network: {egress: {allow: [{to: a.example}]}}":                {"network.egress.allow[0]", "a.example", "reason is missing"},
		"network: {egress: {allow: [{to: a.example, reason: x}, {to: '*.com', reason: x}]}}": {"network.egress.allow[1]", "*.com"},
		"network: {egress: {allow: [{to: a.example, reason: x, private: [127.0.0.0/8]}]}}":   {"network.egress.allow[0]", "127.0.0.0/8"},
		"network: {egress: {allow: [{host: a.example, reason: x}]}}":                         {"network.egress.allow[0]", "host"},
		"network: {egress: {resolver: [192.0.2.1]}}":                                         {"network.egress.resolver[0]", "link-local"},
		"network: {egress: {resolver: [169.254.169.254]}}":                                   {"network.egress.resolver[0]"},
		"network: {egress: {resolver: [169.254.1.1, 169.254.1.2]}}":                          {"network.egress.resolver[1]", "one of each"},
		"network: {egress: {upstream: [ns.example]}}":                                        {"network.egress.upstream[0]", "nameserver"},
		"network: {egress: {connections: 0}}":                                                {"network.egress.connections", "1"},
		"network: {egress: {bytes_out: -1}}":                                                 {"network.egress.bytes_out"},
		"network: {cni: {network: a/b}}":                                                     {"network.cni.network", "name"},
		"workspace: {hooks: on}":                                                             {"workspace.hooks", "inside"},
		"workspace: {identity: {name: '<x>'}}":                                               {"workspace.identity.name"},
		"workspace: {allow_env: ['A B']}":                                                    {"workspace.allow_env[0]"},
		"socket: {mode: 0660}":                                                               {"socket.mode", "quotes"},
		"socket: {allow_uids: []}":                                                           {"socket.allow_uids"},
		"socket: {path: /" + strings.Repeat("x", 107) + "}":                                  {"socket.path", "at most 107 bytes", "108"},
		"listeners: {tcp: [70000]}":                                                          {"listeners.tcp[0]", "70000", "1 to 65535"},
		"listeners: {unix: [run/x]}":                                                         {"listeners.unix[0]"},
		"log: {level: loud}":                                                                 {"log.level", "debug"},
		"retention: {age: 1s}":                                                               {"retention.age"},
		"events: {keep: 10}":                                                                 {"events.keep", "1000 to 10000000"},
		"audit: {path: audit.jsonl}":                                                         {"audit.path", "absolute path"},
		"audit: {max_bytes: 1}":                                                              {"audit.max_bytes", "65536 to"},
		"audit: {keep: 0}":                                                                   {"audit.keep", "1 to 1000"},
	} {
		c := Default(16 * gib)
		err := Parse([]byte(text), &c)
		if err == nil {
			err = c.Validate()
		}
		require.ErrorIs(t, err, ErrInvalid, text)
		for _, name := range names {
			require.ErrorContains(t, err, name, text)
		}
	}
}

func TestWhatIsOfTheWrongKindIsSaidInTheFilesOwnWords(t *testing.T) {
	for text, want := range map[string]string{
		"limits: {pids: many}":                 `limits.pids is "many"; allowed: 8 to 65536`,
		"limits: {pids: 1.5}":                  `limits.pids is 1.5; allowed: 8 to 65536`,
		"limits: {pids: 99999999999999999999}": `limits.pids is 1`,
		"limits: {cpus: two}":                  `limits.cpus is "two"; allowed: a number`,
		"limits: 3":                            `limits is 3; allowed: a section with the keys timeout, max_timeout`,
		"limits: {pid: 3}":                     `limits.pid is no key; the keys of limits are timeout, max_timeout`,
		"Limits: {pids: 300}":                  `Limits is no key; the keys of the file are state_dir, socket`,
		"workspace: {identity: {mail: x}}":     `workspace.identity.mail is no key; the keys of workspace.identity are name, email`,
		"- a":                                  `the file is a list; allowed: a section with the keys state_dir`,
		"limits: {timeout: 5}":                 `limits.timeout is 5; allowed: 1ms to 1h0m0s; write it with its unit, for example "90s"`,
		"limits: {timeout: soon}":              `limits.timeout is "soon"; allowed: 1ms to 1h0m0s; write it with its unit`,
		"socket: {mode: 0660}":                 `socket.mode is 432; allowed: four octal digits in quotes, for example "0660"`,
		"socket: {mode: 660}":                  `socket.mode is 660; allowed: four octal digits in quotes`,
		"socket: {allow_uids: 0}":              `socket.allow_uids is 0; allowed: a list, also for one thing: [x]`,
		"socket: {allow_uids: [-1]}":           `socket.allow_uids[0] is -1; allowed: a whole number from 0 to 4294967295`,
		"socket: {allow_uids: [root]}":         `socket.allow_uids[0] is "root"; allowed: a whole number`,
		"socket: {allow_uids: []}":             `socket.allow_uids is an empty list; allowed: at least one uid`,
		"workspace: {roots: /srv}":             `workspace.roots is "/srv"; allowed: a list`,
		"workspace: {roots: [~]}":              `workspace.roots[0] is ""; allowed: no empty item`,
		"workspace: {hooks: on}":               `workspace.hooks is true; allowed: off, inside (YAML reads a bare on`,
		"workspace: {allow_root_owned: 'yes'}": `workspace.allow_root_owned is "yes"; allowed: true or false`,
		"workspace: {identity: {name: 7}}":     `workspace.identity.name is 7; allowed: text; put it in quotes`,
		"listeners: {tcp: [http]}":             `listeners.tcp[0] is "http"; allowed: a whole number`,
		"log: {level: {a: b}}":                 `log.level is a section; allowed: debug, info, warn, error`,
		"retention: {execs: null, age: 1}":     `retention.age is 1; allowed: 1m0s to 87600h0m0s; write it with its unit`,
		"caches: [pip]":                        `caches is a list; allowed: a section with a name for each entry`,
		"caches: {pip: }":                      `caches.pip is ""; allowed: no empty entry`,
		"caches: {pip: {sauce: /a}}":           `caches.pip.sauce is no key; the keys of caches.pip are source, path`,
		"caches: {pip: {source: 7}}":           `caches.pip.source is 7; allowed: text`,
		"workspace: {export: refs/tags/*}":     `workspace.export is "refs/tags/*"; allowed: a list`,
		"rootfs: host\nrootfs: host":           `"rootfs" already set`,
		"limits: {pids: 3, pids: 4}":           `line 1: key "pids" already set`,
		"limits: {cpus: .inf}":                 `no key takes +Inf`,
		"a: [":                                 `line 1: did not find`,
	} {
		c := Default(16 * gib)
		err := Parse([]byte(text), &c)
		if err == nil {
			err = c.Validate()
		}
		require.ErrorIs(t, err, ErrInvalid, text)
		require.ErrorContains(t, err, want, text)
		for _, word := range []string{"json", "unmarshal", "Go ", "int64", "[]string", "uint32"} {
			require.NotContains(t, err.Error(), word, text)
		}
	}
}

func TestLayoutExportsAndCachesAreReadFromTheFile(t *testing.T) {
	c := Default(16 * gib)
	require.Equal(t, IsolatedLayout, c.Workspace.GitLayout, "the default: commands write nothing of the base clone")
	require.NoError(t, Parse([]byte(`
workspace: {git_layout: shared, export: ["refs/tags/*"]}
caches: {pip: {source: /srv/cache/pip, path: .cache/pip}}
`), &c))
	require.NoError(t, c.Validate())
	require.Equal(t, SharedLayout, c.Workspace.GitLayout)
	require.Equal(t, []string{"refs/tags/*"}, c.Workspace.Export)
	require.Equal(t, map[string]Cache{"pip": {Source: "/srv/cache/pip", Path: ".cache/pip"}}, c.Caches)
}

func TestAKeyWithoutAValueKeepsItsDefault(t *testing.T) {
	c := Default(16 * gib)
	require.NoError(t, Parse([]byte("limits:\nlog: {level: }\n"), &c))
	require.Equal(t, Default(16*gib), c)
}

func TestLoadNamesTheFileThatItCannotRead(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.yaml")
	_, err := Load(missing)
	require.ErrorContains(t, err, missing)
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	require.NoError(t, os.WriteFile(broken, []byte("a: [\n"), 0o600))
	_, err = Load(broken)
	require.ErrorContains(t, err, broken)
	c, err := Load("")
	require.NoError(t, err)
	require.NoError(t, c.Validate())
}

func TestWorkspacePathsAreRefusedByTheirText(t *testing.T) {
	c := Default(16 * gib)
	c.Workspace.Roots = []string{"/home", "/var/lib/x", "/"} // "/" can't pass Validate; it shows that prefixes win
	for path, why := range map[string]string{
		"":                                   "empty",
		"home/x":                             "not absolute",
		"/home/../etc":                       "not clean",
		"/home/x/":                           "not clean",
		"/home/a\nb":                         "control character",
		"/home/\xff":                         "not valid UTF-8",
		"/home/" + strings.Repeat("x", 4096): "PATH_MAX",
		"/etc/x":                             "under /etc",
		"/usr/local/src":                     "under /usr",
		"/lib64/x":                           "under /lib64",
		"/proc/1/root":                       "under /proc",
		"/var/lib/sandbox-agent/w":           "under /var/lib/sandbox-agent",
		"/var/lib":                           "agent's own folders",
	} {
		err := c.CheckWorkspacePath("workspace.worktree", path)
		require.ErrorIs(t, err, ErrPath, path)
		require.ErrorContains(t, err, why, path)
		require.ErrorContains(t, err, "workspace.worktree", path)
	}
	c.Workspace.Roots = []string{"/home", "/srv"}
	require.NoError(t, c.CheckWorkspacePath("w", "/home/x"))
	require.NoError(t, c.CheckWorkspacePath("w", "/srv/a/b c"))
	for _, outside := range []string{"/home", "/opt/x", "/homes/x"} {
		require.ErrorContains(t, c.CheckWorkspacePath("w", outside), "none of workspace.roots")
	}
}

// keys are all keys of the file, each with its path.
func keys(prefix string, t reflect.Type) []string {
	var all []string
	for f := range t.Fields() {
		name := prefix + f.Tag.Get("json")
		if f.Type.Kind() == reflect.Struct {
			all = append(all, keys(name+".", f.Type)...)
		} else {
			all = append(all, name)
		}
	}
	return all
}

func TestOperationsDescribesEveryKeyAndNoneThatDoesNothing(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "operations.md"))
	require.NoError(t, err)
	row := func(key string) string {
		section, last := key[:strings.LastIndex(key, ".")+1], key[strings.LastIndex(key, ".")+1:]
		for line := range strings.Lines(string(b)) {
			name, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
			if !strings.HasPrefix(line, "| ") {
				continue
			}
			if strings.Contains(name, "`"+key+"`") || strings.Contains(name, "`"+section) && strings.Contains(name, "`."+last+"`") {
				return line
			}
		}
		return ""
	}
	for _, key := range keys("", reflect.TypeFor[Config]()) {
		require.NotEmpty(t, row(key), key)
		require.NotContains(t, row(key), "accepted, not applied yet", key)
	}
}
