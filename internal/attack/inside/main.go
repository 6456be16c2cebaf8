package inside

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Word is the first argument that makes an attacker of a program.
const Word = "attack-from-inside"

// The lines that an attacker writes begin with these.
const (
	Got   = "got "
	Tried = "tried "
)

// attacker collects what came of an attack.
type attacker struct {
	out   io.Writer
	tried int
}

// got names something that the attacker should not have got.
func (a *attacker) got(format string, args ...any) {
	fmt.Fprintf(a.out, Got+format+"\n", args...)
}

// attempt counts one try, which succeeded if err is nil.
func (a *attacker) attempt(err error, format string, args ...any) {
	a.tried++
	if err == nil {
		a.got(format, args...)
	}
}

var attacks = map[string]func(a *attacker, args []string) error{
	"connect":     connect,
	"descriptors": descriptors,
	"fill":        fill,
	"foreign":     foreign,
	"fork":        fork,
	"comet":       comet,
	"files":       files,
	"leave":       leave,
	"left":        left,
	"look":        look,
	"memory":      memory,
	"namespaces":  namespaces,
	"open":        open,
	"process":     process,
	"setid":       setid,
	"sockets":     sockets,
	"stay":        stay,
	"wait":        wait,
}

// Init ends the program as an attacker if that is what it was started for. Call it first in main.
func Init() {
	if len(os.Args) > 1 && os.Args[1] == Word {
		os.Exit(Main(os.Args[2:], os.Stdout, os.Stderr))
	}
}

// Main runs one attack and gives its exit code: 0 at its end, whatever came of it, 2 when it could not be tried.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 || attacks[args[0]] == nil {
		fmt.Fprintf(stderr, "there is no such attack: %q\n", strings.Join(args, " "))
		return 2
	}
	a := &attacker{out: stdout}
	if err := attacks[args[0]](a, args[1:]); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", args[0], err)
		return 2
	}
	fmt.Fprintf(stdout, Tried+"%d\n", a.tried)
	return 0
}

// wait is no attack: it is there to be seen, until its standard input ends.
func wait(*attacker, []string) error {
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// number reads an argument that is a positive number.
func number(args []string, at int) (int, error) {
	if at >= len(args) {
		return 0, fmt.Errorf("argument %d is missing", at+1)
	}
	n, err := strconv.Atoi(args[at])
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%q is no number above 0", args[at])
	}
	return n, nil
}

// within says whether path is one of the folders, or below one.
func within(path string, folders []string) bool {
	return slices.ContainsFunc(folders, func(f string) bool { return path == f || strings.HasPrefix(path, f+"/") })
}
