// Package wire is what receiptd and a pid1 say to each other over a socket pair: length-prefixed frames with a
// hand-written encoding, because pid1 links nothing but the standard library and x/sys/unix, and encoding/json would
// double its size.
//
//	receiptd                      pid1                         launcher (becomes the command)
//	   | ---- Setup --------------> |                              |
//	   | ---- Setup ------------------------------------------------> |
//	   |                            | -- fork, exec itself ------> |
//	   | <--- Ready --------------- |   <---------- Ready -------- |
//	   |        (waits here, prepared, until there is a command)   |
//	   | ---- Command ---------------------------------------------> | execve, or Failed
//	   | ---- Arm ----------------> |                              |
//	   | ---- Cancel (maybe) -----> |                              |
//	   | <--- Report -------------- | (then it exits: the namespace ends)
//
// Both ends are trusted; a frame that does not decode is still an error, never a guess.
package wire

import (
	"encoding/binary"
	"errors"
	"io"

	"golang.org/x/sys/unix"
)

// Kind says what a frame holds.
type Kind byte

// Kinds of frames, see the package's diagram.
const (
	KindSetup   Kind = 'S'
	KindReady   Kind = 'R'
	KindArm     Kind = 'A'
	KindCommand Kind = 'C'
	KindCancel  Kind = 'X'
	KindReport  Kind = 'P'
	KindFailed  Kind = 'F'
)

// MaxFrame bounds a frame, bytes: a command of 131,071 bytes (MAX_ARG_STRLEN less its NUL) and an environment of up to
// a megabyte fit well.
const MaxFrame = 2 << 20

var (
	errShort = errors.New("frame is too short for what it says it holds")
	errLarge = errors.New("frame is larger than the limit of 2 MiB")
)

// ErrClosed is returned by Read when the other end has closed the socket between two frames.
var ErrClosed = errors.New("the other end is closed")

// Setup fixes what holds for every command of a sandbox. It is sent while a pid1 is prepared.
type Setup struct {
	CommandUID, CommandGID uint32
	// NestedUserns lets commands make user namespaces of their own.
	NestedUserns bool
	// JoinFDs is how many descriptors from FirstJoinFD on are cgroup.procs files that the launcher writes "0" to.
	JoinFDs uint32
	// NProc, NoFile and FSize are RLIMIT_* of the command; NProc and FSize 0 leave the limit as it is.
	NProc, NoFile, FSize uint64
	// Seals are mount points that must stay what they were when the pid1 was prepared.
	Seals []string
}

// Command is what a launcher becomes.
type Command struct {
	Path string
	Argv []string
	Dir  string
	Env  []string
	// Tries, when there are any, are what the launcher tries before it executes Path: a proof's, of what no shell can try.
	Tries []Try
}

// The ways to connect over TCP besides a plain socket; each comes before the name of what it got to.
const (
	// Passed: the socket came over SCM_RIGHTS.
	Passed = "passed "
	// Listened: the socket listened before, and the kernel had bound it (listen(2) without bind(2)).
	Listened = "listened "
)

// Try is a listener that the launcher tries to reach as the command.
type Try struct {
	// Name is what it writes when it gets there, without a line break; over TCP it tries as well with a socket that came over
	// SCM_RIGHTS (Passed is before the name then), and with one that had listened (Listened). Token is what it sends there.
	Name, Token string
	// Address has 4 or 16 bytes, for TCP at Port. With Unix it is a socket's path, or its abstract name after a NUL.
	Address string
	Port    uint32
	Unix    bool
}

// Arm starts pid1's clock. Milliseconds; Timeout is above 0.
type Arm struct {
	TimeoutMS, GraceMS uint64
}

// Ready says that a pid1 or a launcher is prepared. CPU times are what it used so far, in microseconds.
type Ready struct {
	UserUS, SystemUS uint64
	Seals            []SealState
}

// SealState is what a seal's path was found to be.
type SealState struct {
	Path                   string
	MountID, Device, Inode uint64
	ReadOnly               bool
	// SHA256 is that of a file's content; all zero for a folder, of which only itself is compared.
	SHA256 [32]byte
}

// Same says whether two looks found the same, from different mount namespaces: mount ids have no meaning there.
func (s SealState) Same(t SealState) bool {
	s.MountID = t.MountID
	return s == t
}

