package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// structured is a result for a program. A status is always there; what is not known is left out.
type structured struct {
	Status string `json:"status"`
	// MayHaveTakenEffect is false only where the command certainly did not run.
	MayHaveTakenEffect bool     `json:"may_have_taken_effect"`
	ExitCode           *int32   `json:"exit_code,omitempty"`
	Signal             string   `json:"signal,omitempty"`
	OutOfMemory        bool     `json:"out_of_memory,omitempty"`
	Reason             string   `json:"reason,omitempty"`
	Stdout             string   `json:"stdout"`
	Stderr             string   `json:"stderr"`
	StdoutInfo         *outInfo `json:"stdout_info,omitempty"`
	StderrInfo         *outInfo `json:"stderr_info,omitempty"`
	DurationMS         *int64   `json:"duration_ms,omitempty"`
	ExecID             string   `json:"exec_id"`
	Generation         uint64   `json:"generation,omitempty"`
	ReceiptSHA256      string   `json:"receipt_sha256,omitempty"`
	Harvest            *harvest `json:"harvest,omitempty"`
	Refused            []string `json:"refused_destinations,omitempty"`
}

// outInfo is what is true of a stream, whatever of it is shown.
type outInfo struct {
	Bytes  uint64 `json:"bytes"`
	SHA256 string `json:"sha256"`
	// Truncated: the bytes from OmittedFrom on, OmittedBytes of them, are not in the text.
	Truncated    bool   `json:"truncated"`
	OmittedFrom  uint64 `json:"omitted_from"`
	OmittedBytes uint64 `json:"omitted_bytes"`
	// Replaced: bytes that are no text, or would act on a terminal, are shown as other characters.
	Replaced bool `json:"replaced"`
	// File is in the sandbox and holds the first FileBytes bytes of the stream.
	File      string `json:"output_file,omitempty"`
	FileBytes uint64 `json:"output_file_bytes,omitempty"`
}

type harvest struct {
	Status   string   `json:"status"`
	Refs     []string `json:"refs,omitempty"`
	Conflict string   `json:"conflict,omitempty"`
	Detail   string   `json:"detail,omitempty"`
}

var outputSchema = must(map[string]any{
	"type": "object",
	"properties": map[string]any{
		"status": map[string]any{
			"type": "string", "enum": []string{"EXITED", "SIGNALED", "TIMED_OUT", "KILLED", "CANCELLED", "NOT_STARTED", "UNCERTAIN"},
		},
		"may_have_taken_effect": map[string]any{"type": "boolean", "description": "false: it certainly did not run"},
		"exit_code":             map[string]any{"type": "integer", "description": "with EXITED"},
		"signal":                map[string]any{"type": "string", "description": "with SIGNALED, for example SIGKILL"},
		"out_of_memory":         map[string]any{"type": "boolean"},
		"reason":                map[string]any{"type": "string"},
		"stdout":                map[string]any{"type": "string"},
		"stderr":                map[string]any{"type": "string"},
		"stdout_info":           infoSchema,
		"stderr_info":           infoSchema,
		"duration_ms":           map[string]any{"type": "integer"},
		"exec_id":               map[string]any{"type": "string"},
		"generation":            map[string]any{"type": "integer"},
		"receipt_sha256":        map[string]any{"type": "string", "description": "of the receipt's file"},
		"harvest": map[string]any{
			"type": "object", "description": "what of the command's Git work came to the repository",
			"properties": map[string]any{
				"status": map[string]any{"type": "string"}, "conflict": map[string]any{"type": "string"}, "detail": map[string]any{"type": "string"},
				"refs": map[string]any{"type": "array", "items": map[string]any{"type": "string"}},
			},
			"required": []string{"status"},
		},
		"refused_destinations": map[string]any{"type": "array", "items": map[string]any{"type": "string"}},
	},
	"required": []string{"status", "may_have_taken_effect", "stdout", "stderr", "exec_id"},
})

var infoSchema = map[string]any{
	"type": "object",
	"properties": map[string]any{
		"bytes":             map[string]any{"type": "integer", "description": "that the command wrote in all"},
		"sha256":            map[string]any{"type": "string", "description": "of all of them"},
		"truncated":         map[string]any{"type": "boolean"},
		"omitted_from":      map[string]any{"type": "integer"},
		"omitted_bytes":     map[string]any{"type": "integer"},
		"replaced":          map[string]any{"type": "boolean", "description": "bytes that are no text are shown as other characters"},
		"output_file":       map[string]any{"type": "string", "description": "file in the sandbox with the stream from its beginning on"},
		"output_file_bytes": map[string]any{"type": "integer"},
	},
	"required": []string{"bytes", "sha256", "truncated", "omitted_from", "omitted_bytes", "replaced"},
}

const (
	inspectFirst = "It may have taken effect, wholly or partly. Do not just run it again: inspect first (git status, the files that it writes)."
	didNotRun    = "It certainly did not run; it can be sent again."
)

