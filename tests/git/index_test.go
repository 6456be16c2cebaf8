package git

import (
	"crypto/sha1" // the trailer of Git's index
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// forge gives an index (version 2, gitformat-index(5)) whose entries map paths to blobs, as text for `base64 -d`. Git itself
// would not write one with such paths.
func forge(t *testing.T, entries map[string]string) string {
	t.Helper()
	paths := make([]string, 0, len(entries))
	for path := range entries {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	b := binary.BigEndian.AppendUint32([]byte("DIRC"), 2)
	b = binary.BigEndian.AppendUint32(b, uint32(len(entries)))
	for _, path := range paths {
		id, err := hex.DecodeString(entries[path])
		require.NoError(t, err)
		e := make([]byte, 62, 62+len(path)+8)
		binary.BigEndian.PutUint32(e[24:], 0o100644)
		copy(e[40:], id)
		binary.BigEndian.PutUint16(e[60:], uint16(len(path)))
		e = append(e, path...)
		b = append(b, append(e, make([]byte, 8-len(e)%8)...)...)
	}
	sum := sha1.Sum(b)
	return base64.StdEncoding.EncodeToString(append(b, sum[:]...))
}

// plantIndex is the command's half of it.
func (p *place) plantIndex(entries map[string]string) {
	p.t.Helper()
	p.command("rm -f $M/index; base64 -d > $M/index <<< " + forge(p.t, entries))
}

func TestP12Attack22AnIndexWithAPathOutside(t *testing.T) {
	const secret = "-----the owner's key-----\n"
	var steps []step
	var said string
	paths := map[string]func(*place) string{
		"absolute": func(p *place) string { return filepath.Join(p.out, "secret") },
		"relative": func(*place) string { return "../out/secret" },
	}
	for _, name := range slices.Sorted(maps.Keys(paths)) {
		for _, call := range [][]string{{"diff"}, {"add", "-A"}, {"commit", "-am", "x"}} {
			steps = append(steps, step{name: name + " " + strings.Join(call, " "), strike: func(p *place) {
				readme := p.hostWorks("rev-parse", "HEAD:README")
				p.plantIndex(map[string]string{paths[name](p): readme, "README": readme})
				said = p.trusted(call...).out
				if p.layout != control {
					require.NotContains(p.t, said, secret)
					p.trusted("stash")
				}
			}})
		}
	}
	attack{
		prepare: func(p *place) { p.file(filepath.Join(p.out, "secret"), secret) },
		steps:   steps,
		harmed: func(p *place) bool {
			id := p.blob("secret")
			_, err := p.host("cat-file", "-e", id)
			return err == nil || strings.Contains(said, secret) || p.trusted("cat-file", "-e", id) == answer{}
		},
	}.run(t)
}

func TestP12Attack23AnIndexThatChecksOutOverTheConfiguration(t *testing.T) {
	attack{
		strike: func(p *place) {
			evil := strings.TrimSpace(p.works(`printf '[core]\n\tfsmonitor = "touch %s/fired; false"\n' $OUT | git hash-object -w --stdin`))
			p.plantIndex(map[string]string{
				"../repo/.git/config": evil, "../out/new": evil, filepath.Join(p.out, "absolute"): evil, ".git/config": evil, ".git": evil,
			})
			p.trusted("checkout", "--", ".")
			p.trusted("checkout", "-f")
			p.trusted("restore", ".")
			p.trusted("reset", "--hard")
			p.host("status")
		},
		inside: func(p *place) {
			require.NotContains(p.t, fmt.Sprint(p.describeSealed()), "fsmonitor = \\\"touch")
			p.indexIsSound()
		},
	}.run(t)
}

// indexIsSound asserts that the base clone's copy of the index holds nothing that leads outside. In the layout shared it is
// the command's own.
func (p *place) indexIsSound() {
	if p.layout == shared {
		return
	}
	out, err := p.as(p.w, "git", "--git-dir", p.m, "ls-files", "-z").Output()
	require.NoError(p.t, err)
	for _, path := range strings.Split(string(out), "\x00") {
		require.False(p.t, strings.HasPrefix(path, "/") || strings.Contains("/"+path+"/", "/../") || strings.Contains("/"+path+"/", "/.git/"), path)
	}
}

// swapping puts a link in the place of a folder, and back, as fast as it can.
const swapping = `import ctypes
l = ctypes.CDLL(None)
while True:
    l.renameat2(-100, b"d", -100, b"link", 2)
`

// A process of the command swaps folder and link while a large tree is checked out, so that files land behind the link.
// Trusted Git never runs beside a command, and nothing of a command outlives its boundary.
func TestP12Attack27AFolderBecomesALinkDuringACheckout(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	const tree = `
mkdir d; for i in $(seq 500); do echo $i > d/f$i; done; git add d; git commit -q -m many; ln -s $OUT link`
	attack{
		prepare: func(p *place) { p.file(filepath.Join(p.w, "swap.py"), swapping) },
		strike: func(p *place) {
			p.works(tree)
			if p.layout == control {
				swap := p.as(p.w, "bash", "-c", "exec python3 swap.py")
				require.NoError(p.t, swap.Start())
				defer func() { _ = swap.Process.Kill(); _ = swap.Wait() }()
				for range 100 {
					p.works("rm -rf d/* link/f* || true")
					p.trusted("checkout", "-q", "-f", "--", ".")
					if left, err := os.ReadDir(p.out); err == nil && len(left) > 0 {
						return
					}
				}
				return
			}
			p.command("rm -rf d/*; (setsid python3 swap.py &) ; true")
			held := p.hold("setsid python3 swap.py & swap=$!; sleep 0.5; kill $swap")
			done := make(chan struct{})
			go func() {
				defer close(done)
				for _, args := range [][]string{{"checkout", "-f", "--", "."}, {"reset", "--hard"}, {"restore", "."}, {"status"}} {
					p.trusted(args...)
				}
			}()
			held.release()
			<-done
		},
	}.run(t)
}
