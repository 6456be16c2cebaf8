package containerd

import (
	"fmt"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// input is what the container's spec is made of.
type input struct {
	spec   runtime.Spec
	rootfs string // its root folder on the node
	cgroup string // of the sandbox
	// userns is the path of the user namespace that the container is to join.
	userns string
	// netns is the path of the network namespace that it is to join; empty: a new one.
	netns string
	// handed is how many descriptors receiptd is to wait for.
	handed int
	// oomScoreAdj is nil when there is nothing to set.
	oomScoreAdj *int
}

// ociSpec is what an OCI runtime is told, and all of it: nothing comes from a template, of containerd's or of anybody's.
//
// It has no seccomp profile: containers' usual ones refuse the namespaces that each command is put into; receiptd and pid1
// have filters of their own. It masks nothing: masks would cover parts of /proc, and then a command's own /proc could not be
// mounted ("mount too revealing"); pid1 masks that one. It has no limits: they are on the commands' cgroups, never on
// receiptd. Devices need no rule: nobody in a user namespace can make a node, and every mount but /dev's nodes is nodev.
func ociSpec(in input) *specs.Spec {
	args := []string{runtime.BinPath + "/receiptd", "--log"}
	if in.handed > 0 {
		args = append(args, fmt.Sprintf("--handover=%d", in.handed))
	}
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args: args, Cwd: "/", Env: []string{"HOME=/"},
			Capabilities: &specs.LinuxCapabilities{
				Bounding: hostkernel.Capabilities, Effective: hostkernel.Capabilities, Permitted: hostkernel.Capabilities,
			},
			NoNewPrivileges: true,
			OOMScoreAdj:     in.oomScoreAdj,
		},
		Root:     &specs.Root{Path: in.rootfs, Readonly: true},
		Hostname: hostkernel.Hostname,
		Mounts:   smallFileSystems(in.spec),
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.UserNamespace, Path: in.userns}, {Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
				{Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace, Path: in.netns}, {Type: specs.CgroupNamespace},
			},
			CgroupsPath:       in.cgroup + "/" + hostkernel.InitCgroup,
			Resources:         &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}},
			RootfsPropagation: "rprivate",
		},
	}
}

// smallFileSystems are the mounts that are made inside the container's namespaces.
func smallFileSystems(spec runtime.Spec) []specs.Mount {
	owner := fmt.Sprintf(",uid=%d,gid=%d", spec.IDs.CommandUID, spec.IDs.CommandGID)
	shm, tmp, home := hostkernel.SmallFileSystems(spec.Resources)
	return []specs.Mount{
		{Source: "proc", Destination: "/proc", Type: "proc", Options: []string{"nosuid", "nodev", "noexec"}},
		// Read-only once everything is in it.
		{Source: "tmpfs", Destination: "/dev", Type: "tmpfs", Options: []string{"nosuid", "nodev", "noexec", "strictatime", "mode=755", "size=64k", "nr_inodes=64", "ro"}},
		{Source: "devpts", Destination: "/dev/pts", Type: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "max=64"}},
		{Source: "shm", Destination: "/dev/shm", Type: "tmpfs", Options: append([]string{"nosuid", "nodev", "noexec"}, strings.Split(shm, ",")...)},
		{Source: "tmpfs", Destination: "/tmp", Type: "tmpfs", Options: append([]string{"nosuid", "nodev"}, strings.Split(tmp, ",")...)},
		{Source: "tmpfs", Destination: runtime.HomePath, Type: "tmpfs", Options: append([]string{"nosuid", "nodev"}, strings.Split(home+owner, ",")...)},
	}
}
