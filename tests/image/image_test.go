package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdxlib"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

var images = []string{"sandbox", "agent"}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("/var/tmp", "sa-images-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	out = dir
	return node.Main(m)
}

var (
	out   string
	built sync.Once
	said  string
	why   error
)

// built images: once for all tests, with the trial of every tool at the end.
func build(t *testing.T) string {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.Program("bwrap"), testkit.Program("jq"), testkit.Program("dpkg-deb"))
	built.Do(func() { said, why = makeImages("first") })
	require.NoError(t, why)
	return filepath.Join(out, "first")
}

func script(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join("..", "..", "scripts", name), args...)
	cmd.Env = os.Environ()
	return cmd
}

// makeImages answers with what the build says.
func makeImages(name string, args ...string) (said string, err error) {
	cmd := script("image.sh", append([]string{"-o", filepath.Join(out, name)}, args...)...)
	// Another machine's habits, in the second build.
	if len(args) > 0 {
		cmd.Env = append(cmd.Env, "TZ=Pacific/Chatham", "LC_ALL=tr_TR.UTF-8", "LANG=tr_TR.UTF-8")
	}
	b, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, b)
	}
	return string(b), nil
}

func TestTwoBuildsAreTheSameToTheByte(t *testing.T) {
	first := build(t)
	_, err := makeImages("second", "-n")
	require.NoError(t, err)
	for _, name := range images {
		for _, file := range []string{".digest", ".tar", ".packages", ".spdx.json"} {
			a, err := os.ReadFile(filepath.Join(first, name+file))
			require.NoError(t, err)
			b, err := os.ReadFile(filepath.Join(out, "second", name+file))
			require.NoError(t, err)
			require.NotEmpty(t, a)
			require.Equal(t, a, b, "%s%s", name, file) //nolint:testifylint // the archives' bytes would fill the screen
		}
	}
}

func TestASessionRunsOnTheSandboxImageInContainerd(t *testing.T) {
	dir := build(t)
	d := containerd.Start(t, "runc")
	for _, name := range images {
		f, err := os.Open(filepath.Join(dir, name+".tar"))
		require.NoError(t, err)
		defer f.Close()
		c := d.Client()
		defer c.Close()
		imported, err := c.Import(t.Context(), f)
		require.NoError(t, err)
		require.Len(t, imported, 1)
		require.Equal(t, digestOf(t, dir, name), imported[0].Target.Digest.String(), "containerd has what the build said")
		require.Regexp(t, `^localhost/sandbox-agent/`+name+`:`, imported[0].Name)
	}
	digest := digestOf(t, dir, "sandbox")
	a := node.Start(t, node.Options{Config: fmt.Sprintf("rootfs: localhost/sandbox-agent/sandbox@%s\nruntime: {default: runc, allowed: [runc]}\ncontainerd: {address: %s}", digest, d.Address)})
	repo := testkit.Repo(t, 1000)
	s, err := a.Client.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: repo, Branch: "work", Worktree: filepath.Join(filepath.Dir(repo), "work")},
	})
	require.NoError(t, err)
	r, err := a.Client.Exec(t.Context(), &sandboxv1.ExecRequest{
		SessionId: s.GetSessionId(), Command: "cut -c 1-2 /etc/debian_version; git log -1 --format=%s; command -v rg jq kubectl; touch /usr/x",
	})
	require.NoError(t, err)
	require.Equal(t, "13\nFirst\n/usr/bin/rg\n/usr/bin/jq\n/usr/bin/kubectl\n", string(r.GetStdout()), "the root file system is the image's, and not this machine's")
	require.Contains(t, string(r.GetStderr()), "Read-only file system")
}

func digestOf(t *testing.T, dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name+".digest"))
	require.NoError(t, err)
	return strings.TrimSpace(string(b))
}

func TestAToolThatDoesNotWorkFailsTheBuild(t *testing.T) {
	dir := build(t)
	tools := filepath.Join(testkit.StateDir(t), "tools")
	require.NoError(t, os.WriteFile(tools, []byte("bash\ttrue\nmissing\tno-such-tool --version\nbash-again\ttrue\n"), 0o600))
	said, err := script("image-try.sh", dir, tools).CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, string(said))
	require.Regexp(t, `bash +works`, string(said))
	require.Regexp(t, `missing +FAILS: .*no-such-tool: command not found`, string(said))
	require.Contains(t, string(said), "these don't work in a sandbox: missing\n")
}

// entries are the layers' entries of an image.
func entries(t *testing.T, dir, name string) (all []*tar.Header) {
	t.Helper()
	walk(t, dir, name, func(h *tar.Header, _ io.Reader) { all = append(all, h) })
	return all
}

// walk visits the layers' entries of an image, with their content.
func walk(t *testing.T, dir, name string, visit func(*tar.Header, io.Reader)) {
	t.Helper()
	var index v1.Index
	var manifest v1.Manifest
	readJSON(t, filepath.Join(dir, name, v1.ImageIndexFile), &index)
	require.Len(t, index.Manifests, 1)
	require.Equal(t, digestOf(t, dir, name), index.Manifests[0].Digest.String())
	blob := func(d v1.Descriptor) string {
		return filepath.Join(dir, name, v1.ImageBlobsDir, d.Digest.Algorithm().String(), d.Digest.Encoded())
	}
	readJSON(t, blob(index.Manifests[0]), &manifest)
	for _, layer := range manifest.Layers {
		f, err := os.Open(blob(layer))
		require.NoError(t, err)
		defer f.Close()
		z, err := gzip.NewReader(f)
		require.NoError(t, err)
		for r := tar.NewReader(z); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			visit(h, r)
		}
	}
}

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, v))
}

