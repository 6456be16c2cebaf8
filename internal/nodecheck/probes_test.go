package nodecheck

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
)

// asRestricted is the name of a child of the tests: it puts itself under a restriction that can't be taken back, and looks.
const asRestricted = "nodecheck-restricted"

func TestMain(m *testing.M) {
	probeTime = 2 * time.Minute // no test passes or fails by it
	Init()
	if os.Args[0] == asRestricted {
		os.Exit(restricted(os.Args[1], os.Args[2:]))
	}
	os.Exit(m.Run())
}

// restricted prints what the probes of features see under a restriction.
func restricted(restriction string, ids []string) int {
	if err := restrictions[restriction](); err != nil {
		fmt.Fprintln(os.Stderr, restriction+":", err)
		return 1
	}
	f := Facts{Node: lookAtNode(), Seen: lookFor(ids)}
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		return 1
	}
	return 0
}

// lookFor runs the probes of features.
func lookFor(ids []string) map[ID][]Fact {
	c := config.Default(8 << 30)
	c.StateDir, c.Workspace.Roots = os.Getenv("STATE_DIR"), nil
	n, err := NeedsOf(&c, nil)
	if err != nil {
		return nil
	}
	seen := map[ID][]Fact{}
	for _, p := range probes(lookAtNode(), n) {
		if slices.ContainsFunc(p.ids, func(id ID) bool { return slices.Contains(ids, string(id)) }) {
			maps.Copy(seen, bounded(context.Background(), p))
		}
	}
	return seen
}

var restrictions = map[string]func() error{
	"none": func() error { return nil },
	"a look that is compared with the next one": lookTwice,
	// The limit is of the user namespace that it is written in.
	"no user namespaces": func() error { return os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0) },
	"no PID namespaces":  func() error { return os.WriteFile("/proc/sys/user/max_pid_namespaces", []byte("0"), 0) },
	"covered /proc": func() error {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		return unix.Mount("/dev/null", "/proc/version", "", unix.MS_BIND, "")
	},
	"a full disk": func() error {
		if err := mountState("size=1m"); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(os.Getenv("STATE_DIR"), "full"), make([]byte, 1<<20), 0o600)
	},
	"a read-only disk":              func() error { return mountState("ro") },
	"a container's default profile": func() error { return refuse(namespaceCalls()) },
	"no nested user namespaces": func() error {
		return refuse(refusal{nr: unix.SYS_CLONE, arg: 0, mask: unix.CLONE_NEWCGROUP | unix.CLONE_NEWUSER, is: unix.CLONE_NEWUSER, e: unix.EPERM})
	},
	"no seccomp":            func() error { return refuse(refusal{nr: unix.SYS_SECCOMP, e: unix.EINVAL}) },
	"no openat2":            func() error { return refuse(refusal{nr: unix.SYS_OPENAT2, e: unix.ENOSYS}) },
	"no pidfd":              func() error { return refuse(refusal{nr: unix.SYS_PIDFD_SEND_SIGNAL, e: unix.ENOSYS}) },
	"no mount API":          func() error { return refuse(refusal{nr: unix.SYS_MOUNT_SETATTR, e: unix.ENOSYS}) },
	"no overlay":            func() error { return refuse(refusal{nr: unix.SYS_FSOPEN, e: unix.ENODEV}) },
	"no netfilter":          func() error { return refuse(netlinkRefusal(unix.NETLINK_NETFILTER)) },
	"no socket diagnostics": func() error { return refuse(netlinkRefusal(unix.NETLINK_SOCK_DIAG)) },
	"no mount options": func() error {
		return refuse(refusal{nr: unix.SYS_MOUNT, arg: 4, mask: ^uint32(0), is: 0, not: true, e: unix.EINVAL})
	},
	"no Landlock": func() error { return refuse(refusal{nr: unix.SYS_LANDLOCK_CREATE_RULESET, e: unix.EOPNOTSUPP}) },
	"no clone3":   func() error { return refuse(refusal{nr: unix.SYS_CLONE3, e: unix.ENOSYS}) },
	"no vsock": func() error {
		return refuse(refusal{nr: unix.SYS_SOCKET, arg: 0, mask: ^uint32(0), is: unix.AF_VSOCK, e: unix.EAFNOSUPPORT})
	},
	"a disk that does not sync": func() error { return refuse(refusal{nr: unix.SYS_FDATASYNC, e: unix.EIO}) },
}