// Report is pid1's last word. An end of pid1 without one is never the command's exit.
type Report struct {
	// Ended says that the command's own process ended before pid1 did; only then Code and Signal mean something.
	Ended        bool
	Code, Signal uint32
	TimedOut     bool
	Cancelled    bool
	// SealsBroken names seals that are not what they were; nil when all hold.
	SealsBroken []string
	// UserUS and SystemUS are pid1's own CPU time in microseconds, which is not the command's.
	UserUS, SystemUS uint64
	// AtNS is when the command had ended, or its time was over: CLOCK_MONOTONIC, which every namespace here shares, in
	// nanoseconds; 0 where it can't be read.
	AtNS uint64
}

// Failed says why a launcher could not become the command: it certainly never ran.
type Failed struct {
	Reason string
}

// MonotonicNS is CLOCK_MONOTONIC in nanoseconds; 0 where it can't be read.
func MonotonicNS() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return uint64(ts.Nano())
}

type encoder []byte

func (e *encoder) num(v uint64) { *e = binary.LittleEndian.AppendUint64(*e, v) }
func (e *encoder) str(s string) { e.num(uint64(len(s))); *e = append(*e, s...) }
func (e *encoder) strs(s []string) {
	e.num(uint64(len(s)))
	for _, x := range s {
		e.str(x)
	}
}
func (e *encoder) flag(b bool) {
	if b {
		e.num(1)
	} else {
		e.num(0)
	}
}

type decoder struct {
	b   []byte
	err error
}

