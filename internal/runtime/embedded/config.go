package embedded

import (
	"fmt"

	"github.com/opencontainers/cgroups"
	// Registers the device rules of cgroups with libcontainer; without it a v1 container can't be started.
	_ "github.com/opencontainers/cgroups/devices"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// containerConfig is what libcontainer is told: everything but the bind mounts, which a hook attaches (attach.go).
func containerConfig(spec runtime.Spec, rootfs, cgroup string, hook func(*specs.State) error) *configs.Config {
	ids := spec.IDs
	return &configs.Config{
		Rootfs: rootfs,
		// Keeps the nosuid and nodev that the hook has set.
		Readonlyfs: true,
		Namespaces: configs.Namespaces{
			{Type: configs.NEWUSER}, {Type: configs.NEWPID}, {Type: configs.NEWNS}, {Type: configs.NEWIPC},
			{Type: configs.NEWUTS}, {Type: configs.NEWNET}, {Type: configs.NEWCGROUP},
		},
		UIDMappings: idMap(ids.HostBase, ids.Size, ids.CommandUID, ids.CommandHostUID),
		GIDMappings: idMap(ids.HostBase, ids.Size, ids.CommandGID, ids.CommandHostGID),
		Hostname:    hostkernel.Hostname,
		Networks:    []*configs.Network{{Type: "loopback"}},
		Cgroups: &cgroups.Cgroup{
			Path: cgroup + "/" + hostkernel.InitCgroup,
			// No limits: receiptd and the pid1s are never under the command's. Devices need no rule either: nobody
			// in a user namespace can make a device node, and every mount but /dev's six nodes is nodev.
			Resources: &cgroups.Resources{Devices: allDevices()},
		},
		RootPropagation: unix.MS_PRIVATE | unix.MS_REC,
		NoNewPrivileges: true,
		Capabilities: &configs.Capabilities{
			Bounding: hostkernel.Capabilities, Effective: hostkernel.Capabilities, Permitted: hostkernel.Capabilities,
		},
		Mounts:  smallFileSystems(spec),
		Devices: deviceList(),
		// No masked or read-only paths: they would cover parts of /proc, and then a command's own /proc could not be
		// mounted ("mount too revealing"); pid1 masks that one instead.
		Hooks: configs.Hooks{configs.CreateRuntime: configs.HookList{configs.NewFunctionHook(hook)}},
	}
}

// joinNetwork has the container join the network namespace at path, which is set up already. Empty: it gets a new one.
func joinNetwork(cfg *configs.Config, path string) {
	if path != "" {
		cfg.Namespaces.Add(configs.NEWNET, path)
		cfg.Networks = nil
	}
}

// idMap is that of hostkernel in libcontainer's words.
func idMap(base, size, id, own uint32) (out []configs.IDMap) {
	for _, m := range hostkernel.IDMap(base, size, id, own) {
		out = append(out, configs.IDMap{ContainerID: int64(m.ContainerID), HostID: int64(m.HostID), Size: int64(m.Size)})
	}
	return out
}

// allDevices is the one rule "everything": see containerConfig.
func allDevices() []*devices.Rule {
	return []*devices.Rule{{Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: true}}
}

func deviceList() []*devices.Device {
	var out []*devices.Device
	for _, d := range hostkernel.DeviceNodes {
		out = append(out, &devices.Device{
			Path: d.Path, FileMode: 0o666,
			Rule: devices.Rule{Type: devices.CharDevice, Major: d.Major, Minor: d.Minor, Permissions: "rwm", Allow: true},
		})
	}
	return out
}

// smallFileSystems are the mounts that have to be made inside the container's namespaces.
func smallFileSystems(spec runtime.Spec) []*configs.Mount {
	const plain = unix.MS_NOSUID | unix.MS_NODEV
	owner := fmt.Sprintf(",uid=%d,gid=%d", spec.IDs.CommandUID, spec.IDs.CommandGID)
	shm, tmp, home := hostkernel.SmallFileSystems(spec.Resources)
	return []*configs.Mount{
		{Source: "proc", Destination: "/proc", Device: "proc", Flags: plain | unix.MS_NOEXEC},
		// Read-only once everything is in it.
		{Source: "tmpfs", Destination: "/dev", Device: "tmpfs", Flags: plain | unix.MS_NOEXEC | unix.MS_STRICTATIME | unix.MS_RDONLY, Data: "mode=755,size=64k,nr_inodes=64"},
		{Source: "devpts", Destination: "/dev/pts", Device: "devpts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Data: "newinstance,ptmxmode=0666,mode=0620,max=64"},
		{Source: "shm", Destination: "/dev/shm", Device: "tmpfs", Flags: plain | unix.MS_NOEXEC, Data: shm},
		{Source: "tmpfs", Destination: "/tmp", Device: "tmpfs", Flags: plain, Data: tmp},
		{Source: "tmpfs", Destination: runtime.HomePath, Device: "tmpfs", Flags: plain, Data: home + owner},
	}
}
