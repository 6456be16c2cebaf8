package nodecheck

import "github.com/sandbox-agent/sandbox-agent/internal/nodecheck/feature"

// The table is in a package of its own, so that tests of what this package stands on can ask it when they may be skipped.
type (
	// ID names a feature of a node.
	ID = feature.ID
	// Need is what of a configuration asks for a feature.
	Need = feature.Need
	// Feature is a row of the table.
	Feature = feature.Feature
)

// The features.
const (
	Rights        = feature.Rights
	Kernel        = feature.Kernel
	MountAPI      = feature.MountAPI
	Openat2       = feature.Openat2
	Pidfd         = feature.Pidfd
	UserNS        = feature.UserNS
	IDMaps        = feature.IDMaps
	PidNS         = feature.PidNS
	MountNS       = feature.MountNS
	NetNS         = feature.NetNS
	IpcNS         = feature.IpcNS
	UtsNS         = feature.UtsNS
	CgroupNS      = feature.CgroupNS
	NestedNS      = feature.NestedNS
	Proc          = feature.Proc
	NestedProc    = feature.NestedProc
	Ptrace        = feature.Ptrace
	Seccomp       = feature.Seccomp
	CgroupPids    = feature.CgroupPids
	CgroupMemory  = feature.CgroupMemory
	CgroupCPU     = feature.CgroupCPU
	CgroupKill    = feature.CgroupKill
	CloneInto     = feature.CloneInto
	PidMax        = feature.PidMax
	Hidepid       = feature.Hidepid
	StateSpace    = feature.StateSpace
	Fsync         = feature.Fsync
	Idmap         = feature.Idmap
	SockDestroy   = feature.SockDestroy
	Nftables      = feature.Nftables
	IngressAnswer = feature.IngressAnswer
	Conntrack     = feature.Conntrack
	Egress        = feature.Egress
	Overlay       = feature.Overlay
	Landlock      = feature.Landlock
	IoUring       = feature.IoUring
	Lockdown      = feature.Lockdown
	Vsock         = feature.Vsock
	KVM           = feature.KVM
	Git           = feature.Git
	ContainerdAPI = feature.ContainerdAPI
	Runc          = feature.Runc
	GVisor        = feature.GVisor
	Kata          = feature.Kata
	CNI           = feature.CNI
)

// What can need something.
const (
	NeedAgent      = feature.NeedAgent
	NeedShared     = feature.NeedShared
	NeedContainerd = feature.NeedContainerd
	NeedRunc       = feature.NeedRunc
	NeedGVisor     = feature.NeedGVisor
	NeedKata       = feature.NeedKata
	NeedImage      = feature.NeedImage
	NeedNetwork    = feature.NeedNetwork
	NeedCNI        = feature.NeedCNI
	NeedNobody     = feature.NeedNobody
)

// What becomes of the promises where a feature is missing.
const (
	Refused = feature.Refused
	Weaker  = feature.Weaker
	Same    = feature.Same
)

// Table are all features, in the order in which a check shows them.
var Table = feature.Table

// Find gives a feature's row.
func Find(id ID) (Feature, bool) { return feature.Find(id) }
