// Package gitjail runs trusted Git: in namespaces of its own, as the repository's owner, with a pinned environment and
// bounds on time, memory and output, and with nothing of the node in sight but the folders that it works on. What comes
// out of it is untrusted data. It keeps the doing half of promise P12. Only internal/agent and the packages below it
// may import it.
package gitjail

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Trusted Git runs in a jail, because what a command wrote into the repository or the worktree can make Git run a
// program, follow a link or hang, whatever its environment says (promise P12). The jail is this very program, executed
// again in namespaces of its own: it makes a root file system of nothing but the node's programs, read-only, and the
// folders that Git works on, gives up every privilege, becomes the repository's owner, and then executes Git. Nothing
// else of the node is there: no network, no sockets, no secrets, no other process.

// jailName is argv[0] of a process that becomes a jail; jailVar has its jailSpec.
const (
	jailName = "sandbox-agent-git-jail"
	jailVar  = "SANDBOX_AGENT_GIT_JAIL"
	// jailFailed is the exit code of a jail that could not be made; Git's own codes are 0 to 255 too, so the message counts.
	jailFailed    = 125
	jailComplaint = "making the jail of trusted Git:"
)

type jailSpec struct {
	Owner  hostfs.Owner `json:"owner"`
	Dir    string       `json:"dir"`
	Mounts []Mount      `json:"mounts"`
	// Session: it serves calls from its socket instead of being one run of Git.
	Session bool `json:"session"`
	Finish  bool `json:"finish"`
}

// init and not a call in main: every program that links this package, test binaries included, can be a jail.
func init() {
	if len(os.Args) == 0 || os.Args[0] != jailName {
		return
	}
	runtime.LockOSThread()
	fmt.Fprintln(os.Stderr, jailComplaint, becomeGit())
	os.Exit(jailFailed)
}

// variable hands the description to a process that becomes a jail.
func (s jailSpec) variable() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings and numbers
	}
	return jailVar + "=" + string(b)
}

func jailAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Setpgid:    true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
}

// becomeGit answers only when something fails.
func becomeGit() error {
	var spec jailSpec
	if err := json.Unmarshal([]byte(os.Getenv(jailVar)), &spec); err != nil {
		return fmt.Errorf("reading its description: %w", err)
	}
	if err := enterRoot(spec); err != nil {
		return err
	}
	if err := bound(); err != nil {
		return err
	}
	if err := giveUpPrivileges(spec.Owner, spec.Finish); err != nil {
		return err
	}
	if err := os.Chdir(spec.Dir); err != nil {
		return fmt.Errorf("entering its folder: %w", err)
	}
	path, err := exec.LookPath("git")
	if err != nil {
		return fmt.Errorf("no git in %s: install it (apt install git): %w", gitguard.Path, err)
	}
	if spec.Session {
		return serve(path)
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, jailVar+"=") })
	return fmt.Errorf("executing %s: %w", path, syscall.Exec(path, append([]string{"git"}, os.Args[1:]...), env))
}

// programs are the parts of the node's root file system that Git needs; what is a symbolic link there is one in the jail.
var programs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"}

// enterRoot replaces the root file system by the jail's. Sources are opened before anything covers them.
func enterRoot(spec jailSpec) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making its mounts private: %w", err)
	}
	j := &jailRoot{}
	for _, p := range programs {
		if err := j.add(p, mounts.Attr{ReadOnly: true, Recursive: true}); err != nil {
			return err
		}
	}
	// Git names its temporary files with random bytes (wrapper.c, csprng_bytes).
	for _, dev := range []string{"/dev/null", "/dev/urandom"} {
		if err := j.add(dev, mounts.Attr{Devices: true, NoExec: true}); err != nil {
			return err
		}
	}
	for i, m := range spec.Mounts {
		if err := j.addMount(spec.Mounts, i, m); err != nil {
			return err
		}
	}
	return j.enter(spec.Dir)
}

// jailRoot collects what goes where.
type jailRoot struct {
	trees []*os.File
	paths []string
	links map[string]string
}

func (j *jailRoot) add(path string, a mounts.Attr) error {
	if target, err := os.Readlink(path); err == nil {
		if j.links == nil {
			j.links = map[string]string{}
		}
		j.links[path] = target
		return nil
	}
	return j.bind(path, path, a)
}

func (j *jailRoot) bind(source, target string, a mounts.Attr) error {
	src, err := mounts.OpenSource(source)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening %s: %w", source, err)
	}
	defer src.Close()
	tree, err := mounts.Clone(src, a)
	if err != nil {
		return fmt.Errorf("cloning the mount of %s: %w", source, err)
	}
	j.trees, j.paths = append(j.trees, tree), append(j.paths, target)
	return nil
}

