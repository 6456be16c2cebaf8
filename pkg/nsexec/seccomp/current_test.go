package seccomp

import (
	"go/format"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp/policy"
)

func TestTheGeneratedProgramsAreCurrent(t *testing.T) {
	for _, a := range policy.Arches() {
		src, err := policy.GoSource(a)
		require.NoError(t, err)
		want, err := format.Source(src)
		require.NoError(t, err)
		got, err := os.ReadFile("zfilter_" + a.GOARCH + ".go")
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "run make generate")
	}
}

func TestEachFilterIsTheProgramOfItsPolicy(t *testing.T) {
	for _, a := range policy.Arches() {
		if a.GOARCH != runtime.GOARCH {
			continue
		}
		for prog, p := range map[*unix.SockFilter]policy.Policy{
			&Command(false)[0]: policy.Command(false), &Command(true)[0]: policy.Command(true), &Container()[0]: policy.Container(),
		} {
			want, err := p.Assemble(a)
			require.NoError(t, err)
			require.Equal(t, unix.SockFilter{Code: want[0].Code, Jt: want[0].Jt, Jf: want[0].Jf, K: want[0].K}, *prog)
		}
		require.Len(t, Command(false), length(t, policy.Command(false), a))
		require.Len(t, Command(true), length(t, policy.Command(true), a))
		require.Len(t, Container(), length(t, policy.Container(), a))
	}
}

func length(t *testing.T, p policy.Policy, a policy.Arch) int {
	t.Helper()
	prog, err := p.Assemble(a)
	require.NoError(t, err)
	return len(prog)
}

func TestAnEmptyFilterIsRefused(t *testing.T) {
	require.ErrorContains(t, Install(nil), "empty")
}