func mountState(options string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	var flags uintptr
	if options == "ro" {
		options, flags = "", unix.MS_RDONLY
	}
	return unix.Mount("tmpfs", os.Getenv("STATE_DIR"), "tmpfs", flags, options)
}

// refusal is a system call that answers e, where its argument arg, masked, is what stands here, or with not is something else.
type refusal struct {
	nr, arg  uint32
	mask, is uint32
	not      bool
	e        unix.Errno
}

func netlinkRefusal(protocol uint32) refusal {
	return refusal{nr: unix.SYS_SOCKET, arg: 2, mask: ^uint32(0), is: protocol, e: unix.EPERM}
}

// namespaceCalls is what the default profiles of container runtimes do without CAP_SYS_ADMIN: any new user namespace.
func namespaceCalls() refusal {
	return refusal{nr: unix.SYS_CLONE, arg: 0, mask: unix.CLONE_NEWUSER, is: unix.CLONE_NEWUSER, e: unix.EPERM}
}

// refuse loads a filter that allows everything else. Of the machine's own architecture alone: it is no defence.
func refuse(all ...refusal) error {
	const nr, args = 0, 16 // offsets in struct seccomp_data
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	var prog []unix.SockFilter
	for _, r := range all {
		compare := unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: r.is, Jf: 1}
		if r.not {
			compare.Jt, compare.Jf = 1, 0
		}
		prog = append(prog,
			load(nr), unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: r.nr, Jf: 4},
			load(args+8*r.arg), unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: r.mask},
			compare,
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(r.e)})
	}
	return seccomp.InstallAll(append(prog, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}))
}

// under gives the facts of features under a restriction. What of a restriction is a namespace's ends with the child.
func under(t *testing.T, restriction string, flags uintptr, ids ...ID) Facts {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{asRestricted, restriction}
	for _, id := range ids {
		cmd.Args = append(cmd.Args, string(id))
	}
	cmd.Env = append(os.Environ(), "STATE_DIR="+testkit.StateDir(t))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	if flags&unix.CLONE_NEWUSER != 0 {
		all := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1 << 31}}
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings, cmd.SysProcAttr.GidMappingsEnableSetgroups = all, all, true
	}
	require.NoError(t, cmd.Run(), "%s: %s", restriction, stderr.String())
	var f Facts
	require.NoError(t, json.Unmarshal(stdout.Bytes(), &f), stdout.String())
	for _, id := range ids {
		require.NotEmpty(t, f.Seen[id], id)
	}
	return f
}