// addMount adds one of the caller's mounts. An empty one gets mount points for those that lie directly in it.
func (j *jailRoot) addMount(all []Mount, i int, m Mount) error {
	if !m.Empty {
		return j.bind(m.Source, m.Target, mounts.Attr{ReadOnly: m.ReadOnly})
	}
	tree, err := mounts.NewTmpfs(map[string]string{"mode": "0755", "size": "64k", "nr_inodes": "64"})
	if err != nil {
		return err
	}
	for _, x := range all[i+1:] {
		if filepath.Dir(x.Target) != m.Target {
			continue
		}
		if err := unix.Mkdirat(int(tree.Fd()), filepath.Base(x.Target), 0o755); err != nil {
			return fmt.Errorf("making the mount point %s: %w", x.Target, err)
		}
	}
	if err := mounts.SetAttr(tree, mounts.Attr{ReadOnly: true, NoExec: true}); err != nil {
		return err
	}
	j.trees, j.paths = append(j.trees, tree), append(j.paths, m.Target)
	return nil
}

// enter builds the root file system over the node's /tmp, which nobody else sees in this mount namespace, and moves in.
func (j *jailRoot) enter(dir string) error {
	const at = "/tmp"
	root, err := mounts.NewTmpfs(map[string]string{"mode": "0755", "size": "1m", "nr_inodes": "256"})
	if err != nil {
		return err
	}
	over, err := mounts.OpenSource(at)
	if err != nil {
		return err
	}
	if err := mounts.Attach(root, over); err != nil {
		return err
	}
	for _, d := range []string{"/proc", dir} {
		if err := os.MkdirAll(at+d, 0o755); err != nil {
			return err
		}
	}
	for path, target := range j.links {
		if err := os.Symlink(target, at+path); err != nil {
			return err
		}
	}
	for i, tree := range j.trees {
		if err := j.attach(root, at, tree, j.paths[i]); err != nil {
			return fmt.Errorf("mounting %s: %w", j.paths[i], err)
		}
	}
	if err := unix.Mount("proc", at+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting its /proc: %w", err)
	}
	if err := mounts.SetAttr(root, mounts.Attr{ReadOnly: true, NoExec: true}); err != nil {
		return err
	}
	if err := os.Chdir(at); err != nil {
		return err
	}
	// The old root ends up on top of the new one, and is taken off (pivot_root(2), "pivot_root(".", ".")").
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("changing its root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("letting go of the node's root: %w", err)
	}
	return os.Chdir("/")
}

func (j *jailRoot) attach(root *os.File, at string, tree *os.File, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(tree.Fd()), &st); err != nil {
		return err
	}
	// The mount point may lie in what was attached before: the worktree in the repository's folder, say. It is there then.
	if _, err := os.Lstat(at + path); errors.Is(err, os.ErrNotExist) {
		if err := makeMountPoint(at+path, st.Mode&unix.S_IFMT == unix.S_IFDIR); err != nil {
			return err
		}
	}
	target, err := mounts.OpenBeneath(root, path)
	if err != nil {
		return err
	}
	defer target.Close()
	return mounts.Attach(tree, target)
}

func makeMountPoint(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, nil, 0o600)
}

// gitMemory bounds the address space of trusted Git, bytes: a small object can claim to be as large as it likes. Packs are
// mapped in windows, so that a large repository does not need more.
const gitMemory = 4 << 30

// bound makes Git the kernel's choice before the agent when the node is short of memory, and limits what it can take.
func bound() error {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0); err != nil {
		return fmt.Errorf("raising its OOM score: %w", err)
	}
	for resource, value := range map[int]uint64{unix.RLIMIT_AS: gitMemory, unix.RLIMIT_CORE: 0} {
		var old unix.Rlimit
		if err := unix.Getrlimit(resource, &old); err != nil {
			return fmt.Errorf("reading limit %d: %w", resource, err)
		}
		value = min(value, old.Max)
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: value, Max: value}); err != nil {
			return fmt.Errorf("setting limit %d to %d: %w", resource, value, err)
		}
	}
	return nil
}

// giveUpPrivileges becomes the owner, for good, with no capability: also where the owner is root. With finish it goes on
// when the agent ends.
func giveUpPrivileges(o hostfs.Owner, finish bool) error {
	for c := uintptr(0); c < 64; c++ {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err == unix.EINVAL {
			break // past the kernel's last capability
		} else if err != nil {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("dropping supplementary groups: %w", err)
	}
	if err := syscall.Setresgid(int(o.GID), int(o.GID), int(o.GID)); err != nil {
		return fmt.Errorf("becoming gid %d: %w", o.GID, err)
	}
	if err := syscall.Setresuid(int(o.UID), int(o.UID), int(o.UID)); err != nil {
		return fmt.Errorf("becoming uid %d: %w", o.UID, err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("giving up capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("setting no_new_privs: %w", err)
	}
	if finish {
		return nil
	}
	// Git must not outlive the agent: a later one would find a worktree that is still being written. The change of uid has
	// cleared what was set before.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("asking to end with the agent: %w", err)
	}
	return nil
}
