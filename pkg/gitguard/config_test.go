package gitguard

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func writeConfig(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func readText(t testing.TB, text string) Config {
	t.Helper()
	c, err := parseConfig(t.Context(), "config", []byte(text))
	require.NoError(t, err)
	return c
}

// gitReads is what git config --list says of a file, asked without any code of this package.
func gitReads(t testing.TB, path string) (ok bool, entries []Entry) {
	t.Helper()
	code, out := tryGit(t, "/", "config", "--file", path, "--no-includes", "-z", "--list")
	if code != 0 {
		return false, nil
	}
	for _, field := range strings.Split(strings.TrimSuffix(out, "\x00"), "\x00") {
		if field == "" {
			continue
		}
		key, value, has := strings.Cut(field, "\n")
		entries = append(entries, Entry{key, value, has})
	}
	return true, entries
}

// TestP12TheGuardReadsHostileConfigurationsAsGitDoes goes through testdata/config: each NAME.want has a line for each
// finding, "kind key line", or "error" and a part of the message.
func TestP12TheGuardReadsHostileConfigurationsAsGitDoes(t *testing.T) {
	wants, err := filepath.Glob("testdata/config/*.want")
	require.NoError(t, err)
	require.NotEmpty(t, wants)
	for _, want := range wants {
		path, err := filepath.Abs(strings.TrimSuffix(want, ".want"))
		require.NoError(t, err)
		t.Run(filepath.Base(path), func(t *testing.T) {
			b, err := os.ReadFile(want)
			require.NoError(t, err)
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			ok, entries := gitReads(t, path)
			c, err := ReadConfig(t.Context(), path)
			if part, isError := strings.CutPrefix(string(b), "error"); isError {
				require.ErrorIs(t, err, ErrConfig)
				require.ErrorContains(t, err, strings.TrimSpace(part))
				require.ErrorContains(t, err, path)
				require.True(t, !ok || bytes.Contains(raw, []byte{0}), "git reads it")
				return
			}
			require.NoError(t, err)
			require.True(t, ok)
			require.Equal(t, entries, c.Entries)
			got := ""
			for _, f := range c.Locate(t.Context(), c.Judge()) {
				got += fmt.Sprintf("%s %s %d\n", f.Kind, f.Key, f.Line)
				require.Equal(t, path, f.File)
				require.NotEmpty(t, f.Why)
				require.NotEmpty(t, f.Remedy)
				require.NotContains(t, f.Key+f.Why+f.Remedy, "hunter2")
			}
			require.Equal(t, string(b), got)
		})
	}
}

// dangerous are the keys that run a program or move a path, with a value that does.
var dangerous = map[Kind][]string{
	Include: {"include.path", "includeIf.gitdir:/x/.path"},
	Filter:  {"filter.x.clean", "filter.x.smudge", "filter.x.process", "filter.x.required"},
	Program: {
		"core.fsmonitor", "core.hooksPath", "core.pager", "core.editor", "core.sshCommand", "core.gitProxy", "core.askPass", "core.alternateRefsCommand",
		"hook.x.command", "hook.x.event", "hook.x.enabled", "hook.jobs", "diff.external", "diff.x.command", "diff.x.textconv", "merge.x.driver", "pager.log", "sequence.editor", "gpg.program",
		"gpg.x509.program", "gpg.ssh.program", "gpg.ssh.defaultKeyCommand", "trailer.x.command", "trailer.x.cmd", "interactive.diffFilter", "alias.x", "alias.x.command",
		"gc.recentObjectsHook", "credential.helper", "credential.https://example.org.helper", "imap.tunnel", "sendemail.smtpServer", "sendemail.x.sendmailCmd",
		"difftool.x.cmd", "difftool.x.path", "mergetool.x.cmd", "mergetool.x.path", "man.x.cmd", "man.x.path", "browser.x.cmd", "browser.x.path", "guitool.x.cmd",
		"instaweb.httpd", "tar.x.command", "uploadpack.packObjectsHook", "branch.x.mergeOptions", "pull.twohead",
	},
	PathMoving: {
		"core.worktree", "core.attributesFile", "core.excludesFile", "commit.template", "mailmap.file", "blame.ignoreRevsFile", "init.templateDir",
		"diff.orderFile", "fsck.skipList", "gpg.ssh.allowedSignersFile", "format.outputDirectory", "core.preferSymlinkRefs", "submodule.x.gitdir",
	},
	Remote: {
		"remote.x.uploadpack", "remote.x.receivepack", "remote.x.vcs", "url.x.insteadOf", "url.x.pushInsteadOf", "protocol.allow", "protocol.ext.allow",
		"fetch.bundleURI", "http.sslCert", "http.sslKey", "http.cookieFile", "http.https://example.org/.extraHeader", "http.proxy", "http.sslCAInfo",
	},
	Clone:     {"remote.x.promisor", "remote.x.partialCloneFilter", "core.sparseCheckout"},
	Extension: {"extensions.worktreeConfig", "extensions.partialClone", "extensions.compatObjectFormat", "extensions.submodulePathConfig", "extensions.x"},
	Unknown:   {"vendor.x", "vendor.x.y", "lfs.url", "commit.gpgSign", "submodule.x.url", "core.splitIndex"},
}

// spellings write a key in the ways that Git takes for the same.
var spellings = map[string]func(section, sub, variable string) string{
	"as documented": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\n\t%s = true\n", section, quoted(sub), variable)
	},
	"other case": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\n%s=tRuE\n", strings.ToUpper(section), quoted(sub), strings.ToUpper(variable))
	},
	"on the section's line": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s] %s = true\n", section, quoted(sub), variable)
	},
	"continued": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\n%s = \\\n\\\ntr\\\nue\n", section, quoted(sub), variable)
	},
	"CRLF": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\r\n\t%s = true\r\n", section, quoted(sub), variable)
	},
	"commented": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]# x\n%s=\"true\"; off\n", section, quoted(sub), variable)
	},
	"without a value": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\n%s\n", section, quoted(sub), variable)
	},
	"quoted in parts": func(section, sub, variable string) string {
		return fmt.Sprintf("[%s%s]\n%s=t\"r\"ue\n", section, quoted(sub), variable)
	},
	"odd subsection": func(section, sub, variable string) string {
		if sub != "" {
			sub = `we.ird ]"\.x#;`
		}
		return fmt.Sprintf("[%s%s]\n%s = true\n", section, quoted(sub), variable)
	},
	"old style": func(section, sub, variable string) string {
		if sub != "" && strings.Trim(sub, "abcdefghijklmnopqrstuvwxyz0123456789") == "" {
			return fmt.Sprintf("[%s.%s]\n%s = true\n", section, strings.ToUpper(sub), variable)
		}
		return fmt.Sprintf("[%s%s]\n%s = true\n", section, quoted(sub), variable)
	},
}

