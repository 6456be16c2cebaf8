package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// Exit codes of "egress probe".
const (
	exitProbeSeveral    = 10
	exitProbeAllowed    = 11
	exitProbeOther      = 12
	exitProbeAddress    = 13
	exitProbeMetadata   = 14
	exitProbeManagement = 15
)

func egressCommand() *cli.Command {
	return &cli.Command{
		Name:  "egress",
		Usage: "what a session's commands can reach over the network",
		Commands: []*cli.Command{
			{
				Name: "show", Usage: "print the list in effect, with reasons", ArgsUsage: "SESSION",
				Flags: clientFlags(), Action: runEgressShow,
			},
			{
				Name: "probe", Usage: "try the policy, by commands in the session's sandbox", ArgsUsage: "SESSION",
				Description: "Runs a command of the session for each check: a listed host answers; another host, an address, the metadata\n" +
					"addresses and the node don't, and are refused at once. What a session's policy does not say is not checked.\n\n" +
					"The exit code is 0 when all hold, 1 when they could not be run, and otherwise says which does not:\n" +
					"  11 the listed host   12 the other host   13 the address   14 metadata   15 management   10 several",
				Flags: clientFlags(repoFlag(),
					&cli.StringFlag{Name: "allowed", Usage: "the listed `HOST:PORT` (default: the list's first TCP entry for a host)"},
					&cli.StringFlag{Name: "other", Usage: "a `HOST:PORT` that is not listed", Value: "example.org:443"},
					&cli.StringFlag{Name: "address", Usage: "an `ADDRESS:PORT` that is not listed", Value: "192.0.2.1:443"},
					&cli.StringSliceFlag{Name: "management", Usage: "an `ADDRESS:PORT` of a management listener; can be given again (default: the kubelet's port at this node's addresses)"},
				),
				Action: withOwnSession(runEgressProbe),
			},
		},
	}
}

