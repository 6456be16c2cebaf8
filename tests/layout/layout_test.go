package layout

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/sandbox-agent/sandbox-agent"

// pkg is the part of "go list -json" that the rules look at.
type pkg struct {
	ImportPath, Dir string
	Standard        bool
	Imports         []string
	CgoFiles        []string
	Module          *struct{ Path string }
}

func goList(t *testing.T, env []string, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Standard,Imports,CgoFiles,Module"}, args...)...)
	cmd.Dir = root(t)
	cmd.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		all = append(all, p)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(t, err)
	return dir
}

// linked are the modules, other than this one and the standard library, that end up in a program without cgo.
func linked(t *testing.T, program string) (modules []string, packages []pkg) {
	t.Helper()
	packages = goList(t, []string{"CGO_ENABLED=0"}, "-deps", program)
	for _, p := range packages {
		if !p.Standard && p.Module.Path != module && !slices.Contains(modules, p.Module.Path) {
			modules = append(modules, p.Module.Path)
		}
	}
	slices.Sort(modules)
	return modules, packages
}

func TestPid1LinksTheStandardLibraryAndUnixAndNothingElse(t *testing.T) {
	modules, packages := linked(t, "./cmd/pid1")
	require.Equal(t, []string{"golang.org/x/sys"}, modules)
	for _, p := range packages {
		require.Empty(t, p.CgoFiles, p.ImportPath)
		require.False(t, strings.HasPrefix(p.ImportPath, "net"), "%s: pid1 opens no connection", p.ImportPath)
	}
}

func TestReceiptdLinksTtrpcAndWhatThatNeedsAndNothingElse(t *testing.T) {
	modules, packages := linked(t, "./cmd/receiptd")
	require.Equal(t, []string{
		"github.com/containerd/log", // ttrpc's
		"github.com/containerd/ttrpc",
		"github.com/sirupsen/logrus", // containerd/log's
		"golang.org/x/sys",
		"google.golang.org/genproto/googleapis/rpc", // ttrpc's: the status message
		"google.golang.org/grpc",                    // ttrpc's: codes and status, no transport
		"google.golang.org/protobuf",
	}, modules)
	for _, p := range packages {
		require.Empty(t, p.CgoFiles, p.ImportPath)
		require.NotContains(t, []string{"net/http", "os/exec", "google.golang.org/grpc"}, p.ImportPath, "receiptd has no use for it")
	}
}

// layers stand from the top down: a package may import its own layer and those below it.
var layers = []struct {
	name     string
	prefixes []string
}{
	{"programs", []string{"cmd/"}},
	{"the command line", []string{"internal/cli", "internal/mcp"}},
	{"the public API's handlers", []string{"internal/rpc"}},
	{"the agent", []string{"internal/agent"}},
	{"the node check", []string{"internal/nodecheck"}},
	{"runtimes and receiptd", []string{"internal/runtime", "internal/network", "internal/receiptd", "internal/config", "internal/metrics"}},
	{"the attack suite", []string{"internal/attack"}},
	{"the public client", []string{"client"}},
	{"libraries", []string{"pkg/"}},
	{"the generated API", []string{"api/"}},
}

func layerOf(path string) int {
	for i, l := range layers {
		for _, p := range l.prefixes {
			if path == strings.TrimSuffix(p, "/") || strings.HasPrefix(path, strings.TrimSuffix(p, "/")+"/") {
				return i
			}
		}
	}
	return -1
}

func TestImportsPointDownwardsOnly(t *testing.T) {
	for _, p := range goList(t, nil, "./...") {
		from := strings.TrimPrefix(p.ImportPath, module+"/")
		layer := layerOf(from)
		if layer < 0 {
			continue // tests, tools, bench: nobody imports them (below)
		}
		for _, imported := range p.Imports {
			to, own := strings.CutPrefix(imported, module+"/")
			if !own {
				continue
			}
			below := layerOf(to)
			require.GreaterOrEqual(t, below, 0, "%s imports %s, which only tests and developers' programs may", from, to)
			require.GreaterOrEqual(t, below, layer, "%s (%s) imports %s (%s)", from, layers[layer].name, to, layers[below].name)
		}
	}
}

