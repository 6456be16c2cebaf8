package mounts

// Mount is one bind mount of a plan. Source and Target are absolute and clean; a workspace's are equal (P11).
type Mount struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// ReadOnly mounts are seals when Seal is set: they are re-checked at each command's start and end.
	ReadOnly bool `json:"readOnly"`
	Seal     bool `json:"seal"`
	// Idmap maps the on-disk owner to the command's uid. Mounts that only receiptd sees have their own mapping.
	Idmap bool `json:"idmap"`
}

// Plan is the mounts of a workspace, in the order in which they are made: a parent before what lies in it.
type Plan struct {
	Worktree string `json:"worktree"`
	// OwnerUID and OwnerGID own the worktree on disk.
	OwnerUID uint32  `json:"ownerUid"`
	OwnerGID uint32  `json:"ownerGid"`
	Mounts   []Mount `json:"mounts"`
}
