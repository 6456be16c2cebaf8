package runtime

import "strings"

// RootfsKind is what a root file system is made of.
type RootfsKind string

// The kinds.
const (
	// RootfsHost: the node's own /usr and what belongs to it, read-only.
	RootfsHost RootfsKind = "host"
	// RootfsFolder: a folder of the node.
	RootfsFolder RootfsKind = "folder"
	// RootfsImage: an image that the runtime keeps or fetches.
	RootfsImage RootfsKind = "image"
)

// KindOfRootfs tells what the setting "rootfs" names: "host", an absolute path, or else an image's reference.
func KindOfRootfs(rootfs string) RootfsKind {
	switch {
	case rootfs == string(RootfsHost):
		return RootfsHost
	case strings.HasPrefix(rootfs, "/"):
		return RootfsFolder
	}
	return RootfsImage
}
