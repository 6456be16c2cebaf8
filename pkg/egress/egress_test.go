package egress

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestAnEntryIsReadAndWrittenAlike(t *testing.T) {
	for text, want := range map[string]string{
		"Example.COM. packages":                  "example.com:443/tcp packages",
		"*.example.com:443,80 the site":          "*.example.com:80,443/tcp the site",
		"time.example.com:123/udp the clock":     "time.example.com:123/udp the clock",
		"198.51.100.10:22 the git host":          "198.51.100.10:22/tcp the git host",
		"198.51.100.0/24:22/tcp the git hosts":   "198.51.100.0/24:22/tcp the git hosts",
		"10.1.0.0/16:5432 databases":             "10.1.0.0/16:5432/tcp databases",
		"2001:db8::1 a host":                     "[2001:db8::1]:443/tcp a host",
		"[2001:db8::/32]:8443,8443/tcp the lab":  "[2001:db8::/32]:8443/tcp the lab",
		"xn--bcher-kva.example:443   punycode  ": "xn--bcher-kva.example:443/tcp punycode",
	} {
		e, err := ParseText(text)
		require.NoError(t, err, text)
		require.Equal(t, want, e.String())
		again, err := ParseText(e.String())
		require.NoError(t, err)
		require.Equal(t, e, again)
	}
}

func TestAnEntryThatIsNoneIsRefusedWithWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"example.com":                             "the reason is missing",
		"example.com:443 ":                        "the reason is missing",
		"example.com:0 x":                         "port 0",
		"example.com:70000 x":                     "70000",
		"example.com:53 x":                        "port 53",
		"example.com:53/udp x":                    "port 53",
		"example.com/udp x":                       "which ports",
		"*.com x":                                 "top-level",
		"* x":                                     "no host name",
		"a.*.example.com x":                       "no host name",
		"http://example.com x":                    "not a number",
		"bücher.example x":                        "punycode",
		"-" + strings.Repeat("a", 64) + " x":      "label",
		"1.2.3 x":                                 "no host name",
		"198.51.100.10/24 x":                      "198.51.100.0/24",
		"169.254.169.254:80 x":                    "169.254.0.0/16",
		"127.0.0.1:80 x":                          "no sandbox may reach",
		"[64:ff9b::a9fe:a9fe]:80 x":               "169.254.0.0/16",
		"[64:ff9b::7f00:0/104]:80 x":              "no sandbox may reach",
		"[::1]:80 x":                              "no sandbox may reach",
		"[::ffff:1.2.3.4]:80 x":                   "IPv4-mapped",
		"[fe80::1%eth0]:80 x":                     "interface",
		"[2001:db8::1:80 x":                       "brackets",
		"example.com a\tb":                        "printable",
		"example.com " + strings.Repeat("r", 201): "201 bytes",
	} {
		_, err := ParseText(text)
		require.ErrorContains(t, err, want, text)
	}
	for _, s := range []Spec{
		{To: "a.example", Reason: "x", Private: []string{"10.0.0.1/8"}},
		{To: "a.example", Reason: "x", Private: []string{"169.254.0.0/16"}},
		{To: "a.example", Reason: "x", Private: []string{"0.0.0.0/0"}},
		{To: "10.0.0.1", Reason: "x", Private: []string{"10.0.0.0/8"}},
		{To: "a.example", Reason: "x", Protocol: "icmp"},
		{To: "a.example", Reason: "x", Ports: make([]int64, 17)},
	} {
		_, err := Parse(s)
		require.Error(t, err, "%+v", s)
	}
}

func TestAnAnswerLeadsToTheInternetOrWhereTheEntrySays(t *testing.T) {
	open, err := Parse(Spec{To: "a.example", Reason: "x"})
	require.NoError(t, err)
	inner, err := Parse(Spec{To: "a.example", Reason: "x", Private: []string{"10.1.0.0/16", "fd12::/32"}})
	require.NoError(t, err)
	closed := prefixes("10.1.7.0/24", "203.0.113.2/32", "168.63.129.16/32")
	for text, in := range map[string][2]bool{
		"198.51.100.10":        {true, true},
		"2606:4700::1":         {true, true},
		"64:ff9b::c633:640a":   {true, true}, // NAT64 of 198.51.100.10
		"10.1.2.3":             {false, true},
		"10.2.0.1":             {false, false},
		"10.1.7.1":             {false, false}, // closed, whatever the entry says
		"fd12::1":              {false, true},
		"fd13::1":              {false, false},
		"203.0.113.2":          {false, false}, // the node
		"168.63.129.16":        {false, false},
		"127.0.0.1":            {false, false},
		"0.0.0.0":              {false, false},
		"169.254.169.254":      {false, false},
		"100.64.0.1":           {false, false},
		"192.168.1.1":          {false, false},
		"224.0.0.251":          {false, false},
		"255.255.255.255":      {false, false},
		"::1":                  {false, false},
		"::":                   {false, false},
		"::7f00:1":             {false, false},
		"::ffff:198.51.100.10": {false, false},
		"fe80::1":              {false, false},
		"ff02::1":              {false, false},
		"fd00:ec2::254":        {false, false},
		"64:ff9b::7f00:1":      {false, false},
		"64:ff9b::a9fe:a9fe":   {false, false},
		"64:ff9b::a02:3":       {false, false},
		"2002:7f00:1::1":       {false, false}, // 6to4 of 127.0.0.1
		"2001:0:7f00:1::1":     {false, false}, // Teredo
		"4000::1":              {false, false},
		"fe80::1%lo":           {false, false},
	} {
		a := netip.MustParseAddr(text)
		require.Equal(t, in[0], open.CheckAnswer(a, closed) == nil, text)
		require.Equal(t, in[1], inner.CheckAnswer(a, closed) == nil, text)
	}
}