func quoted(sub string) string {
	if sub == "" {
		return ""
	}
	return ` "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(sub) + `"`
}

func TestP12EveryDangerousKeyIsFoundHoweverItIsSpelled(t *testing.T) {
	for name, spell := range spellings {
		for _, prefix := range []string{"", "\ufeff"} {
			t.Run(fmt.Sprintf("%s%q", name, prefix), func(t *testing.T) {
				text, want, keys := prefix, []Kind(nil), []string(nil)
				for kind, all := range dangerous {
					for _, key := range all {
						if name == "without a value" && strings.HasPrefix(key, "pager.") || name != "without a value" && name != "" && key == "pager.log" {
							continue // true and false are harmless there
						}
						section, sub, _, variable := Entry{Key: key}.split()
						text += spell(section, sub, variable)
						want, keys = append(want, kind), append(keys, key)
					}
				}
				c := readText(t, text)
				require.Len(t, c.Entries, len(want), "git must see each of them")
				found := c.Judge()
				require.Len(t, found, len(want), "%v", found)
				for i, f := range found {
					require.Equal(t, want[i], f.Kind, "%s: %+v", keys[i], f)
					if name != "odd subsection" && name != "old style" {
						require.True(t, strings.EqualFold(keys[i], f.Key), "%s: %+v", keys[i], f)
					}
				}
			})
		}
	}
}

