package egress

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

const (
	subnet, subnet6       = "10.231.0.0/16", "fd23:1::/64"
	cniSubnet, cniSubnet6 = "10.77.0.0/24", "fd77::/64"
)

// bridged is a configuration of real CNI plugins, with addresses of both families. DIR is a folder of the test's.
const bridged = `{"cniVersion": "1.0.0", "name": "lab", "plugins": [{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "DIR/ipam", "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}
}]}`

// kind is a runtime with a network mode; an empty runtime is the agent's default.
type kind struct{ runtime, mode string }

func (k kind) String() string { return strings.Trim(k.runtime+"-"+k.mode, "-") }

// world is a lab with an agent on its node, and a nameserver behind the node's uplink.
type world struct {
	*netlab.Lab
	*node.Agent
	t    *testing.T
	zone *netlab.Zone
	// kinds are what the agent hosts.
	kinds []kind
	// all is the whole test: the repositories are its, as the agent is, when t is a subtest.
	all *testing.T
}

// newWorld starts an agent with the default runtime and its network mode bridge.
func newWorld(t *testing.T) *world {
	t.Helper()
	testkit.Leaks(t)
	w := &world{t: t, all: t, Lab: netlab.New(t), kinds: []kind{{"", "bridge"}}}
	w.serve("", "")
	return w
}

// newWorlds starts an agent that hosts every kind; one alone where the tests are run over another runtime.
func newWorlds(t *testing.T, bounds string) *world {
	t.Helper()
	if os.Getenv(node.RuntimeEnv) != "" {
		testkit.Leaks(t)
		w := &world{t: t, all: t, Lab: netlab.New(t), kinds: []kind{{"", "bridge"}}}
		w.serve("", bounds)
		return w
	}
	containerd.Need(t, "runc", "cni")
	testkit.Leaks(t)
	w := &world{t: t, all: t, Lab: netlab.New(t, cniSubnet, cniSubnet6), kinds: []kind{{"embedded", "bridge"}, {"runc", "bridge"}, {"runc", "cni"}}}
	for _, key := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		w.Sysctl(w.Node, "net/bridge/"+key, "1")
	}
	conf, d := testkit.StateDir(t), containerd.Start(t, "runc")
	require.NoError(t, os.WriteFile(filepath.Join(conf, "10-test.conflist"), []byte(strings.ReplaceAll(bridged, "DIR", conf)), 0o600))
	w.serve(fmt.Sprintf("  cni: {conf_dir: %s, bin_dirs: [%s]}\n", conf, containerd.Folder(t, "cni")),
		bounds, fmt.Sprintf("runtime: {default: embedded, allowed: [embedded, runc]}\ncontainerd: {address: %s}\n", d.Address))
	return w
}

// serve starts the agent: cni and bounds are lines of network and of network.egress, more are others.
func (w *world) serve(cni, bounds string, more ...string) {
	w.t.Helper()
	w.zone = w.DNS(w.World, netlab.Web+":53")
	modes := "[none, bridge]"
	if cni != "" {
		modes = "[none, bridge, cni]"
	}
	w.Agent = node.Start(w.t, node.Options{
		Program: w.Program(node.Program()),
		Config: fmt.Sprintf(`network:
  default: bridge
  allowed: %s
  nameservers: [%s]
  bridge: {subnet: %s, subnet6: '%s'}
%s  egress:
    default: allowlist
    allowed: [none, open, allowlist]
%s    allow:
      - {to: web.example, ports: [80, 8080, 8081], reason: the site}
      - {to: web.example, ports: [4000], protocol: udp, reason: its clock}
      - {to: '*.cdn.example', ports: [80, 8080], reason: its content}
      - {to: example.com, ports: [443], reason: a site with a certificate}
      - {to: closed.example, ports: [80], reason: a site that is down}
%s`, modes, netlab.Web, subnet, subnet6, cni, bounds, strings.Join(more, "")),
	})
}

