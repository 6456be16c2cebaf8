package hostkernel

import (
	"path"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

var testIDs = runtime.IDs{HostBase: 0x70000000, Size: 65536, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000}

// sourceOf makes a lister of paths: "x/" is a folder, "x -> y" a symlink, everything else a file.
func sourceOf(paths ...string) lister {
	folders := map[string]map[string]entry{}
	var add func(p string, e entry)
	add = func(p string, e entry) {
		dir := path.Dir(p)
		if folders[dir] == nil {
			folders[dir] = map[string]entry{}
		}
		if _, there := folders[dir][path.Base(p)]; !there {
			e.name = path.Base(p)
			folders[dir][e.name] = e
		}
		if dir != "/" {
			add(dir, entry{kind: kindDir})
		}
	}
	for _, p := range paths {
		switch link, target, isLink := strings.Cut(p, " -> "); {
		case isLink:
			add(link, entry{kind: kindSymlink, target: target})
		case strings.HasSuffix(p, "/"):
			add(strings.TrimSuffix(p, "/"), entry{kind: kindDir})
		default:
			add(p, entry{kind: kindFile})
		}
	}
	return func(dir string) []entry {
		var out []entry
		for _, e := range folders[dir] {
			out = append(out, e)
		}
		sort.Slice(out, func(i, j int) bool { return out[i].name < out[j].name })
		return out
	}
}

func debian() lister {
	return sourceOf("/usr/bin/bash", "/usr/lib/", "/usr/src/linux/Makefile", "/bin -> usr/bin", "/lib -> usr/lib", "/opt/tool/x",
		"/etc/passwd", "/etc/shadow", "/etc/ssl/certs/ca.pem", "/etc/ssl/private/key.pem", "/etc/ssl/openssl.cnf", "/etc/localtime -> /usr/share/zoneinfo/UTC",
		"/etc/ld.so.cache", "/etc/gitconfig", "/etc/java-17-openjdk/x", "/root/.ssh/id", "/home/u/file", "/var/lib/x", "/srv/data")
}

func TestTheNodesOwnRootLendsProgramsAndNoData(t *testing.T) {
	s := hostSkeleton(debian(), []string{"/home/u/wt"}, testIDs)
	require.ElementsMatch(t, []string{"/usr", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ld.so.cache", "/etc/java-17-openjdk"}, s.BindPaths())
	require.Equal(t, map[string]string{"/bin": "usr/bin", "/lib": "usr/lib", "/etc/localtime": "/usr/share/zoneinfo/UTC"}, s.symlinks)
	for _, d := range []string{"/proc", "/dev", "/tmp", "/home/sandbox", "/.sandbox", "/home/u/wt"} {
		require.Contains(t, s.dirs, d)
	}
	require.Empty(t, s.Shadowed)
}

func TestTheSkeletonHasItsOwnUsersAndNoNameServer(t *testing.T) {
	s := hostSkeleton(debian(), nil, testIDs)
	content := map[string]string{}
	for _, f := range s.files {
		content[f.path] = f.content
	}
	require.Contains(t, content["/etc/passwd"], "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash\n")
	require.Contains(t, content["/etc/group"], "sandbox:x:1000:\n")
	require.Equal(t, Hostname+"\n", content["/etc/hostname"])
	require.Contains(t, content, "/etc/resolv.conf")
	require.Empty(t, content["/etc/resolv.conf"])
	require.NotContains(t, content, "/etc/shadow")
}

func TestAFolderIsSplitWhereAMountPointLiesInIt(t *testing.T) {
	s := hostSkeleton(debian(), []string{"/usr/src/wt", "/opt/wt"}, testIDs)
	require.ElementsMatch(t, []string{"/usr/bin", "/usr/lib", "/usr/src/linux",
		"/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ld.so.cache", "/etc/java-17-openjdk"}, s.BindPaths())
	require.Contains(t, s.dirs, "/usr/src/wt")
	require.Contains(t, s.dirs, "/opt/wt")
}

func TestWhatAMountPointCoversIsListed(t *testing.T) {
	s := imageSkeleton(sourceOf("/bin/sh", "/srv/wt/from-the-image", "/srv/other"), []string{"/srv/wt"}, testIDs)
	require.Equal(t, []string{"/srv/wt"}, s.Shadowed)
	require.ElementsMatch(t, []string{"/bin", "/srv/other"}, s.BindPaths())
}

func TestAnImageComesWholeButForWhatTheSandboxHasItself(t *testing.T) {
	s := imageSkeleton(sourceOf("/bin/sh", "/etc/passwd", "/etc/profile", "/proc/", "/sys/x", "/run/secret", "/tmp/x", "/home/u/x", "/var/lib/x", "/root/x", "/lib64 -> lib"), nil, testIDs)
	require.ElementsMatch(t, []string{"/bin", "/etc/profile", "/home/u", "/var", "/root"}, s.BindPaths())
	require.Equal(t, "lib", s.symlinks["/lib64"])
}

func TestAParentComesBeforeItsChildAndNothingLiesInABind(t *testing.T) {
	for name, s := range map[string]Skeleton{
		"host":  hostSkeleton(debian(), []string{"/usr/src/wt", "/home/u/wt"}, testIDs),
		"image": imageSkeleton(debian(), []string{"/usr/src/wt", "/srv/data/wt"}, testIDs),
	} {
		t.Run(name, func(t *testing.T) {
			seen := map[string]bool{"/": true}
			for _, d := range s.dirs {
				require.True(t, seen[path.Dir(d)], "%s before its parent", d)
				require.False(t, seen[d], "%s twice", d)
				seen[d] = true
			}
			all := append([]string(nil), s.dirs...)
			for _, f := range s.files {
				require.True(t, seen[path.Dir(f.path)], f.path)
				all = append(all, f.path)
			}
			for l := range s.symlinks {
				require.True(t, seen[path.Dir(l)], l)
				all = append(all, l)
			}
			for _, b := range s.binds {
				for _, p := range all {
					require.False(t, strings.HasPrefix(p, b.path+"/"), "%s lies in the bind %s: it would be made in the source", p, b.path)
				}
			}
		})
	}
}

func TestAMountPointThatIsAFileOrALinkInTheImageBecomesAFolder(t *testing.T) {
	s := imageSkeleton(sourceOf("/bin/sh", "/srv -> /etc", "/projects"), []string{"/srv/wt", "/projects/wt"}, testIDs)
	require.NotContains(t, s.symlinks, "/srv")
	require.Contains(t, s.dirs, "/srv/wt")
	require.Contains(t, s.dirs, "/projects/wt")
}

func TestAWorkspaceWhereTheSandboxHasItsOwnIsRefused(t *testing.T) {
	check := func(m mounts.Mount) error { return checkPlaces(mounts.Plan{Mounts: []mounts.Mount{m}}) }
	for _, p := range []string{"/home/sandbox", "/home/sandbox/wt", "/home", "/.sandbox/x", "/proc/1", "/etc/wt", "/dev", "/tmp"} {
		require.ErrorIs(t, check(mounts.Mount{Target: p}), mounts.ErrWorkspace, p)
	}
	for _, p := range []string{"/home/u/wt", "/srv/wt", "/tmp/wt", "/homes"} {
		require.NoError(t, check(mounts.Mount{Target: p}))
	}
	require.NoError(t, check(mounts.Mount{Target: "/home/sandbox/.cache/go", Cache: true}))
	for _, p := range []string{"/home/sandbox", "/home/sandbox2/x", "/usr/lib/x", "/tmp/x", "/etc/x"} {
		require.ErrorIs(t, check(mounts.Mount{Target: p, Cache: true}), mounts.ErrWorkspace, p)
	}
}