func list(t require.TestingT, texts ...string) []Entry {
	var out []Entry
	for _, s := range texts {
		e, err := ParseText(s)
		require.NoError(t, err)
		out = append(out, e)
	}
	return out
}

func TestASessionsListIsWithinTheOperators(t *testing.T) {
	operator := list(t, "*.example.com:80,443 all", "one.example:443 one", "198.51.100.0/24:22 hosts")
	operator[0].Private = prefixes("10.1.0.0/16")
	for _, ok := range []string{
		"a.example.com:443 x", "a.b.example.com:80 x", "*.b.example.com:80,443 x", "*.example.com:80 x",
		"one.example x", "198.51.100.10:22 x", "198.51.100.0/25:22 x",
	} {
		got, err := Narrow(operator, list(t, ok))
		require.NoError(t, err, ok)
		require.Equal(t, list(t, ok)[0].String(), got[0].String())
	}
	for _, bad := range []string{
		"example.com x", "a.example.com:22 x", "a.example.com:443/udp x", "*.one.example x", "xexample.com x", "notexample.com:80 x",
		"198.51.100.10:443 x", "198.51.0.0/16:22 x", "[2001:db8::1]:22 x", "*.com.example x",
	} {
		_, err := Narrow(operator, list(t, bad))
		require.ErrorContains(t, err, "network.egress.allow", bad)
	}
	got, err := Narrow(operator, list(t, "a.example.com:443 x"))
	require.NoError(t, err)
	require.Equal(t, operator[0].Private, got[0].Private, "what only the operator can open")
	all, err := Narrow(operator, nil)
	require.NoError(t, err)
	require.Equal(t, operator, all)
	_, err = Narrow(operator, make([]Entry, MaxRanges+1))
	require.ErrorContains(t, err, "257")
}

func TestOnlyAnAllowlistLists(t *testing.T) {
	entries := list(t, "a.example x", "198.51.100.10 y")
	require.NotEmpty(t, NewPolicy(Allowlist, entries).Match("a.example"))
	require.Len(t, NewPolicy(Allowlist, entries).Ranges(), 1)
	for _, m := range []Mode{None, Open} {
		p := NewPolicy(m, entries)
		require.Empty(t, p.Match("a.example"))
		require.Empty(t, p.Ranges())
	}
}

// names are few, so that lists and names meet.
var names = rapid.StringMatching(`([ab]\.){0,3}(x|y)\.z`)

var entries = rapid.Custom(func(t *rapid.T) Entry {
	s := Spec{Reason: "r", Protocol: rapid.SampledFrom([]string{TCP, UDP}).Draw(t, "protocol")}
	s.Ports = rapid.SliceOfN(rapid.Int64Range(1, 4), 1, 3).Draw(t, "ports")
	switch rapid.IntRange(0, 2).Draw(t, "kind") {
	case 0:
		s.To = names.Draw(t, "name")
	case 1:
		s.To = "*." + names.Draw(t, "suffix")
	default:
		s.To = netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(rapid.IntRange(0, 7).Draw(t, "host"))}), rapid.IntRange(28, 32).Draw(t, "bits")).Masked().String()
	}
	e, err := Parse(s)
	require.NoError(t, err)
	return e
})

// admits is what a list means, said as plainly as can be.
func admits(list []Entry, name string, a netip.Addr, protocol string, port uint16) bool {
	for _, e := range list {
		to := e.Name == name && name != "" || strings.HasPrefix(e.Name, "*.") && strings.HasSuffix(name, e.Name[1:])
		if e.Name == "" {
			to = name == "" && e.Range.Contains(a)
		}
		if to && e.Protocol == protocol && slices.Contains(e.Ports, port) {
			return true
		}
	}
	return false
}

func TestNoSessionReachesMoreThanItsOperatorPermits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		operator := rapid.SliceOfN(entries, 0, 6).Draw(t, "operator")
		got, err := Narrow(operator, rapid.SliceOfN(entries, 1, 3).Draw(t, "asked"))
		if err != nil {
			return
		}
		name := rapid.OneOf(names, rapid.Just("")).Draw(t, "asked name")
		a := netip.AddrFrom4([4]byte{198, 51, 100, byte(rapid.IntRange(0, 15).Draw(t, "address"))})
		protocol, port := rapid.SampledFrom([]string{TCP, UDP}).Draw(t, "p"), rapid.Uint16Range(1, 4).Draw(t, "port")
		if admits(got, name, a, protocol, port) {
			require.True(t, admits(operator, name, a, protocol, port))
		}
	})
}

func TestAPolicyFindsTheEntriesOfANameAsAPlainSearchDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := rapid.SliceOfN(entries, 0, 8).Draw(t, "list")
		name := names.Draw(t, "asked name")
		found := NewPolicy(Allowlist, all).Match(name)
		for _, protocol := range []string{TCP, UDP} {
			for port := range uint16(5) {
				require.Equal(t, admits(all, name, netip.Addr{}, protocol, port),
					slices.ContainsFunc(found, func(e Entry) bool { return e.Protocol == protocol && slices.Contains(e.Ports, port) }))
			}
		}
	})
}

func FuzzParseText(f *testing.F) {
	f.Add("*.example.com:443,80/tcp a reason")
	f.Add("[2001:db8::/32]:1 x")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := ParseText(text)
		if err != nil {
			return
		}
		again, err := ParseText(e.String())
		require.NoError(t, err, e.String())
		require.Equal(t, e, again)
	})
}