func (w *world) session(id string, n *sandboxv1.Network) (*sandboxv1.Session, error) {
	w.t.Helper()
	return w.sessionOf(w.kinds[0], id, n)
}

// sessionOf is a session of a kind; the kind's name is added to its id.
func (w *world) sessionOf(k kind, id string, n *sandboxv1.Network) (*sandboxv1.Session, error) {
	w.t.Helper()
	if n == nil {
		n = &sandboxv1.Network{}
	}
	if n.GetMode() == "" {
		n.Mode = k.mode
	}
	repo := testkit.Repo(w.all, 1234)
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	return w.Client.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		SessionId: id, Network: n, Runtime: k.runtime,
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: testkit.Worktree(w.all, 1234, repo, "topic")},
	})
}

// each calls f for each kind, with a session of the default policy and one of the policy open.
func (w *world) each(f func(k kind, listed, open string)) {
	w.t.Helper()
	top := w.t
	for _, k := range w.kinds {
		top.Run(k.String(), func(t *testing.T) {
			w.t = t
			defer func() { w.t = top }()
			_, err := w.sessionOf(k, "listed-"+k.String(), nil)
			require.NoError(t, err)
			_, err = w.sessionOf(k, "open-"+k.String(), &sandboxv1.Network{Egress: "open"})
			require.NoError(t, err)
			f(k, "listed-"+k.String(), "open-"+k.String())
		})
	}
}

func (w *world) run(session, command string) *sandboxv1.ExecResult {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: session, Command: command, Text: true})
	require.NoError(w.t, err)
	return r.ExecResult
}

// dial is a command that connects and prints what it is told.
func dial(address string, port int) string {
	return fmt.Sprintf("exec 3<>/dev/tcp/%s/%d && cat <&3", address, port)
}

// tryAll is a command that connects to port 80 of each address, and says which it reached.
func tryAll(addresses ...string) string {
	return "for a in " + strings.Join(addresses, " ") + "; do (exec 3<>/dev/tcp/$a/80) && echo reached $a; done; true"
}

func TestACommandReachesWhatIsListedAndIsToldWhatIsNot(t *testing.T) {
	w := newWorlds(t, "")
	w.TCP(w.World, "web", netlab.Web+":80")
	w.TCP(w.World, "web6", "["+netlab.Web6+"]:80")
	w.TCP(w.World, "other", netlab.Other+":80")
	w.TCP(w.World, "metadata", netlab.Metadata+":80")
	w.TCP(w.World, "metadata6", "["+netlab.Metadata6+"]:80")
	w.UDP(w.World, "clock", netlab.Web+":4000")
	w.zone.SetTTL(0) // each question is asked anew
	w.zone.Set("six.cdn.example", netlab.Web6)
	w.zone.Set("other.example", netlab.Other)
	tools := w.serveTools()
	w.each(func(k kind, listed, open string) {
		w.zone.Set("web.example", netlab.Web)
		w.reached(listed, open)
		w.refused(listed)
		w.turned(k, listed)
		w.apart(k, listed)
		w.tools(listed, open, tools)
	})
	w.showAndProbe("listed-" + w.kinds[0].String())
	w.restart()
}

