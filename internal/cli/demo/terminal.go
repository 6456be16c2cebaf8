package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// screen writes for a person. Colours are on only where somebody looks at a terminal and did not ask for none.
type screen struct {
	w      io.Writer
	colour bool
}

const (
	lineWidth = 96
	maxLines  = 8 // of one stream of one command
)

// UseColour says whether f shows colours: a terminal that isn't dumb, and no NO_COLOR (no-color.org).
func UseColour(f *os.File) bool {
	if os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
)

func (s *screen) paint(style, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return "\x1b[" + style + "m" + text + "\x1b[0m"
}

func (s *screen) line(format string, args ...any) {
	fmt.Fprintf(s.w, format+"\n", args...)
}

// heading opens a step.
func (s *screen) heading(number int, title, why string) {
	text := title
	if number > 0 {
		text = fmt.Sprintf("%d  %s", number, title)
	}
	rule := strings.Repeat("─", max(2, lineWidth-4-utf8.RuneCountInString(text)))
	s.line("")
	s.line("%s %s %s", s.paint(dim, "──"), s.paint(bold, text), s.paint(dim, rule))
	for _, l := range wrap(why, lineWidth-3) {
		s.line("   %s", l)
	}
}

// command shows what is run. A long one goes over several lines, as it was written.
func (s *screen) command(text string) {
	for i, l := range strings.Split(text, "\n") {
		mark := "$"
		if i > 0 {
			mark = " "
		}
		s.line("   %s %s", s.paint(cyan, mark), s.paint(cyan, l))
	}
}

// output shows the beginning and the end of a stream, made harmless: it comes from an untrusted command.
func (s *screen) output(b []byte, whole uint64) {
	text := strings.TrimRight(harmless(b), "\n")
	if text == "" {
		return
	}
	lines := strings.Split(text, "\n")
	shown := lines
	left := 0
	if len(lines) > maxLines {
		left = len(lines) - maxLines + 1
		shown = lines[:maxLines/2]
	}
	put := func(ls []string) {
		for _, l := range ls {
			s.line("   %s %s", s.paint(dim, "│"), clip(l, lineWidth-5))
		}
	}
	put(shown)
	if left > 0 {
		note := fmt.Sprintf("… %d lines", left)
		if whole > uint64(len(b)) {
			note = fmt.Sprintf("… (%s in all)", size(whole))
		}
		s.line("   %s %s", s.paint(dim, "│"), s.paint(dim, note))
		put(lines[len(lines)-(maxLines-1-maxLines/2):])
	}
}

// result shows how a command ended.
func (s *screen) result(text string, plain bool) {
	style := yellow
	if plain {
		style = bold
	}
	s.line("   %s %s", s.paint(dim, "└"), s.paint(style, text))
}

func (s *screen) check(c check) {
	mark, style := "✓", green
	if !c.holds {
		mark, style = "✗", red
	}
	lines := wrap(c.what, lineWidth-7)
	s.line("     %s %s", s.paint(style, mark), lines[0])
	for _, l := range lines[1:] {
		s.line("       %s", l)
	}
	if !c.holds && c.detail != "" {
		for _, l := range wrap(harmless([]byte(c.detail)), lineWidth-9) {
			s.line("         %s", s.paint(red, l))
		}
	}
}

// harmless replaces what would steer a terminal, and invalid UTF-8.
func harmless(b []byte) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' {
			return r
		}
		if r == '\t' {
			return ' '
		}
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return '·'
		}
		return r
	}, strings.ToValidUTF8(string(b), "\uFFFD"))
}

func clip(line string, width int) string {
	r := []rune(line)
	if len(r) <= width {
		return line
	}
	return string(r[:width-1]) + "…"
}

// wrap breaks at spaces; a word that is too long stands alone. It gives at least one line.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

// size is a number of bytes as people say it.
func size(n uint64) string {
	switch {
	case n < 10_000:
		return fmt.Sprintf("%d B", n)
	case n < 10_000_000:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	default:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
}
