package containerd

import (
	"archive/tar"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// hostileImage is an image that would serve, and has what an image could try: a device of the node's, a file of the command's
// host uid, a set-id program of what is root in the sandbox, links where the sandbox has its own folders, and content there.
func hostileImage(t *testing.T, h *host, spec runtime.Spec) (rootfs, digest string) {
	t.Helper()
	files := containerd.Programs(t, "bash", "cat", "ls", "id", "chmod")
	for _, name := range []string{".sandbox/secret", "proc/version", "run/grants/g/f"} {
		files[name] = []byte("the image's")
	}
	root := int(spec.IDs.HostBase)
	// Two layers, of which containerd makes an overlay; of one it makes a bind mount.
	tries := containerd.Archive(t, map[string][]byte{"bin/id": files["bin/id"]},
		tar.Header{Name: "usr/node", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 11},
		tar.Header{Name: "usr/theirs", Typeflag: tar.TypeReg, Mode: 0o644, Uid: 1234, Gid: 1234},
		tar.Header{Name: "usr/set-id", Typeflag: tar.TypeLink, Linkname: "bin/id", Mode: 0o6755, Uid: root, Gid: root},
		tar.Header{Name: "tmp", Typeflag: tar.TypeSymlink, Linkname: "etc"},
		tar.Header{Name: "home", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		tar.Header{Name: "etc/passwd", Typeflag: tar.TypeSymlink, Linkname: "/usr/theirs"},
	)
	digest = h.d.Import(t, "localhost/tools:1", containerd.Archive(t, files), tries)
	return "localhost/tools@" + digest, digest
}

func TestUnderGVisorAnImageServesAsRootFileSystem(t *testing.T) {
	serveGuest(t, newHostOf(t, GVisor, Attach))
}

func TestUnderKatasNameAnImageServesAsRootFileSystem(t *testing.T) {
	serveGuest(t, newKataHost(t).host)
}

func serveGuest(t *testing.T, h *host) {
	spec := h.spec(0)
	var digest string
	spec.Rootfs, digest = hostileImage(t, h, spec)
	h.works(spec)
	s := h.create(spec)
	require.Equal(t, runtime.Provenance{
		Rootfs: spec.Rootfs, RootfsKind: runtime.RootfsImage, RootfsDigest: digest,
		ReceiptdSHA256: s.Identity().Provenance.ReceiptdSHA256, Pid1SHA256: s.Identity().Provenance.Pid1SHA256,
	}, s.Identity().Provenance)
	require.Len(t, s.Identity().Provenance.ReceiptdSHA256, 64)
	_, err := os.Open(filepath.Join(imageDir(spec.Dir), "usr/node"))
	require.ErrorIs(t, err, unix.EACCES, "a device of it is none on the node either")
	for _, option := range []string{"ro", "nosuid", "nodev"} {
		require.Contains(t, mountOptions(t, imageDir(spec.Dir)), option, "nobody on the node gets anything by the image")
	}

	a := h.attach(s, spec, 1)
	out, p := a.run("cat /etc/of-the-image README; id -un; ls -A /run/grants; [ -L /tmp -o -L /home ] || echo folders; [ -O /usr/theirs ] && echo its own")
	require.Equal(t, "image\nhello\nsandbox\nfolders\nits own", out)
	require.True(t, p.SealsIntact)
	out, _ = a.run("cat /proc/version; ls -l /usr/set-id; /usr/set-id -u; /usr/set-id -g")
	require.NotContains(t, out, "the image's")
	require.Regexp(t, `\n-rwsr-sr-x 2 .*\n1000\n1000$`, out, "a set-id bit gives nothing")
	for what, attack := range map[string]string{
		"P11: the root is read-only":            "echo x > /etc/of-the-image",
		"P11: also what the command's uid owns": "echo x > /usr/theirs",
		"P11: and its mode":                     "chmod 0777 /usr/theirs",
		"P11: and the root itself":              "echo x > /x",
		"P9: no device of the node's":           "exec 3< /usr/node",
		"P9: receiptd's folder is closed":       "ls /.sandbox",
	} {
		out, p := a.run(attack)
		require.NotZero(t, p.ExitCode, "%s: %s", what, out)
	}
	h.stop(s)
	h.noImage(spec)
}

// works shows, as the control, that the image's set-id program and its device do what they can where they are mounted as the
// snapshotter says.
func (h *host) works(spec runtime.Spec) {
	h.t.Helper()
	spec.SandboxID = newID(h.t)
	img, err := h.r.viewImage(bound(h.t), spec)
	require.NoError(h.t, err)
	dir := filepath.Join(h.state, "control")
	require.NoError(h.t, os.Mkdir(dir, 0o755))
	require.NoError(h.t, img.inImage(dir, func() error {
		f, err := os.Open(filepath.Join(dir, "usr/node"))
		require.NoError(h.t, err)
		require.NoError(h.t, f.Close())
		cmd := exec.Command(filepath.Join(dir, "usr/set-id"), "-u")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1234}}
		out, err := cmd.Output()
		require.NoError(h.t, err)
		require.Equal(h.t, fmt.Sprintln(spec.IDs.HostBase), string(out))
		return nil
	}))
	require.NoError(h.t, h.r.dropImage(bound(h.t), spec.SandboxID))
}

