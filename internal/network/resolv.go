package network

import (
	"bufio"
	"net/netip"
	"os"
	"slices"
	"strings"
)

// resolvConf is the sandbox's /etc/resolv.conf (resolv.conf(5)).
func resolvConf(rec *Record) string {
	var b strings.Builder
	for _, ns := range rec.Nameservers {
		b.WriteString("nameserver " + ns.String() + "\n")
	}
	if rec.CNI != nil {
		b.WriteString(rec.CNI.Search)
	}
	return b.String()
}

// nodesNameservers are those of a resolv.conf of the node that a sandbox can ask too: none on the node itself or on its link,
// which the rules close.
func nodesNameservers(path string) []netip.Addr {
	return slices.DeleteFunc(allNameservers(path), func(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() })
}

// allNameservers are those of a resolv.conf, wherever they are.
func allNameservers(path string) []netip.Addr {
	f, err := os.Open(path)
	if err != nil {
		return nil // then a sandbox has no names either
	}
	defer f.Close()
	var out []netip.Addr
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			out = append(out, a)
		}
	}
	return out
}