func runEgressShow(ctx context.Context, c *cli.Command) error {
	got, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Sessions.GetEgress(ctx, &sandboxv1.GetEgressRequest{SessionId: got[0]})
	if err != nil {
		return cl.Explain("asking for the egress policy of session "+got[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res)
	}
	return showEgress(c, res)
}

func showEgress(c *cli.Command, r *sandboxv1.GetEgressResponse) error {
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "network\t%s\n", r.GetNetwork().GetMode())
	fmt.Fprintf(w, "policy\t%s\n", r.GetNetwork().GetEgress())
	if len(r.GetNameservers()) > 0 {
		fmt.Fprintf(w, "nameservers\t%s\n", strings.Join(r.GetNameservers(), ", "))
	}
	if u := r.GetUse(); u != nil {
		fmt.Fprintf(w, "so far\t%d connections, %d bytes sent, %d packets refused\n", u.GetConnections(), u.GetBytesOut(), u.GetRefused())
	}
	if len(r.GetEntries()) > 0 {
		fmt.Fprintln(w, "\nDESTINATION\tPRIVATE\tREASON")
	}
	for _, e := range r.GetEntries() {
		private := strings.Join(e.GetPrivate(), ", ")
		if private == "" {
			private = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", e.GetDestination(), private, e.GetReason())
	}
	return w.Flush()
}

// probe is one check: that a target answers, or that it doesn't.
type probe struct {
	Check   string `json:"check"`
	Target  string `json:"target"`
	Answers bool   `json:"answers"` // what has to be
	Holds   bool   `json:"holds"`
	Detail  string `json:"detail"`
	// Code is the exit code if this check alone does not hold.
	Code int `json:"code"`
	// told: the refusal has to be among those that the agent tells, so that a host that is down does not pass for a refused one.
	told bool
}

func runEgressProbe(ctx context.Context, c *cli.Command, session string) error {
	cl := newClient(c)
	policy, err := cl.Sessions.GetEgress(ctx, &sandboxv1.GetEgressRequest{SessionId: session})
	if err != nil {
		return cl.Explain("asking for the egress policy of session "+session, err)
	}
	probes := probesOf(c, policy)
	for i := range probes {
		if err := probes[i].run(ctx, cl, session); err != nil {
			return err
		}
	}
	if err := showProbes(c, probes); err != nil {
		return err
	}
	if _, err := cl.Sessions.ReportEgressProbe(ctx, probeReport(session, probes)); err != nil {
		return cl.Explain("telling the agent what the probe of session "+session+" has found", err)
	}
	if code := probeCode(probes); code != 0 {
		return withCode(code, errSilent)
	}
	return nil
}

// probesOf are the checks that mean something under a policy.
func probesOf(c *cli.Command, r *sandboxv1.GetEgressResponse) []probe {
	var out []probe
	listed := r.GetNetwork().GetEgress() == string(egress.Allowlist)
	if allowed := cmpString(c.String("allowed"), firstListed(r.GetEntries())); listed && allowed != "" {
		out = append(out, probe{Check: "a listed host answers", Target: allowed, Answers: true, Code: exitProbeAllowed})
	}
	if r.GetNetwork().GetEgress() != string(egress.Open) {
		connected := len(r.GetNameservers()) > 0
		out = append(out, probe{Check: "another host does not", Target: c.String("other"), Code: exitProbeOther, told: connected},
			probe{Check: "an address does not", Target: c.String("address"), Code: exitProbeAddress, told: connected})
	}
	for _, t := range []string{"169.254.169.254:80", "[fd00:ec2::254]:80"} {
		out = append(out, probe{Check: "metadata does not", Target: t, Code: exitProbeMetadata})
	}
	management := c.StringSlice("management")
	if len(management) == 0 {
		management = r.GetManagement() // the node's as the agent sees it: this program may be in a pod of its own
	}
	for _, t := range management {
		out = append(out, probe{Check: "management does not", Target: t, Code: exitProbeManagement})
	}
	return out
}

func cmpString(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// firstListed is the first host of a list that can be tried by connecting.
func firstListed(list []*sandboxv1.EgressEntry) string {
	for _, e := range list {
		parsed, err := egress.ParseText(e.GetDestination() + " " + e.GetReason())
		if err == nil && parsed.Protocol == egress.TCP && parsed.Name != "" && !strings.HasPrefix(parsed.Name, "*") {
			return net.JoinHostPort(parsed.Name, strconv.Itoa(int(parsed.Ports[0])))
		}
	}
	return ""
}

// dialSeconds is how long a listed host may take to answer. What is refused takes no time.
const dialSeconds = 10

func (p *probe) run(ctx context.Context, cl *client.Client, session string) error {
	host, port, err := net.SplitHostPort(p.Target)
	if err != nil {
		return usagef("%s: give a host and a port", p.Target)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		if host, err = egress.Normal(host); err != nil {
			return usagef("%s: %v", p.Target, err)
		}
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return usagef("%s: give a host and a port", p.Target)
	}
	res, err := cl.Exec(ctx, &sandboxv1.ExecRequest{
		SessionId: session, Labels: map[string]string{"probe": p.Check},
		Command: fmt.Sprintf("timeout %d bash -c 'exec 3<>/dev/tcp/%s/%s'", dialSeconds, host, port), Text: true,
	})
	if err != nil {
		return cl.Explain("probing "+p.Target, err)
	}
	p.judge(res.ExecResult, host)
	return nil
}

// judge compares what came of a connection with what has to be.
func (p *probe) judge(r *sandboxv1.ExecResult, host string) {
	const tookTooLong = 124 // timeout(1)
	refused := slices.IndexFunc(r.GetRefusedDestinations(), func(d string) bool {
		return d == host || strings.HasPrefix(d, host+" ") || strings.HasPrefix(d, p.Target+"/")
	})
	told := refused >= 0
	reached := r.GetStatus() == sandboxv1.ExecResult_EXITED && r.GetExitCode() == 0
	switch {
	case r.GetStatus() != sandboxv1.ExecResult_EXITED:
		p.Detail = "the command did not end by itself: " + r.GetStatus().String()
	case reached:
		p.Detail, p.Holds = "it answers", p.Answers
	case p.Answers && told:
		p.Detail = "refused: " + r.GetRefusedDestinations()[refused]
	case p.Answers && r.GetExitCode() == tookTooLong:
		p.Detail = fmt.Sprintf("it does not answer within %d s", dialSeconds)
	case p.Answers:
		p.Detail = "it does not answer: " + firstLine(r.GetStderrText())
	case r.GetExitCode() == tookTooLong:
		p.Detail = "it is not refused, it hangs"
	case p.told && !told:
		p.Detail = "it does not answer, but the agent has refused nothing"
	default:
		p.Detail, p.Holds = "refused", true
	}
}

// firstLine is what bash said first of a connection that it did not get, quoted: it comes from a sandbox.
func firstLine(stderr string) string {
	const most = 200
	line, _, _ := strings.Cut(stderr, "\n")
	return strconv.Quote(line[:min(len(line), most)])
}

func showProbes(c *cli.Command, probes []probe) error {
	if c.Bool("json") {
		return json.NewEncoder(c.Root().Writer).Encode(probes)
	}
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "HOLDS\tCHECK\tTARGET\tDETAIL")
	for _, p := range probes {
		holds := "yes"
		if !p.Holds {
			holds = "NO"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", holds, p.Check, p.Target, p.Detail)
	}
	return w.Flush()
}

// probeReport is what the agent counts; what a check is about, its exit code says.
func probeReport(session string, probes []probe) *sandboxv1.ReportEgressProbeRequest {
	about := map[int]string{exitProbeAllowed: "allowed", exitProbeOther: "other", exitProbeAddress: "address", exitProbeMetadata: "metadata", exitProbeManagement: "management"}
	r := &sandboxv1.ReportEgressProbeRequest{SessionId: session}
	for _, p := range probes {
		r.Checks = append(r.Checks, &sandboxv1.EgressProbeCheck{Check: about[p.Code], Target: p.Target, Holds: p.Holds, Detail: p.Detail})
	}
	return r
}

// probeCode says which check does not hold.
func probeCode(probes []probe) int {
	code := 0
	for _, p := range probes {
		switch {
		case p.Holds || code == p.Code:
		case code == 0:
			code = p.Code
		default:
			return exitProbeSeveral
		}
	}
	return code
}