// answer is a result for a model and for a program. The first block is this program's own words; what the command printed
// stands in blocks of its own, so that it can't pass for them.
func answer(r *sandboxv1.ExecResult, textBytes int) *sdk.CallToolResult {
	s := &structured{
		Status: r.GetStatus().String(), MayHaveTakenEffect: r.GetStatus() != sandboxv1.ExecResult_NOT_STARTED,
		OutOfMemory: r.GetOom(), Reason: plain(r.GetReason()), ExecID: r.GetExecId(), Generation: r.GetGeneration(),
		Refused: names(r.GetRefusedDestinations()), Harvest: harvestOf(r.GetHarvest()),
	}
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED:
		code := r.GetExitCode()
		s.ExitCode = &code
	case sandboxv1.ExecResult_SIGNALED:
		s.Signal = signalName(r.GetSignal())
	}
	if r.GetDuration() != nil {
		ms := r.GetDuration().AsDuration().Milliseconds()
		s.DurationMS = &ms
	}
	if len(r.GetReceipt()) > 0 {
		sum := sha256.Sum256(r.GetReceipt())
		s.ReceiptSHA256 = hex.EncodeToString(sum[:])
	}
	s.Stdout, s.StdoutInfo = shown(r.GetStdout(), r.GetStdoutInfo(), textBytes)
	s.Stderr, s.StderrInfo = shown(r.GetStderr(), r.GetStderrInfo(), textBytes)
	blocks := []string{s.headline(r)}
	if s.Stdout != "" {
		blocks = append(blocks, "stdout:\n"+s.Stdout)
	}
	if s.Stderr != "" {
		blocks = append(blocks, "stderr:\n"+s.Stderr)
	}
	return s.result(!ownEnd(r.GetStatus()), blocks...)
}

// ownEnd says whether the command came to an end of its own, good or bad: then the tool did what it is for.
func ownEnd(s sandboxv1.ExecResult_Status) bool {
	return s == sandboxv1.ExecResult_EXITED || s == sandboxv1.ExecResult_SIGNALED
}

// failed is a call that has no result.
func failed(err error, id string) *sdk.CallToolResult {
	s := &structured{Status: sandboxv1.ExecResult_UNCERTAIN.String(), MayHaveTakenEffect: true, Reason: plain(err.Error()), ExecID: id}
	what := inspectFirst
	if f, ok := errors.AsType[*failure](err); ok && f.never {
		s.Status, s.MayHaveTakenEffect, what = sandboxv1.ExecResult_NOT_STARTED.String(), false, "It certainly did not run."
	}
	return s.result(true, s.Status+": "+s.Reason+"\n"+what)
}

func (s *structured) result(isError bool, blocks ...string) *sdk.CallToolResult {
	r := &sdk.CallToolResult{StructuredContent: s, IsError: isError}
	for _, b := range blocks {
		r.Content = append(r.Content, &sdk.TextContent{Text: b})
	}
	return r
}

// headline is the first block.
func (s *structured) headline(r *sandboxv1.ExecResult) string {
	lines := []string{s.ending(r)}
	switch {
	case !s.MayHaveTakenEffect:
		lines = append(lines, didNotRun)
	case !ownEnd(r.GetStatus()):
		lines = append(lines, inspectFirst)
	}
	if s.MayHaveTakenEffect && s.StdoutInfo != nil && s.Stdout == "" && s.Stderr == "" {
		lines = append(lines, "No output.")
	}
	lines = append(lines, cutLine("stdout", s.StdoutInfo)...)
	lines = append(lines, cutLine("stderr", s.StderrInfo)...)
	if h := s.Harvest; h != nil {
		lines = append(lines, h.line())
	}
	if len(s.Refused) > 0 {
		lines = append(lines, "Refused destinations: "+strings.Join(s.Refused, ", ")+".")
	}
	return strings.Join(lines, "\n")
}

func (s *structured) ending(r *sandboxv1.ExecResult) string {
	line := s.Status
	switch {
	case s.ExitCode != nil:
		line += fmt.Sprintf(" with code %d", *s.ExitCode)
	case s.Signal != "":
		line += " by " + s.Signal
	}
	if s.OutOfMemory {
		line += ", out of memory"
	}
	if r.GetDuration() != nil {
		line += fmt.Sprintf(" after %s", r.GetDuration().AsDuration().Round(time.Millisecond))
	}
	if s.Reason != "" {
		line += ": " + s.Reason
	}
	return line
}