// TestEachProbeSaysNoWhereTheThingIsTakenAwayAndYesWhereItIsNot takes one thing away at a time, from a child of its own.
func TestEachProbeSaysNoWhereTheThingIsTakenAwayAndYesWhereItIsNot(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.MountAPI)
	const own = unix.CLONE_NEWUSER | unix.CLONE_NEWNS
	cases := []struct {
		id    ID
		lacks string
		flags uintptr
		errno unix.Errno
	}{
		{UserNS, "no user namespaces", own, unix.ENOSPC},
		{PidNS, "no PID namespaces", own, unix.ENOSPC},
		{UserNS, "a container's default profile", 0, unix.EPERM},
		{NestedNS, "no nested user namespaces", 0, unix.EPERM},
		{Proc, "covered /proc", unix.CLONE_NEWNS, unix.EPERM},
		{NestedProc, "no mount options", 0, unix.EINVAL},
		{Seccomp, "no seccomp", 0, unix.EINVAL},
		{Openat2, "no openat2", 0, unix.ENOSYS},
		{Pidfd, "no pidfd", 0, unix.ENOSYS},
		{MountAPI, "no mount API", 0, unix.ENOSYS},
		{Overlay, "no overlay", 0, unix.ENODEV},
		{Nftables, "no netfilter", 0, unix.EPERM},
		{IngressAnswer, "no netfilter", 0, unix.EPERM},
		{Conntrack, "no netfilter", 0, unix.EPERM},
		{Egress, "no netfilter", 0, unix.EPERM},
		{SockDestroy, "no socket diagnostics", 0, unix.EPERM},
		{Landlock, "no Landlock", 0, unix.EOPNOTSUPP},
		{CloneInto, "no clone3", 0, unix.ENOSYS},
		{Vsock, "no vsock", 0, unix.EAFNOSUPPORT},
		{Fsync, "a disk that does not sync", 0, unix.EIO},
		{StateSpace, "a full disk", unix.CLONE_NEWNS, 0},
		{StateSpace, "a read-only disk", unix.CLONE_NEWNS, 0},
		{Fsync, "a read-only disk", unix.CLONE_NEWNS, unix.EROFS},
	}
	asked := map[uintptr][]ID{}
	for _, c := range cases {
		asked[c.flags] = append(asked[c.flags], c.id)
	}
	controls := map[uintptr]Facts{}
	for flags, ids := range asked {
		controls[flags] = under(t, "none", flags, ids...)
	}
	for _, c := range cases {
		t.Run(string(c.id)+", "+c.lacks, func(t *testing.T) {
			t.Parallel()
			with := controls[c.flags]
			if row(c.id).OlderThan(with.Node.Kernel) {
				t.Skipf("%s came with %s", c.id, row(c.id).Since)
			}
			if _, err := os.Stat("/lib/modules/" + with.Node.Kernel); err != nil && with.Seen[c.id][0].Answer == No && slices.Contains([]ID{Overlay, Nftables, IngressAnswer, Conntrack, Egress}, c.id) {
				t.Skip("this machine has no modules to load (an emulated guest)")
			}
			require.Equal(t, Yes, with.Seen[c.id][0].Answer, with.Seen[c.id])
			without := under(t, c.lacks, c.flags, c.id)
			require.Equal(t, No, without.Seen[c.id][0].Answer, without.Seen[c.id])
			require.Equal(t, c.errno, unix.Errno(without.Seen[c.id][0].Errno), without.Seen[c.id])
		})
	}
}

// TestRulesAtAnInterfacesIngressAreTriedToo: what works in a table of IP alone does not keep a sandbox from the node.
func TestRulesAtAnInterfacesIngressAreTriedToo(t *testing.T) {
	testkit.Need(t, testkit.Root)
	f := tryNftables()
	if f.Answer == No {
		t.Skipf("this machine has not all kinds of rules: %s", f.Detail)
	}
	require.Contains(t, f.Detail, "fib at ingress work")
	is := probeIngress.Device
	defer func() { probeIngress.Device = is }()
	probeIngress.Device = strings.Repeat("x", unix.IFNAMSIZ) // Linux takes one that is not there, from 6.16 on
	f = tryNftables()
	require.Equal(t, No, f.Answer, "where an interface takes no rules")
	require.Contains(t, f.Detail, "chains at ingress: ")
	require.NotContains(t, f.Detail, ";", "and what stands on them is not blamed")
}

func TestARestrictionIsSeenAndItsRemedyNamed(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.UserNamespaces)
	n := needs(t, nil)
	for _, c := range []struct {
		lacks string
		id    ID
		flags uintptr
		says  string
	}{
		{"no user namespaces", UserNS, unix.CLONE_NEWUSER | unix.CLONE_NEWNS, "sysctl"},
		{"a container's default profile", UserNS, 0, "Unconfined"},
		{"covered /proc", Proc, unix.CLONE_NEWNS, "covered (/proc/version)"},
	} {
		l := Judge(under(t, c.lacks, c.flags, c.id), n).of(c.id)
		require.Equal(t, Missing, l.Verdict, c.lacks)
		require.Contains(t, l.Remedy, c.says, c.lacks)
	}
}

