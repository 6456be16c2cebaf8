package mounts

import "fmt"

// Ownership is how files of the worktree come to belong to the command inside and to their owner on disk.
type Ownership struct {
	// Idmap: by an idmapped mount; then the other two are 0.
	Idmap bool
	// CommandHostUID and CommandHostGID: the command's ids map to the on-disk owner itself.
	CommandHostUID, CommandHostGID uint32
}

// DecideOwnership chooses between an idmapped mount and, where a file system of the workspace can't do that, letting
// the command's uid be the on-disk owner's. The second is refused for root: a command's host uid must never be 0.
func DecideOwnership(p Plan, idmapWorks bool) (Ownership, error) {
	if idmapWorks {
		return Ownership{Idmap: true}, nil
	}
	if p.OwnerUID == 0 || p.OwnerGID == 0 {
		return Ownership{}, fmt.Errorf("%w: %q belongs to uid %d, gid %d, and its file system can't do idmapped mounts: "+
			"give it to an ordinary user (chown -R), or put it on ext4, xfs, btrfs or tmpfs (Linux 6.3 or later)",
			ErrWorkspace, p.Worktree, p.OwnerUID, p.OwnerGID)
	}
	return Ownership{CommandHostUID: p.OwnerUID, CommandHostGID: p.OwnerGID}, nil
}

// Mapping is the id mapping of a plan's idmapped mounts: the on-disk owner appears as the command's host ids.
func (p Plan) Mapping(hostUID, hostGID uint32) Mapping {
	m := Mapping{DiskUID: p.OwnerUID, HostUID: hostUID, DiskGID: p.OwnerGID, HostGID: hostGID}
	for _, x := range p.Mounts {
		if x.Sticky {
			m.KeepUID = SkeletonUID(p.OwnerUID)
		}
	}
	return m
}
