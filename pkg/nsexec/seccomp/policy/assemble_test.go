package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// run interprets a program as the kernel does (Documentation/networking/filter.rst), for the codes that Assemble uses.
func run(t require.TestingT, prog []Instruction, audit, nr uint32, args [6]uint64) Answer {
	var acc uint32
	for at := 0; at < len(prog); at++ {
		ins := prog[at]
		branch := func(yes bool) {
			if yes {
				at += int(ins.Jt)
			} else {
				at += int(ins.Jf)
			}
		}
		switch ins.Code {
		case opLoad:
			acc = data(t, ins.K, audit, nr, args)
		case opAnd:
			acc &= ins.K
		case opJump:
			at += int(ins.K)
		case opEqual:
			branch(acc == ins.K)
		case opGreEq:
			branch(acc >= ins.K)
		case opSet:
			branch(acc&ins.K != 0)
		case opRet:
			return Answer(ins.K)
		default:
			require.Failf(t, "unknown code", "%#x at %d", ins.Code, at)
		}
	}
	require.Fail(t, "the program ran past its end")
	return 0
}

// data is struct seccomp_data on a little-endian machine.
func data(t require.TestingT, off, audit, nr uint32, args [6]uint64) uint32 {
	switch {
	case off == offNumber:
		return nr
	case off == offArch:
		return audit
	}
	require.True(t, off >= offArgs && off < offArgs+48 && (off-offArgs)%8 == 0, "offset %d", off)
	return uint32(args[(off-offArgs)/8])
}

// interesting draws arguments that lie on and beside the values that rules look at.
func interesting(p Policy) *rapid.Generator[uint64] {
	values := []uint64{0, 1, word, 0o755}
	for _, r := range p.Rules {
		for _, c := range r.Calls {
			for _, test := range c.When {
				values = append(values, uint64(test.Mask), uint64(test.Mask)&-uint64(test.Mask), uint64(^test.Mask))
				for _, v := range test.Values {
					values = append(values, uint64(v), uint64(v)+1, uint64(v)|1<<32)
				}
			}
		}
	}
	return rapid.OneOf(rapid.SampledFrom(values), rapid.Uint64())
}

func TestTheProgramsDecideAsTheRulesSay(t *testing.T) {
	for _, a := range Arches() {
		for _, p := range All() {
			prog, err := p.Assemble(a)
			require.NoError(t, err)
			special := []uint32{}
			for nr := range p.matches(a) {
				special = append(special, nr)
			}
			numbers := rapid.OneOf(rapid.SampledFrom(special), rapid.Uint32Max(600), rapid.Uint32())
			argument := interesting(p)
			t.Run(p.Name+"-"+a.GOARCH, rapid.MakeCheck(func(t *rapid.T) {
				nr := numbers.Draw(t, "nr")
				var args [6]uint64
				for i := range args {
					args[i] = argument.Draw(t, fmt.Sprint("arg", i))
				}
				require.Equal(t, p.Decide(a, a.Audit, nr, args), run(t, prog, a.Audit, nr, args))
			}))
		}
	}
}

func TestEveryNumberWithoutArgumentsIsDecidedAsTheRulesSay(t *testing.T) {
	for _, a := range Arches() {
		for _, p := range All() {
			prog, err := p.Assemble(a)
			require.NoError(t, err)
			for nr := uint32(0); nr < 1200; nr++ {
				require.Equal(t, p.Decide(a, a.Audit, nr, [6]uint64{}), run(t, prog, a.Audit, nr, [6]uint64{}), "%s %s %d", p.Name, a.GOARCH, nr)
			}
		}
	}
}

func TestP10AForeignABIIsKilledWhateverItCalls(t *testing.T) {
	const i386, aarch32 = 0x40000003, 0x40000028
	for _, a := range Arches() {
		for _, p := range All() {
			prog, err := p.Assemble(a)
			require.NoError(t, err)
			for _, audit := range []uint32{i386, aarch32, 0, ^a.Audit} {
				for _, nr := range []uint32{0, 1, 20, 102, 0x40000000} {
					require.Equal(t, KillProcess, run(t, prog, audit, nr, [6]uint64{}))
				}
			}
		}
	}
}

