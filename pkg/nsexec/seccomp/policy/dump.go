package policy

import (
	"fmt"
	"io"
	"strings"
)

// Dump writes a policy for a reviewer: first what each system call is answered, then the program itself.
func (p Policy) Dump(w io.Writer, a Arch) error {
	prog, err := p.Assemble(a)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "filter %s for %s: %d instructions\n\n", p.Name, a.GOARCH, len(prog))
	fmt.Fprintf(w, "any ABI but %#x: %s\n", a.Audit, ForeignABI)
	if a.AltABI != 0 {
		fmt.Fprintf(w, "numbers from %#x (x32): %s\n", a.AltABI, X32)
	}
	p.dumpCalls(w, a)
	fmt.Fprintf(w, "\nprogram:\n")
	for i, ins := range prog {
		fmt.Fprintf(w, "%4d  %s\n", i, ins.text(i))
	}
	return nil
}

func (p Policy) dumpCalls(w io.Writer, a Arch) {
	names := map[uint32]string{}
	for n, nr := range a.Calls {
		names[nr] = n
	}
	matches := p.matches(a)
	otherwise := Allow
	if p.Allowed != nil {
		otherwise = p.Otherwise
		allowed := a.numbers(p.Allowed)
		for nr := uint32(0); nr < 1024; nr++ {
			if has(allowed, nr) {
				fmt.Fprintf(w, "%4d %s: allow\n", nr, names[nr])
			}
		}
	}
	for _, nr := range sorted(matches) {
		for _, m := range matches[nr] {
			fmt.Fprintf(w, "%4d %s%s: %s [%s]\n", nr, names[nr], conditions(m.when), m.rule.Answer, m.rule.ID)
		}
	}
	fmt.Fprintf(w, "     anything else: %s\n", otherwise)
}

func conditions(tests []Test) string {
	var parts []string
	for _, t := range tests {
		parts = append(parts, t.String())
	}
	if len(parts) == 0 {
		return ""
	}
	return " if " + strings.Join(parts, " and ")
}

func (t Test) String() string {
	arg := fmt.Sprintf("arg%d", t.Arg)
	if t.High {
		arg += ">>32"
	}
	if t.Op == AnyBit {
		return fmt.Sprintf("%s & %#x", arg, t.Mask)
	}
	if t.Mask != word {
		arg = fmt.Sprintf("(%s & %#x)", arg, t.Mask)
	}
	var values []string
	for _, v := range t.Values {
		values = append(values, fmt.Sprintf("%#x", v))
	}
	op := " in {"
	if t.Op == NotIn {
		op = " not in {"
	}
	return arg + op + strings.Join(values, ", ") + "}"
}

// text is an instruction as a reader of assembly writes it, with absolute targets; at is its own place.
func (i Instruction) text(at int) string {
	yes, no := at+1+int(i.Jt), at+1+int(i.Jf)
	switch i.Code {
	case opLoad:
		return "load " + field(i.K)
	case opAnd:
		return fmt.Sprintf("and %#x", i.K)
	case opJump:
		return fmt.Sprintf("goto %d", at+1+int(i.K))
	case opEqual:
		return fmt.Sprintf("if == %#x goto %d else %d", i.K, yes, no)
	case opGreEq:
		return fmt.Sprintf("if >= %#x goto %d else %d", i.K, yes, no)
	case opSet:
		return fmt.Sprintf("if & %#x goto %d else %d", i.K, yes, no)
	case opRet:
		return "return " + Answer(i.K).String()
	}
	return fmt.Sprintf("unknown code %#x", i.Code)
}

func field(off uint32) string {
	switch {
	case off == offNumber:
		return "number"
	case off == offArch:
		return "arch"
	default:
		return fmt.Sprintf("arg%d", (off-offArgs)/8)
	}
}