func TestP12OnlyWhatSurelyIsNoProgramIsLeftAlone(t *testing.T) {
	for line, found := range map[string]bool{
		"[pager]\nlog = less": true, "[pager]\nlog = true": false, "[pager]\nlog = 1": false, "[pager]\nlog = trueish": true,
		"[core]\nfsmonitor = off": false, "[core]\nfsmonitor = true": true, "[core]\nfsmonitor =": false, "[core]\nfsmonitor": true,
		"[submodule \"x\"]\nupdate = !rm": true, "[submodule \"x\"]\nupdate = none": true,
		"[remote \"x\"]\nurl = ext::sh": true, "[remote \"x\"]\nurl = EXT::sh": true, "[remote \"x\"]\nurl = /srv/x": false, "[remote \"x\"]\nurl = [::1]:x": false,
		"[http]\npostBuffer = 1": false, "[http]\nproxy = x": true,
		"[extensions]\nrefStorage = reftable": false, "[extensions]\nrefStorage = reftable:///tmp/refs": true, "[extensions]\nrefStorage = files://refs": true,
	} {
		require.Equal(t, found, len(readText(t, line).Judge()) == 1, line)
	}
	require.Equal(t, Program, readText(t, "[submodule \"x\"]\nupdate = !rm").Judge()[0].Kind)
	require.Equal(t, Unknown, readText(t, "[submodule \"x\"]\nupdate = none").Judge()[0].Kind)
}

func TestWhatRefusesWhichLayout(t *testing.T) {
	for kind, want := range map[Kind][2]bool{
		Include: {true, true}, Filter: {true, true}, Extension: {true, true}, Layout: {true, true}, Attribute: {true, true}, Clone: {true, true},
		Program: {false, true}, PathMoving: {false, true}, Remote: {false, true}, Unknown: {false, false}, Note: {false, false}, Kind("new"): {true, true},
	} {
		f := Finding{Kind: kind}
		require.Equal(t, want, [2]bool{f.Refuses("isolated"), f.Refuses("shared")}, kind)
		require.Equal(t, want[1], f.Refuses("none that is known"))
	}
}

func TestP12WhatIsNoPlainFileOfAReasonableSizeIsRefusedAtOnce(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		make func(path string) error
		says string
	}{
		"FIFO":   {func(p string) error { return unix.Mkfifo(p, 0o644) }, "FIFO"},
		"socket": {func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o644, 0) }, "no such device"},
		"link": {func(p string) error {
			return os.Symlink(writeConfig(t, "[core]\n"), p)
		}, "symbolic link"},
		"link to nothing": {func(p string) error { return os.Symlink("/nowhere", p) }, "symbolic link"},
		"folder":          {func(p string) error { return os.Mkdir(p, 0o755) }, "a folder"},
		"absent":          {func(string) error { return nil }, "it is not there"},
		"huge":            {func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("# x\n"), maxConfig/4+1), 0o644) }, "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, name)
			require.NoError(t, c.make(path))
			done := make(chan error, 1)
			go func() {
				_, err := ReadConfig(t.Context(), path)
				done <- err
			}()
			select {
			case err := <-done:
				require.ErrorIs(t, err, ErrConfig)
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, path)
			case <-time.After(time.Minute):
				t.Fatal("it hangs")
			}
		})
	}
	_, err := ReadConfig(t.Context(), "/proc/self/root"+writeConfig(t, "[core]\n"))
	require.ErrorIs(t, err, ErrConfig, "a magic link in the path")
}

func TestAConfigurationThatMayNotBeReadSaysSo(t *testing.T) {
	path := writeConfig(t, "[core]\n")
	require.NoError(t, os.Chmod(path, 0))
	err := asNobody(func() error {
		_, err := ReadConfig(t.Context(), path)
		return err
	})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorIs(t, err, unix.EACCES)
	require.ErrorContains(t, err, path)
}

// asNobody runs f on a thread that has no rights of root to files (setfsuid(2)), and ends with it.
func asNobody(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		unix.Setfsuid(nobody)
		done <- f()
	}()
	return <-done
}

func TestTheLargestConfigurationIsReadWhole(t *testing.T) {
	line := "\tfuture = x\n"
	text := "[core]\n" + strings.Repeat(line, (maxConfig-100)/len(line)) + "[filter \"x\"]\n\tclean = y\n"
	c, err := ReadConfig(t.Context(), writeConfig(t, text))
	require.NoError(t, err)
	found := c.Judge()
	require.Len(t, found, maxFindings)
	require.Equal(t, "filter.x.clean", found[0].Key, "what refuses comes first")
	require.Contains(t, found[maxFindings-1].Why, "more findings")
	require.Equal(t, strings.Count(text, "\n"), c.Locate(t.Context(), found[:1])[0].Line)
}