func TestP10X32CallsDoNotExist(t *testing.T) {
	for _, p := range All() {
		prog, err := p.Assemble(AMD64)
		require.NoError(t, err)
		for _, nr := range []uint32{0x40000000, 0x40000000 | 41, 0x40000000 | 512, 0x7fffffff, 0xffffffff} {
			require.Equal(t, ENOSYS, run(t, prog, AMD64.Audit, nr, [6]uint64{}))
		}
	}
}

func TestALongProgramJumpsFurtherThanOneInstructionCan(t *testing.T) {
	p := Policy{Name: "long"}
	for i := range 200 {
		p.Rules = append(p.Rules, Rule{ID: fmt.Sprint(i), Answer: errno | Answer(i%90+1), Calls: []Call{{
			Name: fmt.Sprint("call", i),
			When: []Test{notIn(0, 0xff, 1, 2, 3), in(1, word, 7, 8, 9), anyBit(2, 1)},
		}}})
	}
	a := Arch{GOARCH: "test", Audit: 7, Calls: map[string]uint32{}}
	for i := range 200 {
		a.Calls[fmt.Sprint("call", i)] = uint32(3 * i)
	}
	prog, err := p.Assemble(a)
	require.NoError(t, err)
	require.Greater(t, len(prog), 1500)
	rapid.Check(t, func(t *rapid.T) {
		nr := rapid.Uint32Max(620).Draw(t, "nr")
		small := rapid.Uint64Range(0, 10)
		args := [6]uint64{small.Draw(t, "a"), small.Draw(t, "b"), small.Draw(t, "c")}
		require.Equal(t, p.Decide(a, 7, nr, args), run(t, prog, 7, nr, args))
	})
}

func TestAPolicyThatTheKernelCouldNotTakeIsRefused(t *testing.T) {
	p := Policy{Name: "huge"}
	a := Arch{GOARCH: "test", Audit: 7, Calls: map[string]uint32{}}
	for i := range 3000 {
		name := fmt.Sprint("call", i)
		a.Calls[name] = uint32(2 * i)
		p.Rules = append(p.Rules, Rule{ID: name, Answer: EPERM, Calls: []Call{{Name: name, When: []Test{anyBit(0, uint32(i+1))}}}})
	}
	_, err := p.Assemble(a)
	require.ErrorContains(t, err, "the kernel takes 4096")
}

func TestEveryNameIsASystemCallOfOneArchitecture(t *testing.T) {
	known := func(name string) bool {
		_, amd := AMD64.Calls[name]
		_, arm := ARM64.Calls[name]
		return amd || arm
	}
	for _, r := range Refusals {
		for _, c := range r.Calls {
			require.True(t, known(c.Name), "rule %s: %s", r.ID, c.Name)
		}
	}
	for _, n := range Needed {
		for _, c := range n.Calls {
			require.True(t, known(c), c)
		}
	}
}

func TestEveryRuleHasAReasonAndASource(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range append(Container().Rules, Refusals...) {
		require.False(t, seen[r.ID], "two rules are called %s", r.ID)
		seen[r.ID] = true
		require.NotEmpty(t, r.Why, r.ID)
		require.NotEmpty(t, r.Source, r.ID)
	}
}

func TestTheGoldenDumpsAreCurrent(t *testing.T) {
	for _, a := range Arches() {
		for _, p := range All() {
			want, err := os.ReadFile(filepath.Join("..", "testdata", p.Name+"-"+a.GOARCH+".golden"))
			require.NoError(t, err)
			var got strings.Builder
			require.NoError(t, p.Dump(&got, a))
			require.Equal(t, string(want), got.String(), "run make generate")
		}
	}
}