// Other people's programs import the client, and it brings them nothing of the agent.
func TestThePublicClientIsSmall(t *testing.T) {
	for _, p := range goList(t, []string{"CGO_ENABLED=0"}, "-deps", "./client") {
		own, ok := strings.CutPrefix(p.ImportPath, module+"/")
		require.False(t, ok && !slices.Contains([]string{
			"client", "api/sandbox/v1", "api/sandbox/v1/sandboxv1connect", "pkg/receipt", "pkg/receipt/verify",
		}, own), "client links %s", own)
	}
	modules, _ := linked(t, "./client")
	require.Equal(t, []string{
		"connectrpc.com/connect/v2",
		"github.com/secure-systems-lab/go-securesystemslib",
		"golang.org/x/crypto", // securesystemslib's
		"golang.org/x/sys",    // the receipt's store
		"google.golang.org/protobuf",
	}, modules)
}

// allowedAmongPkg are the imports from one library to another.
var allowedAmongPkg = map[string][]string{
	"nsexec": {"receipt"},
}

func TestLibrariesStandAlone(t *testing.T) {
	for _, p := range goList(t, nil, "./pkg/...") {
		from := strings.TrimPrefix(p.ImportPath, module+"/pkg/")
		for _, imported := range p.Imports {
			to, own := strings.CutPrefix(imported, module+"/")
			if !own {
				continue
			}
			require.True(t, strings.HasPrefix(to, "pkg/"), "pkg/%s imports %s: a library knows nothing of this program", from, to)
			a, b := top(from), top(strings.TrimPrefix(to, "pkg/"))
			if a != b {
				require.Contains(t, allowedAmongPkg[a], b, "pkg/%s imports %s", from, to)
			}
		}
	}
}

func top(path string) string {
	first, _, _ := strings.Cut(path, "/")
	return first
}

func TestEachPackageSaysWhatItIsFor(t *testing.T) {
	for _, p := range goList(t, nil, "./...") {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		if strings.HasPrefix(path, "api/") {
			continue // the protos say it
		}
		files, err := filepath.Glob(filepath.Join(p.Dir, "*.go"))
		require.NoError(t, err)
		said := false
		for _, f := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.PackageClauseOnly|parser.ParseComments)
			require.NoError(t, err)
			said = said || parsed.Doc != nil && len(parsed.Doc.Text()) > 40
		}
		require.True(t, said, "%s has no package comment: say what lives there and who may import it", path)
		// A small package inside another may say it at the top of its only file.
		if strings.Count(path, "/") == 1 && (strings.HasPrefix(path, "pkg/") || strings.HasPrefix(path, "internal/")) {
			require.FileExists(t, filepath.Join(p.Dir, "doc.go"), "%s", path)
		}
	}
}

var libcontainer = regexp.MustCompile(`^github\.com/opencontainers/runc(/|$)`)

func TestLibcontainerStaysBehindTheEmbeddedRuntime(t *testing.T) {
	for _, p := range goList(t, nil, "./...") {
		from := strings.TrimPrefix(p.ImportPath, module+"/")
		if from == "internal/runtime/embedded" {
			continue
		}
		for _, imported := range p.Imports {
			require.False(t, libcontainer.MatchString(imported), "%s imports %s: its API moves, so only internal/runtime/embedded may", from, imported)
		}
	}
}

// A tool that has no agent answers with an error (P14). What could start a process must not even be within reach; the SDK
// itself has a transport that can, so it is named.
func TestTheMCPServerCanStartNoProcess(t *testing.T) {
	seen := 0
	for _, p := range goList(t, nil, "-deps", "./internal/mcp") {
		if p.Standard || p.Module.Path != module {
			continue
		}
		seen++
		require.NotContains(t, p.Imports, "os/exec", p.ImportPath)
		if !strings.HasSuffix(p.ImportPath, "internal/mcp") {
			continue
		}
		files, err := filepath.Glob(filepath.Join(p.Dir, "*.go"))
		require.NoError(t, err)
		for _, f := range files {
			source, err := os.ReadFile(f)
			require.NoError(t, err)
			require.NotRegexp(t, `CommandTransport|StartProcess|ForkExec|syscall\.Exec`, string(source), f)
		}
	}
	require.Greater(t, seen, 2)
}

func TestWhatNeedsRootAsksForItBeforeItBuildsAnything(t *testing.T) {
	for _, target := range []string{"demo", "test", "test-long", "test-kernel", "test-kata", "test-kata-vm", "image", "bench"} {
		cmd := exec.Command("make", "--no-print-directory", "--dry-run", target) // make lint runs this test: another make's child says where it is
		cmd.Dir = root(t)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Regexp(t, `^scripts/need-root\.sh "make `+target+`"\n`, string(out))
	}
}