// reached is what a listed name opens, and what its command is told of it.
func (w *world) reached(listed, open string) {
	w.t.Helper()
	for _, to := range []string{"web.example", "other.example", netlab.Other} {
		r := w.run(open, dial(to, 80))
		require.Contains(w.t, r.GetStdoutText(), " to ", "control: under no list %s answers: %s", to, r.GetStderrText())
	}
	r := w.run(listed, dial(netlab.Web, 80))
	require.Empty(w.t, r.GetStdoutText(), "before its name was asked for")
	require.Equal(w.t, []string{netlab.Web + ":80/tcp"}, r.GetRefusedDestinations())
	r = w.run(listed, dial("web.example", 80))
	require.Contains(w.t, r.GetStdoutText(), "web to ", r.GetStderrText())
	require.Empty(w.t, r.GetRefusedDestinations())
	use, signed := r.GetNetwork(), r.GetUsage()
	require.EqualValues(w.t, 1, use.GetConnections())
	require.NotZero(w.t, use.GetBytesOut())
	require.Greater(w.t, signed.GetNetworkSentBytes(), use.GetBytesOut(), "the question for the name is in the receipt's number too")
	require.NotZero(w.t, signed.GetNetworkReceivedBytes())
	r = w.run(listed, dial("six.cdn.example", 80))
	require.Contains(w.t, r.GetStdoutText(), "web6 to", r.GetStderrText())
	r = w.run(listed, "exec 3<>/dev/udp/web.example/4000 && echo >&3 && head -n1 <&3")
	require.Equal(w.t, "clock\n", r.GetStdoutText(), r.GetStderrText())
	r = w.run(listed, "true")
	require.Empty(w.t, r.GetRefusedDestinations(), "each command is told its own")
	require.Zero(w.t, r.GetNetwork().GetRefused())
	require.Zero(w.t, r.GetNetwork().GetConnections())
}

// refused is what is not listed: in the answer, among the events and in the log.
func (w *world) refused(listed string) {
	w.t.Helper()
	asked := len(w.zone.Asked())
	r := w.run(listed, tryAll(netlab.Other, netlab.Metadata, netlab.Metadata6, netlab.NodeAddr, "other.example", "never.listed.example"))
	require.Empty(w.t, r.GetStdoutText())
	told := r.GetRefusedDestinations()
	for _, what := range []string{netlab.Other + ":80/tcp", netlab.Metadata + ":80/tcp", netlab.NodeAddr + ":80/tcp", "other.example", "never.listed.example"} {
		require.Contains(w.t, told, what)
	}
	require.NotZero(w.t, r.GetNetwork().GetRefused())
	require.Len(w.t, w.zone.Asked(), asked, "nothing of the names went out")
	require.ElementsMatch(w.t, told, w.events(listed, r.GetExecId()))

	r = w.run(listed, "for p in {1000..1099}; do (exec 3<>/dev/tcp/"+netlab.Other+"/$p) 2>/dev/null && echo reached; done; true")
	require.Empty(w.t, r.GetStdoutText())
	require.Len(w.t, r.GetRefusedDestinations(), 64, "a flood is bounded")
	require.GreaterOrEqual(w.t, r.GetNetwork().GetRefused(), uint64(100), "and counted")
	require.Len(w.t, w.events(listed, r.GetExecId()), 64)
	log, err := os.ReadFile(w.Log)
	require.NoError(w.t, err)
	logged := map[string]bool{}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "refused over the network") && strings.Contains(line, r.GetExecId()) {
			require.Contains(w.t, line, listed, "the session")
			for _, what := range r.GetRefusedDestinations() {
				if strings.Contains(line, what) {
					require.False(w.t, logged[what], "each has one line: %s", line)
					logged[what] = true
				}
			}
		}
	}
	require.Len(w.t, logged, 64)
}

// events are the refusals that the session's events tell of an exec, all of them before its result.
func (w *world) events(session, exec string) (refused []string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	ended := false
	for e, err := range w.Client.WatchEvents(ctx, &sandboxv1.WatchEventsRequest{SessionId: session, UntilNow: true}) {
		require.NoError(w.t, err)
		switch {
		case e.GetExecId() != exec:
		case e.GetKind() == "egress.refused":
			require.False(w.t, ended, "after the result")
			require.NotZero(w.t, e.GetGeneration())
			refused = append(refused, e.GetDetail())
		case e.GetKind() == "exec.result":
			ended = true
		}
	}
	require.True(w.t, ended)
	return refused
}

