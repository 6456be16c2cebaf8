package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/sys/reaper"

	"github.com/sandbox-agent/sandbox-agent/tests/kata/shim/wire"
)

// The interfaces of a sandbox's network namespace: the one that is there, and the VMM's beside it.
const (
	given = "eth0"
	tap   = "tap0_kata"
)

// connect gives the guest the network of the container's namespace as Kata does by default (internetworking_model "tcfilter"): a tap
// beside eth0, all that comes to either redirected to the other, and eth0's addresses and routes for the guest. The VMM runs
// in the namespace. The answer is how to start it, and its arguments for that.
func (s *service) connect(vmm string) (program, args []string, err error) {
	if s.netns == "" {
		return []string{vmm}, nil, nil
	}
	enter := []string{"nsenter", "--net=" + s.netns, "--"}
	script := "ip tuntap add " + tap + " mode tap; ip link set " + tap + " up"
	for _, pair := range [][2]string{{given, tap}, {tap, given}} {
		script += fmt.Sprintf("; tc qdisc add dev %[1]s ingress; tc filter add dev %[1]s parent ffff: protocol all u32 match u8 0 0 action mirred egress redirect dev %[2]s", pair[0], pair[1])
	}
	if _, err := output(enter, "sh", "-ec", script); err != nil {
		return nil, nil, fmt.Errorf("making the tap: %w", err)
	}
	batch, mac, err := describe(enter)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the network: %w", err)
	}
	if err := os.WriteFile(filepath.Join(s.shared(), wire.Network), []byte(batch), 0o600); err != nil {
		return nil, nil, err
	}
	return append(enter, vmm), []string{
		"-netdev", "tap,id=net,ifname=" + tap + ",script=no,downscript=no,vhost=off", "-device", "virtio-net-pci,romfile=,netdev=net,mac=" + mac,
	}, nil
}

// link is what "ip -json address" says of an interface, as far as it is asked for.
type link struct {
	Address string
	MTU     int
	Info    []struct {
		Family, Local, Scope string
		Prefixlen            int
	} `json:"addr_info"`
}

// describe writes down what eth0 has as commands of "ip -batch", for an interface of that name.
func describe(enter []string) (batch, mac string, err error) {
	var links []link
	if err := askIP(enter, &links, "address", "show", "dev", given); err != nil {
		return "", "", err
	}
	if len(links) != 1 {
		return "", "", fmt.Errorf("there are %d interfaces %s", len(links), given)
	}
	lines := []string{fmt.Sprintf("link set dev %s mtu %d up", given, links[0].MTU)}
	for _, a := range links[0].Info {
		switch {
		case a.Family == "inet":
			lines = append(lines, fmt.Sprintf("address add %s/%d dev %s", a.Local, a.Prefixlen, given))
		case a.Scope == "global":
			lines = append(lines, fmt.Sprintf("address add %s/%d dev %s nodad", a.Local, a.Prefixlen, given))
		}
	}
	var neighbours []struct {
		Dst, Lladdr string
		State       []string
	}
	if err := askIP(enter, &neighbours, "neighbour", "show", "dev", given, "nud", "permanent"); err != nil {
		return "", "", err
	}
	for _, n := range neighbours {
		lines = append(lines, fmt.Sprintf("neighbour replace %s lladdr %s dev %s nud permanent", n.Dst, n.Lladdr, given))
	}
	routes, err := routesOf(enter)
	return strings.Join(append(lines, routes...), "\n") + "\n", links[0].Address, err
}

// routesOf are those that the kernel does not make by itself, those without a gateway first: what "ip route show" prints of one is what
// "ip route replace" takes.
func routesOf(enter []string) (lines []string, err error) {
	var direct, through []string
	for _, family := range []string{"-4", "-6"} {
		out, err := output(enter, "ip", family, "route", "show", "dev", given)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(out) {
			line = "route replace " + strings.ReplaceAll(strings.TrimSpace(line), " linkdown", "") + " dev " + given
			switch {
			case strings.Contains(line, "proto kernel"):
			case strings.Contains(line, " via "):
				through = append(through, line)
			default:
				direct = append(direct, line)
			}
		}
	}
	return append(direct, through...), nil
}

func askIP(enter []string, answer any, args ...string) error {
	out, err := output(enter, append([]string{"ip", "-json"}, args...)...)
	if err != nil || strings.TrimSpace(out) == "" {
		return err
	}
	return json.Unmarshal([]byte(out), answer)
}

// output runs a program in the network namespace, and answers with what it printed. The shim's reaper takes every child's exit.
func output(enter []string, args ...string) (string, error) {
	args = append(slices.Clone(enter), args...)
	cmd := exec.Command(args[0], args[1:]...)
	var out, complaints strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &complaints
	exits, err := reaper.Default.Start(cmd)
	if err != nil {
		return "", fmt.Errorf("%q: %w", args, err)
	}
	status, err := reaper.Default.Wait(cmd, exits)
	if err != nil {
		return "", fmt.Errorf("%q: %w", args, err)
	}
	if status != 0 {
		return "", fmt.Errorf("%q ended with status %d: %s", args, status, complaints.String())
	}
	return out.String(), nil
}
