package policy

import (
	"fmt"
	"sort"
)

// Instruction is one instruction of classic BPF, laid out as struct sock_filter.
type Instruction struct {
	Code   uint16
	Jt, Jf uint8
	K      uint32
}

// Instruction codes (linux/bpf_common.h) and the offsets of struct seccomp_data (linux/seccomp.h).
const (
	opLoad  = 0x20 // BPF_LD|BPF_W|BPF_ABS
	opAnd   = 0x54 // BPF_ALU|BPF_AND|BPF_K
	opJump  = 0x05 // BPF_JMP|BPF_JA
	opEqual = 0x15 // BPF_JMP|BPF_JEQ|BPF_K
	opGreEq = 0x35 // BPF_JMP|BPF_JGE|BPF_K
	opSet   = 0x45 // BPF_JMP|BPF_JSET|BPF_K
	opRet   = 0x06 // BPF_RET|BPF_K

	offNumber, offArch, offArgs = 0, 4, 16

	// maxInstructions is the kernel's BPF_MAXINSNS.
	maxInstructions = 4096
)

// builder makes a program from its end: a jump goes forward only, so the target of every jump is there already when
// the jump is made. Jumps of more than 255 get an intermediate one. (The way of Chromium's bpf_dsl.)
type builder struct {
	rev  []Instruction
	rets map[Answer]node
}

// node is a place in the program, counted from its end.
type node int

func (b *builder) add(i Instruction) node {
	b.rev = append(b.rev, i)
	return node(len(b.rev) - 1)
}

// distance is how many instructions the next one to be made would skip to reach n.
func (b *builder) distance(n node) int { return len(b.rev) - 1 - int(n) }

func (b *builder) ret(a Answer) node {
	if n, ok := b.rets[a]; ok {
		return n
	}
	b.rets[a] = b.add(Instruction{Code: opRet, K: uint32(a)})
	return b.rets[a]
}

// fall makes sure that the next instruction falls through to n.
func (b *builder) fall(n node) {
	if d := b.distance(n); d > 0 {
		b.add(Instruction{Code: opJump, K: uint32(d)})
	}
}

func (b *builder) then(code uint16, k uint32, next node) node {
	b.fall(next)
	return b.add(Instruction{Code: code, K: k})
}

// near returns a place within reach of the next `spare`+1 instructions from which n is reached.
func (b *builder) near(n node, spare int) node {
	if d := b.distance(n); d+spare > 255 {
		return b.add(Instruction{Code: opJump, K: uint32(d)})
	}
	return n
}

func (b *builder) branch(code uint16, k uint32, yes, no node) node {
	if yes == no {
		return yes
	}
	yes = b.near(yes, 1) // one may follow for the other target
	no = b.near(no, 0)
	return b.add(Instruction{Code: code, Jt: uint8(b.distance(yes)), Jf: uint8(b.distance(no)), K: k})
}

// test makes the instructions of one condition.
func (b *builder) test(t Test, yes, no node) node {
	load := uint32(offArgs + 8*t.Arg) // both architectures are little endian: the low half comes first
	if t.High {
		load += 4
	}
	if t.Op == AnyBit {
		return b.then(opLoad, load, b.branch(opSet, t.Mask, yes, no))
	}
	if t.Op == NotIn {
		yes, no = no, yes
	}
	next := no
	for i := len(t.Values) - 1; i >= 0; i-- {
		next = b.branch(opEqual, t.Values[i], yes, next)
	}
	if t.Mask != word {
		next = b.then(opAnd, t.Mask, next)
	}
	return b.then(opLoad, load, next)
}

// chain makes the rules of one system call.
func (b *builder) chain(ms []match) node {
	next := b.ret(Allow)
	for i := len(ms) - 1; i >= 0; i-- {
		yes, no := b.ret(ms[i].rule.Answer), next
		for j := len(ms[i].when) - 1; j >= 0; j-- {
			yes = b.test(ms[i].when[j], yes, no)
		}
		next = yes
	}
	return next
}

// span is a run of system call numbers that have the same answer, from From to the next span's From.
type span struct {
	from uint32
	to   node
}

// spans sorts the answers by number and joins equal neighbours.
func spans(special map[uint32]node, otherwise node) []span {
	out := []span{{0, otherwise}}
	put := func(from uint32, to node) {
		last := &out[len(out)-1]
		if last.from == from {
			last.to = to
		} else if last.to != to {
			out = append(out, span{from, to})
		}
	}
	numbers := make([]uint32, 0, len(special))
	for nr := range special {
		numbers = append(numbers, nr)
	}
	sort.Slice(numbers, func(i, j int) bool { return numbers[i] < numbers[j] })
	for _, nr := range numbers {
		put(nr, special[nr])
		put(nr+1, otherwise)
	}
	return join(out)
}

func join(in []span) []span {
	out := in[:1]
	for _, s := range in[1:] {
		if out[len(out)-1].to != s.to {
			out = append(out, s)
		}
	}
	return out
}

// search makes a binary search over the spans.
func (b *builder) search(s []span) node {
	if len(s) == 1 {
		return s[0].to
	}
	mid := len(s) / 2
	high := b.search(s[mid:])
	low := b.search(s[:mid])
	return b.branch(opGreEq, s[mid].from, high, low)
}

// Assemble makes the program of a policy. The order of its checks: the ABI, x32, then the number by binary search.
func (p Policy) Assemble(a Arch) ([]Instruction, error) {
	b := &builder{rets: map[Answer]node{}}
	otherwise := b.ret(Allow)
	special := map[uint32]node{}
	matches := p.matches(a)
	if p.Allowed == nil {
		for _, nr := range sorted(matches) {
			special[nr] = b.chain(matches[nr])
		}
	} else {
		otherwise = b.ret(p.Otherwise)
		for _, nr := range a.numbers(p.Allowed) {
			if _, done := special[nr]; !done {
				special[nr] = b.chain(matches[nr])
			}
		}
	}
	start := b.search(spans(special, otherwise))
	if a.AltABI != 0 {
		start = b.branch(opGreEq, a.AltABI, b.ret(X32), start)
	}
	start = b.then(opLoad, offNumber, start)
	start = b.branch(opEqual, a.Audit, start, b.ret(ForeignABI))
	b.then(opLoad, offArch, start)
	if len(b.rev) > maxInstructions {
		return nil, fmt.Errorf("assembling %s for %s: %d instructions, the kernel takes %d: shorten the rules", p.Name, a.GOARCH, len(b.rev), maxInstructions)
	}
	prog := make([]Instruction, len(b.rev))
	for i, ins := range b.rev {
		prog[len(prog)-1-i] = ins
	}
	return prog, nil
}

func sorted(m map[uint32][]match) []uint32 {
	var out []uint32
	for nr := range m {
		out = append(out, nr)
	}
	sort.Slice(out, func(i, j int) bool { return out[i] < out[j] })
	return out
}