// turned are listed names whose owner points them elsewhere (DNS rebinding), at once or by an alias.
func (w *world) turned(k kind, listed string) {
	w.t.Helper()
	other, err := w.sessionOf(k, "target-"+k.String(), nil)
	require.NoError(w.t, err)
	var names, hidden []string
	to := append([]string{
		netlab.Metadata, netlab.Metadata6, netlab.NodeAddr, netlab.NodeAddr6, "169.254.7.7", "fe80::7", "127.0.0.1", "::1", "::ffff:127.0.0.1", "10.1.2.3", "192.168.1.1", "fd12::1",
		"169.254.53.53",
	}, other.GetSandbox().GetNetwork().GetAddresses()...)
	for i, a := range to {
		name, alias, target := fmt.Sprintf("%d.%s.cdn.example", i, k), fmt.Sprintf("alias%d.%s.cdn.example", i, k), fmt.Sprintf("%d.%s.hidden.example", i, k)
		names, hidden = append(names, name, alias), append(hidden, target)
		// What a name doesn't have is remembered for a while: it has an address of the family that it will be turned to.
		now := netlab.Web
		if strings.Contains(a, ":") {
			now = netlab.Web6
		}
		w.zone.Set(alias, target)
		w.zone.Set(name, now)
		w.zone.Set(target, now)
	}
	r := w.run(listed, tryAll(names...))
	for _, n := range names {
		require.Contains(w.t, r.GetStdoutText(), "reached "+n+"\n", "control: as long as it leads to another host")
	}
	for i, a := range to {
		w.zone.Set(names[2*i], a)
		w.zone.Set(hidden[i], a)
	}
	r = w.run(listed, tryAll(names...))
	require.Empty(w.t, r.GetStdoutText())
	told := strings.Join(r.GetRefusedDestinations(), "\n") + "\n"
	for _, n := range names {
		require.Contains(w.t, told, n+" (")
	}
	w.zone.Set(hidden[0], netlab.Other)
	r = w.run(listed, dial(names[1], 80))
	require.Contains(w.t, r.GetStdoutText(), "other to ", "an alias may lead to any other host")
	r = w.run(listed, dial(hidden[0], 80))
	require.Equal(w.t, []string{hidden[0]}, r.GetRefusedDestinations(), "the name there is not listed by that")
}

// apart is that what one sandbox has resolved opens nothing to another of the same list, neither before nor after.
func (w *world) apart(k kind, listed string) {
	w.t.Helper()
	target := "target-" + k.String()
	require.Contains(w.t, w.run(listed, dial(netlab.Web, 80)).GetStdoutText(), "web to ", "control: it has asked for the name")
	r := w.run(target, dial(netlab.Web, 80))
	require.Empty(w.t, r.GetStdoutText())
	require.Equal(w.t, []string{netlab.Web + ":80/tcp"}, r.GetRefusedDestinations())
	require.Contains(w.t, w.run(target, dial("web.example", 80)).GetStdoutText(), "web to ")
}

// showAndProbe asks the command line, as from a pod with nothing but the socket.
func (w *world) showAndProbe(session string) {
	w.t.Helper()
	out, err := w.Command(w.World, node.Program(), "egress", "show", session, "--socket", w.Socket).CombinedOutput()
	require.NoError(w.t, err, string(out))
	require.Regexp(w.t, `\*\.cdn\.example:80,8080/tcp +- +its content`, string(out))
	probe := func(more ...string) (string, int) {
		cmd := exec.Command("unshare", append([]string{"--net", "--", node.Program(), "egress", "probe", session, "--socket", w.Socket, "--other", "other.example:80"}, more...)...)
		out, _ := cmd.CombinedOutput()
		return string(out), cmd.ProcessState.ExitCode()
	}
	text, code := probe()
	require.Equal(w.t, 0, code, text)
	require.Contains(w.t, text, "web.example:80")
	require.Contains(w.t, text, netlab.NodeAddr+":10250", "the node's address, which is not this program's")
	for check, want := range map[string]int{"--allowed closed.example:80": 11, "--other web.example:80": 12, "--address " + netlab.Web + ":80": 13, "--management " + netlab.Web + ":80": 15} {
		text, code = probe(strings.Fields(check)...)
		require.Equal(w.t, want, code, "%s: %s", check, text)
	}
	text, code = probe("--json", "--allowed", "closed.example:80", "--address", netlab.Web+":80")
	require.Equal(w.t, 10, code, text)
	var checks []struct {
		Holds bool
		Code  int
	}
	require.NoError(w.t, json.Unmarshal([]byte(text), &checks))
	failed := map[int]bool{}
	for _, c := range checks {
		if !c.Holds {
			failed[c.Code] = true
		}
	}
	require.Equal(w.t, map[int]bool{11: true, 13: true}, failed, text)
}