func TestNoFileOfAnImageGivesMoreThanItShould(t *testing.T) {
	dir := build(t)
	for _, name := range images {
		seen := map[string]bool{}
		for _, h := range entries(t, dir, name) {
			require.Contains(t, []byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink}, h.Typeflag, h.Name)
			require.Zero(t, h.Mode&0o6000, "%s: %s has a set-id bit", name, h.Name)
			require.Zero(t, h.Uid, "%s: %s is not root's", name, h.Name)
			if h.Typeflag != tar.TypeSymlink && h.Mode&0o002 != 0 {
				require.Equal(t, int64(0o1777), h.Mode, "%s: anybody can write %s", name, h.Name)
			}
			require.False(t, filepath.IsAbs(h.Name) || strings.Contains(h.Name, ".."), h.Name)
			if h.Typeflag == tar.TypeLink {
				require.True(t, seen[h.Linkname], "%s: the link %s comes before its file", name, h.Name)
			}
			seen[h.Name] = true
		}
		require.Greater(t, len(seen), 100)
	}
}

func TestTheAgentImageHasNoProgramsButTheAgentsAndGit(t *testing.T) {
	dir := build(t)
	var programs []string
	for _, h := range entries(t, dir, "agent") {
		if h.Typeflag == tar.TypeReg && h.Mode&0o111 != 0 && !strings.Contains(h.Name, ".so") {
			programs = append(programs, h.Name)
		}
	}
	slices.Sort(programs)
	require.Equal(t, []string{"usr/bin/git", "usr/local/bin/pid1", "usr/local/bin/receiptd", "usr/local/bin/sandbox-agent"}, programs)
}

func TestTheProgramsOfThisProjectNeedNoLoader(t *testing.T) {
	dir := build(t)
	for name, want := range map[string][]string{
		"agent":   {"usr/local/bin/pid1", "usr/local/bin/receiptd", "usr/local/bin/sandbox-agent"},
		"sandbox": {"usr/local/libexec/sandbox-agent/pid1", "usr/local/libexec/sandbox-agent/receiptd"},
	} {
		var seen []string
		walk(t, dir, name, func(h *tar.Header, r io.Reader) {
			if !slices.Contains(want, h.Name) {
				return
			}
			seen = append(seen, h.Name)
			b, err := io.ReadAll(r)
			require.NoError(t, err)
			f, err := elf.NewFile(bytes.NewReader(b))
			require.NoError(t, err)
			for _, p := range f.Progs {
				require.NotEqual(t, elf.PT_INTERP, p.Type, "%s: %s", name, h.Name)
			}
		})
		slices.Sort(seen)
		require.Equal(t, want, seen)
	}
}

func TestTheBuildTriesEveryPackageThatTheSandboxImageIsAskedFor(t *testing.T) {
	build(t)
	var tried []string
	for _, line := range lines(t, "tools") {
		name, _, _ := strings.Cut(line, "\t")
		require.Regexp(t, `(?m)^  `+regexp.QuoteMeta(name)+` +works$`, said, "the last step of a build")
		tried = append(tried, name)
	}
	require.Subset(t, tried, lines(t, "packages"))
	require.Subset(t, tried, []string{"bash", "coreutils", "receiptd", "pid1"}, "what no line of packages names")
}

// lines are those of a file of rootfs that say something.
func lines(t *testing.T, name string) (all []string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "rootfs", name))
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			all = append(all, line)
		}
	}
	return all
}

func TestTheBillOfMaterialsIsValidAndNamesEveryPackage(t *testing.T) {
	dir := build(t)
	for _, name := range images {
		f, err := os.Open(filepath.Join(dir, name+".spdx.json"))
		require.NoError(t, err)
		defer f.Close()
		doc, err := spdxjson.Read(f)
		require.NoError(t, err)
		require.NoError(t, spdxlib.ValidateDocument(doc))
		require.Equal(t, spdx.Version, doc.SPDXVersion)
		described, err := spdxlib.GetDescribedPackageIDs(doc)
		require.NoError(t, err)
		require.Equal(t, []common.ElementID{common.ElementID("Image-" + name)}, described)
		var locators []string
		for _, p := range doc.Packages {
			for _, ref := range p.PackageExternalReferences {
				locators = append(locators, ref.Locator)
			}
		}
		list, err := os.ReadFile(filepath.Join(dir, name+".packages"))
		require.NoError(t, err)
		for line := range strings.Lines(string(list)) {
			pkg := strings.Fields(line)
			require.Len(t, pkg, 4)
			require.True(t, slices.ContainsFunc(locators, func(l string) bool { return strings.HasPrefix(l, "pkg:deb/debian/"+pkg[0]+"@") }), pkg[0])
		}
		require.True(t, slices.ContainsFunc(locators, func(l string) bool { return strings.HasPrefix(l, "pkg:golang/golang.org/x/sys@") }), name)
	}
}
