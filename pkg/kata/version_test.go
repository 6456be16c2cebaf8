package kata

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTheVersionOfBothShimsIsRead(t *testing.T) {
	flavour, v, commit, err := ParseVersionOutput("Kata Containers containerd shim (Golang): id: \"io.containerd.kata.v2\", version: 3.32.0, commit: 5dc3a3b\n")
	require.NoError(t, err)
	require.Equal(t, FlavourGo, flavour)
	require.Equal(t, Version{3, 32, 0, ""}, v)
	require.Equal(t, "5dc3a3b", commit)

	flavour, v, _, err = ParseVersionOutput("kata-containers containerd shim (Rust): id: io.containerd.kata.v2, version: 4.3.0-rc0, commit: ")
	require.NoError(t, err)
	require.Equal(t, FlavourRust, flavour)
	require.Equal(t, Version{4, 3, 0, "rc0"}, v)
	require.Equal(t, "4.3.0-rc0", v.String())
}

func TestAVersionThatIsNotKatasOwnIsRefusedWithTheRemedy(t *testing.T) {
	for _, s := range []string{"", "4", "4.2", "4.2.0.1", "3.19.1.kata2", "4.2.0+fork", "v4.2.0", "04.2.0", "4.2.0-dirty", "4.2.0 ", "4.2.0-", "99999999999999999999.0.0", "4.-2.0", "٤.2.0"} {
		_, err := ParseVersion(s)
		require.ErrorIs(t, err, ErrVersion, "%q", s)
		require.ErrorContains(t, err, "install a release of Kata Containers")
	}
}

func TestAnOutputThatIsNotAShimsIsRefused(t *testing.T) {
	good := "kata-containers containerd shim (Rust): id: io.containerd.kata.v2, version: 4.2.0, commit: abc"
	_, _, _, err := ParseVersionOutput(good)
	require.NoError(t, err)
	for _, out := range []string{
		"", "\n", "4.2.0\n", good + "\n\n", good + "\r\n", "\n" + good, good + "\n" + good + "\n",
		"kata-containers containerd shim (Zig): id: x, version: 4.2.0, commit: abc",
		"runc containerd shim: id: io.containerd.runc.v2, version: 4.2.0, commit: abc",
		"kata-containers containerd shim (Rust): id: io.containerd.kata.v2, version: , commit: abc",
		"kata\x1b[31m containerd shim (Rust): id: io.containerd.kata.v2, version: 4.2.0, commit: abc",
	} {
		_, _, _, err := ParseVersionOutput(out)
		require.ErrorIs(t, err, ErrVersion, "%q", out)
	}
}

func TestVersionsAreOrderedAsReleasesAre(t *testing.T) {
	ordered := []Version{{1, 11, 0, ""}, {2, 5, 9, ""}, {3, 9, 0, ""}, {3, 30, 12, ""}, {3, 31, 0, "alpha1"}, {3, 31, 0, ""}, {4, 0, 0, "rc0"}, {4, 0, 0, ""}, {10, 0, 0, ""}}
	for i, v := range ordered {
		for k, w := range ordered {
			if w.Pre == "" {
				require.Equal(t, i < k, v.Below(w), "%s below %s", v, w)
			}
		}
	}
}

func TestAVersionIsReadAsItIsWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 99999)
		v := Version{n.Draw(t, "major"), n.Draw(t, "minor"), n.Draw(t, "patch"), rapid.SampledFrom([]string{"", "rc0", "alpha12", "beta.3"}).Draw(t, "pre")}
		got, err := ParseVersion(v.String())
		require.NoError(t, err)
		require.Equal(t, v, got)
		require.False(t, v.Below(v))
	})
}

func FuzzParseVersionOutput(f *testing.F) {
	f.Add("kata-containers containerd shim (Rust): id: io.containerd.kata.v2, version: 4.2.0, commit: abc\n")
	f.Add("Kata Containers containerd shim (Golang): id: \"io.containerd.kata.v2\", version: 3.2.0-rc1, commit: x\n")
	f.Fuzz(func(t *testing.T, out string) {
		flavour, v, _, err := ParseVersionOutput(out)
		if err != nil {
			return
		}
		// What was accepted says so itself.
		require.Contains(t, out, fmt.Sprintf("version: %s, commit:", v))
		require.Equal(t, flavour == FlavourRust, !containsGolang(out))
	})
}

func containsGolang(out string) bool {
	return versionLine.FindStringSubmatch(trimNewline(out))[1] == "Golang"
}

func trimNewline(s string) string {
	if n := len(s); n > 0 && s[n-1] == '\n' {
		return s[:n-1]
	}
	return s
}
