package policy

import "fmt"

// Arch is a processor architecture with its numbering of system calls.
type Arch struct {
	GOARCH string
	// Audit is the value of seccomp_data.arch for the native ABI (AUDIT_ARCH_* of linux/audit.h).
	Audit uint32
	// AltABI, when not 0, is the bit of a second ABI that the kernel reports under the same Audit value: x32, which
	// numbers its calls from 0x40000000 (arch/x86/include/uapi/asm/unistd.h).
	AltABI uint32
	// Calls has the numbers by name.
	Calls map[string]uint32
}

// The two architectures that are supported. Every other ABI of the machine (i386, AArch32) has another Audit value.
var (
	AMD64 = Arch{GOARCH: "amd64", Audit: 0xc000003e, AltABI: 0x40000000, Calls: callsAMD64}
	ARM64 = Arch{GOARCH: "arm64", Audit: 0xc00000b7, Calls: callsARM64}
)

// Arches lists them in the order in which files are generated.
func Arches() []Arch { return []Arch{AMD64, ARM64} }

// Answer is what the kernel does with a call: the return value of a seccomp program (seccomp(2)).
type Answer uint32

// The answers in use. An error number goes into the low 16 bits of errno; the numbers are the same on both
// architectures (asm-generic/errno-base.h).
const (
	Allow Answer = 0x7fff0000
	// Pretend returns 0 without doing anything, for what programs do by the way and take a refusal of badly.
	Pretend     Answer = errno
	KillProcess Answer = 0x80000000
	errno       Answer = 0x00050000

	EPERM           = errno | 1
	ENOSYS          = errno | 38
	EPROTONOSUPPORT = errno | 93
	EOPNOTSUPP      = errno | 95
	EAFNOSUPPORT    = errno | 97
)

// Errno is the error number that the caller sees, 0 when the answer isn't one.
func (a Answer) Errno() int {
	if a&^0xffff != errno {
		return 0
	}
	return int(a & 0xffff)
}

func (a Answer) String() string {
	switch a {
	case Allow:
		return "allow"
	case KillProcess:
		return "kill the process (SIGSYS)"
	case Pretend:
		return "pretend (0, and nothing is done)"
	case EPERM:
		return "EPERM"
	case ENOSYS:
		return "ENOSYS"
	case EPROTONOSUPPORT:
		return "EPROTONOSUPPORT"
	case EOPNOTSUPP:
		return "EOPNOTSUPP"
	case EAFNOSUPPORT:
		return "EAFNOSUPPORT"
	}
	return fmt.Sprintf("%#x", uint32(a))
}

// Op compares an argument.
type Op int

// The comparisons. Each looks at the low 32 bits only, on purpose: every argument that a rule looks at is an int, an
// unsigned int or a umode_t for the kernel, which throws the high half away. A comparison of all 64 bits is passed by
// setting one of the high ones (CVE-2019-10063). A pointer is compared with NULL in both halves: see Test.High.
const (
	AnyBit Op = iota // one of Mask's bits is set
	In               // the bits under Mask are one of Values
	NotIn            // the bits under Mask are none of Values
)

// Test is a condition on one argument.
type Test struct {
	Arg    int // 0 to 5
	Op     Op
	Mask   uint32
	Values []uint32
	// High looks at the high 32 bits instead.
	High bool
}

// Holds says whether the condition is true for these arguments.
func (t Test) Holds(args [6]uint64) bool {
	v := uint32(args[t.Arg])
	if t.High {
		v = uint32(args[t.Arg] >> 32)
	}
	v &= t.Mask
	if t.Op == AnyBit {
		return v != 0
	}
	found := false
	for _, w := range t.Values {
		found = found || v == w
	}
	return found == (t.Op == In)
}

// Call is one system call that a rule is about. All of When must hold; an empty When always does.
type Call struct {
	Name string
	When []Test
}

// Rule is one refusal.
type Rule struct {
	// ID is its short name in dumps and tests.
	ID    string
	Calls []Call
	// Answer is what the caller gets.
	Answer Answer
	// Why is the reason, Source where it comes from.
	Why, Source string
	// Nested says in which variant the rule stands.
	Nested Variant
}

// Variant ties a rule to the operator's choice on nested user namespaces.
type Variant int

const (
	Always         Variant = iota // in both
	WithoutNested                 // lifted where commands may make namespaces
	OnlyWithNested                // needed only there
)

// Policy is one filter.
type Policy struct {
	Name string
	// Allowed is the list of calls that are allowed at all; nil allows every call that no rule refuses.
	Allowed []string
	// Otherwise is the answer to a call that Allowed doesn't have.
	Otherwise Answer
	// Rules are asked in order; the first that matches answers.
	Rules []Rule
}

// ForeignABI is the answer to a call through another ABI of the same processor (i386's int 0x80, AArch32). Such a call
// numbers and passes everything differently (socketcall hides the family in memory: facts.md, hole 11). It is a
// kill and not an error: the ABI's exit call would be refused as well, and a program that can't even exit spins or
// crashes confusingly; SIGSYS says what happened. A kernel built without the ABI ends the process too.
const ForeignABI = KillProcess

// X32 is the answer to x32 calls: what a kernel built without x32 says.
const X32 = ENOSYS

// Decide is the filter's answer to one call, by the rules alone.
func (p Policy) Decide(a Arch, audit, nr uint32, args [6]uint64) Answer {
	if audit != a.Audit {
		return ForeignABI
	}
	if a.AltABI != 0 && nr >= a.AltABI {
		return X32
	}
	if p.Allowed != nil && !has(a.numbers(p.Allowed), nr) {
		return p.Otherwise
	}
	for _, m := range p.matches(a)[nr] {
		if all(m.when, args) {
			return m.rule.Answer
		}
	}
	return Allow
}

// match is one rule's condition on one call.
type match struct {
	rule Rule
	when []Test
}

// matches lists the conditions of each system call of an architecture. A name that it doesn't have is left out: arm64
// has no open, chmod or mkdir, only the *at calls.
func (p Policy) matches(a Arch) map[uint32][]match {
	out := map[uint32][]match{}
	for _, r := range p.Rules {
		for _, c := range r.Calls {
			if nr, ok := a.Calls[c.Name]; ok {
				out[nr] = append(out[nr], match{r, c.When})
			}
		}
	}
	return out
}

func (a Arch) numbers(names []string) []uint32 {
	var out []uint32
	for _, n := range names {
		if nr, ok := a.Calls[n]; ok {
			out = append(out, nr)
		}
	}
	return out
}

func all(tests []Test, args [6]uint64) bool {
	for _, t := range tests {
		if !t.Holds(args) {
			return false
		}
	}
	return true
}

func has(list []uint32, v uint32) bool {
	for _, w := range list {
		if w == v {
			return true
		}
	}
	return false
}

// RuleFor names the rule that refuses a call of the native ABI, "" when none does.
func (p Policy) RuleFor(a Arch, nr uint32, args [6]uint64) string {
	for _, m := range p.matches(a)[nr] {
		if all(m.when, args) {
			return m.rule.ID
		}
	}
	return ""
}
