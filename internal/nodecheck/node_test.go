package nodecheck

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

func TestADistributionIsReadFromItsOSRelease(t *testing.T) {
	for text, want := range map[string]family{
		bookworm: debian, noble: debian, rhel9: rhel, rocky: rhel, talosOS: talos, bottle: bottlerocket, flat: flatcar, alpine: anyLinux, "": anyLinux,
		"ID='amzn'\n": rhel, "# a comment\nID_LIKE=\"something debian\"\nID=mine\n": debian,
	} {
		require.Equal(t, want, ParseOSRelease(text).family(), text)
	}
	require.Equal(t, OS{ID: "rhel", Like: []string{"fedora"}, Version: "9.4", Name: "Red Hat Enterprise Linux 9.4 (Plow)"}, ParseOSRelease(rhel9))
}

func TestWhatCoversProcIsSeen(t *testing.T) {
	const (
		root   = "1 0 254:0 / / rw - ext4 /dev/vda rw\n"
		proc   = "2 1 0:5 / /proc rw,nosuid - proc proc rw,hidepid=invisible\n"
		binfmt = "3 2 0:6 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n"
		kcore  = "4 2 0:7 /null /proc/kcore rw - devtmpfs devtmpfs rw\n"
		second = "5 2 0:8 / /proc rw - proc proc rw\n"
	)
	for text, want := range map[string]struct {
		masked  []string
		hidepid string
	}{
		root + proc:                          {nil, "invisible"},
		root + proc + binfmt:                 {nil, "invisible"},
		root + proc + binfmt + kcore:         {[]string{"/proc/kcore"}, "invisible"},
		root + proc + kcore + second:         {nil, ""},
		root + proc + kcore + second + kcore: {[]string{"/proc/kcore"}, ""},
	} {
		masked, hidepid := procMounts(text)
		require.Equal(t, want.masked, masked, text)
		require.Equal(t, want.hidepid, hidepid, text)
	}
}

func TestSmallFilesOfTheKernelAreRead(t *testing.T) {
	require.False(t, inUserns("         0          0 4294967295"))
	require.True(t, inUserns("         0     100000      65536"))
	require.False(t, inUserns(""), "a kernel without user namespaces")
	require.Equal(t, "integrity", chosen("none [integrity] confidentiality"))
	require.Empty(t, chosen(""))
	require.True(t, filtered("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"))
	require.False(t, filtered("Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t2\n"))
}

func TestVersionsAreJudged(t *testing.T) {
	require.Equal(t, Yes, judgeGit("/usr/bin/git: git version 2.39.5").Answer)
	require.Equal(t, Yes, judgeGit("/usr/bin/git: git version 3.0.0").Answer)
	require.Equal(t, Inconclusive, judgeGit("/usr/bin/git: git version 2.34.1").Answer)
	require.Equal(t, Inconclusive, judgeGit("/usr/bin/git: hello").Answer)
	require.Equal(t, Yes, judgeContainerd("/s", "v2.4.2").Answer)
	require.Equal(t, Yes, judgeContainerd("/s", "2.4.2+unknown").Answer)
	old := judgeContainerd("/s", "1.7.20")
	require.Equal(t, No, old.Answer)
	require.Contains(t, old.Remedy, "2.4")
	require.Equal(t, Inconclusive, judgeContainerd("/s", "unknown").Answer)
	untried := judgeContainerd("/s", "v2.1.4")
	require.Equal(t, Inconclusive, untried.Answer)
	require.Contains(t, untried.Detail, "nothing older than 2.4")
	require.Contains(t, untried.Remedy, "2.4")
	for _, f := range []struct {
		id     ID
		oldest string
	}{{Git, "Git 2.39"}, {ContainerdAPI, "containerd 2.4"}, {Runc, "runc 1.5"}} {
		require.Equal(t, f.oldest, row(f.id).Since, "the table says what is judged by")
	}
}

func TestADiskNeedsBytesAndInodes(t *testing.T) {
	require.Equal(t, Yes, enough("/s", leastBytes, leastInodes, 1<<20).Answer)
	require.Equal(t, No, enough("/s", leastBytes-1, leastInodes, 1<<20).Answer)
	require.Equal(t, No, enough("/s", leastBytes, leastInodes-1, 1<<20).Answer)
	require.Equal(t, Yes, enough("/s", leastBytes, 0, 0).Answer, "a file system without a bound of inodes")
}