// restart has the agent killed and started again while commands have connections.
func (w *world) restart() {
	w.t.Helper()
	w.echo(netlab.Web + ":8081")
	answers := map[string]chan string{}
	for _, k := range w.kinds {
		id := "listed-" + k.String()
		worktree := w.worktree(id)
		// What an alias has led to (turned) is open for a minute, which may be over or not.
		require.Contains(w.t, w.run(id, dial(fmt.Sprintf("alias0.%s.cdn.example", k), 80)).GetStdoutText(), "other to ")
		w.closeInKernel(id, netlab.Other, 80)
		answers[id] = make(chan string, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
			defer cancel()
			r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: id, ExecId: "over-a-restart", Text: true,
				Command: "exec 3<>/dev/tcp/web.example/8081 && echo one >&3 && head -n1 <&3; touch opened; until [ -e go ]; do sleep 0.05; done; echo two >&3; head -n1 <&3"})
			if err != nil {
				answers[id] <- err.Error()
				return
			}
			answers[id] <- r.GetStdoutText() + r.GetStderrText()
		}()
		w.Until("a command has its connection", func() bool { _, err := os.Stat(filepath.Join(worktree, "opened")); return err == nil })
		w.closeInKernel(id, netlab.Web, 8081)
	}
	w.Restart()
	for _, k := range w.kinds {
		id := "listed-" + k.String()
		require.NoError(w.t, os.WriteFile(filepath.Join(w.worktree(id), "go"), nil, 0o644))
		require.Equal(w.t, "one\ntwo\n", <-answers[id], "what is established outlives its destination and the agent")
		r := w.run(id, dial(netlab.Web, 8081))
		require.Equal(w.t, []string{netlab.Web + ":8081/tcp"}, r.GetRefusedDestinations(), "nothing was opened by the restart")
		require.Contains(w.t, w.run(id, dial(netlab.Web, 80)).GetStdoutText(), "web to ", "nothing was closed by it either")
		require.Contains(w.t, w.run(id, dial("web.example", 80)).GetStdoutText(), "web to ")
		r = w.run(id, dial(netlab.Other, 80))
		require.Empty(w.t, r.GetStdoutText())
		require.Equal(w.t, []string{netlab.Other + ":80/tcp"}, r.GetRefusedDestinations())
	}
}

// echo sends back what it is sent, until the test ends.
func (w *world) echo(address string) {
	w.t.Helper()
	ln := w.Listen(w.World, address)
	w.t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
}

func (w *world) get(session string) *sandboxv1.Session {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	got, err := w.Client.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: session})
	require.NoError(w.t, err)
	return got.GetSession()
}

func (w *world) worktree(session string) string { return w.get(session).GetWorkspace().GetWorktree() }

// nft runs nft on the node, on the table of the agent's egress rules, whose name takes TABLE's place.
func (w *world) nft(args string) string {
	w.t.Helper()
	testkit.Need(w.t, testkit.Program("nft"))
	tables, err := w.Command(w.Node, "nft", "list", "tables", "inet").CombinedOutput()
	require.NoError(w.t, err, string(tables))
	name := regexp.MustCompile(`sandbox-agent-egress-\S+`).FindString(string(tables))
	require.NotEmpty(w.t, name)
	out, err := w.Command(w.Node, "nft", strings.ReplaceAll(args, "TABLE", "inet "+name)).CombinedOutput()
	require.NoError(w.t, err, string(out))
	return string(out)
}