// TestALackInWhatIsNeededFirstIsNotTakenForTheRest: without a user namespace nothing can be said of what is made in it.
func TestALackInWhatIsNeededFirstIsNotTakenForTheRest(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.UserNamespaces)
	f := under(t, "no user namespaces", unix.CLONE_NEWUSER|unix.CLONE_NEWNS, Proc)
	for _, id := range []ID{Proc, NestedNS, NestedProc, Seccomp} {
		require.Equal(t, Inconclusive, f.Seen[id][0].Answer, id)
	}
	f = under(t, "covered /proc", unix.CLONE_NEWNS, Proc)
	for _, id := range []ID{NestedNS, NestedProc, Seccomp} {
		require.Equal(t, Inconclusive, f.Seen[id][0].Answer, id)
	}
}

func TestIdmappedMountsAreTriedOnTheFileSystemThatIsMeant(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.MountAPI)
	dir := testkit.StateDir(t)
	require.Equal(t, Yes, tryIdmap(dir).Answer, tryIdmap(dir))
	absent := tryIdmap(filepath.Join(dir, "not", "yet"))
	require.Equal(t, Yes, absent.Answer)
	require.Contains(t, absent.Detail, "looked at "+dir)
	f := tryIdmap("/proc/self")
	require.Equal(t, No, f.Answer, "procfs has no idmapped mounts: %v", f)
	require.Equal(t, "/proc/self", f.Subject)
}

// TestNothingIsLeftBehind looks from a child with a mount namespace of its own, where what the machine mounts meanwhile does
// not come.
func TestNothingIsLeftBehind(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.UserNamespaces)
	testkit.Leaks(t)
	under(t, "a look that is compared with the next one", unix.CLONE_NEWNS)
}

// lookTwice compares what this process holds: what the first look brings, as the runtime's own descriptors, may stay.
func lookTwice() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	dir := os.Getenv("STATE_DIR")
	c := config.Default(8 << 30)
	c.StateDir, c.Workspace.Roots = dir, []string{dir}
	n, err := NeedsOf(&c, Runtimes)
	if err != nil {
		return err
	}
	Look(context.Background(), n, Everything)
	before := holds(dir)
	Look(context.Background(), n, Everything)
	if after := holds(dir); !slices.Equal(before, after) {
		return fmt.Errorf("before:\n%s\nafter:\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
	return nil
}

// holds are this process's mounts, descriptors (without those that the Go runtime polls with) and children, and the entries of
// a folder.
func holds(dir string) []string {
	all := []string{read("/proc/self/mountinfo")}
	for _, fd := range names("/proc/self/fd") {
		link, err := os.Readlink("/proc/self/fd/" + fd)
		if err == nil && !strings.HasPrefix(link, "anon_inode:[event") && link != "/proc/"+strconv.Itoa(os.Getpid())+"/fd" {
			all = append(all, link)
		}
	}
	for _, task := range names("/proc/self/task") {
		if children := read("/proc/self/task/" + task + "/children"); children != "" {
			all = append(all, "children "+children)
		}
	}
	return append(all, names(dir)...)
}

func names(dir string) (all []string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestWithoutItsOwnProgramTheChildIsNotStarted(t *testing.T) {
	canStart.Store(false)
	defer canStart.Store(true)
	seen := trySandbox(t.Context(), true)
	require.Equal(t, Inconclusive, seen[NestedNS][0].Answer, "a program that does not call Init would do its own work instead")
}

func TestTheChecksOfAStartAreThoseThatStopIt(t *testing.T) {
	f := Look(t.Context(), needs(t, nil), Promises)
	require.Contains(t, f.Seen, Pidfd)
	require.Contains(t, f.Seen, NestedNS)
	for _, id := range []ID{Git, Idmap, Kata, ContainerdAPI, Landlock} {
		require.NotContains(t, f.Seen, id)
	}
}

func TestAContainerdThatDoesNotListenIsNotThere(t *testing.T) {
	c := config.Default(8 << 30).Containerd
	c.Address = filepath.Join(t.TempDir(), "containerd.sock")
	require.Equal(t, No, askContainerd(t.Context(), c).Answer)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.Address})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	f := askContainerd(t.Context(), c)
	require.Equal(t, No, f.Answer, "a socket that nobody listens at")
	require.Contains(t, f.Detail, c.Address)
}