func (d *decoder) num() uint64 {
	if d.err != nil || len(d.b) < 8 {
		d.err = errShort
		return 0
	}
	v := binary.LittleEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

func (d *decoder) str() string {
	n := d.num()
	if d.err != nil || n > uint64(len(d.b)) {
		d.err = errShort
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

// count reads the length of a list whose elements take at least min bytes each, so that a wrong length can't make
// the reader allocate.
func (d *decoder) count(min uint64) int {
	n := d.num()
	if d.err != nil || n > uint64(len(d.b))/min {
		d.err = errShort
		return 0
	}
	return int(n)
}

func (d *decoder) strs() []string {
	n := d.count(8)
	if n == 0 {
		return nil
	}
	s := make([]string, 0, n)
	for range n {
		s = append(s, d.str())
	}
	return s
}

func (d *decoder) digest() (sum [32]byte) {
	if s := d.str(); len(s) == len(sum) {
		copy(sum[:], s)
	} else {
		d.err = errShort
	}
	return sum
}

func (d *decoder) flag() bool { return d.num() == 1 }

func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		d.err = errors.New("frame is longer than what it holds")
	}
	return d.err
}

func encodeSeals(e *encoder, seals []SealState) {
	e.num(uint64(len(seals)))
	for _, s := range seals {
		e.str(s.Path)
		e.num(s.MountID)
		e.num(s.Device)
		e.num(s.Inode)
		e.flag(s.ReadOnly)
		e.str(string(s.SHA256[:]))
	}
}

func decodeSeals(d *decoder) []SealState {
	n := d.count(6*8 + 32)
	if n == 0 {
		return nil
	}
	seals := make([]SealState, 0, n)
	for range n {
		seals = append(seals, SealState{d.str(), d.num(), d.num(), d.num(), d.flag(), d.digest()})
	}
	return seals
}

// Encode gives the frame's body.
func (s Setup) Encode() []byte {
	var e encoder
	e.num(uint64(s.CommandUID))
	e.num(uint64(s.CommandGID))
	e.flag(s.NestedUserns)
	e.num(uint64(s.JoinFDs))
	e.num(s.NProc)
	e.num(s.NoFile)
	e.num(s.FSize)
	e.strs(s.Seals)
	return e
}

// DecodeSetup reads what Encode wrote.
func DecodeSetup(b []byte) (Setup, error) {
	d := decoder{b: b}
	s := Setup{uint32(d.num()), uint32(d.num()), d.flag(), uint32(d.num()), d.num(), d.num(), d.num(), d.strs()}
	return s, d.end()
}

// tryMin is what a Try takes at least, bytes.
const tryMin = 5 * 8

// Encode gives the frame's body.
func (c Command) Encode() []byte {
	var e encoder
	e.str(c.Path)
	e.strs(c.Argv)
	e.str(c.Dir)
	e.strs(c.Env)
	e.num(uint64(len(c.Tries)))
	for _, t := range c.Tries {
		e.str(t.Name)
		e.str(t.Token)
		e.str(t.Address)
		e.num(uint64(t.Port))
		e.flag(t.Unix)
	}
	return e
}

// DecodeCommand reads what Encode wrote.
func DecodeCommand(b []byte) (Command, error) {
	d := decoder{b: b}
	c := Command{Path: d.str(), Argv: d.strs(), Dir: d.str(), Env: d.strs()}
	for range d.count(tryMin) {
		c.Tries = append(c.Tries, Try{Name: d.str(), Token: d.str(), Address: d.str(), Port: uint32(d.num()), Unix: d.flag()})
	}
	return c, d.end()
}

// Encode gives the frame's body.
func (a Arm) Encode() []byte {
	var e encoder
	e.num(a.TimeoutMS)
	e.num(a.GraceMS)
	return e
}

// DecodeArm reads what Encode wrote.
func DecodeArm(b []byte) (Arm, error) {
	d := decoder{b: b}
	a := Arm{d.num(), d.num()}
	return a, d.end()
}

// Encode gives the frame's body.
func (r Ready) Encode() []byte {
	var e encoder
	e.num(r.UserUS)
	e.num(r.SystemUS)
	encodeSeals(&e, r.Seals)
	return e
}

// DecodeReady reads what Encode wrote.
func DecodeReady(b []byte) (Ready, error) {
	d := decoder{b: b}
	r := Ready{d.num(), d.num(), decodeSeals(&d)}
	return r, d.end()
}

// Encode gives the frame's body.
func (r Report) Encode() []byte {
	var e encoder
	e.flag(r.Ended)
	e.num(uint64(r.Code))
	e.num(uint64(r.Signal))
	e.flag(r.TimedOut)
	e.flag(r.Cancelled)
	e.strs(r.SealsBroken)
	e.num(r.UserUS)
	e.num(r.SystemUS)
	e.num(r.AtNS)
	return e
}

// DecodeReport reads what Encode wrote.
func DecodeReport(b []byte) (Report, error) {
	d := decoder{b: b}
	r := Report{d.flag(), uint32(d.num()), uint32(d.num()), d.flag(), d.flag(), d.strs(), d.num(), d.num(), d.num()}
	return r, d.end()
}

// Encode gives the frame's body.
func (f Failed) Encode() []byte {
	var e encoder
	e.str(f.Reason)
	return e
}

// DecodeFailed reads what Encode wrote.
func DecodeFailed(b []byte) (Failed, error) {
	d := decoder{b: b}
	f := Failed{d.str()}
	return f, d.end()
}

// Frame puts the header before a body: four bytes of length (of kind and body), one of kind.
func Frame(k Kind, body []byte) []byte {
	b := make([]byte, 0, 5+len(body))
	b = binary.LittleEndian.AppendUint32(b, uint32(1+len(body)))
	b = append(b, byte(k))
	return append(b, body...)
}

// Reader is where Read takes bytes from.
type Reader interface{ Read(p []byte) (int, error) }

// Read reads one frame. It answers ErrClosed when the other end closed the socket before a frame began.
func Read(r Reader) (Kind, []byte, error) {
	var head [5]byte
	if err := readFull(r, head[:1]); err != nil {
		return 0, nil, err
	}
	if err := readFull(r, head[1:]); err != nil {
		return 0, nil, unexpected(err)
	}
	n := binary.LittleEndian.Uint32(head[:4])
	if n == 0 {
		return 0, nil, errShort
	}
	if n > MaxFrame {
		return 0, nil, errLarge
	}
	body := make([]byte, n-1)
	if err := readFull(r, body); err != nil {
		return 0, nil, unexpected(err)
	}
	return Kind(head[4]), body, nil
}

func unexpected(err error) error {
	if err == ErrClosed {
		return errors.New("the other end closed in the middle of a frame")
	}
	return err
}

func readFull(r Reader, b []byte) error {
	for len(b) > 0 {
		n, err := r.Read(b)
		if n > 0 {
			b = b[n:]
			continue
		}
		if err != nil && err != io.EOF {
			return err
		}
		return ErrClosed
	}
	return nil
}

// FD reads and writes a blocking descriptor without package os, which pid1 does without.
type FD int

// Read is read(2), repeated when a signal interrupted it; 0 and ErrClosed at the end.
func (fd FD) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), b)
		if err == unix.EINTR {
			continue
		}
		if n == 0 && err == nil && len(b) > 0 {
			return 0, ErrClosed
		}
		return n, err
	}
}

// WriteAll writes all of b.
func (fd FD) WriteAll(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(int(fd), b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
