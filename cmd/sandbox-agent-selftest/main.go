// Command sandbox-agent-selftest attacks a running agent from inside its sandboxes, on the operator's own node, and says which
// promises held. It is static and needs nothing but the agent's socket, Git, and a workspace root that it may write into; it makes a
// repository and a session there and deletes both. As a command in the sandbox it is the attacker as well.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/attack"
	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
)

// version is set by the build.
var version = "devel"

// exitFailed is the code of a self-test that could not begin: a wrong command line, an agent that does not answer.
const exitFailed = 125

const usage = `usage: sandbox-agent-selftest [flags]

Attacks the agent that listens at the socket, from inside a session of its own for each runtime, and looks at the node
meanwhile. Run it as root on the node, beside the agent: what another user can't see it can't judge. It bounds what it uses up,
and deletes what it makes.

Exit codes: 0 every promise that was attacked held, or the runtime says that it can't keep it; 1 one was broken; 2 an attack could
not be run, so nothing is known of it; 125 the self-test itself could not begin.

`

type options struct {
	socket, stateDir, root, owner, only string
	runtimes                            []string
	json, list                          bool
}

func main() {
	inside.Init()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stdout, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err == nil && o == nil {
		return 0
	}
	var report attack.Report
	if err == nil {
		report, err = o.attack(ctx, stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sandbox-agent-selftest:", err)
		return exitFailed
	}
	return report.ExitCode()
}

// parse gives nil where the command line asks for something that is answered here.
func parse(args []string, stdout, stderr io.Writer) (*options, error) {
	var o options
	flags := flag.NewFlagSet("sandbox-agent-selftest", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { fmt.Fprint(stderr, usage); flags.PrintDefaults() }
	socket := os.Getenv("SANDBOX_AGENT_SOCKET")
	if socket == "" {
		socket = "/run/sandbox-agent/exec.sock"
	}
	flags.StringVar(&o.socket, "socket", socket, "the agent's unix socket")
	flags.StringVar(&o.stateDir, "state-dir", "/var/lib/sandbox-agent", "the agent's state `FOLDER`, which commands look for")
	flags.StringVar(&o.root, "workspace-root", "", "the `FOLDER` for the throw-away repository (default: the first workspace root of the agent that is there)")
	flags.StringVar(&o.owner, "owner", "65534:65534", "`UID:GID` that owns the throw-away repository, when root runs this")
	flags.StringVar(&o.only, "only", "", "only the attacks whose promise or name has this `TEXT`")
	flags.BoolVar(&o.json, "json", false, "print the report as JSON at the end")
	flags.BoolVar(&o.list, "list", false, "print the attacks, and run none")
	ask := flags.Bool("version", false, "print the version")
	flags.Func("runtime", "a `RUNTIME` whose sandboxes are attacked; can be given again (default: the node's default)", func(name string) error {
		o.runtimes = append(o.runtimes, name)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case flags.NArg() > 0:
		return nil, fmt.Errorf("there is no argument %q: all that can be said is said with flags (-h)", flags.Arg(0))
	case *ask:
		fmt.Fprintln(stdout, "sandbox-agent-selftest", version)
		return nil, nil
	case o.list:
		for _, a := range o.table() {
			fmt.Fprintf(stdout, "%-3s  %s\n", a.Promise, a.Name)
		}
		return nil, nil
	case len(o.table()) == 0:
		return nil, fmt.Errorf("no attack has %q in its promise or name (-list shows all)", o.only)
	}
	return &o, nil
}

func (o *options) table() []attack.Attack {
	return slices.DeleteFunc(slices.Clone(attack.Table), func(a attack.Attack) bool {
		return o.only != "" && a.Promise != o.only && !strings.Contains(a.Name, o.only)
	})
}

func (o *options) attack(ctx context.Context, stdout io.Writer) (report attack.Report, err error) {
	c := client.New(o.socket, client.Options{})
	defer c.Close()
	info, err := c.API().Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	if err != nil {
		return report, fmt.Errorf("asking the agent at %s: %w; name its socket with -socket, and run this as a user that it lets call", o.socket, err)
	}
	common := attack.Options{Client: c, Socket: o.socket, StateDir: o.stateDir}
	if common.Root, err = o.workspaceRoot(info.GetWorkspaceRoots()); err != nil {
		return report, err
	}
	if common.UID, common.GID, err = o.ids(); err != nil {
		return report, err
	}
	if common.Program, err = os.Executable(); err != nil {
		return report, err
	}
	runtimes := o.runtimes
	if len(runtimes) == 0 {
		runtimes = []string{info.GetDefaultRuntime()}
	}
	for _, name := range runtimes {
		common.Runtime = name
		show := func(attack.Result) {}
		if !o.json {
			fmt.Fprintf(stdout, "runtime %s of the agent %s, Linux %s\n", name, info.GetVersion(), info.GetKernel())
			show = func(r attack.Result) { fmt.Fprintln(stdout, r.Text()) }
		}
		report.Add(common.Attack(ctx, o.table(), show))
	}
	if !o.json {
		_, err = fmt.Fprintln(stdout, report.Summary())
		return report, err
	}
	e := json.NewEncoder(stdout)
	e.SetIndent("", "  ")
	return report, e.Encode(report)
}

func (o *options) workspaceRoot(roots []string) (string, error) {
	if o.root != "" {
		return o.root, nil
	}
	for _, root := range roots {
		if st, err := os.Stat(root); err == nil && st.IsDir() {
			return root, nil
		}
	}
	return "", fmt.Errorf("none of the agent's workspace roots is there (%s): make one, or name one of its folders with -workspace-root", strings.Join(roots, ", "))
}

// ids are whose the repository is. Root's own is refused by an agent, and another user can make only its own.
func (o *options) ids() (uid, gid int, err error) {
	if os.Geteuid() != 0 {
		return os.Geteuid(), os.Getegid(), nil
	}
	u, g, _ := strings.Cut(o.owner, ":")
	uid, errU := strconv.Atoi(u)
	gid, errG := strconv.Atoi(g)
	if errU != nil || errG != nil || uid <= 0 || gid <= 0 {
		return 0, 0, fmt.Errorf("-owner %q is no UID:GID of two numbers above 0", o.owner)
	}
	return uid, gid, nil
}
