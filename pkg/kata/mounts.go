package kata

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount is one bind mount of an OCI spec.
type Mount struct {
	// Source is on the host, Destination in the container: both absolute and clean.
	Source, Destination string
	ReadOnly            bool
}

// MountPoint is a place on the host where something is mounted.
type MountPoint struct {
	Path     string
	ReadOnly bool
}

// PlanMounts turns the mounts that a container is to have into those that its OCI spec has to name for Kata. A source
// reaches the guest by a bind mount that is not recursive: whatever is mounted below it before the container starts would
// vanish, seals included, and the writable file under it would show. So each of points (the host's mount points, see
// MountPoints) that lies below a source becomes a mount of its own, read-only where it is or the mount it lies in; unless the
// caller names it, and then as the caller says. Parents come before their children, whatever the order in.
//
// A mount on the way that the result does not name by its own is impossible by construction; CheckMounts says so of a
// spec made by others. An error wraps ErrMount.
func PlanMounts(mounts []Mount, points []MountPoint) ([]Mount, error) {
	all := map[string]Mount{}
	for _, m := range mounts {
		if err := m.check(); err != nil {
			return nil, err
		}
		if was, twice := all[m.Destination]; twice && was != m {
			return nil, fmt.Errorf("%w: %s is the destination of %s and of %s; name one", ErrMount, m.Destination, was.Source, m.Source)
		}
		all[m.Destination] = m
	}
	for _, m := range mounts {
		for _, point := range points {
			rest, below := cutBelow(m.Source, point.Path)
			if !below {
				continue
			}
			nested := Mount{point.Path, path.Join(m.Destination, rest), m.ReadOnly || point.ReadOnly}
			// What covers the place inside decides, not what lies under it: a caller's own mount there, or above it.
			if over := covering(mounts, nested.Destination); over != m {
				continue
			}
			all[nested.Destination] = nested
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b Mount) int {
		return strings.Compare(sortKey(a.Destination), sortKey(b.Destination))
	}), nil
}

// sortKey has a folder before all that is in it, and that before its siblings ("/a", "/a/b", "/a-b").
func sortKey(p string) string { return strings.ReplaceAll(p, "/", "\x00") }

// covering is the mount that a path in the container lies in: the deepest.
func covering(mounts []Mount, destination string) Mount {
	var best Mount
	for _, m := range mounts {
		_, below := cutBelow(m.Destination, destination)
		if (below || m.Destination == destination) && len(m.Destination) > len(best.Destination) {
			best = m
		}
	}
	return best
}

// CheckMounts refuses a spec's mounts of which one has a mount point of the host below its source that the spec does not
// name: it would vanish on its way into the guest. An error wraps ErrMount and names all of them.
func CheckMounts(mounts []Mount, points []MountPoint) error {
	plan, err := PlanMounts(mounts, points)
	if err != nil {
		return err
	}
	var all []error
	for _, m := range plan {
		if !slices.Contains(mounts, m) {
			all = append(all, fmt.Errorf("%w: what is mounted at %s would not be there at %s: give it a mount of its own", ErrMount, m.Source, m.Destination))
		}
	}
	return errors.Join(all...)
}

func (m Mount) check() error {
	for _, p := range []string{m.Source, m.Destination} {
		if !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) {
			return fmt.Errorf("%w: %q is not an absolute, clean path", ErrMount, p)
		}
	}
	if m.Source == "/" || m.Destination == "/" {
		return fmt.Errorf("%w: %s at %s: neither the host's root nor the container's", ErrMount, m.Source, m.Destination)
	}
	return nil
}

// cutBelow is what of p follows the folder dir, and whether p lies below it.
func cutBelow(dir, p string) (string, bool) {
	rest, ok := strings.CutPrefix(p, strings.TrimSuffix(dir, "/")+"/")
	return rest, ok && rest != ""
}

// CheckSources refuses sources that virtio-fs can't bring into a guest as what they are: a unix socket does not connect
// across it, a fifo has another other end, a device is the guest's. A link would be followed by the shim. An error wraps ErrMount.
func CheckSources(mounts []Mount) error {
	for _, m := range mounts {
		var st unix.Stat_t
		if err := unix.Lstat(m.Source, &st); err != nil {
			return fmt.Errorf("%w: %w", ErrMount, &os.PathError{Op: "lstat", Path: m.Source, Err: err})
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR, unix.S_IFREG:
		default:
			return fmt.Errorf("%w: %s is a %s, and only folders and files cross virtio-fs", ErrMount, m.Source, kind(st.Mode))
		}
	}
	return nil
}

func kind(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		return "unix socket"
	case unix.S_IFIFO:
		return "fifo"
	case unix.S_IFLNK:
		return "symlink"
	}
	return "device"
}

// MountPoints are the mount points that a process sees, by its pid in this process's /proc; 0 is this process. It has to
// be one of the mount namespace that the shim is started in: containerd's.
func MountPoints(pid int) ([]MountPoint, error) {
	name := "self"
	if pid != 0 {
		name = fmt.Sprint(pid)
	}
	f, err := os.Open(filepath.Join("/proc", name, "mountinfo"))
	if errors.Is(err, fs.ErrNotExist) && pid != 0 {
		return nil, fmt.Errorf("mount points of process %d: it has ended: %w", pid, err)
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	var points []MountPoint
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 {
			return nil, fmt.Errorf("%s: %q has too few fields", f.Name(), lines.Text())
		}
		readOnly := slices.Contains(strings.Split(fields[5], ","), "ro")
		points = append(points, MountPoint{unescape.Replace(fields[4]), readOnly})
	}
	return points, lines.Err()
}

// unescape: mountinfo writes these four bytes in octal (proc_pid_mountinfo(5)).
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// CheckAnnotations refuses any annotation. Kata's shims obey annotations of io.katacontainers.*, and some of other names
// (CRI's, CDI's), and the way to the host was among them more than once (GHSA-rr59-xxvx-96qr, GHSA-mp2j-xm59-qfgw,
// GHSA-7fhf-v3p3-rp56). What is to be set is set in the configuration, by the operator. An error wraps ErrAnnotation.
func CheckAnnotations(annotations map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(annotations)) {
		return fmt.Errorf("%w: %.200q; set it in Kata's configuration", ErrAnnotation, name)
	}
	return nil
}
