package kata

import (
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func at(paths ...string) []MountPoint {
	var all []MountPoint
	for _, p := range paths {
		all = append(all, MountPoint{p, false})
	}
	return all
}

func TestP11ASealBelowASourceBecomesAMountOfItsOwn(t *testing.T) {
	points := at("/", "/proc", "/ws/s1", "/ws/s1/.git", "/ws/s1/sub/deep", "/ws/s10/.git", "/ws")
	plan, err := PlanMounts([]Mount{{"/ws/s1", "/ws/s1", false}, {"/run/receipts", "/.sandbox/receipts", false}}, points)
	require.NoError(t, err)
	require.Equal(t, []Mount{
		{"/run/receipts", "/.sandbox/receipts", false},
		{"/ws/s1", "/ws/s1", false},
		{"/ws/s1/.git", "/ws/s1/.git", false},
		{"/ws/s1/sub/deep", "/ws/s1/sub/deep", false},
	}, plan)
}

// The caller's own mount of a seal is read-only and comes from elsewhere: it is neither doubled nor replaced, and what lies
// under it is not put over it.
func TestP11TheCallersOwnSealStays(t *testing.T) {
	want := []Mount{{"/ws/s1", "/ws/s1", false}, {"/seals/git", "/ws/s1/.git", true}, {"/seals/config", "/ws/s1/.git/config", true}}
	plan, err := PlanMounts([]Mount{want[2], want[1], want[0]}, at("/ws/s1/.git", "/ws/s1/.git/config", "/ws/s1/.git/hooks"))
	require.NoError(t, err)
	require.Equal(t, want, plan)
	require.NoError(t, CheckMounts(want, at("/ws/s1/.git", "/ws/s1/.git/config", "/ws/s1/.git/hooks")))
}

func TestAMountBelowAReadOnlyOneIsReadOnly(t *testing.T) {
	plan, err := PlanMounts([]Mount{{"/base", "/repo", true}}, at("/base/objects"))
	require.NoError(t, err)
	require.Equal(t, []Mount{{"/base", "/repo", true}, {"/base/objects", "/repo/objects", true}}, plan)
	plan, err = PlanMounts([]Mount{{"/ws", "/ws", false}}, []MountPoint{{"/ws/sealed", true}})
	require.NoError(t, err)
	require.Equal(t, []Mount{{"/ws", "/ws", false}, {"/ws/sealed", "/ws/sealed", true}}, plan, "what is read-only on the host stays it")
}

func TestP11ASpecWhoseMountsWouldVanishIsRefused(t *testing.T) {
	mounts := []Mount{{"/ws/s1", "/ws/s1", false}}
	require.NoError(t, CheckMounts(mounts, at("/", "/ws", "/ws/s1", "/ws/s1x/.git")))
	err := CheckMounts(mounts, at("/ws/s1/.git", "/ws/s1/a"))
	require.ErrorIs(t, err, ErrMount)
	require.ErrorContains(t, err, "/ws/s1/.git")
	require.ErrorContains(t, err, "/ws/s1/a")
	require.NoError(t, CheckMounts(append(mounts, Mount{"/ws/s1/.git", "/ws/s1/.git", true}), at("/ws/s1/.git")))
}

func TestMountsThatMeanNothingAreRefused(t *testing.T) {
	for _, m := range []Mount{{"", "/x", false}, {"/x", "", false}, {"x", "/x", false}, {"/x", "x", false}, {"/x/", "/x", false}, {"/x", "/x/../y", false}, {"/", "/x", false}, {"/x", "/", false}, {"/x\x00", "/x", false}} {
		_, err := PlanMounts([]Mount{m}, nil)
		require.ErrorIs(t, err, ErrMount, "%+v", m)
	}
	_, err := PlanMounts([]Mount{{"/a", "/x", false}, {"/b", "/x", false}}, nil)
	require.ErrorContains(t, err, "/x is the destination of /a and of /b")
}

// Whatever is mounted where: nothing below a source is left to vanish, parents come first, and what the caller named is there.
func TestNothingBelowASourceIsLeftToVanish(t *testing.T) {
	anyPath := rapid.Custom(func(t *rapid.T) string {
		return "/" + strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "a-b", "c"}), 1, 4).Draw(t, "parts"), "/")
	})
	rapid.Check(t, func(t *rapid.T) {
		mounts := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Mount {
			return Mount{anyPath.Draw(t, "source"), anyPath.Draw(t, "destination"), rapid.Bool().Draw(t, "ro")}
		}), 0, 4, func(m Mount) string { return m.Destination }).Draw(t, "mounts")
		points := at(rapid.SliceOfN(anyPath, 0, 6).Draw(t, "points")...)
		plan, err := PlanMounts(mounts, points)
		require.NoError(t, err)
		require.NoError(t, CheckMounts(plan, points), "the plan needs no plan")
		for _, m := range mounts {
			require.Contains(t, plan, m)
		}
		for i, m := range plan {
			for _, later := range plan[i+1:] {
				_, inside := cutBelow(later.Destination, m.Destination)
				require.False(t, inside, "%s after %s", later.Destination, m.Destination)
			}
			for _, p := range points {
				if rest, below := cutBelow(m.Source, p.Path); below {
					dst := path.Join(m.Destination, rest)
					over := covering(plan, dst)
					require.True(t, over.Destination == dst || over != m, "%s at %s would vanish", p.Path, dst)
				}
			}
		}
	})
}

