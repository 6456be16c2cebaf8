package hostkernel

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// nodeFacts is what Check decides on.
type nodeFacts struct {
	euid        int
	sysAdmin    bool
	sysctls     map[string]string // empty where there is none
	hierarchies []Hierarchy
	mountAPI    error // of open_tree and mount_setattr
	userns      error // of making a user namespace
}

// Check says whether this node's kernel can host sandboxes; an error that wraps runtime.ErrUnavailable names what is missing,
// each with its remedy.
func Check() error {
	f, err := lookAtNode()
	if err != nil {
		return fmt.Errorf("checking this node: %w", err)
	}
	return f.verdict()
}

// sysctls that can switch off what a sandbox needs.
var sysctls = []string{
	"user.max_user_namespaces", "user.max_pid_namespaces", "user.max_mnt_namespaces", "user.max_net_namespaces",
	"user.max_ipc_namespaces", "user.max_uts_namespaces", "user.max_cgroup_namespaces",
	"kernel.unprivileged_userns_clone", apparmorSwitch,
}

// apparmorSwitch is no verdict: AppArmor lets those through that have CAP_SYS_ADMIN in their user namespace, as the agent and
// receiptd do, and those whose profile has the userns rule. It is a reason where a namespace was refused; that receiptd can make
// one too is tried when the agent starts (package nodecheck).
const apparmorSwitch = "kernel.apparmor_restrict_unprivileged_userns"

func lookAtNode() (nodeFacts, error) {
	f := nodeFacts{euid: os.Geteuid(), sysAdmin: hasSysAdmin(), sysctls: map[string]string{}}
	for _, name := range sysctls {
		if b, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/")); err == nil {
			f.sysctls[name] = strings.TrimSpace(string(b))
		}
	}
	var err error
	if f.hierarchies, err = Hierarchies(); err != nil {
		return f, err
	}
	if f.euid == 0 {
		f.mountAPI = tryMountAPI()
		f.userns = tryUserNamespace()
	}
	return f, nil
}

func hasSysAdmin() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}

func tryMountAPI() error {
	f, err := mounts.OpenSource("/")
	if err != nil {
		return err
	}
	defer f.Close()
	tree, err := mounts.Clone(f, mounts.Attr{ReadOnly: true})
	if err != nil {
		return err
	}
	return tree.Close()
}

func tryUserNamespace() error {
	ns, err := mounts.UserNamespace(mounts.Mapping{HostUID: 65534, HostGID: 65534})
	if err != nil {
		return err
	}
	return ns.Close()
}

// verdict joins all that is missing, each with its remedy.
func (f nodeFacts) verdict() error {
	var missing []error
	miss := func(format string, args ...any) { missing = append(missing, fmt.Errorf(format, args...)) }
	if f.euid != 0 || !f.sysAdmin {
		miss("the agent runs as uid %d, CAP_SYS_ADMIN %t: run it as root with CAP_SYS_ADMIN", f.euid, f.sysAdmin)
	}
	for _, name := range sysctls {
		v, known := f.sysctls[name]
		switch {
		case name == apparmorSwitch:
			if v == "1" && f.userns != nil {
				miss("%s is 1, and a user namespace was refused: give the agent, receiptd and pid1 an AppArmor profile with the userns rule, or sysctl -w %s=0", name, name)
			}
		case name == "user.max_user_namespaces" && !known:
			miss("there are no user namespaces: kernel option CONFIG_USER_NS")
		case known && v == "0" && name == "kernel.unprivileged_userns_clone":
			miss("%s is 0, so receiptd can't make user namespaces for commands: sysctl -w %s=1", name, name)
		case known && v == "0":
			miss("%s is 0: sysctl -w %s=%d", name, name, suggestedNamespaces)
		}
	}
	if _, err := SlotHierarchies(f.hierarchies, runtime.Resources{CPUs: 1}); err != nil {
		missing = append(missing, err)
	}
	if f.mountAPI != nil {
		miss("the mount API (open_tree, mount_setattr, move_mount) does not work: Linux 5.12 or later is needed: %w", f.mountAPI)
	}
	if f.userns != nil {
		missing = append(missing, f.userns)
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", runtime.ErrUnavailable, errors.Join(missing...))
}

const suggestedNamespaces = 15000
