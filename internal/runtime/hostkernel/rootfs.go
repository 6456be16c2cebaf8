package hostkernel

import (
	"fmt"
	"log/slog"
	"path"
	"sort"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// entryKind is what an entry of the root file system's source is.
type entryKind int

const (
	kindDir entryKind = iota
	kindFile
	kindSymlink
)

// entry is one name in a folder of the root file system's source.
type entry struct {
	name   string
	kind   entryKind
	target string // of a symlink
}

// lister gives the entries of a folder of the source; none where there is no such folder.
type lister func(dir string) []entry

// bind is a read-only bind mount of the same path of the source.
type bind struct {
	path string
	file bool
}

// file is a file that the skeleton has of its own. Empty ones are mount points.
type file struct {
	path    string
	content string
}

// Skeleton is the container's root folder: what is made on disk, and what is bound over it. Parents come first.
type Skeleton struct {
	dirs     []string
	symlinks map[string]string
	files    []file
	binds    []bind
	// Shadowed are folders of the source that the required mount points cover.
	Shadowed []string
	// Gitless: there is no git in it.
	Gitless bool
}

// Warn logs what commands in it will miss.
func (s Skeleton) Warn(log *slog.Logger, sandbox string) {
	if len(s.Shadowed) > 0 {
		log.Warn("the workspace covers folders of the root file system", "sandbox", sandbox, "folders", s.Shadowed)
	}
	if s.Gitless {
		log.Warn("the root file system has no git: commands run, and can't work on the repository", "sandbox", sandbox)
	}
}

// BindPaths are the paths that are bound, read-only, from the source.
func (s Skeleton) BindPaths() []string {
	var out []string
	for _, b := range s.binds {
		out = append(out, b.path)
	}
	return out
}

// Folders that are mounted, whatever the source has there.
var mountPoints = []string{"/proc", "/dev", "/tmp", runtime.HomePath, runtime.GrantsPath, runtime.InternalDir}

// never are top-level folders of a source that don't come in: kernel file systems, and what is the node's own.
var never = map[string]bool{"proc": true, "sys": true, "dev": true, "tmp": true, "run": true, "lost+found": true, ".sandbox": true}

// hostTop are the node's top-level entries that come in when it lends its own root file system. No /home, /root, /srv,
// /var: those hold data; no /opt: what a node's owner puts there may hold secrets.
var hostTop = []string{"bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr"}

// hostEtc are the entries of the node's /etc that programs need and that hold no secret and no identity of the node;
// a trailing * stands for any rest of the name.
var hostEtc = []string{
	"alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version", "fonts", "java-*",
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "magic.mime", "mime.types", "os-release",
	"perl", "pki/ca-trust", "pki/java", "pki/tls", "protocols", "python3*", "redhat-release", "rpc", "services", "ssl/certs", "ssl/openssl.cnf",
	"terminfo", "timezone", "xml",
}

// own are the files of /etc that every sandbox has of its own: who there is inside, and no name service.
func own(ids runtime.IDs) []file {
	return []file{
		{"/etc/group", fmt.Sprintf("root:x:0:\nsandbox:x:%d:\nnogroup:x:65534:\n", ids.CommandGID)},
		{"/etc/hostname", Hostname + "\n"},
		{"/etc/hosts", "127.0.0.1\tlocalhost " + Hostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
		{"/etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"},
		{"/etc/passwd", fmt.Sprintf("root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:%d:%d:sandbox:%s:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
			ids.CommandUID, ids.CommandGID, runtime.HomePath)},
		{resolvConf, ""},
	}
}

// hostSkeleton is the root file system made of the node's own.
func hostSkeleton(list lister, required []string, ids runtime.IDs) Skeleton {
	b := newBuilder(list, required, ids)
	for _, e := range list("/") {
		if contains(hostTop, e.name) {
			b.add("/"+e.name, e)
		}
	}
	for _, pattern := range hostEtc {
		dir, name := path.Split(path.Join("/etc", pattern))
		for _, e := range list(path.Clean(dir)) {
			if matches(name, e.name) {
				b.add(path.Join(dir, e.name), e)
			}
		}
	}
	return b.finish()
}

// imageSkeleton is the root file system made of a folder.
func imageSkeleton(list lister, required []string, ids runtime.IDs) Skeleton {
	b := newBuilder(list, required, ids)
	for _, e := range list("/") {
		if !never[e.name] {
			b.add("/"+e.name, e)
		}
	}
	return b.finish()
}

// builder collects a skeleton. A folder of the source is bound whole, unless something of the sandbox's own has to
// lie in it: then it becomes a folder of the skeleton and its entries are treated one by one. Nothing is ever made
// in a source.
type builder struct {
	list  lister
	inner []string // what must exist in the skeleton: mount points and own files
	stops map[string]bool
	owns  []file
	s     Skeleton
	dirs  map[string]bool
}

func newBuilder(list lister, required []string, ids runtime.IDs) *builder {
	b := &builder{list: list, owns: own(ids), stops: map[string]bool{}, dirs: map[string]bool{"/": true}}
	b.s.symlinks = map[string]string{}
	b.inner = append(append(b.inner, mountPoints...), required...)
	for _, p := range b.inner {
		b.stops[p] = true
	}
	for _, f := range b.owns {
		b.inner = append(b.inner, f.path)
		b.stops[f.path] = true
	}
	return b
}

func (b *builder) add(p string, e entry) {
	if b.stops[p] {
		if e.kind == kindDir && len(b.list(p)) > 0 {
			b.s.Shadowed = append(b.s.Shadowed, p)
		}
		return
	}
	switch {
	case b.holdsInner(p):
		// Also where the source has a symlink or a file: the sandbox's own path must be a real folder.
		b.dir(p)
		if e.kind == kindDir {
			for _, sub := range b.list(p) {
				b.add(path.Join(p, sub.name), sub)
			}
		}
	case e.kind == kindSymlink:
		b.dir(path.Dir(p))
		b.s.symlinks[p] = e.target
	default:
		b.dir(path.Dir(p))
		b.s.binds = append(b.s.binds, bind{path: p, file: e.kind == kindFile})
	}
}

func (b *builder) holdsInner(p string) bool {
	for _, in := range b.inner {
		if strings.HasPrefix(in, p+"/") {
			return true
		}
	}
	return false
}

func (b *builder) dir(p string) {
	if b.dirs[p] {
		return
	}
	b.dir(path.Dir(p))
	b.dirs[p] = true
	b.s.dirs = append(b.s.dirs, p)
}

func (b *builder) finish() Skeleton {
	for _, bd := range b.s.binds {
		if bd.file {
			b.s.files = append(b.s.files, file{path: bd.path})
		} else {
			b.dir(bd.path)
		}
	}
	for _, f := range b.owns {
		b.dir(path.Dir(f.path))
		b.s.files = append(b.s.files, f)
	}
	for _, p := range b.inner {
		if !b.isOwn(p) && !underTmp(p) && !underHome(p) {
			b.dir(p)
		}
	}
	sort.Strings(b.s.Shadowed)
	return b.s
}

func (b *builder) isOwn(p string) bool {
	for _, f := range b.owns {
		if f.path == p {
			return true
		}
	}
	return false
}

// underTmp says whether a mount point lies in the container's own /tmp: it is made there once that is mounted.
func underTmp(p string) bool { return strings.HasPrefix(p, "/tmp/") }

// underHome says whether a mount point lies in HOME: as for /tmp.
func underHome(p string) bool { return strings.HasPrefix(p, runtime.HomePath+"/") }

// checkPlaces refuses a workspace where the sandbox has something of its own, and a cache anywhere but in HOME. HOME
// belongs to the command: it could rename the folders above a worktree there.
func checkPlaces(p mounts.Plan) error {
	for _, m := range p.Mounts {
		if m.Cache {
			if !underHome(m.Target) {
				return fmt.Errorf("%w: the cache's place %q is not below %s: choose one there", mounts.ErrWorkspace, m.Target, runtime.HomePath)
			}
			continue
		}
		if err := checkPlace(m.Target); err != nil {
			return err
		}
	}
	return nil
}

func checkPlace(p string) error {
	for _, own := range []string{runtime.HomePath, runtime.InternalDir, "/proc", "/dev", "/etc", "/sys", "/run"} {
		if p == own || strings.HasPrefix(p, own+"/") || strings.HasPrefix(own, p+"/") {
			return fmt.Errorf("%w: %q can't be mounted in a sandbox, which has its own %s: move the repository or the worktree (git worktree move)",
				mounts.ErrWorkspace, p, own)
		}
	}
	if p == "/tmp" {
		return fmt.Errorf("%w: the folder /tmp can't be a workspace: move it into a folder of its own", mounts.ErrWorkspace)
	}
	return nil
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

func matches(pattern, name string) bool {
	if rest, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(name, rest)
	}
	return pattern == name
}