// closeInKernel takes an address that a name has opened away, as the kernel does when its time is over; before that it looks at
// the time that it has.
func (w *world) closeInKernel(session, address string, port int) {
	w.t.Helper()
	set := "open4-" + w.get(session).GetSandbox().GetId()
	key := fmt.Sprintf("%s . tcp . %d", address, port)
	listed := w.nft("list set TABLE " + set)
	held := regexp.MustCompile(regexp.QuoteMeta(key) + ` timeout (\S+) expires`).FindStringSubmatch(listed)
	require.Len(w.t, held, 2, listed)
	require.Equal(w.t, "1m1s", held[1], "the answer's TTL is 0, and the least is a minute")
	w.nft(fmt.Sprintf("delete element TABLE %s { %s }", set, key))
}

func TestASessionsListIsWithinTheOperatorsAndHasReasons(t *testing.T) {
	w := newWorld(t)
	w.zone.Set("a.cdn.example", netlab.Web)
	w.TCP(w.World, "web", netlab.Web+":80")
	for name, c := range map[string]struct {
		n    *sandboxv1.Network
		want string
	}{
		"no reason":    {&sandboxv1.Network{Allow: []string{"web.example:80"}}, "reason is missing"},
		"not within":   {&sandboxv1.Network{Allow: []string{"web.example:443 x"}}, "network.egress.allow"},
		"not listed":   {&sandboxv1.Network{Allow: []string{"evil.example:80 x"}}, "evil.example:80/tcp"},
		"another mode": {&sandboxv1.Network{Egress: "open", Allow: []string{"web.example:80 x"}}, "allowlist"},
		"no network":   {&sandboxv1.Network{Mode: "none", Egress: "open"}, "network.mode"},
		"no such mode": {&sandboxv1.Network{Egress: "most"}, "network.egress.allowed"},
	} {
		_, err := w.session("refused", c.n)
		require.ErrorContains(t, err, c.want, name)
	}
	_, err := w.session("narrow", &sandboxv1.Network{Allow: []string{"a.cdn.example:80 only this"}})
	require.NoError(t, err)
	require.Equal(t, "web to 203.0.113.2\n", w.run("narrow", dial("a.cdn.example", 80)).GetStdoutText())
	require.Equal(t, []string{"web.example"}, w.run("narrow", dial("web.example", 80)).GetRefusedDestinations())
}

// What is buffered in a socket when its command ends is not sent after the answer.
func TestP3NothingArrivesAfterTheAnswer(t *testing.T) {
	w := newWorld(t)
	const sent = 600000 // more than the receiver's window
	for name, command := range map[string]string{
		"control": "head -c %d /dev/zero >&3 & cat <&3 >/dev/null", // it is still there when its buffer is read
		"gone":    "(head -c %d /dev/zero >&3) & sleep 0.5",
	} {
		t.Run(name, func(t *testing.T) {
			got := w.Silent(w.World, netlab.Web+":80")
			_, err := w.session(name, &sandboxv1.Network{Egress: "open"})
			require.NoError(t, err)
			answered := make(chan *sandboxv1.ExecResult, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
				defer cancel()
				r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: name, Command: "exec 3<>/dev/tcp/" + netlab.Web + "/80; " + fmt.Sprintf(command, sent)})
				if err == nil {
					answered <- r.ExecResult
				}
				close(answered)
			}()
			c := <-got
			defer c.Close()
			if name == "control" {
				n, err := io.ReadFull(c, make([]byte, sent))
				require.NoError(t, err, "after %d bytes", n)
				require.NoError(t, c.Close())
				require.NotNil(t, <-answered)
				return
			}
			require.NotNil(t, <-answered)
			n, err := io.Copy(io.Discard, c)
			require.ErrorContains(t, err, "reset", "after %d bytes", n)
			require.Less(t, n, int64(sent))
		})
	}
}