func TestASanitisedConfigurationHoldsWhatIsHarmlessAndNothingElse(t *testing.T) {
	c := readText(t, `[core]
	bare = false
	fsmonitor = /tmp/x
	hooksPath = .husky
	commitGraph = true
	logAllRefUpdates
[remote "we\"ird\\ .name"]
	url = https://user:pass@example.org/x
	url = ssh://git@example.org/y
	fetch = +refs/heads/*:refs/remotes/o/*
[user]
	name = " A # \"B\"; \\ \t\n\b "
[extensions]
	objectFormat = sha256
	refStorage = reftable
[alias]
	x = !y
[include]
	path = z
[vendor]
	a = b
`)
	text, leftOut, err := c.Sanitise(SanitiseOptions{})
	require.NoError(t, err)
	_, entries := gitReads(t, writeConfig(t, string(text)))
	require.Equal(t, []Entry{
		{"core.bare", "false", true},
		{"core.logallrefupdates", "", false},
		{`remote.we"ird\ .name.url`, "https://example.org/x", true},
		{`remote.we"ird\ .name.url`, "ssh://git@example.org/y", true},
		{`remote.we"ird\ .name.fetch`, "+refs/heads/*:refs/remotes/o/*", true},
		{"user.name", " A # \"B\"; \\ \t\n\b ", true},
		{"extensions.objectformat", "sha256", true},
		{"core.commitgraph", "false", true},
		{"core.fsmonitor", "false", true},
		{"gc.writecommitgraph", "false", true},
		{"fetch.writecommitgraph", "false", true},
		{"repack.updateserverinfo", "false", true},
		{"core.hookspath", "/dev/null", true},
	}, entries)
	var keys []string
	for _, f := range leftOut {
		keys = append(keys, f.Key)
	}
	require.Equal(t, []string{"core.fsmonitor", "core.hookspath", `remote.we"ird\ .name.url`, "alias.x", "include.path", "vendor.a"}, keys)

	text, leftOut, err = c.Sanitise(SanitiseOptions{Hooks: true})
	require.NoError(t, err)
	_, entries = gitReads(t, writeConfig(t, string(text)))
	require.Contains(t, entries, Entry{"core.hookspath", ".husky", true})
	require.NotContains(t, entries, Entry{"core.hookspath", "/dev/null", true})
	require.False(t, slices.ContainsFunc(leftOut, func(f Finding) bool { return f.Key == "core.hookspath" }))
}

func TestTheDigestIsOfTheFile(t *testing.T) {
	c, err := ReadConfig(t.Context(), writeConfig(t, "[core]\n\tbare = false\n"))
	require.NoError(t, err)
	require.Equal(t, "bc6c44e1", c.SHA256[:8])
}

func TestAListThatGitDidNotFinishIsNoList(t *testing.T) {
	for _, list := range []string{"core.bare\ntrue", "core.bare\ntrue\x00core.x", "\x00", "\nx\x00"} {
		_, err := ParseList([]byte(list))
		require.Error(t, err, "%q", list)
	}
	entries, err := ParseList([]byte("a.b\n\nc\n\x00a.d\x00"))
	require.NoError(t, err)
	require.Equal(t, []Entry{{"a.b", "\nc\n", true}, {"a.d", "", false}}, entries)
}

func TestTheSameConfigurationIsListedOnce(t *testing.T) {
	raw := []byte("[user]\n\tname = " + t.Name() + "\n")
	first, err := parseConfig(t.Context(), "x", raw)
	require.NoError(t, err)
	before := len(lists.of)
	again, err := parseConfig(t.Context(), "y", raw)
	require.NoError(t, err)
	require.Equal(t, first.Entries, again.Entries)
	require.Len(t, lists.of, before)
	for key := range lists.of {
		if key.sum == sha256.Sum256(raw) {
			lists.of[key] = []byte("remembered.key\n1\x00")
		}
	}
	again, err = parseConfig(t.Context(), "x", raw)
	require.NoError(t, err)
	require.Equal(t, []Entry{{Key: "remembered.key", Value: "1", HasValue: true}}, again.Entries, "git was not asked")
	// One byte more is another configuration.
	other, err := parseConfig(t.Context(), "x", append(raw, '#'))
	require.NoError(t, err)
	require.Equal(t, first.Entries, other.Entries)
	// What git refuses is asked again.
	before = len(lists.of)
	for range 2 {
		_, err = parseConfig(t.Context(), "x", []byte("[user"))
		require.ErrorIs(t, err, ErrConfig)
	}
	require.Len(t, lists.of, before)
}