// cutLine says of a stream what is not shown, and how to see it.
func cutLine(name string, i *outInfo) []string {
	if i == nil || !i.Truncated {
		return nil
	}
	text := fmt.Sprintf("%s has %d bytes; %d in its middle are not shown.", name, i.Bytes, i.OmittedBytes)
	switch {
	case i.File == "":
		text += " They are not kept: to see them, run it again with its output in a file (> \"$TMPDIR/out\"), if it may run again."
	case i.FileBytes < i.Bytes:
		text += fmt.Sprintf(" Its first %d bytes are in %s: use grep, head, tail or sed on it.", i.FileBytes, i.File)
	default:
		text += fmt.Sprintf(" All of it is in %s: use grep, head, tail or sed on it.", i.File)
	}
	return []string{text}
}

func harvestOf(h *sandboxv1.Harvest) *harvest {
	if h == nil {
		return nil
	}
	return &harvest{Status: h.GetStatus(), Refs: names(h.GetRefs()), Conflict: name(h.GetConflict()), Detail: name(h.GetDetail())}
}

// line is what a model needs to know of its commits.
func (h *harvest) line() string {
	text := "Git: " + h.Status
	if len(h.Refs) > 0 {
		text += " " + strings.Join(h.Refs, ", ")
	}
	if h.Conflict != "" {
		text += ": " + h.Conflict
	}
	if h.Detail != "" {
		text += " (" + h.Detail + ")"
	}
	return text
}

// shown is the text of a stream, at most limit bytes of it before what is no text is replaced: head, a line about what is
// left out, and tail.
func shown(kept []byte, info *sandboxv1.OutputInfo, limit int) (string, *outInfo) {
	if info == nil {
		return "", nil
	}
	head, tail := kept, []byte(nil)
	if info.GetTruncated() {
		n := min(info.GetOmittedFrom(), uint64(len(kept)))
		head, tail = kept[:n], kept[n:]
	}
	if info.GetTruncated() || len(kept) > limit {
		head, tail = head[:wholeRunes(head, min(len(head), (limit+1)/2))], lastOf(kept, tail, limit/2)
	}
	i := &outInfo{Bytes: info.GetBytes(), SHA256: info.GetSha256(), File: info.GetFile(), FileBytes: info.GetFileBytes()}
	i.OmittedFrom, i.OmittedBytes = uint64(len(head)), info.GetBytes()-uint64(len(head)+len(tail))
	i.Truncated = i.OmittedBytes > 0
	text, a := harmless(head)
	if !i.Truncated {
		i.OmittedFrom = i.Bytes
		i.Replaced = a
		return text, i
	}
	end, b := harmless(tail)
	i.Replaced = a || b
	return text + fmt.Sprintf("\n[%d bytes are left out here]\n", i.OmittedBytes) + end, i
}

// lastOf is the end of a stream: of its tail where the kept output has a hole before that, else of all that is kept.
func lastOf(kept, tail []byte, limit int) []byte {
	from := kept
	if tail != nil {
		from = tail
	}
	at := max(0, len(from)-limit)
	for at < len(from) && at > 0 && !utf8.RuneStart(from[at]) && len(from)-at > limit-utf8.UTFMax {
		at++
	}
	return from[at:]
}

// wholeRunes moves a cut of b back to before a character that it would divide.
func wholeRunes(b []byte, cut int) int {
	for back := 0; back < utf8.UTFMax && cut-back > 0; back++ {
		if cut-back == len(b) || utf8.RuneStart(b[cut-back]) {
			return cut - back
		}
	}
	return cut
}

// controls is where Unicode keeps pictures of the control characters: U+2400 for NUL and so on.
const controls = 0x2400

// harmless makes text of bytes: what is no UTF-8 becomes U+FFFD, and what would act on a terminal or be swallowed on its
// way becomes a picture of itself. It says whether anything was replaced.
func harmless(b []byte) (string, bool) {
	replaced := false
	var out strings.Builder
	out.Grow(len(b))
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		b = b[n:]
		shown := r
		switch {
		case r == utf8.RuneError && n == 1:
			replaced = true
		case r == '\n' || r == '\t':
		case r < 0x20:
			shown, replaced = controls+r, true
		case r == 0x7f:
			shown, replaced = controls+0x21, true
		case 0x80 <= r && r < 0xa0:
			shown, replaced = utf8.RuneError, true
		}
		out.WriteRune(shown)
	}
	return out.String(), replaced
}

// plain is a sentence of the agent's: it may hold names that a command chose.
func plain(s string) string {
	text, _ := harmless([]byte(s))
	return text
}

// name is a text in which a command may have chosen a name, fit to stand among this program's own words: what doesn't
// print, spaces of other kinds and what turns the direction of writing included, is written as its code.
func name(s string) string {
	var b strings.Builder
	for _, r := range plain(s) {
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, "\\u%04x", r)
		}
	}
	return b.String()
}

func names(list []string) []string {
	var out []string
	for _, s := range list {
		out = append(out, name(s))
	}
	return out
}

// signalName is "SIGKILL" for 9.
func signalName(n int32) string {
	if s := unix.SignalName(unix.Signal(n)); s != "" {
		return s
	}
	return fmt.Sprintf("signal %d", n)
}