func TestCNIsConfigurationIsTheOneThatIsUsed(t *testing.T) {
	conf, bin := t.TempDir(), t.TempDir()
	c := config.NetworkCNI{ConfDir: conf, BinDirs: []string{t.TempDir(), bin}}
	require.Equal(t, No, lookAtCNI(config.NetworkCNI{ConfDir: filepath.Join(conf, "absent")}).Answer)
	require.Equal(t, nof("%s has no configuration", conf), lookAtCNI(c))
	require.Equal(t, conf+" has no configuration named x", lookAtCNI(config.NetworkCNI{ConfDir: conf, Network: "x"}).Detail)
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(conf, name), []byte(text), 0o600))
	}
	write("05-readme.txt", "no configuration")
	write("10-first.conflist", `{"name":"first","plugins":[{"type":"bridge"},{"type":"portmap"}]}`)
	write("20-second.conf", `{"name":"second","type":"ptp"}`)
	require.NoError(t, os.WriteFile(filepath.Join(bin, "bridge"), nil, 0o700))
	f := lookAtCNI(c)
	require.Equal(t, No, f.Answer)
	require.Contains(t, f.Detail, ": portmap")
	require.Contains(t, f.Remedy, "bin_dirs")
	require.NoError(t, os.WriteFile(filepath.Join(bin, "portmap"), nil, 0o700))
	require.Equal(t, yes("%s", filepath.Join(conf, "10-first.conflist")), lookAtCNI(c))
	c.Network = "second"
	require.Contains(t, lookAtCNI(c).Detail, ": ptp", "the one that is named")
	c.Network = "third"
	require.Equal(t, No, lookAtCNI(c).Answer)
	write("00-broken.conf", "{")
	require.Equal(t, "mend the configuration", lookAtCNI(c).Remedy)
}

func TestKatasReportIsALineForEachItem(t *testing.T) {
	seen := kataFacts(kata.Report{Items: []kata.Item{
		{Name: "kvm", Answer: kata.No, Detail: "none", Remedy: "get one"},
		{Name: "shim", Answer: kata.Yes, Detail: "here"}, {Name: "vhost", Answer: kata.Inconclusive, Detail: "who knows"},
	}}, false)
	require.Equal(t, []Fact{{Answer: No, Detail: "none", Remedy: "get one"}}, seen[KVM])
	require.Equal(t, []Fact{{Answer: Yes, Subject: "shim", Detail: "here"}, {Answer: Inconclusive, Subject: "vhost", Detail: "who knows"}}, seen[Kata])
	absent := kata.Report{Items: []kata.Item{{Name: "shim", Answer: kata.No, Detail: "none", Remedy: "install it"}}}
	require.Equal(t, No, kataFacts(absent, true)[Kata][0].Answer)
	require.Equal(t, Inconclusive, kataFacts(absent, false)[Kata][0].Answer, "it may be in containerd's PATH")
}

func TestAShimmedProgramIsLookedForWhereContainerdLooks(t *testing.T) {
	theirs, ours, version := t.TempDir(), t.TempDir(), "1.5.3"
	t.Setenv("PATH", ours)
	program := func(dir, name string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho "+name+" version "+version+"\n"), 0o755))
	}
	look := func(binary, path string) Fact { return runcShimmed.look(t.Context(), binary, path) }

	require.Equal(t, Inconclusive, look("", "").Answer, "what is not in this process's PATH may be in containerd's")
	f := look("", theirs)
	require.Equal(t, No, f.Answer, "what is not in containerd's PATH is not there")
	require.Contains(t, f.Detail, "runc is not in containerd's PATH")

	program(ours, "runc")
	program(ours, runcShimmed.shim)
	require.Equal(t, Yes, look("", "").Answer, look("", ""))
	require.Equal(t, No, look("", theirs).Answer, "this process's PATH is not containerd's")

	program(theirs, "runc")
	f = look("", theirs)
	require.Equal(t, No, f.Answer, "nor is there a shim")
	require.Contains(t, f.Detail, "runc version 1.5.3; "+runcShimmed.shim)
	program(theirs, runcShimmed.shim)
	f = look("", theirs)
	require.Equal(t, Yes, f.Answer, f)
	require.Contains(t, f.Detail, filepath.Join(theirs, "runc"))

	require.Equal(t, No, look(filepath.Join(t.TempDir(), "runc"), "").Answer, "what is configured is there or not")
	require.Equal(t, Yes, look(filepath.Join(ours, "runc"), theirs).Answer)

	version = "1.1.15"
	program(theirs, "runc")
	f = look("", theirs)
	require.Equal(t, Inconclusive, f.Answer, f)
	require.Contains(t, f.Detail, "nothing older than 1.5 has been tried; "+filepath.Join(theirs, runcShimmed.shim))
}

func TestAProbeThatHangsIsInconclusiveAndIsNotStartedAgain(t *testing.T) {
	started, release := make(chan struct{}, 2), make(chan struct{})
	p := probe{ids: []ID{Git, Runc}, subject: t.Name(), look: func(context.Context) map[ID][]Fact {
		started <- struct{}{}
		<-release
		return map[ID][]Fact{Git: {yes("at last")}}
	}}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-started
		cancel()
	}()
	seen := bounded(ctx, p)
	for _, id := range p.ids {
		require.Equal(t, Inconclusive, seen[id][0].Answer)
	}
	again := bounded(ctx, p)
	require.Contains(t, again[Git][0].Detail, "an earlier look")
	require.Empty(t, started, "a second one would hang as well")
	close(release)
	require.Equal(t, "at last", bounded(t.Context(), p)[Git][0].Detail, "it came back")
}

func TestFactsGoFromTheChildToItsParent(t *testing.T) {
	f := Facts{}
	f.add(Proc, no(os.ErrPermission).of("x").do("y"))
	f.add(UserNS, Fact{Answer: No, Errno: 28})
	b, err := json.Marshal(f.Seen)
	require.NoError(t, err)
	var back map[ID][]Fact
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, f.Seen, back)
}