// The control case is the kernel's: a bind mount that is not recursive, as Kata's, lacks what was mounted below its source.
func TestP11ABindMountThatIsNotRecursiveLosesASeal(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := short(t)
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	for _, d := range []string{filepath.Join(src, ".git"), dst} {
		require.NoError(t, os.MkdirAll(d, 0o755))
	}
	require.NoError(t, os.WriteFile(filepath.Join(src, ".git", "config"), []byte("writable"), 0o644))
	sealed := filepath.Join(dir, "sealed")
	require.NoError(t, os.Mkdir(sealed, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(sealed, "config"), []byte("sealed"), 0o644))
	mount := func(source, target string) {
		require.NoError(t, unix.Mount(source, target, "", unix.MS_BIND, ""))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(target, unix.MNT_DETACH)) })
	}
	mount(sealed, filepath.Join(src, ".git"))
	mount(src, dst) // what the shim does
	data, err := os.ReadFile(filepath.Join(dst, ".git", "config"))
	require.NoError(t, err)
	require.Equal(t, "writable", string(data), "the seal has vanished")

	points, err := MountPoints(0)
	require.NoError(t, err)
	plan, err := PlanMounts([]Mount{{src, "/ws", false}}, points)
	require.NoError(t, err)
	require.Equal(t, []Mount{{src, "/ws", false}, {filepath.Join(src, ".git"), "/ws/.git", false}}, plan)
	mount(plan[1].Source, filepath.Join(dst, ".git"))
	data, err = os.ReadFile(filepath.Join(dst, ".git", "config"))
	require.NoError(t, err)
	require.Equal(t, "sealed", string(data))
}

func TestAMountPointMayHaveAnyName(t *testing.T) {
	testkit.Need(t, testkit.Root)
	odd := filepath.Join(short(t), "a b\tc\nd\\040e#é")
	require.NoError(t, os.Mkdir(odd, 0o755))
	require.NoError(t, unix.Mount(odd, odd, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(odd, unix.MNT_DETACH)) })
	for _, pid := range []int{0, os.Getpid()} {
		points, err := MountPoints(pid)
		require.NoError(t, err)
		require.True(t, slices.Contains(points, MountPoint{odd, false}))
	}
	require.NoError(t, unix.Mount("", odd, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	points, err := MountPoints(0)
	require.NoError(t, err)
	require.True(t, slices.Contains(points, MountPoint{odd, true}))
	_, err = MountPoints(1 << 22)
	require.ErrorContains(t, err, "it has ended")
}

func TestWhatDoesNotCrossVirtioFsIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := short(t)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, CheckSources([]Mount{{Source: dir}, {Source: file}}))
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	require.NoError(t, err)
	defer l.Close()
	mkfifo(t, filepath.Join(dir, "fifo"))
	require.NoError(t, os.Symlink(file, filepath.Join(dir, "link")))
	require.NoError(t, unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR, int(unix.Mkdev(1, 3))))
	for name, what := range map[string]string{"socket": "unix socket", "fifo": "fifo", "link": "symlink", "null": "device", "none": "no such file"} {
		err := CheckSources([]Mount{{Source: filepath.Join(dir, name)}})
		require.ErrorIs(t, err, ErrMount)
		require.ErrorContains(t, err, what)
	}
}

func TestP10NoAnnotationIsPassedOn(t *testing.T) {
	require.NoError(t, CheckAnnotations(nil))
	require.NoError(t, CheckAnnotations(map[string]string{}))
	for _, name := range []string{"io.katacontainers.config.hypervisor.virtio_fs_extra_args", "io.katacontainers.config_path", "cdi.k8s.io/gpu", "io.kubernetes.cri.container-type", "anything"} {
		require.ErrorIs(t, CheckAnnotations(map[string]string{name: "x"}), ErrAnnotation)
	}
}
