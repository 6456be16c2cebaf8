package kata

import (
	"fmt"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestAgentURLsOfAllHypervisorsAreRead(t *testing.T) {
	for url, want := range map[string]Endpoint{
		"vsock://3:1024":                                        {CID: 3, Port: 1024},
		"vsock://4294967294:1":                                  {CID: 4294967294, Port: 1},
		"hvsock:///run/vc/vm/abc/clh.sock:1024":                 {Path: "/run/vc/vm/abc/clh.sock", Port: 1024},
		"hvsock:///run/kata/s1/root/kata.hvsock:1024":           {Path: "/run/kata/s1/root/kata.hvsock", Port: 1024},
		"hvsock:///run/with:colon/k:1024":                       {Path: "/run/with:colon/k", Port: 1024},
		"hvsock:///" + strings.Repeat("d/", 2000) + "kata:1024": {Path: "/" + strings.Repeat("d/", 2000) + "kata", Port: 1024},
	} {
		got, err := ParseAgentURL(url)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, url, got.String())
	}
}

func TestWhatIsNoAgentURLIsRefused(t *testing.T) {
	for _, url := range []string{
		"", "vsock", "vsock://", "vsock://3", "vsock://3:", "vsock://:1024", "vsock://3:1024\n", " vsock://3:1024", "vsock://3:1024/",
		"vsock://0:1024", "vsock://1:1024", "vsock://2:1024", "vsock://4294967295:1024", "vsock://4294967296:1024", "vsock://-3:1024",
		"vsock://03:1024", "vsock://+3:1024", "vsock://0x3:1024", "vsock://3:0", "vsock://3:4294967295", "vsock://3:01024", "vsock://3:1024:1024",
		"vsock://３:1024", "VSOCK://3:1024", "vsock:3:1024", "http://3:1024", "remote:///run/peerpod/hypervisor.sock:1024", "unix:///run/x:1",
		"hvsock://:1024", "hvsock://relative:1024", "hvsock:///:1024", "hvsock:///run/../etc/x:1024", "hvsock:///run//x:1024", "hvsock:///run/x/:1024",
		"hvsock:///run/\x00:1024", "hvsock:///run/a\nb:1024", "hvsock:///run/\xff:1024", "hvsock:///run/./x:1024",
		"hvsock:///" + strings.Repeat("x", maxPath) + ":1024",
	} {
		_, err := ParseAgentURL(url)
		require.ErrorIs(t, err, ErrAddress, "%q", url)
	}
}

func TestAnEndpointIsReadAsItIsPrinted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := Endpoint{Port: rapid.Uint32Range(1, 1<<32-2).Draw(t, "port")}
		if rapid.Bool().Draw(t, "hybrid") {
			e.Path = path.Clean("/x/" + rapid.StringMatching(`[a-zA-Z0-9:_-][a-zA-Z0-9:._-]{0,40}(/[a-z:]{1,9}){0,3}`).Draw(t, "path"))
		} else {
			e.CID = rapid.Uint32Range(3, 1<<32-2).Draw(t, "cid")
		}
		got, err := ParseAgentURL(e.String())
		require.NoError(t, err)
		require.Equal(t, e, got)
	})
}

// There is one spelling of each address: what is accepted is what String prints.
func FuzzParseAgentURL(f *testing.F) {
	f.Add("vsock://3:1024")
	f.Add("hvsock:///run/vc/vm/x/clh.sock:1024")
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseAgentURL(s)
		if err != nil {
			require.ErrorIs(t, err, ErrAddress)
			return
		}
		require.Equal(t, s, e.String())
		require.Equal(t, e.CID == 0, e.Path != "", fmt.Sprint(e))
	})
}
