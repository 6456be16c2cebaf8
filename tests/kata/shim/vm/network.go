package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

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
	if out, err := exec.Command(enter[0], append(enter[1:], "sh", "-ec", script)...).CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("making the tap: %w: %s", err, out)
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
		out, err := exec.Command(enter[0], append(enter[1:], "ip", family, "route", "show", "dev", given)...).Output()
		if err != nil {
			return nil, fmt.Errorf("asking ip for the routes: %w", err)
		}
		for line := range strings.Lines(string(out)) {
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
	out, err := exec.Command(enter[0], append(enter[1:], append([]string{"ip", "-json"}, args...)...)...).Output()
	if err != nil {
		return fmt.Errorf("asking ip %s: %w", strings.Join(args, " "), err)
	}
	if len(strings.TrimSpace(string(out))) == 0 {
		return nil
	}
	return json.Unmarshal(out, answer)
}
