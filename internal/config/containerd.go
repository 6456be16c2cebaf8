package config

import (
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// maxRootfs bounds rootfs, bytes: it is in every receipt.
const maxRootfs = 1024

// Compiled at first use: this package is linked into programs that never read a configuration.
var (
	// namespaceText is what containerd takes as a namespace and as a snapshotter's name (pkg/identifiers).
	namespaceText = text(`^[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*$`)
	// handlerText is what containerd makes the name of a shim's program of: io.containerd.NAME.VERSION.
	handlerText = text(`^io\.containerd\.[a-z0-9]+(?:-[a-z0-9]+)*\.v[0-9]+$`)
	// imageText is an image's full name, with its registry, and a tag or a digest or both: the grammar of
	// github.com/distribution/reference, of which only the canonical form is taken, so that one image has one name.
	imageText = text(`^(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)*:[0-9]+|localhost:[0-9]+)` +
		`(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$`)
)

func text(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

// Named gives what is configured for one of containerd's runtimes; false for another name.
func (r ContainerdRuntimes) Named(name string) (ContainerdRuntime, bool) {
	switch name {
	case RuncRuntime:
		return r.Runc, true
	case GvisorRuntime:
		return r.Gvisor, true
	case KataRuntime:
		return ContainerdRuntime{Handler: r.Kata.Handler}, true
	}
	return ContainerdRuntime{}, false
}

// checkContainerd also keeps a handler to the family of its runtime: who asks for a virtual machine by the name "kata"
// must not get namespaces because of a slip in this file.
func (c *Config) checkContainerd() error {
	d := c.Containerd
	if len(d.Namespace) > 76 || !namespaceText().MatchString(d.Namespace) {
		return bad("containerd.namespace", d.Namespace, "letters, digits and single . _ - between them, at most 76")
	}
	if d.Snapshotter != "" && !namespaceText().MatchString(d.Snapshotter) {
		return bad("containerd.snapshotter", d.Snapshotter, "empty for containerd's default, or a snapshotter's name, for example overlayfs")
	}
	if d.ImagesFrom != "" && (len(d.ImagesFrom) > 76 || !namespaceText().MatchString(d.ImagesFrom) || d.ImagesFrom == d.Namespace) {
		return bad("containerd.images_from", d.ImagesFrom, "empty, or a namespace of containerd other than containerd.namespace, for example k8s.io, which is the kubelet's")
	}
	for name, family := range map[string]string{RuncRuntime: "io.containerd.runc.", GvisorRuntime: "io.containerd.runsc.", KataRuntime: "io.containerd.kata"} {
		r, _ := d.Runtimes.Named(name)
		key := "containerd.runtimes." + name
		if !handlerText().MatchString(r.Handler) || !strings.HasPrefix(r.Handler, family) {
			return bad(key+".handler", r.Handler, "the name of a shim of "+name+", io.containerd.NAME.VERSION, that begins with "+family)
		}
		if r.Binary != "" && (!absClean(r.Binary) || r.Binary == "/") {
			return bad(key+".binary", r.Binary, "empty, or an absolute path without \"..\", doubled or closing slashes")
		}
	}
	if k := d.Runtimes.Kata.Config; k != "" && (!absClean(k) || k == "/") {
		return bad("containerd.runtimes.kata.config", k, "empty, or an absolute path without \"..\", doubled or closing slashes")
	}
	return nil
}

// checkRootfs wants an image named by its digest: what a tag names can be changed by whoever owns the repository.
func (c *Config) checkRootfs() error {
	const kinds = "\"host\", the absolute path of a folder without \"..\", doubled or closing slashes, or an image as REGISTRY/NAME@sha256:DIGEST"
	if len(c.Rootfs) > maxRootfs {
		return bad("rootfs", c.Rootfs, fmt.Sprintf("at most %d bytes", maxRootfs))
	}
	switch runtime.KindOfRootfs(c.Rootfs) {
	case runtime.RootfsHost:
		return nil
	case runtime.RootfsFolder:
		if !absClean(c.Rootfs) {
			return bad("rootfs", c.Rootfs, kinds)
		}
		return nil
	}
	m := imageText().FindStringSubmatch(c.Rootfs)
	switch tag, digest := 1, 2; {
	case m == nil || m[tag]+m[digest] == "":
		return bad("rootfs", c.Rootfs, kinds)
	case m[digest] == "" && !c.RootfsAllowTags:
		return bad("rootfs", c.Rootfs, "an image by its digest, REGISTRY/NAME@sha256:DIGEST (\"ctr images list\" shows it), since a tag can be moved to another image; rootfs_allow_tags: true accepts that")
	}
	return nil
}