// noImage asserts that nothing of a sandbox's image is left, of the node's mounts or in containerd.
func (h *host) noImage(spec runtime.Spec) {
	h.t.Helper()
	require.Empty(h.t, mountOptions(h.t, imageDir(spec.Dir)), "the image is mounted")
	require.NoDirExists(h.t, spec.Dir)
	c := h.d.Client()
	defer c.Close()
	_, err := c.SnapshotService("").Stat(context.Background(), spec.SandboxID)
	require.True(h.t, missing(err), "its snapshot is gone: %v", err)
	require.NotContains(h.t, h.d.Keeps(), spec.SandboxID)
}

// mountOptions are those of the mount at a path, of this process's mount namespace; none where nothing is mounted.
func mountOptions(t testing.TB, path string) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 5 && f[4] == path {
			return strings.Split(f[5], ",")
		}
	}
	return nil
}

// As an agent leaves it that is killed before there is a container.
func TestP5AnImageThatAStartLeftMountedIsTakenOffTheNode(t *testing.T) {
	h := newHostOf(t, GVisor, Attach)
	spec := h.spec(0)
	spec.Rootfs, _ = hostileImage(t, h, spec)
	require.NoError(t, h.r.keeper.Records.Write(hostkernel.Record{Cgroup: h.r.keeper.Cgroup(spec.SandboxID), Identity: runtime.Identity{
		Runtime: GVisor, SandboxID: spec.SandboxID, Dir: spec.Dir,
	}}))
	require.NoError(t, hostkernel.MakeDirs(spec))
	_, _, _, err := h.r.planGuestRoot(bound(t), spec)
	require.NoError(t, err)
	require.NotEmpty(t, mountOptions(t, imageDir(spec.Dir)))
	ids, err := h.runtime().List(bound(t))
	require.NoError(t, err)
	require.Equal(t, []string{spec.SandboxID}, ids)

	busy, err := os.Open(imageDir(spec.Dir))
	require.NoError(t, err)
	defer busy.Close()
	_, err = h.runtime().Remove(bound(t), runtime.Identity{SandboxID: spec.SandboxID})
	require.NoError(t, err, "also while somebody on the node uses it")
	h.noImage(spec)
}

func TestP14AnImageThatContainerdWouldNotSeeIsRefused(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	require.ErrorIs(t, sameFolder(dir, root), runtime.ErrUnavailable, "there is none")
	require.NoError(t, os.MkdirAll(root+dir, 0o755))
	err := sameFolder(dir, root)
	require.ErrorIs(t, err, runtime.ErrUnavailable, "there is another")
	require.ErrorContains(t, err, "mountPropagation: Bidirectional")
	require.NoError(t, sameFolder(dir, "/proc/self/root"))
}
